package cli

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
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

	"github.com/stagemesh/stagemesh/discovery/models"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/mesh/config"
)

func newModels() *cobra.Command {
	return group("models", "Register, load, evict or list models",
		"Register, unregister, load, evict, list or show the models that stages load on demand. The commands ask the admin port of any\n"+
			"gateway of the mesh; all gateways follow a change at once.",
		newModelsRegister(), newModelsUnregister(), newModelsLoad(), newModelsEvict(), newModelsList(), newModelsShow())
}

func newModelsRegister() *cobra.Command {
	var admin port
	var file, size, deviceSize string
	var loadNow bool
	m := &meshv1.Model{}
	register := &cobra.Command{
		Use:   "register ID | --file FILE",
		Short: "Register a model, or those of a file",
		Long: "Register a model, or the models and then the aliases of a file. The file is a mesh's, has only models and aliases,\n" +
			"or has one model in JSON a line (.jsonl). A model never changes: the same one again is no error, another one of that ID is.",
		Example: "  stagemesh models register iris-v1 --stage score --type linear --source iris.json --size 12KiB\n  stagemesh models register --file models.jsonl",
		RunE: func(cmd *cobra.Command, args []string) error {
			if (file == "") != (len(args) == 1) || len(args) > 1 {
				return usageError(cmd, errors.New("give the ID of one model, or --file"))
			}
			wanted, aliases, err := []*meshv1.Model{m}, []models.AliasChange(nil), error(nil)
			if file != "" {
				wanted, aliases, err = modelsOf(file)
			} else {
				m.Id = args[0]
				m.Size, err = sizeOf(size, deviceSize)
			}
			if err != nil {
				return err
			}
			return admin.reach(func(client clients) error {
				return registerAll(cmd.Context(), client, wanted, aliases, loadNow, cmd.OutOrStdout(), cmd.ErrOrStderr())
			})
		},
	}
	admin.addAdmin(register)
	flags := register.Flags()
	flags.StringVar(&file, "file", "", "the file with the models")
	flags.StringVar(&m.Stage, "stage", "", "the stage that loads the model")
	flags.StringVar(&m.Type, "type", "", "the model's type: what it needs of a host")
	flags.StringVar(&m.Source, "source", "", "text for the runtime, such as a path below the stage's root")
	flags.StringToStringVar(&m.Options, "option", nil, "an option for the runtime, as name=value; may be repeated")
	flags.StringVar(&size, "size", "0", "how much memory it takes about; 0 means unknown")
	flags.StringVar(&deviceSize, "device-size", "0", "how much memory of a device it takes about")
	flags.BoolVar(&loadNow, "load-now", false, "have hosts load what is registered, before requests come")
	flags.Uint32Var(&m.MinReplicas, "min-replicas", 0, "the number of replicas that no eviction goes below")
	return register
}

