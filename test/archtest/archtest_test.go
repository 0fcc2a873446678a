package archtest

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestProductKeepsTheImportTable(t *testing.T) {
	t.Parallel()
	packages := productPackages(t)
	for _, violation := range importTable.violations(packages) {
		t.Error(violation)
	}
	// A reader that finds nothing would make every table hold.
	for _, known := range []string{"mesh/fault", "sdk/go/tensor", "proto/gen/go/stagemesh/mesh/v1", "test/archtest"} {
		if !slices.ContainsFunc(packages, func(p sourcePackage) bool { return p.path == known }) {
			t.Errorf("package %s was not read", known)
		}
	}
}

func productPackages(t *testing.T) []sourcePackage {
	t.Helper()
	work := testbed.ReadFile(t, filepath.Join(repository, "go.work"))
	packages, err := readPackages(repository, directives(string(work), "use"))
	if err != nil {
		t.Fatal(err)
	}
	return packages
}

const (
	natsClient   = "github.com/nats-io/nats.go/jetstream"
	natsServer   = "github.com/nats-io/nats-server/v2/server"
	consulClient = "github.com/hashicorp/consul/api"
	otelSDK      = "go.opentelemetry.io/otel/sdk/metric"
)

func TestTableRefusesForbiddenImports(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		pkg, imported string
		inTest        bool
		want          string
	}{
		"a front imports the bus":                   {pkg: "internal/front/rest", imported: ours("internal/bus"), want: "may import"},
		"a front's test imports the bus":            {pkg: "internal/front/rest", imported: ours("internal/bus"), inTest: true, want: "may import"},
		"the stage host imports the gateway":        {pkg: "stagehost", imported: ours("internal/call"), want: "may import"},
		"the gateway imports the stage host":        {pkg: "gateway", imported: ours("stagehost"), want: "may import"},
		"the gateway imports a runner":              {pkg: "gateway", imported: ours("stagehost/runner"), want: "may import"},
		"a shared package imports upward":           {pkg: "mesh/fault", imported: ours("mesh/payload"), want: "may import"},
		"a leaf imports something of ours":          {pkg: "internal/config", imported: ours("mesh/fault"), want: "no other of ours"},
		"the SDK imports the contract":              {pkg: "sdk/go/tensor", imported: ours("proto/gen/go/stagemesh/stage/v1"), want: "no other of ours"},
		"the SDK imports a module":                  {pkg: "sdk/go/tensor", imported: "github.com/google/uuid", want: "standard library only"},
		"the SDK's test imports a module":           {pkg: "sdk/go/tensor", imported: "pgregory.net/rapid", inTest: true, want: "standard library only"},
		"the SDK's test imports a test helper":      {pkg: "sdk/go/tensor", imported: ours("internal/testbed"), inTest: true, want: "no other of ours"},
		"a pure package locks":                      {pkg: "internal/batch", imported: "sync", want: "pure"},
		"a pure package opens sockets":              {pkg: "internal/batch", imported: "net/http", want: "pure"},
		"the product imports a test helper":         {pkg: "services/cli", imported: ours("internal/testbed"), want: "tests only"},
		"the product imports testing":               {pkg: "services/cli", imported: "testing", want: "only in tests"},
		"the product imports a test library":        {pkg: "internal/bus", imported: "pgregory.net/rapid", want: "only in tests"},
		"NATS outside its places":                   {pkg: "stagehost", imported: natsClient, want: "only in internal/credentials, internal/bus"},
		"a NATS server outside its places":          {pkg: "internal/bus", imported: natsServer, want: "only in ."},
		"Consul outside its place":                  {pkg: "discovery/natskv", imported: consulClient, want: "only in discovery/consul"},
		"a test imports Consul":                     {pkg: "gateway", imported: consulClient, inTest: true, want: "only in discovery/consul"},
		"the OpenTelemetry SDK outside its place":   {pkg: "internal/call", imported: otelSDK, want: "only in internal/program"},
		"a test of the stage host imports gateways": {pkg: "stagehost", imported: ours("gateway"), inTest: true, want: "may import"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := violationsOf(test.pkg, test.imported, test.inTest)
			if len(got) != 1 || !strings.Contains(got[0], test.want) {
				t.Fatalf("got %q, want one violation that says %q", got, test.want)
			}
			if !strings.Contains(got[0], test.pkg) || !strings.Contains(got[0], test.imported) {
				t.Errorf("%q names not both %s and %s", got[0], test.pkg, test.imported)
			}
		})
	}
}

