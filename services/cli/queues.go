package cli

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
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func newGates() *cobra.Command {
	var asJSON bool
	gates := &cobra.Command{
		Use: "gates", Short: "List the pools of jobs, and what their gates permit",
		Long: "List the pools of jobs: D is the last reading of the gate, B the baseline, N what may be in flight by them, OUT what is,\n" +
			"and WHY says why nothing is sent now.",
		Args: cobra.NoArgs,
	}
	addJSON(gates, &asJSON, "each pool")
	return askAdmin(gates, func(cmd *cobra.Command, client clients, _ []string) error {
		out, err := client.ListGates(cmd.Context(), connect.NewRequest(&adminv1.ListGatesRequest{}))
		if err != nil {
			return err
		}
		if asJSON {
			return printJSON(cmd.OutOrStdout(), out.Msg.GetPools()...)
		}
		rows := [][]string{}
		for _, p := range out.Msg.GetPools() {
			row := []string{p.GetPool(), p.GetState(), "-", "-", "-", "-", "-", "-", whySince(p.GetWhy(), p.GetSince())}
			if p.GetB() > 0 || p.GetSource() != "" {
				copy(row[2:], []string{fmt.Sprintf("%.2f", p.GetD()), fmt.Sprintf("%.2f", p.GetB()), fmt.Sprintf("%.0f", p.GetN()), fmt.Sprint(p.GetOut()), cmp.Or(p.GetSource(), "-"), ageOf(p.GetReadAt())})
			}
			rows = append(rows, row)
		}
		return printTable(cmd.OutOrStdout(), "POOL\tSTATE\tD\tB\tN\tOUT\tSOURCE\tAGE\tWHY", rows)
	})
}

// whySince returns a reason with how long it holds, before what explains it: D <= B for 41s.
func whySince(why string, since *timestamppb.Timestamp) string {
	if since == nil {
		return cmp.Or(visible(why), "-")
	}
	reason, more, hasMore := strings.Cut(why, ": ")
	if reason += " for " + ageOf(since); hasMore {
		reason += ": " + more
	}
	return visible(reason)
}

func ageOf(t *timestamppb.Timestamp) string {
	if t == nil {
		return "-"
	}
	return age(time.Since(t.AsTime()))
}

func newQueues() *cobra.Command {
	var asJSON bool
	queues := &cobra.Command{
		Use: "queues", Short: "List, pause or resume the queues of jobs",
		Long: "List the queues of jobs: how many jobs wait for their turn, for their next attempt, or run.",
		Args: cobra.NoArgs,
	}
	addJSON(queues, &asJSON, "each queue")
	queues = askAdmin(queues, func(cmd *cobra.Command, client clients, _ []string) error {
		out, err := client.ListQueues(cmd.Context(), connect.NewRequest(&adminv1.ListQueuesRequest{}))
		if err != nil {
			return err
		}
		if asJSON {
			return printJSON(cmd.OutOrStdout(), out.Msg.GetQueues()...)
		}
		rows := [][]string{}
		for _, q := range out.Msg.GetQueues() {
			rows = append(rows, []string{
				q.GetName(), q.GetPool(), q.GetState(), fmt.Sprint(q.GetQueued()), fmt.Sprint(q.GetDelayed()), fmt.Sprint(q.GetRunning()),
				ageOf(q.GetOldest()), ageOf(q.GetPausedSince()),
			})
		}
		return printTable(cmd.OutOrStdout(), "QUEUE\tPOOL\tSTATE\tQUEUED\tDELAYED\tRUNNING\tOLDEST\tPAUSED", rows)
	})
	queues.AddCommand(
		newForEach("pause NAME...", "Have no job of queues start",
			"Have no job of queues start until they are resumed. Jobs are accepted, cancelled and expire as before, and running ones go on.", "queue %s paused\n",
			func(ctx context.Context, client clients, name string) error {
				_, err := client.PauseQueue(ctx, connect.NewRequest(&adminv1.PauseQueueRequest{Name: name}))
				return err
			}),
		newForEach("resume NAME...", "Have jobs of paused queues start again", "Have jobs of paused queues start again. A queue that is not paused stays as it is.", "queue %s resumed\n",
			func(ctx context.Context, client clients, name string) error {
				_, err := client.ResumeQueue(ctx, connect.NewRequest(&adminv1.ResumeQueueRequest{Name: name}))
				return err
			}))
	return queues
}

func newJobsExplain() *cobra.Command {
	var asJSON bool
	explain := &cobra.Command{
		Use: "explain JOB_ID", Short: "Explain what a job waits for, and when it may start",
		Args: between(1, 1, "give one JOB_ID"),
	}
	addJSON(explain, &asJSON, "the job and where it stands")
	return askPublic(explain, func(cmd *cobra.Command, client clients, args []string) error {
		out, err := client.ExplainJob(cmd.Context(), connect.NewRequest(&inferencev1.ExplainJobRequest{Id: args[0]}))
		switch {
		case err != nil:
			return err
		case asJSON:
			return printJSON(cmd.OutOrStdout(), out.Msg)
		}
		return printPlace(cmd.OutOrStdout(), out.Msg)
	})
}

func printPlace(out io.Writer, r *inferencev1.ExplainJobResponse) error {
	p := page{tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)}
	job, place := r.GetJob(), r.GetPlace()
	fmt.Fprintf(p, "job %s\n", visible(job.GetId()))
	p.line("queue", "%s, pool %s", job.GetQueue(), place.GetPool())
	p.line("state", "%s, accepted %s ago, %s", pipeline.JobStateName(job.GetState()), ageOf(job.GetAcceptedAt()), count(int(job.GetAttempts()), "attempt"))
	hold := place.GetHold()
	if place.GetWhy() != "" {
		hold += ": " + place.GetWhy()
	}
	if since := place.GetSince(); since != nil {
		hold += " for " + ageOf(since)
	}
	p.line("held by", "%s", hold)
	if n := place.GetPosition(); n > 0 {
		about := map[bool]string{true: "about "}[place.GetIsEstimate()]
		p.line("position", "%s%d", about, n)
	}
	switch at := place.GetStartsAt(); {
	case at == nil:
	case time.Until(at.AsTime()) > 0:
		p.line("starts", "in about %s", age(time.Until(at.AsTime())))
	case job.GetStartedAt() != nil:
		p.line("started", "%s ago", ageOf(job.GetStartedAt()))
	}
	return p.Flush()
}
