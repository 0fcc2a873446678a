package worker

import (
	"testing"
)

// Python distinguishes 1.0 from 1.
func TestOptionsKeepTheirNumberTypes(t *testing.T) {
	t.Parallel()
	s := Settings{Options: map[string]any{
		"whole": uint64(1), "real": 1.0, "large": 1e30, "list": []any{2.0, map[string]any{"small": -0.5}}, "text": "1.0", "no": nil,
	}}
	got, err := s.options()
	const want = `{"large":1e+30,"list":[2.0,{"small":-0.5}],"no":null,"real":1.0,"text":"1.0","whole":1}`
	if err != nil || string(got) != want {
		t.Errorf("they are %s, want %s: %v", got, want, err)
	}
}

func TestInfiniteOptionIsRefused(t *testing.T) {
	t.Parallel()
	zero := 0.0
	if _, err := New(Settings{Command: []string{"x"}, Options: map[string]any{"x": 1 / zero}}); err == nil {
		t.Error("an infinite option is taken")
	}
}
