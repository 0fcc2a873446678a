package rest

import (
	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/transport"
)

// timeline is a call.Timeline as JSON, in milliseconds.
type timeline struct {
	TotalMS float64 `json:"total_ms"`
	Steps   []step  `json:"steps"`
}

type step struct {
	Step           string  `json:"step"`
	Stage          string  `json:"stage"`
	Host           string  `json:"host"`
	Attempt        uint32  `json:"attempt"`
	QueueWaitMS    float64 `json:"queue_wait_ms"`
	BatchWaitMS    float64 `json:"batch_wait_ms"`
	RunMS          float64 `json:"run_ms"`
	BatchSize      uint32  `json:"batch_size"`
	BatchRows      uint32  `json:"batch_rows"`
	DispatchReason string  `json:"dispatch_reason"`
}

func timelineOf(t call.Timeline) timeline {
	out := timeline{TotalMS: transport.Milliseconds(t.Total), Steps: make([]step, len(t.Steps))}
	for i, s := range t.Steps {
		out.Steps[i] = step{
			Step: string(s.Step), Stage: string(s.Stage), Host: string(s.Host), Attempt: s.Attempt,
			QueueWaitMS: transport.Milliseconds(s.QueueWait), BatchWaitMS: transport.Milliseconds(s.BatchWait), RunMS: transport.Milliseconds(s.Run),
			BatchSize: s.BatchSize, BatchRows: s.BatchRows, DispatchReason: s.Dispatch,
		}
	}
	return out
}
