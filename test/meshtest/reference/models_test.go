package reference

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// modelMesh starts a mesh with 150 models m-000 to m-149, the model broken, which cannot be
// loaded, and the alias best. It has used m-149 and broken.
func modelMesh(t *testing.T, admin gateway.Admin) *stagemesh.Mesh {
	t.Helper()
	admin.Listen = "127.0.0.1:0"
	s := stagemesh.Settings{Registry: &meshfile.RegistryConfig{}, Gateway: gateway.Settings{
		Config:  gateway.Config{Admin: admin},
		Models:  []model.Model{{ID: "broken", Stage: "score"}},
		Aliases: []models.AliasChange{{Name: "best", Owner: "<b>team</b>", Route: &meshv1.AliasRoute{Model: "m-149"}}},
	}}
	for i := range 150 {
		s.Gateway.Models = append(s.Gateway.Models, model.Model{ID: model.ID(fmt.Sprintf("m-%03d", i)), Stage: "score", Type: "linear"})
	}
	m, err := stagemesh.New(s)
	if err != nil {
		t.Fatal(err)
	}
	loads := inproc.NewModels(inproc.Settings{}, inproc.Models{Load: func(_ context.Context, m model.Model) (any, runner.LoadedModel, error) {
		if m.ID == "broken" {
			return nil, runner.LoadedModel{}, errors.New("<i>no such file</i>")
		}
		return nil, runner.LoadedModel{Size: model.Size{Host: 4 << 20}}, nil
	}}, func(_ context.Context, _ any, b runner.Batch, sink runner.Sink) error {
		for i, item := range b.Items {
			if err := sink.SetOutcome(i, runner.Output(item.Inputs...)); err != nil {
				return err
			}
		}
		return nil
	})
	err = m.AddStage(stagemesh.Stage{Name: "score", Host: "host-1", Runner: loads, Config: stagehost.Config{
		DrainTimeout: time.Second, Models: &stagehost.ModelSettings{Capacity: 16 << 20, DefaultSize: 1 << 20},
	}})
	if err != nil {
		t.Fatal(err)
	}
	meshtest.Start(t, m)
	infer := func(name string) error {
		_, err := m.Infer(t.Context(), &request.Request{Pipeline: name, Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte("x"))}})
		return err
	}
	testbed.Eventually(t, "the alias is registered and its model answers", func() bool { return infer("alias:best") == nil })
	if err := infer("model:broken"); err == nil {
		t.Error("the broken model answers")
	}
	return m
}

// table returns the rows of a table as the page shows them, cells separated by tabs.
func table(t *testing.T, p *page, id string) []string {
	t.Helper()
	return strings.Split(ask(t, p, "read "+id, chromedp.Text(chromedp.CSS("#"+id))), "\n")
}

// awaitRow waits until a table has a row with all these parts, and returns its rows.
func awaitRow(t *testing.T, p *page, id string, parts ...string) (rows []string) {
	t.Helper()
	testbed.Eventually(t, fmt.Sprintf("%s has a row with %q", id, parts), func() bool {
		rows = table(t, p, id)
		for _, row := range rows {
			found := 0
			for _, part := range parts {
				if strings.Contains(row, part) {
					found++
				}
			}
			if found == len(parts) {
				return true
			}
		}
		return false
	})
	return rows
}

func TestPageShowsHostsModelsAndAliases(t *testing.T) {
	t.Parallel()
	m := modelMesh(t, gateway.Admin{})
	p := browse(t)
	p.do(t, "open", chromedp.Navigate(m.AdminURL()+"/page/"), chromedp.WaitVisible(chromedp.CSS("#content")))
	awaitRow(t, p, "hosts", "score", "host-1", "alive", "% of 16 MiB host", "ago")
	awaitRow(t, p, "aliases", "best", "m-149", "<b>team</b>")
	rows := awaitRow(t, p, "models", "m-149", "score", "linear", "loaded", "host-1 loaded")
	p.picture(t, "models")
	if len(rows) != 101 || !strings.Contains(rows[1]+rows[2], "m-149") {
		t.Errorf("of the models used last it shows %d rows, first %q", len(rows), rows[:min(3, len(rows))])
	}
	p.do(t, "filter", chromedp.SendKeys(chromedp.CSS("#prefix"), "m-01"))
	testbed.Eventually(t, "only models with the prefix are shown", func() bool {
		rows = table(t, p, "models")
		return len(rows) == 11
	})
	for _, row := range rows[1:] {
		if !strings.HasPrefix(row, "m-01") {
			t.Errorf("it shows %q", row)
		}
	}
	p.do(t, "filter again", chromedp.Reload(), chromedp.WaitVisible(chromedp.CSS("#content")), chromedp.SendKeys(chromedp.CSS("#prefix"), "bro"))
	rows = awaitRow(t, p, "models", "broken", "loading failed", "host-1 failed: ", "<i>no such file</i>")
	if len(rows) != 2 {
		t.Errorf("it shows %q", rows)
	}
	p.quiet(t, m.AdminURL())
}

func TestModelsPageAsksForARequiredToken(t *testing.T) {
	t.Parallel()
	tokens := testbed.WriteFile(t, "tokens", "open-sesame\n")
	m := modelMesh(t, gateway.Admin{Access: gateway.Access{TokenFile: tokens}})
	p := browse(t)
	p.do(t, "open", chromedp.Navigate(m.AdminURL()+"/page/"), chromedp.WaitVisible(chromedp.CSS("#token")))
	p.do(t, "give another token", chromedp.SendKeys(chromedp.CSS("#token"), "simsim\r"), chromedp.WaitVisible(chromedp.CSS("#problem")))
	p.do(t, "give the token", chromedp.SendKeys(chromedp.CSS("#token"), "open-sesame\r"), chromedp.WaitVisible(chromedp.CSS("#content")))
	awaitRow(t, p, "models", "m-149", "loaded")
	p.picture(t, "models-token")
	p.quiet(t, m.AdminURL(), "401")
}
