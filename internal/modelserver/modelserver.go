// Package modelserver runs the models of a stage on a server that somebody else starts, such as
// Triton, MLServer, OpenVINO Model Server or TensorFlow Serving: a client of the server, in the
// host's process. It is a runner.ModelLoader.
//
// A server is controlled by mmesh.ModelRuntime, the runtime interface of KServe ModelMesh, which
// servers implement themselves or by an adapter of KServe, or by the repository extension of the
// Open Inference Protocol over gRPC, which Triton and MLServer have. Batches reach it by that
// protocol, too, item by item and all at once: servers form batches of their own. A call that a
// gateway passes on, package passthrough, reaches the server as it is.
//
// A connection is one life of the server, and the number of Models. The server is asked for its
// status every two seconds until it is ready and has unloaded all models. While it is not, Health
// says why, with runner.ErrStartFailed where it does not become ready by itself (FAILING). When the
// connection ends all models count as gone, and the next one begins the same way. So a server must
// not end connections because of their age. Batches and loads that run when it ends fail with
// runner.ErrCrashed.
//
// Everything is safe for concurrent use. To test with it, use the server of modelservertest.
package modelserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stagemesh/stagemesh/proto/gen/go/mmesh"
	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"

	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

const (
	defaultConcurrency, maxConcurrency = 16, 1024
	// statusInterval is the pause between questions for the status of a server that is not ready.
	statusInterval = 2 * time.Second
	// answerTimeout bounds the questions for the status, before which a server may unload models,
	// and for the size of a loaded model, and the unload after a failed load.
	answerTimeout = 30 * time.Second
	// readyLimit is how long a batch waits while the server is not ready: it may only restart.
	readyLimit = 2 * time.Second
)

var (
	// ErrNoModels means that the stage has no section models.
	ErrNoModels = errors.New("the stage has a model server: give it a section models")
	errNotReady = errors.New("the model server is not ready")
	errLost     = errors.New("the connection to the model server ended")
)

// How a server is controlled.
const (
	// ControlRuntime is mmesh.ModelRuntime.
	ControlRuntime = "mmesh"
	// ControlRepository is the repository extension of the Open Inference Protocol.
	ControlRepository = "repository"
)

// Settings configure a runner. Addresses are unix:<absolute path>, or <host>:<port>.
type Settings struct {
	// Address is where the server is controlled.
	Address string `yaml:"address"`
	// Control is how: ControlRuntime, which empty means, or ControlRepository.
	Control string `yaml:"control"`
	// DataAddress is where it takes batches; empty means Address.
	DataAddress string `yaml:"data_address"`
	// TLS encrypts the connections to both. CAFile has the certificates, in PEM, that vouch for
	// the server, and enables TLS; the system's own if empty.
	TLS    bool   `yaml:"tls"`
	CAFile string `yaml:"ca_file,path"`
	// Concurrency is the number of batches at a time; 0 means 16.
	Concurrency int `yaml:"concurrency"`
}

func (s Settings) validate() error {
	if err := validAddress(s.Address); err != nil {
		return fmt.Errorf("address: %w", err)
	}
	if err := validAddress(s.DataAddress); s.DataAddress != "" && err != nil {
		return fmt.Errorf("data_address: %w", err)
	}
	if s.Control != "" && s.Control != ControlRuntime && s.Control != ControlRepository {
		return fmt.Errorf("control: %q is neither %s nor %s", s.Control, ControlRuntime, ControlRepository)
	}
	if s.Concurrency < 0 || s.Concurrency > maxConcurrency {
		return fmt.Errorf("concurrency: %d is not between 1 and %d", s.Concurrency, maxConcurrency)
	}
	return nil
}

func validAddress(s string) error {
	if path, ok := strings.CutPrefix(s, "unix:"); ok && filepath.IsAbs(path) {
		return nil
	}
	if _, port, err := net.SplitHostPort(s); err != nil || port == "" {
		return fmt.Errorf("%q is neither unix:<absolute path> nor <host>:<port>", s)
	}
	return nil
}

// Runner is a client of a model server. Its batches run as in an inproc.Runner.
type Runner struct {
	*inproc.Runner
	settings     Settings
	server, data *link
	control      control
	memory       *model.Size
	log          *slog.Logger
	// life ends with Stop; watched is closed when watch has ended.
	life    context.Context
	end     context.CancelFunc
	watched chan struct{}

	mu sync.Mutex
	// ready is the connection whose server is ready; without one err says why.
	ready   uint64
	err     error
	changed chan struct{}
	status  serverStatus
	loading int
	// calls has a place for each call that a model takes at a time; none for those without a limit.
	calls map[model.ID]chan struct{}
}

var (
	_ runner.ModelLoader    = (*Runner)(nil)
	_ runner.HealthReporter = (*Runner)(nil)
	_ runner.HostAware      = (*Runner)(nil)
)

