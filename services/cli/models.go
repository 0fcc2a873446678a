package cli

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"connectrpc.com/connect"
	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/encoding/protojson"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/mesh/model"
)

func newModels() *cobra.Command {
	return group("models", "Register, load, evict, list or tap models",
		"Register, unregister, load, evict, list, show or tap the models that stages load on demand. The commands ask the admin port of any\n"+
			"gateway of the mesh; all gateways follow a change at once.",
		newModelsRegister(),
		newForEach("unregister ID...", "Unregister models", "Unregister models, if they exist. A model that an alias points at stays.", "model %s unregistered\n",
			func(ctx context.Context, client clients, id string) error {
				_, err := client.UnregisterModel(ctx, connect.NewRequest(&adminv1.UnregisterModelRequest{Id: id}))
				return err
			}),
		newForEach("load ID...", "Load models", "Load models that no host has, and wait until they are loaded.", "model %s loaded\n",
			func(ctx context.Context, client clients, id string) error {
				_, err := client.EnsureLoaded(ctx, connect.NewRequest(&adminv1.EnsureLoadedRequest{Id: id, Wait: true}))
				return err
			}),
		newForEach("evict ID...", "Unload models from all hosts",
			"Have all hosts unload models once their requests have ended, and forget loads that failed. The next request loads them again.", "model %s evicted\n",
			func(ctx context.Context, client clients, id string) error {
				_, err := client.EvictModel(ctx, connect.NewRequest(&adminv1.EvictModelRequest{Id: id}))
				return err
			}),
		newModelsList(), newModelsShow(), newModelsTap(), newModelsSettings())
}

// newForEach returns a command that does the same with each of its arguments, and then prints the
// text with it.
func newForEach(use, short, long, text string, do func(ctx context.Context, client clients, name string) error) *cobra.Command {
	_, argument, _ := strings.Cut(strings.TrimSuffix(use, "..."), " ")
	cmd := &cobra.Command{Use: use, Short: short, Long: long, Args: between(1, unlimited, "give at least one "+argument)}
	return askAdmin(cmd, func(cmd *cobra.Command, client clients, args []string) error {
		for _, name := range args {
			if err := do(cmd.Context(), client, name); err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), text, visible(name))
		}
		return nil
	})
}

func newModelsRegister() *cobra.Command {
	var file string
	m, r := &meshv1.Model{Size: &meshv1.ModelSize{}}, &registration{}
	register := &cobra.Command{
		Use:   "register ID | --file FILE",
		Short: "Register a model, or those of a file",
		Long: "Register a model, or the models and then the aliases of a file. The file is a mesh's, has only models and aliases,\n" +
			"or has one model in JSON a line (.jsonl). A model never changes: the same one again is not an error, another one of that ID is.",
		Example: "  stagemesh models register iris-v1 --stage score --type linear --source iris.json --size 12KiB\n  stagemesh models register --file models.jsonl",
	}
	flags := register.Flags()
	flags.StringVar(&file, "file", "", "the file with the models")
	flags.StringVar(&m.Stage, "stage", "", "the stage that loads the model")
	flags.StringVar(&m.Type, "type", "", "the model's type: what it needs of a host")
	flags.StringVar(&m.Source, "source", "", "text for the runtime, such as a path below the stage's root")
	flags.Var(namedTexts{&m.Options}, "option", "an option for the runtime, as name=value; may be repeated")
	flags.Func("size", "how much memory it takes about, such as 12KiB", parseSize(&m.Size.Host))
	flags.Func("device-size", "how much memory of a device it takes about", parseSize(&m.Size.Device))
	flags.BoolVar(&r.loadNow, "load-now", false, "have hosts load what is registered, before requests come")
	flags.Uint32Var(&m.MinReplicas, "min-replicas", 0, "the number of replicas that no eviction goes below")
	addJSON(register, &r.json, "the outcome for each model and alias")
	return askAdmin(register, func(cmd *cobra.Command, client clients, args []string) (err error) {
		if (file == "") != (len(args) == 1) || len(args) > 1 {
			return usageError(cmd, errors.New("give the ID of one model, or --file"))
		}
		wanted, aliases := []*meshv1.Model{m}, []models.AliasChange(nil)
		for _, flag := range []string{"stage", "type", "source", "option", "size", "device-size", "min-replicas"} {
			if file != "" && cmd.Flags().Changed(flag) {
				return usageError(cmd, fmt.Errorf("--%s: is for one model; --file has it of each", flag))
			}
		}
		if file == "" {
			m.Id = args[0]
		} else if wanted, aliases, err = modelsOf(file); err != nil {
			return err
		}
		r.clients, r.out, r.hints = client, cmd.OutOrStdout(), cmd.ErrOrStderr()
		return r.run(cmd.Context(), wanted, aliases)
	})
}

