package consul

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/stagemesh/stagemesh/discovery"
)

const (
	// checkEvery is how often the agent asks an instance how it is, or the instance
	// says so.
	checkEvery = time.Second
	// checkTTL is how long an instance may be silent that says so itself.
	checkTTL = 3 * time.Second
	// leaveTime is how long an instance takes at most to be removed.
	leaveTime = 2 * time.Second
)

// Announce implements discovery.Announcer.
func (r *Registry) Announce(ctx context.Context, i discovery.Instance, state func(error)) error {
	if err := i.Validate(); err != nil {
		return err
	}
	a := &announced{registry: r, instance: i, id: i.Service + ":" + i.ID, state: state}
	for ctx.Err() == nil {
		err := a.keep(ctx)
		if errors.Is(err, discovery.ErrDenied) {
			return err
		}
		a.tell(ctx, err)
		sleep(ctx, checkEvery)
	}
	return a.leave(ctx)
}

// announced is an instance of this process.
type announced struct {
	registry *Registry
	instance discovery.Instance
	id       string
	state    func(error)

	// registered says that the agent was given the instance; told is what state
	// was told last, and heard that it was told anything.
	registered, heard bool
	told              error
}

// keep makes sure that the agent has the instance.
func (a *announced) keep(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	if a.registered {
		there, err := a.there(ctx)
		if err != nil || there {
			return err
		}
		a.registry.log.Warn("the registry has lost an instance; registering it again", "service", a.instance.Service, "id", a.instance.ID)
		a.registered = false
	}
	s, err := a.service()
	if err != nil {
		return err
	}
	err = a.registry.client.Agent().ServiceRegisterOpts(s, api.ServiceRegisterOpts{ReplaceExistingChecks: true}.WithContext(ctx))
	a.registered = err == nil
	return failure(err)
}

// there reports whether the agent has the instance still, and says on the way that
// it is well where nobody asks it.
func (a *announced) there(ctx context.Context) (bool, error) {
	agent, q := a.registry.client.Agent(), a.registry.query(ctx)
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
	return err == nil, failure(err)
}

func (a *announced) service() (*api.AgentServiceRegistration, error) {
	check := &api.AgentServiceCheck{
		Status: api.HealthPassing, DeregisterCriticalServiceAfter: a.registry.settings.CriticalAfter.String(),
	}
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
		return nil, fmt.Errorf("%w: address: port %q is no number", discovery.ErrInvalid, port)
	}
	s.Address = host
	check.GRPC, check.Interval, check.Timeout = a.instance.Address, checkEvery.String(), checkEvery.String()
	if a.instance.TLS != nil {
		check.GRPCUseTLS, check.TLSServerName = true, a.instance.TLS.ServerName
	}
	return s, nil
}

// tell says where the instance is, when that changes.
func (a *announced) tell(ctx context.Context, err error) {
	if ctx.Err() != nil || a.heard && (err == nil) == (a.told == nil) {
		return
	}
	if err != nil {
		a.registry.log.Warn("an instance is not registered; trying again", "service", a.instance.Service, "id", a.instance.ID, "error", err)
	}
	a.heard, a.told = true, err
	a.state(err)
}

// leave removes the instance after the end of the context.
func (a *announced) leave(ctx context.Context) error {
	if !a.registered {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTime)
	defer cancel()
	if err := a.registry.client.Agent().ServiceDeregisterOpts(a.id, a.registry.query(ctx)); err != nil {
		return fmt.Errorf("instance %s of %s is left to its check: %w", a.instance.ID, a.instance.Service, failure(err))
	}
	return nil
}
