// Package pipeline has the names of meshes, stages, hosts and gateways, pipelines
// and their validation, and the route that a pipeline and a request's options
// become in an envelope. Authors of stages need its names alone.
//
// Everything here is a plain value without clock, lock or goroutine. Validation
// errors name the pipeline, the step and the key at fault.
package pipeline

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/payload"
)

// MaxSteps bounds a route.
const MaxSteps = 64

// StagePrefix makes a pipeline of one stage: "stage:<name>".
const StagePrefix = "stage:"

// Pipeline is a named route.
type Pipeline struct {
	Name  Name   `yaml:"-"`
	Steps []Step `yaml:"steps"`
	// Timeout is the longest that a request may take; 0 means the mesh's.
	Timeout time.Duration `yaml:"timeout"`
	// Durability applies to requests that name none.
	Durability Durability `yaml:"durability"`
	// Keep are names of inputs and outputs that are kept for later steps. A pipeline with blocks keeps
	// all.
	Keep []string `yaml:"keep"`
	// Outputs are the parts that a pipeline with blocks answers with; empty means the outputs of its
	// last step.
	Outputs []string `yaml:"outputs"`
	// MaxInFlight bounds the requests that a gateway has in flight for the
	// pipeline; 0 means as many as for all.
	MaxInFlight int `yaml:"max_in_flight"`
	// WaitForCapacity has requests wait, until their deadline, where a stage has no
	// capacity. It is the default of requests that do not set it.
	WaitForCapacity bool `yaml:"wait_for_capacity"`
	// Queue takes requests over HTTP that prefer to be answered later; empty means none.
	Queue QueueName `yaml:"queue"`
}

// Step is a place in a pipeline: a stage, or a block of steps.
type Step struct {
	Name StepName `yaml:"name"`
	Block
	Stage StageName `yaml:"stage"`
	// Model is the model to use where the stage serves several.
	Model      payload.ModelRef   `yaml:",inline"`
	Parameters payload.Parameters `yaml:"parameters"`
	// Locked rejects requests that set one of these parameters, or the model.
	Locked bool `yaml:"locked"`
	// Inputs renames: input of the stage -> name of the part that feeds it.
	Inputs map[string]string `yaml:"inputs"`
}

// OfStage returns the implicit pipeline of one stage.
func OfStage(stage StageName) Pipeline {
	return Pipeline{
		Name:  Name(StagePrefix + string(stage)),
		Steps: []Step{{Name: StepName(stage), Stage: stage}},
	}
}

// StageOf returns the stage of an implicit pipeline's name.
func StageOf(name Name) (StageName, bool) {
	stage, ok := strings.CutPrefix(string(name), StagePrefix)
	return StageName(stage), ok
}

// Validate checks everything that does not depend on the stages.
func (p Pipeline) Validate() error {
	if stage, implicit := StageOf(p.Name); implicit {
		if err := ValidName("stage", string(stage)); err != nil {
			return err
		}
	} else if err := ValidPipelineName(string(p.Name)); err != nil {
		return err
	}
	if err := p.validate(); err != nil {
		return fmt.Errorf("pipeline %s: %w", p.Name, err)
	}
	return nil
}

func (p Pipeline) validate() error {
	if len(p.Steps) == 0 {
		return errors.New("steps: a pipeline has at least one")
	}
	if len(p.Steps) > MaxSteps {
		return fmt.Errorf("steps: %d, at most %d are allowed", len(p.Steps), MaxSteps)
	}
	if p.Timeout < 0 {
		return fmt.Errorf("timeout: %s is negative", p.Timeout)
	}
	if err := ValidName("queue", string(p.Queue)); p.Queue != "" && err != nil {
		return err
	}
	if p.MaxInFlight < 0 || p.MaxInFlight > math.MaxInt32 {
		return fmt.Errorf("max_in_flight: %d is not between 0 and %d", p.MaxInFlight, math.MaxInt32)
	}
	if _, err := ParseDurability(string(p.Durability)); err != nil {
		return err
	}
	if err := validateKeep(p.Keep); err != nil {
		return fmt.Errorf("keep: %w", err)
	}
	if err := validateKeep(p.Outputs); err != nil {
		return fmt.Errorf("outputs: %w", err)
	}
	switch hasBlocks := p.HasBlocks(); {
	case hasBlocks && len(p.Keep) > 0:
		return errors.New("keep: a pipeline with blocks keeps every part; remove the key")
	case !hasBlocks && len(p.Outputs) > 0:
		return errors.New("outputs: is for pipelines with blocks; others answer with the outputs of their last step")
	}
	b := &blocks{names: make(map[StepName]bool, len(p.Steps))}
	err := b.checkSteps(p.Steps, "steps", 0, 1)
	if err == nil && b.stages == 0 {
		err = errors.New("steps: none of them has a stage; at least one is required")
	}
	return err
}

