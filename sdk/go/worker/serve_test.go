package worker_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/sdk/go/worker"
)

func TestWorkerConnectsServesAndExits(t *testing.T) {
	t.Parallel()
	h := listen(t)
	served := h.serve(t.Context(), worker.Settings{Name: "double", Predict: double})
	hello := h.welcome()
	equal(t, hello, &frame.Hello{Protocols: []int{1}, Name: "double", SDK: hello.SDK, PID: os.Getpid()})
	ready, _ := receiveAs[*frame.Ready](h)
	equal(t, ready, &frame.Ready{Slots: 1, Spec: &frame.Spec{}})
	for n := range uint64(3) {
		h.predict(n, 2)
		m, body := receiveAs[*frame.Result](h)
		equal(t, m.Batch, n)
		equal(t, values(t, m, body), []float32{0, 2, 4, 6})
	}
	h.send(&frame.Ping{N: 41}, nil)
	pong, _ := receiveAs[*frame.Pong](h)
	equal(t, pong.N, uint64(41))
	h.ask(served)
}

func TestSetupGetsWelcome(t *testing.T) {
	t.Parallel()
	h := listen(t)
	var got worker.Start
	var options struct{ Scale float64 }
	served := h.serve(t.Context(), worker.Settings{Predict: double, Slots: 2, Setup: func(_ context.Context, start *worker.Start) error {
		start.Progress("half way")
		start.Spec.BatchAxis = worker.None
		got = *start
		return start.Decode(&options)
	}}, "RANK", "1", "LOCAL_RANK", "1", "WORLD_SIZE", "2", "MASTER_ADDR", "127.0.0.1", "MASTER_PORT", "29500")
	h.welcome()
	state, _ := receiveAs[*frame.State](h)
	equal(t, state, &frame.State{State: frame.Startup, Message: "half way"})
	ready, _ := receiveAs[*frame.Ready](h)
	equal(t, ready, &frame.Ready{Slots: 2, Spec: &frame.Spec{BatchAxis: "none"}})
	h.ask(served)
	equal(t, []any{got.Stage, got.Worker, got.Incarnation, got.Rank, got.LocalRank, got.WorldSize, got.MasterAddr, got.MasterPort, got.Slots, got.MaxSize, options.Scale},
		[]any{"sum", 3, 2, 1, 1, 2, "127.0.0.1", "29500", 2, 32, 2.0})
}

func TestSpecIsSentWithExamples(t *testing.T) {
	t.Parallel()
	h := listen(t)
	inputs := []worker.PartSpec{{Name: "x", Datatype: tensor.FP32, Shape: []int64{-1, 2}}, {Name: "image", Optional: true}}
	served := h.serve(t.Context(), worker.Settings{Predict: double, Spec: worker.Spec{
		BatchAxis: worker.Rows, Inputs: inputs,
		Examples: []worker.Example{
			{Name: "one", Tensors: map[string]tensor.Tensor{"x": fp32([]int64{1, 2}, 1, 2)}},
			{Name: "two", Tensors: map[string]tensor.Tensor{"x": fp32([]int64{1, 2}, 3, 4)}, Blobs: map[string]worker.Blob{"image": {ContentType: "image/png", Data: []byte("png")}}},
		},
	}})
	ready, body := h.ready()
	equal(t, ready.Spec.Inputs, inputs)
	image, err := ready.Spec.Examples[1].Inputs[1].Bytes(body)
	if err != nil || string(image) != "png" || ready.Spec.Examples[1].Name != "two" {
		t.Errorf("%+v, %q, %v", ready.Spec.Examples, image, err)
	}
	h.ask(served)
}

func TestFailedStartIsReported(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		settings worker.Settings
		wantText string
	}{
		"an error":           {worker.Settings{Setup: func(context.Context, *worker.Start) error { return errors.New("no model") }}, "setup: no model"},
		"a panic":            {worker.Settings{Setup: func(context.Context, *worker.Start) error { panic("oh") }}, "setup: panic: oh"},
		"unknown options":    {worker.Settings{Setup: func(_ context.Context, s *worker.Start) error { return s.Decode(&struct{}{}) }}, `options: json: unknown field "scale"`},
		"a wrong spec":       {worker.Settings{Spec: worker.Spec{BatchAxis: "columns"}}, "spec: ready: spec.batch_axis"},
		"too large examples": {worker.Settings{Spec: worker.Spec{Examples: []worker.Example{{Blobs: map[string]worker.Blob{"b": {Data: make([]byte, 1<<24+1)}}}}}}, "examples of 16777217 bytes"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := listen(t)
			test.settings.Predict = double
			served := h.serve(t.Context(), test.settings)
			h.welcome()
			state, _ := receiveAs[*frame.State](h)
			if state.State != frame.Failed || !strings.Contains(state.Message, test.wantText) {
				t.Errorf("%+v", state)
			}
			h.ended()
			if err := outcome(t, served); err == nil || !strings.Contains(err.Error(), test.wantText) || worker.ExitCode(err) != worker.ExitFailed {
				t.Errorf("%v", err)
			}
		})
	}
}

