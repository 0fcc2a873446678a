package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func newPipelines() *cobra.Command {
	return group("pipelines", "List, get, apply, delete or plan pipelines",
		"List, get, apply, delete or plan the pipelines in the mesh's registry, while the mesh runs. The commands ask the admin port\n"+
			"of any gateway of the mesh; all gateways follow a change at once.",
		newPipelinesList(), newPipelinesGet(), newPipelinesApply(), newPipelinesDelete(), newPipelinesPlan())
}

func newPipelinesList() *cobra.Command {
	var asJSON bool
	list := &cobra.Command{
		Use:     "list",
		Short:   "List the pipelines",
		Example: "  stagemesh pipelines list\n  stagemesh pipelines list --json",
		Args:    cobra.NoArgs,
	}
	addJSON(list, &asJSON, "each pipeline")
	return askAdmin(list, func(cmd *cobra.Command, client clients, _ []string) error {
		answer, err := client.ListPipelines(cmd.Context(), connect.NewRequest(&adminv1.ListPipelinesRequest{}))
		if err != nil {
			return err
		}
		if asJSON {
			return printJSON(cmd.OutOrStdout(), answer.Msg.GetPipelines()...)
		}
		now := time.Now()
		printStale(cmd.OutOrStdout(), answer.Msg, now)
		return printPipelines(cmd.OutOrStdout(), answer.Msg.GetPipelines(), now)
	})
}

func printPipelines(out io.Writer, pipelines []*adminv1.PipelineStatus, now time.Time) error {
	if len(pipelines) == 0 {
		_, err := fmt.Fprintln(out, "there is no pipeline")
		return err
	}
	rows := make([][]string, len(pipelines))
	for i, p := range pipelines {
		var stages []string
		for _, step := range p.GetPipeline().GetSteps() {
			stages = append(stages, visible(cmp.Or(step.GetStage(), step.GetName())))
		}
		for _, m := range p.GetMaps() {
			stages = append(stages, fmt.Sprintf("(%s: %.1f items)", visible(m.GetPath()), m.GetItems()))
		}
		state := "ready"
		if !p.GetReady() {
			state = "not ready"
		}
		revision, since := "-", "-"
		if p.GetRevision() != 0 {
			revision, since = fmt.Sprint(p.GetRevision()), age(now.Sub(p.GetAppliedAt().AsTime()))
		}
		rows[i] = []string{visible(p.GetPipeline().GetName()), strings.Join(stages, " > "), state, sourceOf(p), revision, since}
	}
	return printTable(out, addWhy("PIPELINE\tSTAGES\tSTATE\tSOURCE\tREVISION\tAGE", rows, texts(pipelines, (*adminv1.PipelineStatus).GetCause)), rows)
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
	var asJSON bool
	get := &cobra.Command{
		Use:     "get NAME",
		Short:   "Print a pipeline as a file that apply takes",
		Example: "  stagemesh pipelines get digits > digits.yaml",
		Args:    between(1, 1, "give the NAME of one pipeline"),
	}
	addJSON(get, &asJSON, "the pipeline and its status")
	return askAdmin(get, func(cmd *cobra.Command, client clients, args []string) error {
		answer, err := client.GetPipeline(cmd.Context(), connect.NewRequest(&adminv1.GetPipelineRequest{Name: args[0]}))
		if err != nil {
			return err
		}
		if asJSON {
			return printJSON(cmd.OutOrStdout(), answer.Msg.GetPipeline())
		}
		route, err := pipeline.FromProto(answer.Msg.GetPipeline().GetPipeline())
		if err != nil {
			return err
		}
		_, err = cmd.OutOrStdout().Write(meshfile.WritePipelines(route))
		return err
	})
}

