package natskv

import (
	"errors"
	"testing"

	"github.com/stagemesh/stagemesh/discovery"
)

func TestLastMessageSettlesLostAnswer(t *testing.T) {
	t.Parallel()
	const own = "own"
	entry := func(sequence uint64, m mark) record { return record{sequence: sequence, mark: m} }
	marker := func(sequence uint64, m mark) record {
		return record{sequence: sequence, mark: m, deleted: true}
	}
	for name, test := range map[string]struct {
		expect      discovery.Revision
		lost, moved bool
		last        record
		want        error
		revision    discovery.Revision
		sequence    uint64
	}{
		"it was made":                          {expect: 7, lost: true, last: entry(9, mark{own, 7}), revision: 9},
		"another was first":                    {expect: 7, last: entry(9, mark{"other", 7}), want: discovery.ErrConflict},
		"another was first, an answer lost":    {expect: 7, lost: true, last: entry(9, mark{"other", 7}), want: discovery.ErrConflict},
		"others may have replaced it":          {expect: 7, lost: true, last: entry(12, mark{"other", 9}), want: discovery.ErrUnknown},
		"another program wrote":                {expect: 0, lost: true, last: entry(12, mark{}), want: discovery.ErrUnknown},
		"deleted, and the marker expired":      {expect: 7, lost: true, want: discovery.ErrUnknown},
		"nothing has happened":                 {expect: 7, lost: true, last: entry(7, mark{"other", 1}), sequence: 7},
		"no entry, but a marker":               {expect: 0, last: marker(8, mark{"other", 7}), sequence: 8},
		"a marker is not an entry":             {expect: 8, last: marker(8, mark{"other", 7}), want: discovery.ErrConflict},
		"another was first at a later attempt": {expect: 0, lost: true, moved: true, last: entry(9, mark{"other", 0}), want: discovery.ErrUnknown},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newChange("subject", test.expect)
			c.nonce, c.lost, c.moved = own, test.lost, test.moved
			revision, err := c.settle(test.last)
			if revision != test.revision || !errors.Is(err, test.want) {
				t.Fatalf("it has revision %d, %v", revision, err)
			}
			if test.want == nil && test.revision == 0 && c.sequence != test.sequence {
				t.Errorf("it expects sequence %d, want %d", c.sequence, test.sequence)
			}
		})
	}
}

func FuzzReadMark(f *testing.F) {
	f.Add("nonce 7")
	f.Add("nonce 0 7")
	f.Add(" 0")
	f.Fuzz(func(t *testing.T, text string) {
		m := readMark(text)
		if m != (mark{}) && readMark(m.String()) != m {
			t.Errorf("%q is read as %+v, which is written as %q", text, m, m)
		}
	})
}

func FuzzReadInstance(f *testing.F) {
	f.Add([]byte(`{"address":"127.0.0.1:1","meta":{"a":"b"},"serving":true}`))
	f.Add([]byte(`{"meta":{"A":"\n"}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := readInstance("service", "id", data)
		if err == nil && m.instance.Validate() != nil {
			t.Errorf("%q is read as an invalid instance: %+v", data, m.instance)
		}
	})
}
