package pipeline

import (
	"fmt"
	"regexp"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
)

// Names of things. Meshes, stages and steps match ValidName, so each is a subject token, a stream
// name's part and a DNS label. That of a pipeline is none of these.
type (
	// MeshName names one installation.
	MeshName string
	// StageName names a function of the mesh.
	StageName string
	// StepName names a place in a pipeline.
	StepName string
	// Name names a pipeline, or is "stage:<stage>", "model:<id>" or "alias:<name>".
	Name string
	// HostID names one running stage-host process.
	HostID string
	// GatewayID names one running gateway process.
	GatewayID string
	// QueueName names a queue of jobs.
	QueueName string
	// RequestID identifies a request to its caller.
	RequestID string
	// ExecutionID is one run of a request through its route.
	ExecutionID string
)

const maxName = 63

// ValidName checks a mesh, stage, step, host or gateway name. The
// kind is for the message: "stage".
func ValidName(kind, name string) error {
	if validName(name) {
		return nil
	}
	if len(name) > maxName+1 {
		name = name[:maxName+1] + "..."
	}
	return fmt.Errorf("%s name %q: use 1 to %d of a-z, 0-9 and -, neither first nor last a -", kind, name, maxName)
}

func validName(name string) bool {
	if len(name) == 0 || len(name) > maxName || name[0] == '-' || name[len(name)-1] == '-' {
		return false
	}
	for i := range len(name) {
		if c := name[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return true
}

var (
	pipelineName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$`)
	// serviceName are the RPC services of a gateway: gRPC health takes both names.
	serviceName = regexp.MustCompile(`^((stagemesh|grpc|mmesh)\.|inference\.GRPCInferenceService$)`)
)

// ValidPipelineName checks the name of a pipeline, which may be a name of a Triton model.
func ValidPipelineName(name string) error {
	switch {
	case !pipelineName.MatchString(name):
		return fmt.Errorf("pipeline name %.*q: use 1 to %d of A-Z, a-z, 0-9, -, _ and ., first and last a letter or digit", maxName+1, name, maxName)
	case serviceName.MatchString(name):
		return fmt.Errorf("pipeline name %q: it is reserved for RPC services", name)
	}
	return nil
}

// Durability is where an item waits between stages.
type Durability string

// The durabilities. Unset means the pipeline's own, and Memory if it has none.
const (
	DurabilityUnset Durability = ""
	Memory          Durability = "memory"
	File            Durability = "file"
)

// ParseDurability reads "memory", "file" or "".
func ParseDurability(s string) (Durability, error) {
	switch d := Durability(s); d {
	case DurabilityUnset, Memory, File:
		return d, nil
	}
	return "", fmt.Errorf("durability %q: use memory or file", s)
}

// DurabilityFromProto converts a durability from outside.
func DurabilityFromProto(d inferencev1.Durability) (Durability, error) {
	switch d {
	case inferencev1.Durability_DURABILITY_UNSPECIFIED:
		return DurabilityUnset, nil
	case inferencev1.Durability_DURABILITY_MEMORY:
		return Memory, nil
	case inferencev1.Durability_DURABILITY_FILE:
		return File, nil
	}
	return "", fmt.Errorf("durability %d is unknown", d)
}

// ToProto converts the durability for the wire.
func (d Durability) ToProto() inferencev1.Durability {
	switch d {
	case Memory:
		return inferencev1.Durability_DURABILITY_MEMORY
	case File:
		return inferencev1.Durability_DURABILITY_FILE
	default:
		return inferencev1.Durability_DURABILITY_UNSPECIFIED
	}
}

// Class is a priority class: each has a queue of its own.
type Class string

// The classes, first served first.
const (
	High   Class = "high"
	Normal Class = "normal"
	Low    Class = "low"
)

// Classes returns all classes, first served first.
func Classes() []Class { return []Class{High, Normal, Low} }

// ClassCount is the number of classes.
const ClassCount = 3

// Index returns the class's place in Classes; Normal's for an unknown class.
func (c Class) Index() int {
	switch c {
	case High:
		return 0
	case Low:
		return 2
	default:
		return 1
	}
}

// ClassOf returns the class of a priority: above 0, 0, below 0.
func ClassOf(priority int32) Class {
	switch {
	case priority > 0:
		return High
	case priority < 0:
		return Low
	default:
		return Normal
	}
}
