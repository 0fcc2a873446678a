// Package importtriton turns a model repository of Triton into a mesh file: each ensemble becomes a
// pipeline, each other model a stage. Comments in the file say where its meaning differs.
//
//	data, err := importtriton.Import("models", ".")
//
// It reads the files config.pbtxt and the names of folders, and writes nothing. Errors name a
// config.pbtxt with its line. docs/graphs.md has what becomes of each field.
package importtriton

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	datatypes "github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// repository has the models by name.
type repository struct {
	models map[string]*model
	// path is the repository's, as the mesh file names it. server is the stage of the models
	// that Triton goes on running.
	path, server string
}

// names are those in use.
type names map[string]bool

var invalid = regexp.MustCompile(`[^a-z0-9]+`)

// add returns a valid name like this one that is not in use.
func (n names) add(like string) string {
	base := strings.Trim(invalid.ReplaceAllString(strings.ToLower(like), "-"), "-")
	base = cmp.Or(strings.TrimRight(base[:min(len(base), 59)], "-"), "model")
	out := base
	for i := 2; n[out]; i++ {
		out = fmt.Sprint(base, "-", i)
	}
	n[out] = true
	return out
}

// isFolder reports whether an entry of a folder is a folder, or a link to one.
func isFolder(in string, entry os.DirEntry) bool {
	info, err := os.Stat(filepath.Join(in, entry.Name()))
	return err == nil && info.IsDir()
}

// Import returns the mesh file of the repository in dir. Its paths are relative to the folder, where
// the file will be.
func Import(dir, folder string) ([]byte, error) {
	base, err := filepath.Abs(folder)
	above, err2 := filepath.Abs(dir)
	entries, err3 := os.ReadDir(dir)
	path, err4 := filepath.Rel(base, above)
	if err := errors.Join(err, err2, err3, err4); err != nil {
		return nil, err
	}
	r := &repository{models: map[string]*model{}, path: path}
	stages, routes := names{}, names{}
	var ensembles, own, served []*model
	for _, entry := range entries {
		if !isFolder(dir, entry) || strings.HasPrefix(entry.Name(), ".") {
			continue
		}
		m, err := readModel(filepath.Join(dir, entry.Name()))
		if err != nil {
			return nil, err
		}
		r.models[m.name] = m
		switch engine := m.engine(); {
		case m.EnsembleScheduling != nil:
			if pipeline.ValidPipelineName(m.name) == nil {
				m.stage, routes[m.name] = m.name, true
			}
			ensembles = append(ensembles, m)
		case engine == onnx || engine == python:
			m.stage = stages.add(m.name)
			own = append(own, m)
		default:
			served = append(served, m)
		}
	}
	if len(r.models) == 0 {
		return nil, fmt.Errorf("%s: no folder in it has a config.pbtxt; give the model repository of a Triton server", dir)
	}
	for _, m := range ensembles {
		if m.stage == "" {
			m.stage = routes.add(m.name)
		}
	}
	r.server = stages.add("triton")
	var out, pipelines strings.Builder
	for _, m := range ensembles {
		p, err := r.pipeline(m)
		if err != nil {
			return nil, err
		}
		pipelines.WriteString(m.comments("  ", "pipeline", m.notes()...))
		pipelines.WriteString(strings.TrimPrefix(string(meshfile.WritePipelines(p)), "pipelines:\n"))
	}
	fmt.Fprintf(&out, "# Imported from a model repository of Triton. Comments say where the meaning differs.\nmesh: %s\n\nstages:\n", names{}.add(filepath.Base(above)))
	for _, m := range own {
		r.writeStage(&out, m)
	}
	if len(served) > 0 {
		fmt.Fprintf(&out, serverText, r.server)
	}
	if len(ensembles) > 0 {
		fmt.Fprintf(&out, "\npipelines:\n%s", &pipelines)
	}
	for i, m := range served {
		if i == 0 {
			out.WriteString("\nmodels:\n")
		}
		fmt.Fprintf(&out, "  %s: {stage: %s} # %s\n", meshfile.Flow(m.name), r.server, meshfile.Flow(cmp.Or(m.engine(), "no backend")))
	}
	return []byte(out.String()), nil
}

const serverText = `  # Triton goes on running the models below: start it with --model-control-mode=explicit. It forms
  # their batches. Or port them to workers. Such a step gets all outputs of the step before it, and
  # Triton refuses those that its model does not declare.
  %s:
    runner: {model_server: {address: "127.0.0.1:8001", control: repository}}
    models: {capacity: 8GiB, default_size: 100MiB}
`

// The backends that have a runner here.
const (
	onnx   = "onnxruntime"
	python = "python"
)

// engine returns the backend that runs the model.
func (m *model) engine() string {
	engine := cmp.Or(m.Backend, m.Platform)
	if _, err := os.Stat(m.file(filepath.Dir(m.path), "model.onnx")); engine == "" && err == nil || engine == "onnxruntime_onnx" {
		return onnx // Triton too looks at the file
	}
	return engine
}

// file returns the path of the model's file, below its folder.
func (m *model) file(folder, standard string) string {
	return filepath.ToSlash(filepath.Join(folder, strconv.Itoa(m.version), cmp.Or(m.DefaultModelFilename, standard)))
}

// comments returns comments, the first of them about a name that is another than Triton's.
func (m *model) comments(indent, what string, comments ...string) (out string) {
	if m.stage != m.name {
		out = fmt.Sprintf("%s# %q in Triton; the name of a %s has other characters.\n", indent, m.name, what)
	}
	for _, comment := range comments {
		out += indent + "# " + comment + "\n"
	}
	return out
}