func TestInvalidSettingsAndEnvironmentAreRefused(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		settings  worker.Settings
		variables []string
		wantText  string
		code      int
	}{
		"no Predict":      {worker.Settings{}, nil, "Predict is nil", worker.ExitMisused},
		"too many slots":  {worker.Settings{Predict: double, Slots: 2000}, nil, "Slots: 2000", worker.ExitMisused},
		"no host":         {worker.Settings{Predict: double}, []string{"STAGEMESH_SOCKET", ""}, "STAGEMESH_SOCKET is not set", worker.ExitMisused},
		"no number":       {worker.Settings{Predict: double}, []string{"RANK", "one"}, `RANK is "one"`, worker.ExitMisused},
		"a negative rank": {worker.Settings{Predict: double}, []string{"RANK", "-1"}, `RANK is "-1"`, worker.ExitMisused},
		"a rank too many": {worker.Settings{Predict: double}, []string{"RANK", "2", "WORLD_SIZE", "2"}, "RANK is 2 in a gang of 2", worker.ExitMisused},
		"no such socket":  {worker.Settings{Predict: double}, []string{"STAGEMESH_SOCKET", "/nowhere/s"}, "no such file", worker.ExitHostGone},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := listen(t)
			err := outcome(t, h.serve(t.Context(), test.settings, test.variables...))
			if err == nil || !strings.Contains(err.Error(), test.wantText) || worker.ExitCode(err) != test.code {
				t.Errorf("%v, code %d", err, worker.ExitCode(err))
			}
		})
	}
}

func TestProtocolViolationEndsWorker(t *testing.T) {
	t.Parallel()
	greet := func(m frame.Message) func(*host) {
		return func(h *host) {
			h.accept()
			h.receive()
			h.send(m, nil)
		}
	}
	then := func(ms ...frame.Message) func(*host) {
		return func(h *host) {
			h.ready()
			for _, m := range ms {
				var body *frame.Body
				if p, ok := m.(*frame.Predict); ok && p.Parts == nil {
					_, body = batch(1, 1)
					p.Parts = []frame.Part{{Name: "x", Datatype: tensor.FP32, Shape: []int64{1, 2}, Size: 8}}
				}
				h.send(m, body)
			}
		}
	}
	one := func(number uint64) *frame.Predict { return &frame.Predict{Batch: number, Items: items(1)} }
	tests := map[string]struct {
		act      func(*host)
		wantText string
	}{
		"ping instead of welcome": {greet(&frame.Ping{}), "ping instead of welcome"},
		"another version":         {greet(&frame.Welcome{Protocol: 2}), "version 2"},
		"welcome again":           {then(&frame.Welcome{Protocol: 1}), "welcome from a host"},
		"a message of workers":    {then(&frame.Ready{}), "ready from a host"},
		"a batch twice":           {then(one(1), one(1)), "batch 1 is there twice"},
		"more than the slots":     {then(one(1), one(2), one(3)), "more batches than the 2 slots"},
		"garbage": {func(h *host) {
			h.ready()
			_, _ = h.conn.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
		}, "a frame begins with"},
		"garbage at once": {func(h *host) {
			h.accept()
			h.receive()
			_, _ = h.conn.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
		}, "a frame begins with"},
		"an input twice": {func(h *host) {
			h.ready()
			m, body := batch(1, 1)
			m.Parts = append(m.Parts, body.Tensor("x", -1, fp32([]int64{1, 1}, 1)))
			h.send(m, body)
		}, "parts[1]: the input is there twice"},
		"an item's input twice": {func(h *host) {
			h.ready()
			m, body := &frame.Predict{Batch: 1, Items: items(1)}, &frame.Body{}
			m.Parts = []frame.Part{body.Blob("b", 0, "", nil), body.Blob("b", 0, "", nil)}
			h.send(m, body)
		}, "parts[1]: the input is there twice"},
		"elements that go on": {func(h *host) {
			h.ready()
			m, body := &frame.Predict{Batch: 1, Items: items(1)}, &frame.Body{}
			m.Parts = []frame.Part{body.Tensor("b", 0, tensor.Tensor{Datatype: tensor.Bytes, Shape: []int64{1}, Raw: []byte{9, 0, 0, 0}})}
			h.send(m, body)
		}, "element 0 claims 9 bytes"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := listen(t)
			served := h.serve(t.Context(), worker.Settings{Slots: 2, Predict: func(ctx context.Context, _ *worker.Batch) (worker.Outputs, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			}})
			test.act(h)
			m, _ := receiveAs[*frame.Error](h)
			if m.Kind != frame.Protocol || m.Batch != nil || !strings.Contains(m.Message, test.wantText) {
				t.Errorf("%+v", m)
			}
			err := outcome(t, served)
			if !errors.Is(err, frame.ErrViolation) || !strings.Contains(err.Error(), test.wantText) || worker.ExitCode(err) != worker.ExitViolation {
				t.Errorf("%v", err)
			}
		})
	}
}

