package cli_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// startSecureMesh runs a mesh with TLS and a token, and returns it with the files that reach it.
func startSecureMesh(t *testing.T) (m *stagemesh.Mesh, token, ca string) {
	t.Helper()
	authority := testbed.NewAuthority(t)
	token = testbed.SecretFile(t, "open-sesame")
	cert, key := authority.Certificate("127.0.0.1")
	return guarded(t, gateway.Access{TokenFile: token, CertFile: cert, KeyFile: key}), token, authority.File
}

// askBoth asks the public port and the admin port, and returns the errors of both.
func askBoth(t *testing.T, flags ...string) string {
	t.Helper()
	var out []string
	for _, p := range asking(t) {
		if _, err := run(t, append(p.args, flags...)...); err != nil {
			out = append(out, err.Error())
		}
	}
	return strings.Join(out, "\n")
}

func TestContextsReachSecuredMeshes(t *testing.T) {
	config := t.TempDir()
	t.Setenv("XDG_CONFIG_HOME", config)
	m, token, ca := startSecureMesh(t)
	admin := testbed.SecretFile(t, "wrong")
	t.Chdir(filepath.Dir(token))
	for _, args := range [][]string{
		{"add", "prod", "--address", m.URL(), "--admin", m.AdminURL(), "--token-file", filepath.Base(token), "--ca-file", ca},
		{"add", "other", "--address", m.URL(), "--admin", m.AdminURL(), "--token-file", token, "--ca-file", ca, "--admin-token-file", admin},
		{"add", "callers", "--address", m.URL(), "--token-file", token, "--ca-file", ca},
		{"use", "prod"},
	} {
		if out, err := run(t, append([]string{"context"}, args...)...); err != nil || out != "" {
			t.Fatal(args, out, err)
		}
	}
	t.Chdir(config)
	if failed := askBoth(t); failed != "" {
		t.Error(failed)
	}
	if info, err := os.Stat("stagemesh/contexts.json"); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file: %v, %v", info, err)
	}
	for want, flags := range map[string][]string{
		"the one in context other " + admin + " is another":                                   {"--context", "other"},
		"context callers has no address for this command; add it again with --admin":          {"--context", "callers"},
		`--context: there is no context "nope"; there is callers, other, prod; `:              {"--context", "nope"},
		"[address context] are set none of the others can be; [address context] were all set": {"--context", "prod", "-a", m.URL()},
		"; give it with --token-file":                                                         {"-a", m.URL(), "--ca-file", ca},
	} {
		if failed := askBoth(t, flags...); !strings.Contains(failed, want) {
			t.Errorf("%v: got %s, want %s", flags, failed, want)
		}
	}
	out, err := run(t, "context", "list")
	if err != nil {
		t.Fatal(err)
	}
	match(t, out, ` +NAME +ADDRESS +ADMIN +TOKEN FILE +ADMIN TOKEN FILE +CA FILE`, ` +callers +https:\S+ +- +/\S+ +- +/\S+`, ` +other .*`, `\* +prod .*`)
	if _, err := run(t, "context", "remove", "prod"); err != nil {
		t.Error(err)
	}
	if out, err := run(t, "context", "list"); err != nil || strings.Contains(out, "prod") || strings.Contains(out, "*") {
		t.Errorf("got %s, %v", out, err)
	}
	if _, err := run(t, "context", "use", "prod"); err == nil {
		t.Error("a context that was removed can be used")
	}
}

func TestContextsMayBeAddedAtOnce(t *testing.T) {
	config := t.TempDir()
	t.Setenv("XDG_CONFIG_HOME", config)
	file := filepath.Join(config, "stagemesh", "contexts.json")
	if err := os.Mkdir(filepath.Dir(file), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(`{"contexts": null}`), 0o666); err != nil {
		t.Fatal(err)
	}
	var adding sync.WaitGroup
	for i := range 20 {
		adding.Go(func() {
			if _, err := run(t, "context", "add", fmt.Sprintf("c%d", i), "--address", "https://mesh:8080"); err != nil {
				t.Error(err)
			}
		})
	}
	adding.Wait()
	if out, err := run(t, "context", "list"); err != nil || strings.Count(out, "https://mesh:8080") != 20 {
		t.Errorf("%v\n%s", err, out)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file: %v, %v", info, err)
	}
}

func TestVariablesOverrideTheContext(t *testing.T) {
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	m, token, ca := startSecureMesh(t)
	if _, err := run(t, "context", "add", "gone", "--address", "127.0.0.1:1", "--admin", "127.0.0.1:1", "--token-file", token); err != nil {
		t.Fatal(err)
	}
	if _, err := run(t, "context", "use", "gone"); err != nil {
		t.Fatal(err)
	}
	if failed := askBoth(t); strings.Count(failed, "cannot connect to http://127.0.0.1:1 (set by context gone): ") != 2 {
		t.Error(failed)
	}
	t.Setenv("STAGEMESH_ADDRESS", m.URL())
	t.Setenv("STAGEMESH_ADMIN", m.AdminURL())
	t.Setenv("STAGEMESH_CA_FILE", ca)
	if failed := askBoth(t); strings.Count(failed, "; give it with --token-file") != 2 {
		t.Errorf("without a token for these addresses: %s", failed)
	}
	t.Setenv("STAGEMESH_TOKEN_FILE", token)
	if failed := askBoth(t); failed != "" {
		t.Error(failed)
	}
	t.Setenv("STAGEMESH_TOKEN_FILE", "nowhere")
	if failed := askBoth(t); strings.Count(failed, "STAGEMESH_TOKEN_FILE: open nowhere: ") != 2 {
		t.Error(failed)
	}
	if failed := askBoth(t, "--token-file", token); failed != "" {
		t.Errorf("a flag: %s", failed)
	}
	if failed := askBoth(t, "--context", "gone"); strings.Count(failed, "127.0.0.1:1") != 2*strings.Count(failed, "context gone") {
		t.Errorf("--context: %s", failed)
	}
}

func TestShellsCompleteNames(t *testing.T) {
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	m := meshtest.FromFile(t, jobsFile(t), stagemesh.FileSettings{})
	meshtest.Start(t, m)
	if _, err := run(t, "context", "add", "local", "--admin", m.AdminURL()); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		want string
		args []string
	}{
		"pipelines":          {"digits\n:4\n", []string{"infer", "--context", "local", ""}},
		"files after it":     {":0\n", []string{"infer", "digits", ""}},
		"stages of a flag":   {"classify\ndecode\nlabel\n:4\n", []string{"status", "-a", m.AdminURL(), "--stage", ""}},
		"queues":             {"nightly\nsmall\n:4\n", []string{"jobs", "submit", "--context", "local", ""}},
		"contexts":           {"local\n:4\n", []string{"context", "use", ""}},
		"nothing of no mesh": {":4\n", []string{"status", "-a", "127.0.0.1:1", "--stage", ""}},
	} {
		if out, err := run(t, append([]string{"__complete"}, test.args...)...); err != nil || out != test.want {
			t.Errorf("%s: got %q, %v, want %q", name, out, err, test.want)
		}
	}
}