func parseSize(into *uint64) func(string) error {
	return func(text string) error {
		size, err := config.ParseBytes(text)
		*into = uint64(size) //nolint:gosec // no size is negative
		return err
	}
}

// modelsOf reads the models and aliases of a file.
func modelsOf(path string) (out []*meshv1.Model, aliases []models.AliasChange, err error) {
	if !strings.HasSuffix(path, ".jsonl") {
		read, aliases, err := meshfile.ReadModels(path)
		for _, m := range read {
			out = append(out, models.ToProto(m))
		}
		return out, aliases, err
	}
	file, err := os.Open(path)
	if err != nil {
		return nil, nil, err
	}
	defer file.Close() //nolint:errcheck // it was only read
	lines := bufio.NewScanner(file)
	for number := 1; lines.Scan(); number++ {
		if len(strings.TrimSpace(lines.Text())) == 0 {
			continue
		}
		m := &meshv1.Model{}
		if err := protojson.Unmarshal(lines.Bytes(), m); err != nil {
			return nil, nil, fmt.Errorf("%s:%d: %w", path, number, err)
		}
		out = append(out, m)
	}
	if err := lines.Err(); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	return out, nil, nil
}

const (
	// maxRegistrations is how many models are registered at a time: a gateway takes eight calls.
	maxRegistrations = 6
	// maxShownErrors is how many errors of single models are printed.
	maxShownErrors = 10
)

// errNotRegistered is returned when some models or aliases of a file were rejected; their errors
// have been printed.
var errNotRegistered = errors.New("not everything was registered; after the cause is fixed, the same command continues")

// registration registers models, and then sets aliases. One that is rejected does not stop the
// others.
type registration struct {
	clients
	loadNow, json bool
	out, hints    io.Writer

	mu    sync.Mutex
	bar   *progressbar.ProgressBar
	total int
	// counts are how often each outcome was, by its name.
	counts map[string]int
}

// registrationOutcome is the outcome for a model or an alias.
type registrationOutcome struct {
	Model   string `json:"model,omitempty"`
	Alias   string `json:"alias,omitempty"`
	Outcome string `json:"outcome"`
	Error   string `json:"error,omitempty"`
}

// The outcomes.
const (
	outcomeRegistered = "registered"
	outcomeUnchanged  = "unchanged"
	outcomeSet        = "set"
	outcomeRejected   = "rejected"
)

func (r *registration) run(ctx context.Context, wanted []*meshv1.Model, aliases []models.AliasChange) error {
	r.total, r.counts = len(wanted)+len(aliases), map[string]int{}
	r.bar = progressbar.NewOptions(r.total, progressbar.OptionSetWriter(r.hints), progressbar.OptionSetVisibility(isTerminal(r.hints)),
		progressbar.OptionClearOnFinish(), progressbar.OptionSetDescription("register"))
	calls, within := errgroup.WithContext(ctx)
	calls.SetLimit(maxRegistrations)
	for _, m := range wanted {
		if within.Err() != nil {
			break
		}
		calls.Go(func() error {
			out := registrationOutcome{Model: m.GetId(), Outcome: outcomeUnchanged}
			answer, err := r.RegisterModel(within, connect.NewRequest(&adminv1.RegisterModelRequest{Model: m, LoadNow: r.loadNow}))
			if err == nil && answer.Msg.GetCreated() {
				out.Outcome = outcomeRegistered
			}
			return r.report(out, err)
		})
	}
	err := calls.Wait()
	for _, a := range aliases {
		if err != nil {
			break
		}
		_, err = r.SetAlias(ctx, connect.NewRequest(&adminv1.SetAliasRequest{Name: string(a.Name), Route: a.Route, Owner: a.Owner}))
		err = r.report(registrationOutcome{Alias: string(a.Name), Outcome: outcomeSet}, err)
	}
	_ = r.bar.Finish()
	if !r.json && (err == nil || len(r.counts) > 0) {
		fmt.Fprintf(r.out, "%s registered, %d unchanged", count(r.counts[outcomeRegistered], "model"), r.counts[outcomeUnchanged])
		if len(aliases) > 0 {
			fmt.Fprintf(r.out, "; %d of %d aliases set", r.counts[outcomeSet], len(aliases))
		}
		fmt.Fprintln(r.out)
	}
	if err != nil {
		return err
	}
	if rejected := r.counts[outcomeRejected]; rejected > 0 {
		fmt.Fprintf(r.hints, "%d of %d were rejected\n", rejected, r.total)
		return errNotRegistered
	}
	return nil
}

