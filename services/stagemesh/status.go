package stagemesh

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
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
		Short: "Show who serves the mesh's stages, and how they are",
		Long: "Status shows the hosts of the mesh as its registry has them. It asks the admin port of a gateway, any of the mesh;\n" +
			"the mesh's file has to have a registry.",
		Example: "  stagemesh status\n  stagemesh status --stage classify --watch\n  stagemesh status --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := validStage(cmd, flags.stage); err != nil {
				return err
			}
			return flags.admin.reach(func(client connect.HTTPClient, address string, options ...connect.ClientOption) error {
				return flags.run(cmd.Context(), adminv1connect.NewMeshServiceClient(client, address, options...), cmd.OutOrStdout())
			})
		},
	}
	flags.admin.add(status)
	status.Flags().StringVar(&flags.stage, "stage", "", "only hosts of this stage")
	status.Flags().BoolVar(&flags.json, "json", false, "print each host as a line of JSON")
	status.Flags().BoolVar(&flags.watch, "watch", false, "show it again every second, until Ctrl-C")
	return status
}

// showEvery is how often --watch shows the hosts.
const showEvery = time.Second

func (f statusFlags) run(ctx context.Context, client adminv1connect.MeshServiceClient, out io.Writer) error {
	ticker := time.NewTicker(showEvery)
	defer ticker.Stop()
	for {
		answer, err := client.ListHosts(ctx, connect.NewRequest(&adminv1.ListHostsRequest{Stage: f.stage}))
		if err != nil {
			return err
		}
		if err := f.print(out, answer.Msg, time.Now()); err != nil || !f.watch {
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

func (f statusFlags) print(out io.Writer, answer *adminv1.ListHostsResponse, now time.Time) error {
	if f.json {
		for _, host := range answer.GetHosts() {
			if err := printJSON(out, host); err != nil {
				return err
			}
		}
		return nil
	}
	if since := answer.GetStaleSince(); since != nil {
		fmt.Fprintf(out, "the registry has been away for %s, and this may be out of date: %s\n", age(now.Sub(since.AsTime())), visible(answer.GetStaleCause()))
	}
	if len(answer.GetHosts()) == 0 {
		_, err := fmt.Fprintln(out, "there is no host")
		return err
	}
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "STAGE\tHOST\tSTATE\tIN HAND\tRUNNING\tQUEUE WAIT\tWORKERS\tVERSION\tADDRESS\tUP")
	for _, host := range answer.GetHosts() {
		r := host.GetRecord()
		fmt.Fprintf(table, "%s\t%s\t%s\t%d/%d\t%d/%d\t%s\t%s\t%s\t%s\t%s\n", visible(r.GetStage()), visible(r.GetHost()), stateOf(host),
			r.GetInHand(), r.GetMaxInFlight(), r.GetRunning(), r.GetSlots(), r.GetQueueWait().AsDuration().Round(10*time.Microsecond),
			workersOf(r), cmp.Or(visible(r.GetVersion()), "-"), cmp.Or(visible(r.GetAddress()), "-"), age(now.Sub(r.GetStartedAt().AsTime())))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	return f.printCauses(out, answer.GetHosts())
}

// stateOf is a word for how a host is.
func stateOf(h *adminv1.HostStatus) string {
	switch r := h.GetRecord(); {
	case !h.GetAlive():
		return "gone"
	case r.GetDraining():
		return "draining"
	case !r.GetReady():
		return "not ready"
	default:
		return "ready"
	}
}

// workersOf is how many workers of a host are ready, of how many.
func workersOf(r *meshv1.HostRecord) string {
	if len(r.GetWorkers()) == 0 {
		return "-"
	}
	ready := 0
	for _, w := range r.GetWorkers() {
		if w.GetState() == "READY" {
			ready++
		}
	}
	return fmt.Sprintf("%d/%d", ready, len(r.GetWorkers()))
}

// printCauses says below the table why hosts and workers are not ready.
func (f statusFlags) printCauses(out io.Writer, hosts []*adminv1.HostStatus) error {
	var text strings.Builder
	for _, host := range hosts {
		r := host.GetRecord()
		name := visible(r.GetStage()) + " " + visible(r.GetHost())
		if host.GetAlive() && r.GetCause() != "" {
			fmt.Fprintf(&text, "%s: %s\n", name, visible(r.GetCause()))
		}
		for _, w := range r.GetWorkers() {
			if host.GetAlive() && w.GetCause() != "" {
				fmt.Fprintf(&text, "%s: worker %d is %s, %s\n", name, w.GetIndex(), visible(w.GetState()), visible(w.GetCause()))
			}
		}
	}
	_, err := io.WriteString(out, text.String())
	return err
}
