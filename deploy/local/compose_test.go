package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/compose-spec/compose-go/v2/types"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/services/cli"
	"github.com/stagemesh/stagemesh/services/runners"
	"github.com/stagemesh/stagemesh/stagehost"
)

const root = "../.."

// variants are the compose file alone and with each override.
var variants = map[string][]string{
	"alone":  {"docker-compose.yml"},
	"python": {"docker-compose.yml", "deploy/compose/python.yml"},
	"onnx":   {"docker-compose.yml", "deploy/compose/onnx.yml"},
	"gpu":    {"docker-compose.yml", "deploy/compose/python.yml", "deploy/compose/gpu.yml"},
}

// loadVariant reads compose files with the defaults of their variables.
func loadVariant(t *testing.T, name string) *types.Project {
	t.Helper()
	var paths []string
	for _, f := range variants[name] {
		paths = append(paths, filepath.Join(root, f))
	}
	project, err := load(t.Context(), "", paths...)
	if err != nil {
		t.Fatal(err)
	}
	return project
}

func TestComposeFilesAreComplete(t *testing.T) {
	t.Parallel()
	for name := range variants {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			project := loadVariant(t, name)
			want := []string{"classify", "consul", "decode", "gateway", "grafana", "jaeger", "label", "nats", "prometheus"}
			if got := project.ServiceNames(); !slices.Equal(got, want) {
				t.Errorf("the services are %q", got)
			}
			checkServices(t, project)
			// Services that build one tag race for it.
			builds := map[string]int{}
			for _, s := range project.Services {
				if strings.HasPrefix(s.Image, "stagemesh") {
					builds[s.Image] += 0
				}
				if s.Build == nil {
					continue
				}
				builds[s.Image]++
				if want := strings.TrimPrefix(strings.Split(s.Image, ":")[0], "stagemesh-"); s.Build.Target != want {
					t.Errorf("%s builds the image %s by %+v", s.Name, s.Image, s.Build)
				}
				if _, err := os.Stat(filepath.Join(s.Build.Context, s.Build.Dockerfile)); err != nil {
					t.Errorf("%s: %v", s.Name, err)
				}
			}
			for image, n := range builds {
				if n != 1 {
					t.Errorf("%d services build %s", n, image)
				}
			}
		})
	}
}

// What stagemesh compose prints passes the same checks as the file of this repository.
func TestPrintedComposeFilesAreComplete(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"examples/digits/mesh.yaml":        "classify decode gateway label nats",
		"examples/digits-python/mesh.yaml": "classify decode gateway label nats",
		"examples/nightly/mesh.yaml":       "",
		"deploy/compose/onnx/mesh.yaml":    "classify decode gateway label nats",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path, err := filepath.Abs(filepath.Join(root, name))
			if err != nil {
				t.Fatal(err)
			}
			var printed [2]bytes.Buffer
			for i := range printed {
				verb := cli.New()
				verb.SetArgs([]string{"compose", "-c", path})
				verb.SetOut(&printed[i])
				if err := verb.ExecuteContext(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			if !bytes.Equal(printed[0].Bytes(), printed[1].Bytes()) {
				t.Error("the output differs from run to run")
			}
			file := filepath.Join(t.TempDir(), "compose.yaml")
			if err := os.WriteFile(file, printed[0].Bytes(), 0o600); err != nil {
				t.Fatal(err)
			}
			project, err := load(t.Context(), "", file)
			if err != nil {
				t.Fatalf("%v\n%s", err, &printed[0])
			}
			if got := strings.Join(project.ServiceNames(), " "); want != "" && got != want {
				t.Errorf("the services are %s", got)
			}
			checkServices(t, project)
			committed := loadVariant(t, "alone").Services
			if nats := project.Services["nats"]; nats.Image != committed["nats"].Image || nats.User != committed["nats"].User {
				t.Errorf("the broker is %s of user %s", nats.Image, nats.User)
			}
		})
	}
}

func checkServices(t *testing.T, project *types.Project) {
	t.Helper()
	for _, s := range project.Services {
		checkService(t, s)
		if strings.HasPrefix(s.Image, "stagemesh") {
			checkOurs(t, s)
		} else if _, tag, ok := strings.Cut(s.Image, ":"); !ok || tag == "latest" {
			t.Errorf("%s: the image %s has no version", s.Name, s.Image)
		}
	}
}

// numericUser is an ID, or two, that is not root.
var numericUser = regexp.MustCompile(`^[1-9][0-9]*(:[1-9][0-9]*)?$`)