// report counts and prints an outcome. It returns an error that is not about one of several models
// or aliases.
func (r *registration) report(out registrationOutcome, err error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		rpc, ok := errors.AsType[*connect.Error](err)
		if !ok || r.total == 1 || infoOf(rpc) == nil || rpc.Code() == connect.CodeUnavailable || isRefused(err) {
			return err
		}
		out.Outcome, out.Error = outcomeRejected, Describe(err)
	}
	_ = r.bar.Add(1) // only a broken terminal fails
	r.counts[out.Outcome]++
	switch {
	case r.json:
		return json.NewEncoder(r.out).Encode(out)
	case err != nil && r.counts[outcomeRejected] <= maxShownErrors:
		fmt.Fprintf(r.hints, "%s: %s\n", visible(cmp.Or(out.Model, "alias "+out.Alias)), visible(out.Error))
	}
	return nil
}

// pageSize is how much of a list is asked for at a time.
const pageSize = 1000

func newModelsList() *cobra.Command {
	var asJSON bool
	request := &adminv1.ListModelsRequest{PageSize: pageSize}
	list := &cobra.Command{
		Use:     "list",
		Short:   "List the models",
		Example: "  stagemesh models list\n  stagemesh models list --stage score --json",
		Args:    cobra.NoArgs,
	}
	list.Flags().StringVar(&request.Stage, "stage", "", "list only the models of this stage")
	addJSON(list, &asJSON, "each model and its status")
	return askAdmin(list, func(cmd *cobra.Command, client clients, _ []string) error {
		if err := validFilter(cmd, "stage", request.Stage); err != nil {
			return err
		}
		var all []*adminv1.ModelStatus
		for more := true; more; more = request.GetPageToken() != "" {
			answer, err := client.ListModels(cmd.Context(), connect.NewRequest(request))
			if err != nil {
				return err
			}
			if len(all) == 0 && !asJSON {
				printStale(cmd.OutOrStdout(), answer.Msg, time.Now())
			}
			all = append(all, answer.Msg.GetModels()...)
			request.PageToken = answer.Msg.GetNextPageToken()
		}
		if asJSON {
			return printJSON(cmd.OutOrStdout(), all...)
		}
		return printModels(cmd.OutOrStdout(), all)
	})
}

func printModels(out io.Writer, all []*adminv1.ModelStatus) error {
	if len(all) == 0 {
		_, err := fmt.Fprintln(out, "there is no model")
		return err
	}
	return printTable(out, "MODEL\tSTAGE\tTYPE\tSTATE\tREPLICAS\tSIZE\tLAST USE", texts(all, func(m *adminv1.ModelStatus) []string {
		loaded := 0
		for _, r := range m.GetReplicas() {
			if r.GetState() == meshv1.ReplicaState_REPLICA_STATE_LOADED {
				loaded++
			}
		}
		return []string{
			visible(m.GetModel().GetId()), visible(m.GetModel().GetStage()), cmp.Or(visible(m.GetModel().GetType()), "-"), stateText(m.GetState().String(), "MODEL_STATE_"),
			fmt.Sprint(loaded), sizeText(m.GetModel().GetSize()), lastUse(m, func(t time.Time) string { return age(time.Since(t)) }),
		}
	}))
}

// lastUse returns when a model was used; new models have an earlier time, for the eviction.
func lastUse(m *adminv1.ModelStatus, text func(time.Time) string) string {
	if m.GetLastUse().AsTime().Before(m.GetRegisteredAt().AsTime()) {
		return "not yet"
	}
	return text(m.GetLastUse().AsTime())
}

// stateText returns the name of a value of an enum for people.
func stateText(name, prefix string) string {
	return strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(name, prefix), "_", " "))
}

func sizeText(s *meshv1.ModelSize) string {
	switch {
	case s.GetHost() == 0 && s.GetDevice() == 0:
		return "-"
	case s.GetDevice() == 0:
		return config.Bytes(s.GetHost()).String() //nolint:gosec // the gateway bounds it
	}
	return fmt.Sprintf("%s + %s device", config.Bytes(s.GetHost()), config.Bytes(s.GetDevice())) //nolint:gosec // the gateway bounds it
}

