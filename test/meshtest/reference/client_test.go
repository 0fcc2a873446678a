package reference

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"reflect"
	"sync/atomic"
	"testing"

	"github.com/chromedp/chromedp"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// clientPage calls a mesh with @stagemesh/client, and shows the outcomes as JSON. The import map stands
// for a bundler.
const clientPage = `<!doctype html>
<link rel="icon" href="data:,">
<script type="importmap">{"imports": {
	"@stagemesh/client": "/node_modules/@stagemesh/client/dist/index.js",
	"@connectrpc/connect": "/node_modules/@connectrpc/connect/dist/esm/index.js",
	"@connectrpc/connect/protocol": "/node_modules/@connectrpc/connect/dist/esm/protocol/index.js",
	"@connectrpc/connect/protocol-connect": "/node_modules/@connectrpc/connect/dist/esm/protocol-connect/index.js",
	"@connectrpc/connect/protocol-grpc-web": "/node_modules/@connectrpc/connect/dist/esm/protocol-grpc-web/index.js",
	"@connectrpc/connect-web": "/node_modules/@connectrpc/connect-web/dist/esm/index.js",
	"@bufbuild/protobuf": "/node_modules/@bufbuild/protobuf/dist/esm/index.js",
	"@bufbuild/protobuf/codegenv2": "/node_modules/@bufbuild/protobuf/dist/esm/codegenv2/index.js",
	"@bufbuild/protobuf/reflect": "/node_modules/@bufbuild/protobuf/dist/esm/reflect/index.js",
	"@bufbuild/protobuf/wire": "/node_modules/@bufbuild/protobuf/dist/esm/wire/index.js",
	"@bufbuild/protobuf/wkt": "/node_modules/@bufbuild/protobuf/dist/esm/wkt/index.js"
}}</script>
<script type="module">
import { Mesh } from "@stagemesh/client";
const out = {};
const reason = (work) => work.then(() => "none", (fault) => fault.constructor.name + " " + fault.reason + " " + fault.stage);
try {
	const mesh = new Mesh(%[1]q, { token: "sesame" });
	const image = await (await fetch("/image.png")).blob();
	const answer = await mesh.infer("digits", { image });
	out.unary = [answer.get("labels").texts()[0], ...answer.timeline.steps.map((step) => step.step)];
	const stream = mesh.stream("stage:spell", { word: "abc" });
	out.stream = [];
	for await (const chunk of stream) {
		out.stream.push(chunk.value);
	}
	out.stream.push(stream.answer.value);
	out.many = [];
	for await (const { answer, fault } of mesh.inferMany("digits", [{ image }, { image: "no image" }, { image }])) {
		out.many.push(fault?.reason ?? answer.get("labels").texts()[0]);
	}
	const abort = new AbortController();
	const endless = (async () => {
		for await (const chunk of mesh.stream("stage:forever", { word: "x" }, { signal: abort.signal })) {
			abort.abort();
		}
	})();
	out.faults = [
		await reason(mesh.infer("digits", { image: "no image" })),
		await reason(endless),
		await reason(mesh.infer("stage:forever", { word: "x" }, { signal: AbortSignal.timeout(200) })),
		await reason(new Mesh(%[1]q, { token: "simsim" }).infer("digits", { image })),
		await reason(new Mesh(%[2]q, { token: "sesame", retries: 0 }).infer("digits", { image })),
	];
} catch (error) {
	out.error = String(error.stack);
}
const shown = document.createElement("pre");
shown.id = "out";
shown.textContent = JSON.stringify(out);
document.body.append(shown);
</script>`

// forever returns a runner that sends a chunk and ends once its item is cancelled, which it counts in left.
func forever(left *atomic.Int64) *inproc.Runner {
	spec := of(text("word"), text("word"), "x")
	spec.Stream = true
	return inproc.New(inproc.Settings{Spec: spec}, func(ctx context.Context, b runner.Batch, sink runner.Sink) error {
		for i, item := range b.Items {
			_ = sink.Chunk(i, []payload.Part{payload.OfBlob("word", "text/plain", []byte("x"))})
			select {
			case <-item.Cancelled:
				left.Add(1)
			case <-ctx.Done():
			}
			if err := sink.SetOutcome(i, runner.Failed(fault.New(fault.Cancelled, "nobody waits"))); err != nil {
				return err
			}
		}
		return nil
	})
}

// The page's origin is not the mesh's.
func TestTypeScriptClientCallsFromAPageOfAnotherOrigin(t *testing.T) {
	t.Parallel()
	seven, err := filepath.Abs(filepath.Join(digits, "images", "01-7.png"))
	if err != nil {
		t.Fatal(err)
	}
	modules := http.FileServer(http.Dir(meshtest.TypeScriptClient(t)))
	var content string
	pages := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/":
			w.Header().Set("Content-Type", "text/html; charset=utf-8")
			fmt.Fprint(w, content)
		case "/image.png":
			http.ServeFile(w, r, seven)
		default:
			modules.ServeHTTP(w, r)
		}
	}))
	t.Cleanup(pages.Close)
	var left atomic.Int64
	start := func(origin string) *stagemesh.Mesh {
		file := meshtest.Load(t, filepath.Join(digits, "mesh.yaml"))
		file.Gateway.AllowOrigins, file.Gateway.TokenFile = []string{origin}, testbed.SecretFile(t, "sesame")
		m := meshtest.FromFile(t, file, stagemesh.FileSettings{})
		for name, r := range map[string]runner.Runner{"spell": spell(), "forever": forever(&left)} {
			if err := m.AddStage(stagemesh.Stage{Name: pipeline.StageName(name), Runner: r}); err != nil {
				t.Fatal(err)
			}
		}
		meshtest.Start(t, m)
		return m
	}
	m, refusing := start(pages.URL), start("https://app.example.com")
	content = fmt.Sprintf(clientPage, m.URL(), refusing.URL())

	p := browse(t)
	p.do(t, "open", chromedp.Navigate(pages.URL+"/"), chromedp.WaitVisible(chromedp.CSS("#out")))
	shown := ask(t, p, "read", chromedp.Text(chromedp.CSS("#out")))
	got := map[string]any{}
	if err := json.Unmarshal([]byte(shown), &got); err != nil {
		t.Fatalf("%v: %s", err, shown)
	}
	want := map[string]any{
		"unary":  []any{"7", "decode", "classify", "label"},
		"stream": []any{"a", "b", "c", "abc"},
		"many":   []any{"7", "UNSUPPORTED_MEDIA_TYPE", "7"},
		"faults": []any{
			"InvalidArgument UNSUPPORTED_MEDIA_TYPE decode", "Cancelled CANCELLED ", "Cancelled CANCELLED ",
			"Unauthenticated UNAUTHENTICATED ", "Disconnected DISCONNECTED ",
		},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("the page shows %s", shown)
	}
	testbed.Eventually(t, "the stage knows that the page has left the stream", func() bool { return left.Load() > 0 })
}
