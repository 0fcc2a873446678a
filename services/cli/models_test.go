package cli_test

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestModelsAreRegisteredFromFiles(t *testing.T) {
	t.Parallel()
	c := &changing{t: t, folder: t.TempDir()}
	c.process = up(t, "--config", c.file("mesh.yaml", twoStages+"models: {seed: {stage: echo}}\naliases: {best: {model: seed}}\n"))
	c.admin = c.process.admin(t)
	testbed.Eventually(t, "the seeds are there", func() bool {
		out, err := c.try("aliases", "list")
		return err == nil && strings.Contains(out, "best   seed   -")
	})
	var lines strings.Builder
	for i := range 40 {
		fmt.Fprintf(&lines, `{"id": "m%02d", "stage": "echo", "type": "linear", "source": "m%02d.json", "size": {"host": 4096}}`+"\n\n", i, i)
	}
	many := c.file("many.jsonl", lines.String())
	c.shows(c.run("models", "register", "--file", many), `^40 models registered, 0 unchanged\n$`)
	c.shows(c.run("models", "register", "--file", many), `^0 models registered, 40 unchanged\n$`)
	c.shows(c.run("models", "list", "--stage", "echo"), `(?s)MODEL +STAGE +TYPE +STATE +REPLICAS +SIZE +LAST USE\nm00 +echo +linear +not loaded +0 +4KiB +not yet\n.*seed `)
	c.shows(c.run("models", "list", "--json"), `"id": ?"m39"`)
	if out, err := run(t, "__complete", "models", "show", "-a", c.admin, "m3"); err != nil || len(strings.Fields(out)) != 11 {
		t.Errorf("completions of m3: %q, %v", out, err)
	}
	c.shows(c.run("models", "register", "one", "--stage", "echo", "--size", "1MiB", "--option", "k=v"), `^1 model registered, 0 unchanged\n$`)
	c.shows(c.run("models", "show", "one"), `(?s)^model one: not loaded\n.*options +k=v\n  size +1MiB\n.*last use +not yet\n`)

	c.shows(c.run("models", "settings", "echo"), `^{}\n$`)
	labels := `^{"types": ?{"gpu": ?{"required": ?\["gpu"\], ?"preferred": ?\["big=yes"\]}}}\n$`
	c.shows(c.run("models", "settings", "echo", "--file", c.file("settings.yaml", "types: {gpu: {required: [gpu], preferred: [big=yes]}}\n")), labels)
	c.fails("workers", "models", "settings", "echo", "--file", c.file("wrong.yaml", "workers: 2\ntypes: {}\n"))
	c.fails("wrong.yaml: types.gpu", "models", "settings", "echo", "--file", c.file("wrong.yaml", "types: {gpu: {required: ['']}}\n"))
	for _, nothing := range []string{"", "# nothing\n", "null\n"} {
		c.fails("wrong.yaml: is empty; write {}", "models", "settings", "echo", "--file", c.file("wrong.yaml", nothing))
	}
	c.shows(c.run("models", "settings", "echo"), labels)
	c.fails("wrong.yaml: scale.busy", "models", "settings", "echo", "--file", c.file("wrong.yaml", "scale: {busy: 2}\n"))
	c.fails("wrong.yaml: scale.queue_time", "models", "settings", "echo", "--file", c.file("wrong.yaml", "scale: {queue_time: -1s}\n"))
	c.fails("scale.requests_per_minute", "models", "settings", "echo", "--file", c.file("wrong.yaml", "scale: {requests_per_minute: -1}\n"))
	c.shows(c.run("models", "settings", "echo", "--file", c.file("scale.yaml", "scale: {requests_per_minute: 500, busy: 0.5, queue_time: 200ms}\n")),
		`^{"scale": ?{"requestsPerMinute": ?500, ?"busy": ?0.5, ?"queueTime": ?"0.200s"}}\n$`)
	c.fails("wrong.yaml: load_slots", "models", "settings", "echo", "--file", c.file("wrong.yaml", "load_slots: -1\n"))
	c.fails("settings.load_slots", "models", "settings", "echo", "--file", c.file("wrong.yaml", "load_slots: 999\n"))
	c.shows(c.run("models", "settings", "echo", "--file", c.file("room.yaml", "{capacity: 1GiB, load_slots: 1}\n")), `^{"capacity": ?{"host": ?"1073741824"}, ?"loadSlots": ?1}\n$`)
	c.shows(c.run("models", "settings", "echo", "--file", c.file("none.yaml", "{}\n")), `^{}\n$`)

	c.fails("MODEL_EXISTS", "models", "register", "one", "--stage", "label")
	c.fails("model.stage", "models", "register", "two")
	c.fails("--size", "models", "register", "two", "--size", "much")
	c.fails("--file", "models", "register")
	c.fails("bad.jsonl:2: ", "models", "register", "--file", c.file("bad.jsonl", "{\"id\": \"x\"}\n{\"no\": 1}\n"))
	mixed := c.file("mixed.yaml", "models: {one: {stage: label}, three: {stage: echo, size: 1KiB}}\naliases: {best: {model: three}, other: {model: unknown}}\n")
	c.shows(c.fails("not everything was registered", "models", "register", "--file", mixed), `(?m)^1 model registered, 0 unchanged; 1 of 2 aliases set$`)
	c.shows(c.run("aliases", "show", "best"), `best +three +-`)
	report := c.fails("not everything was registered", "models", "register", "--json", "--file", mixed)
	for _, line := range []string{`{"model":"three","outcome":"unchanged"}`, `{"model":"one","outcome":"rejected","error":"MODEL_EXISTS: `, `{"alias":"best","outcome":"set"}`, `{"alias":"other","outcome":"rejected","error":"UNKNOWN_MODEL: `} {
		c.shows(report, `(?m)^`+regexp.QuoteMeta(line))
	}

	c.shows(c.run("aliases", "set", "iris", "m01", "--weight", "m02=10", "--shadow", "m03=5", "--owner", "me"), `^alias iris points at m01, m02=10%, shadow m03=5%\n$`)
	c.fails("ALIAS_CONFLICT", "aliases", "set", "iris", "m02", "--expect", "m05", "--owner", "me")
	c.fails("UNKNOWN_MODEL", "aliases", "set", "iris", "m99", "--owner", "me")
	c.fails("MODEL_IN_USE", "models", "unregister", "m02")
	c.fails("UNKNOWN_MODEL", "aliases", "delete", "iris")
	c.shows(c.run("aliases", "delete", "iris", "--owner", "me"), `^alias iris deleted\n$`)
	c.shows(c.run("models", "unregister", "m02", "m03"), `^model m02 unregistered\nmodel m03 unregistered\n$`)
	c.fails("UNKNOWN_MODEL", "models", "show", "m02")
	c.shows(c.run("aliases", "list", "--json"), `"name": ?"best"`)
	if err := c.end(t); err != nil {
		t.Error(err)
	}
}
