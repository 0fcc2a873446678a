package config_test

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/config"
)

func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		"", "name: a\nsize: 3\n", placed, "any: &a {x: 1}\nlabels: {<<: *a, y: 2}\n", "list:\n- a\n- |\n  b\n- >-\n  c\n",
		"stages: {a: {batch: {max_size: 0x}}}", "a: \"b\n", "? a\n: b", "- - - a", "wait: 5s # c", "token: 'it''s'", "---\nname: a\n...\n", "any: {list: [1, [a]], none: ~}",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		one, doc, err := parse(text)
		if err != nil {
			checkPositions(t, text, err)
			return
		}
		two, _, err := parse(text)
		if err != nil {
			t.Fatalf("the second time: %v", err)
		}
		one.Part, two.Part = config.Section{}, config.Section{}
		if !reflect.DeepEqual(one, two) {
			t.Fatalf("got %+v and then %+v", one, two)
		}
		checkPositions(t, text, doc.At(config.Path{"stages", "a", "steps", "[0]"}, errors.New("any: bad")))
	})
}

// checkPositions makes sure that every place in an error is one of the text.
func checkPositions(t *testing.T, text string, err error) {
	t.Helper()
	if several, ok := err.(interface{ Unwrap() []error }); ok {
		for _, one := range several.Unwrap() {
			checkPositions(t, text, one)
		}
		return
	}
	at, ok := errors.AsType[*config.PositionError](err)
	if !ok {
		if !strings.HasPrefix(err.Error(), "f.yaml: ") {
			t.Fatalf("%v does not name its file", err)
		}
		return
	}
	lines := strings.Count(text, "\n") + strings.Count(text, "\r") + 1
	if at.Line < 0 || at.Line > lines+1 || at.Column < 0 || (at.Line == 0) != (at.Column == 0) {
		t.Fatalf("%v points behind the %d lines of the file", err, lines)
	}
}
