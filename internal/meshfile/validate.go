package meshfile

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"reflect"
	"slices"
	"strings"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"

	"github.com/stagemesh/stagemesh/internal/admission"
	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/pipelines"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/schema"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Validate checks everything that can be checked without starting anything: of the
// files that it names only JSON Schemas, and what its kinds of runners
// read to be made.
func (f *File) Validate() error {
	hosts, routes, err := f.buildParts(f.StageNames())
	return errors.Join(err, f.validateShown(), f.validatePorts(), f.validateFit(hosts, routes), f.validateOrder(hosts, routes))
}

// validateShown rejects a certificate without a port to show it on. `stagemesh stage` may
// have the address from a flag, so it does not check this.
func (f *File) validateShown() error {
	var errs []error
	for _, name := range f.StageNames() {
		if s := f.Stages[name]; s.CertFile != "" && s.Listen == "" {
			errs = append(errs, f.At(errors.New("cert_file: requires listen"), "stages", name))
		}
	}
	return errors.Join(errs...)
}

// validatePorts rejects a port that two listen on. Stages count where no other process can serve
// them.
func (f *File) validatePorts() error {
	type listener struct {
		path        []string
		key, listen string
	}
	all := []listener{
		{[]string{"gateway"}, "listen", cmp.Or(f.Gateway.Listen, DefaultListen)},
		{[]string{"gateway"}, "grpc_listen", f.Gateway.GRPCListen},
		{[]string{"gateway", "admin"}, "listen", cmp.Or(f.Gateway.Admin.Listen, DefaultAdmin)},
		{[]string{"ops"}, "listen", f.OpsListen()},
		{[]string{"gateway", "scaler"}, "listen", f.scalerListen()},
		{[]string{"nats"}, "listen", f.NATS.Listen},
	}
	for _, name := range f.StageNames() {
		if !f.Joinable() {
			all = append(all, listener{[]string{"stages", name}, "listen", f.Stages[name].Listen})
		}
	}
	isAll := func(host string) bool { return host == "" || host == "0.0.0.0" || host == "::" }
	var errs []error
	for i, one := range all {
		host, port, err := net.SplitHostPort(one.listen)
		if err != nil || port == "0" {
			continue // an error of its own, or none
		}
		for _, other := range all[:i] {
			otherHost, otherPort, err := net.SplitHostPort(other.listen)
			if err == nil && port == otherPort && (host == otherHost || isAll(host) || isAll(otherHost)) {
				errs = append(errs, f.At(fmt.Errorf("%s: %s is also that of %s.%s; choose another port", one.key, one.listen, strings.Join(other.path, "."), other.key), one.path...))
				break
			}
		}
	}
	return errors.Join(errs...)
}

// scalerListen is the address of the scaler's port; empty where there is none.
func (f *File) scalerListen() string {
	if f.Gateway.Scaler == nil {
		return ""
	}
	return f.Gateway.Scaler.Listen
}

// validateOrder rejects a step that is wired to a part that only a later step makes. What callers
// send for the first step may have any other name.
func (f *File) validateOrder(hosts []stagehost.Settings, routes []pipeline.Pipeline) error {
	made, taken := map[pipeline.StageName][]string{}, map[pipeline.StageName][]string{}
	for _, host := range hosts {
		for _, part := range slices.Concat(host.Runner.Spec().Outputs, host.Outputs) {
			made[host.Stage] = append(made[host.Stage], part.Name)
		}
		for _, part := range slices.Concat(host.Runner.Spec().Inputs, host.Inputs) {
			taken[host.Stage] = append(taken[host.Stage], part.Name)
		}
	}
	var errs []error
	for _, route := range routes {
		if route.HasBlocks() {
			continue // validateFit knows what is given where
		}
		first := slices.AppendSeq(slices.Clone(taken[route.Steps[0].Stage]), maps.Values(route.Steps[0].Inputs))
		for i, step := range route.Steps {
			for _, input := range slices.Sorted(maps.Keys(step.Inputs)) {
				source := step.Inputs[input]
				makes := func(s pipeline.Step) bool { return slices.Contains(made[s.Stage], source) }
				unknown := func(s pipeline.Step) bool { return len(made[s.Stage]) == 0 }
				later := slices.IndexFunc(route.Steps[i+1:], makes)
				if later < 0 || i > 0 && slices.Contains(first, source) || slices.ContainsFunc(route.Steps[:i], makes) || slices.ContainsFunc(route.Steps[:i], unknown) {
					continue
				}
				err := fmt.Errorf("steps[%d].inputs.%s: the part %s is made by the later step %s; change the order of the steps, or the name", i, input, source, route.Steps[i+1+later].Name)
				errs = append(errs, f.At(err, "pipelines", string(route.Name)))
			}
		}
	}
	return errors.Join(errs...)
}

