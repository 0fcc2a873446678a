package transport_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// protocols are those that a stream is served by: whether by cleartext HTTP/2.
func protocols() map[string]bool { return map[string]bool{"HTTP/1": false, "HTTP/2": true} }

// open asks for an answer, whose head has come, and returns it with its events.
func open(t *testing.T, h2c bool, serve http.HandlerFunc) (http.Header, *fronttest.Events) {
	t.Helper()
	r := testbed.Request(t, http.MethodGet, fronttest.Serve(t, serve), http.NoBody)
	response, err := fronttest.Client(t, h2c).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = response.Body.Close() })
	return response.Header, fronttest.ReadEvents(response.Body)
}

func TestEveryEventIsFlushed(t *testing.T) {
	t.Parallel()
	for name, h2c := range protocols() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			next := make(chan struct{})
			header, events := open(t, h2c, func(w http.ResponseWriter, _ *http.Request) {
				out := transport.NewEventStream(w, 0)
				out.SetHeader("X-Early", "yes")
				for i := range uint64(3) {
					if err := out.Send(transport.Event{ID: strconv.FormatUint(i+1, 10), Name: "chunk", Data: []byte(`"x"`)}); err != nil {
						t.Error(err)
					}
					out.SetHeader("X-Late", "yes")
					<-next
				}
			})
			for i := range uint64(3) {
				got, err := events.Next()
				if want := (fronttest.Event{ID: strconv.FormatUint(i+1, 10), Name: "chunk", Data: `"x"`}); err != nil || got != want {
					t.Errorf("got %+v, %v", got, err)
				}
				next <- struct{}{}
			}
			if _, err := events.Next(); !errors.Is(err, io.EOF) {
				t.Errorf("it ends with %v", err)
			}
			for name, want := range map[string]string{
				"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no",
				"X-Content-Type-Options": "nosniff", "X-Early": "yes", "X-Late": "",
			} {
				if got := header.Get(name); got != want {
					t.Errorf("%s is %q", name, got)
				}
			}
		})
	}
}

func TestIdleStreamSendsComments(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := httptest.NewRecorder()
		out := transport.NewEventStream(w, 10*time.Second)
		err := out.Run(t.Context(), func(context.Context) error {
			<-time.After(9 * time.Second)
			if out.Begun() {
				t.Error("it has begun within the silence")
			}
			<-time.After(2 * time.Second)
			if !out.Begun() {
				t.Error("it has not begun after the silence")
			}
			<-time.After(15 * time.Second) // 26: comments at 10 and 20
			if err := out.Send(transport.Event{ID: "1", Data: []byte("1")}); err != nil {
				t.Error(err)
			}
			<-time.After(9 * time.Second)
			return out.Send(transport.Event{ID: "2", Data: []byte("2")})
		})
		if err != nil {
			t.Error(err)
		}
		<-time.After(time.Minute)
		got, err := fronttest.ReadEvents(w.Body).All()
		if err != nil || len(got) != 2 || got[0].Pings != 2 || got[1].Pings != 0 || got[1].ID != "2" {
			t.Errorf("got %+v, %v", got, err)
		}
	})
}

func TestFailureBeforeFirstEventHasNotBegun(t *testing.T) {
	t.Parallel()
	w, broken := httptest.NewRecorder(), errors.New("broken")
	out := transport.NewEventStream(w, 0)
	if err := out.Run(t.Context(), func(context.Context) error { return broken }); !errors.Is(err, broken) || out.Begun() || w.Body.Len() > 0 {
		t.Errorf("%v, begun %v, %q", err, out.Begun(), w.Body)
	}
}

// deaf takes nothing, and tells that at once.
type deaf struct{ httptest.ResponseRecorder }

func (*deaf) Write([]byte) (int, error) { return 0, errors.New("nobody is there") }

func TestFailedCommentEndsWork(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		out := transport.NewEventStream(&deaf{*httptest.NewRecorder()}, 0)
		err := out.Run(t.Context(), func(ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("it ends with %v", err)
		}
		for range 2 {
			if err := out.Send(transport.Event{}); fault.From(err).Reason != fault.Cancelled {
				t.Errorf("and goes on: %v", err)
			}
		}
	})
}

// FuzzEvents holds that any JSON arrives as what it was, one event for each.
func FuzzEvents(f *testing.F) {
	f.Add([]byte(`{"a": "b"}`), uint64(1))
	f.Add([]byte("{\r\n\t\"a\":\r1}\n"), uint64(0))
	f.Add([]byte(`"data: \n\n"`), uint64(9))
	f.Fuzz(func(t *testing.T, data []byte, id uint64) {
		if !json.Valid(data) {
			return
		}
		w := httptest.NewRecorder()
		out, word := transport.NewEventStream(w, 0), strconv.FormatUint(id, 10)
		for range 2 {
			if err := out.Send(transport.Event{ID: word, Name: "chunk", Data: data}); err != nil {
				t.Fatal(err)
			}
		}
		got, err := fronttest.ReadEvents(w.Body).All()
		if err != nil || len(got) != 2 || got[0] != got[1] || got[0].ID != word || got[0].Name != "chunk" {
			t.Fatalf("got %+v, %v", got, err)
		}
		if compact(t, []byte(got[0].Data)) != compact(t, data) {
			t.Errorf("%q became %q", data, got[0].Data)
		}
	})
}

func compact(t *testing.T, data []byte) string {
	t.Helper()
	var out strings.Builder
	var raw json.RawMessage
	if err := json.Unmarshal(data, &raw); err != nil {
		t.Fatal(err)
	}
	for _, b := range raw {
		if b > ' ' {
			out.WriteByte(b)
		}
	}
	return out.String()
}

func BenchmarkSend(b *testing.B) {
	w := &discard{header: http.Header{}}
	out := transport.NewEventStream(w, 0)
	event := transport.Event{ID: "1", Name: "chunk", Data: []byte(`{"request_id":"0199aaaa-bbbb-7ccc-8ddd-eeeeffff0000","seq":1,"outputs":[]}`)}
	b.ReportAllocs()
	for b.Loop() {
		if err := out.Send(event); err != nil {
			b.Fatal(err)
		}
	}
}

type discard struct{ header http.Header }

func (d *discard) Header() http.Header         { return d.header }
func (d *discard) Write(p []byte) (int, error) { return len(p), nil }
func (d *discard) WriteHeader(int)             {}
func (d *discard) Flush()                      {}