// validateKeep checks that the kept parts fit beside the others.
func validateKeep(names []string) error {
	if len(names) > payload.MaxParts {
		return fmt.Errorf("%d names, at most %d are allowed", len(names), payload.MaxParts)
	}
	for i, name := range names {
		if err := payload.ValidName(name); err != nil {
			return fmt.Errorf("[%d]: %w", i, err)
		}
		if slices.Contains(names[:i], name) {
			return fmt.Errorf("%q is there twice", name)
		}
	}
	return nil
}

func (s *Step) validateStage() error {
	if err := ValidName("step", string(s.Name)); err != nil {
		return err
	}
	if err := ValidName("stage", string(s.Stage)); err != nil {
		return err
	}
	if err := s.Model.Validate(); err != nil {
		return fmt.Errorf("model: %w", err)
	}
	if err := s.Parameters.Validate(); err != nil {
		return fmt.Errorf("parameters: %w", err)
	}
	if s.Locked && len(s.Parameters) == 0 && s.Model == (payload.ModelRef{}) {
		return errors.New("locked: the step has no parameters and no model; requests cannot set those that it has")
	}
	for name, value := range s.Parameters {
		if f, is := value.Any().(float64); is && (math.IsNaN(f) || math.IsInf(f, 0)) {
			return fmt.Errorf("parameters: %q is not a finite number", name)
		}
	}
	for input, source := range s.Inputs {
		for _, name := range []string{input, source} {
			if err := payload.ValidName(name); err != nil {
				return fmt.Errorf("inputs: %w", err)
			}
		}
	}
	return nil
}

// ToProto returns the pipeline's protobuf message, for the registry and the admin
// port.
func (p Pipeline) ToProto() *meshv1.Pipeline {
	out := &meshv1.Pipeline{
		Name: string(p.Name), Steps: stepsToProto(p.Steps), Keep: p.Keep, Outputs: p.Outputs,
		Durability: p.Durability.ToProto(), MaxInFlight: uint32(p.MaxInFlight), WaitForCapacity: p.WaitForCapacity, Queue: string(p.Queue),
	}
	if p.Timeout != 0 {
		out.Timeout = durationpb.New(p.Timeout)
	}
	return out
}

// FromProto returns a valid pipeline, or an error.
func FromProto(in *meshv1.Pipeline) (Pipeline, error) {
	if err := ValidPipelineName(in.GetName()); err != nil {
		return Pipeline{}, err
	}
	out, err := fromProto(in)
	if err != nil {
		return Pipeline{}, fmt.Errorf("pipeline %s: %w", in.GetName(), err)
	}
	return out, out.Validate()
}

func fromProto(in *meshv1.Pipeline) (Pipeline, error) {
	if in.GetMaxInFlight() > math.MaxInt32 {
		return Pipeline{}, fmt.Errorf("max_in_flight: %d, at most %d are allowed", in.GetMaxInFlight(), math.MaxInt32)
	}
	durability, err := DurabilityFromProto(in.GetDurability())
	if err != nil {
		return Pipeline{}, err
	}
	out := Pipeline{
		Name: Name(in.GetName()), Durability: durability, Keep: in.GetKeep(), Outputs: in.GetOutputs(),
		MaxInFlight: int(in.GetMaxInFlight()), WaitForCapacity: in.GetWaitForCapacity(), Queue: QueueName(in.GetQueue()),
	}
	if d := in.GetTimeout(); d != nil {
		if err := d.CheckValid(); err != nil {
			return Pipeline{}, fmt.Errorf("timeout: %w", err)
		}
		out.Timeout = d.AsDuration()
	}
	out.Steps, err = stepsFromProto(in.GetSteps(), 0)
	return out, err
}

func stepFromProto(in *meshv1.PipelineStep, depth int) (Step, error) {
	parameters, err := payload.ParametersFromProto(in.GetParameters())
	if err != nil {
		return Step{}, fmt.Errorf("parameters: %w", err)
	}
	for name, value := range parameters {
		// A file has one kind of whole numbers, as far as it goes.
		if n, is := value.Any().(uint64); is && n <= math.MaxInt64 {
			parameters[name] = payload.Int64(int64(n))
		}
	}
	block, err := blockFromProto(in, depth)
	if err != nil {
		return Step{}, err
	}
	return Step{
		Name: StepName(in.GetName()), Block: block, Stage: StageName(in.GetStage()), Model: payload.ModelFromProto(in.GetModel()),
		Parameters: parameters, Inputs: in.GetInputs(), Locked: in.GetLocked(),
	}, nil
}

