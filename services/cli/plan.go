package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func newPipelinesPlan() *cobra.Command {
	var flags struct {
		admin adminFlags
		json  bool
	}
	plan := &cobra.Command{
		Use:   "plan FILE [NAME...]",
		Short: "Show what applying a file would change, and its problems",
		Long: "Show what stagemesh pipelines apply would change, and change nothing. The pipelines are checked against the running\n" +
			"stages: whether they exist, have the queues, and take the outputs of the step before. The exit code is 1 if a pipeline\n" +
			"would not be applied.",
		Example: "  stagemesh pipelines plan mesh.yaml",
		Args:    aFile,
		RunE: func(cmd *cobra.Command, args []string) error {
			wanted, err := wantedOf(args[0], args[1:])
			if err != nil {
				return err
			}
			return flags.admin.pipelines(func(client pipelinesClient) error {
				plans, err := plansOf(cmd.Context(), client, wanted)
				if err != nil {
					return err
				}
				if flags.json {
					err = printLines(cmd.OutOrStdout(), plans)
				} else {
					err = printPlans(cmd.OutOrStdout(), wanted, plans)
				}
				if err == nil && slices.ContainsFunc(plans, hasErrors) {
					err = errDoesNotFit
				}
				return err
			})
		},
	}
	flags.admin.add(plan)
	plan.Flags().BoolVar(&flags.json, "json", false, "print the plan for each pipeline as a line of JSON")
	return plan
}

// plansOf asks what applying the pipelines would change; each pipeline has a plan.
func plansOf(ctx context.Context, client pipelinesClient, wanted []pipeline.Pipeline) ([]*adminv1.PipelinePlan, error) {
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