// checkService checks what holds for all services.
func checkService(t *testing.T, s types.ServiceConfig) {
	t.Helper()
	if !s.ReadOnly || !slices.Equal(s.CapDrop, []string{"ALL"}) || !slices.Equal(s.SecurityOpt, []string{"no-new-privileges:true"}) {
		t.Errorf("%s: read-only %t, without %q, with %q", s.Name, s.ReadOnly, s.CapDrop, s.SecurityOpt)
	}
	// The images of the others have such users.
	if isMonitoring := slices.Contains(s.Profiles, "monitoring"); !isMonitoring && !numericUser.MatchString(s.User) {
		t.Errorf("%s runs as %q", s.Name, s.User)
	}
	if s.MemLimit == 0 || s.Logging == nil || s.Logging.Options["max-size"] == "" || s.Logging.Options["max-file"] == "" {
		t.Errorf("%s has a memory limit of %d, and logs to %+v", s.Name, s.MemLimit, s.Logging)
	}
	if s.HealthCheck == nil || len(s.HealthCheck.Test) < 2 || s.HealthCheck.Test[0] != "CMD" || s.HealthCheck.StartPeriod == nil {
		t.Errorf("%s has no health check without a shell", s.Name)
	}
	if s.ContainerName != "" {
		t.Errorf("%s has a container name, so it cannot be scaled", s.Name)
	}
	for _, p := range s.Ports {
		if p.HostIP != "127.0.0.1" || !slices.Contains([]string{"gateway", "jaeger", "prometheus", "grafana"}, s.Name) {
			t.Errorf("%s publishes %s on %q", s.Name, p.Published, p.HostIP)
		}
	}
	for name, d := range s.DependsOn {
		// Jaeger takes the spans of a drain, so it stops later; nobody waits for it.
		want := types.ServiceDependency{Condition: types.ServiceConditionHealthy, Required: true}
		if name == "jaeger" {
			want = types.ServiceDependency{Condition: types.ServiceConditionStarted}
		}
		if d.Condition != want.Condition || d.Required != want.Required || slices.Contains([]string{"prometheus", "grafana"}, name) {
			t.Errorf("%s waits for %s: %s", s.Name, name, d.Condition)
		}
	}
	for _, v := range s.Volumes {
		switch v.Type {
		case types.VolumeTypeBind:
			if _, err := os.Stat(v.Source); err != nil || !v.ReadOnly {
				t.Errorf("%s mounts %s, read-only %t: %v", s.Name, v.Source, v.ReadOnly, err)
			}
		case types.VolumeTypeVolume:
			if v.Source != s.Name {
				t.Errorf("%s has the volume %s", s.Name, v.Source)
			}
		}
	}
}

// checkOurs checks a gateway or a stage.
func checkOurs(t *testing.T, s types.ServiceConfig) {
	t.Helper()
	if s.User != "65532:65532" || s.PullPolicy != types.PullPolicyNever || len(s.DependsOn) < 1 {
		t.Errorf("%s runs as %q, pulls %q, after %d others", s.Name, s.User, s.PullPolicy, len(s.DependsOn))
	}
	var folder string
	for _, v := range s.Volumes {
		if v.Target == "/etc/stagemesh" {
			folder = v.Source
		}
	}
	file, err := meshfile.Load(filepath.Join(folder, "mesh.yaml"), runners.All()...)
	if err != nil {
		t.Fatal(err)
	}
	drain := file.Gateway.DrainDelay + cmp.Or(file.Gateway.DrainTimeout, gateway.DefaultDrainTimeout)
	switch s.Name {
	case "gateway", "dispatcher":
		if !slices.Equal(s.Command, []string{s.Name}) {
			t.Errorf("%s runs %q", s.Name, s.Command)
		}
	default:
		stage, ok := file.Stages[s.Name]
		if drain = cmp.Or(stage.DrainTimeout, stagehost.DefaultDrainTimeout); !ok || !slices.Equal(s.Command, []string{"stage", s.Name}) {
			t.Errorf("%s runs %q", s.Name, s.Command)
		}
	}
	// What follows a drain takes some seconds more.
	if s.StopGracePeriod == nil || time.Duration(*s.StopGracePeriod) < drain+5*time.Second {
		t.Errorf("%s is killed after %v, and drains for %s", s.Name, s.StopGracePeriod, drain)
	}
}

// required returns the version of a module that a go.mod file requires.
func required(t *testing.T, file, module string) string {
	t.Helper()
	text := testbed.ReadFile(t, filepath.Join(root, file))
	version := regexp.MustCompile(`(?m)^(?:require)?\s*` + regexp.QuoteMeta(module) + ` v(\S+)`).FindSubmatch(text)
	if version == nil {
		t.Fatalf("%s does not require %s", file, module)
	}
	return string(version[1])
}

