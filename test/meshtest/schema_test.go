package meshtest_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/msgpack"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// checkout returns a stage without a spec that answers with its inputs, and records the
// sizes of its batches.
func checkout(sizes *sync.Map) runner.Runner {
	return inproc.New(inproc.Settings{}, func(_ context.Context, b runner.Batch, sink runner.Sink) error {
		sizes.Store(len(b.Items), true)
		for i, item := range b.Items {
			if err := sink.SetOutcome(i, runner.Output(item.Inputs...)); err != nil {
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

// An item that violates the schema fails with the field's name on every protocol. The
// items beside it are answered.
func TestViolationFailsItsItemAndNamesTheField(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	const neighbours = 8
	var sizes sync.Map
	bed.Host("till", checkout(&sizes), meshtest.Batch(batch.Settings{Mode: batch.Window, MaxSize: neighbours, MaxBytes: 1 << 20, MaxWait: atOnce}),
		func(s *stagehost.Settings) {
			s.Inputs = []runner.PartSpec{{Name: "order", ContentTypes: []string{"application/json"}, Schema: json.RawMessage(orderSchema)}}
		})
	g := bed.Gateway([]pipeline.Pipeline{testbed.Pipeline("till", "till")}, func(s *gateway.Settings) { s.Listen = "127.0.0.1:0" })
	shop := shopAt(t, g.Addr().String())

	var asked sync.WaitGroup
	for i := range neighbours {
		asked.Go(func() {
			if status, body := shop.post(t, "application/json", priced(fmt.Sprint(i))); status != http.StatusOK || !bytes.Equal(body, priced(fmt.Sprint(i))) {
				t.Errorf("neighbour %d got %d %s", i, status, body)
			}
		})
		asked.Go(func() { shop.checkRejected(t, "application/json", priced(`"4"`)) })
	}
	asked.Go(func() { shop.checkRejected(t, "application/msgpack", packed(t, priced("-4"))) })
	asked.Go(func() { shop.checkRejectedByGRPC(t, priced(`"4"`)) })
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

// badPlace is what every refusal names.
const badPlace = "inputs.order.items[3].price"

// shop asks the stage over two protocols.
type shop struct {
	url  string
	web  *http.Client
	grpc inferencev1.InferenceServiceClient
}

func shopAt(t *testing.T, address string) *shop {
	t.Helper()
	conn := testbed.Dial(t, address)
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	return &shop{"http://" + address, &http.Client{Transport: transport}, inferencev1.NewInferenceServiceClient(conn)}
}

func (s *shop) post(t *testing.T, contentType string, body []byte) (status int, answer []byte) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.url+"/v1/pipelines/till:infer", bytes.NewReader(body))
	if err != nil {
		t.Error(err)
		return 0, nil
	}
	request.Header.Set("Content-Type", contentType)
	response, err := s.web.Do(request)
	if err != nil {
		t.Error(err)
		return 0, nil
	}
	defer func() { _ = response.Body.Close() }()
	answer, err = io.ReadAll(response.Body)
	if err != nil {
		t.Error(err)
	}
	return response.StatusCode, answer
}

func (s *shop) checkRejected(t *testing.T, contentType string, body []byte) {
	t.Helper()
	status, answer := s.post(t, contentType, body)
	var failure struct {
		Error struct {
			Reason, Stage string
			Violations    []struct{ Field, Description string }
		}
	}
	if err := json.Unmarshal(answer, &failure); err != nil {
		t.Errorf("%s: %v", answer, err)
		return
	}
	e := failure.Error
	if status != http.StatusUnprocessableEntity || e.Reason != "SCHEMA_VIOLATION" || e.Stage != "till" || len(e.Violations) != 1 || e.Violations[0].Field != badPlace {
		t.Errorf("%s: got %d %s", contentType, status, answer)
	}
}

func (s *shop) checkRejectedByGRPC(t *testing.T, body []byte) {
	t.Helper()
	_, err := s.grpc.Infer(t.Context(), &inferencev1.InferRequest{Pipeline: "till", Inputs: []*inferencev1.Part{blob("application/json", body)}})
	var fields []string
	for _, detail := range status.Convert(err).Details() {
		if bad, ok := detail.(*errdetails.BadRequest); ok {
			for _, violation := range bad.GetFieldViolations() {
				fields = append(fields, violation.GetField())
			}
		}
	}
	if status.Code(err) != codes.InvalidArgument || !slices.Equal(fields, []string{badPlace}) {
		t.Errorf("got %v with %q", err, fields)
	}
}
