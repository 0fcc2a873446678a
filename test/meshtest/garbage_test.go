package meshtest_test

import (
	"math/rand/v2"
	"testing"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// Calls get their own replies, whatever else arrives at the reply subjects.
func TestGarbageRepliesFailNoCall(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	runner := newHeld()
	bed.Host("stage", runner)
	g := bed.Gateway(nil, func(s *gateway.Settings) { s.Call.Gateway = "gateway" })
	inFlight := send(t.Context(), g, requestFor("stage:stage", "in flight"))
	testbed.Receive(t, "item at the runner", runner.entered)

	nc, conn := bed.Broker.Client(), bed.Broker.Connect(meshtest.Mesh)
	garbage := [][]byte{nil, {0xff}, []byte("GET / HTTP/1.1\r\n\r\n"), make([]byte, conn.MaxPayload()-1024)}
	for range 50 {
		bytes := make([]byte, 1+rand.IntN(512))
		for i := range bytes {
			bytes[i] = byte(rand.Uint32())
		}
		garbage = append(garbage, bytes)
	}
	for _, id := range []string{uuid.NewString(), "garbage", "\"", "0"} {
		subject := conn.Subjects.Reply("gateway", pipeline.ExecutionID(id))
		for _, data := range garbage {
			if err := nc.PublishMsg(&nats.Msg{Subject: subject, Reply: nc.NewRespInbox(), Data: data, Header: nats.Header{"Status": {"503"}}}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := nc.FlushTimeout(testbed.Patience); err != nil {
		t.Fatal(err)
	}
	close(runner.release)
	if got := await(t, inFlight).checkOK(t).text(); got != "in flight" {
		t.Errorf("answered %q", got)
	}
	infer(t.Context(), g, requestFor("stage:stage", "after")).checkOK(t)
}
