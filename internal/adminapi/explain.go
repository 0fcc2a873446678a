package adminapi

import (
	"context"
	"strings"
	"time"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/explain"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// searchTimeout bounds the search for a dead letter: each one is read.
const searchTimeout = 10 * time.Second

func (h *handler) explainRequest(ctx context.Context, in *adminv1.ExplainRequestRequest) (*adminv1.ExplainRequestResponse, error) {
	report, err := h.Traffic.Explain(ctx, in.GetRequestId())
	isUnknown := err != nil && fault.From(err).Reason == fault.NotFound
	// A durable request that fails so leaves a dead letter.
	reason := fault.Reason(report.GetFault().GetReason())
	if isUnknown || reason == fault.RunnerCrashed || reason == fault.AttemptsExhausted {
		dead, searchErr := h.findDeadLetter(ctx, strings.ToLower(in.GetRequestId()))
		switch {
		case dead != nil && isUnknown:
			report, err = dead.item.Report(meshv1.RequestSource_REQUEST_SOURCE_DEAD_LETTER), nil
			report.DeadLetter, report.Fault, report.TraceId = dead.Seq, dead.Fault.ToProto(), strings.ToValidUTF8(dead.item.Trace.ID(), "")
		case dead != nil:
			report.DeadLetter = dead.Seq
		case isUnknown && searchErr != nil:
			err = searchErr
		}
	}
	if err != nil {
		return nil, err
	}
	report.Summary = explain.Summarize(report, time.Now())
	return &adminv1.ExplainRequestResponse{Report: report}, nil
}

// findDeadLetter returns the dead letter of a request, nil where there is none.
func (h *handler) findDeadLetter(ctx context.Context, request string) (*decodedLetter, error) {
	ctx, cancel := context.WithTimeout(ctx, searchTimeout)
	defer cancel()
	for next := uint64(1); next != 0; {
		page, err := h.DeadLetters.List(ctx, store.DeadLetterQuery{From: next, Limit: store.MaxPageSize})
		if err != nil {
			return nil, err
		}
		for _, dead := range page.DeadLetters {
			if out := decode(dead); out.item != nil && string(out.item.RequestID) == request {
				return &out, nil
			}
		}
		next = page.Next
	}
	return nil, nil
}
