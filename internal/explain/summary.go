package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

const (
	// minCompared is how many requests it takes to say what is usual.
	minCompared = 5
	// muchLonger is how many times the usual an unusual time is.
	muchLonger = 1.5
	// smallPart is the share of the whole below which a part is not worth a sentence.
	smallPart = 0.1
)

// Summarize says in a few sentences where the time of the request went, how unusual that is,
// and what would have helped.
func Summarize(r *meshv1.RequestReport, now time.Time) []string {
	var out []string
	switch r.GetSource() {
	case meshv1.RequestSource_REQUEST_SOURCE_IN_FLIGHT:
		return append(append(inFlight(r, now), blocks(r)...), usualTotal(r)...)
	case meshv1.RequestSource_REQUEST_SOURCE_DEAD_LETTER:
		out = append(out, "No gateway that answered remembers it: this is what its dead letter says.")
	case meshv1.RequestSource_REQUEST_SOURCE_STORED_RESULT:
		out = append(out, "No gateway that answered remembers it: this is what its stored result says.")
	}
	parts := partsOf(r)
	var slow *part
	if r.GetTotal() != nil {
		slow = mostUnusual(r, parts)
		out = append(append(out, largest(r, parts)), usualTotal(r)...)
	}
	if slow != nil {
		out = append(out, fmt.Sprintf("Usually %s of it go by %s.", ShortDuration(slow.usual), slow.of))
	}
	out = append(out, blocks(r)...)
	if f := r.GetFault(); f != nil {
		out = append(out, failure(f))
		if slow == nil && len(parts) > 0 {
			slow = &parts[0]
		}
	}
	if advice := adviceFor(r.GetFault(), slow); advice != "" {
		out = append(out, advice)
	}
	if r.GetFault() != nil && r.GetStored() {
		out = append(out, fmt.Sprintf("Its result is stored: stagemesh get result %s", r.GetRequestId()))
	}
	if n := r.GetDeadLetter(); n > 0 {
		out = append(out, fmt.Sprintf("It is dead letter %d: stagemesh dead-letters replay %d runs it again.", n, n))
	}
	return out
}

// part is a part of a request's time.
type part struct {
	// of says where it went, and advice what makes it shorter.
	of, advice  string
	took, usual time.Duration
}

// partsOf returns the parts of the request's time, the longest first; none where no host
// reported a step.
func partsOf(r *meshv1.RequestReport) []part {
	var out []part
	rest := part{
		of: "between the steps", took: r.GetTotal().AsDuration(), usual: r.GetUsualTotal().AsDuration(),
		advice: "The broker, the network and the gateway have that part: look at the size of messages, and at the load of these machines.",
	}
	for _, s := range r.GetSteps() {
		t, u, advice := s.GetTiming(), s.GetUsual(), adviceOn(s)
		for _, p := range []part{
			{"in the queue of step ", advice.queue, t.GetQueueWait().AsDuration(), u.GetQueueWait().AsDuration()},
			{"in the batcher of step ", advice.batcher, t.GetBatchWait().AsDuration() - t.GetModelWait().AsDuration(), u.GetBatchWait().AsDuration()},
			{"in the wait for the model of step ", "It was not loaded: more memory for models of stage " + t.GetStage() + " would have helped.", t.GetModelWait().AsDuration(), 0},
			{"in the run of step ", advice.run, t.GetRun().AsDuration(), u.GetRun().AsDuration()},
		} {
			p.of += t.GetStep()
			rest.took, rest.usual = rest.took-p.took, rest.usual-p.usual
			out = append(out, p)
		}
	}
	if len(out) > 0 {
		rest.took, rest.usual = max(0, rest.took), max(0, rest.usual) // the clocks of several machines
		out = append(out, rest)
	}
	slices.SortStableFunc(out, func(a, b part) int { return cmp.Compare(b.took, a.took) })
	return out
}

// largest names the one or two largest parts.
func largest(r *meshv1.RequestReport, parts []part) string {
	total := r.GetTotal().AsDuration()
	if len(parts) == 0 {
		return fmt.Sprintf("It took %s, and no host reported a step of it.", ShortDuration(total))
	}
	shares := []string{}
	for _, p := range parts[:2] {
		if float64(p.took) > smallPart*float64(total) {
			shares = append(shares, fmt.Sprintf("%s (%d %%) %s", ShortDuration(p.took), 100*p.took/max(total, 1), p.of))
		}
	}
	return fmt.Sprintf("It took %s: %s.", ShortDuration(total), cmp.Or(strings.Join(shares, ", "), "many small parts"))
}

