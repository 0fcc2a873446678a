package librarytest

import (
	"debug/buildinfo"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/mod/module"
	"golang.org/x/mod/zip"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// outside is a module of a user: it lies outside the repository, and gets this module by
// `go get` from a proxy.
type outside struct {
	t      *testing.T
	folder string
	env    []string
}

// repository is the root, from this package's folder.
const repository = "../.."

func newOutside(t *testing.T) outside {
	t.Helper()
	cache, err := exec.Command("go", "env", "GOMODCACHE", "GOPROXY").Output()
	if err != nil {
		t.Fatal(err)
	}
	known, proxies, _ := strings.Cut(strings.TrimSpace(string(cache)), "\n")
	proxy := t.TempDir()
	publish(t, proxy)
	return outside{t: t, folder: t.TempDir(), env: append(os.Environ(),
		// Modules of others come from where they were fetched before, and were verified.
		"GOPROXY=file://"+proxy+",file://"+filepath.Join(known, "cache", "download")+","+proxies,
		"GOSUMDB=off", "GOMODCACHE="+t.TempDir(), "GOWORK=off", "CGO_ENABLED=0",
		// The test can remove the folders of modules, and builds the same in any folder.
		"GOFLAGS=-modcacherw -trimpath",
	)}
}

// publish writes the tree, as git has it or would add it, into a file-system proxy: the
// only version of this module.
func publish(t *testing.T, proxy string) {
	t.Helper()
	self := module.Version{Path: "github.com/stagemesh/stagemesh", Version: "v0.0.1"}
	list := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	list.Dir = repository
	listed, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	var files []zip.File
	for name := range strings.SplitSeq(strings.TrimSuffix(string(listed), "\x00"), "\x00") {
		if _, err := treeFile(name).Lstat(); err == nil {
			files = append(files, treeFile(name))
		}
	}
	requirements := testbed.ReadFile(t, filepath.Join(repository, "go.mod"))
	folder := filepath.Join(proxy, self.Path, "@v")
	if err := os.MkdirAll(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	for ending, data := range map[string]string{".info": fmt.Sprintf(`{"Version":%q}`, self.Version), ".mod": string(requirements)} {
		if err := os.WriteFile(filepath.Join(folder, self.Version+ending), []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(folder, "list"), []byte(self.Version+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	archive, err := os.Create(filepath.Join(folder, self.Version+".zip"))
	if err != nil {
		t.Fatal(err)
	}
	defer archive.Close()
	if err := zip.Create(archive, self, files); err != nil {
		t.Fatal(err)
	}
}

// treeFile is a file of the repository, by its name from the root.
type treeFile string

func (f treeFile) Path() string                { return filepath.ToSlash(string(f)) }
func (f treeFile) Lstat() (os.FileInfo, error) { return os.Lstat(filepath.Join(repository, string(f))) }

// Open implements zip.File.
func (f treeFile) Open() (io.ReadCloser, error) {
	return os.Open(filepath.Join(repository, string(f)))
}

// write adds a program to the module: a folder with a file of testdata.
func (o outside) write(program string) {
	o.t.Helper()
	source, err := os.ReadFile(filepath.Join("testdata", program+"_test.go"))
	if err != nil {
		o.t.Fatal(err)
	}
	folder := filepath.Join(o.folder, program)
	if err := os.Mkdir(folder, 0o700); err != nil {
		o.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "main.go"), source, 0o600); err != nil {
		o.t.Fatal(err)
	}
}

// do runs a command in the module and returns its output.
func (o outside) do(name string, arguments ...string) string {
	o.t.Helper()
	cmd := exec.Command(name, arguments...)
	cmd.Dir, cmd.Env = o.folder, o.env
	out, err := cmd.CombinedOutput()
	if err != nil {
		o.t.Fatalf("%s: %v\n%s", strings.Join(cmd.Args, " "), err, out)
	}
	return string(out)
}

// It compiles the library anew, which takes all cores for a minute. So it runs alone, before the
// tests that run in parallel.
func TestModuleOutsideTheRepositoryGetsTheLibrary(t *testing.T) {
	o := newOutside(t)
	o.write("shout")
	o.write("greeter")
	o.write("settings")
	o.do("go", "mod", "init", "example.com/outside")
	o.do("go", "get", "github.com/stagemesh/stagemesh")
	o.do("go", "build", "-ldflags=-s -w", "-o", "bin/", "./shout", "./greeter", "./settings")
	if said := o.do("bin/shout"); said != "HELLO!\n" {
		t.Errorf("the program of README.md wrote %q", said)
	}
	if said := o.do("bin/settings"); said != "again\n" {
		t.Errorf("the program with settings in Go wrote %q", said)
	}
	greeter := filepath.Join(o.folder, "bin", "greeter")
	linksNoModelRuntime(t, greeter)
	servesAStage(t, greeter)
}

// linksNoModelRuntime holds that the library links no shipped stage.
func linksNoModelRuntime(t *testing.T, program string) {
	t.Helper()
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	for _, module := range info.Deps {
		if module.Path == "github.com/gomlx/gomlx" {
			t.Error("the library links a shipped stage: the runtime for models is in the program")
		}
	}
}

// servesAStage holds that the program of docs/runners.md joins a mesh, and drains.
func servesAStage(t *testing.T, program string) {
	t.Helper()
	broker := testbed.StartBroker(t)
	m := meshtest.Start(t, newMesh(t, stagemesh.Settings{Mesh: "outside", NATS: stagemesh.NATS{URL: broker.URL()}}))
	file := testbed.MeshFile(t, "mesh: outside\nregistry: {none: true}\nstages: {hello: {runner: {greet: {greeting: hello}}}}\n")
	cmd := exec.Command(program, "hello", "--config", file, "--ops", "127.0.0.1:0")
	cmd.Env = append(os.Environ(), "STAGEMESH_NATS="+broker.URL())
	host := testbed.StartProcess(t, cmd)
	host.Match(regexp.MustCompile("^stage hello of mesh outside is ready on host "))
	answer, err := m.Infer(t.Context(), &stagemesh.Request{Pipeline: "stage:hello", Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte("world"))}})
	if err != nil || string(answer.Outputs[0].Blob.Data) != "hello world" {
		t.Errorf("got %v, %v", answer, err)
	}
	host.Stop()
	if !strings.Contains(host.Err.String(), "msg=drained") {
		t.Errorf("it logged\n%s", host.Err.String())
	}
}
