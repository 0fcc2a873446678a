package config_test

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/config"
)

const placed = `name: a
stages:
  a:
    batch: {max_size: 0}
    steps:
    - max_size: 1
    - max_size: 2
  b.c:
    batch: {}
`

func TestLaterErrorPointsAtItsPlace(t *testing.T) {
	t.Parallel()
	_, doc, err := parse(placed)
	if err != nil {
		t.Fatal(err)
	}
	path := func(elements ...string) config.Path { return elements }
	for name, test := range map[string]struct {
		path config.Path
		err  string
		want string
	}{
		"a key":                          {path("name"), "is bad", "f.yaml:1:1: name: is bad"},
		"a key below":                    {path("stages", "a", "batch"), "is bad", "f.yaml:4:5: stages.a.batch: is bad"},
		"the nearest above":              {path("stages", "a", "queue", "size"), "is bad", "f.yaml:3:3: stages.a.queue.size: is bad"},
		"nowhere in the file":            {path("pipelines"), "is bad", "f.yaml: pipelines: is bad"},
		"the file":                       {nil, "is bad", "f.yaml: is bad"},
		"a place in a list":              {path("stages", "a", "steps", "[1]"), "is bad", "f.yaml:7:7: stages.a.steps[1]: is bad"},
		"a place behind a list":          {path("stages", "a", "steps", "[2]"), "is bad", "f.yaml:5:5: stages.a.steps[2]: is bad"},
		"a key with a point":             {path("stages", "b.c", "batch"), "is bad", "f.yaml:9:5: stages.b.c.batch: is bad"},
		"a key that the error begins":    {path("stages", "a"), "batch.max_size: 0 is less than 1", "f.yaml:4:13: stages.a.batch.max_size: 0 is less than 1"},
		"one of which there is half":     {path("stages", "a"), "batch.max_wait: is missing", "f.yaml:4:5: stages.a.batch.max_wait: is missing"},
		"one in a list":                  {path("stages", "a"), "steps[1].max_size: is bad", "f.yaml:7:7: stages.a.steps[1].max_size: is bad"},
		"a word that is not a key":       {path("stages", "a"), "open: no such file", "f.yaml:3:3: stages.a: open: no such file"},
		"a sentence that looks like one": {path("stages", "a"), "batch what: ever", "f.yaml:3:3: stages.a: batch what: ever"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := doc.At(test.path, errors.New(test.err)); got.Error() != test.want {
				t.Errorf("got  %v\nwant %s", got, test.want)
			}
		})
	}
}

func TestErrorsKeepTheirIdentityAndTheirFirstPlace(t *testing.T) {
	t.Parallel()
	_, doc, err := parse(placed)
	if err != nil {
		t.Fatal(err)
	}
	if doc.At(config.Path{"name"}, nil) != nil {
		t.Error("nil has become an error")
	}
	first := doc.At(config.Path{"name"}, fmt.Errorf("name: %w", fs.ErrNotExist))
	if !errors.Is(first, fs.ErrNotExist) {
		t.Errorf("%v is not what it was", first)
	}
	if second := doc.At(config.Path{"stages"}, first); second.Error() != first.Error() {
		t.Errorf("%v has moved to %v", first, second)
	}
}

func TestEachOfJoinedErrorsGetsItsPlace(t *testing.T) {
	t.Parallel()
	_, doc, err := parse(placed)
	if err != nil {
		t.Fatal(err)
	}
	several := errors.Join(errors.New("batch.max_size: is bad"), errors.Join(errors.New("steps[0]: is bad"), errors.New("is bad")))
	got := doc.At(config.Path{"stages", "a"}, several).Error()
	want := strings.Join([]string{
		"f.yaml:4:13: stages.a.batch.max_size: is bad",
		"f.yaml:6:7: stages.a.steps[0]: is bad",
		"f.yaml:3:3: stages.a: is bad",
	}, "\n")
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	// Two reasons for one thing are not two things.
	wrapped := fmt.Errorf("%w: %w", errors.New("a"), errors.New("b"))
	if got := doc.At(config.Path{"name"}, wrapped).Error(); got != "f.yaml:1:1: name: a: b" {
		t.Errorf("got %s", got)
	}
}

func TestSectionIsDecodedLaterAtItsPlace(t *testing.T) {
	t.Parallel()
	f, _, err := parse("name: &n a\npart:\n  max_size: 3\n")
	if err != nil {
		t.Fatal(err)
	}
	var b batch
	if err := f.Part.Decode(&b); err != nil || b.MaxSize != 3 {
		t.Errorf("got %+v, %v", b, err)
	}
	var wrong struct {
		Name string `yaml:"name"`
	}
	if err := f.Part.Decode(&wrong); err == nil || err.Error() != `f.yaml:3:3: part: "max_size" is not a key here; there are name` {
		t.Errorf("got %v", err)
	}
	if err := f.Part.At(errors.New("max_size: is bad")); err.Error() != "f.yaml:3:3: part.max_size: is bad" {
		t.Errorf("got %v", err)
	}
}

func TestMissingSectionChangesNothing(t *testing.T) {
	t.Parallel()
	empty, _, err := parse("part:\n")
	if err != nil {
		t.Fatal(err)
	}
	for name, section := range map[string]config.Section{"zero": {}, "empty": empty.Part} {
		b := batch{MaxSize: 3}
		if err := section.Decode(&b); err != nil || b.MaxSize != 3 {
			t.Errorf("%s: got %+v, %v", name, b, err)
		}
	}
	bad := errors.New("is bad")
	if got := (config.Section{}).At(bad); !errors.Is(got, bad) {
		t.Errorf("got %v", got)
	}
}
