// Package gatewayfile is what a mesh's file says about its gateways, for the mesh
// in one process and for the gateway that is a program of its own.
package gatewayfile

import (
	"errors"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/services/meshfile"
)

// Settings returns what the section gateway says. The mesh, its broker and its
// pipelines are for the caller to add. Errors say where in the file they are.
func Settings(f *meshfile.File) (gateway.Settings, error) {
	g, admin := f.PublicPort(), Admin(f)
	access := gateway.Access{TokenFile: g.TokenFile, CertFile: g.CertFile, KeyFile: g.KeyFile}
	if err := errors.Join(f.At(access.Validate(), "gateway"), f.At(admin.Validate(), "gateway", "admin")); err != nil {
		return gateway.Settings{}, err
	}
	return gateway.Settings{
		Call: call.Settings{
			Timeout: g.Timeout, MaxTimeout: g.MaxTimeout, MaxInFlight: g.MaxInFlight,
			MaxPayload: int(g.MaxPayload), Metadata: g.Metadata, HostGrace: g.HostGrace,
		},
		Listen:       g.Listen,
		Access:       access,
		Admin:        admin,
		NoDocs:       g.Docs != nil && !*g.Docs,
		AllowOrigins: g.AllowOrigins,
		DrainDelay:   g.DrainDelay,
		DrainTimeout: g.DrainTimeout,

		MaxInFlightBytes: int(g.MaxInFlightBytes),
	}, nil
}

// Admin returns the port for operators as a file describes it.
func Admin(f *meshfile.File) gateway.Admin {
	a := f.AdminPort()
	return gateway.Admin{Listen: a.Listen, Access: gateway.Access{TokenFile: a.TokenFile, CertFile: a.CertFile, KeyFile: a.KeyFile}}
}
