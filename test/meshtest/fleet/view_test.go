package fleet

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"
)

// stream is one of the broker's streams, read without the mesh.
type stream struct {
	t testing.TB
	jetstream.Stream
}

// queue returns a stage's queue, which a host has made.
func (f *fleet) queue(stage pipeline.StageName, d pipeline.Durability) stream {
	f.t.Helper()
	return f.stream(bus.SubjectsOf(f.mesh).Stream(stage, d))
}

// storedResults returns the stream of stored results.
func (f *fleet) storedResults() stream {
	f.t.Helper()
	return f.stream(bus.SubjectsOf(f.mesh).ResultStream())
}

func (f *fleet) stream(name string) stream {
	f.t.Helper()
	s, err := f.jetStream().Stream(f.t.Context(), name)
	if err != nil {
		f.t.Fatalf("%s: %v", name, err)
	}
	return stream{f.t, s}
}

// streamNames returns the names of all streams.
func (f *fleet) streamNames() []string {
	f.t.Helper()
	names := f.jetStream().StreamNames(f.t.Context())
	out := slices.Collect(func(yield func(string) bool) {
		for name := range names.Name() {
			if !yield(name) {
				return
			}
		}
	})
	must(f.t, names.Err())
	return out
}

func (f *fleet) jetStream() jetstream.JetStream {
	f.t.Helper()
	conn, err := nats.Connect(f.url())
	must(f.t, err)
	f.t.Cleanup(conn.Close)
	js, err := jetstream.New(conn)
	must(f.t, err)
	return js
}

// wipeRegistry removes the registry in the broker.
func (f *fleet) wipeRegistry() {
	f.t.Helper()
	for _, bucket := range []string{"registry", "instances"} {
		must(f.t, f.jetStream().DeleteStream(f.t.Context(), string(f.mesh)+"_"+bucket))
	}
}

func (s stream) state() jetstream.StreamState {
	s.t.Helper()
	info, err := s.Info(s.t.Context())
	must(s.t, err)
	return info.State
}

// awaitItems waits until the stream has that many messages.
func (s stream) awaitItems(n int) {
	s.t.Helper()
	isReached := false
	defer func() {
		if !isReached {
			s.logState()
		}
	}()
	testbed.Eventually(s.t, fmt.Sprintf("%d items are queued", n), func() bool { return int(s.state().Msgs) == n })
	isReached = true
}

// logState logs the messages and the consumers of the stream.
func (s stream) logState() {
	s.t.Helper()
	s.t.Logf("%s: %+v", s.CachedInfo().Config.Name, s.state())
	consumers := s.ListConsumers(s.t.Context())
	for c := range consumers.Info() {
		s.t.Logf("consumer %s: delivered %+v, ack floor %+v, %d to ack, %d pending, %d pulls", c.Name, c.Delivered, c.AckFloor, c.NumAckPending, c.NumPending, c.NumWaiting)
	}
	must(s.t, consumers.Err())
}

// redeliveries returns how often the broker has delivered an item again, whether or not it
// arrived: the deliveries less the delivered items. It is right for a queue with items of
// one class of which none was cancelled: there every sequence number up to the last
// delivered one is that of a delivered item.
func (s stream) redeliveries() int {
	s.t.Helper()
	again := 0
	consumers := s.ListConsumers(s.t.Context())
	for info := range consumers.Info() {
		if info.Delivered.Consumer > 0 {
			again += int(info.Delivered.Consumer - info.Delivered.Stream)
		}
	}
	must(s.t, consumers.Err())
	return again
}

// messages returns the messages of a stream, in order.
func messages[T any](s stream, decode func([]byte) (T, error)) []T {
	s.t.Helper()
	var out []T
	state := s.state()
	for seq := state.FirstSeq; seq <= state.LastSeq; seq++ {
		message, err := s.GetMsg(s.t.Context(), seq)
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			continue
		}
		must(s.t, err)
		one, err := decode(message.Data)
		must(s.t, err)
		out = append(out, one)
	}
	return out
}

// requestIDs returns the IDs of the requests whose items are in a queue.
func (s stream) requestIDs() []string {
	s.t.Helper()
	return messages(s, func(data []byte) (string, error) {
		env, err := envelope.Decode(data)
		if err != nil {
			return "", err
		}
		return string(env.RequestID), nil
	})
}

// results returns the stored results.
func (s stream) results() []*envelope.Result {
	s.t.Helper()
	return messages(s, envelope.DecodeResult)
}

