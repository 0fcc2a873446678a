package natskv

import (
	"fmt"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/discovery"
)

func TestAServerThatLacksAWriteIsBehind(t *testing.T) {
	t.Parallel()
	begin := time.Unix(1000, 0)
	o := newOwn()
	o.keep(newCommit("n", []discovery.Operation{discovery.Put("a/b", nil, 0), discovery.Put("c/d", nil, 0)}), 8, begin)
	for name, test := range map[string]struct {
		below   discovery.Key
		records map[discovery.Key]record
		after   time.Duration
		want    bool
	}{
		"it has none":             {below: "a", want: false},
		"it has an older one":     {below: "a", records: map[discovery.Key]record{"a/b": {sequence: 6}}, want: false},
		"it has it":               {below: "a", records: map[discovery.Key]record{"a/b": {sequence: 7}}, want: true},
		"it has a newer one":      {below: "a", records: map[discovery.Key]record{"a/b": {sequence: 9, deleted: true}}, want: true},
		"it has one of two":       {below: "", records: map[discovery.Key]record{"a/b": {sequence: 7}}, want: false},
		"what is below is others": {below: "e", want: true},
		"that was long ago":       {below: "a", after: ownFor + 1, want: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := o.among(test.records, test.below, begin.Add(test.after)); got != test.want {
				t.Errorf("it has what was written: %t", got)
			}
		})
	}
}

func TestWritesThatAreRememberedAreBounded(t *testing.T) {
	t.Parallel()
	o := newOwn()
	for i := range 3 * maxOwn {
		o.keep(newCommit("n", []discovery.Operation{discovery.Put(discovery.KeyOf(fmt.Sprint(i)), nil, 0)}), uint64(i), time.Unix(int64(i), 0))
		if len(o.written) > maxOwn {
			t.Fatalf("%d writes are remembered", len(o.written))
		}
	}
}