func TestTableAllowsIntendedImports(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		pkg, imported string
		inTest        bool
	}{
		"a front imports the call":              {pkg: "internal/front/rest", imported: ours("internal/call")},
		"the bus imports NATS":                  {pkg: "internal/bus", imported: natsClient},
		"the command starts a NATS server":      {pkg: ".", imported: natsServer},
		"services import everything":            {pkg: "services/cli", imported: ours("gateway")},
		"a helper imports testing":              {pkg: "internal/testbed", imported: "testing"},
		"a helper imports a NATS server":        {pkg: "internal/testbed", imported: natsServer},
		"a helper imports a helper":             {pkg: "test/meshtest", imported: ours("internal/testbed")},
		"any test imports a helper":             {pkg: "internal/call", imported: ours("internal/testbed"), inTest: true},
		"any test imports NATS":                 {pkg: "internal/call", imported: natsClient, inTest: true},
		"an external test imports its package":  {pkg: "internal/config", imported: ours("internal/config"), inTest: true},
		"a pure package's test uses goroutines": {pkg: "internal/batch", imported: "sync", inTest: true},
		"the SDK imports the standard library":  {pkg: "sdk/go/tensor", imported: "encoding/json"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := violationsOf(test.pkg, test.imported, test.inTest); len(got) != 0 {
				t.Fatalf("refused: %q", got)
			}
		})
	}
}

func TestPackageOutsideTheTableIsRefused(t *testing.T) {
	t.Parallel()
	for _, pkg := range []string{"mesh", "mesh/util", "sdk/go/helpers", "internal/front"} {
		got := importTable.violations([]sourcePackage{{path: pkg}})
		if len(got) != 1 || !strings.Contains(got[0], "matches 0 rows") {
			t.Errorf("%s: got %q, want one violation that says it matches no row", pkg, got)
		}
	}
}

func TestPackageInTwoRowsIsRefused(t *testing.T) {
	t.Parallel()
	overlapping := rules{rows: []row{{packages: list("mesh/...")}, {packages: list("mesh/*")}}}
	got := overlapping.violations([]sourcePackage{{path: "mesh/fault"}})
	if len(got) != 1 || !strings.Contains(got[0], "matches 2 rows") {
		t.Errorf("got %q, want one violation that says it matches two rows", got)
	}
}

func TestReaderFindsEveryImport(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	for file, source := range map[string]string{
		"a/plain.go":           "package a\nimport \"fmt\"\nfunc f() { this does not compile",
		"a/constrained.go":     "//go:build never\n\npackage a\nimport _ \"os\"\n",
		"a/a_test.go":          "package a_test\nimport x \"testing\"\n",
		"b/empty.go":           "package b\n",
		"b/testdata/c/c.go":    "package c\n",
		"_d/d.go":              "package d\n",
		"used/go.mod":          "module used\n",
		"used/e/e.go":          "package e\n",
		"tools/linter/go.mod":  "module tools\n",
		"tools/linter/main.go": "package main\n",
	} {
		path := filepath.Join(root, file)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(source), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	packages, err := readPackages(root, []string{".", "./used"})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, pkg := range packages {
		got = append(got, pkg.path)
		for _, clause := range pkg.imports {
			line := clause.file + " " + clause.path
			if clause.test {
				line += " (test)"
			}
			got = append(got, line)
		}
	}
	want := []string{"a", "a_test.go testing (test)", "constrained.go os", "plain.go fmt", "b", "used/e"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func ours(pkg string) string { return modulePath + "/" + pkg }

func violationsOf(pkg, imported string, inTest bool) []string {
	clause := importClause{file: "made_up.go", path: imported, test: inTest}
	return importTable.violations([]sourcePackage{{path: pkg, imports: []importClause{clause}}})
}