func sizeOf(host, device string) (*meshv1.ModelSize, error) {
	bytes, err := config.ParseBytes(host)
	if err != nil {
		return nil, fmt.Errorf("--size: %w", err)
	}
	deviceBytes, err := config.ParseBytes(device)
	if err != nil {
		return nil, fmt.Errorf("--device-size: %w", err)
	}
	return &meshv1.ModelSize{Host: uint64(bytes), Device: uint64(deviceBytes)}, nil //nolint:gosec // no size is negative
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

// registerAll registers models, and then sets aliases. One that is rejected does not stop the
// others.
func registerAll(ctx context.Context, client clients, wanted []*meshv1.Model, aliases []models.AliasChange, loadNow bool, out, hints io.Writer) error {
	bar := progressbar.NewOptions(len(wanted), progressbar.OptionSetWriter(hints), progressbar.OptionSetVisibility(isTerminal(hints)),
		progressbar.OptionClearOnFinish(), progressbar.OptionSetDescription("register"))
	var mu sync.Mutex
	created, failures := 0, 0
	note := func(isNew bool, what, id string, err error) error {
		mu.Lock()
		defer mu.Unlock()
		_ = bar.Add(1) // only a broken terminal fails
		switch rpc, ok := errors.AsType[*connect.Error](err); {
		case err == nil && isNew:
			created++
		case ok && len(wanted)+len(aliases) > 1 && infoOf(rpc) != nil && rpc.Code() != connect.CodeUnavailable && !isRefused(err):
			if failures++; failures <= maxShownErrors {
				fmt.Fprintf(hints, "%s %s: %s\n", what, visible(id), visible(Describe(err)))
			}
			return nil
		}
		return err
	}
	calls, within := errgroup.WithContext(ctx)
	calls.SetLimit(maxRegistrations)
	for _, m := range wanted {
		if within.Err() != nil {
			break
		}
		calls.Go(func() error {
			answer, err := client.RegisterModel(within, connect.NewRequest(&adminv1.RegisterModelRequest{Model: m, LoadNow: loadNow}))
			return note(err == nil && answer.Msg.GetCreated(), "model", m.GetId(), err)
		})
	}
	if err := calls.Wait(); err != nil {
		return err
	}
	rejected := failures // models; aliases follow
	for _, a := range aliases {
		_, err := client.SetAlias(ctx, connect.NewRequest(&adminv1.SetAliasRequest{Name: string(a.Name), Route: a.Route, Owner: a.Owner}))
		if err := note(false, "alias", string(a.Name), err); err != nil {
			return err
		}
	}
	_ = bar.Finish()
	fmt.Fprintf(out, "%s registered, %d unchanged", count(created, "model"), len(wanted)-created-rejected)
	if len(aliases) > 0 {
		fmt.Fprintf(out, "; %d of %d aliases set", len(aliases)-failures+rejected, len(aliases))
	}
	fmt.Fprintln(out)
	if failures > 0 {
		fmt.Fprintf(hints, "%d of %d were rejected\n", failures, len(wanted)+len(aliases))
		return errNotRegistered
	}
	return nil
}

// newForModels returns a command that asks for the same about each of some models.
func newForModels(use, short, long string, ask func(ctx context.Context, client clients, id string) (done string, err error)) *cobra.Command {
	var admin port
	cmd := &cobra.Command{
		Use: use + " ID...", Short: short, Long: long,
		Example: "  stagemesh models " + use + " iris-v1",
		Args:    between(1, unlimited, "give the ID of at least one model"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return admin.reach(func(client clients) error {
				for _, id := range args {
					done, err := ask(cmd.Context(), client, id)
					if err != nil {
						return err
					}
					fmt.Fprintf(cmd.OutOrStdout(), "model %s %s\n", visible(id), done)
				}
				return nil
			})
		},
	}
	admin.addAdmin(cmd)
	return cmd
}

func newModelsUnregister() *cobra.Command {
	return newForModels("unregister", "Unregister models", "Unregister models, if they exist. A model that an alias points at stays.",
		func(ctx context.Context, client clients, id string) (string, error) {
			_, err := client.UnregisterModel(ctx, connect.NewRequest(&adminv1.UnregisterModelRequest{Id: id}))
			return "unregistered", err
		})
}

func newModelsLoad() *cobra.Command {
	return newForModels("load", "Load models", "Load models that no host has, and wait until they are loaded.",
		func(ctx context.Context, client clients, id string) (string, error) {
			_, err := client.EnsureLoaded(ctx, connect.NewRequest(&adminv1.EnsureLoadedRequest{Id: id, Wait: true}))
			return "loaded", err
		})
}

func newModelsEvict() *cobra.Command {
	return newForModels("evict", "Unload models from all hosts",
		"Have all hosts unload models once their requests have ended, and forget loads that failed. The next request loads them again.",
		func(ctx context.Context, client clients, id string) (string, error) {
			_, err := client.EvictModel(ctx, connect.NewRequest(&adminv1.EvictModelRequest{Id: id}))
			return "evicted", err
		})
}

// pageSize is how much of a list is asked for at a time.
const pageSize = 1000

func newModelsList() *cobra.Command {
	var admin port
	var stage string
	var asJSON bool
	list := &cobra.Command{
		Use:     "list",
		Short:   "List the models",
		Example: "  stagemesh models list\n  stagemesh models list --stage score --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := validStage(cmd, stage); err != nil {
				return err
			}
			return admin.reach(func(client clients) error {
				request := &adminv1.ListModelsRequest{Stage: stage, PageSize: pageSize}
				for first := true; first || request.GetPageToken() != ""; first = false {
					answer, err := client.ListModels(cmd.Context(), connect.NewRequest(request))
					if err != nil {
						return err
					}
					if asJSON {
						err = printJSON(cmd.OutOrStdout(), answer.Msg.GetModels()...)
					} else {
						err = printModels(cmd.OutOrStdout(), answer.Msg, first)
					}
					if err != nil {
						return err
					}
					request.PageToken = answer.Msg.GetNextPageToken()
				}
				return nil
			})
		},
	}
	admin.addAdmin(list)
	list.Flags().StringVar(&stage, "stage", "", "list only the models of this stage")
	addJSON(list, &asJSON, "each model and its status")
	return list
}

