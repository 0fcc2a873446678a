package adminapi

import (
	"context"
	"net/http"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"

	"github.com/stagemesh/stagemesh/discovery/roster"
	"github.com/stagemesh/stagemesh/gateway/front/procedure"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Roster is who is in the mesh.
type Roster interface {
	Hosts() []roster.Host
	// Loaded waits until the registry has been heard of for the first time.
	Loaded(ctx context.Context) error
	// Stale returns since when the registry cannot be reached, and why.
	Stale() (since time.Time, why error)
}

var _ Roster = (*roster.View)(nil)

func (s Settings) meshHandler() (string, http.Handler) {
	descriptor := adminv1.File_stagemesh_admin_v1_mesh_proto.Services().ByName("MeshService")
	out := procedure.NewService(descriptor, procedure.Settings{MaxMessageBytes: maxMessageBytes})
	procedure.Unary(out, "ListHosts", func(ctx context.Context, in procedure.Request[*adminv1.ListHostsRequest]) (*connect.Response[adminv1.ListHostsResponse], error) {
		answer, err := s.listHosts(ctx, in.Message)
		if err != nil {
			return nil, err
		}
		return connect.NewResponse(answer), nil
	})
	return out.Path(), out
}

// firstWord is how long a question waits for the registry's first word.
const firstWord = 2 * time.Second

func (s Settings) listHosts(ctx context.Context, in *adminv1.ListHostsRequest) (*adminv1.ListHostsResponse, error) {
	if s.Roster == nil {
		return nil, fault.New(fault.NotSupported, "the mesh has no registry; its file names one in the section registry")
	}
	if stage := in.GetStage(); stage != "" {
		if err := pipeline.ValidName("stage", stage); err != nil {
			return nil, fault.New(fault.InvalidRequest, err.Error()).WithViolation("stage", "%v", err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, firstWord)
	defer cancel()
	if err := s.Roster.Loaded(ctx); err != nil {
		return nil, fault.New(fault.RegistryUnavailable, "the gateway has not heard of the registry yet").Caused(err).WithRetryAfter(retryAfter)
	}
	out := &adminv1.ListHostsResponse{}
	for _, host := range s.Roster.Hosts() {
		if in.GetStage() == "" || in.GetStage() == host.Record.GetStage() {
			out.Hosts = append(out.Hosts, &adminv1.HostStatus{Record: host.Record, Alive: host.Alive})
		}
	}
	if since, why := s.Roster.Stale(); !since.IsZero() {
		out.StaleSince = timestamppb.New(since)
		if why != nil {
			out.StaleCause = why.Error()
		}
	}
	return out, nil
}