// validateFit checks valid pipelines against the specs of its stages. Many
// runners have a spec only once they have started.
func (f *File) validateFit(hosts []stagehost.Settings, routes []pipeline.Pipeline) error {
	stages := knownStages(hosts, routes)
	var errs []error
	for _, route := range routes {
		for _, problem := range pipelines.Check(route, stages, cmp.Or(f.Gateway.MaxPayload, admission.DefaultMaxPayload)) {
			if problem.GetSeverity() == adminv1.PipelineSeverity_PIPELINE_SEVERITY_ERROR {
				errs = append(errs, f.At(fmt.Errorf("%s: %s", problem.GetField(), problem.GetMessage()), "pipelines", string(route.Name)))
			}
		}
	}
	return errors.Join(errs...)
}

// Trees returns each pipeline of a valid file as a tree, with what its steps read and give as far as
// that is known before the stages run.
func (f *File) Trees() (string, error) {
	hosts, routes, err := f.buildParts(f.StageNames())
	if err != nil {
		return "", err
	}
	var out strings.Builder
	for _, route := range routes {
		out.WriteString(pipelines.Tree(route, knownStages(hosts, routes)))
	}
	return out.String(), nil
}

// knownStages returns the stages of the pipelines. They have the specs of the hosts; stages
// of other processes have none.
func knownStages(hosts []stagehost.Settings, routes []pipeline.Pipeline) map[pipeline.StageName]pipelines.Stage {
	out := map[pipeline.StageName]pipelines.Stage{}
	for _, route := range routes {
		for _, step := range route.StageSteps() {
			out[step.Stage] = pipelines.Stage{Served: true}
		}
	}
	for _, host := range hosts {
		described := stagehost.Description{Spec: specOf(host), Limits: stagehost.Limits{MaxBytes: host.Batch.MaxBytes}}
		known := pipelines.Stage{Served: true, Durabilities: host.Queue.Durabilities}
		known.Spec, known.Limits = described.Published()
		out[host.Stage] = known
	}
	return out
}

// specOf returns the spec of a stage as far as it is known before its runner has started.
// The parts of the file alone may be incomplete.
func specOf(host stagehost.Settings) runner.Spec {
	spec := host.Runner.Spec()
	spec.Stream = spec.Stream || host.Batch.Mode == batch.Stream
	if complete, err := schema.Complete(spec, writtenParts(spec.Inputs, host.Inputs), writtenParts(spec.Outputs, host.Outputs)); err == nil {
		return complete
	}
	return spec
}

// writtenParts returns the parts of the file if the runner describes some itself.
func writtenParts(described, written []runner.PartSpec) []runner.PartSpec {
	if len(described) == 0 {
		return nil
	}
	return written
}

// ValidatePart is Validate for a process that runs these stages and a gateway.
// Settings of other stages' runners are not looked at: what they name may be on
// other machines.
func (f *File) ValidatePart(stages []string) error {
	_, _, err := f.buildParts(stages)
	return err
}

// ValidateWithoutBroker returns an error for each key that asks for what a process without a broker
// does not have.
func (f *File) ValidateWithoutBroker() error {
	nats := f.NATS
	nats.Insecure = false // a flag is for all ports
	var errs []error
	refuse := func(isAsked bool, key ...string) {
		if isAsked {
			errs = append(errs, f.At(errors.New("needs a broker, and stagemesh serve has none; leave it out, or run the file with stagemesh up -c"), key...))
		}
	}
	for key, section := range map[string]any{
		"nats": nats, "results": f.Results, "dead_letters": f.DeadLetters, "idempotency": f.Idempotency, "jobs": f.Jobs,
	} {
		refuse(!reflect.ValueOf(section).IsZero(), key)
	}
	refuse(len(f.Models) > 0, "models")
	refuse(len(f.Aliases) > 0, "aliases")
	refuse(f.Registry.Consul != nil || f.Registry.NATS != nil, "registry")
	refuse(f.LocalHops != nil && !*f.LocalHops, "local_hops")
	for name, p := range f.Pipelines {
		refuse(p.Durability == pipeline.File, "pipelines", name, "durability")
	}
	for name, s := range f.Stages {
		refuse(s.Models != nil, "stages", name, "models")
		refuse(!has(s.Queue.Durabilities, pipeline.Memory), "stages", name, "queue", "durabilities")
	}
	if len(f.Stages) != 1 {
		errs = append(errs, f.At(fmt.Errorf("stagemesh serve runs one stage, and these are %d; a mesh of several passes items by its broker, run it with stagemesh up -c", len(f.Stages)), "stages"))
	}
	slices.SortFunc(errs, func(a, b error) int { return cmp.Compare(a.Error(), b.Error()) })
	return errors.Join(errs...)
}

