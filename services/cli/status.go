package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/figures"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

type statusCommand struct {
	admin    port
	stage    string
	requests bool
	json     bool
	watch    bool
}

func newStatus() *cobra.Command {
	var c statusCommand
	status := &cobra.Command{
		Use:   "status",
		Short: "Show the state of pipelines, stages and hosts",
		Long: "Show the mesh's pipelines, its stages with their queues, and its hosts as the registry lists them. The command asks the\n" +
			"admin port of any gateway of the mesh. With --requests it shows the requests that gateways have queued and that have\n" +
			"no answer yet, the 100 oldest, and where they are.",
		Example: "  stagemesh status\n  stagemesh status --requests\n  stagemesh status --stage classify --watch\n  stagemesh status --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := validFilter(cmd, "stage", c.stage); err != nil {
				return err
			}
			return c.admin.reach(func(client clients) error {
				return c.run(cmd.Context(), client, cmd.OutOrStdout(), cmd.ErrOrStderr())
			})
		},
	}
	c.admin.addAdmin(status)
	status.Flags().StringVar(&c.stage, "stage", "", "show only this stage, its pipelines and its hosts")
	status.Flags().BoolVar(&c.requests, "requests", false, "show the requests in flight of all gateways, oldest first, instead; with --stage those that pass it")
	addJSON(status, &c.json, "the status")
	status.Flags().BoolVar(&c.watch, "watch", false, "print the status every second, until Ctrl-C")
	return status
}

// watchInterval is the interval of --watch.
const watchInterval = time.Second

