package cli

import (
	"context"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
)

// names returns the names of one kind that a mesh has and that may begin with the prefix.
type names func(ctx context.Context, c clients, prefix string) ([]string, error)

func pipelineNames(ctx context.Context, c clients, _ string) ([]string, error) {
	out, err := askStatus(ctx, c, "")
	return texts(out.pipelines.GetPipelines(), func(p *adminv1.PipelineStatus) string { return p.GetPipeline().GetName() }), err
}

func stageNames(ctx context.Context, c clients, _ string) ([]string, error) {
	out, err := askStatus(ctx, c, "")
	return texts(out.stages.GetStages(), (*adminv1.StageStatus).GetStage), err
}

func queueNames(ctx context.Context, c clients, _ string) ([]string, error) {
	out, err := c.ListQueues(ctx, connect.NewRequest(&adminv1.ListQueuesRequest{}))
	if err != nil {
		return nil, err
	}
	return texts(out.Msg.GetQueues(), (*adminv1.JobQueueStatus).GetName), nil
}

func modelNames(ctx context.Context, c clients, prefix string) ([]string, error) {
	out, err := c.ListModels(ctx, connect.NewRequest(&adminv1.ListModelsRequest{Latest: true, IdPrefix: prefix}))
	if err != nil {
		return nil, err
	}
	return texts(out.Msg.GetModels(), func(m *adminv1.ModelStatus) string { return m.GetModel().GetId() }), nil
}

// completionTime bounds the wait of a shell for names.
const completionTime = 2 * time.Second

// addCompletion has shells complete the names of a running mesh.
func addCompletion(root *cobra.Command) {
	for path, arguments := range map[string][]names{
		"infer": {pipelineNames, nil}, "bench": {pipelineNames, nil}, "client python": {pipelineNames}, "client typescript": {pipelineNames},
		"pipelines get": {pipelineNames}, "pipelines delete": {pipelineNames}, "pipelines apply": {nil, pipelineNames}, "pipelines plan": {nil, pipelineNames},
		"jobs submit": {queueNames, nil}, "jobs list": {queueNames}, "queues pause": {queueNames}, "queues resume": {queueNames},
		"models show": {modelNames}, "models tap": {modelNames}, "models load": {modelNames}, "models evict": {modelNames}, "models unregister": {modelNames},
		"models settings": {stageNames}, "aliases set": {nil, modelNames},
	} {
		cmd, _, _ := root.Find(strings.Fields(path))
		cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
			list := arguments[min(len(args), len(arguments)-1)]
			if list == nil {
				return nil, cobra.ShellCompDirectiveDefault
			}
			return complete(cmd, list, typed)
		}
	}
	addFlagCompletion(root)
}

// addFlagCompletion does so for the flags of a command and of those below it.
func addFlagCompletion(cmd *cobra.Command) {
	for flag, list := range map[string]names{"stage": stageNames, "queue": queueNames, "pipeline": pipelineNames} {
		if cmd.Flags().Lookup(flag) != nil {
			_ = cmd.RegisterFlagCompletionFunc(flag, func(cmd *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
				return complete(cmd, list, typed)
			})
		}
	}
	for _, verb := range cmd.Commands() {
		addFlagCompletion(verb)
	}
}

// complete asks the admin port that the command's flags, variables or context name.
func complete(cmd *cobra.Command, list names, prefix string) (out []string, _ cobra.ShellCompDirective) {
	own := &cobra.Command{}
	var admin port
	admin.addAdmin(own)
	given := []string{contextFlag}
	if cmd.Flags().Lookup(adminFlag) != nil {
		given = append(given, adminFlag, tokenFlag, caFlag)
	}
	for _, flag := range given {
		if f := cmd.Flags().Lookup(flag); f.Changed {
			_ = own.Flags().Set(flag, f.Value.String())
		}
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), completionTime)
	defer cancel()
	err := admin.reach(func(c clients) (err error) {
		out, err = list(ctx, c, prefix)
		return err
	})
	if err != nil {
		cobra.CompErrorln(Describe(err))
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}