// buildParts is ValidatePart that returns what it has made: a host of each of the stages
// that has a runner, and the valid pipelines.
func (f *File) buildParts(stages []string) (hosts []stagehost.Settings, routes []pipeline.Pipeline, err error) {
	errs := []error{
		f.validateShared(),
		f.At(f.Gateway.Validate(), "gateway"),
		f.At(config.Address("listen", f.Gateway.Admin.Listen), "gateway", "admin"),
		f.At(f.Ops.validate(), "ops"),
	}
	if len(f.Stages) == 0 {
		errs = append(errs, f.At(errors.New("at least one is required"), "stages"))
	}
	for _, name := range stages {
		host, err := f.Host(name)
		if host.Runner != nil {
			hosts = append(hosts, host)
		}
		if err == nil && f.Registry.None && f.Stages[name].Models != nil {
			err = f.At(errors.New("models: need a registry; remove registry.none"), "stages", name)
		}
		errs = append(errs, err)
	}
	for _, name := range slices.Sorted(maps.Keys(f.Pipelines)) {
		errs = append(errs, f.At(f.validateQueue(name), "pipelines", name))
		if longest := cmp.Or(f.Gateway.MaxTimeout, call.DefaultMaxTimeout); f.Pipelines[name].Timeout > longest {
			errs = append(errs, f.At(fmt.Errorf("timeout: %s is more than the %s of gateway.max_timeout", f.Pipelines[name].Timeout, longest), "pipelines", name))
		}
	}
	routes, err = f.Routes()
	_, _, loadable := f.models()
	return hosts, routes, errors.Join(append(errs, err, loadable, f.validateOpenAI(), f.validateOwnBroker())...)
}

// validateOpenAI checks that each model of the section openai has a valid name, and a pipeline of the
// file or one that is there without it.
func (f *File) validateOpenAI() error {
	var errs []error
	kinds := f.OpenAI.Kinds()
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		for _, name := range slices.Sorted(maps.Keys(kinds[kind])) {
			err := model.ID(name).Validate()
			if err == nil {
				err = f.checkServed(kinds[kind][name])
			}
			errs = append(errs, f.At(err, "openai", kind, name))
		}
	}
	return errors.Join(errs...)
}

// checkServed returns an error if gateways serve no pipeline of that name, as far as the file says.
func (f *File) checkServed(name string) error {
	_, here := f.Pipelines[name]
	stage, isStage := pipeline.StageOf(pipeline.Name(name))
	isImplicit := isStage || strings.HasPrefix(name, request.ModelPrefix) || strings.HasPrefix(name, request.AliasPrefix)
	switch {
	case here:
		return nil
	case name == "":
		return errors.New("has no value; name the pipeline that answers for the model")
	case isImplicit && f.Gateway.StagePipelines != nil && !*f.Gateway.StagePipelines:
		return fmt.Errorf("%s is not served, because gateway.stage_pipelines is false; name a pipeline of the file", name)
	case isStage:
		return f.checkStage(stage, pipeline.Memory)
	case isImplicit:
		return nil
	}
	return fmt.Errorf("there is no pipeline %q; there are %s, and stage:<name> for each stage", name, strings.Join(slices.Sorted(maps.Keys(f.Pipelines)), ", "))
}

// validateQueue checks the queue of a pipeline.
func (f *File) validateQueue(name string) error {
	queue := string(f.Pipelines[name].Queue)
	if queue == "" {
		return nil
	}
	if _, ok := f.Jobs.Queues[queue]; !ok {
		return fmt.Errorf("queue: there is no %q in jobs.queues", queue)
	}
	// An error of the pool is one of the section jobs.
	if pool, err := f.Jobs.PoolOf(queue); err == nil && !slices.Contains(f.Jobs.Pools[pool].Target.Pipelines, name) {
		return fmt.Errorf("queue: the target of its pool %s has no pipeline %s", pool, name)
	}
	return nil
}

