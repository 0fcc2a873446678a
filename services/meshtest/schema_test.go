package meshtest_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/mesh/msgpack"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/services/meshtest"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/batch"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// till returns a stage that says nothing of itself and answers what it is sent, in
// batches that are as large as what is there.
func till(sizes *sync.Map) runner.Runner {
	return inproc.New(inproc.Settings{}, func(_ context, b runner.Batch, sink runner.Sink) error {
		sizes.Store(len(b.Items), true)
		for i, item := range b.Items {
			if err := sink.Settle(i, runner.Output(item.Inputs...)); err != nil {
				return err
			}
		}
		return nil
	})
}

const orderSchema = `{
	"type": "object", "required": ["items"],
	"properties": {"items": {"type": "array", "items": {"properties": {"price": {"type": "number", "minimum": 0}}}}}
}`

// priced is an order whose fourth item has that price, in JSON.
func priced(price string) []byte {
	return fmt.Appendf(nil, `{"items":[{"price":1},{"price":2},{"price":3},{"price":%s}]}`, price)
}

// What breaks a schema is refused with the place, for whoever sent it alone, and
// whatever the protocol; what came beside it is answered.
func TestAViolationNamesTheFieldForItsItemAlone(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	const neighbours = 8
	var sizes sync.Map
	bed.Host("till", till(&sizes), meshtest.Batch(batch.Settings{Mode: batch.Window, MaxSize: neighbours, MaxBytes: 1 << 20, MaxWait: atOnce}),
		func(s *stagehost.Settings) {
			s.Inputs = []runner.PartSpec{{Name: "order", ContentTypes: []string{"application/json"}, Schema: json.RawMessage(orderSchema)}}
		})
	g := bed.Gateway([]pipeline.Pipeline{meshtest.Pipeline("till", "till")}, func(s *gateway.Settings) { s.Listen = "127.0.0.1:0" })
	shop := shopAt(t, g.Address().String())

	var asked sync.WaitGroup
	for i := range neighbours {
		asked.Go(func() {
			if got, err := shop.post("application/json", priced(fmt.Sprint(i))); err != nil || got.status != http.StatusOK || !bytes.Equal(got.body, priced(fmt.Sprint(i))) {
				t.Errorf("neighbour %d got %d %s, %v", i, got.status, got.body, err)
			}
		})
		asked.Go(func() { shop.refused(t, "application/json", priced(`"4"`)) })
	}
	asked.Go(func() { shop.refused(t, "application/msgpack", packed(t, priced(`"4"`))) })
	asked.Go(func() { shop.refusedByGRPC(t, priced(`"4"`)) })
	asked.Wait()
	if _, all := sizes.Load(neighbours); !all {
		t.Errorf("the neighbours did not share a batch")
	}
}

func packed(t *testing.T, text []byte) []byte {
	t.Helper()
	out, err := msgpack.AppendJSON(nil, text)
	if err != nil {
		t.Error(err)
	}
	return out
}