// notes returns comments on fields that have no counterpart.
func (m *model) notes() (out []string) {
	batching := cmp.Or(m.DynamicBatching, &dynamicBatching{})
	note := func(isSet bool, text string) {
		if isSet {
			out = append(out, text)
		}
	}
	note(len(batching.PreferredBatchSize) > 0, "preferred_batch_size: a batch runs when it has max_size rows, or after max_wait.")
	note(batching.PriorityLevels > 0 || batching.DefaultQueuePolicy != nil, "Priorities and queue policy: each request has one of three priorities, and a timeout.")
	note(batching.PreserveOrdering, "preserve_ordering: answers have no order.")
	note(m.SequenceBatching != nil, "sequence_batching: any worker may get the next request of a sequence. Keep its state outside, or send it along.")
	note(m.ResponseCache != nil, "response_cache: there is none; an idempotency key has a repeated request answered once.")
	note(m.VersionPolicy != nil || m.others != nil, fmt.Sprintf("version_policy, model_version: the stage runs version %d alone; others need stages of their own.", m.version))
	note(m.Optimization != nil, "optimization: see providers, graph_optimization and cache of the runner onnx.")
	note(len(m.Parameters) > 0, "parameters: set them as options of a worker, or as keys of the runner onnx.")
	note(len(m.ModelWarmup) > 0, "model_warmup: the runner onnx runs zeros first; a worker does this in setup.")
	isReshaped := func(t tensor) bool { return t.Reshape != nil }
	note(slices.ContainsFunc(slices.Concat(m.Input, m.Output), isReshaped), "reshape: callers send the shape of the model.")
	return out
}

// writeStage writes the stage of a model.
func (r *repository) writeStage(out *strings.Builder, m *model) {
	notes, folder := m.notes(), filepath.Join(r.path, m.name)
	isWorker, rows, batch := m.engine() == python, m.MaxBatchSize > 0, map[string]any{}
	kind, settings := "onnx", map[string]any{"model": m.file(folder, "model.onnx")}
	if isWorker {
		kind, settings = "worker", map[string]any{"command": []string{"python3", m.file(folder, "model.py")}}
		notes = append(notes, "model.py is for Triton: port a copy to a worker (docs/workers.md), and name that here. Its calls of models become steps.")
	}
	switch d := m.DynamicBatching; {
	case m.ModelTransactionPolicy.Decoupled && isWorker && !m.isInner:
		rows, batch["mode"] = false, "stream"
		notes = append(notes, "Decoupled: the worker streams chunks, without an axis of rows.")
	case !rows && isWorker:
		notes = append(notes, `max_batch_size 0: set batch_axis = "none" in the worker, and no requests are joined.`)
	case !rows:
		settings["batch_axis"] = "none"
	case d == nil:
		notes = append(notes, "No dynamic_batching: Triton runs each request alone; here they share batches.")
	case d.MaxQueueDelayMicroseconds > 0:
		batch["mode"], batch["max_wait"] = "window", time.Duration(d.MaxQueueDelayMicroseconds)*time.Microsecond
	default:
		batch["mode"] = "eager"
	}
	if rows {
		batch["max_size"] = m.MaxBatchSize
	}
	if m.ModelTransactionPolicy.Decoupled && m.isInner {
		notes = append(notes, "Decoupled: only the last step of a pipeline without blocks may stream; give one answer here.")
	}
	if note := m.instances(settings, isWorker); note != "" {
		notes = append(notes, note)
	}
	fmt.Fprintf(out, "  %s:\n%s    runner: %s\n", meshfile.Flow(m.stage), m.comments("    ", "stage", notes...), meshfile.Flow(map[string]any{kind: settings}))
	for i, list := range [][]tensor{m.Input, m.Output} {
		if len(list) > 0 {
			fmt.Fprintf(out, "    %s:\n", []string{"inputs", "outputs"}[i])
		}
		for _, t := range list {
			part := runner.PartSpec{Name: t.Name, Datatype: datatypes.Datatype(strings.TrimPrefix(string(t.DataType), "TYPE_")), Shape: []int64{}, Optional: t.Optional && isWorker}
			if part.Datatype == "STRING" {
				part.Datatype = datatypes.Bytes
			}
			if rows {
				part.Shape = append(part.Shape, -1)
			}
			if t.Reshape != nil {
				t.Dims = t.Reshape.Shape
			}
			part.Shape = append(part.Shape, t.Dims...)
			fmt.Fprintf(out, "      - %s\n", meshfile.Flow(part))
		}
	}
	if len(batch) > 0 {
		fmt.Fprintf(out, "    batch: %s\n", meshfile.Flow(batch))
	}
}

// instances adds the model's instances to the settings of its runner, or returns a comment.
func (m *model) instances(settings map[string]any, isWorker bool) string {
	for _, group := range m.InstanceGroup {
		if len(m.InstanceGroup) > 1 || group.Count > 64 || len(group.Gpus) == 0 && group.Kind != "KIND_CPU" && group.Kind != "KIND_MODEL" {
			return "instance_group: Triton counts by the GPUs of its machine; see replicas, workers and concurrency of the runner."
		}
		count := max(1, group.Count)
		var replicas []map[string]any
		for _, gpu := range slices.Repeat(group.Gpus, count) {
			replicas = append(replicas, map[string]any{"devices": []string{fmt.Sprint(gpu)}, "shared": true})
		}
		switch {
		case replicas != nil:
			settings["replicas"] = replicas
		case isWorker:
			settings["workers"] = count
		default:
			settings["concurrency"] = count
		}
	}
	return ""
}
