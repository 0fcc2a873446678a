package docstest

// rule is an exception for the blocks of a page that contain has: the mesh on which they run, if it is not
// digits, a part of what they print, the file that they are for later blocks, or why they do not run.
type rule struct{ page, has, mesh, want, file, skip string }

// What other tests run, and what no test can.
const (
	stops     = "it runs until somebody stops it; test/meshtest and services/cli test it"
	outside   = "test/librarytest runs it in a module of its own"
	triton    = "it needs packages that test/meshtest/clients runs it with"
	elsewhere = "it names hosts and files that are not here"
	webhooks  = "it needs a receiver, which test/meshtest/clients/webhook_test.go has"
	attached  = "it attaches to a process by its number, or changes the machine's Python"
	debugging = "TestScriptsOfDebuggingRun runs it"
	workers   = "TestWorkersOfThePagesPassTheCheck, or a mesh here, runs it"
	builds    = "it builds or tests the repository, as CI does"
	drawing   = "it is a drawing, a list or a picture of a moment"
	measures  = "it measures for minutes; bench and services/cli test the commands"
)

var rules = []rule{
	{page: "README.md", has: "50 of 50 right", skip: "make run prints it; examples/digits tests it"},
	{page: "README.md", has: "make run", skip: builds},
	{page: "README.md", has: "make test", skip: builds},
	{page: "README.md", has: "--timeline", want: "classify: queue"},
	{page: "README.md", has: "class Mean", file: "mean.py", skip: "TestTheWorkerOfTheReadmeAnswers runs it"},
	{page: "README.md", has: "mean is ready", skip: "TestTheWorkerOfTheReadmeAnswers compares it"},
	{page: "README.md", has: "go mod init", skip: outside},
	{page: "README.md", has: "module example.com/shout", skip: outside},

	{page: "docs/benchmarks.md", has: "bench digits", skip: measures},
	{page: "docs/benchmarks.md", has: "LATENCY", skip: measures},
	{page: "docs/benchmarks.md", has: "bin/bench", skip: measures},
	{page: "docs/benchmarks.md", has: "MESH / BASELINE", skip: measures},
	{page: "docs/performance.md", skip: "bench/suite/page_test.go compares it with the figures of make bench"},
	{page: "docs/configuration.md", has: "classifi", skip: "internal/meshfile tests such messages"},
	{page: "docs/configuration.md", has: "context add", skip: elsewhere},
	{page: "docs/kubernetes.md", has: "helm install", skip: "it needs a cluster; make test-kubernetes installs the chart"},
	{page: "docs/ocr.md", has: "for each line", skip: drawing},
	{page: "docs/ocr.md", has: "detect: queue", skip: drawing},
	{page: "docs/openai.md", has: "POST /v1/chat", skip: drawing},
	{page: "docs/top.md", has: "stagemesh top", skip: drawing},
	{page: "docs/tracing.md", has: "server     ", skip: "test/meshtest/traces compares such trees"},

	{page: "docs/clients.md", has: "import grpc", skip: triton},
	{page: "docs/clients.md", has: "tritonclient", skip: triton},
	{page: "docs/clients.md", has: "grpcurl", skip: "TestGrpcurlInfersByReflection runs it"},
	{page: "docs/clients.md", has: "except (Resource"}, // it prints faults alone
	{page: "docs/clients.md", has: "catch (fault)", want: "INVALID_INPUT decode"},
	{page: "docs/clients.md", has: `"tale"`, mesh: "text-stream", want: "tell"},
	{page: "docs/clients.md", has: "generate_stream", mesh: "text-stream", want: `"text":" said"`},
	{page: "docs/clients.md", has: "jobs.submit", mesh: "nightly", want: "9"},
	{page: "docs/clients.md", has: "connect-node", want: "-7"}, // part of a request ID, a UUID of version 7
	{page: "docs/clients.md", has: "order-4711", want: `"9"`},
	{page: "docs/clients.md", has: "note: pipeline", skip: "services/cli tests such changes"},
	{page: "docs/clients.md", has: "https://gateway", skip: elsewhere},
	{page: "docs/clients.md", has: "07-9.png", want: "9"},
	{page: "sdk/typescript/README.md", has: `"tale"`, mesh: "text-stream", want: "said"},

	{page: "docs/debugging.md", has: "class Mean", file: "mean.py", skip: debugging},
	{page: "docs/debugging.md", has: "pytest", skip: debugging},
	{page: "docs/debugging.md", has: "mean import Mean", skip: debugging},
	{page: "docs/debugging.md", has: "pip install", skip: attached},
	{page: "docs/debugging.md", has: "py-spy", skip: attached},
	{page: "docs/debugging.md", has: "mesh.log", skip: stops},

	{page: "docs/graphs.md", has: "look: parallel", skip: "test/meshtest/graph_test.go compares such timelines"},
	{page: "docs/graphs.md", has: "import triton", want: "is fine"},

	{page: "docs/http.md", has: "GET    /v1/models", skip: drawing},
	{page: "docs/http.md", has: "call-7\", \"inputs", want: `"id":"call-7"`},
	{page: "docs/http.md", has: "tale:stream", mesh: "text-stream", want: "said"},
	{page: "docs/http.md", has: "in_order=true", want: `{"line":2,"error":{`},
	{page: "docs/http.md", has: `'{"scores"`, want: `"4"`},
	{page: "docs/http.md", has: "'no image'", want: `"reason":"INVALID_INPUT"`},
	{page: "docs/http.md", has: "07-9.png", want: "9"},

	{page: "docs/jobs.md", has: "standardwebhooks", skip: webhooks},
	{page: "docs/jobs.md", has: "job.succeeded", skip: webhooks},
	{page: "docs/jobs.md", has: "https://example.com", skip: webhooks},
	{page: "docs/jobs.md", has: "import OpenAI", skip: "it needs the package openai, with which test/meshtest/clients tests batches"},
	{page: "docs/jobs.md", has: "path=/v1/chat/completions", skip: "it needs a server of a model; test/meshtest/fleet/batches_test.go has one"},
	{page: "docs/jobs.md", has: "nats ", skip: "it needs the program nats; test/librarytest/jobsnats_test.go has its requests"},
	{page: "docs/jobs.md", has: "jobs explain", mesh: "jobs", want: "queue   "},
	{page: "docs/jobs.md", has: "Prefer:", mesh: "jobs", want: "Preference-Applied"},
	{page: "docs/jobs.md", has: "", mesh: "jobs"},

	{page: "docs/models.md", has: "models tap", skip: stops},
	{page: "docs/models.md", has: "types: {large", file: "settings.yaml"},
	{page: "docs/models.md", has: `{"id": "iris-v1"`, skip: "services/cli registers such lines"},
	{page: "docs/models.md", has: "", mesh: "models"},

	{page: "docs/operations.md", has: "https://gateway-1", skip: elsewhere},
	{page: "docs/operations.md", has: "accounts {", skip: "test/librarytest/jobsnats_test.go starts a server with it"},
	{page: "docs/operations.md", has: "route took", skip: "test/meshtest/graph_test.go compares such sentences"},

	{page: "docs/scaling.md", has: "external-push", skip: "tools/chart checks such triggers"},
	{page: "docs/scaling.md", has: "scale --exec", skip: stops},

	{page: "docs/tutorial.md", has: "go build", skip: builds},
	{page: "docs/tutorial.md", has: "class Ink", file: "ink.py", skip: workers},
	{page: "docs/tutorial.md", has: "mesh: tutorial", file: "ink.yaml"},
	{page: "docs/tutorial.md", has: "README.md", mesh: "ink", want: "INVALID_INPUT"},
	{page: "docs/tutorial.md", has: "25 \"host", skip: drawing},
	{page: "docs/tutorial.md", has: "", mesh: "ink"},

	{page: "docs/workers.md", has: "(Worker)", skip: workers},
	{page: "docs/workers.md", has: "batch.span", skip: "sdk/python/tests/test_spans.py tests spans"},
	{page: "docs/workers.md", has: "is DEAD", skip: "test/meshtest/workers tests such lines"},
}
