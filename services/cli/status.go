package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
)

type statusFlags struct {
	admin adminFlags
	stage string
	json  bool
	watch bool
}

func newStatus() *cobra.Command {
	var flags statusFlags
	status := &cobra.Command{
		Use:   "status",
		Short: "Show the state of pipelines, stages and hosts",
		Long: "Show the mesh's pipelines, its stages with their queues, and its hosts as the registry lists them. The command asks the\n" +
			"admin port of any gateway of the mesh.",
		Example: "  stagemesh status\n  stagemesh status --stage classify --watch\n  stagemesh status --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := validStage(cmd, flags.stage); err != nil {
				return err
			}
			return flags.admin.reach(func(client connect.HTTPClient, address string, options ...connect.ClientOption) error {
				s := statusClient{
					mesh:      adminv1connect.NewMeshServiceClient(client, address, options...),
					pipelines: adminv1connect.NewPipelineServiceClient(client, address, options...),
				}
				return describeRPC(flags.run(cmd.Context(), s, cmd.OutOrStdout(), cmd.ErrOrStderr()))
			})
		},
	}
	flags.admin.add(status)
	status.Flags().StringVar(&flags.stage, "stage", "", "show only this stage, its pipelines and its hosts")
	status.Flags().BoolVar(&flags.json, "json", false, "print the status as a line of JSON")
	status.Flags().BoolVar(&flags.watch, "watch", false, "print the status every second, until Ctrl-C")
	return status
}

// showEvery is the interval of --watch.
const showEvery = time.Second

func (f statusFlags) run(ctx context.Context, client statusClient, out, errOut io.Writer) error {
	ticker := time.NewTicker(showEvery)
	defer ticker.Stop()
	for first := true; ; first = false {
		now, err := client.ask(ctx, f.stage)
		switch {
		case ctx.Err() != nil && !first:
			return nil
		case err == nil:
			err = f.print(out, now, time.Now())
		case f.watch && !first:
			// The gateway answered before, and may again.
			fmt.Fprintln(errOut, "stagemesh:", visible(Describe(err)))
			err = nil
		}
		if err != nil || !f.watch {
			return err
		}
		select {
		case <-ticker.C:
			if !f.json {
				fmt.Fprintln(out)
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// statusClient asks a gateway about the mesh.
type statusClient struct {
	mesh      adminv1connect.MeshServiceClient
	pipelines adminv1connect.PipelineServiceClient
}

// meshStatus is the state of a mesh.
type meshStatus struct {
	pipelines *adminv1.ListPipelinesResponse
	stages    *adminv1.ListStagesResponse
	// hosts is nil when the mesh has no registry.
	hosts *adminv1.ListHostsResponse
}

// ask returns the state of the mesh, or the part of it that belongs to a stage.
func (c statusClient) ask(ctx context.Context, stage string) (out meshStatus, err error) {
	pipelines, err := c.pipelines.ListPipelines(ctx, connect.NewRequest(&adminv1.ListPipelinesRequest{}))
	if err != nil {
		return out, err
	}
	stages, err := c.mesh.ListStages(ctx, connect.NewRequest(&adminv1.ListStagesRequest{}))
	if err != nil {
		return out, err
	}
	out.pipelines, out.stages = pipelines.Msg, stages.Msg
	hosts, err := c.mesh.ListHosts(ctx, connect.NewRequest(&adminv1.ListHostsRequest{Stage: stage}))
	switch {
	case err == nil:
		out.hosts = hosts.Msg
	case connect.CodeOf(err) != connect.CodeUnimplemented:
		return out, err
	}
	if stage == "" {
		return out, nil
	}
	return out, out.only(stage)
}

// only removes everything that does not belong to a stage, which must exist.
func (s *meshStatus) only(stage string) error {
	var names []string
	for _, one := range s.stages.GetStages() {
		names = append(names, visible(one.GetStage()))
	}
	if !slices.Contains(names, stage) {
		return fmt.Errorf("--stage: there is no stage %s; there is %s", stage, cmp.Or(strings.Join(names, ", "), "none"))
	}
	s.stages.Stages = slices.DeleteFunc(s.stages.GetStages(), func(one *adminv1.StageStatus) bool { return one.GetStage() != stage })
	s.pipelines.Pipelines = slices.DeleteFunc(s.pipelines.GetPipelines(), func(p *adminv1.PipelineStatus) bool {
		return !slices.ContainsFunc(p.GetPipeline().GetSteps(), func(step *meshv1.PipelineStep) bool { return step.GetStage() == stage })
	})
	return nil
}