func newPipelinesApply() *cobra.Command {
	var force bool
	var revision uint64
	apply := &cobra.Command{
		Use:   "apply FILE [NAME...]",
		Short: "Create or update the pipelines of a file",
		Long: "Create or update the pipelines of a file, or only the named ones; others are unchanged. The file is a mesh's, or\n" +
			"contains nothing but pipelines. When one of them is invalid, or does not fit its stages, nothing is applied.\n" +
			"stagemesh pipelines plan shows the changes first.",
		Example: "  stagemesh pipelines apply mesh.yaml\n  stagemesh pipelines apply pipelines.yaml digits",
		Args:    aFile,
	}
	apply.Flags().BoolVar(&force, "force", false, "apply pipelines even if their stages are unknown or do not fit together")
	apply.Flags().Uint64Var(&revision, "expect", 0, "apply only if the pipeline has this revision; 0 means that it must not exist")
	return askAdmin(apply, func(cmd *cobra.Command, client clients, args []string) error {
		wanted, err := wantedOf(args[0], args[1:])
		if err != nil {
			return err
		}
		expect := givenRevision(cmd, &revision)
		if expect != nil && len(wanted) != 1 {
			return usageError(cmd, fmt.Errorf("--expect: is the revision of one pipeline, and these are %d; name one", len(wanted)))
		}
		return applyAll(cmd.Context(), client, wanted, expect, force, cmd.OutOrStdout())
	})
}

// givenRevision returns the revision if the flag --expect is given, and else nil.
func givenRevision(cmd *cobra.Command, revision *uint64) *uint64 {
	if !cmd.Flags().Changed("expect") {
		return nil
	}
	return revision
}