func printModels(out io.Writer, page *adminv1.ListModelsResponse, first bool) error {
	if first {
		printStale(out, page, time.Now())
		if len(page.GetModels()) == 0 {
			_, err := fmt.Fprintln(out, "there is no model")
			return err
		}
	}
	heads := ""
	if first {
		heads = "MODEL\tSTAGE\tTYPE\tSTATE\tREPLICAS\tSIZE\tLAST USE"
	}
	return printTable(out, heads, texts(page.GetModels(), func(m *adminv1.ModelStatus) []string {
		loaded := 0
		for _, r := range m.GetReplicas() {
			if r.GetState() == meshv1.ReplicaState_REPLICA_STATE_LOADED {
				loaded++
			}
		}
		return []string{
			visible(m.GetModel().GetId()), visible(m.GetModel().GetStage()), cmp.Or(visible(m.GetModel().GetType()), "-"), stateText(m.GetState().String(), "MODEL_STATE_"),
			fmt.Sprint(loaded), sizeText(m.GetModel().GetSize()), age(time.Since(m.GetLastUse().AsTime())),
		}
	}))
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
	var admin port
	var asJSON bool
	show := &cobra.Command{
		Use:     "show ID",
		Short:   "Show a model and its replicas",
		Example: "  stagemesh models show iris-v1",
		Args:    between(1, 1, "give the ID of one model"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return admin.reach(func(client clients) error {
				answer, err := client.GetModel(cmd.Context(), connect.NewRequest(&adminv1.GetModelRequest{Id: args[0]}))
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), answer.Msg.GetModel())
				}
				return printModel(cmd.OutOrStdout(), answer.Msg.GetModel())
			})
		},
	}
	admin.addAdmin(show)
	addJSON(show, &asJSON, "the model and its status")
	return show
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
	p.line("last use", "%s", moment(m.GetLastUse()))
	p.lines("replicas", texts(m.GetReplicas(), func(r *meshv1.Replica) string {
		text := fmt.Sprintf("%s %s since %s", r.GetHost(), stateText(r.GetState().String(), "REPLICA_STATE_"), moment(r.GetSince()))
		if r.GetKind() != "" {
			text += fmt.Sprintf(": %s: %s", r.GetKind(), r.GetMessage())
		}
		return text
	}))
	return p.Flush()
}

func newAliases() *cobra.Command {
	return group("aliases", "Set, delete, list or show aliases of models", "Set, delete, list or show the aliases of models: names that can be moved from one model to another.",
		newAliasesSet(), newAliasesDelete(), newAliasesList(), newAliasesShow())
}

