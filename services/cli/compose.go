package cli

import (
	"bytes"
	"cmp"
	_ "embed" // the template
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"text/template"
	"time"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/services/runners"
	"github.com/stagemesh/stagemesh/stagehost"
)

func newCompose() *cobra.Command {
	var path string
	cmd := &cobra.Command{
		Use:   "compose",
		Short: "Print a Docker Compose file for a mesh file",
		Long: "Print a Docker Compose file that runs each stage of a mesh file as a service, with a gateway, a broker and, where the file\n" +
			"has jobs, a dispatcher. The folder of the file is mounted read-only; paths in it should be relative. The output depends\n" +
			"on the file alone. The variables in it choose images, memory and ports.",
		Example: "  stagemesh compose -c mesh.yaml > compose.yaml\n  docker compose up --wait",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			file, err := meshfile.Load(path, runners.All()...)
			if err != nil {
				return err
			}
			out, err := composeFile(file, path)
			if err == nil {
				_, err = cmd.OutOrStdout().Write(out)
			}
			return err
		},
	}
	cmd.Flags().StringVarP(&path, "config", "c", "mesh.yaml", "the mesh file")
	return cmd
}

//go:embed compose.yml.tmpl
var composeText string

var composeTemplate = template.Must(template.New("compose").Parse(composeText))

// stopTime is what the end of a process takes after its drain: the default stop_limit of workers,
// and ten seconds.
const stopTime = worker.DefaultStopLimit + 10*time.Second

// composeService is a service that runs a part of the mesh.
type composeService struct {
	Name, Command string
	Image, Tag    string
	Grace         time.Duration
	GPUs          bool
}

// composeFile returns the compose file of a mesh. Its services are named after the stages.
func composeFile(file *meshfile.File, path string) ([]byte, error) {
	folder, name := filepath.Split(path)
	if folder = filepath.ToSlash(filepath.Clean(folder)); !filepath.IsAbs(folder) && !strings.HasPrefix(folder, "..") {
		folder = "./" + strings.TrimPrefix(folder, "./")
	}
	data := struct {
		Mesh, File, Folder, Path string
		Gateway                  composeService
		Stages, Dispatchers      []composeService
	}{Mesh: file.Mesh, File: filepath.Base(path), Folder: folder, Path: "/etc/stagemesh/" + name}
	drain := file.Gateway.DrainDelay + cmp.Or(file.Gateway.DrainTimeout, gateway.DefaultDrainTimeout)
	data.Gateway = composeServiceOf("gateway", "stagemesh", "gateway", drain)
	if len(file.Jobs.Queues) > 0 {
		data.Dispatchers = []composeService{composeServiceOf("dispatcher", "stagemesh", "dispatcher", drain)}
	}
	for _, name := range file.StageNames() {
		stage := file.Stages[name]
		if slices.Contains([]string{"gateway", "nats", "dispatcher"}, name) {
			return nil, file.At(fmt.Errorf("stage %q has the name of another service of the compose file; rename it", name), "stages", name)
		}
		image, err := imageOf(stage)
		if err != nil {
			return nil, err
		}
		workers, err := workerSettingsOf(stage)
		if err != nil {
			return nil, err
		}
		drain := cmp.Or(stage.DrainTimeout, stagehost.DefaultDrainTimeout)
		if _, hasModels := stage.Runner["onnx_models"]; hasModels || stage.Models != nil {
			drain += drain / 2 // before it drains, a host moves its models for at most half of drain_timeout
		}
		s := composeServiceOf(name, image, "stage, "+name, drain+max(0, workers.StopLimit-worker.DefaultStopLimit))
		s.GPUs = slices.ContainsFunc(workers.Replicas, func(r runners.WorkerReplica) bool { return len(r.Devices) > 0 })
		data.Stages = append(data.Stages, s)
	}
	var out bytes.Buffer
	err := composeTemplate.Execute(&out, data)
	return out.Bytes(), err
}

func composeServiceOf(name, image, command string, drain time.Duration) composeService {
	// The images have tags for versions; a build of a commit is tagged by its user.
	tag := "dev"
	if version := process.Version(); strings.HasPrefix(version, "v") && !strings.ContainsAny(version, "+-") {
		tag = version
	}
	return composeService{Name: name, Command: command, Image: image, Tag: tag, Grace: (drain + stopTime).Round(time.Second)}
}

// imageOf returns the image with what a stage's runner needs.
func imageOf(stage meshfile.Stage) (string, error) {
	for _, kind := range []string{"onnx", "onnx_models"} {
		if section, ok := stage.Runner[kind]; ok {
			onnx, models := &runners.OnnxSettings{}, &runners.OnnxModelsSettings{}
			settings := any(onnx)
			if kind == "onnx_models" {
				settings = models
			}
			if err := section.Decode(settings); err != nil {
				return "", err
			}
			if cmp.Or(onnx.Engine, models.Engine) == "go" {
				return "stagemesh", nil
			}
			return "stagemesh-onnx", nil
		}
	}
	if _, ok := stage.Runner["worker"]; ok {
		return "stagemesh-python", nil
	}
	return "stagemesh", nil
}

// workerSettingsOf returns the settings of the stage's workers; none where it has none.
func workerSettingsOf(stage meshfile.Stage) (s runners.WorkerSettings, err error) {
	if section, ok := stage.Runner["worker"]; ok {
		err = section.Decode(&s)
	}
	return s, err
}
