package transport

import (
	"context"
	"io"
	"testing"
	"testing/synctest"

	"github.com/stagemesh/stagemesh/internal/budget"
	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
)

// While the first message of a sequence runs, the others are read until they take 16 MiB: each its
// memory and what a request costs.
func TestStreamReadsNoMoreThanMayWait(t *testing.T) {
	t.Parallel()
	const size = 1<<20 - waitingCost
	synctest.Test(t, func(t *testing.T) {
		received, answered, gate := 0, 0, make(chan struct{})
		b := bidiStream[oipv2.ModelInferRequest, *oipv2.ModelInferRequest, oipv2.ModelInferResponse]{
			receive: func() (*incoming[oipv2.ModelInferRequest, *oipv2.ModelInferRequest], error) {
				if received == 40 {
					return nil, io.EOF
				}
				received++
				memory := budget.NewAccount(nil, "")
				return &incoming[oipv2.ModelInferRequest, *oipv2.ModelInferRequest]{memory: memory}, memory.Reserve(size)
			},
			interrupt: func() {},
			call:      func() *Call { return &Call{} },
			method: func(context.Context, *Call, *oipv2.ModelInferRequest, func(*oipv2.ModelInferResponse) error) error {
				<-gate
				answered++
				return nil
			},
			sequence: func(*oipv2.ModelInferRequest) any { return "s" },
		}
		ended := make(chan error)
		go func() { ended <- b.run(t.Context(), 4) }()
		for range 3 {
			synctest.Wait()
			if want := 1 + answered + 16 + 1; received != want { // one runs, and one has no room
				t.Errorf("%d messages have been read after %d answers, want %d", received, answered, want)
			}
			gate <- struct{}{}
		}
		close(gate)
		if err := <-ended; err != nil || received != 40 || answered != 40 {
			t.Errorf("the stream ended with %v: read %d messages, answered %d", err, received, answered)
		}
	})
}
