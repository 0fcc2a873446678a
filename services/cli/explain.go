package cli

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func newExplain() *cobra.Command {
	var asJSON bool
	explain := &cobra.Command{
		Use:   "explain REQUEST_ID",
		Short: "Explain where the time of a request went",
		Long: "Show where the time of a request went, what is usual there, and what would have helped; of a request in flight, who has it.\n" +
			"The command asks the admin port of any gateway of the mesh. Gateways remember their last 10,000 requests at most; after\n" +
			"that, stored results and dead letters tell.",
		Example: "  stagemesh explain 01a1fc37-9c70-7089-b8a4-eabc34a6f203",
		Args:    between(1, 1, "give one REQUEST_ID"),
	}
	addJSON(explain, &asJSON, "the report")
	return askAdmin(explain, func(cmd *cobra.Command, client clients, args []string) error {
		response, err := client.ExplainRequest(cmd.Context(), connect.NewRequest(&adminv1.ExplainRequestRequest{RequestId: args[0]}))
		switch {
		case err != nil:
			return err
		case asJSON:
			return printJSON(cmd.OutOrStdout(), response.Msg.GetReport())
		}
		return printReport(cmd.OutOrStdout(), response.Msg.GetReport(), time.Now())
	})
}

// printReport prints what is known of a request, each time with the usual one in brackets, and
// what follows.
func printReport(out io.Writer, r *meshv1.RequestReport, now time.Time) error {
	p := page{tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)}
	durability, _ := pipeline.DurabilityFromProto(r.GetDurability())
	fmt.Fprintf(p, "request %s\n", visible(r.GetRequestId()))
	p.line("pipeline", "%s", r.GetPipeline())
	p.line("tenant", "%s", r.GetTenant())
	p.line("gateway", "%s", r.GetGateway())
	p.line("queue", "%s", durability)
	if at := r.GetAdmittedAt(); at != nil {
		p.line("admitted", "%s, %s ago", moment(at), age(now.Sub(at.AsTime())))
	}
	if r.GetTotal() != nil {
		p.line("took", "%s", withUsual(r.GetTotal(), r.GetUsualTotal()))
	}
	if f := r.GetFault(); f != nil {
		p.line("fault", "%s: %s", f.GetReason(), f.GetMessage())
	}
	p.line("trace", "%s", r.GetTraceId())
	if err := p.Flush(); err != nil {
		return err
	}
	var rows [][]string
	for _, step := range r.GetSteps() {
		t, usual := step.GetTiming(), step.GetUsual()
		batch := fmt.Sprint(t.GetBatchSize())
		if usual != nil {
			batch += fmt.Sprintf(" (%d)", usual.GetBatchSize())
		}
		rows = append(rows, []string{
			visible(t.GetStep()), cmp.Or(visible(t.GetHost()), "-"), fmt.Sprint(t.GetAttempt()), withUsual(t.GetQueueWait(), usual.GetQueueWait()),
			withUsual(t.GetBatchWait(), usual.GetBatchWait()), withUsual(t.GetRun(), usual.GetRun()), batch, cmp.Or(visible(t.GetDispatchReason()), "-"),
		})
	}
	if len(rows) > 0 {
		fmt.Fprintln(out)
		if err := printTable(out, "STEP\tHOST\tDELIVERY\tQUEUE\tWAIT\tRUN\tBATCH\tDISPATCH", rows); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(out, "\n%s\n", strings.Join(texts(r.GetSummary(), visible), "\n"))
	return err
}

func withUsual(d, usual *durationpb.Duration) string {
	out := Milliseconds(d.AsDuration())
	if usual != nil {
		out += " (" + Milliseconds(usual.AsDuration()) + ")"
	}
	return out
}
