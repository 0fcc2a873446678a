package stagemain

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/logflags"
	"github.com/stagemesh/stagemesh/services/meshfile"
	"github.com/stagemesh/stagemesh/services/registry"
	"github.com/stagemesh/stagemesh/stagehost"
)

// flags are what the user said; empty ones leave it to the file.
type flags struct {
	config, stage     string
	nats              string
	host, listen, ops string
	log               *logflags.Flags
}

func (f *flags) add(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&f.config, "config", "c", "mesh.yaml", "the mesh's file")
	cmd.Flags().StringVar(&f.stage, "stage", "", "the stage to serve")
	cmd.Flags().StringVar(&f.nats, "nats", "", "the broker's URL, instead of nats.url in the file")
	cmd.Flags().StringVar(&f.host, "host", "", "this host's id; a new one if empty")
	cmd.Flags().StringVar(&f.listen, "listen", "", "the address of the gRPC StageService, instead of the stage's listen in the file")
	cmd.Flags().StringVar(&f.ops, "ops", "127.0.0.1:0", "the address of /livez, /readyz, /metrics and /debug/pprof; port 0 picks one and says which")
	f.log = logflags.Add(cmd)
}

var errNoBroker = errors.New("--nats: is missing, and so is nats.url in the file; a process of one stage meets the others at a broker, such as nats://127.0.0.1:4222")

// settings returns the host's settings, and its registry's, nil where there is none:
// the file's, with the flags before them.
func (f flags) settings(kinds []meshfile.Kind) (out stagehost.Settings, known *registry.Settings, err error) {
	file, err := meshfile.Read(f.config, kinds...)
	if err != nil {
		return out, nil, meshfile.FlagError("--config", err)
	}
	if err := f.validate(file); err != nil {
		return out, nil, err
	}
	if out, err = file.Host(f.stage); err != nil {
		return out, nil, err
	}
	out.Bus.URL = cmp.Or(f.nats, out.Bus.URL)
	out.Listen = cmp.Or(f.listen, out.Listen)
	out.Host = pipeline.HostID(cmp.Or(f.host, uuid.Must(uuid.NewV7()).String()))
	if known = file.RegistrySettings(); known != nil && known.NATS != nil {
		known.NATS.URL = out.Bus.URL
	}
	return out, known, nil
}

// validate checks the flags; messages name them.
func (f flags) validate(file *meshfile.File) error {
	if f.stage == "" {
		return fmt.Errorf("--stage: is missing; %s has %s", f.config, cmp.Or(strings.Join(file.StageNames(), ", "), "none"))
	}
	if f.nats == "" && file.NATS.URL == "" {
		return errNoBroker
	}
	for _, flag := range []struct {
		name, value string
		check       func(string) error
	}{
		{"--nats", f.nats, meshfile.ValidBroker},
		{"--host", f.host, func(id string) error { return pipeline.ValidName("host", id) }},
		{"--listen", f.listen, meshfile.ValidAddress},
		{"--ops", f.ops, meshfile.ValidAddress},
	} {
		if flag.value == "" {
			continue
		}
		if err := flag.check(flag.value); err != nil {
			return fmt.Errorf("%s: %w", flag.name, err)
		}
	}
	return nil
}
