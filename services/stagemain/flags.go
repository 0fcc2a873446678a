package stagemain

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/meshfile"
	"github.com/stagemesh/stagemesh/services/program"
	"github.com/stagemesh/stagemesh/services/registry"
	"github.com/stagemesh/stagemesh/stagehost"
)

// flags are what the user said; empty ones leave it to the file.
type flags struct {
	*program.Flags
	stage, host, listen string
}

func (f *flags) add(cmd *cobra.Command) {
	f.Flags = program.AddFlags(cmd)
	cmd.Flags().StringVar(&f.stage, "stage", "", "the stage to serve")
	cmd.Flags().StringVar(&f.host, "host", "", "this host's id; a new one if empty")
	cmd.Flags().StringVar(&f.listen, "listen", "", "the address of the gRPC StageService, instead of the stage's listen in the file")
}

// settings returns the host's settings, and its registry's, nil where there is none:
// the file's, with the flags before them.
func (f flags) settings(kinds []meshfile.Kind) (out stagehost.Settings, known *registry.Settings, err error) {
	file, err := f.Read(kinds...)
	if err != nil {
		return out, nil, err
	}
	if err := f.validate(file); err != nil {
		return out, nil, err
	}
	if out, err = file.Host(f.stage); err != nil {
		return out, nil, err
	}
	out.Listen = cmp.Or(f.listen, out.Listen)
	out.Host = pipeline.HostID(cmp.Or(f.host, uuid.Must(uuid.NewV7()).String()))
	return out, file.RegistrySettings(), nil
}

// validate checks the flags; messages name them.
func (f flags) validate(file *meshfile.File) error {
	if f.stage == "" {
		return fmt.Errorf("--stage: is missing; %s has %s", f.Config, cmp.Or(strings.Join(file.StageNames(), ", "), "none"))
	}
	return f.Validate(file, "a process of one stage meets the others",
		program.Check{Name: "--host", Value: f.host, Valid: func(id string) error { return pipeline.ValidName("host", id) }},
		program.Check{Name: "--listen", Value: f.listen, Valid: meshfile.ValidAddress})
}