func TestImagesHaveVersionsOfModules(t *testing.T) {
	t.Parallel()
	services := loadVariant(t, "alone").Services
	nats := required(t, "go.mod", "github.com/nats-io/nats-server/v2")
	consul := required(t, "tools/consul/go.mod", "github.com/hashicorp/consul")
	// Jaeger 2.x is 1.(63+x) of the module, Prometheus 3.x is 0.(300+x).
	jaeger := renumber(t, required(t, "tools/jaeger/go.mod", "github.com/jaegertracing/jaeger"), "2.", 63)
	prometheus := renumber(t, required(t, "tools/prometheus/go.mod", "github.com/prometheus/prometheus"), "3.", 300)
	for service, image := range map[string]string{
		"nats": "nats:" + nats + "-alpine", "consul": "hashicorp/consul:" + consul,
		"jaeger": "jaegertracing/jaeger:" + jaeger, "prometheus": "prom/prometheus:v" + prometheus,
	} {
		if got := services[service].Image; got != image {
			t.Errorf("%s is %s, its module's version is that of %s", service, got, image)
		}
	}
	text := testbed.ReadFile(t, filepath.Join(root, "deploy/Dockerfile"))
	for _, from := range regexp.MustCompile(`(?m)^FROM .*`).FindAll(text, -1) {
		if !bytes.Contains(from, []byte(":")) && !bytes.HasPrefix(from, []byte("FROM scratch ")) || bytes.Contains(from, []byte(":latest")) {
			t.Errorf("%s: no version", from)
		}
	}
	// Packages have the versions that are tested.
	tested := testbed.ReadFile(t, filepath.Join(root, "services/onnx/requirements-dev.txt"))
	for _, pinned := range regexp.MustCompile(`(?m)^RUN pip install --no-cache-dir ([^&\n]*)`).FindAllSubmatch(text, -1) {
		for _, one := range bytes.Fields(pinned[1]) {
			if !bytes.Contains(tested, append(append([]byte("\n"), one...), '\n')) {
				t.Errorf("%s is not what the tests have", one)
			}
		}
	}
}

// With auto, the engine of a stage would depend on the image of each host.
func TestComposeFileOfOnnxSetsTheEngine(t *testing.T) {
	t.Parallel()
	file, err := meshfile.Load(filepath.Join(root, "deploy/compose/onnx/mesh.yaml"), runners.All()...)
	if err != nil {
		t.Fatal(err)
	}
	var s runners.OnnxSettings
	if err := file.Stages["classify"].Runner["onnx"].Decode(&s); err != nil || s.Engine != "onnxruntime" {
		t.Fatalf("the engine is %q, %v", s.Engine, err)
	}
	mounted := map[string]string{}
	for _, v := range loadVariant(t, "onnx").Services["classify"].Volumes {
		mounted[v.Target] = v.Type
	}
	image := testbed.ReadFile(t, filepath.Join(root, "deploy/Dockerfile"))
	if mounted[s.Cache] != types.VolumeTypeVolume || mounted[filepath.Dir(s.Model)] != types.VolumeTypeBind || !bytes.Contains(image, []byte("\nVOLUME "+s.Cache+"\n")) {
		t.Errorf("classify mounts %v, and has its cache in %s and its model in %s", mounted, s.Cache, filepath.Dir(s.Model))
	}
}

// renumber replaces the major version, and takes so much from the minor one.
func renumber(t *testing.T, version, major string, offset int) string {
	t.Helper()
	parts := strings.Split(version, ".")
	minor, err := strconv.Atoi(parts[1])
	if err != nil || len(parts) != 3 {
		t.Fatalf("the version %s: %v", version, err)
	}
	return major + strconv.Itoa(minor-offset) + "." + parts[2]
}

// dashboard is what tests know of a dashboard of Grafana.
type dashboard struct {
	UID    string
	Panels []struct {
		Title, Description string
		Datasource         struct{ UID string }
		Targets            []struct{ Expr string }
	}
}

func dashboards(t *testing.T) map[string]dashboard {
	t.Helper()
	out := map[string]dashboard{}
	files := os.DirFS(filepath.Join(root, "deploy/grafana/dashboards"))
	names, err := fs.Glob(files, "*.json")
	if err != nil || len(names) != 5 {
		t.Fatalf("the dashboards are %q: %v", names, err)
	}
	for _, name := range names {
		text, err := fs.ReadFile(files, name)
		if err != nil {
			t.Fatal(err)
		}
		var d dashboard
		if err := json.Unmarshal(text, &d); err != nil {
			t.Fatal(err)
		}
		out[name] = d
	}
	return out
}

func TestDashboardsUseProvisionedDatasources(t *testing.T) {
	t.Parallel()
	text := testbed.ReadFile(t, filepath.Join(root, "deploy/grafana/provisioning/datasources/datasources.yml"))
	for name, d := range dashboards(t) {
		for _, p := range d.Panels {
			if p.Description == "" {
				t.Errorf("%s: %q has no description", name, p.Title)
			}
			if len(p.Targets) == 0 || !bytes.Contains(text, []byte("uid: "+p.Datasource.UID+"\n")) {
				t.Errorf("%s: %q asks %q", name, p.Title, p.Datasource.UID)
			}
		}
	}
}

func TestAlertsFireAsTheirCasesSay(t *testing.T) {
	t.Parallel()
	programs := programs(t)
	for _, args := range [][]string{{"check", "config", "prometheus.yml"}, {"test", "rules", "alerts_test.yml"}} {
		check := exec.CommandContext(t.Context(), programs[len(programs)-1], args...)
		check.Dir = filepath.Join(root, "deploy/prometheus")
		if out, err := check.CombinedOutput(); err != nil {
			t.Errorf("promtool %q: %v\n%s", args, err, out)
		}
	}
}
