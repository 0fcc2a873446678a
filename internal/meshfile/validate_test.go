package meshfile_test

import (
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/services/runners"
)

func parse(text string) (*meshfile.File, error) {
	return meshfile.Parse("m.yaml", []byte(text), "testdata", runners.All()...)
}

// Each file is the smallest good one with one thing wrong. It begins
//
//	mesh: m
//	stages:
//	  a: {runner: {echo: {}}}
const good = "mesh: m\nstages:\n  a: {runner: {echo: {}}}\n"

// wired begins a pipeline of the stages a and b, which makes scores of its input image.
const wired = "mesh: m\nstages:\n  a: {runner: {echo: {}}, inputs: [{name: x}], outputs: [{name: y}]}\n" +
	"  b: {runner: {echo: {}}, inputs: [{name: image}], outputs: [{name: scores}]}\npipelines:\n  p:\n"

// Names may be used again, and machines have ports of their own.
func TestOrderAndPortsThatAreFine(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{
		"made before":          wired + "    keep: [scores]\n    steps: [{name: r, stage: b}, {name: s, stage: a, inputs: {x: scores}}, {name: t, stage: b, inputs: {image: y}}]",
		"sent for the first":   wired + "    keep: [image]\n    steps: [{name: r, stage: b}, {name: s, stage: a, inputs: {x: image}}, {name: t, stage: c, inputs: {image: y}}]\n",
		"free ports":           good + "gateway: {listen: \"127.0.0.1:0\", admin: {listen: \"127.0.0.1:0\"}}",
		"addresses":            good + "gateway: {listen: \"127.0.0.1:8088\", admin: {listen: \"127.0.0.2:8088\"}}",
		"stages of processes":  "mesh: m\nnats: {url: \"nats://b\"}\nstages:\n  a: {runner: {echo: {}}, listen: \"127.0.0.1:9101\"}\n  b: {runner: {echo: {}}, listen: \"127.0.0.1:9101\"}",
		"models by any name":   good + "openai: {chat: {\"org/m:8b v1\": \"stage:a\", m: \"alias:x\"}, embeddings: {m: \"model:y\"}}\n",
		"as long as it may be": good + "gateway: {max_timeout: 3s}\npipelines:\n  p: {timeout: 3s, steps: [{name: s, stage: a}]}",
	} {
		text = strings.Replace(text, "  b: {runner: {echo: {}}, inputs: [{name: image}]", "  c: {runner: {echo: {}}, inputs: [{name: image}], outputs: [{name: image}]}\n  b: {runner: {echo: {}}, inputs: [{name: image}]", 1)
		if _, err := parse(text); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestSmallestFileIsTaken(t *testing.T) {
	t.Parallel()
	if _, err := parse(good); err != nil {
		t.Error(err)
	}
}

func TestErrorsHaveTheirPlace(t *testing.T) {
	t.Parallel()
	stage := func(settings string) string { return "mesh: m\nstages:\n  a:\n    runner: {echo: {}}\n    " + settings }
	running := func(runner string) string { return "mesh: m\nstages:\n  a:\n    runner: " + runner }
	pipeline := func(settings string) string { return good + "pipelines:\n  p:\n    " + settings }
	for name, test := range map[string]struct{ text, want string }{
		"nothing": {"", "m.yaml: mesh: is missing; it is the mesh's name"},
		"no mesh": {"stages:\n  a: {runner: {echo: {}}}\n", "m.yaml: mesh: is missing"},
		"a mesh's name that is none": {
			strings.Replace(good, "mesh: m", "mesh: My", 1),
			`m.yaml:1:1: mesh: mesh name "My": use 1 to 63 of a-z, 0-9 and -, neither first nor last a -`,
		},
		"no stages":            {"mesh: m\nstages: {}\n", "m.yaml:2:1: stages: at least one is required"},
		"an unknown key":       {good + "pipeline: {}\n", `m.yaml:4:1: "pipeline" is not a key here; there are aliases, dead_letters, gateway, idempotency, jobs, local_hops, mesh, models, nats, openai, ops, pipelines, registry, results, stages`},
		"an unknown stage key": {stage("batching: {}"), `m.yaml:5:5: stages.a: "batching" is not a key here; there are any_host, batch, cert_file, client_ca_file, crash_limit, drain_timeout, expose_errors, hosts,`},
		"a wrong type":         {stage("batch: {max_size: 0x}"), `m.yaml:5:23: stages.a.batch.max_size: "0x" is not a whole number`},

		"a share above 1":            {good + "tracing: {sample: 2}", "m.yaml:4:11: tracing.sample: 2 is not a share from 0 to 1"},
		"an endpoint without scheme": {good + "tracing: {endpoint: jaeger:4317}", `m.yaml:4:11: tracing.endpoint: "jaeger:4317" is not a URL of http or https`},
		"a password in an endpoint":  {good + "tracing: {endpoint: \"http://u:p@jaeger:4317\"}", "m.yaml:4:11: tracing.endpoint: a password does not belong into the URL"},
		"an unknown protocol":        {good + "tracing: {protocol: zipkin}", `m.yaml:4:11: tracing.protocol: "zipkin" is not grpc or http`},
		"a negative bound":           {good + "tracing: {keep: {per_second: -1}}", "m.yaml:4:18: tracing.keep.per_second: "},

		"a part's key":              {stage("inputs: [{name: x, type: FP32}]"), `m.yaml:5:24: stages.a.inputs[0]: "type" is not a key here; there are content_types, datatype, description, name, optional, schema, schema_file, shape`},
		"a part without a name":     {stage("inputs: [{datatype: FP32, shape: [1]}]"), `m.yaml:5:14: stages.a.inputs[0].name: expected 1 to 256 bytes of text, got ""`},
		"a tensor without a shape":  {stage("inputs: [{name: x, datatype: FP32}]"), "m.yaml:5:24: stages.a.inputs[0].datatype: a tensor has a shape too, such as [-1, 64], or [] for a scalar"},
		"a shape without datatype":  {stage("outputs: [{name: x, shape: [1]}]"), "m.yaml:5:25: stages.a.outputs[0].shape: without a datatype there is no tensor"},
		"a schema that is none":     {stage("inputs: [{name: x, schema: {type: money}}]"), `m.yaml:5:24: stages.a.inputs[0].schema: of "x": it is not a JSON Schema: schema.type: `},
		"a schema twice":            {stage("inputs: [{name: x, schema: {}, schema_file: x.json}]"), "m.yaml:5:36: stages.a.inputs[0].schema_file: there is a schema already"},
		"a schema's file":           {stage("inputs: [{name: x, schema_file: none.json}]"), "m.yaml:5:24: stages.a.inputs[0].schema_file: open testdata/none.json: no such file"},
		"a runner's contradiction":  {running("{top_k: {k: 1, labels: [a, b]}}\n    inputs: [{name: scores, datatype: FP32, shape: [-1, 3]}]"), "m.yaml:5:45: stages.a.inputs[0].shape: [-1, 3] is not one of the runner's [-1, 2]"},
		"what no runner's input is": {running("{top_k: {k: 1, labels: [a, b]}}\n    inputs: [{name: score, description: x}]"), `m.yaml:5:15: stages.a.inputs[0].name: the runner has no "score"; it has scores`},

		"a stage's name that is none": {
			strings.Replace(good, "  a:", "  A.b:", 1),
			`m.yaml:3:3: stages.A.b: stage name "A.b": use 1 to 63`,
		},
		"no runner": {"mesh: m\nstages:\n  a: {hosts: 2}", "m.yaml:3:3: stages.a.runner: is required; use image_decode, model_server, onnx, onnx_models, top_k, worker, echo, echo_models, sleep, burn or stream, with its settings or {}"},
		"a gate without a value": {
			good + "jobs:\n  pools:\n    main:\n      target: {pipelines: [p]}\n      gate:\n", `m.yaml:8:7: jobs.pools.main.gate: has no value; give it one or remove the key`,
		},
		"an unknown queue": {pipeline("steps: [{name: a, stage: a}]\n    queue: nightly"), `m.yaml:7:5: pipelines.p.queue: there is no "nightly" in jobs.queues`},
		"a queue of another pipeline": {
			pipeline("steps: [{name: a, stage: a}]\n    queue: nightly\n  o: {steps: [{name: a, stage: a}]}\njobs: {pools: {main: {target: {pipelines: [o]}}}, queues: {nightly: {}}}"),
			"m.yaml:7:5: pipelines.p.queue: the target of its pool main has no pipeline p",
		},
		"a label that is none":    {running("{echo_models: {}}\n    models: {types: {gpu: {required: ['']}}}"), "m.yaml:5:22: stages.a.models.types.gpu"},
		"a busy share above 1":    {running("{echo_models: {}}\n    models: {scale: {busy: 2}}"), "m.yaml:5:22: stages.a.models.scale.busy: 2 is not between 0 and 1"},
		"an empty runner":         {running("{}"), "m.yaml:4:5: stages.a.runner: is required; use"},
		"two runners":             {running("{sleep: {}, echo: {}}"), "m.yaml:4:5: stages.a.runner: echo and sleep; a stage has one"},
		"an unknown runner":       {running("{ecco: {}}"), "m.yaml:4:14: stages.a.runner.ecco: this program has no such runner; it has image_decode, model_server, onnx, onnx_models, top_k, worker, echo, echo_models, sleep, burn or stream"},
		"an unknown runner's key": {running("{echo: {loud: true}}"), `m.yaml:4:21: stages.a.runner.echo: "loud" is not a key here; there are concurrency`},
		"a runner of text":        {running("{echo: x}"), `m.yaml:4:20: stages.a.runner.echo: "x" is not a set of keys`},
		"echo":                    {running("{echo: {concurrency: -1}}"), "m.yaml:4:21: stages.a.runner.echo.concurrency: -1 is negative"},
		"sleep":                   {running("{sleep: {base: -1s}}"), "m.yaml:4:22: stages.a.runner.sleep.base: -1s is negative"},
		"burn":                    {running("{burn: {}}"), "m.yaml:4:14: stages.a.runner.burn: duration: is missing"},
		"image_decode":            {running("{image_decode: {width: 8, height: 0}}"), "m.yaml:4:39: stages.a.runner.image_decode.height: 0 is not between 1 and 65535"},
		"image_decode's list":     {running("{image_decode: {width: 8, height: 8, mean: [1, x]}}"), `m.yaml:4:60: stages.a.runner.image_decode.mean[1]: "x" is not a number`},
		"onnx":                    {running("{onnx: {max_rows: 4}}"), "m.yaml:4:14: stages.a.runner.onnx: model: is the path of an ONNX file and is missing"},
		"top_k":                   {running("{top_k: {k: 3}}"), "m.yaml:4:14: stages.a.runner.top_k: labels: are missing"},
		"top_k's file":            {running("{top_k: {labels_file: nowhere.txt}}"), "m.yaml:4:22: stages.a.runner.top_k.labels_file: open testdata/nowhere.txt: no such file"},

		"batch mode":           {stage("batch: {mode: lazy}"), `m.yaml:5:13: stages.a.batch.mode: expected adaptive, eager, window or stream, got "lazy"`},
		"first chunk":          {stage("stream: {first_chunk_timeout: -1s}"), "m.yaml:5:14: stages.a.stream.first_chunk_timeout: -1s is negative"},
		"idle stream":          {stage("stream: {idle_timeout: -1s}"), "m.yaml:5:14: stages.a.stream.idle_timeout: -1s is negative"},
		"batch size":           {stage("batch: {max_size: -1}"), "m.yaml:5:13: stages.a.batch.max_size: -1 rows is less than 1"},
		"batch wait":           {stage("batch: {max_wait: -1s}"), "m.yaml:5:13: stages.a.batch.max_wait: -1s is negative"},
		"window without wait":  {stage("batch: {mode: window, max_wait: 0s}"), "m.yaml:5:27: stages.a.batch.max_wait: window mode needs a time to wait"},
		"hosts":                {stage("hosts: 65"), "m.yaml:5:5: stages.a.hosts: 65 is not between 1 and 64"},
		"a negative host":      {stage("hosts: -1"), "m.yaml:5:5: stages.a.hosts: -1 is not between 1 and 64"},
		"in flight":            {stage("max_in_flight: -1"), "m.yaml:5:5: stages.a.max_in_flight: -1 is negative"},
		"few in flight":        {stage("max_in_flight: 1"), "m.yaml:5:5: stages.a.max_in_flight: 1, at least "},
		"a stage's address":    {stage("listen: 8081"), `m.yaml:5:5: stages.a.listen: "8081" is not an address such as 127.0.0.1:8080, or :8080 for all of this machine's`},
		"a stage's pair":       {stage("cert_file: c"), "m.yaml:5:5: stages.a.cert_file: has no key; name its file in key_file"},
		"a pair for nobody":    {stage("cert_file: c\n    key_file: k"), "m.yaml:5:5: stages.a.cert_file: requires listen"},
		"a stage's name":       {stage("server_name: n"), "m.yaml:5:5: stages.a.server_name: is a name in a certificate, and there is no cert_file"},
		"a stage's drain":      {stage("drain_timeout: -1s"), "m.yaml:5:5: stages.a.drain_timeout: -1s is negative"},
		"queue items":          {stage("queue: {max_items: -1}"), "m.yaml:5:13: stages.a.queue.max_items: -1 is negative"},
		"queue bytes":          {stage("queue: {max_bytes: 1MX}"), `m.yaml:5:24: stages.a.queue.max_bytes: "1MX" is not a size`},
		"queue acknowledgment": {stage("queue: {ack_wait: 10ms}"), "m.yaml:5:13: stages.a.queue.ack_wait: 10ms, at least 1s is needed"},
		"queue replicas":       {stage("queue: {replicas: -1}"), "m.yaml:5:13: stages.a.queue.replicas: -1 is negative"},
		"durabilities":         {stage("queue: {durabilities: [disk]}"), `m.yaml:5:13: stages.a.queue.durabilities: use memory, file or both, each once, not ["disk"]`},
		"a durability twice":   {stage("queue: {durabilities: [file, file]}"), `m.yaml:5:13: stages.a.queue.durabilities: use memory, file or both, each once`},
		"durabilities' type":   {stage("queue: {durabilities: file}"), `m.yaml:5:27: stages.a.queue.durabilities: "file" is not a list`},
		"crash_limit":          {stage("crash_limit: -1"), "m.yaml:5:5: stages.a.crash_limit: -1, at least 1 is needed"},
		"queue version":        {stage("queue: {version: -1}"), "m.yaml:5:13: stages.a.queue.version: -1 is negative"},

		"gateway address":           {good + "gateway: {listen: localhost}", `m.yaml:4:11: gateway.listen: "localhost" is not an address`},
		"gRPC address":              {good + "gateway: {grpc_listen: localhost}", `m.yaml:4:11: gateway.grpc_listen: "localhost" is not an address`},
		"scaler target":             {good + "gateway: {scaler: {target: wait=200}}", `m.yaml:4:20: gateway.scaler.target: "wait=200": 200 has no unit; add ms or s, as in wait=200ms`},
		"scaler for all":            {good + "gateway: {scaler: {listen: \":9081\"}}", "m.yaml:4:20: gateway.scaler.listen: other machines can reach :9081; name authorities in client_ca_file, "},
		"scaler without TLS":        {good + "gateway: {scaler: {client_ca_file: ca.pem}}", "m.yaml:4:20: gateway.scaler.client_ca_file: callers show certificates over TLS only"},
		"hosts wanted":              {stage("min_hosts: 2\n    max_hosts: 1"), "m.yaml:6:5: stages.a.max_hosts: 1 is less than the 2 of min_hosts"},
		"no least hosts":            {stage("min_hosts: -1"), "m.yaml:5:5: stages.a.min_hosts: -1 is not between 0 and 10000"},
		"gateway bound":             {good + "gateway: {max_in_flight: -1}", "m.yaml:4:11: gateway.max_in_flight: -1 is negative"},
		"gateway bytes":             {good + "gateway: {max_in_flight_bytes: 1MiB}", "m.yaml:4:11: gateway.max_in_flight_bytes: 1MiB is less than the 20MiB that one request may need"},
		"a pipeline's bound":        {pipeline("max_in_flight: -1\n    steps: [{name: s, stage: a}]"), "m.yaml:6:5: pipelines.p.max_in_flight: -1 is not between 0 and 2147483647"},
		"gateway timeout":           {good + "gateway: {timeout: -1s}", "m.yaml:4:11: gateway.timeout: -1s is negative"},
		"longest timeout":           {good + "gateway: {max_timeout: -1s}", "m.yaml:4:11: gateway.max_timeout: -1s is negative"},
		"timeouts":                  {good + "gateway: {timeout: 2s, max_timeout: 1s}", "m.yaml:4:11: gateway.timeout: 2s is more than the max_timeout of 1s"},
		"long timeout":              {good + "gateway: {timeout: 11m}", "m.yaml:4:11: gateway.timeout: 11m0s is more than the max_timeout of 10m0s"},
		"gateway drain":             {good + "gateway: {drain_timeout: -1s}", "m.yaml:4:11: gateway.drain_timeout: -1s is negative"},
		"gateway drain delay":       {good + "gateway: {drain_delay: -1s}", "m.yaml:4:11: gateway.drain_delay: -1s is negative"},
		"gateway payload":           {good + "gateway: {max_payload: -1}", `m.yaml:4:24: gateway.max_payload: "-1" is not a size`},
		"an origin's path":          {good + "gateway: {allow_origins: [\"https://a\", \"https://b/\"]}", `m.yaml:4:40: gateway.allow_origins[1]: "https://b/" is not an origin such as https://app.example.com`},
		"a passed method":           {good + "gateway: {passthrough: {mmesh.ModelRuntime/loadModel: \"\"}}", `m.yaml:4:11: gateway.passthrough: mmesh.ModelRuntime/loadModel: methods of mmesh are not passed on`},
		"a passed field":            {good + "gateway: {passthrough: {a.B/C: \"x\"}}", `m.yaml:4:11: gateway.passthrough: a.B/C: "x" is not a path`},
		"an origin's name":          {good + "gateway: {allow_origins: [app.example.com]}", `m.yaml:4:27: gateway.allow_origins[0]: "app.example.com" is not an origin`},
		"parts of origins":          {good + "gateway: {allow_origins: [\"https://*.example.com\"]}", `m.yaml:4:27: gateway.allow_origins[0]: "https://*.example.com" is not an origin`},
		"all origins":               {good + "gateway: {allow_origins: [\"https://a\", \"*\"]}", `m.yaml:4:40: gateway.allow_origins[1]: "*" allows every origin, so it stands alone`},
		"a port":                    {good + "gateway: {listen: \":99999\"}", `m.yaml:4:11: gateway.listen: ":99999" is not an address`},
		"admin address":             {good + "gateway: {admin: {listen: localhost}}", `m.yaml:4:19: gateway.admin.listen: "localhost" is not an address`},
		"operations":                {good + "ops: {listen: \"9090\"}", `m.yaml:4:7: ops.listen: "9090" is not an address`},
		"broker":                    {good + "nats: {url: \"nats://\"}", "m.yaml:4:8: nats.url: expected the URL of a broker, such as nats://127.0.0.1:4222"},
		"broker's address":          {good + "nats: {listen: x}", `m.yaml:4:8: nats.listen: "x" is not an address`},
		"payload over the broker's": {good + "gateway: {max_payload: 16MiB}", "m.yaml:4:11: gateway.max_payload: inputs of 16MiB do not fit into a message of nats.max_payload, which is 8MiB; raise that, or lower this"},
		"a small broker's payload":  {good + "nats: {max_payload: 1MiB}", "m.yaml:4:8: nats.max_payload: inputs of 4MiB, the default of gateway.max_payload, do not fit into a message of 1MiB"},
		"broker's messages":         {good + "nats: {max_payload: 1KiB}", "m.yaml:4:8: nats.max_payload: 1KiB is not between 64KiB and 64MiB"},
		"messages over a record":    {good + "nats: {max_payload: 48MiB}", "m.yaml:4:8: nats.max_payload: 48MiB is more than the 32MiB that the broker stores on file in one message, such as a durable request, a job or a result; lower it"},
		"large messages":            {good + "nats: {max_payload: 1GiB}", "m.yaml:4:8: nats.max_payload: 1GiB is not between 64KiB and 64MiB"},
		"an open broker":            {good + "nats: {listen: \":4222\"}", "m.yaml:4:8: nats.listen: other machines can reach :4222; name a file with a token in token_file"},
		"an open ops port":          {good + "ops: {listen: \":9090\"}", "m.yaml:4:7: ops.listen: other machines can reach :9090; listen on 127.0.0.1"},
		"two brokers":               {good + "nats: {url: \"nats://b\", listen: \":4222\"}", "m.yaml:4:25: nats.listen: is for the broker in the process; leave it out with url"},
		"a store elsewhere":         {good + "nats: {url: \"nats://b\", store_dir: x}", "m.yaml:4:25: nats.store_dir: is for the broker in the process; leave it out with url"},
		"memory elsewhere":          {good + "nats: {url: \"nats://b\", max_memory: 1GiB}", "m.yaml:4:25: nats.max_memory: is for the broker in the process; leave it out with url"},
		"little memory":             {good + "  b: {runner: {echo: {}}, queue: {max_bytes: 64MiB}}\nnats: {max_memory: 190MiB}", "m.yaml:5:8: nats.max_memory: 190MiB is less than the 200MiB that the stages' queues, and a registry in the broker, reserve; raise it, or lower queue.max_bytes"},
		"a large store":             {good + "nats: {url: \"nats://b\", max_store: 1GiB}", "m.yaml:4:25: nats.max_store: is for the broker in the process; leave it out with url"},
		"little store":              {good + "nats: {max_store: 600MiB}", "m.yaml:4:8: nats.max_store: 600MiB is less than the 976MiB that the stages' queues on file, results, dead letters, idempotency keys, a registry in the broker and jobs reserve; raise it, or lower their max_bytes"},
		"result retention":          {good + "results: {retention: 10ms}", "m.yaml:4:11: results.retention: 10ms, at least 1s is needed"},
		"result bytes":              {good + "results: {max_bytes: -1}", `m.yaml:4:22: results.max_bytes: "-1" is not a size`},
		"few result bytes":          {good + "results: {max_bytes: 1KiB}", "m.yaml:4:11: results.max_bytes: 1KiB, at least 64KiB is needed"},
		"result version":            {good + "results: {version: -1}", "m.yaml:4:11: results.version: -1 is negative"},
		"memory and registry":       {good + "registry: {nats: {}}\nnats: {max_memory: 135MiB}", "m.yaml:5:8: nats.max_memory: 135MiB is less than the 136MiB that"},
		"store and registry":        {good + "registry: {nats: {}}\nnats: {max_store: 975MiB}", "m.yaml:5:8: nats.max_store: 975MiB is less than the 976MiB that"},
		"memory and models":         {good + "  b: {runner: {echo_models: {}}, hosts: 2, models: {capacity: 1GiB}}\nnats: {max_memory: 300MiB}", "m.yaml:5:8: nats.max_memory: 300MiB is less than the 328MiB that"},
		"models and no registry":    {good + "  b: {runner: {echo_models: {}}, models: {capacity: 1GiB}}\nregistry: {none: true}", "m.yaml:4:34: stages.b.models: need a registry"},
		"metadata for a split":      {good + "pipelines: {p: {steps: [{name: s, split: {by_metadata: user, branches: {x: {weight: 50, steps: [{name: x, stage: a}]}, y: {weight: 50, steps: [{name: y, stage: a}]}}}}]}}", "m.yaml:4:43: pipelines.p.steps[0].split.by_metadata: no request has the key user"},
		"metadata for a condition":  {good + "pipelines: {p: {steps: [{name: s, switch: [{when: {metadata: user, exists: true}, steps: [{name: x, stage: a}]}, {else: []}]}]}}", "m.yaml:4:52: pipelines.p.steps[0].switch[0].when.metadata: no request has the key user"},
		"copies of registry":        {good + "registry: {nats: {replicas: 3}}", "m.yaml:4:19: registry.nats.replicas: 3 copies need a cluster of brokers"},
		"copies of results":         {good + "results: {replicas: 3}", "m.yaml:4:11: results.replicas: 3 copies need a cluster of brokers, at nats.url; the broker in the process has one"},
		"letter retention":          {good + "dead_letters: {retention: -1s}", "m.yaml:4:16: dead_letters.retention: -1s, at least 1s is needed"},
		"letter replicas":           {good + "dead_letters: {replicas: -1}", "m.yaml:4:16: dead_letters.replicas: -1 is negative"},
		"copies of letters":         {good + "dead_letters: {replicas: 2}", "m.yaml:4:16: dead_letters.replicas: 2 copies need a cluster of brokers"},
		"key retention":             {good + "idempotency: {retention: 10ms}", "m.yaml:4:15: idempotency.retention: 10ms, at least 1s is needed"},
		"a long window":             {good + "idempotency: {retention: 2h}", "m.yaml:4:15: idempotency.retention: 2h0m0s is longer than the 1h0m0s of results.retention: a key would outlive its answer"},
		"a longer window":           {good + "results: {retention: 2h}\nidempotency: {retention: 3h}", "m.yaml:5:15: idempotency.retention: 3h0m0s is longer than the 2h0m0s of results.retention"},
		"a short window":            {good + "idempotency: {retention: 10m}", "m.yaml:4:15: idempotency.retention: 10m0s is no longer than the 10m0s of gateway.max_timeout: an idempotency key would be forgotten while its request runs"},
		"a shorter window":          {good + "gateway: {max_timeout: 30m}\nidempotency: {retention: 20m}", "m.yaml:5:15: idempotency.retention: 20m0s is no longer than the 30m0s of gateway.max_timeout"},
		"a short default":           {good + "results: {retention: 20s}", "m.yaml:4:11: results.retention: 20s is no longer than the 10m0s of gateway.max_timeout: an idempotency key would be forgotten while its request runs"},
		"a long timeout":            {good + "gateway: {max_timeout: 1h}", "m.yaml:4:11: gateway.max_timeout: 1h0m0s is no shorter than the 1h0m0s of results.retention: an idempotency key would be forgotten while its request runs; raise results.retention"},
		"copies of keys":            {good + "idempotency: {replicas: 3}", "m.yaml:4:15: idempotency.replicas: 3 copies need a cluster of brokers"},
		"copies of jobs":            {good + "jobs: {replicas: 3}", "m.yaml:4:8: jobs.replicas: 3 copies need a cluster of brokers"},
		"copies of batches":         {good + "jobs: {batches: {queue: q, replicas: 3}, pools: {p: {target: {http: {url: http://h}}}}, queues: {q: {pool: p}}}", "m.yaml:4:28: jobs.batches.replicas: 3 copies need a cluster of brokers"},
		"copies of a queue":         {stage("queue: {replicas: 3}"), "m.yaml:5:13: stages.a.queue.replicas: 3 copies need a cluster of brokers, at nats.url; the broker in the process has one"},
		"a gateway's pair":          {good + "gateway: {cert_file: c}", "m.yaml:4:11: gateway.cert_file: has no key; name its file in key_file"},
		"its other half":            {good + "gateway: {key_file: k}", "m.yaml:4:11: gateway.key_file: has no certificate; name its file in cert_file"},
		"a broker's pair":           {good + "nats: {url: \"nats://b\", cert_file: c}", "m.yaml:4:25: nats.cert_file: has no key; name its file in key_file"},
		"a listener's pair":         {good + "nats: {listen: \"127.0.0.1:4222\", listen_key_file: k}", "m.yaml:4:34: nats.listen_key_file: has no certificate; name its file in listen_cert_file"},
		"a listener's TLS":          {good + "nats: {url: \"nats://b\", listen_cert_file: c, listen_key_file: k}", "m.yaml:4:25: nats.listen_cert_file: is for the broker in the process; leave it out with url"},
		"TLS for nobody":            {good + "nats: {listen_cert_file: c, listen_key_file: k}", "m.yaml:4:8: nats.listen_cert_file: requires url or listen"},
		"a token for nobody":        {good + "nats: {token_file: t}", "m.yaml:4:8: nats.token_file: requires url or listen"},
		"trust in nobody":           {good + "nats: {ca_file: c}", "m.yaml:4:8: nats.ca_file: requires url or listen"},
		"trust without TLS":         {good + "nats: {listen: \"127.0.0.1:4222\", ca_file: c}", "m.yaml:4:34: nats.ca_file: requires listen_cert_file: without it the broker in the process has no TLS"},
		"a certificate alone":       {good + "nats: {listen: \"127.0.0.1:4222\", cert_file: c, key_file: k}", "m.yaml:4:34: nats.cert_file: requires url"},
		"a token and a user":        {good + "nats: {url: \"nats://b,user:hush@c\", token_file: t}", "m.yaml:4:37: nats.token_file: the user in url says already who this is; leave one of them out"},
		"two credentials":           {good + "nats: {url: \"nats://b\", credentials_file: c, token_file: t}", "m.yaml:4:46: nats.token_file: credentials_file says already who this is; leave one of them out"},
		"credentials":               {good + "nats: {credentials_file: x}", "m.yaml:4:8: nats.credentials_file: requires url"},

		"a pipeline's name": {
			good + "pipelines:\n  P_: {steps: [{name: s, stage: a}]}",
			`m.yaml:5:3: pipelines.P_: pipeline name "P_": use 1 to 63`,
		},
		"a pipeline of a stage": {
			good + "pipelines:\n  stage:a: {steps: [{name: s, stage: a}]}",
			`m.yaml:5:3: pipelines.stage:a: pipeline name "stage:a": use 1 to 63`,
		},
		"no steps":                   {pipeline("timeout: 1s"), "m.yaml:5:3: pipelines.p: steps: a pipeline has at least one"},
		"an unknown kind of call":    {good + "openai:\n  talk: {m: stage:a}", `m.yaml:5:3: openai: "talk" is not a key here; there are chat, completions, embeddings`},
		"a model without a kind":     {good + "openai:\n  chat: stage:a", `m.yaml:5:9: openai.chat: "stage:a" is not a set of keys`},
		"a model without a pipeline": {pipeline("steps: [{name: s, stage: a}]\nopenai:\n  chat:\n    org/m.1: q"), `m.yaml:9:5: openai.chat.org/m.1: there is no pipeline "q"; there are p, and stage:<name> for each stage`},
		"a model of nothing":         {good + "openai:\n  chat:\n    m:", "m.yaml:6:5: openai.chat.m: has no value; name the pipeline that answers for the model"},
		"a model of no stage":        {good + "openai:\n  embeddings: {m: stage:b}", `m.yaml:5:16: openai.embeddings.m: there is no stage "b"`},
		"a model of a hidden stage":  {good + "gateway: {stage_pipelines: false}\nopenai:\n  completions: {m: stage:a}", "m.yaml:6:17: openai.completions.m: stage:a is not served, because gateway.stage_pipelines is false"},
		"a model without a name":     {good + "openai:\n  chat:\n    \"\": stage:a", "m.yaml:6:5: openai.chat.: invalid model: the name is empty"},
		"an unknown stage":           {pipeline("steps:\n    - {name: s, stage: a}\n    - {name: t, stage: b}"), `m.yaml:8:17: pipelines.p.steps[1].stage: there is no stage "b"; there are a, and without nats.url or nats.listen no other process can add one`},
		"a step's name":              {pipeline("steps:\n    - {name: S, stage: a}"), `m.yaml:7:7: pipelines.p.steps[0]: step name "S": use 1 to 63`},
		"a step twice":               {pipeline("steps: [{name: s, stage: a}, {name: s, stage: a}]"), "m.yaml:6:34: pipelines.p.steps[1]: a step named s is there already"},
		"a step's parameter":         {pipeline("steps:\n    - {name: s, stage: a, parameters: {k: [1]}}"), "m.yaml:7:43: pipelines.p.steps[0].parameters.k: a parameter is true or false, a number or text"},
		"a large parameter":          {pipeline("steps:\n    - {name: s, stage: a, parameters: {k: 1e400}}"), `m.yaml:7:43: pipelines.p.steps[0].parameters.k: "1e400" is too large`},
		"a number in quotes":         {stage("hosts: \"2\""), `m.yaml:5:12: stages.a.hosts: "2" in quotes is text and not a whole number`},
		"an empty parameter":         {pipeline("steps:\n    - {name: s, stage: a, parameters: {k: }}"), "m.yaml:7:42: pipelines.p.steps[0].parameters.k: a parameter is true or false, a number or text"},
		"a timeout":                  {pipeline("steps: [{name: s, stage: a}]\n    timeout: -1s"), "m.yaml:7:5: pipelines.p.timeout: -1s is negative"},
		"a longer timeout":           {pipeline("steps: [{name: s, stage: a}]\n    timeout: 11m"), "m.yaml:7:5: pipelines.p.timeout: 11m0s is more than the 10m0s of gateway.max_timeout"},
		"a timeout too long":         {"gateway: {max_timeout: 2s}\n" + pipeline("steps: [{name: s, stage: a}]\n    timeout: 3s"), "m.yaml:8:5: pipelines.p.timeout: 3s is more than the 2s of gateway.max_timeout"},
		"a later part": {
			wired + "    steps:\n    - {name: s, stage: a, inputs: {x: scores}}\n    - {name: t, stage: b}",
			"m.yaml:8:36: pipelines.p.steps[0].inputs.x: the part scores is made by the later step t; change the order of the steps, or the name",
		},
		"a kept part of later": {
			wired + "    keep: [scores]\n    steps:\n    - {name: r, stage: a}\n    - {name: s, stage: a, inputs: {x: scores}}\n    - {name: t, stage: b}",
			"m.yaml:10:36: pipelines.p.steps[1].inputs.x: the part scores is made by the later step t",
		},
		"one port twice":      {good + "gateway: {listen: \"127.0.0.1:8088\"}\nops: {listen: \"127.0.0.1:8088\"}", "m.yaml:5:7: ops.listen: 127.0.0.1:8088 is also that of gateway.listen; choose another port"},
		"a default port":      {good + "ops: {listen: \"127.0.0.1:9080\"}", "m.yaml:4:7: ops.listen: 127.0.0.1:9080 is also that of gateway.admin.listen"},
		"one of its own":      {good + "gateway: {grpc_listen: \"127.0.0.1:8080\"}", "m.yaml:4:11: gateway.grpc_listen: 127.0.0.1:8080 is also that of gateway.listen"},
		"a scaler's port":     {good + "gateway: {scaler: {listen: \"127.0.0.1:9080\"}}", "m.yaml:4:20: gateway.scaler.listen: 127.0.0.1:9080 is also that of gateway.admin.listen"},
		"a port of all hosts": {good + "gateway: {insecure: true, listen: \":8088\", admin: {listen: \"127.0.0.1:8088\"}}", "m.yaml:4:52: gateway.admin.listen: 127.0.0.1:8088 is also that of gateway.listen"},
		"a broker's port":     {good + "nats: {listen: \"127.0.0.1:9090\"}", "m.yaml:4:8: nats.listen: 127.0.0.1:9090 is also that of ops.listen"},
		"a stage's port":      {stage("listen: \"127.0.0.1:9090\""), "m.yaml:5:5: stages.a.listen: 127.0.0.1:9090 is also that of ops.listen"},
		"durability":          {pipeline("steps: [{name: s, stage: a}]\n    durability: stone"), "m.yaml:7:5: pipelines.p.durability: durability \"stone\": use memory or file"},
		"file without queue": {
			"mesh: m\nstages:\n  a: {runner: {echo: {}}, queue: {durabilities: [memory]}}\n  b: {runner: {echo: {}}}\n" +
				"pipelines:\n  p:\n    durability: file\n    steps:\n    - {name: s, stage: b}\n    - {name: t, stage: a}",
			"m.yaml:10:17: pipelines.p.steps[1].stage: the pipeline's durability is file, and the stage a has no such queue; change durability, or the stage's queue.durabilities",
		},
		"memory without queue": {
			"mesh: m\nstages:\n  a: {runner: {echo: {}}, queue: {durabilities: [file]}}\npipelines:\n  p: {steps: [{name: s, stage: a}]}",
			"m.yaml:5:25: pipelines.p.steps[0].stage: the pipeline's durability is memory, and the stage a has no such queue; change durability",
		},
		"keep twice": {pipeline("steps: [{name: s, stage: a}]\n    keep: [x, x]"), `m.yaml:7:5: pipelines.p.keep: "x" is there twice`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, err := parse(test.text)
			if err == nil || f != nil {
				t.Fatalf("got %v and no error, want %s", f, test.want)
			}
			first, _, _ := strings.Cut(err.Error(), "\n")
			if !strings.HasPrefix(first, test.want) {
				t.Errorf("got  %s\nwant %s", first, test.want)
			}
		})
	}
}

func TestAllErrorsAreReportedTogether(t *testing.T) {
	t.Parallel()
	_, err := parse("mesh: M\nnats: {credentials_file: x}\ngateway: {timeout: -1s}\nops: {listen: x}\nstages:\n  a: {}\n  b: {runner: {burn: {}}, batch: {max_size: -1, max_wait: -1s}}\n" +
		"pipelines:\n  p: {steps: [{name: s, stage: x}, {name: t, stage: y}]}\n")
	if err == nil {
		t.Fatal("it is taken")
	}
	lines := strings.Split(err.Error(), "\n")
	want := []string{"m.yaml:1:1: ", "m.yaml:2:8: ", "m.yaml:3:11: ", "m.yaml:4:7: ", "m.yaml:6:3: ", "m.yaml:7:16: ", "m.yaml:7:35: ", "m.yaml:7:49: ", "m.yaml:9:25: ", "m.yaml:9:46: "}
	if len(lines) != len(want) {
		t.Fatalf("got %d lines:\n%v", len(lines), err)
	}
	for i := range want {
		if !strings.HasPrefix(lines[i], want[i]) {
			t.Errorf("line %d: got %s, want %s", i, lines[i], want[i])
		}
	}
}

// A password may stand in the URL.
func TestWrongURLIsNotShown(t *testing.T) {
	t.Parallel()
	_, err := parse(good + "nats: {url: \"nats://user:hush\\n@\"}")
	if err == nil || strings.Contains(err.Error(), "hush") {
		t.Errorf("got %v", err)
	}
	for urls, want := range map[string]string{
		"nats://user:hush@one:4222, nats://two": "nats://user:xxxxx@one:4222,nats://two",
		"nats://hush@one:4222":                  "nats://xxxxx@one:4222",
		"tls://one":                             "tls://one",
		"nats://user:hush@\x00":                 "xxxxx",
		"user:hush@one:4222":                    "nats://user:xxxxx@one:4222",
	} {
		if got := meshfile.Redacted(urls); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

func TestBrokerURLFormsAreAccepted(t *testing.T) {
	t.Parallel()
	for _, url := range []string{"nats://b", "b", "b:4222", "nats://user:x@b:4222", "tls://b", "nats://a:1,nats://b:2", "a, b", "nats://[::1]:4222"} {
		if err := meshfile.ValidBroker(url); err != nil {
			t.Errorf("%s: %v", url, err)
		}
	}
	for _, url := range []string{"", "nats://", ":4222", "a,", "://", "nats://a b"} {
		if err := meshfile.ValidBroker(url); err == nil {
			t.Errorf("%q is taken", url)
		}
	}
}
