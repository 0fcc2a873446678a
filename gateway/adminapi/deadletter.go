package adminapi

import (
	"context"
	"errors"
	"log/slog"
	"strings"

	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"

	"github.com/stagemesh/stagemesh/gateway/front/procedure"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/store"
)

// desk answers the procedures of DeadLetterService.
type desk struct {
	letters Letters
	log     *slog.Logger
}

func (d *desk) list(ctx context.Context, in *adminv1.ListDeadLettersRequest) (*adminv1.ListDeadLettersResponse, error) {
	if stage := in.GetStage(); stage != "" {
		if err := pipeline.ValidName("stage", stage); err != nil {
			return nil, procedure.Invalid("stage", err)
		}
	}
	page, err := d.letters.List(ctx, store.DeadLetterQuery{
		Stage: pipeline.StageName(in.GetStage()), From: in.GetFrom(), Limit: int(min(in.GetLimit(), store.MaxPageSize)),
	})
	if err != nil {
		return nil, err
	}
	out := &adminv1.ListDeadLettersResponse{Next: page.Next, Unreadable: page.Unreadable}
	for _, letter := range page.DeadLetters {
		out.DeadLetters = append(out.DeadLetters, summary(read(letter)))
	}
	return out, nil
}

func (d *desk) get(ctx context.Context, in *adminv1.GetDeadLetterRequest) (*adminv1.GetDeadLetterResponse, error) {
	if in.GetMessageBytes() > maxRaw {
		return nil, fault.Newf(fault.InvalidRequest, "message_bytes: %d, at most %d are given", in.GetMessageBytes(), maxRaw).
			WithViolation("message_bytes", "at most %d", maxRaw)
	}
	letter, err := d.letters.Get(ctx, in.GetSeq())
	if err != nil {
		return nil, told(err, in.GetSeq())
	}
	out := full(read(letter))
	out.RawMessage = letter.Item[:min(len(letter.Item), int(in.GetMessageBytes()))]
	return &adminv1.GetDeadLetterResponse{DeadLetter: out}, nil
}

func (d *desk) replay(ctx context.Context, in *adminv1.ReplayDeadLetterRequest) (*adminv1.ReplayDeadLetterResponse, error) {
	replayed, err := d.letters.Replay(ctx, in.GetSeq())
	if err != nil && replayed.RequestID == "" {
		return nil, told(err, in.GetSeq())
	}
	d.log.Info("dead letter replayed", "letter", in.GetSeq(), "request", replayed.RequestID)
	if err != nil {
		d.log.Warn("replayed dead letter remains", "letter", in.GetSeq(), "error", err)
	}
	return &adminv1.ReplayDeadLetterResponse{
		RequestId:         string(replayed.RequestID),
		ExecutionId:       string(replayed.ExecutionID),
		Deadline:          timestamppb.New(replayed.Deadline),
		DeadLetterRemains: err != nil,
	}, nil
}

func (d *desk) discard(ctx context.Context, in *adminv1.DeleteDeadLetterRequest) (*adminv1.DeleteDeadLetterResponse, error) {
	if err := d.letters.Delete(ctx, in.GetSeq()); err != nil {
		return nil, told(err, in.GetSeq())
	}
	d.log.Info("dead letter discarded", "letter", in.GetSeq())
	return &adminv1.DeleteDeadLetterResponse{}, nil
}

// told is the fault of an error about one letter.
func told(err error, seq uint64) error {
	switch {
	case errors.Is(err, store.ErrNotReplayable):
		return fault.Newf(fault.NotReplayable, "dead letter %d: %s", seq, plain(err)).Caused(err)
	case errors.Is(err, store.ErrUnreadable):
		return fault.Newf(fault.NotFound, "number %d: %s; discarding it removes it", seq, plain(err)).Caused(err)
	case errors.Is(err, store.ErrNoDeadLetter):
		return fault.Newf(fault.NotFound, "there is no dead letter %d: it was replayed or discarded, is past its retention, or never was", seq).Caused(err)
	}
	return err
}

// plain returns an error's text as it may be sent: in UTF-8, and without the
// spaces that the protobuf library varies by intent.
func plain(err error) string {
	return strings.ReplaceAll(strings.ToValidUTF8(err.Error(), "\uFFFD"), "\u00a0", " ")
}
