package meshfile

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/stagemesh/stagemesh/mesh/config"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Kind is a kind of runner that a stage may have: the key below "runner", and
// what builds a runner from the settings there.
type Kind struct {
	key   string
	build func(settings config.Section, folder string) (runner.Runner, error)
}

// KindOf returns the kind of that key whose settings are an S, and whose
// runners the function builds. Settings with paths in them have a method
// RelativeTo(folder string) S, which is called first.
func KindOf[S any, R runner.Runner](key string, build func(S) (R, error)) Kind {
	return Kind{key: key, build: func(section config.Section, folder string) (runner.Runner, error) {
		var settings S
		if err := section.Decode(&settings); err != nil {
			return nil, err
		}
		if s, ok := any(settings).(interface{ RelativeTo(folder string) S }); ok {
			settings = s.RelativeTo(folder)
		}
		built, err := build(settings)
		if err != nil {
			return nil, section.At(err)
		}
		return built, nil
	}}
}

// runner returns a new runner of the kind that the stage asks for.
func (f *File) runner(stage string) (runner.Runner, error) {
	asked := slices.Sorted(maps.Keys(f.Stages[stage].Runner))
	at := func(err error) error { return f.At(err, "stages", stage, "runner") }
	switch len(asked) {
	case 0:
		return nil, at(fmt.Errorf("there is none; use %s, with its settings or {}", f.kindNames()))
	case 1:
	default:
		return nil, at(fmt.Errorf("%s; a stage has one", strings.Join(asked, " and ")))
	}
	i := slices.IndexFunc(f.kinds, func(k Kind) bool { return k.key == asked[0] })
	if i < 0 {
		return nil, f.At(fmt.Errorf("this program has no such runner; it has %s", f.kindNames()), "stages", stage, "runner", asked[0])
	}
	return f.kinds[i].build(f.Stages[stage].Runner[asked[0]], f.folder)
}

// kindNames lists the kinds for a message.
func (f *File) kindNames() string {
	var out strings.Builder
	for i, kind := range f.kinds {
		switch i {
		case 0:
		case len(f.kinds) - 1:
			out.WriteString(" or ")
		default:
			out.WriteString(", ")
		}
		out.WriteString(kind.key)
	}
	return out.String()
}
