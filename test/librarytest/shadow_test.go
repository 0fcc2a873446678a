package librarytest

import (
	"context"
	"errors"
	"fmt"
	"testing"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// sourceModels returns a runner whose models answer with their source. Those of the source
// "broken" cannot be loaded, requests of "stuck" are answered when the runner stops, and requests of "failing" fail.
func sourceModels() runner.Runner {
	return inproc.NewModels(inproc.Settings{Concurrency: 4}, inproc.Models{
		Load: func(_ context.Context, m model.Model) (any, runner.LoadedModel, error) {
			if m.Source == "broken" {
				return nil, runner.LoadedModel{}, errors.New("no such file")
			}
			return m.Source, runner.LoadedModel{Size: m.Size, MaxConcurrency: 1}, nil
		},
	}, func(ctx context.Context, source any, b runner.Batch, sink runner.Sink) error {
		if source == "stuck" {
			<-ctx.Done()
			return ctx.Err()
		}
		if source == "failing" {
			return errors.New("no answer")
		}
		var errs []error
		for i := range b.Items {
			errs = append(errs, sink.SetOutcome(i, runner.Output(payload.OfBlob("text", "text/plain", []byte(source.(string))))))
		}
		return errors.Join(errs...)
	})
}

func TestShadowsAreComparedBesideTheAnswers(t *testing.T) {
	t.Parallel()
	meter := &testbed.Counts{}
	shadow := func(id string, percent uint32) *meshv1.AliasRoute {
		return &meshv1.AliasRoute{Model: "first", Shadow: &meshv1.AliasShadow{Model: id, Percent: percent}}
	}
	s := stagemesh.Settings{
		Registry: &meshfile.RegistryConfig{}, Meter: meter,
		Gateway: gateway.Settings{Aliases: []models.AliasChange{
			{Name: "equal", Route: shadow("twin", 100)},
			{Name: "different", Route: shadow("other", 100)},
			{Name: "failed", Route: shadow("broken", 100)},
			{Name: "dropped", Route: shadow("stuck", 100)},
			{Name: "half", Route: shadow("other", 50)},
			{Name: "own", Route: shadow("first", 100)},
		}},
	}
	for id, source := range map[model.ID]string{"first": "a", "twin": "a", "other": "b", "broken": "broken", "stuck": "stuck"} {
		s.Gateway.Models = append(s.Gateway.Models, model.Model{ID: id, Stage: "score", Source: source, Size: model.Size{Host: 1 << 20}})
	}
	m := newMesh(t, s, stagemesh.Stage{
		Name: "score", Runner: sourceModels(),
		Config: stagehost.Config{Models: &stagehost.ModelSettings{Capacity: 16 << 20, DefaultSize: 1 << 20}},
	})
	meshtest.Start(t, m)
	ask := func(alias string) error {
		response, err := m.Infer(t.Context(), &request.Request{
			Pipeline: "all", Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte("x"))},
			Steps: map[pipeline.StepName]pipeline.StepOptions{"score": {Model: payload.ModelRef{Alias: alias}}},
		})
		if err == nil && string(response.Outputs[0].Blob.Data) != "a" {
			t.Errorf("%s: the caller got %s", alias, response.Outputs[0].Blob.Data)
		}
		return err
	}
	counted := func(result string) int64 {
		return meter.Of("stagemesh.gateway.shadow_requests result=" + result + ",stage=score")
	}
	askOften := func(alias string, times int) {
		testbed.Eventually(t, "the alias is there", func() bool { return ask(alias) == nil })
		for range times - 1 {
			if err := ask(alias); err != nil {
				t.Fatalf("%s: %v", alias, err)
			}
		}
	}
	const asked = 40
	for _, alias := range []string{"equal", "different", "failed", "own"} {
		askOften(alias, asked)
		testbed.Eventually(t, "all are counted", func() bool { return alias == "own" || counted(alias) == asked })
	}
	before := counted("different")
	askOften("half", 5*asked)
	testbed.Eventually(t, "half are counted", func() bool { return counted("different")-before > asked })
	// Shadows that are stuck fill their places, and hold up neither callers nor the end.
	askOften("dropped", 5*asked)
	full := counted("dropped")
	if full < asked || full > 5*asked-100 {
		t.Errorf("%d of %d were dropped before the end", full, 5*asked)
	}
	meshtest.Stop(t, m)
	if share := counted("different") - before; share < 70 || share > 130 {
		t.Errorf("%d of %d had a shadow, want half", share, 5*asked)
	}
	if all := counted("equal") + counted("failed") + counted("dropped"); all != 7*asked {
		t.Errorf("%d were counted, want each of %d", all, 7*asked)
	}
}

