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
	wire      = "internal/wire"
	payload   = "mesh/payload"
	msgpack   = "internal/msgpack"
	pipeline  = "mesh/pipeline"
	envelope  = "internal/envelope"
	model     = "mesh/model"
	oipcodec  = "internal/oipcodec"
	raw       = "internal/passthrough"
	bus       = "internal/bus"
	runner    = "stagehost/runner/..."
	auth      = "internal/credentials"
	discovery = "discovery/..."
	budget    = "internal/budget"
	transport = "internal/transport"
	request   = "internal/request"
)

// shared are the packages that gateway and hosts share.
var shared = list("mesh/...", wire, msgpack, envelope, oipcodec, raw, bus, "internal/store", "internal/config", "internal/process", auth,
	"internal/webhook", "internal/tracing", request, budget, "internal/models/...")

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
		{packages: list("internal/models/placement"), mayImport: list(pipeline, model), pure: true},
		{packages: list(envelope), mayImport: list(proto, tensor, fault, wire, payload, pipeline)},
		{packages: list(auth), mayImport: list(pipeline)},
		{packages: list(bus), mayImport: list(budget, proto, tensor, fault, payload, pipeline, envelope, auth, "internal/filestream")},
		{packages: list("internal/store"), mayImport: list(budget, request, proto, tensor, fault, payload, pipeline, envelope, bus, "internal/config", "internal/process")},
		{packages: list("internal/process", "internal/config"), mayImport: nothing},
		{packages: list("internal/filestream"), mayImport: list("internal/process")},
		{packages: list("internal/webhook"), mayImport: list(auth, "internal/config")},
		{packages: list("internal/tracing"), mayImport: list(fault, envelope, "internal/config")},
		{packages: list(request), mayImport: list(proto, fault, payload, pipeline, envelope, "internal/tracing")},

		// What all ports share.
		{packages: list(transport), mayImport: list(fault, wire, envelope, "internal/tracing", budget), inTests: list(proto, "internal/front/fronttest", "internal/testbed")},

		// What the tests of all packages share.
		{packages: list("internal/testbed"), mayImport: list(bus, pipeline)},
		{packages: list("internal/tempfolder", "internal/cpuset"), mayImport: nothing},

		// Who is alive: the interfaces, and what implements or reads them.
		{packages: list("discovery"), mayImport: list(proto, fault)},
		{packages: list("discovery/consul", "discovery/internal/*"), mayImport: list("discovery", "discovery/internal/...", auth, "internal/process")},
		{packages: list("discovery/natskv"), mayImport: list("discovery", "discovery/internal/...", auth, "internal/filestream", "internal/process")},
		{packages: list("internal/models"), mayImport: list(proto, fault, pipeline, model, "internal/models/placement", "internal/process", "discovery"), inTests: list("discovery/natskv")},

		// The stage host.
		{packages: list("internal/batch"), mayImport: list(fault, pipeline), pure: true},
		{packages: list("internal/worker/frame"), mayImport: list(tensor), standardLibraryOnly: true},
		{packages: list("stagehost/runner", "stagehost/runner/inproc", "stagehost/runner/runnertest", "internal/worker"), mayImport: list(fault, payload, model, sdk, runner, "internal/worker/*", "internal/cpuset")},
		// It knows processes, and neither workers nor their protocol.
		{packages: list("internal/worker/fork"), mayImport: list("stagehost/runner", "internal/tempfolder", "internal/cpuset")},
		{packages: list("internal/modelserver/..."), mayImport: list(proto, fault, payload, oipcodec, raw, model, auth, sdk, runner)},
		{packages: list("internal/schema"), mayImport: list(fault, payload, msgpack, sdk, "stagehost/runner")},
		{packages: list("stagehost/internal/modelcache"), mayImport: list(model), pure: true},
		// The loop of items reaches the host, what it stores and its models by interfaces.
		{
			packages:  list("stagehost/internal/item"),
			mayImport: list(proto, fault, payload, pipeline, envelope, bus, model, "internal/batch", "internal/schema", "internal/tracing", runner, "stagehost/internal/modelcache"),
			inTests:   list("internal/store", tensor),
		},
		// What a host does about models reaches the host by its settings.
		{
			packages:  list("stagehost/internal/models"),
			mayImport: list(proto, fault, pipeline, envelope, bus, model, "discovery", "internal/batch", "internal/models/...", "internal/schema", "stagehost/runner", "stagehost/internal/item", "stagehost/internal/modelcache"),
			inTests:   list(payload, runner),
		},
		{packages: list("stagehost"), mayImport: append(list(proto, sdk, "stagehost/...", "internal/batch", "internal/schema", discovery, transport), shared...)},

		// The gateway: only admission, call and jobs touch the bus, fronts translate.
		{packages: list("internal/admission"), mayImport: list(budget, fault, pipeline, envelope, bus)},
		// How many hosts a stage should have.
		{packages: list("internal/scale"), mayImport: nothing, pure: true},
		// What became of the last requests.
		{packages: list("internal/explain"), mayImport: list(proto, fault, pipeline, envelope)},
		// Rates and quantiles of the mesh, for the command and the page.
		{packages: list("internal/figures"), mayImport: list(proto, "internal/explain")},
		// What follows the registry, and says what fits.
		{
			packages:  list("internal/pipelines"),
			mayImport: list(proto, tensor, fault, payload, msgpack, pipeline, "discovery"),
		},
		{
			packages:  list("internal/route"),
			mayImport: list(proto, fault, payload, pipeline, envelope, model, "internal/models", "internal/pipelines", request),
		},
		{packages: list("internal/graph"), mayImport: list(proto, tensor, fault, payload, pipeline), pure: true},
		{
			packages:  list("internal/call"),
			mayImport: list("internal/graph", proto, tensor, fault, payload, msgpack, raw, pipeline, envelope, bus, "internal/config", "internal/process", "internal/store", "internal/tracing", "internal/admission", "internal/explain", "internal/pipelines", "internal/route", budget, request),
		},
		{packages: list("internal/jobs"), mayImport: list(proto, fault, payload, pipeline, bus, "internal/process", "internal/store", "internal/webhook", "internal/admission", budget, request), inTests: list("internal/call")},
		{packages: list("internal/front/*"), mayImport: list(proto, tensor, fault, payload, oipcodec, raw, model, msgpack, pipeline, auth, "internal/config", "internal/admission", "internal/call", "internal/jobs", "internal/front/*", "internal/openapi", budget, request, transport), inTests: list("internal/tracing", envelope)},
		// What the operators' port shows is what the stores keep: it reads letters
		// and their items, through interfaces of its own. A front, so never the bus.
		{
			packages: list("internal/adminapi"),
			mayImport: list(proto, fault, payload, pipeline, envelope, auth, budget, "internal/store", model, "discovery", "internal/models", "internal/call", "internal/jobs", "internal/explain", "internal/figures", "internal/pipelines",
				"internal/front/port", request, transport),
			inTests: list("discovery/natskv"),
		},
		// What describes the fronts uses their words.
		{
			packages:  list("internal/openapi"),
			mayImport: list(proto, tensor, fault, payload, msgpack, pipeline, "internal/call", "internal/pipelines", "internal/front/oipjson", request, transport),
		},
		// What writes clients reads that description.
		{packages: list("internal/clientgen"), mayImport: list(payload, pipeline, "internal/openapi"), inTests: list("sdk/python")},
		{
			packages: list("gateway"),
			mayImport: append(list(proto, sdk, "internal/admission", "internal/scale", "internal/call", "internal/explain", "internal/pipelines", "internal/route", "internal/jobs", "internal/front/...",
				"internal/openapi", "internal/adminapi", discovery, transport), shared...),
		},

		// The dispatcher of jobs reaches its targets through an interface.
		{packages: list("internal/jobs/dispatch"), mayImport: list(budget, proto, fault, payload, pipeline, envelope, auth, bus, "internal/config", "internal/process", "internal/store", "internal/webhook", discovery)},

		// What is built out of all this.
		{packages: list("internal/program"), mayImport: list(proto, auth, "internal/config", "internal/tracing", transport, "internal/cpuset")},
		{packages: list("internal/meshfile"), mayImport: append(list(proto, sdk, "gateway", "internal/admission", "internal/scale", "internal/call", "internal/front/openai", "internal/pipelines", "internal/jobs/...", "stagehost/...", "internal/batch", "internal/schema", discovery), shared...), inTests: list("services/runners", "services/onnx", "internal/modelserver")},
		{packages: list("internal/importtriton"), mayImport: list(tensor, pipeline, "stagehost/runner", "internal/meshfile"), inTests: list("internal/testbed", "services/runners")},
		// The library links no shipped stage.
		{
			packages:  list("."),
			mayImport: list(proto, sdk, "mesh/...", "gateway", "stagehost/...", discovery, "internal/..."),
			inTests:   list("services/runners", "examples/digits"),
		},
		{packages: list("services/...", "internal/load", "test/...", "examples/...", "bench/...", "deploy/..."), mayImport: list("...")},
	},

	// Packages of others that have a few places only. Test code, and the
	// packages that exist for tests, count as tests.
	externals: []external{
		{
			packages: list("github.com/nats-io/nats.go/..."),
			mayAppearIn: list(
				auth, bus, "internal/store", "discovery/natskv",
				// The baseline of the benchmarks.
				"bench/baseline",
			),
			andInTests: true,
		},
		{packages: list("charm.land/..."), mayAppearIn: list("services/cli")},
		{packages: list("github.com/HdrHistogram/hdrhistogram-go/..."), mayAppearIn: list("internal/load"), andInTests: true},
		{packages: list("gonum.org/v1/plot/..."), mayAppearIn: list("bench/chart")},
		{packages: list("github.com/nats-io/nats-server/..."), mayAppearIn: list("."), andInTests: true},
		{packages: list("github.com/hashicorp/consul/..."), mayAppearIn: list("discovery/consul")},
		{packages: list("github.com/santhosh-tekuri/jsonschema/v6/..."), mayAppearIn: list("internal/schema"), andInTests: true},
		{packages: list("github.com/tinylib/msgp/..."), mayAppearIn: list(msgpack, "internal/front/rest"), andInTests: true},
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
	pureFiles: list("internal/jobs/dispatch/attempts.go", "internal/jobs/dispatch/budget.go", "internal/jobs/dispatch/limits.go", "internal/jobs/dispatch/order.go", "internal/admission/estimate.go", "internal/explain/summary.go", "internal/worker/machine.go", "internal/worker/limits.go"),
}

var nothing []string

func list(patterns ...string) []string { return patterns }
