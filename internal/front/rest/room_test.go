package rest_test

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/rest"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// mostPayload is far less than what bodies of bodyBytes become.
const (
	mostPayload = 256 << 10
	bodyBytes   = 256 << 10
)

// swelling returns requests that say eight bytes with one or two.
func swelling(t testing.TB) map[string][]byte {
	t.Helper()
	return map[string][]byte{
		"application/msgpack": []byte(pack(t, object{"inputs": list{input("x", "FP64", list{bodyBytes}, zeros(bodyBytes))}})),
		"application/json":    []byte(`{"inputs":[{"name":"x","datatype":"FP64","shape":[131072],"data":[` + strings.Repeat("0,", bodyBytes/2-1) + `0]}]}`),
	}
}

func zeros(n int) list {
	out := make(list, n)
	for i := range out {
		out[i] = 0
	}
	return out
}

// send hands a body to the handler and returns the answer.
func send(ctx context.Context, h http.Handler, mediaType string, data []byte) *httptest.ResponseRecorder {
	r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/v1/pipelines/photos:infer", bytes.NewReader(data))
	r.Header.Set("Content-Type", mediaType)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// Not parallel: it counts what is allocated.
func TestOversizedTensorIsRejectedBeforeAllocation(t *testing.T) {
	pool := budget.NewPool(budget.Settings{Limit: 1 << 30})
	h := fronttest.WithMemory(rest.New(&fronttest.Caller{}, nil, transport.Settings{MaxPayload: mostPayload}), pool)
	for mediaType, data := range swelling(t) {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		w := send(t.Context(), h, mediaType, data)
		runtime.ReadMemStats(&after)
		// The body, read into buffers that double; nothing else.
		if got := after.TotalAlloc - before.TotalAlloc; got > 3*uint64(len(data))+(256<<10) {
			t.Errorf("%s: %d bytes are allocated for %d", mediaType, got, len(data))
		}
		if text := w.Body.String(); w.Code != http.StatusRequestEntityTooLarge || !strings.Contains(text, "inputs.x.data takes") || !strings.Contains(text, "gateway.max_payload is 262144") {
			t.Errorf("%s: %d %s", mediaType, w.Code, text)
		}
		if got := pool.Held(); got != 0 {
			t.Errorf("%s: %d bytes stay reserved", mediaType, got)
		}
	}
}

func TestTensorsAreReservedUntilTheyAreAnswered(t *testing.T) {
	t.Parallel()
	for mediaType, data := range swelling(t) {
		t.Run(mediaType, func(t *testing.T) {
			t.Parallel()
			pool, reserved, made := budget.NewPool(budget.Settings{Limit: 1 << 30}), int64(0), 0
			caller := &fronttest.Caller{Answer: func(_ context.Context, r *request.Request) (*request.Response, error) {
				reserved, made = pool.Held(), payload.Size(r.Inputs)
				return nil, fault.New(fault.NoCapacity, "it is a test")
			}}
			send(t.Context(), fronttest.WithMemory(rest.New(caller, nil, transport.Settings{}), pool), mediaType, data)
			// The rest is for the request itself and its header.
			if want := int64(len(data) + made); made < 4*len(data)-4096 || reserved < want || reserved > want+(32<<10) {
				t.Errorf("%d bytes are reserved of a body of %d and inputs of %d", reserved, len(data), made)
			}
			if got := pool.Held(); got != 0 {
				t.Errorf("%d bytes stay reserved", got)
			}
		})
	}
}

func TestTensorBeyondTheBudgetIsRejected(t *testing.T) {
	t.Parallel()
	for mediaType, data := range swelling(t) {
		pool := budget.NewPool(budget.Settings{Limit: int64(3 * len(data))})
		w := send(t.Context(), fronttest.WithMemory(rest.New(&fronttest.Caller{}, nil, transport.Settings{}), pool), mediaType, data)
		if !strings.Contains(w.Body.String(), `"PAYLOAD_TOO_LARGE"`) || pool.Held() != 0 {
			t.Errorf("%s: %d %s, and %d bytes are taken", mediaType, w.Code, w.Body, pool.Held())
		}
	}
}

func TestParametersAreReserved(t *testing.T) {
	t.Parallel()
	var all []string
	for i := range payload.MaxParameters {
		all = append(all, fmt.Sprintf(`"%d":0`, i))
	}
	parameters := `"parameters":{` + strings.Join(all, ",") + "}"
	inputs := strings.Repeat(`{"name":"x","datatype":"INT8","shape":[0],"data":[],`+parameters+"},", payload.MaxParts)
	body := []byte(`{"inputs":[` + strings.TrimSuffix(inputs, ",") + "]}")
	pool := budget.NewPool(budget.Settings{Limit: 6 << 20})
	w := send(t.Context(), fronttest.WithMemory(rest.New(&fronttest.Caller{}, nil, transport.Settings{}), pool), "application/json", body)
	if !strings.Contains(w.Body.String(), `"PAYLOAD_TOO_LARGE"`) || pool.Held() != 0 {
		t.Errorf("%d bytes: %d %s, and %d bytes are taken", len(body), w.Code, w.Body, pool.Held())
	}
}

func TestNothingIsMadeForACallerThatIsGone(t *testing.T) {
	t.Parallel()
	ctx, leave := context.WithCancel(t.Context())
	leave()
	for mediaType, data := range swelling(t) {
		caller := &fronttest.Caller{}
		if w := send(ctx, rest.New(caller, nil, transport.Settings{}), mediaType, data); w.Code != 499 || caller.Last() != nil {
			t.Errorf("%s: %d %.200s", mediaType, w.Code, w.Body)
		}
	}
}

// Not parallel: it looks at the heap.
func TestManySwellingBodiesAtOnceStayWithinTheBudget(t *testing.T) {
	const bound, atOnce = 16 << 20, 60
	pool := budget.NewPool(budget.Settings{Limit: bound})
	h := fronttest.WithMemory(rest.New(&fronttest.Caller{Answer: func(context.Context, *request.Request) (*request.Response, error) {
		return nil, fault.New(fault.NoCapacity, "it is a test")
	}}, nil, transport.Settings{MaxPayload: 8 * mostPayload}), pool)
	bodies := swelling(t)
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	var sending sync.WaitGroup
	for range atOnce {
		for mediaType, data := range bodies {
			sending.Go(func() {
				w := send(t.Context(), h, mediaType, data)
				if text := w.Body.String(); !strings.Contains(text, `"OVERLOADED"`) && !strings.Contains(text, `"NO_CAPACITY"`) {
					t.Errorf("%s: %d %.200s", mediaType, w.Code, text)
				}
			})
		}
	}
	sending.Wait()
	runtime.ReadMemStats(&after)
	// The collector lets the heap be twice what is in use, and buffers of bodies double.
	if got := int64(after.HeapSys) - int64(before.HeapSys); got > 4*bound {
		t.Errorf("the heap grew by %d bytes, with a budget of %d", got, bound)
	}
	if got := pool.Held(); got != 0 {
		t.Errorf("%d bytes stay reserved", got)
	}
}
