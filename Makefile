# The commands of this repository. `make` alone lists them.
#
# Building and running need Go only. Linters and generators are Go programs
# pinned in tools/*/go.mod; they are built on first use. The checks of
# sdk/python and of the examples in Python need Python too, and the tests of the
# page that a gateway serves need Chromium.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:
# The steps of `test` and `quick` print headings and stop at the first
# failure; go, buf and golangci-lint use all cores by themselves.
.NOTPARALLEL:

# run: ONCE=1 exits after the table. LISTEN, ADMIN and OPS are the addresses for
# callers, for operators and for their tools; port 0 is a free one, which ONCE=1
# takes by itself, so that it works beside another mesh. The environment has no say in these.
ONCE   =
LISTEN = $(if $(ONCE),127.0.0.1:0)
ADMIN  = $(if $(ONCE),127.0.0.1:0)
OPS    = $(if $(ONCE),127.0.0.1:0)
RUN    = bin/digits $(if $(ONCE),--once) $(LISTEN:%=--listen %) $(ADMIN:%=--admin %) $(OPS:%=--ops %)

# stack: replicas of services; with SCALER=1 stagemesh scale sets those of the stages.
SCALE  =
SCALER =

# The modules that are built and tested together (go.work), and their packages.
MODULES      := . bench deploy/local
PACKAGES     := ./... ./bench/... ./deploy/local/...
# The tests of many processes, which hold times and allocations to bounds: they run by
# themselves and never with the race detector. They need a Consul agent.
FLEET        := ./test/meshtest/fleet
# The tests that open the gateway's page in a browser; they need Chromium.
BROWSER      := ./test/meshtest/reference
# The tests with programs that others have written, which are installed for them.
CLIENTS      := ./test/meshtest/clients
# The tests of the local stack, with programs of others that take minutes to build.
STACK        := ./deploy/local
# The tests of traces, with a Jaeger that takes minutes to build.
TRACES       := ./test/meshtest/traces
ALONE        := $(FLEET) $(BROWSER) $(CLIENTS) $(STACK) $(TRACES)
UNITS         = $(filter-out $(addprefix %,$(ALONE:.%=%)),$(shell go list $(PACKAGES)))
# What runs whole meshes and programs, or needs a tool that takes long to build: quick
# leaves them to test-race.
WORKERS      := ./test/meshtest/workers
SLOW         := %/bench/compare %/test/librarytest %/test/meshtest %/test/meshtest/workers %/services/cli %/services/cmd/stagemesh %/internal/worker %/discovery/consul %/services/onnx %/examples/modelmesh %/examples/ocr %/test/modelstest
# Packages that test-race runs without the race detector: checks of files and documents, pure computations, and
# models in Python. Their goroutines share next to nothing that the tests of other packages do not cover.
PLAIN := $(addprefix %/,bench/chart bench/suite examples/ocr internal/clientgen internal/graph internal/importtriton \
  internal/openapi internal/schema test/archtest test/docstest test/modelstest)
