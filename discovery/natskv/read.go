package natskv

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/discovery"
)

// Get implements discovery.Table. It asks the stream's leader.
func (s *Store) Get(ctx context.Context, key discovery.Key) (discovery.Entry, error) {
	if _, err := key.Segments(); err != nil {
		return discovery.Entry{}, err
	}
	var r record
	err := s.reach(ctx, s.table, func(ctx context.Context, on *session) (err error) {
		r, err = on.get(ctx, s.names, s.table.Name, s.names.entry(key))
		return err
	})
	if err == nil && !r.there() {
		err = discovery.ErrNotFound
	}
	if err != nil {
		return discovery.Entry{}, err
	}
	return r.entry(), nil
}

// get reads the last message of a subject.
func (s *session) get(ctx context.Context, n names, stream, subject string) (record, error) {
	var out struct {
		Message struct {
			Sequence uint64 `json:"seq"`
			Header   []byte `json:"hdrs"`
			Data     []byte `json:"data"`
		} `json:"message"`
	}
	err := s.api(ctx, "STREAM.MSG.GET."+stream, map[string]string{"last_by_subj": subject}, &out)
	var e *jetstream.APIError
	if errors.As(err, &e) && e.ErrorCode == codeNoMessage {
		return record{}, nil
	}
	if err != nil {
		return record{}, err
	}
	header := nats.Header{}
	if len(out.Message.Header) > 0 {
		if header, err = nats.DecodeHeadersMsg(out.Message.Header); err != nil {
			return record{}, fmt.Errorf("%s: %w", subject, err)
		}
	}
	return n.record(subject, header, out.Message.Data, out.Message.Sequence), nil
}

// List implements discovery.Table. It is what the table was at one moment.
func (s *Store) List(ctx context.Context, below discovery.Key) ([]discovery.Entry, error) {
	if err := validBelow(below); err != nil {
		return nil, err
	}
	var records map[discovery.Key]record
	err := s.reach(ctx, s.table, func(ctx context.Context, on *session) (err error) {
		records, err = s.list(ctx, on, below)
		return err
	})
	if err != nil {
		return nil, err
	}
	entries := make([]discovery.Entry, 0, len(records))
	for _, r := range records {
		if r.there() {
			entries = append(entries, r.entry())
		}
	}
	slices.SortFunc(entries, func(a, b discovery.Entry) int { return cmp.Compare(a.Key, b.Key) })
	return entries, nil
}

func validBelow(below discovery.Key) error {
	if below == "" {
		return nil
	}
	_, err := below.Segments()
	return err
}

const (
	// A page is this long at most, in messages and in bytes, far from what makes the
	// broker end a connection.
	pageMessages = 1 << 15
	pageBytes    = 16 << 20
)

// list reads all messages below a key, in pages. They are in the order of their
// sequences, of each key the last. So what changes while it is read comes again at
// the end, and the whole is what there is at the end of it. The server that answers
// holds back commits while it reads a page.
//
// Of several servers each answers, and may be behind: where they disagree about what
// is left, or lack what this store has written, that is read again.
func (s *Store) list(ctx context.Context, on *session, below discovery.Key) (map[discovery.Key]record, error) {
	records := map[discovery.Key]record{}
	next := page{}
	for {
		p, err := s.page(ctx, on, below, next.last+1, records)
		switch {
		case err != nil:
			return nil, err
		case s.settings.Replicas > 1 && next.last > 0 && p.pending != next.pending:
			return nil, fmt.Errorf("%w: its servers disagree", discovery.ErrUnavailable)
		case p.left == 0 && s.settings.Replicas > 1 && !s.own.among(records, below, time.Now()):
			return nil, fmt.Errorf("%w: a server is behind", discovery.ErrUnavailable)
		case p.left == 0:
			return records, nil
		}
		next = page{last: p.last, pending: p.left}
	}
}

// page is what was read at once: up to the last sequence, of so many messages that
// were pending, so many of which are left.
type page struct {
	last          uint64
	pending, left int
}

func (s *Store) page(ctx context.Context, on *session, below discovery.Key, from uint64, into map[discovery.Key]record) (page, error) {
	question := map[string]any{"seq": from, "next_by_subj": s.names.below(below), "batch": pageMessages, "max_bytes": pageBytes}
	p, n := page{last: from - 1}, 0
	err := on.gather(ctx, "DIRECT.GET."+s.table.Name, question, func(msg *nats.Msg) (bool, error) {
		switch msg.Header.Get(headerStatus) {
		case "":
		case "204":
			left, err := strconv.Atoi(msg.Header.Get(headerPending))
			p.left, p.pending = left, n+left
			if got, _ := strconv.ParseUint(msg.Header.Get(jetstream.LastSequenceHeader), 10, 64); got != p.last {
				return true, errBroken
			}
			return true, err
		case "404":
			return true, nil
		default:
			return true, fmt.Errorf("%w: it answers %q", discovery.ErrUnavailable, msg.Header.Get(headerDescription))
		}
		r, err := s.names.direct(msg)
		if err != nil {
			return true, err
		}
		into[r.key], p.last = r, r.sequence
		n++
		return false, nil
	})
	return p, err
}

const (
	headerStatus      = "Status"
	headerDescription = "Description"
	headerPending     = "Nats-Num-Pending"
)
