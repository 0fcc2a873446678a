package archtest

// Paths are relative to the module path of the repository. "a/*" is every
// package directly in a, "a/..." is a and all below it, "..." is everything.
// A package of the product matches exactly one row; a row need not match
// anything yet. Every package may import itself (its tests do).
const (
	proto     = "proto/gen/go/..."
	tensor    = "sdk/go/tensor"
	sdk       = "sdk/go/..."
	fault     = "mesh/fault"
	wire      = "mesh/wire"
	payload   = "mesh/payload"
	msgpack   = "mesh/msgpack"
	pipeline  = "mesh/pipeline"
	envelope  = "mesh/envelope"
	model     = "mesh/model"
	oipcodec  = "mesh/oipcodec"
	raw       = "mesh/passthrough"
	bus       = "mesh/bus"
	runner    = "stagehost/runner/..."
	auth      = "mesh/credentials"
	discovery = "discovery/..."
	budget    = "internal/budget"
	transport = "internal/transport"
	request   = "internal/request"
)

// importTable is the import table of ARCHITECTURE.md.
var importTable = rules{
	rows: []row{
		// What others import.
		{packages: list(proto), mayImport: list(proto)},
		{packages: list(tensor), mayImport: nothing, standardLibraryOnly: true},
		{packages: list("sdk/python"), mayImport: nothing, standardLibraryOnly: true},

		// What gateway and hosts share: to the right may import to the left.
		{packages: list(fault), mayImport: list(proto)},
		{packages: list(wire), mayImport: nothing},
		{packages: list(budget), mayImport: list(fault)},
		{packages: list(payload), mayImport: list(proto, tensor, fault, wire)},
		{packages: list(msgpack), mayImport: list(fault)},
		{packages: list(oipcodec), mayImport: list(proto, tensor, fault, payload), pure: true},
		{packages: list(raw), mayImport: nothing, inTests: list(proto), pure: true},
		{packages: list(pipeline), mayImport: list(proto, tensor, fault, payload)},
		{packages: list(model), mayImport: list(pipeline), pure: true},
		{packages: list("mesh/placement"), mayImport: list(pipeline, model), pure: true},
		{packages: list(envelope), mayImport: list(proto, tensor, fault, wire, payload, pipeline)},
		{packages: list(auth), mayImport: list(pipeline)},
		{packages: list(bus), mayImport: list(budget, proto, tensor, fault, payload, pipeline, envelope, auth)},
		{packages: list("mesh/store"), mayImport: list(budget, request, proto, tensor, fault, payload, pipeline, envelope, bus, "mesh/config", "mesh/process")},
		{packages: list("mesh/process", "mesh/config"), mayImport: nothing},
		{packages: list("mesh/webhook"), mayImport: list(auth, "mesh/config")},
		{packages: list("mesh/tracing"), mayImport: list(fault, envelope, "mesh/config")},
		{packages: list(request), mayImport: list(proto, fault, payload, pipeline, envelope, "mesh/tracing")},

		// What all ports share.
		{packages: list(transport), mayImport: list(fault, wire, envelope, "mesh/tracing", budget), inTests: list(proto, "gateway/front/fronttest", "internal/testbed")},

		// What the tests of all packages share.
		{packages: list("internal/testbed"), mayImport: list(bus, pipeline)},
		{packages: list("internal/tempfolder", "internal/cpuset"), mayImport: nothing},

		// Who is alive: the interfaces, and what implements or reads them.
		{packages: list("discovery"), mayImport: list(proto, fault)},
		{packages: list("discovery/consul", "discovery/internal/*"), mayImport: list("discovery", "discovery/internal/...", auth, "mesh/process")},
		{packages: list("discovery/natskv"), mayImport: list("discovery", "discovery/internal/...", auth, bus, "mesh/process")},
		{packages: list("discovery/models"), mayImport: list(proto, fault, pipeline, model, "mesh/placement", "mesh/process", "discovery"), inTests: list("discovery/natskv")},

		// The stage host.
		{packages: list("stagehost/batch"), mayImport: list(fault, pipeline), pure: true},
		{packages: list("stagehost/runner/worker/frame"), mayImport: list(tensor), standardLibraryOnly: true},
		{packages: list("stagehost/runner", "stagehost/runner/inproc", "stagehost/runner/runnertest", "stagehost/runner/worker"), mayImport: list(fault, payload, model, sdk, runner, "internal/tempfolder", "internal/cpuset")},
		{packages: list("stagehost/runner/modelserver/..."), mayImport: list(proto, fault, payload, oipcodec, raw, model, auth, sdk, runner)},
		{packages: list("stagehost/schema"), mayImport: list(fault, payload, msgpack, sdk, "stagehost/runner")},
		{packages: list("stagehost/modelcache"), mayImport: list(model), pure: true},
		{packages: list("stagehost"), mayImport: list(proto, sdk, "mesh/...", "stagehost/...", discovery, budget, transport)},

		// The gateway: only admission, call and jobs touch the bus, fronts translate.
		{packages: list("gateway/admission"), mayImport: list(budget, fault, pipeline, envelope, bus)},
		// What became of the last requests.
		{packages: list("gateway/explain"), mayImport: list(proto, fault, pipeline, envelope)},
		// What follows the registry, and says what fits.
		{
			packages:  list("gateway/pipelines"),
			mayImport: list(proto, tensor, fault, payload, msgpack, pipeline, "discovery"),
		},
		{
			packages:  list("gateway/call"),
			mayImport: list(proto, tensor, fault, payload, raw, pipeline, envelope, bus, "mesh/config", "mesh/process", "mesh/store", "mesh/tracing", model, "discovery/models", "gateway/admission", "gateway/explain", "gateway/pipelines", budget, request),
		},
		{packages: list("gateway/jobs"), mayImport: list(proto, fault, payload, pipeline, bus, "mesh/process", "mesh/store", "mesh/webhook", "gateway/admission", "gateway/call", budget, request)},
		{packages: list("gateway/front/*"), mayImport: list(proto, tensor, fault, payload, oipcodec, raw, model, msgpack, pipeline, auth, "mesh/config", "gateway/admission", "gateway/call", "gateway/jobs", "gateway/front/*", "gateway/openapi", budget, request, transport), inTests: list("mesh/tracing", envelope)},
		// What the operators' port shows is what the stores keep: it reads letters
		// and their items, through interfaces of its own. A front, so never the bus.
		{
			packages: list("gateway/adminapi"),
			mayImport: list(proto, fault, payload, pipeline, envelope, auth, "mesh/store", model, "discovery", "discovery/models", "gateway/call", "gateway/jobs", "gateway/explain", "gateway/pipelines",
				"gateway/front/port", request, transport),
			inTests: list("discovery/natskv"),
		},
		// What describes the fronts uses their words.
		{
			packages:  list("gateway/openapi"),
			mayImport: list(proto, tensor, fault, payload, msgpack, pipeline, "gateway/call", "gateway/front/oipjson", request, transport),
		},
		{packages: list("gateway"), mayImport: list(proto, sdk, "mesh/...", "gateway/...", discovery, budget, request, transport)},

		// The dispatcher of jobs reaches its targets through an interface.
		{packages: list("dispatch"), mayImport: list(budget, proto, fault, payload, pipeline, envelope, auth, bus, "mesh/config", "mesh/process", "mesh/store", "mesh/webhook", discovery)},

		// What is built out of all this.
		{packages: list("internal/program"), mayImport: list(proto, auth, "mesh/config", "mesh/tracing", transport, "internal/cpuset")},
		{packages: list("internal/meshfile"), mayImport: list(proto, sdk, "mesh/...", "gateway/...", "stagehost/...", "dispatch", discovery), inTests: list("services/runners", "services/onnx")},
		// The library links no shipped stage.
		{
			packages:  list("."),
			mayImport: list(proto, sdk, "mesh/...", "gateway/...", "stagehost/...", "dispatch", discovery, "internal/..."),
			inTests:   list("services/runners", "examples/digits"),
		},
		{packages: list("services/...", "examples/...", "bench/...", "deploy/..."), mayImport: list("...")},
	},

	// Packages of others that have a few places only. Test code, and the
	// packages that exist for tests, count as tests.
	externals: []external{
		{
			packages: list("github.com/nats-io/nats.go/..."),
			mayAppearIn: list(
				auth, bus, "mesh/store", "discovery/natskv",
				// The baseline of the benchmarks.
				"bench/baseline",
			),
			andInTests: true,
		},
		{packages: list("charm.land/..."), mayAppearIn: list("services/cli")},
		{packages: list("github.com/HdrHistogram/hdrhistogram-go/..."), mayAppearIn: list("services/bench"), andInTests: true},
		{packages: list("gonum.org/v1/plot/..."), mayAppearIn: list("bench/chart")},
		{packages: list("github.com/nats-io/nats-server/..."), mayAppearIn: list("."), andInTests: true},
		{packages: list("github.com/hashicorp/consul/..."), mayAppearIn: list("discovery/consul")},
		{packages: list("github.com/santhosh-tekuri/jsonschema/v6/..."), mayAppearIn: list("stagehost/schema"), andInTests: true},
		{packages: list("github.com/tinylib/msgp/..."), mayAppearIn: list(msgpack), andInTests: true},
		{
			packages:    list("go.opentelemetry.io/otel/sdk/...", "go.opentelemetry.io/otel/exporters/..."),
			mayAppearIn: list("internal/program"), andInTests: true,
		},
		{
			packages: list("testing/...", "go.uber.org/goleak/...", "pgregory.net/rapid/...",
				"github.com/chromedp/...", "github.com/pb33f/...", "golang.org/x/mod/..."),
			andInTests: true,
		},
	},

	// What a pure package cannot need: it decides, others wait, lock and talk. net/url is pure.
	impure: list("context", "log/...", "net", "net/http/...", "net/rpc/...", "os/...", "sync/..."),
	// Pure parts of packages that are not pure.
	pureFiles: list("dispatch/attempts.go", "dispatch/budget.go", "dispatch/limits.go", "dispatch/order.go", "gateway/admission/estimate.go", "gateway/explain/summary.go", "stagehost/runner/worker/machine.go", "stagehost/runner/worker/limits.go"),
}

var nothing []string

func list(patterns ...string) []string { return patterns }
