package port_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"testing"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"
)

func one(i int, pipeline string, inOrder bool) *inferencev1.InferManyRequest {
	r := blob(1)
	r.Pipeline = pipeline
	return &inferencev1.InferManyRequest{Request: r, Id: fmt.Sprint("r", i), InOrder: inOrder}
}

// onEachTwoWay is onEach for protocols in which both sides send at once. Each test has its own caller.
func onEachTwoWay(t *testing.T, test func(t *testing.T, serve func(*fronttest.Caller) inferencev1connect.InferenceServiceClient)) {
	t.Helper()
	for _, p := range protocols() {
		if p.h2c && p.name != "gRPC-Web over HTTP/2" {
			t.Run(p.name, func(t *testing.T) {
				t.Parallel()
				test(t, func(caller *fronttest.Caller) inferencev1connect.InferenceServiceClient {
					return p.client(t, p.serve(t, caller))
				})
			})
		}
	}
}

// The first request is answered last: in order, the others wait for it.
func TestManyAnswersComeInOrderOrAsTheyAreReady(t *testing.T) {
	t.Parallel()
	for _, inOrder := range []bool{true, false} {
		t.Run(fmt.Sprint(inOrder), func(t *testing.T) {
			t.Parallel()
			const requests = 200
			for _, p := range protocols() {
				if !p.h2c || p.name == "gRPC-Web over HTTP/2" {
					continue
				}
				t.Run(p.name, func(t *testing.T) {
					t.Parallel()
					var running, most atomic.Int64
					others := make(chan struct{}, requests)
					caller := &fronttest.Caller{Answer: func(ctx context.Context, r *request.Request) (*request.Response, error) {
						now := running.Add(1)
						defer running.Add(-1)
						for was := most.Load(); now > was && !most.CompareAndSwap(was, now); was = most.Load() {
						}
						if r.Pipeline == "slow" {
							for range 63 {
								<-others
							}
						} else {
							others <- struct{}{}
						}
						if r.Pipeline == "bad" {
							return nil, fault.New(fault.QueueFull, "full")
						}
						return fronttest.Echo(ctx, r)
					}}
					stream := p.client(t, p.serve(t, caller)).InferMany(t.Context())
					go func() {
						for i := range requests {
							name := "echo"
							switch {
							case i == 0:
								name = "slow"
							case i%10 == 0:
								name = "bad"
							}
							if stream.Send(one(i, name, inOrder)) != nil {
								return
							}
						}
						_ = stream.CloseRequest()
					}()
					var order []uint64
					for {
						m, err := stream.Receive()
						if errors.Is(err, io.EOF) {
							break
						}
						if err != nil {
							t.Fatal(err)
						}
						order = append(order, m.GetIndex())
						if m.GetId() != fmt.Sprint("r", m.GetIndex()) {
							t.Errorf("answer %d has the ID %s", m.GetIndex(), m.GetId())
						}
						isBad := m.GetIndex() > 0 && m.GetIndex()%10 == 0
						if f := m.GetFailure(); isBad != (f != nil) || isBad && (f.GetReason() != string(fault.QueueFull) || !f.GetRetryable()) {
							t.Errorf("answer %d is %v", m.GetIndex(), m.GetOutcome())
						}
					}
					if len(order) != requests {
						t.Fatalf("there are %d answers", len(order))
					}
					for i, index := range order {
						if inOrder && index != uint64(i) {
							t.Fatalf("answer %d is to request %d", i, index)
						}
					}
					if !inOrder && order[0] == 0 {
						t.Error("the slowest answer came first")
					}
					if got := most.Load(); got > 64 {
						t.Errorf("%d requests ran at a time, 64 may", got)
					}
				})
			}
		})
	}
}

// A message without a request, or with a bad one, fails alone; a caller that leaves ends what runs.
func TestManyEndAloneAndTogether(t *testing.T) {
	t.Parallel()
	onEachTwoWay(t, func(t *testing.T, serve func(*fronttest.Caller) inferencev1connect.InferenceServiceClient) {
		started, ended := make(chan struct{}, 64), make(chan struct{}, 64)
		caller := &fronttest.Caller{Answer: func(ctx context.Context, r *request.Request) (*request.Response, error) {
			if r.Pipeline != "hang" {
				return fronttest.Echo(ctx, r)
			}
			started <- struct{}{}
			<-ctx.Done()
			ended <- struct{}{}
			return nil, ctx.Err()
		}}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		stream := serve(caller).InferMany(ctx)
		bad := one(1, "echo", true)
		bad.Request.Durability = inferencev1.Durability(77)
		for _, m := range []*inferencev1.InferManyRequest{{Id: "empty", InOrder: true}, bad, one(2, "echo", true)} {
			if err := stream.Send(m); err != nil {
				t.Fatal(err)
			}
		}
		for i, want := range []fault.Reason{fault.InvalidRequest, fault.InvalidRequest, ""} {
			m, err := stream.Receive()
			if err != nil || fault.Reason(m.GetFailure().GetReason()) != want || m.GetIndex() != uint64(i) {
				t.Fatalf("answer %d is %v, %v", i, m, err)
			}
		}
		for i := range 3 {
			if err := stream.Send(one(i, "hang", i > 0)); err != nil {
				t.Fatal(err)
			}
			testbed.Receive(t, "a request runs", started)
		}
		cancel()
		_ = stream.CloseRequest()
		_ = stream.CloseResponse()
		for range 3 {
			testbed.Receive(t, "a request ends", ended)
		}
	})
}
