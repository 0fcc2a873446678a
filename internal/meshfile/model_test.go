package meshfile_test

import (
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/services/runners"
)

const withModels = `mesh: m
stages: {echo: {runner: {echo: {}}}}
`

func TestModelsAreRead(t *testing.T) {
	t.Parallel()
	text := withModels + `models:
  v2: {stage: echo, type: linear, source: a.json, options: {k: v}, size: 12KiB, device_size: 1GiB, min_replicas: 2}
  v1: {stage: echo}
aliases:
  iris: {model: v1, owner: me, weights: {v2: 10}, shadow: {model: v2, percent: 5}}
`
	f, err := meshfile.Parse("mesh.yaml", []byte(text), ".", runners.All()...)
	if err != nil {
		t.Fatal(err)
	}
	s, err := f.GatewaySettings()
	if err != nil || len(s.Models) != 2 || s.Models[0].ID != "v1" || s.Models[1].Size != (model.Size{Host: 12 << 10, Device: 1 << 30}) || s.Models[1].MinReplicas != 2 || s.Models[1].Options.Map()["k"] != "v" {
		t.Errorf("got %+v, %v", s.Models, err)
	}
	if len(s.Aliases) != 1 || s.Aliases[0].Owner != "me" || s.Aliases[0].Route.GetWeights()["v2"] != 10 || s.Aliases[0].Route.GetShadow().GetPercent() != 5 {
		t.Errorf("got %+v", s.Aliases)
	}
	path := testbed.WriteFile(t, "models.yaml", "models: {v1: {stage: elsewhere}}")
	if models, aliases, err := meshfile.ReadModels(path); err != nil || len(models) != 1 || len(aliases) != 0 {
		t.Errorf("got %v, %v, %v", models, aliases, err)
	}
}

func TestWrongModelsAreRejected(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"models: {v1: {stage: other}}":                                   `mesh.yaml:3:15: models.v1.stage: there is no stage "other"`,
		"models: {v1: {type: x}}":                                        "models.v1: stage: ",
		"models: {v1: {stage: echo, size: -1}}":                          "models.v1.size: ",
		"models: {v1: {stage: echo, min_replicas: 99999999}}":            "models.v1.min_replicas: ",
		"models: {v1: {stage: echo, min_replicas: -1}}":                  "models.v1.min_replicas: is negative",
		"models: {v1: {stage: echo, options: {k: [v]}}}":                 "models.v1.options.k: a list is not text",
		"models: {v1: {stage: echo, url: x}}":                            "models.v1: \"url\" is not a key",
		"aliases: {iris: {}}":                                            "aliases.iris: model: ",
		"aliases: {iris: {model: v1, weights: {v2: 101}}}":               "aliases.iris.weights: ",
		"aliases: {iris: {model: v1, shadow: {model: v2, percent: -1}}}": "aliases.iris.shadow.percent: ",
		"registry: {none: true}\nmodels: {v1: {stage: echo}}":            "models: models and aliases need a registry",
	} {
		_, err := meshfile.Parse("mesh.yaml", []byte(withModels+text+"\n"), ".", runners.All()...)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %s", text, err, want)
		}
	}
}
