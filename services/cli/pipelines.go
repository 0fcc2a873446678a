package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"

	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// pipelinesClient is the client of the verbs of pipelines.
type pipelinesClient = adminv1connect.PipelineServiceClient

func newPipelines() *cobra.Command {
	pipelines := &cobra.Command{
		Use:   "pipelines",
		Short: "List, get, apply, delete or plan pipelines",
		Long: "List, get, apply, delete or plan the pipelines in the mesh's registry, while the mesh runs. The commands ask the admin port\n" +
			"of any gateway of the mesh; all gateways follow a change at once.",
		// An unknown verb is an error, not a request for help.
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	pipelines.AddCommand(newPipelinesList(), newPipelinesGet(), newPipelinesApply(), newPipelinesDelete(), newPipelinesPlan())
	return pipelines
}

// pipelines calls the function with a client of the pipelines.
func (a adminFlags) pipelines(ask func(pipelinesClient) error) error {
	return a.reach(func(client connect.HTTPClient, address string, options ...connect.ClientOption) error {
		return describeRPC(ask(adminv1connect.NewPipelineServiceClient(client, address, options...)))
	})
}

func newPipelinesList() *cobra.Command {
	var flags struct {
		admin adminFlags
		json  bool
	}
	list := &cobra.Command{
		Use:     "list",
		Short:   "List the pipelines",
		Example: "  stagemesh pipelines list\n  stagemesh pipelines list --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return flags.admin.pipelines(func(client pipelinesClient) error {
				answer, err := client.ListPipelines(cmd.Context(), connect.NewRequest(&adminv1.ListPipelinesRequest{}))
				if err != nil {
					return err
				}
				if flags.json {
					return printLines(cmd.OutOrStdout(), answer.Msg.GetPipelines())
				}
				now := time.Now()
				printStale(cmd.OutOrStdout(), answer.Msg, now)
				return printPipelines(cmd.OutOrStdout(), answer.Msg.GetPipelines(), now)
			})
		},
	}
	flags.admin.add(list)
	list.Flags().BoolVar(&flags.json, "json", false, "print each pipeline as a line of JSON")
	return list
}

// printLines prints each message as a line of JSON.
func printLines[M proto.Message](out io.Writer, messages []M) error {
	for _, m := range messages {
		if err := printJSON(out, m); err != nil {
			return err
		}
	}
	return nil
}

func printPipelines(out io.Writer, pipelines []*adminv1.PipelineStatus, now time.Time) error {
	if len(pipelines) == 0 {
		_, err := fmt.Fprintln(out, "there is no pipeline")
		return err
	}
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "PIPELINE\tSTAGES\tSTATE\tSOURCE\tREVISION\tAGE")
	for _, p := range pipelines {
		var stages []string
		for _, step := range p.GetPipeline().GetSteps() {
			stages = append(stages, visible(step.GetStage()))
		}
		state := "ready"
		if !p.GetReady() {
			state = "not ready"
		}
		revision, since := "-", "-"
		if p.GetRevision() != 0 {
			revision, since = fmt.Sprint(p.GetRevision()), age(now.Sub(p.GetAppliedAt().AsTime()))
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\n", visible(p.GetPipeline().GetName()), strings.Join(stages, " > "), state, sourceOf(p), revision, since)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for _, p := range pipelines {
		if p.GetCause() != "" {
			fmt.Fprintf(out, "%s: %s\n", visible(p.GetPipeline().GetName()), visible(p.GetCause()))
		}
	}
	return nil
}

// sourceOf names where a pipeline comes from.
func sourceOf(p *adminv1.PipelineStatus) string {
	switch {
	case p.GetFromFile():
		return "file"
	case p.GetInFile():
		return "file, changed"
	default:
		return "applied"
	}
}

func newPipelinesGet() *cobra.Command {
	var flags struct {
		admin adminFlags
		json  bool
	}
	get := &cobra.Command{
		Use:     "get NAME",
		Short:   "Print a pipeline as a file that apply takes",
		Example: "  stagemesh pipelines get digits > digits.yaml",
		Args:    onePipeline,
		RunE: func(cmd *cobra.Command, args []string) error {
			return flags.admin.pipelines(func(client pipelinesClient) error {
				answer, err := client.GetPipeline(cmd.Context(), connect.NewRequest(&adminv1.GetPipelineRequest{Name: args[0]}))
				if err != nil {
					return err
				}
				if flags.json {
					return printJSON(cmd.OutOrStdout(), answer.Msg.GetPipeline())
				}
				return writePipeline(cmd.OutOrStdout(), answer.Msg.GetPipeline())
			})
		},
	}
	flags.admin.add(get)
	get.Flags().BoolVar(&flags.json, "json", false, "print the pipeline and its status as a line of JSON")
	return get
}

func onePipeline(cmd *cobra.Command, args []string) error {
	if len(args) != 1 {
		return misused(cmd, errors.New("give the NAME of one pipeline"))
	}
	return nil
}

func writePipeline(out io.Writer, p *adminv1.PipelineStatus) error {
	route, err := pipeline.FromProto(p.GetPipeline())
	if err != nil {
		return err
	}
	_, err = out.Write(meshfile.WritePipelines(route))
	return err
}

type applyFlags struct {
	admin  adminFlags
	force  bool
	expect uint64
}