# test-kubernetes checks tools/keda: the modules that KEDA's go.sum names take 3 GB.
TOOL_MODULES := $(patsubst %/go.mod,%,$(filter-out tools/keda/%,$(wildcard tools/*/go.mod)))

# The compiled schema that `proto-breaking` compares with.
BASELINE := proto/baseline.binpb

# bench: the items of the suite, all if empty; QUICK=1 is a trial with useless figures.
ITEMS =
QUICK =
# bench-go: which (a regular expression), how often, how long.
BENCH     ?= .
COUNT     ?= 1
BENCHTIME ?= 1s
# fuzz: how long for each target.
FUZZTIME  ?= 30s

# --- Tools ----------------------------------------------------------------
# A tool module is built into a folder outside the tree that is named after
# its requirements and the Go version, so all clones of one user share it and
# a changed go.mod is a rebuild.
TOOLS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/stagemesh/tools

sha256    := $(firstword $(shell command -v sha256sum shasum)) $(if $(shell command -v sha256sum),,-a 256)
tool_dir   = $(TOOLS)/$(1)-$(shell { go version; cat tools/$(1)/go.mod tools/$(1)/go.sum; } | $(sha256) | cut -c1-16)
BUF_BIN     := $(call tool_dir,buf)
LINT_BIN    := $(call tool_dir,lint)
BENCH_BIN   := $(call tool_dir,bench)
GRPCURL_BIN := $(call tool_dir,grpcurl)
H2SPEC_BIN  := $(call tool_dir,h2spec)
CONSUL_BIN  := $(call tool_dir,consul)
JAEGER_BIN  := $(call tool_dir,jaeger)
PROMETHEUS_BIN := $(call tool_dir,prometheus)
AUDIT_BIN   := $(call tool_dir,audit)
RELEASE_BIN := $(call tool_dir,release)
DOCKER_BIN  := $(call tool_dir,docker)
KUBERNETES_BIN := $(call tool_dir,kubernetes)
KEDA_BIN    := $(call tool_dir,keda)
STACK_TOOLS := $(CONSUL_BIN)/.built $(JAEGER_BIN)/.built $(PROMETHEUS_BIN)/.built

# $(1): name of an environment, $(2): its interpreter, which may be missing, $(3): its requirements.
env_dir = $(TOOLS)/$(1)-$(shell { $(2) --version || :; cat $(3); } 2>/dev/null | $(sha256) | cut -c1-16)

# The Python that tests sdk/python, and the environment with what its checks need.
PYTHON     ?= python3
PYTHON_ENV := $(call env_dir,python,$(PYTHON),sdk/python/requirements-dev.txt)
# The Python with onnxruntime, which the tests of the runner onnx run models by.
ONNX_PYTHON := $(call env_dir,onnx-python,$(PYTHON),services/onnx/requirements-dev.txt)
# The Python with the libraries of the examples' models.
MODELS_PYTHON := $(call env_dir,models-python,$(PYTHON),test/modelstest/requirements.txt)
# The Python with PyTorch, which is too large to install for tests but from Debian.
TORCH_PYTHON ?= /usr/bin/python3
# Examples in Python: each folder has tests of its own, but for those of test/modelstest and examples/ocr.
PYTHON_EXAMPLES := examples/digits-python examples/modelmesh examples/openai examples/text-stream examples/tokenize examples/pytorch examples/embeddings examples/ocr examples/tabular

# What else is linted as sdk/python is.
PYTHON_OTHERS   := $(PYTHON_EXAMPLES) test/meshtest/clients test/meshtest/fleet bench services/onnx/testdata

PEERS := mosec bentoml ray
# The Python that builds the packages of sdk/python for a release.
RELEASE_PYTHON := $(call env_dir,release-python,$(PYTHON),tools/release/requirements.txt)
# Where the clients of other servers are: one environment for Python, one for Node. The
# servers themselves, for bench-peers, have one each.
CLIENTS_PYTHON := $(call env_dir,clients-python,$(PYTHON),$(CLIENTS)/python/requirements.txt)
PEER_PYTHON     = $(call env_dir,peer-$(1),$(PYTHON),bench/peers/$(1).txt)
CLIENTS_NODE   := $(call env_dir,clients-node,node,$(CLIENTS)/node/package-lock.json)
# The Python that generates proto/gen/python.
GRPC_PYTHON := $(call env_dir,grpc-python,$(PYTHON),proto/requirements.txt)
# What compiles sdk/typescript, with its dependencies.
TYPESCRIPT_NODE := $(call env_dir,typescript-node,node,sdk/typescript/package-lock.json)

# buf finds the code generators on the PATH.
buf           = PATH="$(BUF_BIN):$(TYPESCRIPT_NODE)/node_modules/.bin:$$PATH" buf
golangci_lint = $(LINT_BIN)/golangci-lint

# The stamp is written last: an interrupted build is continued, not trusted.
# $(1): name of the folder under tools, $(2): where its programs go, $(3): flags of go install.
define tool_rule
$(2)/.built:
	@echo "== tools/$(1): build (kept in $$(@D))" >&2
	@mkdir -p $$(@D)
	@GOWORK=off GOFLAGS= GOBIN=$$(@D) go -C tools/$(1) install $(3) tool
	@touch $$@
endef
$(eval $(call tool_rule,buf,$(BUF_BIN)))
$(eval $(call tool_rule,lint,$(LINT_BIN)))
$(eval $(call tool_rule,bench,$(BENCH_BIN)))
$(eval $(call tool_rule,grpcurl,$(GRPCURL_BIN)))
$(eval $(call tool_rule,h2spec,$(H2SPEC_BIN)))
$(eval $(call tool_rule,consul,$(CONSUL_BIN)))
$(eval $(call tool_rule,jaeger,$(JAEGER_BIN)))
$(eval $(call tool_rule,audit,$(AUDIT_BIN)))
$(eval $(call tool_rule,release,$(RELEASE_BIN)))
# Compose asks buildx for its version.
$(eval $(call tool_rule,docker,$(DOCKER_BIN),-ldflags=-X=github.com/docker/buildx/version.Version=$(shell sed -n 's:.*docker/buildx \(v[^ ]*\).*:\1:p' tools/docker/go.mod)))
# Helm asks the API server for its version. A static program needs no compiler of C.
$(eval $(call tool_rule,kubernetes,$(KUBERNETES_BIN),-ldflags='-s -w -X=k8s.io/component-base/version.gitVersion=$(shell sed -n 's:.*k8s.io/kubernetes \(v[^ ]*\).*:\1:p' tools/kubernetes/go.mod)'))
$(eval $(call tool_rule,keda,$(KEDA_BIN),-ldflags='-s -w'))
$(KUBERNETES_BIN)/.built $(KEDA_BIN)/.built: export CGO_ENABLED = 0
# KEDA's definitions and roles lie in its module.
$(KEDA_BIN)/config: $(KEDA_BIN)/.built
	@rm -rf $@ $@.new
	@cp -r --no-preserve=mode "$$(GOWORK=off go -C tools/keda list -m -f '{{.Dir}}' github.com/kedacore/keda/v2)/config" $@.new
	@mv $@.new $@
# Prometheus finds its targets in Consul. Its other ways, which Kubernetes and clouds have, take minutes to build.
consul_only := -tags remove_all_sd,enable_consul_sd
$(eval $(call tool_rule,prometheus,$(PROMETHEUS_BIN),$(consul_only)))

# The folder's name says the requirements, so a clone that is newer than it is no reason to build it again.
# $(1): the folder, $(2): the requirements, $(3): the oldest minor version of Python 3, $(4): the newest, if any.
define python_rule
$(1)/.built:
	@echo "== $(2): install (kept in $$(@D))" >&2
	@$(PYTHON) -c 'import sys, ensurepip, venv; sys.exit(not (3, $(3)) <= sys.version_info[:2] <= (3, $(or $(4),99)))' 2>/dev/null \
	  || { echo "Python 3.$(3) $(if $(4),to 3.$(4),or newer) with venv is missing (Debian: apt-get install python3-venv); PYTHON=<program> says another one" >&2; exit 1; }
	@$(PYTHON) -m venv $$(@D)
	@$$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --prefer-binary --requirement $(2) >$$(@D)/log 2>&1 \
	  || { echo "pip cannot install the packages of $(2); $$(@D)/log has its output" >&2; exit 1; }
	@touch $$@
endef
$(eval $(call python_rule,$(PYTHON_ENV),sdk/python/requirements-dev.txt,9))
$(eval $(call python_rule,$(ONNX_PYTHON),services/onnx/requirements-dev.txt,11))
$(eval $(call python_rule,$(RELEASE_PYTHON),tools/release/requirements.txt,9))
$(eval $(call python_rule,$(GRPC_PYTHON),proto/requirements.txt,9))
$(eval $(call python_rule,$(MODELS_PYTHON),test/modelstest/requirements.txt,11))
$(eval $(call python_rule,$(CLIENTS_PYTHON),$(CLIENTS)/python/requirements.txt,11,12))
$(foreach peer,$(PEERS) ocr,$(eval $(call python_rule,$(call PEER_PYTHON,$(peer)),bench/peers/$(peer).txt,10)))

# npm looks into the lock file alone, and runs nothing of what it installs.
# $(1): the folder, $(2): where the package file and its lock are.
define node_rule
$(1)/.built:
	@echo "== $(2): install (kept in $$(@D))" >&2
	@command -v node >/dev/null && command -v npm >/dev/null \
	  || { echo "Node with npm is missing (Debian: apt-get install nodejs npm)" >&2; exit 1; }
	@mkdir -p $$(@D) && cp $(2)/package.json $(2)/package-lock.json $$(@D)
	@cd $$(@D) && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error >/dev/null
	@touch $$@
endef
$(eval $(call node_rule,$(CLIENTS_NODE),$(CLIENTS)/node))
$(eval $(call node_rule,$(TYPESCRIPT_NODE),sdk/typescript))

# Generates the gRPC code for Python into the folder $(1). Its package is stagemesh_grpc, because stagemesh is the package of sdk/python.
generate_python = rm -rf $(1) && mkdir -p $(1) \
  && $(GRPC_PYTHON)/bin/python -m grpc_tools.protoc -Iproto --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) proto/stagemesh/inference/v1/*.proto \
  && mv $(1)/stagemesh $(1)/stagemesh_grpc \
  && find $(1) -name '*.py*' -exec sed -i.old 's/^from stagemesh\./from stagemesh_grpc./' {} + && find $(1) -name '*.old' -delete

# Compiles sdk/typescript into the folder $(1). The compiler looks for node_modules beside a copy of the sources.
compile_typescript = copy=$$(mktemp -d); trap 'rm -rf "$$copy"' EXIT; \
  cp -r sdk/typescript/src sdk/typescript/tsconfig.json sdk/typescript/package.json "$$copy"; \
  ln -s $(TYPESCRIPT_NODE)/node_modules "$$copy/node_modules"; \
  node $(TYPESCRIPT_NODE)/node_modules/typescript/bin/tsc --project "$$copy" --outDir $(1)

# --- Every day ------------------------------------------------------------

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: run
run: ## Run the whole mesh with its example pipeline in one process (ONCE=1 exits after the table)
	@[ -e bin/digits ] || echo "== build (the first time takes a few minutes)"
	@go build -o bin/digits ./examples/digits/demo
	@exec $(RUN)

.PHONY: stack
stack: ## Run docker-compose.yml without Docker, all but Grafana (SCALE=classify=3, or SCALER=1 for as many hosts as are wanted)
	@go build -o bin/stack ./deploy/local
	@programs=$$($(MAKE) --no-print-directory stack-programs) && IFS=$$'\n' && exec bin/stack --scale '$(SCALE)' $(if $(SCALER),--scaler) $$programs

.PHONY: quick
quick: build vet test-plain python-quick ## Build, vet and test without the race detector; under a minute when warm

CHECKS := lint vet proto-lint proto-breaking check-generated check-tidy python-lint test-race python-test test-clients test-browser test-traces test-stack test-chart test-release bench-short test-fleet docker-where-possible

.PHONY: setup
setup: ## Install what the tests need and this machine lacks, with apt-get, dnf or Homebrew
	@.ci/setup --install

.PHONY: test
test: ## Run every check there is, those after a failure too; what CI runs
	@.ci/setup
	@$(MAKE) --no-print-directory --keep-going $(CHECKS)

.PHONY: lint
lint: $(LINT_BIN)/.built ## Run the linters and check the formatting of the Go code
	@echo "== lint"
	@$(golangci_lint) run $(PACKAGES)

.PHONY: format
format: $(LINT_BIN)/.built $(BUF_BIN)/.built ## Format the Go code and the protobuf files
	@$(golangci_lint) fmt $(PACKAGES)
	@$(buf) format --write

.PHONY: generate
generate: $(BUF_BIN)/.built $(TYPESCRIPT_NODE)/.built $(GRPC_PYTHON)/.built ## Regenerate proto/gen and the code of sdk/typescript from the protobuf files
	@$(buf) generate
	@$(buf) generate --template sdk/typescript/buf.gen.yaml
	@$(call generate_python,proto/gen/python)
	@$(MAKE) --no-print-directory typescript

.PHONY: typescript
typescript: $(TYPESCRIPT_NODE)/.built ## Compile sdk/typescript into its dist, which is committed
	@rm -rf sdk/typescript/dist
	@$(call compile_typescript,$(CURDIR)/sdk/typescript/dist)

.PHONY: docs-viewer
docs-viewer: ## Fetch the viewer of the page /docs again, or its VERSION, and write its lock (needs npm)
	@internal/openapi/update.sh

.PHONY: fuzz
fuzz: ## Run every fuzz target for FUZZTIME (default 30s)
	@go test -list '^Fuzz' $(PACKAGES) \
	  | awk '/^Fuzz/ { names[n++] = $$1 } /^ok/ { for (i = 0; i < n; i++) print $$2, names[i]; n = 0 }' \
	  | while read -r package name; do \
	      echo "== fuzz $$package $$name"; \
	      go test -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME) "$$package" </dev/null; \
	    done

.PHONY: soak
soak: $(CONSUL_BIN)/.built ## A million lines in one body, then the long forms of test-fleet, with ten minutes of mixed faults; a line for each figure
	@go test -vet=off -count=1 -run TestManyLinesTakeConstantMemory ./internal/front/rest -args -lines 1000000
	@go test -vet=off -count=1 -v -timeout 150m $(FLEET) -args -soak | awk '/^=== / { next } { print }'

.PHONY: batch-grid
batch-grid: ## Simulate the adaptive mode of batches under all loads, ten minutes; make quick simulates a few
	@go test -vet=off -count=1 -v -timeout 60m -run TestAdaptiveIsAsGood ./internal/batch -args -whole-grid

.PHONY: bench
bench: bin/bench ## Run the standard suite, under 50 minutes, and write docs/performance.md (ITEMS=1,5 QUICK=1)
	@bin/bench suite $(if $(QUICK),--quick) $(ITEMS:%=--only %)

.PHONY: bench-peers
bench-peers: bin/bench $(foreach peer,$(PEERS),$(call PEER_PYTHON,$(peer))/.built) ## Install MOSEC, BentoML and Ray Serve, and measure them in turns with a mesh, in half an hour (QUICK=1)
	@mkdir -p bin/peers
	@$(foreach peer,$(PEERS),ln -sfn $(call PEER_PYTHON,$(peer)) bin/peers/$(peer);)
	@bin/bench suite $(if $(QUICK),--quick) --only 13,14

# What bench-ocr runs for each server.
OCR = bin/bench run ocr examples/ocr/pictures/*.* --mesh examples/ocr/mesh.yaml --protocol http --concurrency 1,8,32 \
  --pairs $(if $(QUICK),1,5) --warmup 2s --duration $(if $(QUICK),5s,15s) --peer

.PHONY: bench-ocr
bench-ocr: bin/bench $(call PEER_PYTHON,ocr)/.built ## Measure examples/ocr in turns with rapidocr in one process, MOSEC, BentoML and Ray Serve, in forty minutes (QUICK=1)
	@export PATH="$(call PEER_PYTHON,ocr)/bin:$$PATH"; python3 examples/ocr/prepare.py examples/ocr/models; \
	  for server in rapidocr mosec-ocr bentoml-ocr ray-ocr; do echo "== $$server"; $(OCR) "python3 bench/peers/run.py $$server ocr"; done

.PHONY: bench-short
bench-short: bin/bench ## Measure one ratio of the suite in half a minute; fails if it is far too low
	@echo "== bench, one ratio"
	@bin/bench suite --short

.PHONY: bench-page
bench-page: bin/bench ## Write docs/performance.md and its pictures from bench/results.json
	@bin/bench suite --render

# The Go tool knows whether they are up to date. Results name the commit.
.PHONY: bin/stagemesh bin/bench
bin/stagemesh:
	@CGO_ENABLED=0 go build -buildvcs=auto -o $@ ./services/cmd/stagemesh

bin/bench:
	@go build -buildvcs=auto -o $@ ./bench

.PHONY: bench-go
bench-go: ## Run the benchmarks in Go (BENCH=regexp COUNT=n BENCHTIME=t); the output suits benchstat
	@packages=$$(go list -f '{{.ImportPath}} {{.Dir}}' $(PACKAGES) | while read -r package dir; do \
	      if grep -qs '^func Benchmark' "$$dir"/*_test.go; then echo "$$package"; fi; done); \
	  if [ -z "$$packages" ]; then echo "no package has benchmarks"; exit 0; fi; \
	  go test -run '^$$' -bench '$(BENCH)' -benchmem -count $(COUNT) -benchtime $(BENCHTIME) $$packages

.PHONY: benchstat
benchstat: $(BENCH_BIN)/.built ## Compare two outputs of bench-go: make benchstat OLD=a.txt NEW=b.txt
	@$(BENCH_BIN)/benchstat $(OLD) $(NEW)

.PHONY: tools
tools: $(BUF_BIN)/.built $(LINT_BIN)/.built $(BENCH_BIN)/.built $(GRPCURL_BIN)/.built $(H2SPEC_BIN)/.built $(CONSUL_BIN)/.built $(JAEGER_BIN)/.built $(PROMETHEUS_BIN)/.built $(AUDIT_BIN)/.built ## Build all tools and print where they are
	@printf '%s\n' $(^D)

.PHONY: grpcurl
grpcurl: $(GRPCURL_BIN)/.built ## Build grpcurl and print its path
	@echo $(GRPCURL_BIN)/grpcurl

.PHONY: jaeger
jaeger: $(JAEGER_BIN)/.built ## Build Jaeger for tests and print its path (minutes, the first time)
	@echo $(JAEGER_BIN)/jaeger

.PHONY: consul
consul: $(CONSUL_BIN)/.built ## Build a Consul agent for tests and print its path (minutes, the first time)
	@echo $(CONSUL_BIN)/consul

.PHONY: stack-programs
stack-programs: $(STACK_TOOLS) bin/stagemesh ## Build what the stack runs and print the paths (minutes, the first time)
	@CGO_ENABLED=0 go build -o bin/nats github.com/nats-io/nats-server/v2
	@printf '%s\n' "$(CURDIR)/bin/stagemesh" "$(CURDIR)/bin/nats" $(CONSUL_BIN)/consul $(JAEGER_BIN)/jaeger $(PROMETHEUS_BIN)/prometheus $(PROMETHEUS_BIN)/promtool

.PHONY: docker-tools
docker-tools: $(DOCKER_BIN)/.built ## Build Compose and buildx for tests and print their paths (minutes, the first time)
	@printf '%s\n' $(DOCKER_BIN)/cmd $(DOCKER_BIN)/buildx

.PHONY: kubernetes-programs
kubernetes-programs: $(KUBERNETES_BIN)/.built $(KEDA_BIN)/config bin/stagemesh ## Build Kubernetes, CoreDNS, KEDA and what pods run for tests and print the paths (half an hour, the first time)
	@CGO_ENABLED=0 go build -o bin/nats github.com/nats-io/nats-server/v2
	@CGO_ENABLED=0 GOWORK=off go -C tools/kubernetes build -o $(CURDIR)/bin/pause ./pause
	@CGO_ENABLED=0 GOWORK=off go -C tools/coredns build -ldflags='-s -w' -o $(CURDIR)/bin/coredns .
	@printf '%s\n' $(addprefix $(KUBERNETES_BIN)/,server kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy) $(addprefix $(KEDA_BIN)/,operator adapter config) "$(CURDIR)/bin/stagemesh" "$(CURDIR)/bin/nats" "$(CURDIR)/bin/pause" "$(CURDIR)/bin/coredns"

.PHONY: clients
clients: $(CLIENTS_PYTHON)/.built $(CLIENTS_NODE)/.built $(GRPCURL_BIN)/.built $(H2SPEC_BIN)/.built ## Install the clients of other servers for tests and print where they are
	@printf '%s\n' $(CLIENTS_PYTHON)/bin/python $(CLIENTS_NODE)/node_modules $(GRPCURL_BIN)/grpcurl $(H2SPEC_BIN)/h2spec

.PHONY: typescript-node
typescript-node: $(TYPESCRIPT_NODE)/.built ## Install the dependencies of sdk/typescript and print their folder
	@echo $(TYPESCRIPT_NODE)/node_modules

.PHONY: onnxruntime
onnxruntime: $(ONNX_PYTHON)/.built ## Install onnxruntime for tests and print the path of its Python
	@echo $(ONNX_PYTHON)/bin/python

.PHONY: models-python
models-python: $(MODELS_PYTHON)/.built ## Install the libraries of the examples' models for tests and print the path of their Python
	@echo $(MODELS_PYTHON)/bin/python

.PHONY: torch-python
torch-python: ## Print the path of a Python with PyTorch, for tests
	@$(TORCH_PYTHON) -c 'import torch' 2>/dev/null \
	  || { echo "PyTorch is missing (Debian: apt-get install python3-torch); TORCH_PYTHON=<program> says which Python has it" >&2; exit 1; }
	@command -v $(TORCH_PYTHON)

.PHONY: release
release: $(RELEASE_BIN)/.built $(RELEASE_PYTHON)/.built ## Build a release of this commit into dist, without publishing it: make release VERSION=v0.1.0
	@GOWORK=off go -C tools/release build -o $(CURDIR)/bin/release .
	@go test -vet=off -count=1 -run 'Licences' ./test/archtest
	@bin/release -version '$(VERSION)' -out 'dist/$(VERSION)' -sbom $(RELEASE_BIN)/cyclonedx-gomod -python $(RELEASE_PYTHON)/bin/python

.PHONY: clean
clean: ## Remove build outputs, profiles and coverage from the tree
	rm -rf bin dist coverage coverage.out coverage.html cover.out
	find . -type f \( -name '*.test' -o -name '*.prof' -o -name '*.pprof' \) -not -path './.git/*' -delete

# --- The steps of the above -----------------------------------------------

.PHONY: build
build: ## Compile every package
	@echo "== build"
	@go build $(PACKAGES)

.PHONY: vet
vet: ## Run go vet
	@echo "== vet"
	@go vet $(PACKAGES)

# go vet is a step of its own wherever these two are called.
.PHONY: test-plain
test-plain: ## Run the tests without the race detector, but for the slow ones
	@echo "== test"
	@go test -vet=off $(filter-out $(SLOW),$(UNITS))

# A process with the race detector sleeps for a second at its end, unless told otherwise. Garbage collection takes
# a quarter of the CPU time of some tests by default; GOMEMLIMIT bounds the memory that fewer collections cost.
RACE_ENV := GORACE=atexit_sleep_ms=0 GOGC=400 GOMEMLIMIT=2GiB CGO_ENABLED=1
# $(1): flags, $(2): packages.
go_test = go test -vet=off $(1) $(2) || status=$$?

# The packages are compiled first, without linking programs. The slow ones then run one at a time: they run
# whole meshes, which miss deadlines when several share two cores.
.PHONY: test-race
test-race: $(CONSUL_BIN)/.built $(ONNX_PYTHON)/.built $(MODELS_PYTHON)/.built ## Run the tests with the race detector, those of PLAIN without (needs a C compiler)
	@echo "== test with the race detector"
	@CGO_ENABLED=1 go build -race $$(go list -f '{{if and .GoFiles (ne .Name "main")}}{{.ImportPath}}{{end}}' $(PACKAGES))
	@status=0; $(call go_test,,$(filter-out $(SLOW),$(filter $(PLAIN),$(UNITS)))); \
	  $(call go_test,-p 1 -timeout 20m,$(filter $(SLOW),$(filter $(PLAIN),$(UNITS)))); export $(RACE_ENV); \
	  $(call go_test,-race,$(filter-out $(SLOW) $(PLAIN),$(UNITS))); \
	  $(call go_test,-race -p 1 -timeout 20m,$(filter-out $(PLAIN),$(filter $(SLOW),$(UNITS)))); exit $$status

.PHONY: test-workers
test-workers: ## Kill, freeze and mislead the worker processes of a mesh while requests flow
	@echo "== test workers"
	@go test -vet=off -count=1 $(WORKERS)

.PHONY: test-clients
test-clients: $(CLIENTS_PYTHON)/.built $(CLIENTS_NODE)/.built $(TYPESCRIPT_NODE)/.built $(GRPCURL_BIN)/.built $(H2SPEC_BIN)/.built ## Ask a mesh with clients of other servers: tritonclient, Node, grpcurl, h2spec, schemathesis, curl; load models on MLServer
	@echo "== test with other servers' clients"
	@go test -vet=off -count=1 $(CLIENTS)

.PHONY: test-fleet
test-fleet: $(CONSUL_BIN)/.built ## Kill, pause and restart the processes of a mesh, and its registry, while requests flow
	@echo "== test the fleet"
	@go test -vet=off -count=1 -timeout 20m $(FLEET)

# The last release, or the last commit before pipelines had blocks while there is none.
EARLIER ?= $(or $(shell git describe --tags --abbrev=0 2>/dev/null),f53c7a3)
# Its tree is kept outside this one.
EARLIER_TREE = $(dir $(CONSUL_BIN))earlier-$(EARLIER)

.PHONY: test-versions
test-versions: $(CONSUL_BIN)/.built ## Upgrade a mesh from EARLIER (the last release) to this commit and back while requests, streams and jobs flow; needs git's history
	@echo "== test this version beside $(EARLIER)"
	@git cat-file -e $(EARLIER)^{commit} || { echo "the history of this clone has no $(EARLIER): fetch it (git fetch --unshallow --tags), or say EARLIER=<commit>" >&2; exit 1; }
	@rm -rf $(EARLIER_TREE) && mkdir -p $(EARLIER_TREE) && git archive $(EARLIER) | tar -x -C $(EARLIER_TREE)
	@go -C $(EARLIER_TREE) test -vet=off -c -o fleet.test $(FLEET)
	@go test -vet=off -count=1 -v -timeout 20m -run '^TestUpgrade' $(FLEET) -args -earlier $(EARLIER_TREE)/fleet.test | awk '/^=== / { next } { print }'

.PHONY: test-stack
test-stack: $(STACK_TOOLS) ## Check the compose files and the alerts, and run the stack: digits, targets, scaling, dashboards
	@echo "== test the stack"
	@go test -vet=off -count=1 -skip '^TestDocker' $(STACK)

.PHONY: test-docker
test-docker: ## Run the compose files on a Docker engine of its own; needs root on Linux
	@lack=$$(.ci/docker) || { echo "test-docker cannot run here: $$lack" >&2; exit 1; }
	@$(MAKE) --no-print-directory stack-programs $(DOCKER_BIN)/.built $(ONNX_PYTHON)/.built >/dev/null
	@echo "== test on Docker"
	@go test -vet=off -count=1 -run '^TestDocker' $(STACK)

.PHONY: docker-where-possible
docker-where-possible: ## Run test-docker where it can run, else say what is missing
	@if lack=$$(.ci/docker); then $(MAKE) --no-print-directory test-docker; else echo "== test on Docker: not run: $$lack"; fi

.PHONY: test-traces
test-traces: $(JAEGER_BIN)/.built ## Check the traces that a real Jaeger gets
	@echo "== test traces"
	@go test -vet=off -count=1 -race $(TRACES)

.PHONY: test-chart
test-chart: ## Render the Helm chart with all of its values, and check what comes out
	@echo "== test the chart"
	@GOWORK=off go -C tools/chart vet ./...
	@GOWORK=off go -C tools/chart test -vet=off .

.PHONY: test-kubernetes
test-kubernetes: ## Install the chart in a Kubernetes cluster of its own; needs root on Linux
	@lack=$$(.ci/kubernetes) || { echo "test-kubernetes cannot run here: $$lack" >&2; exit 1; }
	@$(MAKE) --no-print-directory kubernetes-programs >/dev/null
	@GOWORK=off go -C tools/keda mod tidy -diff
	@echo "== test on Kubernetes"
	@GOWORK=off go -C tools/chart test -count=1 -v -timeout 20m ./cluster

.PHONY: test-release
test-release: ## Check the parts of which make release is made: notes, archives, images
	@echo "== test the release"
	@GOWORK=off go -C tools/release vet .
	@GOWORK=off go -C tools/release test -vet=off .

.PHONY: test-browser
test-browser: ## Hold what a gateway says of itself against what it does, in a real browser too (needs Chromium)
	@echo "== test the page"
	@go test -vet=off -count=1 $(BROWSER)

.PHONY: proto-lint
proto-lint: $(BUF_BIN)/.built ## Lint the protobuf files and check their formatting
	@echo "== proto-lint"
	@$(buf) lint
	@$(buf) format --diff --exit-code

.PHONY: proto-breaking
proto-breaking: $(BUF_BIN)/.built ## Check that the protobuf files break no client of the baseline
	@echo "== proto-breaking"
	@[ -f $(BASELINE) ] || { echo "$(BASELINE) is missing: make proto-baseline"; exit 1; }
	@$(buf) breaking --against $(BASELINE)

.PHONY: proto-baseline
proto-baseline: $(BUF_BIN)/.built ## Rewrite the baseline of proto-breaking; only for a release or an intended break
	@$(buf) build --path proto/stagemesh --exclude-source-info --output $(BASELINE)

.PHONY: python-lint
python-lint: $(PYTHON_ENV)/.built ## Lint sdk/python and the examples in Python, and check types and formatting
	@echo "== python-lint"
	@cd sdk/python && $(PYTHON_ENV)/bin/ruff check --quiet --no-cache --config pyproject.toml . $(PYTHON_OTHERS:%=../../%)
	@cd sdk/python && $(PYTHON_ENV)/bin/ruff format --quiet --no-cache --diff --config pyproject.toml . $(PYTHON_OTHERS:%=../../%)
	@[ -e $(PYTHON_ENV)/bin/mypy ] || { echo "mypy needs Python 3.11 or newer: PYTHON=<program> says which" >&2; exit 1; }
	@cd sdk/python && $(PYTHON_ENV)/bin/mypy --no-error-summary --cache-dir $(PYTHON_ENV)/mypy

python_tests = PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$(CURDIR)/sdk/python" $(PYTHON_ENV)/bin/python -W error::ResourceWarning -m unittest

# What python-test begins with, because it takes longest.
LONGEST := test_testing test_process test_client

.PHONY: python-test
python-test: $(PYTHON_ENV)/.built ## Test sdk/python, and the examples in Python with it
	@echo "== python-test"
	@cd sdk/python && printf 'tests.%s\n' $(LONGEST) $(filter-out $(LONGEST),$(basename $(notdir $(wildcard sdk/python/tests/test_*.py)))) | xargs -P 3 -n 1 sh -c ' \
	  out=$$($(python_tests) --buffer --quiet "$$0" 2>&1) && echo "$$0: $$(echo "$$out" | grep ^Ran)" || { printf "%s\n" "$$0" "$$out"; exit 1; }'
	@for folder in $(PYTHON_EXAMPLES); do \
	    if compgen -G "$$folder/test_*.py" >/dev/null; then echo "$$folder"; (cd $$folder && $(python_tests) discover --buffer --quiet); fi; \
	  done

.PHONY: python-quick
python-quick: $(PYTHON_ENV)/.built ## Test sdk/python without processes of its own
	@echo "== python-quick"
	@cd sdk/python && $(python_tests) --buffer --quiet tests.test_arrays tests.test_batches tests.test_declarations tests.test_faults tests.test_frames tests.test_items tests.test_vectors

.PHONY: python-bench
python-bench: ## Measure what sdk/python costs a batch, against a raw socket (needs Python only)
	@$(PYTHON) sdk/python/bench/echo.py

# Generates into an empty folder, so files that git does not track, or that no
# protobuf file stands behind any more, are differences too.
.PHONY: check-generated
check-generated: $(BUF_BIN)/.built $(TYPESCRIPT_NODE)/.built $(GRPC_PYTHON)/.built ## Check that proto/gen and the code of sdk/typescript are what the protobuf files and sources generate
	@echo "== check-generated"
	@out=$$(mktemp -d); trap 'rm -rf "$$out"' EXIT; \
	  $(buf) generate --output "$$out"; \
	  $(buf) generate --template sdk/typescript/buf.gen.yaml --output "$$out"; \
	  { $(call generate_python,"$$out/proto/gen/python"); } || exit 1; \
	  for folder in proto/gen sdk/typescript/src/gen; do \
	    diff -r -x __pycache__ $$folder "$$out/$$folder" || { echo "$$folder is out of date: make generate"; exit 1; }; \
	  done
	@out=$$(mktemp -d); $(call compile_typescript,"$$out"); \
	  diff -r sdk/typescript/dist "$$out" || { echo "sdk/typescript/dist is out of date: make typescript"; exit 1; }; rm -r "$$out"

.PHONY: audit
audit: $(AUDIT_BIN)/.built ## Report known vulnerabilities of what is linked; needs their database on the network, so it is no part of test
	@$(AUDIT_BIN)/govulncheck . ./services/cmd/stagemesh ./sdk/go/...

.PHONY: check-tidy
check-tidy: ## Check that every go.mod and go.sum is tidy
	@echo "== check-tidy"
	@for module in $(MODULES) $(TOOL_MODULES); do \
	    GOWORK=off go -C $$module mod tidy -diff || { echo "$$module/go.mod is not tidy: GOWORK=off go -C $$module mod tidy"; exit 1; }; \
	  done