func TestShadowKeepsModelsOfOtherSteps(t *testing.T) {
	t.Parallel()
	meter := &testbed.Counts{}
	s := stagemesh.Settings{
		Registry: &meshfile.RegistryConfig{}, Meter: meter,
		Gateway: gateway.Settings{Aliases: []models.AliasChange{
			{Name: "shadowed", Route: &meshv1.AliasRoute{Model: "first", Shadow: &meshv1.AliasShadow{Model: "twin", Percent: 100}}},
			{Name: "split", Route: &meshv1.AliasRoute{Model: "first", Weights: map[string]uint32{"other": 50}}},
		}},
	}
	for id, source := range map[model.ID]string{"first": "a", "twin": "a", "other": "b"} {
		s.Gateway.Models = append(s.Gateway.Models, model.Model{ID: id, Stage: "score", Source: source, Size: model.Size{Host: 1 << 20}})
	}
	m := newMesh(t, s, stagemesh.Stage{
		Name: "score", Runner: sourceModels(),
		Config: stagehost.Config{Models: &stagehost.ModelSettings{Capacity: 16 << 20, DefaultSize: 1 << 20}},
	})
	if err := m.AddPipeline(pipeline.Pipeline{Name: "two", Steps: []pipeline.Step{
		{Name: "one", Stage: "score", Model: payload.ModelRef{Alias: "shadowed"}, Locked: true},
		{Name: "two", Stage: "score", Model: payload.ModelRef{Alias: "split"}, Locked: true},
	}}); err != nil {
		t.Fatal(err)
	}
	meshtest.Start(t, m)
	ask := func() error {
		_, err := m.Infer(t.Context(), &request.Request{Pipeline: "two", Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte("x"))}})
		return err
	}
	testbed.Eventually(t, "the aliases are there", func() bool { return ask() == nil })
	const asked = 20
	for range asked - 1 {
		if err := ask(); err != nil {
			t.Fatal(err)
		}
	}
	const key = "stagemesh.gateway.shadow_requests result=%s,stage=score"
	testbed.Eventually(t, "all are counted", func() bool {
		return meter.Of(fmt.Sprintf(key, "equal"))+meter.Of(fmt.Sprintf(key, "different")) == asked
	})
	if got := meter.Of(fmt.Sprintf(key, "different")); got != 0 {
		t.Errorf("%d of %d answers are different", got, asked)
	}
}

func TestShadowThatCannotRunIsDropped(t *testing.T) {
	t.Parallel()
	meter := &testbed.Counts{}
	s := stagemesh.Settings{
		Registry: &meshfile.RegistryConfig{}, Meter: meter,
		Gateway: gateway.Settings{Aliases: []models.AliasChange{
			{Name: "shadowed", Route: &meshv1.AliasRoute{Model: "first", Shadow: &meshv1.AliasShadow{Model: "twin", Percent: 100}}},
		}},
	}
	for _, id := range []model.ID{"first", "twin"} {
		s.Gateway.Models = append(s.Gateway.Models, model.Model{ID: id, Stage: "score", Source: "a", Size: model.Size{Host: 1 << 20}})
	}
	m := newMesh(t, s, stagemesh.Stage{
		Name: "score", Runner: sourceModels(),
		Config: stagehost.Config{
			Models: &stagehost.ModelSettings{Capacity: 16 << 20, DefaultSize: 1 << 20},
			Queue:  stagehost.QueueSettings{Durabilities: []pipeline.Durability{pipeline.File}},
		},
	})
	meshtest.Start(t, m)
	testbed.Eventually(t, "the alias is there", func() bool {
		_, err := m.Infer(t.Context(), &request.Request{
			Pipeline: "alias:shadowed", Durability: pipeline.File, Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte("x"))},
		})
		return err == nil
	})
	const key = "stagemesh.gateway.shadow_requests result=%s,stage=score"
	testbed.Eventually(t, "the shadow is counted", func() bool {
		return meter.Of(fmt.Sprintf(key, "dropped"))+meter.Of(fmt.Sprintf(key, "failed")) == 1
	})
	if meter.Of(fmt.Sprintf(key, "dropped")) != 1 {
		t.Error("a shadow that no queue takes counts as failed")
	}
}

func TestRequestsOfModelsKeepTheirNames(t *testing.T) {
	t.Parallel()
	meter := &testbed.Counts{}
	s := stagemesh.Settings{Registry: &meshfile.RegistryConfig{}, Meter: meter, Gateway: gateway.Settings{
		Aliases: []models.AliasChange{{Name: "best", Route: &meshv1.AliasRoute{Model: "first"}}},
	}}
	for id, source := range map[model.ID]string{"first": "a", "other": "b"} {
		s.Gateway.Models = append(s.Gateway.Models, model.Model{ID: id, Stage: "score", Source: source, Size: model.Size{Host: 1 << 20}})
	}
	m := meshtest.Start(t, newMesh(t, s, stagemesh.Stage{
		Name: "score", Runner: sourceModels(), Config: stagehost.Config{Models: &stagehost.ModelSettings{Capacity: 16 << 20, DefaultSize: 1 << 20}},
	}))
	ask := func(name, key string) (*request.Response, error) {
		return m.Infer(t.Context(), &request.Request{
			Pipeline: name, ByModel: true, IdempotencyKey: key, Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte("x"))},
		})
	}
	testbed.Eventually(t, "the alias answers", func() bool {
		_, err := ask("best", "")
		return err == nil
	})
	before := meter.Of("stagemesh.gateway.requests pipeline=alias:,reason=OK")
	for _, row := range []struct{ name, pipeline, answer string }{
		{"model:first", "model:first", "a"},
		{"model:other", "model:other", "b"},
		{"other", "model:other", "b"},
		{"alias:best", "alias:best", "a"},
		{"best", "alias:best", "a"},
	} {
		// The key belongs to the model or alias.
		if got, err := ask(row.name, "key"); err != nil || got.Pipeline != row.pipeline || string(got.Outputs[0].Blob.Data) != row.answer {
			t.Errorf("%s: %v, %v", row.name, got, err)
		}
	}
	if _, err := ask("model:none", ""); fault.From(err).Reason != fault.UnknownModel {
		t.Errorf("an unknown model: %v", err)
	}
	if got := meter.Of("stagemesh.gateway.requests pipeline=model:,reason=OK"); got != 3 {
		t.Errorf("%d requests of models are counted", got)
	}
	if got := meter.Of("stagemesh.gateway.requests pipeline=alias:,reason=OK") - before; before != 1 || got != 2 {
		t.Errorf("%d and %d requests of aliases are counted", before, got)
	}
	if got := meter.Of("stagemesh.gateway.requests pipeline=model:,reason=UNKNOWN_MODEL"); got != 1 {
		t.Errorf("%d requests of unknown models are counted", got)
	}
}
