package pipeline

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/mesh/payload"
)

// MaxSteps bounds a route.
const MaxSteps = 64

// StagePrefix makes a pipeline of one stage: "stage:<name>".
const StagePrefix = "stage:"

// Pipeline is a named route.
type Pipeline struct {
	Name  Name
	Steps []Step
	// Timeout is the longest that a request may take; 0 means the mesh's.
	Timeout time.Duration
	// Durability is what a request gets that asks for none.
	Durability Durability
	// Keep are names of inputs and outputs that stay at hand for later steps.
	Keep []string
	// MaxInFlight bounds the requests that a gateway has in flight for the
	// pipeline; 0 means as many as for all.
	MaxInFlight int
	// WaitForCapacity is what a request gets that does not say: to wait, until its
	// deadline, where a stage has no room for it.
	WaitForCapacity bool
}

// Step is a place in a pipeline.
type Step struct {
	Name  StepName
	Stage StageName
	// Model is the one to use where the stage serves several.
	Model      payload.ModelRef
	Parameters payload.Parameters
	// Inputs renames: input of the stage -> name of the part that feeds it.
	Inputs map[string]string
}

// OfStage returns the implicit pipeline of one stage.
func OfStage(stage StageName) Pipeline {
	return Pipeline{
		Name:  Name(StagePrefix + string(stage)),
		Steps: []Step{{Name: StepName(stage), Stage: stage}},
	}
}

// StageOf returns the stage that an implicit pipeline's name names.
func StageOf(name Name) (StageName, bool) {
	stage, ok := strings.CutPrefix(string(name), StagePrefix)
	return StageName(stage), ok
}

// Validate checks everything that can be told without knowing the stages.
func (p Pipeline) Validate() error {
	if stage, implicit := StageOf(p.Name); implicit {
		if err := ValidName("stage", string(stage)); err != nil {
			return err
		}
	} else if err := ValidName("pipeline", string(p.Name)); err != nil {
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
		return fmt.Errorf("steps: %d, at most %d are taken", len(p.Steps), MaxSteps)
	}
	if p.Timeout < 0 {
		return fmt.Errorf("timeout: %s is negative", p.Timeout)
	}
	if p.MaxInFlight < 0 {
		return fmt.Errorf("max_in_flight: %d is negative", p.MaxInFlight)
	}
	if _, err := ParseDurability(string(p.Durability)); err != nil {
		return err
	}
	if err := validateKeep(p.Keep); err != nil {
		return fmt.Errorf("keep: %w", err)
	}
	seen := make(map[StepName]bool, len(p.Steps))
	for i, step := range p.Steps {
		if err := step.validate(); err != nil {
			return fmt.Errorf("steps[%d]: %w", i, err)
		}
		if seen[step.Name] {
			return fmt.Errorf("steps[%d]: a step named %s is there already", i, step.Name)
		}
		seen[step.Name] = true
	}
	return nil
}

// validateKeep makes sure that what is kept can travel beside the parts.
func validateKeep(names []string) error {
	if len(names) > payload.MaxParts {
		return fmt.Errorf("%d names, at most %d are taken", len(names), payload.MaxParts)
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

func (s Step) validate() error {
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
	for name, value := range s.Parameters {
		if f, is := value.Any().(float64); is && (math.IsNaN(f) || math.IsInf(f, 0)) {
			return fmt.Errorf("parameters: %q is no finite number", name)
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
