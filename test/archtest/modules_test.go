package archtest

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// dependencyTable is the heading in docs/dependencies.md above the tables of all
// direct dependencies: module, reason, licence.
const dependencyTable = "## Direct dependencies"

func TestDirectDependenciesAreExplained(t *testing.T) {
	t.Parallel()
	explained, err := explainedModules(read(t, "docs/dependencies.md"))
	if err != nil {
		t.Fatalf("docs/dependencies.md: %v", err)
	}
	for _, module := range directives(read(t, "go.work"), "use") {
		file := filepath.Join(module, "go.mod")
		for _, required := range directRequirements(read(t, file)) {
			if !slices.Contains(explained, required) {
				t.Errorf("%s requires %s, which is not in the table of direct dependencies in docs/dependencies.md", file, required)
			}
		}
	}
}

func TestToolsAreExplained(t *testing.T) {
	t.Parallel()
	explained, err := explainedModules(read(t, "docs/dependencies.md"))
	if err != nil {
		t.Fatalf("docs/dependencies.md: %v", err)
	}
	files, err := filepath.Glob(filepath.Join(repository, "tools", "*", "go.mod"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no tool modules: %v", err)
	}
	for _, file := range files {
		source := testbed.ReadFile(t, file)
		for _, tool := range directives(string(source), "tool") {
			if !slices.ContainsFunc(explained, func(module string) bool { return matches(module+"/...", tool) }) {
				t.Errorf("%s names the tool %s, whose module is not in the table of direct dependencies in docs/dependencies.md", file, tool)
			}
		}
	}
}

func TestDirectRequirementsAreFound(t *testing.T) {
	t.Parallel()
	got := directRequirements(`module github.com/stagemesh/stagemesh

go 1.26.0

require example.com/single v1.0.0

require (
	example.com/direct v1.2.3
	example.com/explained v0.1.0 // for its codec
	example.com/indirect v1.2.3 // indirect
	github.com/stagemesh/stagemesh v0.0.0
)

require (
	example.com/other v1.2.3 // indirect
)

replace example.com/replaced => ./replaced
`)
	want := []string{"example.com/single", "example.com/direct", "example.com/explained"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestDependencyTableIsRead(t *testing.T) {
	t.Parallel()
	const heading = dependencyTable + "\n\n| module | reason | licence |\n|---|---|---|\n"
	for name, test := range map[string]struct {
		text  string
		want  []string
		fails bool
	}{
		"rows":           {text: heading + "| `example.com/a` | a | MIT |\n| `example.com/b` | b | MIT |\n", want: []string{"example.com/a", "example.com/b"}},
		"other sections": {text: "| `example.com/a` | a | MIT |\n" + heading + "| `example.com/b` | b | MIT |\n\n## Next\n| `example.com/c` | c | MIT |\n", want: []string{"example.com/b"}},
		"no reason":      {text: heading + "| `example.com/a` | | MIT |\n", fails: true},
		"no licence":     {text: heading + "| `example.com/a` | a |\n", fails: true},
		"no section":     {text: "# Contributing\n", fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := explainedModules(test.text)
			if (err != nil) != test.fails || !slices.Equal(got, test.want) {
				t.Errorf("got %q and %v, want %q", got, err, test.want)
			}
		})
	}
}

// explainedModules returns the modules in the rows of the dependency tables.
func explainedModules(text string) ([]string, error) {
	_, section, ok := strings.Cut(text, dependencyTable+"\n")
	if !ok {
		return nil, fmt.Errorf("has no section %q", dependencyTable)
	}
	section, _, _ = strings.Cut(section, "\n## ")
	var modules []string
	for line := range strings.Lines(section) {
		if !strings.HasPrefix(line, "| `") {
			continue
		}
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		if len(cells) != 3 || slices.Contains(cells, "") {
			return nil, fmt.Errorf("row %q has not a module, a reason and a licence", strings.TrimSpace(line))
		}
		modules = append(modules, strings.Trim(cells[0], "`"))
	}
	return modules, nil
}

// directRequirements returns the modules of others that a go.mod file requires
// directly.
func directRequirements(source string) []string {
	var modules []string
	for _, requirement := range directives(source, "require") {
		module, rest, _ := strings.Cut(requirement, " ")
		_, ours := productPackage(module)
		if !ours && !strings.HasSuffix(rest, "// indirect") {
			modules = append(modules, module)
		}
	}
	return modules
}

// directives returns the arguments, comments included, of a verb of a go.mod
// or go.work file, from its single form and its blocks.
func directives(source, verb string) []string {
	var found []string
	inBlock := false
	for line := range strings.Lines(source) {
		line = strings.TrimSpace(line)
		argument, isVerb := strings.CutPrefix(line, verb+" ")
		switch {
		case inBlock && line == ")":
			inBlock = false
		case isVerb && argument == "(":
			inBlock = true
		case isVerb:
			found = append(found, argument)
		case inBlock && line != "" && !strings.HasPrefix(line, "//"):
			found = append(found, line)
		}
	}
	return found
}

func read(t *testing.T, file string) string {
	t.Helper()
	source := testbed.ReadFile(t, filepath.Join(repository, file))
	return string(source)
}
