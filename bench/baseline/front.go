package baseline

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"sync"

	"connectrpc.com/connect"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/internal/front/port"
)

// Front takes requests, and answers them; on a route without stages at once.
type Front struct {
	inferencev1connect.UnimplementedInferenceServiceHandler

	nc     *nats.Conn
	js     jetstream.JetStream
	route  Route
	server *http.Server
	addr   net.Addr
	// served gets what serving has ended with, and calls are those that have not.
	served chan error
	calls  sync.WaitGroup

	mu      sync.Mutex
	next    uint64
	waiting map[uint64]chan []byte
}

// idBytes is how long that is which says what request a message is of.
const idBytes = 8

// Bounds on the answers that wait to be handed on, as in the mesh's gateway. What is
// beyond them is lost.
const (
	pendingAnswers = 1 << 16
	pendingBytes   = 512 << 20
)

// StartFront makes the route's streams, and listens on a free port of 127.0.0.1.
func StartFront(ctx context.Context, broker Broker, route Route) (*Front, error) {
	nc, err := broker.connect("baseline front")
	if err != nil {
		return nil, err
	}
	f := &Front{nc: nc, route: route, served: make(chan error, 1), waiting: map[uint64]chan []byte{}}
	if err := f.start(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("baseline: %w", err), f.Stop())
	}
	return f, nil
}

func (f *Front) start(ctx context.Context) (err error) {
	if f.js, err = jetstream.New(f.nc, jetstream.WithPublishAsyncMaxPending(maxWaiting)); err != nil {
		return err
	}
	if err := f.route.create(ctx, f.js); err != nil {
		return err
	}
	answers, err := f.nc.Subscribe(f.route.answers(), f.answered)
	if err != nil {
		return err
	}
	if err := answers.SetPendingLimits(pendingAnswers, pendingBytes); err != nil {
		return err
	}
	if err := f.nc.Flush(); err != nil {
		return err
	}
	var lc net.ListenConfig
	listener, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	// Else every answer would be compressed, as clients offer it. The gateway does not.
	mux.Handle(inferencev1connect.NewInferenceServiceHandler(f, connect.WithCompressMinBytes(math.MaxInt)))
	if len(f.route.Stages) == 0 {
		mux.HandleFunc("POST /v1/pipelines/", echo)
	}
	// The server's settings are the gateway's.
	f.server, f.addr = port.NewServer(mux, slog.New(slog.DiscardHandler)), listener.Addr()
	go func() { f.served <- f.server.Serve(listener) }()
	return nil
}

// URL is where callers ask it, by gRPC or Connect.
func (f *Front) URL() string { return "http://" + f.addr.String() }

// Infer takes one input through the route. It implements the service's method.
func (f *Front) Infer(ctx context.Context, r *connect.Request[inferencev1.InferRequest]) (*connect.Response[inferencev1.InferResponse], error) {
	if len(r.Msg.GetInputs()) != 1 {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("the baseline takes one input"))
	}
	f.calls.Add(1)
	defer f.calls.Done()
	part := r.Msg.GetInputs()[0]
	if len(f.route.Stages) == 0 {
		return connect.NewResponse(&inferencev1.InferResponse{Outputs: r.Msg.GetInputs()}), nil
	}
	id, answer := f.register()
	defer f.forget(id)
	message := append(binary.LittleEndian.AppendUint64(make([]byte, 0, idBytes+len(bytesOf(part))), id), bytesOf(part)...)
	stored, err := f.js.PublishAsync(f.route.subject(0), message)
	if err != nil {
		return nil, connect.NewError(connect.CodeUnavailable, err)
	}
	select {
	case data := <-answer:
		return connect.NewResponse(&inferencev1.InferResponse{Outputs: []*inferencev1.Part{withBytes(part, data)}}), nil
	case err := <-stored.Err():
		return nil, connect.NewError(connect.CodeUnavailable, err)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// maxBody bounds a request of plain HTTP, in bytes.
const maxBody = 64 << 20

// echo answers plain HTTP with the request's body.
func echo(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", r.Header.Get("Content-Type"))
	_, _ = w.Write(body) // they may have left
}

func (f *Front) register() (id uint64, answer <-chan []byte) {
	ch := make(chan []byte, 1)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.next++
	f.waiting[f.next] = ch
	return f.next, ch
}

func (f *Front) forget(id uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.waiting, id)
}

// answered hands an answer to the request that waits for it.
func (f *Front) answered(m *nats.Msg) {
	if len(m.Data) < idBytes {
		return
	}
	id := binary.LittleEndian.Uint64(m.Data)
	f.mu.Lock()
	defer f.mu.Unlock()
	if ch, ok := f.waiting[id]; ok {
		delete(f.waiting, id)
		ch <- m.Data[idBytes:]
	}
}

// bytesOf returns what of an input is sent.
func bytesOf(p *inferencev1.Part) []byte {
	if t := p.GetTensor(); t != nil {
		return t.GetRaw()
	}
	return p.GetBlob().GetData()
}

// withBytes returns an output like the input, which has the bytes that came back.
func withBytes(p *inferencev1.Part, data []byte) *inferencev1.Part {
	out := &inferencev1.Part{Name: p.GetName()}
	if t := p.GetTensor(); t != nil {
		out.Body = &inferencev1.Part_Tensor{Tensor: &inferencev1.Tensor{Datatype: t.GetDatatype(), Shape: t.GetShape(), Raw: data}}
		return out
	}
	out.Body = &inferencev1.Part_Blob{Blob: &inferencev1.Blob{ContentType: p.GetBlob().GetContentType(), Data: data}}
	return out
}

// Stop ends what is in flight, removes the streams, and leaves.
func (f *Front) Stop() error {
	var errs []error
	if f.server != nil {
		errs = append(errs, f.server.Close())
		if err := <-f.served; !errors.Is(err, http.ErrServerClosed) {
			errs = append(errs, err)
		}
		f.calls.Wait()
	}
	if f.js != nil {
		errs = append(errs, f.route.remove(f.js))
	}
	return errors.Join(append(errs, leave(f.nc))...)
}

// leave sends what is buffered, and closes the connection.
func leave(nc *nats.Conn) error {
	closed := nc.StatusChanged(nats.CLOSED)
	if err := nc.Drain(); err != nil {
		nc.Close()
		return err
	}
	<-closed
	return nil
}
