package payload

import (
	"fmt"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
)

// ModelRef names a model by id or else, where Alias is set, by a movable name.
// The zero ModelRef is the stage's default.
type ModelRef struct {
	Model   string
	Alias   string
	Version string
}

// Validate checks that the reference names a model in one way only.
func (m ModelRef) Validate() error {
	if m.Model != "" && m.Alias != "" {
		return fmt.Errorf("names the model %.*q and the alias %.*q; name one of them", MaxName, m.Model, MaxName, m.Alias)
	}
	return nil
}

// ModelFromProto converts a reference from outside; nil is the default.
func ModelFromProto(in *inferencev1.ModelRef) ModelRef {
	return ModelRef{Model: in.GetModel(), Alias: in.GetAlias(), Version: in.GetVersion()}
}

// ToProto converts the reference for the wire; the default is nil.
func (m ModelRef) ToProto() *inferencev1.ModelRef {
	switch {
	case m == ModelRef{}:
		return nil
	case m.Alias != "":
		return &inferencev1.ModelRef{Name: &inferencev1.ModelRef_Alias{Alias: m.Alias}, Version: m.Version}
	default:
		return &inferencev1.ModelRef{Name: &inferencev1.ModelRef_Model{Model: m.Model}, Version: m.Version}
	}
}
