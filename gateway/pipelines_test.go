package gateway_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/natskv"
	"github.com/stagemesh/stagemesh/internal/pipelines"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	payloads "github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// table returns a registry on the broker.
func table(t *testing.T, broker *testbed.Broker) *natskv.Store {
	t.Helper()
	s, err := natskv.New(natskv.Settings{Mesh: "test", URL: broker.URL(), Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	testbed.Background(t, s.Run)
	return s
}

// following returns a store that follows the registry, once it is ready.
func following(t *testing.T, in discovery.Table, seeds ...pipeline.Pipeline) (s *pipelines.Store, stop func()) {
	t.Helper()
	s, err := pipelines.New(pipelines.Settings{Table: in, Seeds: seeds, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	stop = testbed.Background(t, s.Run)
	ctx, cancel := context.WithTimeout(t.Context(), testbed.Patience)
	defer cancel()
	if err := s.WaitReady(ctx); err != nil {
		t.Fatal(err)
	}
	return s, stop
}

// routes formats the pipelines that are served.
func routes(s *pipelines.Store) string {
	var out []string
	for _, e := range s.List() {
		text := string(e.Pipeline.Name)
		for _, step := range e.Pipeline.Steps {
			text += ">" + string(step.Stage)
		}
		out = append(out, text)
	}
	return strings.Join(out, " ")
}

func serves(t *testing.T, who string, s *pipelines.Store, want string) {
	t.Helper()
	testbed.Eventually(t, who+" serves "+want, func() bool { return routes(s) == want })
}

func apply(t *testing.T, s *pipelines.Store, p pipeline.Pipeline) pipelines.Entry {
	t.Helper()
	out, _, err := s.Apply(t.Context(), p, nil)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func refused(t *testing.T, what string, err error, want fault.Reason) {
	t.Helper()
	if f, ok := errors.AsType[*fault.Fault](err); !ok || f.Reason != want {
		t.Errorf("%s: %v, want %s", what, err, want)
	}
}

func ptr(n uint64) *uint64 { return &n }

func TestAllGatewaysFollowPipelineChanges(t *testing.T) {
	t.Parallel()
	registry := table(t, testbed.StartBroker(t))
	one, _ := following(t, registry, testbed.Pipeline("p", "a"))
	two, _ := following(t, registry, testbed.Pipeline("q", "b"))
	serves(t, "one", one, "p>a q>b")
	serves(t, "two", two, "p>a q>b")

	e, change, err := one.Apply(t.Context(), testbed.Pipeline("p", "a", "c"), nil)
	if err != nil || change != adminv1.PipelineChange_PIPELINE_CHANGE_UPDATE || !e.InFile || e.FromFile {
		t.Errorf("an update is %v %+v, %v", change, e, err)
	}
	if got := routes(one); got != "p>a>c q>b" {
		t.Errorf("the gateway that applied it serves %s", got)
	}
	serves(t, "two", two, "p>a>c q>b")
	again, change, err := two.Apply(t.Context(), testbed.Pipeline("p", "a", "c"), nil)
	if err != nil || change != adminv1.PipelineChange_PIPELINE_CHANGE_NONE || again.Revision != e.Revision {
		t.Errorf("a repeated change is %v %+v, %v", change, again, err)
	}
	if _, change, err := two.Apply(t.Context(), testbed.Pipeline("n", "a"), nil); err != nil || change != adminv1.PipelineChange_PIPELINE_CHANGE_CREATE || routes(two) != "n>a p>a>c q>b" {
		t.Errorf("a new one is %v, %v; two serves %s", change, err, routes(two))
	}
	for _, name := range []pipeline.Name{"n", "q"} {
		if err := two.Delete(t.Context(), name, nil); err != nil {
			t.Error(err)
		}
	}
	if got := routes(two); got != "p>a>c" {
		t.Errorf("after two were deleted two serves %s", got)
	}
	serves(t, "one", one, "p>a>c")
	for _, name := range []pipeline.Name{"n", "q"} {
		refused(t, "another delete", one.Delete(t.Context(), name, nil), fault.UnknownPipeline)
		_, err := one.Get(name)
		refused(t, "what was deleted", err, fault.UnknownPipeline)
		_, f := one.Resolve(string(name))
		refused(t, "what was deleted", f, fault.UnknownPipeline)
	}
}

func TestPipelineChangesCompareRevisions(t *testing.T) {
	t.Parallel()
	registry := table(t, testbed.StartBroker(t))
	s, _ := following(t, registry)
	_, _, err := s.Apply(t.Context(), testbed.Pipeline("p", "a"), ptr(1))
	refused(t, "one that is not there", err, fault.RevisionMismatch)
	first, _, err := s.Apply(t.Context(), testbed.Pipeline("p", "a"), ptr(0))
	if err != nil {
		t.Fatal(err)
	}
	_, _, err = s.Apply(t.Context(), testbed.Pipeline("p", "b"), ptr(0))
	refused(t, "one that is there", err, fault.RevisionMismatch)
	second, _, err := s.Apply(t.Context(), testbed.Pipeline("p", "b"), &first.Revision)
	if err != nil || second.Revision <= first.Revision {
		t.Errorf("revision %d after %d: %v", second.Revision, first.Revision, err)
	}
	_, _, err = s.Apply(t.Context(), testbed.Pipeline("p", "c"), &first.Revision)
	refused(t, "one that has changed", err, fault.RevisionMismatch)
	refused(t, "one that has changed", s.Delete(t.Context(), "p", &first.Revision), fault.RevisionMismatch)
	if err := s.Delete(t.Context(), "p", &second.Revision); err != nil {
		t.Error(err)
	}
	_, _, err = s.Apply(t.Context(), testbed.Pipeline("p", "a"), &second.Revision)
	refused(t, "one that was deleted", err, fault.RevisionMismatch)
	_, _, err = s.Apply(t.Context(), testbed.Pipeline("p"), nil)
	refused(t, "one without steps", err, fault.InvalidRequest)
	_, _, err = s.Apply(t.Context(), pipeline.OfStage("a"), nil)
	refused(t, "one with the prefix of stages", err, fault.InvalidRequest)
	big := testbed.Pipeline("p", "a")
	for i := range 3000 {
		big.Keep = append(big.Keep, fmt.Sprintf("%0100d", i))
	}
	_, _, err = s.Apply(t.Context(), big, nil)
	refused(t, "one that is too large", err, fault.InvalidRequest)
}

func TestConcurrentPipelineChangesAreNotLost(t *testing.T) {
	t.Parallel()
	registry := table(t, testbed.StartBroker(t))
	const writers, each = 4, 10
	var working sync.WaitGroup
	for range writers {
		s, _ := following(t, registry)
		working.Go(func() {
			for done := 0; done < each; {
				var revision uint64
				p := testbed.Pipeline("p", "a")
				if e, err := s.Get("p"); err == nil {
					p, revision = e.Pipeline, e.Revision
				}
				p.MaxInFlight++
				_, _, err := s.Apply(t.Context(), p, &revision)
				if f, ok := errors.AsType[*fault.Fault](err); ok && f.Reason == fault.RevisionMismatch {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				done++
			}
		})
	}
	working.Wait()
	s, _ := following(t, registry)
	if e, err := s.Get("p"); err != nil || e.Pipeline.MaxInFlight != writers*each {
		t.Errorf("%d changes are stored, %v", e.Pipeline.MaxInFlight, err)
	}
}

func TestChangedFileReplacesAppliedPipeline(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	registry := table(t, broker)
	gateway := func(want string, stage pipeline.StageName) (*pipelines.Store, func()) {
		s, stop := following(t, registry, testbed.Pipeline("p", stage))
		if got := routes(s); got != want {
			t.Errorf("with stage %s in the file: %s, want %s", stage, got, want)
		}
		return s, stop
	}
	s, stop := gateway("p>a", "a")
	apply(t, s, testbed.Pipeline("p", "b"))
	stop()
	s, stop = gateway("p>b", "a") // the file has not changed
	if err := s.Delete(t.Context(), "p", nil); err != nil {
		t.Fatal(err)
	}
	stop()
	s, stop = gateway("", "a")
	apply(t, s, testbed.Pipeline("p", "d"))
	stop()
	_, stop = gateway("p>c", "c") // the file has changed
	stop()
	// Applied pipelines survive when any gateway fills a registry again.
	s, stop = following(t, registry, testbed.Pipeline("p", "old"))
	niu, leave := following(t, registry, testbed.Pipeline("p", "new"))
	apply(t, niu, testbed.Pipeline("p", "applied"))
	serves(t, "the old one", s, "p>applied")
	leave()
	before, err := s.Get("p")
	if err != nil {
		t.Fatal(err)
	}
	wipe(t, broker.Connect("test").JetStream())
	awaitRecords(t, registry, "p", "_epoch")
	testbed.Eventually(t, "the store serves the new registry", func() bool {
		after, err := s.Get("p")
		return err == nil && after.Revision != before.Revision
	})
	serves(t, "the old one", s, "p>applied")
	if err := s.Delete(t.Context(), "p", nil); err != nil {
		t.Fatal(err)
	}
	stop()
	_, stop = following(t, registry, testbed.Pipeline("p", "c"))
	stop()
	// An applied pipeline becomes the file's once a file has it.
	s, stop = following(t, registry)
	apply(t, s, testbed.Pipeline("q", "a"))
	stop()
	s, _ = following(t, registry, testbed.Pipeline("p", "c"), testbed.Pipeline("q", "b"))
	if got := routes(s); got != "p>c q>b" {
		t.Errorf("finally the store serves %s", got)
	}
}

// awaitRecords waits until the registry has these records.
func awaitRecords(t *testing.T, registry discovery.Table, names ...string) {
	t.Helper()
	testbed.Eventually(t, "the registry is filled again", func() bool {
		return !slices.ContainsFunc(names, func(name string) bool {
			_, err := registry.Get(t.Context(), discovery.KeyOf("pipelines", name))
			return err != nil
		})
	})
}

func TestWipedRegistryIsFilledAgain(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	registry := table(t, broker)
	one, _ := following(t, registry, testbed.Pipeline("p", "a"), testbed.Pipeline("deleted", "a"))
	two, _ := following(t, registry)
	apply(t, two, testbed.Pipeline("q", "b"))
	apply(t, two, testbed.Pipeline("p", "c"))
	if err := one.Delete(t.Context(), "deleted", nil); err != nil {
		t.Fatal(err)
	}
	const all = "p>c q>b"
	serves(t, "one", one, all)
	serves(t, "two", two, all)
	lacked := make(chan string, 2)
	for _, s := range []*pipelines.Store{one, two} {
		testbed.Background(t, func(ctx context.Context) error {
			for {
				changed := s.Changed()
				if got := routes(s); got != all {
					lacked <- got
					return nil
				}
				select {
				case <-changed:
				case <-ctx.Done():
					return nil
				}
			}
		})
	}
	before, err := one.Get("q")
	if err != nil {
		t.Fatal(err)
	}
	js := broker.Connect("test").JetStream()
	wipe(t, js)
	awaitRecords(t, registry, "p", "q", "deleted", "_epoch")
	testbed.Eventually(t, "what is served is the registry's", func() bool {
		after, err := two.Get("q")
		return err == nil && after.Revision != before.Revision
	})
	// A gateway that starts afterwards knows the deleted pipelines, too.
	three, _ := following(t, registry, testbed.Pipeline("p", "a"), testbed.Pipeline("deleted", "a"))
	if got := routes(three); got != all {
		t.Errorf("a new gateway serves %s", got)
	}
	select {
	case got := <-lacked:
		t.Errorf("a gateway served %s during the wipe", got)
	default:
	}
}

// wipe deletes the registry's streams.
func wipe(t *testing.T, js jetstream.JetStream) {
	t.Helper()
	var names []string
	for name := range js.StreamNames(t.Context()).Name() {
		names = append(names, name)
	}
	if len(names) == 0 {
		t.Fatal("the broker has no registry streams")
	}
	for _, name := range names {
		if err := js.DeleteStream(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
}

func TestStoreWithoutRegistryIsNotReady(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	broker.Stop()
	s, err := pipelines.New(pipelines.Settings{Table: table(t, broker), Seeds: []pipeline.Pipeline{testbed.Pipeline("p", "a")}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	testbed.Background(t, s.Run)
	if err := s.Ready(); err == nil {
		t.Error("the store is ready")
	}
	_, f := s.Resolve("p")
	refused(t, "a pipeline", f, fault.RegistryUnavailable)
	if p, f := s.Resolve("stage:a"); f != nil || len(p.Steps) != 1 {
		t.Errorf("the pipeline of a stage is %v, %v", p, f)
	}
	_, _, err = s.Apply(t.Context(), testbed.Pipeline("p", "a"), nil)
	refused(t, "a change", err, fault.RegistryUnavailable)
	broker.Restore()
	serves(t, "it", s, "p>a")
	if err := s.Ready(); err != nil {
		t.Error(err)
	}
}

func TestPipelinesAreReadOnlyDuringRegistryOutage(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	s, _ := following(t, table(t, broker), testbed.Pipeline("p", "a"))
	broker.Stop()
	testbed.Eventually(t, "it is stale", func() bool { since, _ := s.Stale(); return !since.IsZero() })
	begin := time.Now()
	_, _, err := s.Apply(t.Context(), testbed.Pipeline("p", "b"), nil)
	refused(t, "a change", err, fault.RegistryUnavailable)
	refused(t, "a delete", s.Delete(t.Context(), "p", nil), fault.RegistryUnavailable)
	if took := time.Since(begin); took > time.Second {
		t.Errorf("it took %s", took)
	}
	if p, f := s.Resolve("p"); f != nil || p.Steps[0].Stage != "a" || s.Ready() != nil {
		t.Errorf("the pipeline is %v, %v; ready: %v", p, f, s.Ready())
	}
	broker.Restore()
	testbed.Eventually(t, "it can be changed again", func() bool {
		_, _, err := s.Apply(t.Context(), testbed.Pipeline("p", "b"), nil)
		return err == nil
	})
}

func TestUnreadablePipelineRecordHarmsNoOther(t *testing.T) {
	t.Parallel()
	registry := table(t, testbed.StartBroker(t))
	s, _ := following(t, registry, testbed.Pipeline("p", "a"))
	for name, value := range map[string]string{
		"garbage": "{", "other": `{"pipeline":{"name":"p","steps":[{"name":"s","stage":"s"}]}}`, "empty": `{"pipeline":{"name":"empty"}}`,
		"newer": `{"pipeline":{"name":"newer","colour":"red","steps":[{"name":"s","stage":"s"}]}}`,
	} {
		if _, err := registry.Put(t.Context(), discovery.KeyOf("pipelines", name), []byte(value), 0); err != nil {
			t.Fatal(err)
		}
	}
	serves(t, "it", s, "newer>s p>a")
	apply(t, s, testbed.Pipeline("garbage", "b"))
	if err := s.Delete(t.Context(), "other", nil); err != nil {
		t.Error(err)
	}
	serves(t, "it", s, "garbage>b newer>s p>a")
	if _, err := registry.Get(t.Context(), discovery.KeyOf("pipelines", "other")); !errors.Is(err, discovery.ErrNotFound) {
		t.Errorf("the deleted pipeline exists: %v", err)
	}
}

// full is a registry without space for one key.
type full struct {
	discovery.Table
	key discovery.Key
}

func (f full) Put(ctx context.Context, key discovery.Key, value []byte, expect discovery.Revision) (discovery.Revision, error) {
	if key == f.key {
		return 0, discovery.ErrFull
	}
	return f.Table.Put(ctx, key, value, expect)
}

func TestRejectedPipelineHarmsNoOther(t *testing.T) {
	t.Parallel()
	registry := full{table(t, testbed.StartBroker(t)), discovery.KeyOf("pipelines", "large")}
	s, _ := following(t, registry, testbed.Pipeline("after", "a"), testbed.Pipeline("large", "a"), testbed.Pipeline("zero", "a"))
	serves(t, "it", s, "after>a zero>a")
	_, _, err := s.Apply(t.Context(), testbed.Pipeline("large", "a"), nil)
	refused(t, "a change", err, fault.StoreFull)
	p := testbed.Pipeline("p", "a")
	p.Steps[0].Parameters = payloads.Parameters{"k": payloads.String(strings.Repeat("x", 150<<10))}
	if _, err := pipelines.New(pipelines.Settings{Table: registry, Seeds: []pipeline.Pipeline{p}}); err == nil || !strings.Contains(err.Error(), "pipeline p: takes ") {
		t.Errorf("pipeline over the size limit: %v", err)
	}
}

func TestWithoutRegistryPipelinesComeFromFile(t *testing.T) {
	t.Parallel()
	s, _ := following(t, nil, testbed.Pipeline("p", "a"))
	if e, err := s.Get("p"); err != nil || !e.InFile || !e.FromFile || e.Revision != 0 || routes(s) != "p>a" {
		t.Errorf("got %+v, %v; %s", e, err, routes(s))
	}
	_, _, err := s.Apply(t.Context(), testbed.Pipeline("p", "b"), nil)
	refused(t, "a change", err, fault.NotSupported)
	refused(t, "a delete", s.Delete(t.Context(), "p", nil), fault.NotSupported)
	if _, err := pipelines.New(pipelines.Settings{Seeds: []pipeline.Pipeline{testbed.Pipeline("p", "a"), testbed.Pipeline("p", "b")}}); err == nil {
		t.Error("two pipelines of one name are accepted")
	}
}