func (c *statusCommand) run(ctx context.Context, client clients, out, errOut io.Writer) error {
	ticker := time.NewTicker(watchInterval)
	defer ticker.Stop()
	for first := true; ; first = false {
		now, err := c.ask(ctx, client)
		switch {
		case ctx.Err() != nil && !first:
			return nil
		case err == nil && c.json:
			err = now.printJSON(out)
		case err == nil:
			err = now.print(out, time.Now())
		case c.watch && !first:
			// The gateway answered before, and may again.
			fmt.Fprintln(errOut, "stagemesh:", visible(Describe(err)))
			err = nil
		}
		if err != nil || !c.watch {
			return err
		}
		select {
		case <-ticker.C:
			if !c.json {
				fmt.Fprintln(out)
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// report is what the command prints.
type report interface {
	print(out io.Writer, now time.Time) error
	printJSON(out io.Writer) error
}

func (c *statusCommand) ask(ctx context.Context, client clients) (report, error) {
	if !c.requests {
		status, err := askStatus(ctx, client, c.stage)
		return &status, err
	}
	requests, err := client.ListRequests(ctx, connect.NewRequest(&adminv1.ListRequestsRequest{Stage: c.stage}))
	if err != nil {
		return nil, err
	}
	return requestReport{requests.Msg}, nil
}

// requestReport are the requests in flight.
type requestReport struct{ *adminv1.ListRequestsResponse }

func (r requestReport) printJSON(out io.Writer) error { return printJSON(out, r.ListRequestsResponse) }

func (r requestReport) print(out io.Writer, now time.Time) error {
	if r.GetTotal() == 0 {
		_, err := fmt.Fprintln(out, "there is no request in flight")
		return err
	}
	rows := make([][]string, len(r.GetRequests()))
	for i, one := range r.GetRequests() {
		durability, _ := pipeline.DurabilityFromProto(one.GetDurability())
		state, stages := one.GetState(), slices.Clone(one.GetStages())
		if one.GetSince() != nil {
			state += " (" + age(now.Sub(one.GetSince().AsTime())) + ")"
		}
		if at := slices.Index(stages, one.GetStage()); at >= 0 {
			stages[at] = "[" + stages[at] + "]"
		}
		rows[i] = []string{
			visible(one.GetRequestId()), age(now.Sub(one.GetAdmittedAt().AsTime())), age(one.GetDeadline().AsTime().Sub(now)), visible(one.GetPipeline()),
			visible(strings.Join(stages, " > ")), visible(state), cmp.Or(visible(one.GetHost()), "-"), cmp.Or(visible(one.GetGateway()), "-"),
			cmp.Or(string(durability), "-"), cmp.Or(visible(one.GetTenant()), "-"), cmp.Or(visible(one.GetIdempotencyKey()), "-"),
		}
	}
	if err := printTable(out, "REQUEST\tAGE\tLEFT\tPIPELINE\tSTAGES\tSTATE\tHOST\tGATEWAY\tQUEUE\tTENANT\tKEY", rows); err != nil {
		return err
	}
	if rest := r.GetTotal() - uint64(len(rows)); rest > 0 {
		_, err := fmt.Fprintf(out, "and %d more\n", rest)
		return err
	}
	return nil
}

// meshStatus is the state of a mesh.
type meshStatus struct {
	pipelines *adminv1.ListPipelinesResponse
	stages    *adminv1.ListStagesResponse
	// hosts is nil when the mesh has no registry.
	hosts *adminv1.ListHostsResponse
}

// askStatus returns the state of the mesh, or the part of it that belongs to a stage.
func askStatus(ctx context.Context, client clients, stage string) (out meshStatus, err error) {
	pipelines, err := client.ListPipelines(ctx, connect.NewRequest(&adminv1.ListPipelinesRequest{}))
	if err != nil {
		return out, err
	}
	stages, err := client.ListStages(ctx, connect.NewRequest(&adminv1.ListStagesRequest{}))
	if err != nil {
		return out, err
	}
	out.pipelines, out.stages = pipelines.Msg, stages.Msg
	hosts, err := client.ListHosts(ctx, connect.NewRequest(&adminv1.ListHostsRequest{Stage: stage}))
	switch {
	case err == nil:
		out.hosts = hosts.Msg
	case connect.CodeOf(err) != connect.CodeUnimplemented:
		return out, err
	}
	if stage == "" {
		return out, nil
	}
	return out, out.keep(stage)
}

// keep removes everything that does not belong to a stage, which must exist.
func (s *meshStatus) keep(stage string) error {
	var names []string
	for _, one := range s.stages.GetStages() {
		names = append(names, visible(one.GetStage()))
	}
	if !slices.Contains(names, stage) {
		return fmt.Errorf("--stage: there is no stage %s; there is %s", stage, cmp.Or(strings.Join(names, ", "), "none"))
	}
	s.stages.Stages = slices.DeleteFunc(s.stages.GetStages(), func(one *adminv1.StageStatus) bool { return one.GetStage() != stage })
	s.pipelines.Pipelines = slices.DeleteFunc(s.pipelines.GetPipelines(), func(p *adminv1.PipelineStatus) bool {
		return !slices.Contains(s.stages.GetStages()[0].GetPipelines(), p.GetPipeline().GetName())
	})
	return nil
}

func (s *meshStatus) print(out io.Writer, now time.Time) error {
	printStale(out, s.oldest(), now)
	if cause := s.stages.GetStoreCause(); cause != "" {
		fmt.Fprintf(out, "durable requests, jobs and batches are STORE_FULL: %s\n\n", visible(cause))
	}
	if err := printPipelines(out, s.pipelines.GetPipelines(), now); err != nil {
		return err
	}
	fmt.Fprintln(out)
	if err := printStages(out, s.stages.GetStages()); err != nil {
		return err
	}
	fmt.Fprintln(out)
	if s.hosts == nil {
		_, err := fmt.Fprintln(out, "hosts are unknown: the mesh has no registry; its file configures one in the section registry")
		return err
	}
	return printHosts(out, s.hosts.GetHosts(), now)
}

// oldest returns the answer that has been out of date for longest.
func (s *meshStatus) oldest() staleness {
	var out staleness = s.pipelines
	for _, answer := range []staleness{s.stages, s.hosts} {
		since := answer.GetStaleSince()
		if since != nil && (out.GetStaleSince() == nil || since.AsTime().Before(out.GetStaleSince().AsTime())) {
			out = answer
		}
	}
	return out
}

func (s *meshStatus) printJSON(out io.Writer) error {
	all := map[string]any{}
	answers := map[string]proto.Message{"pipelines": s.pipelines, "stages": s.stages}
	if s.hosts != nil {
		answers["hosts"] = s.hosts
	}
	for name, answer := range answers {
		text, err := protojson.MarshalOptions{EmitUnpopulated: true}.Marshal(answer)
		if err != nil {
			return err
		}
		var fields map[string]json.RawMessage
		if err := json.Unmarshal(text, &fields); err != nil {
			return err
		}
		all[name] = fields[name]
	}
	if answer := s.oldest(); answer.GetStaleSince() != nil {
		all["staleSince"], all["staleCause"] = answer.GetStaleSince().AsTime(), answer.GetStaleCause()
	}
	if cause := s.stages.GetStoreCause(); cause != "" {
		all["storeCause"] = cause
	}
	return json.NewEncoder(out).Encode(all)
}

func printStages(out io.Writer, stages []*adminv1.StageStatus) error {
	if len(stages) == 0 {
		_, err := fmt.Fprintln(out, "there is no stage")
		return err
	}
	rows := make([][]string, len(stages))
	scales := slices.ContainsFunc(stages, func(s *adminv1.StageStatus) bool { return s.GetHostsWanted() != nil })
	for i, s := range stages {
		state := "ready"
		switch {
		case !s.GetServed() && s.GetQueuesCause() != "":
			state = "unknown"
		case !s.GetServed() && s.GetHostsWanted().GetActivating() > 0:
			state = "activating"
		case !s.GetServed():
			state = "no host"
		case s.GetUnhealthyCause() != "":
			state = "unhealthy"
		}
		rows[i] = []string{
			visible(s.GetStage()), state, share(s.GetReadyHosts(), s.GetHosts()), share(s.GetInFlight(), s.GetMaxInFlight()), fmt.Sprint(s.GetRunning()), fmt.Sprint(s.GetSlots()),
			queueOf(s, pipeline.Memory), queueOf(s, pipeline.File), cmp.Or(visible(strings.Join(s.GetPipelines(), ", ")), "-"),
		}
		if wanted := s.GetHostsWanted(); wanted != nil {
			rows[i] = append(rows[i], fmt.Sprint(wanted.GetHosts()), visible(wanted.GetReason()))
		} else if scales {
			rows[i] = append(rows[i], "-", "-")
		}
	}
	heads := "STAGE\tSTATE\tHOSTS\tIN FLIGHT\tRUNNING\tSLOTS\tMEMORY QUEUE\tFILE QUEUE\tPIPELINES"
	if scales {
		heads += "\tHOSTS WANTED\tREASON"
	}
	return printTable(out, addWhy(heads, rows, texts(stages, whyOfStage)), rows)
}

// whyOfStage returns what is wrong with a stage.
func whyOfStage(s *adminv1.StageStatus) string {
	causes := []string{s.GetUnhealthyCause(), s.GetQueuesCause()}
	return strings.Join(slices.DeleteFunc(causes, func(cause string) bool { return cause == "" }), "; ")
}

func share[N any](part, whole N) string { return fmt.Sprintf("%v/%v", part, whole) }

// queueOf describes the fill of one of a stage's queues.
func queueOf(s *adminv1.StageStatus, d pipeline.Durability) string {
	for _, q := range s.GetQueues() {
		switch {
		case q.GetDurability() != d.ToProto():
		case q.GetMaxItems() > 0:
			return share(q.GetItems(), q.GetMaxItems())
		default:
			return fmt.Sprint(q.GetItems())
		}
	}
	return "-"
}

func printHosts(out io.Writer, hosts []*adminv1.HostStatus, now time.Time) error {
	if len(hosts) == 0 {
		_, err := fmt.Fprintln(out, "there is no host")
		return err
	}
	rows := make([][]string, len(hosts))
	for i, host := range hosts {
		r := host.GetRecord()
		rows[i] = []string{
			visible(r.GetStage()), visible(r.GetHost()), figures.HostState(host), share(r.GetInFlight(), r.GetMaxInFlight()), fmt.Sprint(r.GetRunning()), fmt.Sprint(r.GetSlots()),
			short(r.GetQueueWait()), runTimeOf(r.GetBatchEstimate()), short(r.GetBatchEstimate().GetHold()), workersOf(r),
			cmp.Or(visible(r.GetEngine()), "-"), cmp.Or(visible(r.GetVersion()), "-"), cmp.Or(visible(r.GetAddress()), "-"), cmp.Or(visible(r.GetOperations()), "-"), age(now.Sub(r.GetStartedAt().AsTime())),
		}
	}
	heads := "STAGE\tHOST\tSTATE\tIN FLIGHT\tRUNNING\tSLOTS\tQUEUE WAIT\tBATCH RUN\tBATCH WAIT\tWORKERS\tENGINE\tVERSION\tADDRESS\tOPERATIONS\tUP"
	return printTable(out, addWhy(heads, rows, texts(hosts, whyOf)), rows)
}

// whyOf returns what is wrong with a host and its workers.
func whyOf(h *adminv1.HostStatus) string {
	var out []string
	if cause := h.GetRecord().GetCause(); cause != "" {
		out = append(out, cause)
	}
	for _, w := range h.GetRecord().GetWorkers() {
		if h.GetAlive() && w.GetCause() != "" { // else it is out of date
			out = append(out, fmt.Sprintf("worker %d is %s, %s", w.GetIndex(), w.GetState(), w.GetCause()))
		}
	}
	return strings.Join(out, "; ")
}

// short returns a duration for a table, - for none.
func short(d *durationpb.Duration) string {
	if d == nil {
		return "-"
	}
	return d.AsDuration().Round(10 * time.Microsecond).String()
}

// runTimeOf returns how long a batch of n rows runs.
func runTimeOf(e *meshv1.BatchEstimate) string {
	if e == nil {
		return "-"
	}
	return short(e.GetStart()) + " + n*" + short(e.GetPerRow())
}

// workersOf describes how many of a host's workers are ready.
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
	return share(ready, len(r.GetWorkers()))
}
