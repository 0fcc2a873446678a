package stagemesh

import (
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"
	"github.com/google/uuid"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"
)

// oneRequest takes the id of a request as the only argument.
func oneRequest(cmd *cobra.Command, args []string) error {
	if len(args) != 1 {
		return misused(cmd, errors.New("give one REQUEST_ID"))
	}
	if _, err := uuid.Parse(args[0]); err != nil {
		return misused(cmd, fmt.Errorf("REQUEST_ID: %q is no id such as 01a1fc37-9c70-7089-b8a4-eabc34a6f203", args[0]))
	}
	return nil
}

func newResult() *cobra.Command {
	var address addressFlag
	var style style
	var wait time.Duration
	result := &cobra.Command{
		Use:   "result REQUEST_ID",
		Short: "Print the stored answer to a durable request",
		Long: "Result prints the stored answer to a request of --durability file, whichever gateway of the mesh took it.\n" +
			"Where the request failed, its failure is the error; NOT_FOUND says that no answer is stored, not yet or not any more.",
		Example: "  stagemesh result 01a1fc37-9c70-7089-b8a4-eabc34a6f203 --wait 5s",
		Args:    oneRequest,
		RunE: func(cmd *cobra.Command, args []string) error {
			if wait < 0 {
				return misused(cmd, fmt.Errorf("--wait: %s is negative", wait))
			}
			out := newPrinter(cmd.OutOrStdout(), style, "REQUEST")
			return address.with(func(client inferencev1connect.InferenceServiceClient) error {
				request := &inferencev1.GetResultRequest{RequestId: args[0], Wait: durationpb.New(wait)}
				response, err := client.GetResult(cmd.Context(), connect.NewRequest(request))
				if err != nil {
					return told{err}
				}
				answer := response.Msg.GetResult()
				err = out.answer(answer.GetRequestId(), answer, answer.GetTimeline().GetTotal().AsDuration())
				return errors.Join(err, out.flush())
			})
		},
	}
	address.add(result)
	result.Flags().DurationVar(&wait, "wait", 0, "how long to wait for an answer that is not there yet")
	style.add(result)
	return result
}

func newCancel() *cobra.Command {
	var address addressFlag
	cancel := &cobra.Command{
		Use:   "cancel REQUEST_ID",
		Short: "Call a request off",
		Long: "Cancel calls a request off, whichever gateway of the mesh took it: its caller gets CANCELLED, what waits of it is\n" +
			"dropped, and what runs is told to stop. It is best effort: a request that is done stays done, and that there is no\n" +
			"such request is no error.",
		Example: "  stagemesh cancel 01a1fc37-9c70-7089-b8a4-eabc34a6f203",
		Args:    oneRequest,
		RunE: func(cmd *cobra.Command, args []string) error {
			return address.with(func(client inferencev1connect.InferenceServiceClient) error {
				if _, err := client.Cancel(cmd.Context(), connect.NewRequest(&inferencev1.CancelRequest{RequestId: args[0]})); err != nil {
					return told{err}
				}
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "the mesh is told to call %s off; what is done stays done\n", args[0])
				return err
			})
		},
	}
	address.add(cancel)
	return cancel
}