// validateShared checks what every process of the mesh has to agree on.
func (f *File) validateShared() error {
	return errors.Join(
		f.validateName(),
		f.At(f.NATS.validate(), "nats"),
		f.At(f.Registry.validate(), "registry"),
		f.At(f.Tracing.Validate(), "tracing"),
		f.At(f.Results.Validate(), "results"),
		f.At(f.DeadLetters.Validate(), "dead_letters"),
		f.At(f.Idempotency.Validate(), "idempotency"),
		f.At(f.Jobs.Validate(), "jobs"),
		f.At(call.Settings{Limits: f.Gateway.Limits, Results: f.Results, Idempotency: f.Idempotency}.ValidateWindow()),
	)
}

func (f *File) validateName() error {
	if f.Mesh == "" {
		return f.At(errors.New("is missing; it is the mesh's name"), "mesh")
	}
	return f.At(pipeline.ValidName("mesh", f.Mesh), "mesh")
}

// Bounds on what the broker in the process takes in one message.
const (
	// DefaultBrokerPayload is for a file without nats.max_payload.
	DefaultBrokerPayload = 8 << 20

	minBrokerPayload = 64 << 10
	maxBrokerPayload = 64 << 20
	// maxFilePayload is the largest record of the broker's streams on file.
	maxFilePayload = 32 << 20
)

func (n NATS) validate() error {
	errs := []error{config.Address("listen", n.Listen)}
	if n.MaxPayload != 0 && (n.MaxPayload < minBrokerPayload || n.MaxPayload > maxBrokerPayload) {
		errs = append(errs, fmt.Errorf("max_payload: %s is not between %s and %s", config.Bytes(n.MaxPayload), config.Bytes(minBrokerPayload), config.Bytes(maxBrokerPayload)))
	}
	if n.MaxPayload > maxFilePayload && n.MaxPayload <= maxBrokerPayload {
		errs = append(errs, fmt.Errorf("max_payload: %s is more than the %s that the broker stores on file in one message, such as a durable request, a job or a result; lower it", config.Bytes(n.MaxPayload), config.Bytes(maxFilePayload)))
	}
	errs = append(errs, credentials.Pair{CertFile: n.CertFile, KeyFile: n.KeyFile}.Check(""),
		credentials.Pair{CertFile: n.ListenCertFile, KeyFile: n.ListenKeyFile}.Check("listen_"))
	if n.URL == "" {
		return errors.Join(append(errs, n.validateOwn()...)...)
	}
	if err := ValidBroker(n.URL); err != nil {
		errs = append(errs, fmt.Errorf("url: %w", err))
	}
	const own = "is for the broker in the process; leave it out with url"
	return errors.Join(append(errs, n.validateToken(), unset("listen", n.Listen, own), unset("listen_cert_file", n.ListenCertFile, own), unset("store_dir", n.StoreDir, own),
		unset("max_memory", n.MaxMemory, own), unset("max_store", n.MaxStore, own), unset("max_payload", n.MaxPayload, own))...)
}

func (o Ops) validate() error {
	if err := config.Address("listen", o.Listen); err != nil {
		return err
	}
	return config.Exposure{Listen: o.Listen, Insecure: o.Insecure}.Check("listen", "")
}

// validateOwn checks the settings of a mesh whose broker is in a process.
func (n NATS) validateOwn() []error {
	const elsewhere = "requires url"
	errs := []error{unset("credentials_file", n.CredentialsFile, elsewhere), unset("cert_file", n.CertFile, elsewhere), n.Exposure().Check("listen", "name a file with a token in token_file, ")}
	if n.Listen == "" {
		const joining = "requires url or listen"
		return append(errs, unset("listen_cert_file", n.ListenCertFile, joining), unset("token_file", n.TokenFile, joining), unset("ca_file", n.CAFile, joining))
	}
	if n.CAFile != "" && n.ListenCertFile == "" {
		errs = append(errs, errors.New("ca_file: requires listen_cert_file: without it the broker in the process has no TLS"))
	}
	return errs
}

// unset rejects a value of the key, for the reason.
func unset[T comparable](key string, value T, reason string) error {
	var zero T
	if value == zero {
		return nil
	}
	return fmt.Errorf("%s: %s", key, reason)
}

// validateToken checks that there are not two ways to be known.
func (n NATS) validateToken() error {
	if n.TokenFile == "" {
		return nil
	}
	if n.CredentialsFile != "" {
		return errors.New("token_file: credentials_file says already who this is; leave one of them out")
	}
	for one := range strings.SplitSeq(n.URL, ",") {
		if u, err := server(one); err == nil && u.User != nil {
			return errors.New("token_file: the user in url says already who this is; leave one of them out")
		}
	}
	return nil
}