func newModelsShow() *cobra.Command {
	var asJSON bool
	show := &cobra.Command{Use: "show ID", Short: "Show a model and its replicas", Args: between(1, 1, "give the ID of one model")}
	addJSON(show, &asJSON, "the model and its status")
	return askAdmin(show, func(cmd *cobra.Command, client clients, args []string) error {
		answer, err := client.GetModel(cmd.Context(), connect.NewRequest(&adminv1.GetModelRequest{Id: args[0]}))
		switch {
		case err != nil:
			return err
		case asJSON:
			return printJSON(cmd.OutOrStdout(), answer.Msg.GetModel())
		}
		return printModel(cmd.OutOrStdout(), answer.Msg.GetModel())
	})
}

func printModel(out io.Writer, m *adminv1.ModelStatus) error {
	p := page{tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)}
	fmt.Fprintf(p, "model %s: %s\n", visible(m.GetModel().GetId()), stateText(m.GetState().String(), "MODEL_STATE_"))
	p.line("stage", "%s", m.GetModel().GetStage())
	p.line("type", "%s", cmp.Or(m.GetModel().GetType(), "-"))
	p.line("source", "%s", cmp.Or(m.GetModel().GetSource(), "-"))
	p.lines("options", pairs(m.GetModel().GetOptions()))
	p.line("size", "%s", sizeText(m.GetModel().GetSize()))
	p.line("registered", "%s", moment(m.GetRegisteredAt()))
	p.line("last use", "%s", lastUse(m, func(time.Time) string { return moment(m.GetLastUse()) }))
	p.lines("replicas", texts(m.GetReplicas(), func(r *meshv1.Replica) string {
		text := fmt.Sprintf("%s %s since %s", r.GetHost(), stateText(r.GetState().String(), "REPLICA_STATE_"), moment(r.GetSince()))
		if r.GetKind() != "" {
			text += fmt.Sprintf(": %s: %s", r.GetKind(), r.GetMessage())
		}
		return text
	}))
	return p.Flush()
}

func newModelsTap() *cobra.Command {
	var asJSON, ofAlias bool
	var limit int
	in := &adminv1.TapModelRequest{}
	tap := &cobra.Command{
		Use: "tap ID", Short: "Show the requests of a model and their answers",
		Long: "Show the requests of a model, or of an alias, with their answers, as they end at the gateway asked, until Ctrl-C. What is not\n" +
			"read in time is dropped and counted; no request waits.",
		Example: "  stagemesh models tap iris-v1 --limit 10\n  stagemesh models tap iris --alias --percent 1 --json",
		Args:    between(1, 1, "give the ID of one model, or with --alias the name of an alias"),
	}
	flags := tap.Flags()
	flags.BoolVar(&ofAlias, "alias", false, "the ID is the name of an alias")
	flags.Uint32Var(&in.Percent, "percent", 100, "percent of the requests that are shown")
	flags.IntVar(&limit, "limit", 0, "end after so many requests; 0 means never")
	addJSON(tap, &asJSON, "each request")
	return askAdmin(tap, func(cmd *cobra.Command, client clients, args []string) error {
		if limit < 0 {
			return usageError(cmd, fmt.Errorf("--limit: %d is negative", limit))
		}
		if in.Model = args[0]; ofAlias {
			in.Model, in.Alias = "", args[0]
		}
		stream, err := client.TapModel(cmd.Context(), connect.NewRequest(in))
		if err != nil {
			return err
		}
		defer stream.Close() //nolint:errcheck // nothing more is read
		dropped := uint64(0)
		for shown := 0; (limit == 0 || shown < limit) && stream.Receive(); shown++ {
			one := stream.Msg()
			if more := one.GetDropped() - dropped; more > 0 {
				dropped = one.GetDropped()
				fmt.Fprintf(cmd.ErrOrStderr(), "%d requests were dropped\n", more)
			}
			if asJSON {
				err = printJSON(cmd.OutOrStdout(), one)
			} else {
				err = printRequest(cmd.OutOrStdout(), one)
			}
			if err != nil {
				return err
			}
		}
		if cmd.Context().Err() != nil {
			return nil
		}
		return stream.Err()
	})
}