// usualTotal compares the whole with what is usual.
func usualTotal(r *meshv1.RequestReport) []string {
	if r.GetCompared() < minCompared {
		return nil
	}
	total, usual := r.GetTotal().AsDuration(), r.GetUsualTotal().AsDuration()
	how := "That is about as usual"
	switch {
	case r.GetTotal() == nil:
		how = "To compare"
	case float64(total) >= muchLonger*float64(usual):
		how = fmt.Sprintf("That is %.1f times the usual", float64(total)/float64(max(usual, 1)))
	case float64(usual) >= muchLonger*float64(total):
		how = "That is less than usual"
	}
	return []string{fmt.Sprintf("%s: the median of the last %d requests of pipeline %s that succeeded is %s.", how, r.GetCompared(), r.GetPipeline(), ShortDuration(usual))}
}

// mostUnusual returns the part that took most beyond the usual; nil where none took much more,
// or the whole is as usual.
func mostUnusual(r *meshv1.RequestReport, parts []part) (out *part) {
	total, usual := float64(r.GetTotal().AsDuration()), float64(r.GetUsualTotal().AsDuration())
	if r.GetCompared() < minCompared || r.GetFault() == nil && total < muchLonger*usual {
		return nil
	}
	for i := range parts {
		p := &parts[i]
		more := p.took - p.usual
		isMuch := float64(more) > smallPart*total && float64(p.took) >= muchLonger*float64(p.usual)
		if isMuch && (out == nil || more > out.took-out.usual) {
			out = p
		}
	}
	return out
}

// failure says why the request failed.
func failure(f *meshv1.Fault) string {
	out := "It failed with " + f.GetReason()
	if f.GetStep() != "" {
		out += " at step " + f.GetStep()
	}
	if f.GetHost() != "" {
		out += " on host " + f.GetHost()
	}
	class := fault.Classify(fault.Reason(f.GetReason()))
	out += ": " + class.Meaning + "."
	if class.Retryable {
		out += " The same request may succeed later."
	}
	return out
}

// adviceFor says what would have helped a request that failed, or was slow in that part.
func adviceFor(f *meshv1.Fault, slow *part) string {
	switch fault.Reason(f.GetReason()) {
	case "", fault.DeadlineExceeded:
		if slow != nil {
			return slow.advice
		}
	case fault.QueueFull, fault.Overloaded:
		return "More hosts, or wait_for_capacity, would have helped."
	case fault.StoreFull:
		return "Space on the broker's disk, or a larger max_bytes, would have helped."
	case fault.NoCapacity:
		return "A ready host of each stage would have helped."
	case fault.RunnerFailed, fault.RunnerCrashed, fault.RunnerOutputInvalid, fault.RunnerStalled, fault.AttemptsExhausted:
		return "The log of that host has more about it."
	}
	return ""
}

// adviceOn says what would have made the parts of a step shorter.
func adviceOn(s *meshv1.ReportedStep) (advice struct{ queue, batcher, run string }) {
	t := s.GetTiming()
	stage := "of stage " + t.GetStage()
	advice.queue = "More hosts or slots " + stage + ", or a higher priority, would have helped."
	if n := t.GetAttempt(); n > 1 {
		advice.queue = fmt.Sprintf("It was delivered %d times, and earlier deliveries count as queue: the logs of hosts %s say why they did not finish it.", n, stage)
	}
	switch t.GetDispatchReason() {
	case "gather", "timer", "deadline":
		advice.batcher = "Its batch was held for more items: a lower batch.max_wait " + stage + " would have helped."
	case "retry":
		advice.batcher = "It ran again after its batch had failed: the logs of hosts " + stage + " say why."
	default:
		advice.batcher = "No slot was idle: more slots or hosts " + stage + " would have helped."
	}
	advice.run = "A faster runner " + stage + " would have helped."
	if n := t.GetBatchSize(); n > max(1, s.GetUsual().GetBatchSize()) {
		advice.run = fmt.Sprintf("Its batch had %d items: a lower batch.max_size %s would have helped.", n, stage)
	}
	return advice
}