// validateOwnBroker checks that what the file asks of the broker in the process
// is something it can do; of another one there is nothing to know.
func (f *File) validateOwnBroker() error {
	if f.NATS.URL != "" {
		return nil
	}
	var errs []error
	for _, name := range f.StageNames() {
		errs = append(errs, f.At(oneCopy("queue.replicas", f.Stages[name].Queue.Replicas), "stages", name))
	}
	errs = append(errs, f.At(oneCopy("replicas", f.Results.Replicas), "results"), f.At(oneCopy("replicas", f.DeadLetters.Replicas), "dead_letters"),
		f.At(oneCopy("replicas", f.Idempotency.Replicas), "idempotency"),
		f.At(oneCopy("replicas", f.Jobs.Replicas), "jobs"), f.At(oneCopy("batches.replicas", f.Jobs.Batches.Replicas), "jobs"))
	if n := f.Registry.NATS; n != nil {
		errs = append(errs, f.At(oneCopy("nats.replicas", n.Replicas), "registry"))
	}
	var queues []stagehost.QueueSettings
	for _, name := range f.StageNames() {
		queues = append(queues, f.Stages[name].Queues(max(1, f.Stages[name].Hosts))...)
	}
	reserved := ReserveOf(queues, f.Results, f.DeadLetters, f.Idempotency).Registry(f.Registry).Jobs(f.Jobs)
	switch most := cmp.Or(f.NATS.MaxPayload, DefaultBrokerPayload); {
	case f.Gateway.MaxPayload >= most:
		err := fmt.Errorf("max_payload: inputs of %s do not fit into a message of nats.max_payload, which is %s; raise that, or lower this", config.Bytes(f.Gateway.MaxPayload), config.Bytes(most))
		errs = append(errs, f.At(err, "gateway"))
	case f.Gateway.MaxPayload == 0 && admission.DefaultMaxPayload >= most && most >= minBrokerPayload:
		err := fmt.Errorf("max_payload: inputs of %s, the default of gateway.max_payload, do not fit into a message of %s; raise it, or set a lower gateway.max_payload", config.Bytes(admission.DefaultMaxPayload), config.Bytes(most))
		errs = append(errs, f.At(err, "nats"))
	}
	memory, store := config.Bytes(reserved.Memory), config.Bytes(reserved.Store)
	if limit := config.Bytes(f.NATS.MaxMemory); limit != 0 && limit < memory {
		err := fmt.Errorf("max_memory: %s is less than the %s that the stages' queues, and a registry in the broker, reserve; raise it, or lower queue.max_bytes", limit, memory)
		errs = append(errs, f.At(err, "nats"))
	}
	if limit := config.Bytes(f.NATS.MaxStore); limit != 0 && limit < store {
		err := fmt.Errorf("max_store: %s is less than the %s that the stages' queues on file, results, dead letters, idempotency keys, a registry in the broker and jobs reserve; raise it, or lower their max_bytes", limit, store)
		errs = append(errs, f.At(err, "nats"))
	}
	return errors.Join(errs...)
}

func oneCopy(key string, replicas int) error {
	if replicas <= 1 {
		return nil
	}
	return fmt.Errorf("%s: %d copies need a cluster of brokers, at nats.url; the broker in the process has one", key, replicas)
}

// ValidBroker checks the URL of a broker, or several with commas between them.
func ValidBroker(urls string) error {
	for one := range strings.SplitSeq(urls, ",") {
		// The parser's error may contain a password.
		if u, err := server(one); err != nil || u.Hostname() == "" {
			return errors.New("expected the URL of a broker, such as nats://127.0.0.1:4222")
		}
	}
	return nil
}

// HasSecret reports whether a URL of a broker has a user, a password or a token.
func HasSecret(urls string) bool {
	for one := range strings.SplitSeq(urls, ",") {
		if u, err := server(one); err != nil || u.User != nil {
			return strings.Contains(one, "@")
		}
	}
	return false
}

// server reads the URL of one server; without a scheme it is nats://.
func server(one string) (*url.URL, error) {
	one = strings.TrimSpace(one)
	if !strings.Contains(one, "://") {
		one = "nats://" + one
	}
	return url.Parse(one)
}

// hidden replaces secrets; it is the standard library's word for that.
const hidden = "xxxxx"

// Redacted returns the URLs of a broker without passwords and tokens.
func Redacted(urls string) string {
	out := strings.Split(urls, ",")
	for i, one := range out {
		out[i] = hidden
		u, err := server(one)
		if err != nil {
			continue
		}
		if _, password := u.User.Password(); u.User != nil && !password {
			// A name without a password is a token.
			u.User = url.User(hidden)
		}
		out[i] = u.Redacted()
	}
	return strings.Join(out, ",")
}
