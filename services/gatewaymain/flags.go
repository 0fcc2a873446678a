package gatewaymain

import (
	"cmp"
	"errors"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/gatewayfile"
	"github.com/stagemesh/stagemesh/services/meshfile"
	"github.com/stagemesh/stagemesh/services/program"
	"github.com/stagemesh/stagemesh/services/registry"
)

// flags are what the user said; empty ones leave it to the file.
type flags struct {
	*program.Flags
	listen, admin string
}

func (f *flags) add(cmd *cobra.Command) {
	f.Flags = program.AddFlags(cmd)
	cmd.Flags().StringVar(&f.listen, "listen", "", "the address for callers, instead of gateway.listen in the file; port 0 picks one and says which")
	cmd.Flags().StringVar(&f.admin, "admin", "", "the address for operators, instead of gateway.admin.listen in the file")
}

// settings returns the gateway's settings, and its registry's, nil where there is
// none: the file's, with the flags before them.
func (f flags) settings() (out gateway.Settings, known *registry.Settings, err error) {
	// A gateway runs no stage, so it knows no kinds of runners.
	file, err := f.Read()
	if err != nil {
		return out, nil, err
	}
	if err := f.validate(file); err != nil {
		return out, nil, err
	}
	if err := file.ValidatePart(nil); err != nil {
		return out, nil, err
	}
	if out, err = gatewayfile.Settings(file); err != nil {
		return out, nil, err
	}
	out.Listen, out.Admin.Listen = cmp.Or(f.listen, out.Listen), cmp.Or(f.admin, out.Admin.Listen)
	if out.Pipelines, err = file.Routes(); err != nil {
		return out, nil, err
	}
	out.Bus = bus.Settings{URL: file.NATS.URL, Auth: file.BrokerAuth()}
	out.Call.Mesh = pipeline.MeshName(file.Mesh)
	out.Call.Gateway = pipeline.GatewayID(uuid.Must(uuid.NewV7()).String())
	out.Call.Results, out.Call.Idempotency = file.ResultSettings(), file.IdempotencySettings()
	return out, file.RegistrySettings(), nil
}

// validate checks the flags; messages name them.
func (f flags) validate(file *meshfile.File) error {
	return f.Validate(file, "a gateway meets the stages",
		program.Check{Name: "--listen", Value: f.listen, Valid: meshfile.ValidAddress},
		program.Check{Name: "--admin", Value: f.admin, Valid: func(address string) error {
			admin := gatewayfile.Admin(file)
			admin.Listen = address
			return errors.Join(meshfile.ValidAddress(address), admin.Validate())
		}})
}
