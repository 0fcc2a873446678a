package explain

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
)

const (
	atGateway  = meshv1.RequestSource_REQUEST_SOURCE_GATEWAY
	stored     = meshv1.RequestSource_REQUEST_SOURCE_STORED_RESULT
	deadLetter = meshv1.RequestSource_REQUEST_SOURCE_DEAD_LETTER
	running    = meshv1.RequestSource_REQUEST_SOURCE_IN_FLIGHT
)

// timing is a step of so many milliseconds in queue, batcher and run.
func timing(step string, queue, wait, run int, edits ...func(*inferencev1.StepTiming)) *inferencev1.StepTiming {
	out := &inferencev1.StepTiming{
		Step: step, Stage: step + "r", Host: "h", Attempt: 1, QueueWait: ms(queue), BatchWait: ms(wait), Run: ms(run), BatchSize: 1, BatchRows: 1, DispatchReason: "idle",
	}
	for _, edit := range edits {
		edit(out)
	}
	return out
}

func ms(n int) *durationpb.Duration { return durationpb.New(time.Duration(n) * time.Millisecond) }

func step(timing, usual *inferencev1.StepTiming) *meshv1.ReportedStep {
	return &meshv1.ReportedStep{Timing: timing, Usual: usual}
}

func TestSummarySaysWhereTheTimeWent(t *testing.T) {
	t.Parallel()
	now := time.Unix(1000, 0)
	usual := timing("decode", 1, 0, 8)
	batched := func(reason string) *meshv1.ReportedStep {
		return step(timing("decode", 1, 100, 8, func(s *inferencev1.StepTiming) { s.DispatchReason = reason }), usual)
	}
	slow := func(steps ...*meshv1.ReportedStep) *meshv1.RequestReport {
		return &meshv1.RequestReport{RequestId: "id", Source: atGateway, Pipeline: "digits", Total: ms(112), UsualTotal: ms(10), Compared: 100, Steps: steps}
	}
	failed := func(f *meshv1.Fault, steps ...*meshv1.ReportedStep) *meshv1.RequestReport {
		return &meshv1.RequestReport{RequestId: "id", Source: atGateway, Pipeline: "digits", Total: ms(20), Steps: steps, Fault: f}
	}
	flying := func(holders ...*meshv1.RequestHolder) *meshv1.RequestReport {
		return &meshv1.RequestReport{Source: running, Pipeline: "digits", AdmittedAt: timestamppb.New(now.Add(-3200 * time.Millisecond)), Deadline: timestamppb.New(now.Add(20 * time.Second)), Holders: holders}
	}
	const isSlow = "That is 11.2 times the usual: the median of the last 100 requests of pipeline digits that succeeded is 10ms."
	for name, test := range map[string]struct {
		report *meshv1.RequestReport
		want   []string
	}{
		"a long queue": {slow(step(timing("decode", 100, 0, 8), usual)), []string{
			"It took 112ms: 100ms (89 %) in the queue of step decode.", isSlow, "Usually 1ms of it go by in the queue of step decode.",
			"More hosts or slots of stage decoder, or a higher priority, would have helped.",
		}},
		"a redelivery": {slow(step(timing("decode", 100, 0, 8, func(s *inferencev1.StepTiming) { s.Attempt = 3 }), usual)), []string{
			"It took 112ms: 100ms (89 %) in the queue of step decode.", isSlow, "Usually 1ms of it go by in the queue of step decode.",
			"It was delivered 3 times, and earlier deliveries count as queue: the logs of hosts of stage decoder say why they did not finish it.",
		}},
		"no idle slot": {slow(batched("idle")), []string{
			"It took 112ms: 100ms (89 %) in the batcher of step decode.", isSlow, "Usually 0s of it go by in the batcher of step decode.",
			"No slot was idle: more slots or hosts of stage decoder would have helped.",
		}},
		"a held batch": {slow(batched("timer")), []string{
			"It took 112ms: 100ms (89 %) in the batcher of step decode.", isSlow, "Usually 0s of it go by in the batcher of step decode.",
			"Its batch was held for more items: a lower batch.max_wait of stage decoder would have helped.",
		}},
		"a failed batch": {slow(batched("retry")), []string{
			"It took 112ms: 100ms (89 %) in the batcher of step decode.", isSlow, "Usually 0s of it go by in the batcher of step decode.",
			"It ran again after its batch had failed: the logs of hosts of stage decoder say why.",
		}},
		"a slow run": {slow(step(timing("decode", 1, 0, 100), usual)), []string{
			"It took 112ms: 100ms (89 %) in the run of step decode.", isSlow, "Usually 8ms of it go by in the run of step decode.",
			"A faster runner of stage decoder would have helped.",
		}},
		"a large batch": {slow(step(timing("decode", 1, 0, 100, func(s *inferencev1.StepTiming) { s.BatchSize = 32 }), usual)), []string{
			"It took 112ms: 100ms (89 %) in the run of step decode.", isSlow, "Usually 8ms of it go by in the run of step decode.",
			"Its batch had 32 items: a lower batch.max_size of stage decoder would have helped.",
		}},
		"a slow network": {slow(step(timing("decode", 1, 0, 8), usual)), []string{
			"It took 112ms: 103ms (91 %) between the steps.", isSlow, "Usually 1ms of it go by between the steps.",
			"The broker, the network and the gateway have that part: look at the size of messages, and at the load of these machines.",
		}},
		"nothing unusual": {
			&meshv1.RequestReport{Source: atGateway, Pipeline: "digits", Total: ms(11), UsualTotal: ms(10), Compared: 100, Steps: []*meshv1.ReportedStep{step(timing("decode", 1, 1, 8), usual)}},
			[]string{"It took 11ms: 8ms (72 %) in the run of step decode.", "That is about as usual: the median of the last 100 requests of pipeline digits that succeeded is 10ms."},
		},
		"faster than others": {
			&meshv1.RequestReport{Source: atGateway, Pipeline: "digits", Total: ms(4), UsualTotal: ms(10), Compared: 100, Steps: []*meshv1.ReportedStep{step(timing("decode", 1, 1, 2), usual)}},
			[]string{"It took 4ms: 2ms (50 %) in the run of step decode, 1ms (25 %) in the queue of step decode.", "That is less than usual: the median of the last 100 requests of pipeline digits that succeeded is 10ms."},
		},
		"few others": {
			&meshv1.RequestReport{Source: atGateway, Pipeline: "digits", Total: ms(100), UsualTotal: ms(1), Compared: 4, Steps: []*meshv1.ReportedStep{step(timing("decode", 60, 1, 39), usual)}},
			[]string{"It took 100ms: 60ms (60 %) in the queue of step decode, 39ms (39 %) in the run of step decode."},
		},
		"a failed run": {failed(&meshv1.Fault{Reason: "RUNNER_FAILED", Step: "decode", Host: "h"}, step(timing("decode", 1, 0, 19), nil)), []string{
			"It took 20ms: 19ms (95 %) in the run of step decode.", "It failed with RUNNER_FAILED at step decode on host h: the stage's code failed on this item.", "The log of that host has more about it.",
		}},
		"a deadline": {failed(&meshv1.Fault{Reason: "DEADLINE_EXCEEDED"}, step(timing("decode", 19, 0, 1), nil)), []string{
			"It took 20ms: 19ms (95 %) in the queue of step decode.", "It failed with DEADLINE_EXCEEDED: the deadline passed before the answer. The same request may succeed later.",
			"More hosts or slots of stage decoder, or a higher priority, would have helped.",
		}},
		"a deadline without a reply": {failed(&meshv1.Fault{Reason: "DEADLINE_EXCEEDED"}), []string{
			"It took 20ms, and no host reported a step of it.", "It failed with DEADLINE_EXCEEDED: the deadline passed before the answer. The same request may succeed later.",
		}},
		"a full queue": {failed(&meshv1.Fault{Reason: "QUEUE_FULL", Stage: "decoder"}), []string{
			"It took 20ms, and no host reported a step of it.", "It failed with QUEUE_FULL: a stage's queue is full. The same request may succeed later.", "More hosts, or wait_for_capacity, would have helped.",
		}},
		"no host": {failed(&meshv1.Fault{Reason: "NO_CAPACITY"}), []string{
			"It took 20ms, and no host reported a step of it.", "It failed with NO_CAPACITY: a stage on the route has no live host, or the gateway's clock is off. The same request may succeed later.",
			"A ready host of each stage would have helped.",
		}},
		"a mistake of the caller": {failed(&meshv1.Fault{Reason: "UNKNOWN_PIPELINE"}), []string{
			"It took 20ms, and no host reported a step of it.", "It failed with UNKNOWN_PIPELINE: no pipeline of that name is served.",
		}},
		"a caller that left": {
			&meshv1.RequestReport{RequestId: "id", Source: atGateway, Total: ms(20), Fault: &meshv1.Fault{Reason: "CANCELLED"}, Stored: true},
			[]string{"It took 20ms, and no host reported a step of it.", "It failed with CANCELLED: the caller went away or cancelled.", "Its result is stored: stagemesh get result id"},
		},
		"a stored result": {
			&meshv1.RequestReport{Source: stored, Total: ms(20), Steps: []*meshv1.ReportedStep{step(timing("decode", 1, 1, 2), nil)}},
			[]string{"No gateway that answered remembers it: this is what its stored result says.", "It took 20ms: 16ms (80 %) between the steps."},
		},
		"a stored result of two clocks": {
			&meshv1.RequestReport{Source: stored, Total: ms(0), Steps: []*meshv1.ReportedStep{step(timing("decode", 0, 0, 0), nil)}},
			[]string{"No gateway that answered remembers it: this is what its stored result says.", "It took 0s: many small parts."},
		},
		"a dead letter": {
			&meshv1.RequestReport{Source: deadLetter, Fault: &meshv1.Fault{Reason: "RUNNER_CRASHED", Step: "decode", Host: "h"}, DeadLetter: 7},
			[]string{
				"No gateway that answered remembers it: this is what its dead letter says.", "It failed with RUNNER_CRASHED at step decode on host h: the item ends the process that runs it.",
				"The log of that host has more about it.", "It is dead letter 7: stagemesh dead-letters replay 7 runs it again.",
			},
		},
		"on a host": {flying(&meshv1.RequestHolder{Stage: "decoder", Host: "h", State: "running", Since: timestamppb.New(now.Add(-time.Second))}), []string{
			"It has been in flight for 3.2s and has 20s left.", "Host h of stage decoder has it: running for 1s.",
		}},
		"in a queue": {flying(&meshv1.RequestHolder{Stage: "decoder", Items: 3}, &meshv1.RequestHolder{Stage: "labeler", Items: 1}), []string{
			"It has been in flight for 3.2s and has 20s left.", "No host has it: it waits in the queue of stage decoder (items: 3) or labeler (items: 1).",
		}},
		"between hosts": {flying(), []string{
			"It has been in flight for 3.2s and has 20s left.", "No host has it, and no queue of its route has items: it is on its way.",
		}},
	} {
		if got := Summarize(test.report, now); strings.Join(got, "\n") != strings.Join(test.want, "\n") {
			t.Errorf("%s:\n%s\nwant:\n%s", name, strings.Join(got, "\n"), strings.Join(test.want, "\n"))
		}
	}
}

func TestDurationsHaveThreeDigits(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		-1: "0s", 0: "0s", 12: "12ns", 1234: "1.23µs", 123456: "123µs", 12345678: "12.3ms", 1234567890: "1.23s", 123456 * time.Millisecond: "2m3s",
	} {
		if got := ShortDuration(d); got != want {
			t.Errorf("%d ns: %s, want %s", d, got, want)
		}
	}
}