func newAliasesSet() *cobra.Command {
	var admin port
	var weights map[string]int
	var shadow map[string]int
	in := &adminv1.SetAliasRequest{Route: &meshv1.AliasRoute{Weights: map[string]uint32{}}}
	set := &cobra.Command{
		Use:     "set NAME MODEL",
		Short:   "Point an alias at a model",
		Example: "  stagemesh aliases set iris iris-v2 --expect iris-v1\n  stagemesh aliases set iris iris-v1 --weight iris-v2=10",
		Args:    between(2, 2, "give the NAME of the alias and the ID of a MODEL"),
		RunE: func(cmd *cobra.Command, args []string) error {
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
			return admin.reach(func(client clients) error {
				answer, err := client.SetAlias(cmd.Context(), connect.NewRequest(in))
				if err == nil {
					alias := answer.Msg.GetAlias()
					fmt.Fprintf(cmd.OutOrStdout(), "alias %s points at %s\n", visible(args[0]), describeRoute(alias.GetActive()))
					if alias.GetTarget() != nil {
						fmt.Fprintf(cmd.OutOrStdout(), "it switches to %s when that is loaded\n", describeRoute(alias.GetTarget()))
					}
				}
				return err
			})
		},
	}
	admin.addAdmin(set)
	flags := set.Flags()
	flags.StringVar(&in.Owner, "owner", "", "the owner that the alias has, or gets")
	flags.StringVar(&in.ExpectModel, "expect", "", "set it only if it points at this model")
	flags.BoolVar(&in.Force, "force", false, "switch at once, before the new model is loaded")
	flags.BoolVar(&in.Wait, "wait", false, "wait until the alias has switched")
	flags.BoolVar(&in.UpdateOnly, "update-only", false, "set it only if it exists")
	flags.BoolVar(&in.AutoDelete, "auto-delete", false, "unregister the model when no alias points at it any more")
	flags.StringToIntVar(&weights, "weight", nil, "another model and its percent of the requests, as ID=10; may be repeated")
	flags.StringToIntVar(&shadow, "shadow", nil, "a model that also runs a percent of the requests, as ID=5")
	return set
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

func newAliasesDelete() *cobra.Command {
	var admin port
	var owner string
	remove := &cobra.Command{
		Use:     "delete NAME...",
		Short:   "Delete aliases",
		Example: "  stagemesh aliases delete iris",
		Args:    between(1, unlimited, "give the NAME of at least one alias"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return admin.reach(func(client clients) error {
				for _, name := range args {
					if _, err := client.DeleteAlias(cmd.Context(), connect.NewRequest(&adminv1.DeleteAliasRequest{Name: name, Owner: owner})); err != nil {
						return err
					}
					fmt.Fprintf(cmd.OutOrStdout(), "alias %s deleted\n", visible(name))
				}
				return nil
			})
		},
	}
	admin.addAdmin(remove)
	remove.Flags().StringVar(&owner, "owner", "", "the owner that the aliases have")
	return remove
}

func newAliasesList() *cobra.Command {
	var admin port
	var asJSON bool
	list := &cobra.Command{
		Use:   "list",
		Short: "List the aliases",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return admin.reach(func(client clients) error {
				var all []*meshv1.Alias
				request := &adminv1.ListAliasesRequest{PageSize: pageSize}
				for first := true; first || request.GetPageToken() != ""; first = false {
					answer, err := client.ListAliases(cmd.Context(), connect.NewRequest(request))
					if err != nil {
						return err
					}
					if first && !asJSON {
						printStale(cmd.OutOrStdout(), answer.Msg, time.Now())
					}
					all = append(all, answer.Msg.GetAliases()...)
					request.PageToken = answer.Msg.GetNextPageToken()
				}
				return printAliases(cmd.OutOrStdout(), all, asJSON)
			})
		},
	}
	admin.addAdmin(list)
	addJSON(list, &asJSON, "each alias")
	return list
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

func newAliasesShow() *cobra.Command {
	var admin port
	var asJSON bool
	show := &cobra.Command{
		Use:   "show NAME",
		Short: "Show an alias",
		Args:  between(1, 1, "give the NAME of one alias"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return admin.reach(func(client clients) error {
				answer, err := client.GetAlias(cmd.Context(), connect.NewRequest(&adminv1.GetAliasRequest{Name: args[0]}))
				if err != nil {
					return err
				}
				return printAliases(cmd.OutOrStdout(), []*meshv1.Alias{answer.Msg.GetAlias()}, asJSON)
			})
		},
	}
	admin.addAdmin(show)
	addJSON(show, &asJSON, "the alias")
	return show
}
