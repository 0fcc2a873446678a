package adminapi

import (
	"context"
	"time"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/gateway/front/procedure"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Roster is who is in the mesh.
type Roster interface {
	Hosts() []discovery.Host
	// Loaded waits until the registry has been heard of for the first time.
	Loaded(ctx context.Context) error
	// Stale returns since when the registry cannot be reached, and why.
	Stale() (since time.Time, why error)
	// Changed returns a channel that is closed with the next change.
	Changed() <-chan struct{}
}

var _ Roster = (*discovery.Membership)(nil)

// crowd answers about hosts.
type crowd struct{ roster Roster }

// firstWord is how long a question waits for the registry's first word.
const firstWord = 2 * time.Second

func (c crowd) list(ctx context.Context, in *adminv1.ListHostsRequest) (*adminv1.ListHostsResponse, error) {
	if c.roster == nil {
		return nil, fault.New(fault.NotSupported, "the mesh has no registry; its file names one in the section registry")
	}
	if stage := in.GetStage(); stage != "" {
		if err := pipeline.ValidName("stage", stage); err != nil {
			return nil, procedure.Invalid("stage", err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, firstWord)
	defer cancel()
	if err := c.roster.Loaded(ctx); err != nil {
		return nil, fault.New(fault.RegistryUnavailable, "the gateway has not heard of the registry yet").Caused(err).WithRetryAfter(retryAfter)
	}
	out := &adminv1.ListHostsResponse{}
	for _, host := range c.roster.Hosts() {
		if in.GetStage() == "" || in.GetStage() == host.Record.GetStage() {
			out.Hosts = append(out.Hosts, &adminv1.HostStatus{Record: host.Record, Alive: host.Alive})
		}
	}
	out.StaleSince, out.StaleCause = stale(c.roster.Stale())
	return out, nil
}

func (c crowd) look(ctx context.Context, in *adminv1.WatchHostsRequest) (*adminv1.WatchHostsResponse, error) {
	all, err := c.list(ctx, &adminv1.ListHostsRequest{Stage: in.GetStage()})
	if err != nil {
		return nil, err
	}
	return &adminv1.WatchHostsResponse{Hosts: all.GetHosts(), StaleSince: all.GetStaleSince(), StaleCause: all.GetStaleCause()}, nil
}

// changed returns a channel that is closed with the next change of the hosts; nil
// where nobody knows of any.
func (c crowd) changed() <-chan struct{} {
	if c.roster == nil {
		return nil
	}
	return c.roster.Changed()
}
