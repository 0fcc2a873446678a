package questions

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/bench/baseline"
	"github.com/stagemesh/stagemesh/internal/load"
	"github.com/stagemesh/stagemesh/internal/process"
)

// bulk compares jobs that are submitted many at a time with bare publishes.
func (m *measurement) bulk(ctx context.Context) error {
	return m.withJobs(ctx, false, func(b *jobMesh) error {
		rate := func(do func() error) func() (load.Run, error) {
			return func() (load.Run, error) {
				begin := time.Now()
				err := do()
				return load.Run{ThroughputPerS: queuedJobs / time.Since(begin).Seconds()}, err
			}
		}
		return m.pairs("bulk", throughput, rate(func() error { return b.fill(ctx, held, queuedJobs) }), rate(func() error {
			return baseline.Broker{URL: b.BrokerURL()}.PublishAsync(ctx, queuedJobs, 1<<10)
		}))
	})
}

// The stage busy of beside.
const (
	busySlots = 64
	busyTime  = 100 * time.Millisecond
)

// beside compares requests beside jobs that fill their stage with requests alone.
func (m *measurement) beside(ctx context.Context) error {
	return m.withJobs(ctx, false, func(b *jobMesh) error {
		steady := load.Settings{Rate: 40, Fine: true, Warmup: warmup, Duration: 3 * m.duration}
		alone := b.load(ctx, steady, b.request("busy", inferencev1.Durability_DURABILITY_MEMORY))
		var ended uint64 // the last end that was seen
		ends := func() (n int, err error) {
			for {
				page, err := b.jobs.ListJobs(ctx, connect.NewRequest(&inferencev1.ListJobsRequest{Queue: "beside", Ended: true, After: ended, Limit: 1000}))
				if err != nil {
					return n, err
				}
				if page.Msg.GetNext() == 0 {
					return n + len(page.Msg.GetJobs()), nil
				}
				n, ended = n+len(page.Msg.GetJobs()), page.Msg.GetNext()
			}
		}
		return m.pairs("P99", p99, func() (out load.Run, err error) {
			jobs := int((steady.Duration + 2*warmup) / busyTime * busySlots)
			if err := b.fill(ctx, "beside", jobs); err != nil {
				return out, err
			}
			_, err = b.dispatch(ctx, func(*stagemesh.Mesh) error {
				if err := poll(ctx, func() (bool, error) {
					n, err := ends()
					return n > 0, err
				}); err != nil {
					return err
				}
				begin := time.Now()
				if out, err = alone(); err != nil {
					return err
				}
				requests := steady.Rate * time.Since(begin).Seconds()
				n, err := ends()
				m.add("busy", 100*float64(busyTime)*(float64(n)+requests)/float64(busySlots*time.Since(begin)))
				return err
			})
			return out, err
		}, alone)
	})
}

// gateInterval is how often dispatchers ask the gate of opened.
const gateInterval = 200 * time.Millisecond

// opened measures how soon after the opening of a gate a job is sent.
func (m *measurement) opened(ctx context.Context) error {
	var value atomic.Int64
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	source := &http.Server{ReadHeaderTimeout: time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprint(w, value.Load())
	})}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = source.Serve(listener) // until it is closed
	}()
	defer func() {
		_ = source.Close()
		<-served
	}()
	gate := fmt.Sprintf("interval: %s, value: {url: 'http://%s'}", gateInterval, listener.Addr())
	return m.withGate(ctx, gate, false, func(b *jobMesh) error {
		_, err := b.dispatch(ctx, func(*stagemesh.Mesh) error {
			for range 4 * m.times {
				value.Store(0)
				if err := process.Sleep(ctx, 3*gateInterval); err != nil {
					return err
				}
				id, err := b.submit(ctx, "gated")
				if err != nil {
					return err
				}
				at := time.Now()
				value.Store(1)
				r := connect.NewRequest(&inferencev1.GetJobRequest{Id: id})
				if err := poll(ctx, func() (bool, error) {
					job, err := b.jobs.GetJob(ctx, r)
					if err != nil {
						return false, err
					}
					begun := job.Msg.GetJob().GetStartedAt()
					if begun != nil {
						m.add("first send", inMS(begun.AsTime().Sub(at)))
					}
					return begun != nil, nil
				}); err != nil {
					return err
				}
			}
			return nil
		})
		return err
	})
}

// duration is the time of a request of a run.
func duration(r load.Run) float64 { return 1 / r.ThroughputPerS }

// batch compares a batch with a drain of as many jobs.
func (m *measurement) batch(ctx context.Context) error {
	return m.withJobs(ctx, false, func(b *jobMesh) error {
		return m.pairs("batch", duration, func() (out load.Run, err error) {
			var file struct{ ID string }
			if err := b.upload(ctx, &file); err != nil {
				return out, err
			}
			took, err := b.dispatch(ctx, func(*stagemesh.Mesh) error {
				var batch struct{ ID, Status string }
				body := fmt.Sprintf(`{"input_file_id": %q, "endpoint": "/v1/chat/completions", "completion_window": "24h"}`, file.ID)
				if err := b.call(ctx, http.MethodPost, "/v1/batches", "application/json", strings.NewReader(body), &batch); err != nil {
					return err
				}
				return poll(ctx, func() (bool, error) {
					err := b.call(ctx, http.MethodGet, "/v1/batches/"+batch.ID, "", http.NoBody, &batch)
					if err == nil && batch.Status == "failed" {
						err = fmt.Errorf("batch %s has failed", batch.ID)
					}
					return batch.Status == "completed", err
				})
			})
			out.ThroughputPerS = batchLines / took.Seconds()
			return out, err
		}, b.drain(ctx, batchLines))
	})
}

// upload uploads the input file of a batch.
func (b *jobMesh) upload(ctx context.Context, file any) error {
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	err := form.WriteField("purpose", "batch")
	if err != nil {
		return err
	}
	lines, err := form.CreateFormFile("file", "requests.jsonl")
	if err != nil {
		return err
	}
	text := strings.Repeat("x", 1<<10)
	for i := range batchLines {
		if _, err := fmt.Fprintf(lines, `{"custom_id":"%d","method":"POST","url":"/v1/chat/completions","body":{"model":"echo","messages":[{"role":"user","content":%q}]}}`+"\n", i, text); err != nil {
			return err
		}
	}
	if err := form.Close(); err != nil {
		return err
	}
	return b.call(ctx, http.MethodPost, "/v1/files", form.FormDataContentType(), &body, file)
}

// call sends a request with a body to the gateway, and reads the JSON of the answer.
func (b *jobMesh) call(ctx context.Context, method, path, contentType string, body io.Reader, answer any) error {
	r, err := http.NewRequestWithContext(ctx, method, b.URL()+path, body)
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", contentType)
	answered, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer answered.Body.Close() //nolint:errcheck // it was only read
	data, err := io.ReadAll(answered.Body)
	if err == nil && answered.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %d %s", path, answered.StatusCode, data)
	}
	if err != nil {
		return err
	}
	return json.Unmarshal(data, answer)
}