func printRequest(out io.Writer, r *adminv1.TapModelResponse) error {
	kind, answer := "", strings.Join(texts(r.GetOutputs(), Render), "  ")
	if r.GetShadow() {
		kind = " (shadow)"
	}
	if r.GetTenant() != "" {
		kind += " of tenant " + visible(r.GetTenant())
	}
	if f := r.GetFault(); f != nil {
		answer = f.GetReason() + ": " + f.GetMessage()
	}
	_, err := fmt.Fprintf(out, "%s %s%s %s %s -> %s\n", moment(r.GetAdmittedAt()), visible(r.GetModel()), kind,
		Milliseconds(r.GetTook().AsDuration()), visible(strings.Join(texts(r.GetInputs(), Render), "  ")), visible(answer))
	return err
}

func newModelsSettings() *cobra.Command {
	var file string
	settings := &cobra.Command{
		Use: "settings STAGE", Short: "Show or replace the settings of a stage's models",
		Long: "Show the settings of a stage that loads models as a line of JSON, or replace them by those of a file, while the stage runs; {} removes them, so that those of the mesh file count:\n" +
			"types: which labels a host needs for models of a type (required), and which make it a better choice (preferred);\n" +
			"scale: what one replica of a model may have until it gets another one: requests_per_minute, busy, queue_time;\n" +
			"capacity, device_capacity, load_slots: the memory of each host for models, and how many load there at a time.",
		Example: "  stagemesh models settings score\n  echo 'types: {gpu: {required: [gpu], preferred: [big]}}' >settings.yaml\n  stagemesh models settings score --file settings.yaml",
		Args:    between(1, 1, "give the name of one STAGE"),
	}
	settings.Flags().StringVar(&file, "file", "", "the file that replaces the settings")
	return askAdmin(settings, func(cmd *cobra.Command, client clients, args []string) error {
		if file != "" {
			var in *struct {
				models.StageConfig
				Capacity       int64 `yaml:"capacity,size"`
				DeviceCapacity int64 `yaml:"device_capacity,size"`
				LoadSlots      int   `yaml:"load_slots"`
			}
			if _, err := config.Load(file, &in); err != nil {
				return err
			}
			if in == nil {
				return fmt.Errorf("%s: is empty; write {} to remove the settings", file)
			}
			wanted, err := in.Settings("")
			if err := errors.Join(err, config.NotNegative("capacity", in.Capacity), config.NotNegative("device_capacity", in.DeviceCapacity), config.NotNegative("load_slots", in.LoadSlots)); err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
			wanted.Capacity, wanted.LoadSlots = models.SizeToProto(model.Size{Host: in.Capacity, Device: in.DeviceCapacity}), uint32(min(in.LoadSlots, math.MaxInt32))
			if _, err := client.SetSettings(cmd.Context(), connect.NewRequest(&adminv1.SetSettingsRequest{Stage: args[0], Settings: wanted})); err != nil {
				return err
			}
		}
		answer, err := client.GetSettings(cmd.Context(), connect.NewRequest(&adminv1.GetSettingsRequest{Stage: args[0]}))
		if err != nil {
			return err
		}
		return printJSON(cmd.OutOrStdout(), answer.Msg.GetSettings())
	})
}

func newAliases() *cobra.Command {
	var owner string
	remove := newForEach("delete NAME...", "Delete aliases", "Delete aliases. Their models stay.", "alias %s deleted\n",
		func(ctx context.Context, client clients, name string) error {
			_, err := client.DeleteAlias(ctx, connect.NewRequest(&adminv1.DeleteAliasRequest{Name: name, Owner: owner}))
			return err
		})
	remove.Flags().StringVar(&owner, "owner", "", "the owner that the aliases have")
	return group("aliases", "Set, delete, list or show aliases of models", "Set, delete, list or show the aliases of models: names that can be moved from one model to another.",
		newAliasesSet(), remove, newAliasesList(), newAliasesShow())
}

