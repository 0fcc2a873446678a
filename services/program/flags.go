package program

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/services/logflags"
	"github.com/stagemesh/stagemesh/services/meshfile"
)

// Flags are those that every program has; empty ones leave it to the file.
type Flags struct {
	// Config is the mesh's file.
	Config string
	// NATS is the broker's URL.
	NATS string
	// Ops is the address of the operations port.
	Ops string
	Log *logflags.Flags
}

// AddFlags adds the flags to a command, which fills them in.
func AddFlags(cmd *cobra.Command) *Flags {
	f := &Flags{}
	cmd.Flags().StringVarP(&f.Config, "config", "c", "mesh.yaml", "the mesh's file")
	cmd.Flags().StringVar(&f.NATS, "nats", "", "the broker's URL, instead of nats.url in the file")
	cmd.Flags().StringVar(&f.Ops, "ops", "127.0.0.1:0", "the address of /livez, /readyz, /metrics and /debug/pprof; port 0 picks one and says which")
	f.Log = logflags.Add(cmd)
	return f
}

// Read reads the mesh's file, with the broker's URL before that in the file.
func (f *Flags) Read(kinds ...meshfile.Kind) (*meshfile.File, error) {
	if f.NATS != "" {
		if err := meshfile.ValidBroker(f.NATS); err != nil {
			return nil, fmt.Errorf("--nats: %w", err)
		}
	}
	file, err := meshfile.ReadAt(f.Config, f.NATS, kinds...)
	if err != nil {
		return nil, meshfile.FlagError("--config", err)
	}
	return file, nil
}

// Check is a flag of one program and how its value is checked, where it is not empty.
type Check struct {
	Name, Value string
	Valid       func(string) error
}

// Validate checks the flags, and those of the program's own; messages name them. What
// meets says who meets whom at the broker, for where none is given.
func (f *Flags) Validate(file *meshfile.File, meets string, own ...Check) error {
	if file.NATS.URL == "" {
		return fmt.Errorf("--nats: is missing, and so is nats.url in the file; %s at a broker, such as nats://127.0.0.1:4222", meets)
	}
	checks := append([]Check{{"--ops", f.Ops, meshfile.ValidAddress}}, own...)
	for _, flag := range checks {
		if flag.Value == "" {
			continue
		}
		if err := flag.Valid(flag.Value); err != nil {
			return fmt.Errorf("%s: %w", flag.Name, err)
		}
	}
	return nil
}
