package gateway

import (
	"cmp"
	"context"
	"errors"

	"golang.org/x/sync/errgroup"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/front/port"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// tenants serves the requests of tenants that come over the broker.
type tenants struct {
	answers errgroup.Group
	// cancel ends the requests that run.
	cancel context.CancelFunc
	// stopIntake has no more requests come, which is so once ended is closed.
	stopIntake func()
	ended      <-chan struct{}
}

// serveTenants begins to serve them; nil where that is off.
func (g *Gateway) serveTenants() (*tenants, error) {
	if !g.settings.Jobs.NATS {
		return nil, nil
	}
	ctx, cancel := context.WithCancel(context.Background())
	t := &tenants{cancel: cancel}
	t.answers.SetLimit(cmp.Or(g.settings.MaxInFlight, call.DefaultMaxInFlight))
	var err error
	t.stopIntake, t.ended, err = g.bus.ServeJobRequests(func(r bus.JobRequest) {
		t.answers.Go(func() error {
			g.answerTenant(ctx, r)
			return nil
		})
	})
	if err != nil {
		cancel()
	}
	return t, err
}

// stop stops to serve tenants: it has no more requests come, calls next, which rejects them, and
// ends those that still run then.
func (t *tenants) stop(next func() error) error {
	if t == nil {
		return next()
	}
	t.stopIntake()
	err := next()
	t.cancel()
	<-t.ended
	_ = t.answers.Wait() // they return no error
	return err
}

// answerTenant answers one request. The tenant is the one of its subject.
func (g *Gateway) answerTenant(ctx context.Context, r bus.JobRequest) {
	answer, err := func() ([]byte, error) {
		if err := pipeline.ValidName("tenant", r.Tenant); err != nil {
			return nil, fault.Newf(fault.InvalidRequest, "the subject names no tenant: %w", err)
		}
		memory := budget.NewAccount(g.settings.Call.Budget, r.Tenant)
		defer memory.Close()
		if err := memory.Reserve(int64(len(r.Data))); err != nil {
			return nil, err
		}
		return port.AnswerJobMessage(budget.WithTenant(budget.NewContext(ctx, memory), r.Tenant), g.jobs, r.Method, r.Data)
	}()
	if err == nil {
		if err = r.Respond(answer, 0, ""); errors.Is(err, bus.ErrTooLarge) {
			err = fault.Newf(fault.OutputTooLarge, "the answer does not fit into a message: %w", err)
		}
	}
	if err != nil {
		f := fault.From(err)
		err = r.Respond(transport.FaultJSON(f), f.HTTPStatus(), string(f.Reason)+": "+f.Message)
	}
	if err != nil {
		g.log.Debug("a tenant has no answer", "tenant", r.Tenant, "error", err)
	}
}