func TestRefusalEndsWorker(t *testing.T) {
	t.Parallel()
	for name, act := range map[string]func(*host){
		"at once": func(h *host) { h.accept(); h.receive() },
		"later":   func(h *host) { h.ready() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := listen(t)
			served := h.serve(t.Context(), worker.Settings{Predict: double})
			act(h)
			h.send(&frame.Error{Kind: frame.Protocol, Name: "Version", Message: "this host speaks 2"}, nil)
			err := outcome(t, served)
			if !errors.Is(err, worker.ErrRefused) || !strings.Contains(err.Error(), "this host speaks 2") {
				t.Errorf("%v", err)
			}
		})
	}
}

func TestLoadIsUnsupportedAndWorkerGoesOn(t *testing.T) {
	t.Parallel()
	h := listen(t)
	served := h.serve(t.Context(), worker.Settings{Predict: double})
	h.ready()
	for _, m := range []frame.Message{&frame.Load{Model: "m"}, &frame.Unload{Load: frame.Load{Model: "m"}}, &frame.Size{Load: frame.Load{Model: "m"}}} {
		h.send(m, nil)
		answer, _ := receiveAs[*frame.Error](h)
		if answer.Kind != frame.Unsupported || answer.Batch != nil || !strings.HasPrefix(answer.Message, frame.Kind(m)) {
			t.Errorf("%+v", answer)
		}
	}
	h.predict(1, 1)
	receiveAs[*frame.Result](h)
	h.ask(served)
}

func TestHostExitEndsWorker(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(h *host, lifeline *os.File){
		"its connection": func(h *host, _ *os.File) { h.conn.Close() },
		"its lifeline":   func(_ *host, lifeline *os.File) { lifeline.Close() },
	} {
		for phase, busy := range map[string]bool{"idle": false, "stuck": true} {
			t.Run(name+" while "+phase, func(t *testing.T) {
				t.Parallel()
				r, w, err := os.Pipe()
				if err != nil {
					t.Fatal(err)
				}
				release, began, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
				defer close(release)
				h := listen(t)
				served := h.serve(t.Context(), worker.Settings{Predict: func(ctx context.Context, _ *worker.Batch) (worker.Outputs, error) {
					close(began)
					<-ctx.Done()
					close(ended)
					<-release // whatever happens
					return nil, nil
				}}, "STAGEMESH_LIFELINE", fmt.Sprint(takeOver(t, r)))
				h.ready()
				if busy {
					h.predict(1, 1)
					<-began
				}
				from := time.Now()
				end(h, w)
				err = outcome(t, served)
				if !errors.Is(err, worker.ErrHostGone) || worker.ExitCode(err) != worker.ExitHostGone {
					t.Errorf("%v", err)
				}
				if took := time.Since(from); took > 2*time.Second {
					t.Errorf("it took %v", took)
				}
				if busy {
					<-ended
				}
				w.Close()
			})
		}
	}
}