// inFlight says for how long the request has been in flight, and who has it.
func inFlight(r *meshv1.RequestReport, now time.Time) []string {
	age := fmt.Sprintf("It has been in flight for %s", ShortDuration(now.Sub(r.GetAdmittedAt().AsTime())))
	if left := r.GetDeadline().AsTime().Sub(now); left > 0 {
		age += fmt.Sprintf(" and has %s left", ShortDuration(left))
	}
	out, queues := []string{age + "."}, []string{}
	for _, h := range r.GetHolders() {
		if h.GetHost() == "" {
			queues = append(queues, fmt.Sprintf("%s (items: %d)", h.GetStage(), h.GetItems()))
			continue
		}
		out = append(out, fmt.Sprintf("Host %s of stage %s has it: %s for %s.", h.GetHost(), h.GetStage(), h.GetState(), ShortDuration(now.Sub(h.GetSince().AsTime()))))
	}
	switch {
	case len(queues) > 0:
		out = append(out, fmt.Sprintf("No host has it: it waits in the queue of stage %s.", strings.Join(queues, " or ")))
	case len(r.GetHolders()) == 0 && len(r.GetBranches()) == 0:
		out = append(out, "No host has it, and no queue of its route has items: it is on its way.")
	}
	return out
}

// maxBlocks bounds the blocks that have a sentence.
const maxBlocks = 16

// blocks says how the blocks of the request's pipeline and their branches ended, and which steps run.
func blocks(r *meshv1.RequestReport) (out []string) {
	var order, steps []string
	ended, parts := map[string]*inferencev1.BranchTiming{}, map[string][]string{}
	for _, b := range r.GetBranches() {
		took, block := ShortDuration(b.GetTook().AsDuration()), b.GetPath()
		switch {
		case b.GetStatus() == "running":
			steps = append(steps, fmt.Sprintf("Step %s has run for %s, as request %s.", b.GetPath(), took, b.GetWhy()))
			continue
		case b.GetStatus() == "waiting":
			steps = append(steps, fmt.Sprintf("Step %s has waited for a place of its gateway for %s.", b.GetPath(), took))
			continue
		case b.GetBlock() != "":
			ended[block] = b
			if b.GetBlock() == "map" {
				parts[block] = append(parts[block], items(b))
			}
		default:
			at := max(0, strings.LastIndexByte(b.GetPath(), '/'))
			block = b.GetPath()[:at]
			parts[block] = append(parts[block], branch(strings.TrimPrefix(b.GetPath()[at:], "/"), b, took))
		}
		if !slices.Contains(order, block) {
			order = append(order, block)
		}
	}
	for _, block := range order[:min(len(order), maxBlocks)] {
		how := " so far"
		if b := ended[block]; b != nil {
			how = " took " + ShortDuration(b.GetTook().AsDuration())
		}
		out = append(out, fmt.Sprintf("%s%s: %s.", block, how, cmp.Or(strings.Join(parts[block], ", "), "nothing ran")))
	}
	return append(out, steps...)
}

// items says how the items of a map ended.
func items(b *inferencev1.BranchTiming) string {
	if b.GetItems() == 0 {
		return "no items"
	}
	out := fmt.Sprintf("%d items, half of them within %s and all within %s", b.GetItems(), ShortDuration(b.GetItemP50().AsDuration()), ShortDuration(b.GetItemMax().AsDuration()))
	if n := b.GetFailed(); n > 0 {
		out += fmt.Sprintf(", %d failed", n)
	}
	return out
}

// branch says how a branch ended.
func branch(name string, b *inferencev1.BranchTiming, took string) string {
	if n := b.GetCount(); n > 1 {
		name = fmt.Sprintf("%s (%d times)", name, n)
	}
	switch b.GetStatus() {
	case "skipped":
		return fmt.Sprintf("%s was skipped, since %s", name, b.GetWhy())
	case "failed":
		return fmt.Sprintf("%s failed after %s with %s", name, took, b.GetWhy())
	}
	return fmt.Sprintf("%s was %s after %s", name, b.GetStatus(), took)
}

// ShortDuration returns a duration with three digits.
func ShortDuration(d time.Duration) string {
	digit := time.Duration(1)
	for d/digit >= 1000 {
		digit *= 10
	}
	return max(0, d).Round(digit).String()
}
