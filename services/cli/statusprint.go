package cli

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func (f statusFlags) print(out io.Writer, s meshStatus, now time.Time) error {
	if f.json {
		return s.printJSON(out)
	}
	printStale(out, s.oldest(), now)
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
func (s meshStatus) oldest() staleness {
	var out staleness = s.pipelines
	for _, answer := range []staleness{s.stages, s.hosts} {
		since := answer.GetStaleSince()
		if since != nil && (out.GetStaleSince() == nil || since.AsTime().Before(out.GetStaleSince().AsTime())) {
			out = answer
		}
	}
	return out
}

func (s meshStatus) printJSON(out io.Writer) error {
	all := map[string]json.RawMessage{}
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
		since, err := json.Marshal(answer.GetStaleSince().AsTime())
		if err != nil {
			return err
		}
		why, err := json.Marshal(answer.GetStaleCause())
		if err != nil {
			return err
		}
		all["staleSince"], all["staleCause"] = since, why
	}
	return json.NewEncoder(out).Encode(all)
}

func printStages(out io.Writer, stages []*adminv1.StageStatus) error {
	if len(stages) == 0 {
		_, err := fmt.Fprintln(out, "there is no stage")
		return err
	}
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "STAGE\tSTATE\tHOSTS\tIN FLIGHT\tRUNNING\tMEMORY QUEUE\tFILE QUEUE\tPIPELINES")
	for _, s := range stages {
		state := "ready"
		if !s.GetServed() {
			state = "no host"
		}
		fmt.Fprintf(table, "%s\t%s\t%d/%d\t%d/%d\t%d/%d\t%s\t%s\t%s\n", visible(s.GetStage()), state, s.GetReadyHosts(), s.GetHosts(),
			s.GetInFlight(), s.GetMaxInFlight(), s.GetRunning(), s.GetSlots(),
			queueOf(s, pipeline.Memory), queueOf(s, pipeline.File), cmp.Or(visible(strings.Join(s.GetPipelines(), ", ")), "-"))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for _, s := range stages {
		if s.GetQueuesCause() != "" {
			fmt.Fprintf(out, "%s: %s\n", visible(s.GetStage()), visible(s.GetQueuesCause()))
		}
	}
	return nil
}

// queueOf describes the fill of one of a stage's queues.
func queueOf(s *adminv1.StageStatus, d pipeline.Durability) string {
	for _, q := range s.GetQueues() {
		switch {
		case q.GetDurability() != d.ToProto():
		case q.GetMaxItems() > 0:
			return fmt.Sprintf("%d/%d", q.GetItems(), q.GetMaxItems())
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
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "STAGE\tHOST\tSTATE\tIN FLIGHT\tRUNNING\tQUEUE WAIT\tWORKERS\tVERSION\tADDRESS\tUP")
	for _, host := range hosts {
		r := host.GetRecord()
		fmt.Fprintf(table, "%s\t%s\t%s\t%d/%d\t%d/%d\t%s\t%s\t%s\t%s\t%s\n", visible(r.GetStage()), visible(r.GetHost()), stateOf(host),
			r.GetInFlight(), r.GetMaxInFlight(), r.GetRunning(), r.GetSlots(), r.GetQueueWait().AsDuration().Round(10*time.Microsecond),
			workersOf(r), cmp.Or(visible(r.GetVersion()), "-"), cmp.Or(visible(r.GetAddress()), "-"), age(now.Sub(r.GetStartedAt().AsTime())))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	return printCauses(out, hosts)
}

// stateOf names the state of a host.
func stateOf(h *adminv1.HostStatus) string {
	switch r := h.GetRecord(); {
	case !h.GetAlive():
		return "disconnected"
	case r.GetDraining():
		return "draining"
	case !r.GetReady():
		return "not ready"
	default:
		return "ready"
	}
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
	return fmt.Sprintf("%d/%d", ready, len(r.GetWorkers()))
}

// printCauses prints below the table why hosts and workers are not ready.
func printCauses(out io.Writer, hosts []*adminv1.HostStatus) error {
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
