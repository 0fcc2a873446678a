package pipeline

import "fmt"

// Names of things. Meshes, stages, pipelines and steps match ValidName, so each
// is a subject token, a stream name's part and a DNS label.
type (
	// MeshName names one installation.
	MeshName string
	// StageName names a function of the mesh.
	StageName string
	// StepName names a place in a pipeline.
	StepName string
	// Name names a pipeline, or is "stage:<stage>".
	Name string
	// HostID names one running stage-host process.
	HostID string
	// GatewayID names one running gateway process.
	GatewayID string
	// RequestID is what a caller knows a request by.
	RequestID string
	// ExecutionID is one attempt by one caller to have a request done.
	ExecutionID string
)

const maxName = 63

// ValidName checks a mesh, stage, pipeline, step, host or gateway name. The
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
