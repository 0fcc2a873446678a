package stagemesh

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

	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/meshfile"
)

// pipelinesClient is what the verbs of pipelines ask.
type pipelinesClient = adminv1connect.PipelineServiceClient

func newPipelines() *cobra.Command {
	pipelines := &cobra.Command{
		Use:   "pipelines",
		Short: "List the mesh's pipelines, and change them while it runs",
		Long: "Pipelines is about the mesh's pipelines as its registry has them. It asks the admin port of a gateway, any of the\n" +
			"mesh; all gateways follow a change at once.",
		// A verb that there is not is an error, not a call for help.
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	pipelines.AddCommand(newPipelinesList(), newPipelinesGet(), newPipelinesApply(), newPipelinesDelete())
	return pipelines
}

// pipelines hands the function a client of the pipelines.
func (a adminFlags) pipelines(ask func(pipelinesClient) error) error {
	return a.reach(func(client connect.HTTPClient, address string, options ...connect.ClientOption) error {
		return telling(ask(adminv1connect.NewPipelineServiceClient(client, address, options...)))
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

// sourceOf is a word for where a pipeline is from.
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
		Short:   "Print a pipeline as a file that can be applied",
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
	get.Flags().BoolVar(&flags.json, "json", false, "print it, and how it is, as a line of JSON")
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
		Short: "Make or change pipelines as a file has them",
		Long: "Apply makes the pipelines of a file, or those of them that are named, or changes them; others stay as they are. The\n" +
			"file is a mesh's, or has nothing but pipelines. Where one of them is wrong, or does not fit its stages, nothing is\n" +
			"changed. stagemesh plan shows what would be.",
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
	apply.Flags().BoolVar(&flags.force, "force", false, "apply pipelines also where their stages are not known, or do not fit together")
	apply.Flags().Uint64Var(&flags.expect, "expect", 0, "the revision that the pipeline has to have; 0 is that there is none")
	return apply
}

func aFile(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return misused(cmd, errors.New("give the FILE that has the pipelines"))
	}
	return nil
}

// wantedOf returns the pipelines of a file, or those that are named.
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

// Why a file was not applied, for the reasons that are printed.
var (
	errNothingApplied = errors.New("nothing was applied; --force applies what does not fit")
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
		case invalid(plan):
			err = errInvalid
		case wrong(plan) && !f.force && err == nil:
			err = errNothingApplied
		}
	}
	if err != nil {
		return err
	}
	for i, p := range wanted {
		request := &adminv1.ApplyPipelineRequest{Pipeline: p.ToProto(), ExpectRevision: expect, Force: f.force}
		if expect == nil {
			// Nobody is to have changed it since the plan.
			request.ExpectRevision = proto.Uint64(planned[i].GetCurrent().GetRevision())
		}
		answer, err := client.ApplyPipeline(ctx, connect.NewRequest(request))
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "pipeline %s %s, revision %d\n", p.Name, applied(answer.Msg.GetChange()), answer.Msg.GetPipeline().GetRevision())
	}
	return nil
}

// applied is a word for what was done.
func applied(c adminv1.PipelineChange) string {
	switch c {
	case adminv1.PipelineChange_PIPELINE_CHANGE_CREATE:
		return "is new"
	case adminv1.PipelineChange_PIPELINE_CHANGE_UPDATE:
		return "is changed"
	default:
		return "is as it was"
	}
}

func newPipelinesDelete() *cobra.Command {
	var flags applyFlags
	remove := &cobra.Command{
		Use:   "delete NAME...",
		Short: "Delete pipelines",
		Long: "Delete removes pipelines; requests that are under way go on. One that is in the file of a gateway stays deleted until\n" +
			"that file says something else about it.",
		Example: "  stagemesh pipelines delete digits",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return misused(cmd, errors.New("give the NAME of a pipeline, or several"))
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
					fmt.Fprintf(cmd.OutOrStdout(), "pipeline %s is deleted\n", name)
				}
				return nil
			})
		},
	}
	flags.admin.add(remove)
	remove.Flags().Uint64Var(&flags.expect, "expect", 0, "the revision that the pipeline has to have")
	return remove
}

// staleness is an answer that may be out of date.
type staleness interface {
	GetStaleSince() *timestamppb.Timestamp
	GetStaleCause() string
}

func printStale(out io.Writer, answer staleness, now time.Time) {
	if since := answer.GetStaleSince(); since != nil {
		fmt.Fprintf(out, "the registry has been away for %s, and this may be out of date: %s\n", age(now.Sub(since.AsTime())), cmp.Or(visible(answer.GetStaleCause()), "nobody knows why"))
	}
}
