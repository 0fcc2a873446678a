package suite_test

import (
	"errors"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/bench/suite"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestResultsSurviveTheirFile(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "results.json")
	want := known(0.9, 1.1, 900, 3)
	if err := want.Write(file); err != nil {
		t.Fatal(err)
	}
	got, err := suite.Read(file)
	if err != nil {
		t.Fatal(err)
	}
	if page(t, got) != page(t, want) || !reflect.DeepEqual(got.Machine, want.Machine) || len(got.Items) != len(want.Items) {
		t.Errorf("got %+v", got)
	}
}

func TestInvalidResultsAreRejected(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ text, want string }{
		"no JSON":         {"nonsense", "not results of the suite: "},
		"another version": {`{"version": 9}`, "the results have version 9, and this program reads 1"},
	} {
		file := testbed.WriteFile(t, "results.json", test.text)
		if _, err := suite.Read(file); err == nil || !strings.HasPrefix(err.Error(), file+": "+test.want) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestOtherItemsAreKept(t *testing.T) {
	t.Parallel()
	before := known(0.9, 1.1, 900, 3)
	later := suite.Results{Version: suite.Version, Machine: before.Machine, Versions: suite.Versions{Stagemesh: "v2"}, Items: []suite.Measured{{Number: 5, Quick: true}}}
	got, err := before.With(later)
	if err != nil || len(got.Items) != 17 || !got.Items[4].Quick || got.Items[3].Number != 4 || got.Versions.Stagemesh != "v2" {
		t.Errorf("got %+v, %v", got, err)
	}
	later.Machine.Cores = 64
	if _, err := before.With(later); !errors.Is(err, suite.ErrMachine) {
		t.Errorf("got %v", err)
	}
	if got, err := (suite.Results{}).With(later); err != nil || len(got.Items) != 1 {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestProcessorModelIsRead(t *testing.T) {
	t.Parallel()
	file := testbed.WriteFile(t, "cpuinfo", "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nprocessor\t: 1\nmodel name\t: Another\n")
	if got := suite.CPUModel(file); got != "Some CPU @ 2 GHz" {
		t.Errorf("got %q", got)
	}
	if got := suite.CPUModel(file + "-not"); got != "" {
		t.Errorf("got %q", got)
	}
}