// Hop is one entry of a route: a step with the request's options in it.
type Hop struct {
	Step       StepName
	Stage      StageName
	Model      payload.ModelRef
	Parameters payload.Parameters
	// Inputs renames: input of the stage -> name of the part that feeds it.
	Inputs map[string]string
	// Keep are names of this step's inputs and outputs that later steps need.
	Keep []string
	// Host is in whose queue the item waits; empty means the stage's queue.
	Host HostID
	// Visited are hosts that passed the item on, "" for one that did not refuse to load its
	// model.
	Visited []string
}

// MaxVisited is the most hosts that pass an item on.
const MaxVisited = 4

// Queue returns the name of the queue in which the hop's item waits: its stage's, or
// its host's.
func (h *Hop) Queue() StageName {
	if h.Host == "" {
		return h.Stage
	}
	return HostQueue(h.Stage, h.Host)
}

// HostQueue returns the name of a host's own queue. No stage has such a name; where the
// broker has queues, and hosts answer about them, it stands for a stage's.
func HostQueue(stage StageName, host HostID) StageName { return stage + "@" + StageName(host) }

// Options are a request's options for all steps, and for single ones.
type Options struct {
	// Parameters apply to every step.
	Parameters payload.Parameters
	Steps      map[StepName]StepOptions
}

// StepOptions are a request's options for one step.
type StepOptions struct {
	Model      payload.ModelRef
	Parameters payload.Parameters
}

// Route returns the pipeline's stages, in the order of StageSteps, with the request's options in them. A
// parameter of the request for the step precedes one for all steps, and that the
// pipeline's own. Options for an unknown step are an error, and so are what a step locks
// and too many parameters together.
func (p *Pipeline) Route(o Options) ([]Hop, error) {
	if err := p.knows(o.Steps); err != nil {
		return nil, err
	}
	route := make([]Hop, 0, len(p.Steps))
	err := eachStage(p.Steps, func(step *Step) error {
		own := o.Steps[step.Name]
		if err := p.checkLock(step, o.Parameters, own); err != nil {
			return err
		}
		hop := Hop{
			Step:       step.Name,
			Stage:      step.Stage,
			Model:      step.Model,
			Parameters: payload.Merge(step.Parameters, o.Parameters, own.Parameters),
			Inputs:     step.Inputs,
			Keep:       p.Keep,
		}
		if err := hop.Parameters.Validate(); err != nil {
			return fmt.Errorf("steps.%s: %w", step.Name, err)
		}
		if own.Model != (payload.ModelRef{}) {
			hop.Model = own.Model
		}
		route = append(route, hop)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if n := len(route); n > 0 {
		route[n-1].Keep = nil
	}
	return route, nil
}

// checkLock checks that a request's options, the parameters of every step and this step's own,
// set nothing that the step locks.
func (p *Pipeline) checkLock(s *Step, all payload.Parameters, own StepOptions) error {
	if !s.Locked {
		return nil
	}
	if own.Model != (payload.ModelRef{}) {
		return fmt.Errorf("steps.%s.model: pipeline %s locks it", s.Name, p.Name)
	}
	if len(all)+len(own.Parameters) == 0 {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(s.Parameters)) {
		if _, set := own.Parameters[name]; set {
			return fmt.Errorf("steps.%s.parameters.%s: pipeline %s locks it", s.Name, name, p.Name)
		}
		if _, set := all[name]; set {
			return fmt.Errorf("parameters.%s: pipeline %s locks it in step %s; send it to other steps by their names", name, p.Name, s.Name)
		}
	}
	return nil
}

// knows checks that options are for steps of the pipeline.
func (p *Pipeline) knows(options map[StepName]StepOptions) error {
	if len(options) == 0 {
		return nil
	}
	steps := p.StageSteps()
	names := make([]string, len(steps))
	for i := range steps {
		names[i] = string(steps[i].Name)
	}
	for _, name := range slices.Sorted(maps.Keys(options)) {
		if !slices.Contains(names, string(name)) {
			return fmt.Errorf("steps.%.*s: pipeline %s has no such step; it has %s", maxName, name, p.Name, strings.Join(names, ", "))
		}
	}
	return nil
}
