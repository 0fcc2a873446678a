package consul

import (
	"context"
	"maps"
	"net"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/hashicorp/consul/api"

	"github.com/stagemesh/stagemesh/discovery"
)

// Watch implements discovery.Watcher.
func (r *Registry) Watch(ctx context.Context, service string, o discovery.Observer[discovery.Snapshot]) error {
	if err := discovery.ValidService(service); err != nil {
		return err
	}
	var now, told discovery.Snapshot
	ask := func(q *api.QueryOptions) (*api.QueryMeta, error) {
		entries, meta, err := r.client.Health().Service(service, "", true, q)
		if err != nil {
			return nil, err
		}
		now = discovery.Snapshot{Instances: instancesOf(service, entries), Revision: discovery.Revision(meta.LastIndex)}
		return meta, nil
	}
	return r.block(ctx, "service "+service, o.Lose, ask, func(fresh bool) {
		if fresh || !reflect.DeepEqual(now.Instances, told.Instances) {
			told = now
			o.See(now)
		}
	})
}

func instancesOf(service string, entries []*api.ServiceEntry) []discovery.Instance {
	out := make([]discovery.Instance, 0, len(entries))
	for _, e := range entries {
		id, ours := strings.CutPrefix(e.Service.ID, service+":")
		if !ours {
			continue // somebody else's of that name
		}
		i := discovery.Instance{Service: service, ID: id, Meta: maps.Clone(e.Service.Meta)}
		if e.Service.Port != 0 {
			i.Address = net.JoinHostPort(e.Service.Address, strconv.Itoa(e.Service.Port))
		}
		out = append(out, i)
	}
	slices.SortFunc(out, func(a, b discovery.Instance) int { return strings.Compare(a.ID, b.ID) })
	return out
}
