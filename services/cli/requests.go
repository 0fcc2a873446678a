package cli

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

// oneRequest accepts one argument, the ID of a request.
func oneRequest(cmd *cobra.Command, args []string) error {
	if len(args) != 1 {
		return misused(cmd, errors.New("give one REQUEST_ID"))
	}
	if _, err := uuid.Parse(args[0]); err != nil {
		return misused(cmd, fmt.Errorf("REQUEST_ID: %q is not an ID such as 01a1fc37-9c70-7089-b8a4-eabc34a6f203", args[0]))
	}
	return nil
}

func newGet() *cobra.Command {
	get := &cobra.Command{
		Use:   "get",
		Short: "Get the result of a request",
		// An unknown verb is an error, not a request for help.
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	get.AddCommand(newGetResult())
	return get
}

func newGetResult() *cobra.Command {
	var address addressFlag
	var style style
	var wait time.Duration
	result := &cobra.Command{
		Use:   "result REQUEST_ID",
		Short: "Print the stored result of a durable request",
		Long: "Print the stored result of a request of --durability file, or of one with an idempotency key. Any gateway of the mesh\n" +
			"has it. A failed request's failure is the error. NOT_FOUND means that no result is stored: not yet, or not any more.",
		Example: "  stagemesh get result 01a1fc37-9c70-7089-b8a4-eabc34a6f203 --wait 5s",
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
					return rpcError{err}
				}
				answer := response.Msg.GetResult()
				err = out.answer(answer.GetRequestId(), answer, answer.GetTimeline().GetTotal().AsDuration())
				return errors.Join(err, out.flush())
			})
		},
	}
	address.add(result)
	result.Flags().DurationVar(&wait, "wait", 0, "how long to wait for a result that is not stored yet")
	style.add(result)
	return result
}

func newCancel() *cobra.Command {
	var address addressFlag
	cancel := &cobra.Command{
		Use:   "cancel REQUEST_ID",
		Short: "Cancel a request by its ID",
		Long: "Cancel a request by its ID, whichever gateway of the mesh took it. Its caller gets CANCELLED, its queued item is dropped,\n" +
			"and its running item is asked to stop. This is best effort: a finished request stays finished, and an unknown ID is no error.",
		Example: "  stagemesh cancel 01a1fc37-9c70-7089-b8a4-eabc34a6f203",
		Args:    oneRequest,
		RunE: func(cmd *cobra.Command, args []string) error {
			return address.with(func(client inferencev1connect.InferenceServiceClient) error {
				if _, err := client.Cancel(cmd.Context(), connect.NewRequest(&inferencev1.CancelRequest{RequestId: args[0]})); err != nil {
					return rpcError{err}
				}
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "the mesh was asked to cancel %s; finished work stays finished\n", args[0])
				return err
			})
		},
	}
	address.add(cancel)
	return cancel
}