// New returns a runner. Errors begin with the key of a wrong setting.
func New(s Settings) (*Runner, error) {
	if err := s.validate(); err != nil {
		return nil, err
	}
	s.Concurrency = cmp.Or(s.Concurrency, defaultConcurrency)
	r := &Runner{settings: s, err: errNotReady, log: slog.New(slog.DiscardHandler), changed: make(chan struct{}), watched: make(chan struct{})}
	r.life, r.end = context.WithCancel(context.Background())
	r.Runner = inproc.New(inproc.Settings{Concurrency: s.Concurrency, Setup: r.connect, Teardown: r.disconnect}, r.do)
	return r, nil
}

// SetHost implements runner.HostAware.
func (r *Runner) SetHost(h runner.HostInfo) { r.memory, r.log = h.Models, cmp.Or(h.Logger, r.log) }

// connect begins to follow the server, and returns when it is ready.
func (r *Runner) connect(ctx context.Context) error {
	if r.memory == nil {
		return ErrNoModels
	}
	security, err := r.settings.credentials()
	if err != nil {
		return err
	}
	if r.server, err = dial(r.settings.Address, security, r.notify); err != nil {
		return fmt.Errorf("address: %w", err)
	}
	r.data, r.control = r.server, spi{mmesh.NewModelRuntimeClient(r.server)}
	if r.settings.Control == ControlRepository {
		r.control = repository{oipv2.NewGRPCInferenceServiceClient(r.server)}
	}
	if r.settings.DataAddress != "" {
		if r.data, err = dial(r.settings.DataAddress, security, func() {}); err != nil {
			return errors.Join(fmt.Errorf("data_address: %w", err), r.server.Close())
		}
	}
	go r.watch()
	if !r.await(ctx, true) {
		_, err = r.Health()
		return errors.Join(fmt.Errorf("%s: %w", r.settings.Address, err), r.disconnect())
	}
	return nil
}

func (r *Runner) disconnect() error {
	r.end()
	<-r.watched
	err := r.server.Close()
	if r.data != r.server {
		err = errors.Join(err, r.data.Close())
	}
	return err
}

// watch asks a server for its status until it is ready, and again after each end of the
// connection.
func (r *Runner) watch() {
	defer close(r.watched)
	for r.life.Err() == nil {
		serial := r.server.serial.Load()
		ctx, cancel := context.WithTimeout(r.life, answerTimeout)
		at, err := r.control.status(ctx)
		cancel()
		if status.Code(err) == codes.Unimplemented {
			err = fmt.Errorf("%w: it lacks a method of control: %s; use the other control, or an adapter: %w", runner.ErrStartFailed, cmp.Or(r.settings.Control, ControlRuntime), err)
		}
		switch {
		case err != nil:
			r.setStatus(0, serverStatus{}, fmt.Errorf("%w: %w", errNotReady, err))
			select {
			case <-time.After(statusInterval):
			case <-r.life.Done():
			}
		case serial == r.server.serial.Load(): // else the call began the connection, or it ended
			r.setStatus(serial, at, nil)
			r.await(r.life, false)
			r.setStatus(0, serverStatus{}, errLost)
		}
	}
}

// setStatus sets the connection whose server is ready, 0 for none, and logs what changed.
func (r *Runner) setStatus(ready uint64, at serverStatus, err error) {
	r.mu.Lock()
	isNews := err == nil || r.err == nil || err.Error() != r.err.Error()
	r.ready, r.err = ready, err
	if ready != 0 {
		r.status, r.calls = at, map[model.ID]chan struct{}{}
	}
	r.mu.Unlock()
	r.notify()
	switch {
	case !isNews || r.life.Err() != nil:
	case err == nil:
		r.log.Info("the model server is ready", "address", r.settings.Address)
	case errors.Is(err, runner.ErrStartFailed):
		r.log.Error("the model server fails", "address", r.settings.Address, "error", err)
	default:
		r.log.Warn("waiting for the model server", "address", r.settings.Address, "error", err)
	}
}

// notify is called after each change of Models and Health.
func (r *Runner) notify() {
	r.mu.Lock()
	defer r.mu.Unlock()
	close(r.changed)
	r.changed = make(chan struct{})
}

