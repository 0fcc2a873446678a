package deadletter

import (
	"context"
	"errors"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Query says which letters to list.
type Query struct {
	// Stage whose letters to list; empty means all.
	Stage pipeline.StageName
	// From is the least number to list.
	From uint64
	// Limit is the most letters to list; 0 means DefaultLimit, and MaxLimit is
	// the most.
	Limit int
}

// Bounds of a page.
const (
	DefaultLimit = 50
	// MaxLimit bounds the messages that are looked at, letters or not.
	MaxLimit = 1000
	// MaxPageBytes is how many bytes of letters end a page; the last of them may
	// be beyond it.
	MaxPageBytes = 32 << 20
)

// Page is a part of a list, the oldest letter first.
type Page struct {
	Letters []Letter
	// Next is the number to go on from; 0 at the end.
	Next uint64
	// Unreadable are the numbers of messages on the way that are no letters.
	Unreadable []uint64

	bytes int
}

// List returns letters from the query's first number on.
func (s *Store) List(ctx context.Context, q Query) (Page, error) {
	stream, err := s.stream(ctx)
	if errors.Is(err, ErrNone) {
		return Page{}, nil
	}
	if err != nil {
		return Page{}, err
	}
	subject := s.bus.Dead("*")
	if q.Stage != "" {
		subject = s.bus.Dead(q.Stage)
	}
	var page Page
	for seq := max(1, q.From); ; {
		msg, err := s.message(ctx, stream, seq, jetstream.WithGetMsgSubject(subject))
		if errors.Is(err, ErrNone) {
			return page, nil
		}
		if err != nil {
			return page, err
		}
		if page.full(q.limit()) {
			page.Next = msg.Sequence
			return page, nil
		}
		page.add(msg)
		seq = msg.Sequence + 1
	}
}

func (q Query) limit() int {
	if q.Limit <= 0 {
		return DefaultLimit
	}
	return min(q.Limit, MaxLimit)
}

func (p *Page) full(limit int) bool {
	return len(p.Letters) == limit || len(p.Letters)+len(p.Unreadable) == MaxLimit || p.bytes >= MaxPageBytes
}

func (p *Page) add(msg *jetstream.RawStreamMsg) {
	p.bytes += len(msg.Data)
	letter, err := envelope.DecodeDeadLetter(msg.Data)
	if err != nil {
		p.Unreadable = append(p.Unreadable, msg.Sequence)
		return
	}
	p.Letters = append(p.Letters, Letter{Seq: msg.Sequence, DeadLetter: letter})
}
