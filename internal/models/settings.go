package models

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
)

const (
	// maxTypes and maxLabels bound the constraints of a stage, and the labels of each.
	maxTypes, maxLabels = 100, 32
	// MaxLoadSlots bounds the models that load at a time on a host.
	MaxLoadSlots = 256
)

// StageConfig has those settings of a stage's models that are the same on all hosts, as in files.
type StageConfig struct {
	// Types are the constraints by type of model.
	Types map[string]TypeConfig `yaml:"types"`
	Scale ScaleConfig           `yaml:"scale"`
}

// TypeConfig has the labels that hosts need for a type, or that make them a better choice.
type TypeConfig struct {
	Required  []string `yaml:"required"`
	Preferred []string `yaml:"preferred"`
}

// ScaleConfig is what one replica of a model may have until the model gets another one; 0 is the
// default of meshv1.ScaleSettings.
type ScaleConfig struct {
	RequestsPerMinute int           `yaml:"requests_per_minute"`
	Busy              float64       `yaml:"busy"`
	QueueTime         time.Duration `yaml:"queue_time"`
}

// Settings returns the message. Errors begin with the key, which within precedes.
func (c StageConfig) Settings(within string) (*meshv1.ModelSettings, error) {
	out, rate := &meshv1.ModelSettings{Types: map[string]*meshv1.TypeConstraint{}}, c.Scale.RequestsPerMinute
	for name, one := range c.Types {
		out.Types[name] = &meshv1.TypeConstraint{Required: one.Required, Preferred: one.Preferred}
	}
	if rate < 0 || rate > math.MaxUint32 {
		return out, fmt.Errorf("%sscale.requests_per_minute: %d is not between 0 and %d", within, rate, uint32(math.MaxUint32))
	}
	if c.Scale != (ScaleConfig{}) {
		out.Scale = &meshv1.ScaleSettings{RequestsPerMinute: uint32(rate), Busy: c.Scale.Busy, QueueTime: durationpb.New(c.Scale.QueueTime)}
	}
	if err := ValidateSettings(within, out); err != nil {
		return out, errors.New(fault.From(err).Message)
	}
	return out, nil
}

// ValidateSettings returns INVALID_REQUEST with the field that is invalid; within is what precedes
// its name.
func ValidateSettings(within string, s *meshv1.ModelSettings) error {
	invalid := func(field, format string, args ...any) error {
		return fault.InField(fault.InvalidRequest, within+field, format, args...)
	}
	if n := len(s.GetTypes()); n > maxTypes {
		return invalid("types", "%d types, at most %d are possible", n, maxTypes)
	}
	for _, name := range slices.Sorted(maps.Keys(s.GetTypes())) {
		field := fmt.Sprintf("types.%.*s", fault.MaxQuoted, name)
		labels := slices.Concat(s.GetTypes()[name].GetRequired(), s.GetTypes()[name].GetPreferred())
		if len(labels) > maxLabels {
			return invalid(field, "%d labels, at most %d are possible", len(labels), maxLabels)
		}
		for _, text := range append(labels, name) {
			if err := model.ID(text).Validate(); err != nil {
				return invalid(field, "%w", err)
			}
		}
	}
	busy, queueTime, capacity := s.GetScale().GetBusy(), s.GetScale().GetQueueTime().AsDuration(), SizeOf(s.GetCapacity())
	switch {
	case !(busy >= 0 && busy <= 1):
		return invalid("scale.busy", "%v is not between 0 and 1", busy)
	case queueTime < 0:
		return invalid("scale.queue_time", "%s is negative", queueTime)
	case capacity.Host < 0 || capacity.Device < 0:
		return invalid("capacity", "these are more bytes than a host can have")
	case s.GetLoadSlots() > MaxLoadSlots:
		return invalid("load_slots", "%d, at most %d are possible", s.GetLoadSlots(), MaxLoadSlots)
	}
	return nil
}