// await waits until a server is ready, or is not, and returns false where the context ends before.
func (r *Runner) await(ctx context.Context, isReady bool) bool {
	for {
		generation, changed := r.Models()
		if (generation != 0) == isReady {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// Models implements runner.ModelLoader: its number identifies the connection.
func (r *Runner) Models() (generation uint64, changed <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.generation(), r.changed
}

func (r *Runner) generation() uint64 {
	if r.ready == 0 || r.ready != r.server.serial.Load() {
		return 0
	}
	return r.ready
}

// Health implements runner.HealthReporter.
func (r *Runner) Health() (changed <-chan struct{}, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err = r.err; err == nil && r.generation() == 0 {
		err = errLost
	}
	return r.changed, err
}

// ModelLimits implements runner.ModelLoader: the server's limits, within the host's.
func (r *Runner) ModelLimits() runner.ModelLimits {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.status.ModelLimits
	out.Capacity = out.Capacity.Within(model.Size{Host: r.memory.Host})
	return out
}

// checkReady fails with runner.ErrNotStarted where the server is not ready.
func (r *Runner) checkReady() error {
	if _, err := r.Health(); err != nil {
		return fmt.Errorf("%w: %w", runner.ErrNotStarted, err)
	}
	return nil
}

// Load implements runner.ModelLoader. A load that fails is undone, unless the server says that
// it did not begin.
func (r *Runner) Load(ctx context.Context, m model.Model) (out runner.LoadedModel, err error) {
	if ctx.Err() != nil {
		return out, context.Cause(ctx)
	}
	if err := r.takeSlot(); err != nil {
		return out, err
	}
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.loading--
	}()
	life, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(r.life, stop)()
	out, err = r.control.load(life, m)
	switch code := status.Code(err); {
	case err == nil:
		out.MaxConcurrency = r.limitCalls(m.ID, out.MaxConcurrency)
		return out, nil
	case errors.Is(err, runner.ErrNotStarted), errors.Is(err, runner.ErrCrashed):
		return out, err
	case code == codes.FailedPrecondition, code == codes.InvalidArgument:
		return out, fmt.Errorf("%w: %w", runner.ErrInvalidModel, err)
	case code == codes.ResourceExhausted:
		err = fmt.Errorf("%w: %w", runner.ErrOutOfMemory, err)
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	}
	undo, end := context.WithTimeout(context.WithoutCancel(ctx), answerTimeout)
	defer end()
	if failed := r.Unload(undo, m.ID); failed != nil {
		err = fmt.Errorf("%w; the unload after it: %w", err, failed)
	}
	return out, err
}

// limitCalls limits the calls of a model where the server wants that, and returns how many it takes
// at a time; 0 is any number.
func (r *Runner) limitCalls(id model.ID, most int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.status.limitsCalls {
		return 0
	}
	most = max(1, most)
	if cap(r.calls[id]) != most { // a model that is loaded already may have calls
		r.calls[id] = make(chan struct{}, most)
	}
	return most
}

// takeSlot takes a slot for a load.
func (r *Runner) takeSlot() error {
	if err := r.checkReady(); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.loading >= r.status.LoadSlots {
		return fmt.Errorf("%w: as many models are being loaded as the server allows", runner.ErrNotStarted)
	}
	r.loading++
	return nil
}

// Unload implements runner.ModelLoader.
func (r *Runner) Unload(ctx context.Context, id model.ID) error {
	if err := r.checkReady(); err != nil {
		return err
	}
	if err := r.control.unload(ctx, id); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.calls, id)
	return nil
}

// Size implements runner.ModelLoader: the predicted size, as Load has returned a loaded
// model's.
func (r *Runner) Size(ctx context.Context, m model.Model) (model.Size, error) {
	if err := r.checkReady(); err != nil {
		return model.Size{}, err
	}
	return r.control.predict(ctx, m)
}

// do runs the items of a batch at once, as soon as the server is ready.
func (r *Runner) do(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
	if err := r.checkReady(); err != nil {
		bounded, end := context.WithTimeout(ctx, readyLimit)
		isReady := r.await(bounded, true)
		end()
		if !isReady {
			return err
		}
	}
	var items errgroup.Group
	for i, item := range batch.Items {
		items.Go(func() error {
			ctx, end := item.Context(ctx)
			defer end()
			parts, err := r.call(ctx, batch.Model.Model, item)
			outcome, err := outcomeOf(ctx, parts, err)
			if err != nil {
				return err
			}
			return sink.SetOutcome(i, outcome)
		})
	}
	return items.Wait()
}

// call runs an item on a model: a call that is passed on as it is, any other by the Open Inference
// Protocol. It waits until the model takes another call.
func (r *Runner) call(ctx context.Context, id string, item runner.Item) ([]payload.Part, error) {
	r.mu.Lock()
	at, places := r.status, r.calls[model.ID(id)]
	r.mu.Unlock()
	method, gateways := methodOf(item)
	path, err := at.idPath(method, gateways)
	if err != nil {
		return nil, err
	}
	if places != nil {
		select {
		case places <- struct{}{}:
			defer func() { <-places }()
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if method == inferMethod {
		return r.data.infer(ctx, id, item)
	}
	return r.data.pass(ctx, id, method, path, item.Inputs[0])
}