func newAliasesSet() *cobra.Command {
	var weights, shadow map[string]int
	in := &adminv1.SetAliasRequest{Route: &meshv1.AliasRoute{Weights: map[string]uint32{}}}
	set := &cobra.Command{
		Use:     "set NAME MODEL",
		Short:   "Point an alias at a model",
		Example: "  stagemesh aliases set iris iris-v2 --expect iris-v1\n  stagemesh aliases set iris iris-v1 --weight iris-v2=10",
		Args:    between(2, 2, "give the NAME of the alias and the ID of a MODEL"),
	}
	flags := set.Flags()
	flags.StringVar(&in.Owner, "owner", "", "the owner that the alias has, or gets")
	flags.StringVar(&in.ExpectModel, "expect", "", "set it only if it points at this model")
	flags.BoolVar(&in.Force, "force", false, "switch at once, before the new model is loaded")
	flags.BoolVar(&in.Wait, "wait", false, "wait until the alias has switched")
	flags.BoolVar(&in.UpdateOnly, "update-only", false, "set it only if it exists")
	flags.BoolVar(&in.AutoDelete, "auto-delete", false, "unregister the model when no alias points at it any more")
	flags.StringToIntVar(&weights, "weight", nil, "another model and its percent of the requests, as ID=10; may be repeated")
	flags.StringToIntVar(&shadow, "shadow", nil, "a model that also runs a percent of the requests, as ID=5")
	return askAdmin(set, func(cmd *cobra.Command, client clients, args []string) error {
		in.Name, in.Route.Model = args[0], args[1]
		for id, weight := range weights {
			in.Route.Weights[id] = uint32(max(0, weight)) //nolint:gosec // the gateway bounds it
		}
		for id, percent := range shadow {
			in.Route.Shadow = &meshv1.AliasShadow{Model: id, Percent: uint32(max(0, percent))} //nolint:gosec // the gateway bounds it
		}
		if len(shadow) > 1 {
			return usageError(cmd, errors.New("--shadow: an alias has one"))
		}
		answer, err := client.SetAlias(cmd.Context(), connect.NewRequest(in))
		if err != nil {
			return err
		}
		alias := answer.Msg.GetAlias()
		fmt.Fprintf(cmd.OutOrStdout(), "alias %s points at %s\n", visible(args[0]), describeRoute(alias.GetActive()))
		if alias.GetTarget() != nil {
			fmt.Fprintf(cmd.OutOrStdout(), "it switches to %s when that is loaded\n", describeRoute(alias.GetTarget()))
		}
		return nil
	})
}

func describeRoute(r *meshv1.AliasRoute) string {
	out := visible(r.GetModel())
	for _, id := range slices.Sorted(maps.Keys(r.GetWeights())) {
		out += fmt.Sprintf(", %s=%d%%", visible(id), r.GetWeights()[id])
	}
	if s := r.GetShadow(); s != nil {
		out += fmt.Sprintf(", shadow %s=%d%%", visible(s.GetModel()), s.GetPercent())
	}
	return out
}

func newAliasesList() *cobra.Command {
	var asJSON bool
	list := &cobra.Command{Use: "list", Short: "List the aliases", Args: cobra.NoArgs}
	addJSON(list, &asJSON, "each alias")
	return askAdmin(list, func(cmd *cobra.Command, client clients, _ []string) error {
		var all []*meshv1.Alias
		request := &adminv1.ListAliasesRequest{PageSize: pageSize}
		for more := true; more; more = request.GetPageToken() != "" {
			answer, err := client.ListAliases(cmd.Context(), connect.NewRequest(request))
			if err != nil {
				return err
			}
			if len(all) == 0 && !asJSON {
				printStale(cmd.OutOrStdout(), answer.Msg, time.Now())
			}
			all = append(all, answer.Msg.GetAliases()...)
			request.PageToken = answer.Msg.GetNextPageToken()
		}
		return printAliases(cmd.OutOrStdout(), all, asJSON)
	})
}

func newAliasesShow() *cobra.Command {
	var asJSON bool
	show := &cobra.Command{Use: "show NAME", Short: "Show an alias", Args: between(1, 1, "give the NAME of one alias")}
	addJSON(show, &asJSON, "the alias")
	return askAdmin(show, func(cmd *cobra.Command, client clients, args []string) error {
		answer, err := client.GetAlias(cmd.Context(), connect.NewRequest(&adminv1.GetAliasRequest{Name: args[0]}))
		if err != nil {
			return err
		}
		return printAliases(cmd.OutOrStdout(), []*meshv1.Alias{answer.Msg.GetAlias()}, asJSON)
	})
}

func printAliases(out io.Writer, all []*meshv1.Alias, asJSON bool) error {
	switch {
	case asJSON:
		return printJSON(out, all...)
	case len(all) == 0:
		_, err := fmt.Fprintln(out, "there is no alias")
		return err
	}
	return printTable(out, "ALIAS\tMODEL\tOWNER", texts(all, func(a *meshv1.Alias) []string {
		return []string{visible(a.GetName()), describeRoute(a.GetActive()), cmp.Or(visible(a.GetOwner()), "-")}
	}))
}