// aFile accepts a file, and more arguments.
func aFile(cmd *cobra.Command, args []string) error {
	return between(1, unlimited, "give the FILE that has the pipelines")(cmd, args)
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

func applyAll(ctx context.Context, client clients, wanted []pipeline.Pipeline, expect *uint64, force bool, out io.Writer) error {
	planned, err := plansOf(ctx, client, wanted)
	if err != nil {
		return err
	}
	for _, plan := range planned {
		printProblems(out, plan)
		switch {
		case isInvalid(plan):
			err = errInvalid
		case hasErrors(plan) && !force && err == nil:
			err = errNothingApplied
		}
	}
	if err != nil {
		return err
	}
	for i, p := range wanted {
		request := &adminv1.ApplyPipelineRequest{Pipeline: p.ToProto(), ExpectRevision: expect, Force: force}
		if expect == nil {
			// It must not have changed since the plan.
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
	var revision uint64
	remove := &cobra.Command{
		Use:   "delete NAME...",
		Short: "Delete pipelines",
		Long: "Delete pipelines; requests in flight continue. A pipeline in the file of a gateway stays deleted until that file\n" +
			"changes it.",
		Example: "  stagemesh pipelines delete digits",
		Args: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("expect") && len(args) > 1 {
				return usageError(cmd, errors.New("--expect: is the revision of one pipeline; name one"))
			}
			return between(1, unlimited, "give the NAME of at least one pipeline")(cmd, args)
		},
	}
	remove.Flags().Uint64Var(&revision, "expect", 0, "delete only if the pipeline has this revision")
	return askAdmin(remove, func(cmd *cobra.Command, client clients, args []string) error {
		expect := givenRevision(cmd, &revision)
		for _, name := range args {
			if _, err := client.DeletePipeline(cmd.Context(), connect.NewRequest(&adminv1.DeletePipelineRequest{Name: name, ExpectRevision: expect})); err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "pipeline %s deleted\n", name)
		}
		return nil
	})
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

func newPipelinesPlan() *cobra.Command {
	var asJSON bool
	plan := &cobra.Command{
		Use:   "plan FILE [NAME...]",
		Short: "Show what applying a file would change, and its problems",
		Long: "Show what stagemesh pipelines apply would change, and change nothing. The pipelines are checked against the running\n" +
			"stages: whether they exist, have the queues, and take the outputs of the step before. The exit code is 1 if a pipeline\n" +
			"would not be applied.",
		Example: "  stagemesh pipelines plan mesh.yaml",
		Args:    aFile,
	}
	addJSON(plan, &asJSON, "the plan for each pipeline")
	return askAdmin(plan, func(cmd *cobra.Command, client clients, args []string) error {
		wanted, err := wantedOf(args[0], args[1:])
		if err != nil {
			return err
		}
		plans, err := plansOf(cmd.Context(), client, wanted)
		if err != nil {
			return err
		}
		if asJSON {
			err = printJSON(cmd.OutOrStdout(), plans...)
		} else {
			err = printPlans(cmd.OutOrStdout(), wanted, plans)
		}
		if err == nil && slices.ContainsFunc(plans, hasErrors) {
			err = errDoesNotFit
		}
		return err
	})
}

// plansOf asks what applying the pipelines would change; each pipeline has a plan.
func plansOf(ctx context.Context, client clients, wanted []pipeline.Pipeline) ([]*adminv1.PipelinePlan, error) {
	in := &adminv1.PlanPipelinesRequest{Pipelines: make([]*meshv1.Pipeline, len(wanted))}
	for i, p := range wanted {
		in.Pipelines[i] = p.ToProto()
	}
	answer, err := client.PlanPipelines(ctx, connect.NewRequest(in))
	if err != nil {
		return nil, err
	}
	if len(answer.Msg.GetPlans()) != len(wanted) {
		return nil, fmt.Errorf("the gateway answers with %d plans for %d pipelines", len(answer.Msg.GetPlans()), len(wanted))
	}
	return answer.Msg.GetPlans(), nil
}

// errDoesNotFit is returned for plans with problems, which have been printed.
var errDoesNotFit = errors.New("some pipelines would not be applied")

func printPlans(out io.Writer, wanted []pipeline.Pipeline, plans []*adminv1.PipelinePlan) error {
	for i, plan := range plans {
		fmt.Fprintf(out, "%s: %s\n", wanted[i].Name, describePlanned(plan.GetChange()))
		if current := plan.GetCurrent(); current != nil {
			if err := printDifferences(out, current.GetPipeline(), wanted[i]); err != nil {
				return err
			}
		}
		printProblems(out, plan)
	}
	return nil
}

func printDifferences(out io.Writer, current *meshv1.Pipeline, wanted pipeline.Pipeline) error {
	before, err := pipeline.FromProto(current)
	if err != nil {
		return err
	}
	for _, d := range meshfile.Differences(before, wanted) {
		switch {
		case d.Old == "":
			fmt.Fprintf(out, "  + %s: %s\n", d.Key, d.New)
		case d.New == "":
			fmt.Fprintf(out, "  - %s: %s\n", d.Key, d.Old)
		default:
			fmt.Fprintf(out, "  ~ %s: %s -> %s\n", d.Key, d.Old, d.New)
		}
	}
	return nil
}

// describePlanned names the change that would be made.
func describePlanned(c adminv1.PipelineChange) string {
	switch c {
	case adminv1.PipelineChange_PIPELINE_CHANGE_CREATE:
		return "would be created"
	case adminv1.PipelineChange_PIPELINE_CHANGE_UPDATE:
		return "would be updated"
	case adminv1.PipelineChange_PIPELINE_CHANGE_NONE:
		return "unchanged"
	default:
		return "is invalid"
	}
}

// printProblems prints the problems of a pipeline.
func printProblems(out io.Writer, plan *adminv1.PipelinePlan) {
	for _, problem := range plan.GetProblems() {
		word := "error"
		if problem.GetSeverity() == adminv1.PipelineSeverity_PIPELINE_SEVERITY_WARNING {
			word = "warning"
		}
		at := visible(plan.GetName())
		if problem.GetField() != "" {
			at += "." + visible(problem.GetField())
		}
		fmt.Fprintf(out, "  %s: %s: %s\n", word, at, visible(problem.GetMessage()))
	}
}

// hasErrors reports whether a pipeline would not be applied.
func hasErrors(plan *adminv1.PipelinePlan) bool {
	for _, problem := range plan.GetProblems() {
		if problem.GetSeverity() != adminv1.PipelineSeverity_PIPELINE_SEVERITY_WARNING {
			return true
		}
	}
	return false
}

// isInvalid reports whether a pipeline is invalid, which --force does not change.
func isInvalid(plan *adminv1.PipelinePlan) bool {
	return slices.ContainsFunc(plan.GetProblems(), func(p *adminv1.PipelineProblem) bool {
		return p.GetSeverity() == adminv1.PipelineSeverity_PIPELINE_SEVERITY_INVALID
	})
}
