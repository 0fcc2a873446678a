package stagehost

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/stageapi"
)

// listen takes the StageService's address before anything else starts, so that a
// conflict is reported at once and not after a model has loaded. Clients that
// connect before serveAPI wait.
func (h *Host) listen(ctx context.Context) error {
	if h.settings.Listen == "" {
		return nil
	}
	if h.settings.CertFile != "" {
		certificate, err := h.settings.pair().Load("stage " + string(h.settings.Stage) + ": ")
		if err != nil {
			return err
		}
		h.certificate = &certificate
	}
	var lc net.ListenConfig
	listener, err := lc.Listen(ctx, "tcp", h.settings.Listen)
	if err != nil {
		return fmt.Errorf("stage %s: listen: %w; stop what has the address, or have this host listen on another", h.settings.Stage, err)
	}
	h.listener = listener
	h.address.Store(listener.Addr())
	return nil
}

// unlisten closes the listener; a server has done so already.
func (h *Host) unlisten() {
	if h.listener != nil {
		_ = h.listener.Close()
	}
}

// serveAPI serves the gRPC StageService until the context ends, with the host's
// readiness as its health.
func (h *Host) serveAPI(ctx context.Context) error {
	if h.listener == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	h.settings.Logger.Info("stage service listens", "address", h.listener.Addr().String(), "tls", h.certificate != nil)
	var options []grpc.ServerOption
	if h.certificate != nil {
		config := &tls.Config{Certificates: []tls.Certificate{*h.certificate}, MinVersion: tls.VersionTLS12}
		options = append(options, grpc.Creds(credentials.NewTLS(config)))
	}
	server := stageapi.NewServer(h, maxDirectBytes, options...)
	h.runs.Go(func() { h.followStatus(server) })
	served := make(chan error, 1)
	h.runs.Go(func() { served <- server.Serve(h.listener) })
	select {
	case err := <-served:
		return fmt.Errorf("stage %s: serve: %w", h.settings.Stage, err)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// checkTLS is the TLS configuration of the registry's health check, which trusts
// the host's own certificate; nil without TLS.
func (h *Host) checkTLS() *tls.Config {
	if h.certificate == nil {
		return nil
	}
	own := x509.NewCertPool()
	own.AddCert(h.certificate.Leaf)
	return &tls.Config{RootCAs: own, ServerName: h.settings.ServerName, MinVersion: tls.VersionTLS12}
}

// followStatus keeps the health service true, and ends the server with the host,
// when direct calls in flight are finished.
func (h *Host) followStatus(server *stageapi.Server) {
	defer server.Stop()
	for {
		at, changed, _ := h.status.get()
		server.SetServing(at == stateReady)
		select {
		case <-changed:
		case <-h.hard.Done():
			return
		}
	}
}

// Addr returns where the StageService listens, or nil where it does not yet.
func (h *Host) Addr() net.Addr {
	addr, _ := h.address.Load().(net.Addr)
	return addr
}

// Describe implements stageapi.Stage.
func (h *Host) Describe() stageapi.Description {
	s := h.settings
	return stageapi.Description{
		Mesh: s.Mesh, Stage: s.Stage, Host: s.Host, Version: s.Version,
		Spec: h.spec,
		Limits: stageapi.Limits{
			MaxSize: s.Batch.MaxSize, MaxBytes: s.Batch.MaxBytes, MaxWait: s.Batch.MaxWait,
			MaxInFlight: s.MaxInFlight, Concurrency: s.Runner.Concurrency(),
		},
	}
}

// directCall is a call past the queue. Its capacity is free again when its item is
// finished, which may be after the caller has left.
type directCall struct {
	answer chan stageapi.Response
	leave  func()
}

// finish replies to the call. The loop calls it once.
func (d *directCall) finish(it *item, out outcome) {
	d.leave()
	d.answer <- stageapi.Response{Parts: out.parts, Metadata: out.metadata, Fault: out.fault, Timing: it.timing}
}

// Infer implements stageapi.Stage: it runs one request on this host, past the
// queue but within its own bound.
func (h *Host) Infer(ctx context.Context, r stageapi.Request) stageapi.Response {
	select {
	case h.directs <- struct{}{}:
	default:
		return stageapi.Response{Fault: fault.Newf(fault.Overloaded, "%d direct calls are in flight, the limit", maxDirectCalls)}
	}
	if err := h.Ready(); err != nil {
		h.leaveDirect()
		return stageapi.Response{Fault: fault.Newf(fault.ShuttingDown, "%w", err)}
	}
	it := h.directItem(ctx, r)
	h.post(&arrived{item: it, fault: h.fit(it)})
	select {
	case answer := <-it.direct.answer:
		return answer
	case <-ctx.Done():
		return stageapi.Response{Fault: fault.From(ctx.Err())}
	case <-h.looped:
		return stageapi.Response{Fault: fault.New(fault.ShuttingDown, "the host has stopped")}
	}
}

func (h *Host) leaveDirect() { <-h.directs }

func (h *Host) directItem(ctx context.Context, r stageapi.Request) *item {
	now := time.Now()
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = now.Add(h.settings.Queue.MaxAge)
	}
	id := uuid.Must(uuid.NewV7()).String()
	it := &item{
		arrived: now,
		direct:  &directCall{answer: make(chan stageapi.Response, 1), leave: h.leaveDirect},
		env: &envelope.Envelope{
			Mesh:        h.settings.Mesh,
			RequestID:   pipeline.RequestID(id),
			ExecutionID: pipeline.ExecutionID(id),
			Pipeline:    pipeline.OfStage(h.settings.Stage).Name,
			Route: []pipeline.Hop{{
				Step: pipeline.StepName(h.settings.Stage), Stage: h.settings.Stage,
				Model: r.Model, Parameters: r.Parameters,
			}},
			Deadline:   deadline,
			AdmittedAt: now,
			Metadata:   r.Metadata,
			Parts:      r.Inputs,
		},
	}
	it.timing = it.timingOf(h.settings.Host)
	return it
}