// forAll calls a function with each value, 16 at once, and one client.
func forAll[T any](values []T, do func(*http.Client, T)) {
	const callers = 16
	transport := &http.Transport{MaxIdleConnsPerHost: callers}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	work := make(chan T)
	var working sync.WaitGroup
	for range callers {
		working.Go(func() {
			for value := range work {
				do(client, value)
			}
		})
	}
	for _, value := range values {
		work <- value
	}
	close(work)
	working.Wait()
}

// different gets the stored result of each request from a gateway, and describes those
// that differ from what the caller got.
func (m *member) different(answers []answer) []string {
	var mu sync.Mutex
	var out []string
	forAll(answers, func(client *http.Client, a answer) {
		if status, body := m.fleet.send(client, http.MethodGet, m.requestURL(a.id+"/result")); status != http.StatusOK || body != a.body {
			mu.Lock()
			defer mu.Unlock()
			out = append(out, fmt.Sprintf("%s: got %q, stored %d %q", a.id, a.body, status, body))
		}
	})
	return out
}

// cancel cancels requests by their IDs.
func (m *member) cancel(ids []string) {
	m.fleet.t.Helper()
	forAll(ids, func(client *http.Client, id string) {
		if status, body := m.fleet.send(client, http.MethodDelete, m.requestURL(id)); status != http.StatusNoContent {
			m.fleet.t.Errorf("request %s: %d %s", id, status, body)
		}
	})
}

func (m *member) requestURL(path string) string {
	return "http://" + m.address() + "/v1/requests/" + path
}

// callAdmin calls a method of an admin service of a gateway.
func callAdmin[Client, Request, Response any](m *member, client func(connect.HTTPClient, string, ...connect.ClientOption) Client,
	method func(Client, context.Context, *connect.Request[Request]) (*connect.Response[Response], error), request *Request,
) (*Response, error) {
	ctx, cancel := context.WithTimeout(m.fleet.t.Context(), 5*time.Second)
	defer cancel()
	m.mu.Lock()
	url := "http://" + m.admin
	m.mu.Unlock()
	response, err := method(client(&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}, url), ctx, connect.NewRequest(request))
	if err != nil {
		return nil, err
	}
	return response.Msg, nil
}

// apply applies a pipeline of one step, at the stage "echo", through a gateway.
func (m *member) apply(name pipeline.Name) error {
	p := pipeline.OfStage("echo")
	p.Name = name
	_, err := callAdmin(m, adminv1connect.NewPipelineServiceClient, adminv1connect.PipelineServiceClient.ApplyPipeline, &adminv1.ApplyPipelineRequest{Pipeline: p.ToProto()})
	return err
}

// delete deletes a pipeline through a gateway.
func (m *member) delete(name pipeline.Name) error {
	_, err := callAdmin(m, adminv1connect.NewPipelineServiceClient, adminv1connect.PipelineServiceClient.DeletePipeline, &adminv1.DeletePipelineRequest{Name: string(name)})
	return err
}

// serves reports whether a gateway serves exactly these pipelines, in order of name.
func (m *member) serves(names ...string) bool {
	m.fleet.t.Helper()
	list, err := callAdmin(m, adminv1connect.NewPipelineServiceClient, adminv1connect.PipelineServiceClient.ListPipelines, &adminv1.ListPipelinesRequest{})
	must(m.fleet.t, err)
	var got []string
	for _, p := range list.GetPipelines() {
		got = append(got, p.GetPipeline().GetName())
	}
	return slices.Equal(got, names)
}

// view is what a gateway shows of the hosts of its mesh.
type view struct {
	// alive are the IDs of the live hosts, sorted.
	alive []string
	// stale is true while the registry does not answer.
	stale bool
}

func (m *member) view() view {
	m.fleet.t.Helper()
	list, err := callAdmin(m, adminv1connect.NewMeshServiceClient, adminv1connect.MeshServiceClient.ListHosts, &adminv1.ListHostsRequest{})
	must(m.fleet.t, err)
	v := view{stale: list.GetStaleSince() != nil}
	for _, host := range list.GetHosts() {
		if host.GetAlive() {
			v.alive = append(v.alive, host.GetRecord().GetHost())
		}
	}
	slices.Sort(v.alive)
	return v
}

// has reports whether these hosts are alive, and the view is not stale.
func (v view) has(hosts []*member) bool {
	return !v.stale && !slices.ContainsFunc(hosts, func(m *member) bool { return !slices.Contains(v.alive, m.address()) })
}