func TestAskedWorkerFinishesItsBatches(t *testing.T) {
	t.Parallel()
	tests := map[string]func(h *host, signal func()){
		"by the host": func(h *host, _ func()) { h.send(&frame.Stop{Timeout: 20_000}, nil) },
		"by a signal": func(_ *host, signal func()) { signal() },
		"by both": func(h *host, signal func()) {
			signal()
			h.send(&frame.Stop{Timeout: 20_000}, nil)
			h.send(&frame.Stop{Timeout: 0}, nil)
		},
	}
	for name, ask := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, signal := context.WithCancel(t.Context())
			began, release := make(chan struct{}), make(chan struct{})
			h := listen(t)
			served := h.serve(ctx, worker.Settings{Grace: patience, Predict: func(ctx context.Context, b *worker.Batch) (worker.Outputs, error) {
				close(began)
				<-release
				return double(ctx, b)
			}})
			h.ready()
			h.predict(1, 1)
			<-began
			ask(h, signal)
			state, _ := receiveAs[*frame.State](h)
			equal(t, state.State, frame.Shutdown)
			close(release)
			m, body := receiveAs[*frame.Result](h)
			equal(t, values(t, m, body), []float32{0, 2})
			h.ended()
			if err := outcome(t, served); err != nil {
				t.Error(err)
			}
			signal()
		})
	}
}

func TestUnfinishedWorkerReturnsErrUnfinished(t *testing.T) {
	t.Parallel()
	for name, ask := range map[string]func(h *host, signal func()){
		"by the host": func(h *host, _ func()) { h.send(&frame.Stop{Timeout: 0}, nil) },
		"by a signal": func(_ *host, signal func()) { signal() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, signal := context.WithCancel(t.Context())
			defer signal()
			ended := make(chan struct{})
			h := listen(t)
			served := h.serve(ctx, worker.Settings{Grace: time.Millisecond, Predict: func(ctx context.Context, _ *worker.Batch) (worker.Outputs, error) {
				<-ctx.Done()
				close(ended)
				return nil, nil
			}})
			h.ready()
			h.predict(1, 1)
			h.send(&frame.Ping{}, nil)
			receiveAs[*frame.Pong](h)
			ask(h, signal)
			if err := outcome(t, served); !errors.Is(err, worker.ErrUnfinished) || worker.ExitCode(err) != worker.ExitUnfinished {
				t.Errorf("%v", err)
			}
			<-ended
		})
	}
}

func TestWorkerMayBeAskedBeforeReady(t *testing.T) {
	t.Parallel()
	setup := func(begin func()) func(context.Context, *worker.Start) error {
		return func(ctx context.Context, _ *worker.Start) error {
			begin()
			<-ctx.Done()
			return ctx.Err()
		}
	}
	tests := map[string]struct {
		until func(h *host)
		ask   func(h *host, signal func())
	}{
		"before the welcome":        {func(h *host) { h.accept(); h.receive() }, func(_ *host, signal func()) { signal() }},
		"during setup by a signal":  {func(h *host) { h.welcome() }, func(_ *host, signal func()) { signal() }},
		"during setup by the host":  {func(h *host) { h.welcome() }, func(h *host, _ func()) { h.send(&frame.Stop{Timeout: 20_000}, nil) }},
		"the host hangs up as well": {func(h *host) { h.welcome() }, func(h *host, _ func()) { h.send(&frame.Stop{Timeout: 20_000}, nil) }},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, signal := context.WithCancel(t.Context())
			defer signal()
			began := make(chan struct{}, 1)
			h := listen(t)
			served := h.serve(ctx, worker.Settings{Predict: double, Grace: patience, Setup: setup(func() { began <- struct{}{} })})
			test.until(h)
			if name != "before the welcome" {
				<-began
			}
			test.ask(h, signal)
			state, _ := receiveAs[*frame.State](h)
			equal(t, state.State, frame.Shutdown)
			if err := outcome(t, served); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestEndlessSetupIsAbandoned(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		end  func(h *host)
		want error
	}{
		"when the host asks": {func(h *host) { h.send(&frame.Stop{Timeout: 1}, nil) }, worker.ErrUnfinished},
		"when it is gone":    {func(h *host) { h.conn.Close() }, worker.ErrHostGone},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			release, began := make(chan struct{}), make(chan struct{})
			defer close(release)
			h := listen(t)
			served := h.serve(t.Context(), worker.Settings{Predict: double, Setup: func(context.Context, *worker.Start) error {
				close(began)
				<-release
				return nil
			}})
			h.welcome()
			<-began
			test.end(h)
			if err := outcome(t, served); !errors.Is(err, test.want) {
				t.Errorf("%v", err)
			}
		})
	}
}