func newPipelinesApply() *cobra.Command {
	var flags applyFlags
	apply := &cobra.Command{
		Use:   "apply FILE [NAME...]",
		Short: "Create or update the pipelines of a file",
		Long: "Create or update the pipelines of a file, or only the named ones; others are unchanged. The file is a mesh's, or\n" +
			"contains nothing but pipelines. When one of them is invalid, or does not fit its stages, nothing is applied.\n" +
			"stagemesh pipelines plan shows the changes first.",
		Example: "  stagemesh pipelines apply mesh.yaml\n  stagemesh pipelines apply pipelines.yaml digits",
		Args:    aFile,
		RunE: func(cmd *cobra.Command, args []string) error {
			var expect *uint64
			if cmd.Flags().Changed("expect") {
				expect = &flags.expect
			}
			wanted, err := wantedOf(args[0], args[1:])
			if err != nil {
				return err
			}
			if expect != nil && len(wanted) != 1 {
				return misused(cmd, fmt.Errorf("--expect: is the revision of one pipeline, and these are %d; name one", len(wanted)))
			}
			return flags.admin.pipelines(func(client pipelinesClient) error {
				return flags.run(cmd.Context(), client, wanted, expect, cmd.OutOrStdout())
			})
		},
	}
	flags.admin.add(apply)
	apply.Flags().BoolVar(&flags.force, "force", false, "apply pipelines even if their stages are unknown or do not fit together")
	apply.Flags().Uint64Var(&flags.expect, "expect", 0, "apply only if the pipeline has this revision; 0 means that it must not exist")
	return apply
}

func aFile(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return misused(cmd, errors.New("give the FILE that has the pipelines"))
	}
	return nil
}

// wantedOf returns the pipelines of a file, or the named ones.
func wantedOf(path string, names []string) ([]pipeline.Pipeline, error) {
	all, err := meshfile.ReadPipelines(path)
	if err != nil || len(names) == 0 {
		return all, err
	}
	byName, have := map[string]pipeline.Pipeline{}, make([]string, len(all))
	for i, p := range all {
		byName[string(p.Name)], have[i] = p, string(p.Name)
	}
	names = slices.Compact(slices.Sorted(slices.Values(names)))
	out := make([]pipeline.Pipeline, len(names))
	for i, name := range names {
		p, ok := byName[name]
		if !ok {
			return nil, fmt.Errorf("%s: there is no pipeline %q; there is %s", path, name, strings.Join(have, ", "))
		}
		out[i] = p
	}
	return out, nil
}

// Errors of a file that was not applied; its problems have been printed.
var (
	errNothingApplied = errors.New("nothing was applied; use --force to apply pipelines that do not fit")
	errInvalid        = errors.New("nothing was applied")
)

func (f applyFlags) run(ctx context.Context, client pipelinesClient, wanted []pipeline.Pipeline, expect *uint64, out io.Writer) error {
	planned, err := plansOf(ctx, client, wanted)
	if err != nil {
		return err
	}
	for _, plan := range planned {
		printProblems(out, plan)
		switch {
		case isInvalid(plan):
			err = errInvalid
		case hasErrors(plan) && !f.force && err == nil:
			err = errNothingApplied
		}
	}
	if err != nil {
		return err
	}
	for i, p := range wanted {
		request := &adminv1.ApplyPipelineRequest{Pipeline: p.ToProto(), ExpectRevision: expect, Force: f.force}
		if expect == nil {
			// Nobody may have changed it since the plan.
			request.ExpectRevision = proto.Uint64(planned[i].GetCurrent().GetRevision())
		}
		answer, err := client.ApplyPipeline(ctx, connect.NewRequest(request))
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "pipeline %s %s, revision %d\n", p.Name, describeApplied(answer.Msg.GetChange()), answer.Msg.GetPipeline().GetRevision())
	}
	return nil
}

// describeApplied names the change that was made.
func describeApplied(c adminv1.PipelineChange) string {
	switch c {
	case adminv1.PipelineChange_PIPELINE_CHANGE_CREATE:
		return "created"
	case adminv1.PipelineChange_PIPELINE_CHANGE_UPDATE:
		return "updated"
	default:
		return "unchanged"
	}
}

func newPipelinesDelete() *cobra.Command {
	var flags applyFlags
	remove := &cobra.Command{
		Use:   "delete NAME...",
		Short: "Delete pipelines",
		Long: "Delete pipelines; requests in flight continue. A pipeline in the file of a gateway stays deleted until that file\n" +
			"changes it.",
		Example: "  stagemesh pipelines delete digits",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return misused(cmd, errors.New("give the NAME of at least one pipeline"))
			}
			if cmd.Flags().Changed("expect") && len(args) != 1 {
				return misused(cmd, errors.New("--expect: is the revision of one pipeline; name one"))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			var expect *uint64
			if cmd.Flags().Changed("expect") {
				expect = &flags.expect
			}
			return flags.admin.pipelines(func(client pipelinesClient) error {
				for _, name := range args {
					if _, err := client.DeletePipeline(cmd.Context(), connect.NewRequest(&adminv1.DeletePipelineRequest{Name: name, ExpectRevision: expect})); err != nil {
						return err
					}
					fmt.Fprintf(cmd.OutOrStdout(), "pipeline %s deleted\n", name)
				}
				return nil
			})
		},
	}
	flags.admin.add(remove)
	remove.Flags().Uint64Var(&flags.expect, "expect", 0, "delete only if the pipeline has this revision")
	return remove
}

// staleness is part of an answer that may be out of date.
type staleness interface {
	GetStaleSince() *timestamppb.Timestamp
	GetStaleCause() string
}

func printStale(out io.Writer, answer staleness, now time.Time) {
	if since := answer.GetStaleSince(); since != nil {
		fmt.Fprintf(out, "the registry has been unreachable for %s, so this may be out of date: %s\n", age(now.Sub(since.AsTime())), cmp.Or(visible(answer.GetStaleCause()), "the cause is unknown"))
	}
}
