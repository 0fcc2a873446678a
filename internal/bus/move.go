package bus

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Move gives a stream another name and lets its sequences begin anew: the broker copies the
// messages, and then the new stream takes over the subjects. What is published meanwhile is
// rejected. Any number of processes may run it at once, and again after one has died at any step.
//
// Earlier versions began sequences at the clock's microseconds. After a write error the broker
// lists all sequences below a block's first message, which was petabytes.
type Move struct {
	From string
	To   jetstream.StreamConfig
	// Call sends a request to the JetStream API. IsMissing reports whether its error is that the
	// stream, or the message, does not exist.
	Call      func(ctx context.Context, name string, question, answer any) error
	IsMissing func(error) bool
	// Create creates a stream, unless there is one of its name.
	Create func(ctx context.Context, config jetstream.StreamConfig) error
}

// movePause is how long Move waits for the broker's copy.
const movePause = 20 * time.Millisecond

// Run returns once the new stream has all messages and its configuration.
func (m Move) Run(ctx context.Context) error {
	for {
		var old jetstream.StreamInfo
		err := m.Call(ctx, "STREAM.INFO."+m.From, struct{}{}, &old)
		switch isWhole := old.State.Msgs == 0; {
		case m.IsMissing(err):
			return m.finish(ctx)
		case err != nil:
		case !old.Config.Sealed: // then nothing comes or goes any more
			old.Config.Sealed, old.Config.DenyDelete, old.Config.DenyPurge = true, true, true
			err = m.Call(ctx, "STREAM.UPDATE."+m.From, old.Config, &old)
		default:
			if !isWhole {
				isWhole, err = m.copy(ctx)
			}
			if isWhole {
				err = m.Call(ctx, "STREAM.DELETE."+m.From, struct{}{}, &struct{}{})
			}
		}
		if err != nil && !m.IsMissing(err) {
			return fmt.Errorf("move of stream %s to %s: %w", m.From, m.To.Name, err)
		}
		select {
		case <-time.After(movePause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// copy reports whether the new stream has the last message of the old one, and so all.
func (m Move) copy(ctx context.Context) (isWhole bool, err error) {
	part := m.To
	part.Subjects, part.Sources, part.MaxMsgs, part.MaxBytes = nil, []*jetstream.StreamSource{{Name: m.From}}, -1, -1
	if err := m.Create(ctx, part); err != nil {
		return false, err
	}
	last, _, err := m.last(ctx, m.From)
	if err != nil {
		return false, err
	}
	_, source, err := m.last(ctx, m.To.Name)
	fields := strings.Fields(source) // the stream, the number there, and more
	if err != nil || len(fields) < 2 || fields[0] != m.From {
		return false, err
	}
	copied, err := strconv.ParseUint(fields[1], 10, 64)
	return err == nil && copied >= last, err
}

// last returns the number of a stream's last message, and where that came from. It is missing if the
// stream has none.
func (m Move) last(ctx context.Context, stream string) (seq uint64, source string, err error) {
	var answer struct {
		Message struct {
			Seq    uint64 `json:"seq"`
			Header []byte `json:"hdrs"`
		} `json:"message"`
	}
	err = m.Call(ctx, "STREAM.MSG.GET."+stream, map[string]string{"last_by_subj": ">"}, &answer)
	if header, err := nats.DecodeHeadersMsg(answer.Message.Header); err == nil {
		source = header.Get("Nats-Stream-Source")
	}
	return answer.Message.Seq, source, err
}

// finish gives the new stream its subjects and bounds.
func (m Move) finish(ctx context.Context) error {
	if err := m.Create(ctx, m.To); err != nil {
		return err
	}
	var info jetstream.StreamInfo
	err := m.Call(ctx, "STREAM.INFO."+m.To.Name, struct{}{}, &info)
	if err == nil && len(info.Config.Sources) > 0 {
		m.To.FirstSeq = info.Config.FirstSeq
		err = m.Call(ctx, "STREAM.UPDATE."+m.To.Name, m.To, &info)
	}
	return err
}

func isMissing(err error) bool { return errors.Is(err, errMissing) }

// EnsureMovedStream is EnsureStream for a stream that earlier versions created under the name
// from.
func (b *Bus) EnsureMovedStream(ctx context.Context, from string, config jetstream.StreamConfig, version int) error {
	stream, err := b.js.Stream(ctx, config.Name)
	if errors.Is(err, jetstream.ErrStreamNotFound) || err == nil && len(stream.CachedInfo().Config.Sources) > 0 {
		config.Metadata = map[string]string{metadataVersion: strconv.Itoa(version)}
		err := Move{From: from, To: config, Call: b.api, IsMissing: isMissing, Create: b.createStream}.Run(ctx)
		return apiErrorOf("stream "+config.Name, err)
	}
	return b.EnsureStream(ctx, config, version)
}
