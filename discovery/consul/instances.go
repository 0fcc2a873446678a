package consul

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/process"
)

const (
	// checkInterval is how often the agent checks an instance, or an instance without an
	// address renews itself.
	checkInterval = time.Second
	// checkTTL is how long an instance without an address is healthy without a renewal.
	checkTTL = 3 * time.Second
	// removeTimeout bounds the removal of an instance.
	removeTimeout = 2 * time.Second
)

// Watchers learn of a killed instance after its TTL, or after a check that begins an interval later
// and has as long: not negative, so it compiles.
const _ = uint(discovery.MaxDetectTime-checkTTL) + uint(discovery.MaxDetectTime-2*checkInterval)

// Announce implements discovery.Announcer.
func (r *Registry) Announce(ctx context.Context, i discovery.Instance, report func(error)) error {
	if err := i.Validate(); err != nil {
		return err
	}
	a := &announcement{registry: r, instance: i, id: i.Service + ":" + i.ID, report: report, status: api.HealthPassing}
	for ctx.Err() == nil {
		err := a.ensure(ctx)
		if errors.Is(err, discovery.ErrDenied) {
			return err
		}
		a.reportChange(ctx, err)
		_ = process.Sleep(ctx, checkInterval)
	}
	return a.remove(ctx)
}

// announcement keeps an instance of this process registered.
type announcement struct {
	registry *Registry
	instance discovery.Instance
	id       string
	report   func(error)
	// status is the first status of the check.
	status string

	// registered is true once the agent has accepted the instance. latest is what report
	// was called with last, and reported is true once it was called.
	registered, reported bool
	latest               error
}

// ensure registers the instance if the agent does not have it.
func (a *announcement) ensure(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	if a.registered {
		exists, err := a.renew(ctx)
		if err != nil || exists {
			return err
		}
		a.registry.log.Warn("the registry has lost an instance; registering it again", "service", a.instance.Service, "id", a.instance.ID)
		a.registered = false
		if a.instance.Address != "" {
			a.status = api.HealthCritical // it may have been unhealthy; the first check decides
		}
	}
	s, err := a.registration()
	if err != nil {
		return err
	}
	err = a.registry.client.Agent().ServiceRegisterOpts(s, api.ServiceRegisterOpts{ReplaceExistingChecks: true}.WithContext(ctx))
	a.registered = err == nil
	return classify(err)
}

// renew reports whether the agent still has the instance, and passes the check of an
// instance without an address.
func (a *announcement) renew(ctx context.Context) (bool, error) {
	agent, q := a.registry.client.Agent(), a.registry.options(ctx)
	var err error
	if a.instance.Address == "" {
		err = agent.UpdateTTLOpts("service:"+a.id, "", api.HealthPassing, q)
	} else {
		_, _, err = agent.Service(a.id, q)
	}
	var status api.StatusError
	if errors.As(err, &status) && status.Code == http.StatusNotFound {
		return false, nil
	}
	return err == nil, classify(err)
}

func (a *announcement) registration() (*api.AgentServiceRegistration, error) {
	check := &api.AgentServiceCheck{Status: a.status, DeregisterCriticalServiceAfter: criticalAfter.String()}
	s := &api.AgentServiceRegistration{ID: a.id, Name: a.instance.Service, Meta: a.instance.Meta, Check: check}
	if a.instance.Address == "" {
		check.TTL = checkTTL.String()
		return s, nil
	}
	host, port, err := net.SplitHostPort(a.instance.Address)
	if err != nil {
		return nil, err
	}
	if s.Port, err = strconv.Atoi(port); err != nil {
		return nil, fmt.Errorf("%w: address: port %q is not a number", discovery.ErrInvalid, port)
	}
	s.Address = host
	// The agent asks for the health of the part behind the slash.
	check.GRPC, check.Interval, check.Timeout = a.instance.Address+"/"+a.instance.ID, checkInterval.String(), checkInterval.String()
	if a.instance.TLS != nil {
		check.GRPCUseTLS, check.TLSServerName = true, a.instance.TLS.ServerName
	}
	return s, nil
}

// reportChange reports whether the instance is registered, if that has changed.
func (a *announcement) reportChange(ctx context.Context, err error) {
	if ctx.Err() != nil || a.reported && (err == nil) == (a.latest == nil) {
		return
	}
	if err != nil {
		a.registry.log.Warn("an instance is not registered; retrying", "service", a.instance.Service, "id", a.instance.ID, "error", err)
	}
	a.reported, a.latest = true, err
	a.report(err)
}

// remove deregisters the instance after the context has ended. A successor with its ID, which has
// another address or other metadata, stays.
func (a *announcement) remove(ctx context.Context) error {
	if !a.registered {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	agent, q := a.registry.client.Agent(), a.registry.options(ctx)
	stored, _, err := agent.Service(a.id, q)
	if err == nil && (addressOf(stored) != a.instance.Address || !maps.Equal(stored.Meta, a.instance.Meta)) {
		return nil
	}
	if err := agent.ServiceDeregisterOpts(a.id, q); err != nil {
		return fmt.Errorf("instance %s of %s remains until its check fails: %w", a.instance.ID, a.instance.Service, classify(err))
	}
	return nil
}

// Watch implements discovery.Watcher.
func (r *Registry) Watch(ctx context.Context, service string, o discovery.Observer[discovery.Snapshot]) error {
	if err := discovery.ValidateService(service); err != nil {
		return err
	}
	var now, reported discovery.Snapshot
	query := func(q *api.QueryOptions) (*api.QueryMeta, error) {
		entries, meta, err := r.client.Health().Service(service, "", true, q)
		if err != nil {
			return nil, err
		}
		now = discovery.Snapshot{Instances: healthyInstances(service, entries), Revision: discovery.Revision(meta.LastIndex)}
		return meta, nil
	}
	return r.poll(ctx, "service "+service, o.OnDisconnect, query, func(fresh bool) {
		if fresh || !reflect.DeepEqual(now.Instances, reported.Instances) {
			reported = now
			o.OnUpdate(now)
		}
	})
}

// Passing returns how many instances of a service pass their checks, whoever registered them.
func (r *Registry) Passing(ctx context.Context, service string) (int, error) {
	entries, _, err := r.client.Health().Service(service, "", true, r.options(ctx))
	return len(entries), classify(err)
}

// addressOf returns an instance's address, "" if it has none.
func addressOf(s *api.AgentService) string {
	if s.Port == 0 {
		return ""
	}
	return net.JoinHostPort(s.Address, strconv.Itoa(s.Port))
}

func healthyInstances(service string, entries []*api.ServiceEntry) []discovery.Instance {
	out := make([]discovery.Instance, 0, len(entries))
	for _, e := range entries {
		id, announced := strings.CutPrefix(e.Service.ID, service+":")
		if !announced {
			continue // another program registered it under that name
		}
		out = append(out, discovery.Instance{Service: service, ID: id, Address: addressOf(e.Service), Meta: maps.Clone(e.Service.Meta)})
	}
	slices.SortFunc(out, func(a, b discovery.Instance) int { return strings.Compare(a.ID, b.ID) })
	return out
}
