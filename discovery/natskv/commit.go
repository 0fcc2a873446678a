package natskv

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/discovery"
)

// commit is a commit on its way: what it changes, and what is known of it.
type commit struct {
	nonce   string
	changes []discovery.Operation
	// expect are the sequences that the broker is to find: the entries' own, or those
	// of the markers where there is to be none.
	expect []uint64
	// doubt says that the entries are to be read before it is sent (again); lost that
	// it may have been made; moved that expect has changed since it was lost.
	doubt, lost, moved bool
}

func newCommit(nonce string, changes []discovery.Operation) *commit {
	c := &commit{nonce: nonce, changes: changes, expect: make([]uint64, len(changes))}
	for i, change := range changes {
		c.expect[i] = uint64(change.Expect)
	}
	return c
}

// judge says what became of the commit, by the last messages of its keys: the
// revision where it was made, an error where it was not, or is not known to be,
// and neither where it is to be sent again, with expect as it is now.
//
// A commit that was made is known by its nonce, on any of its keys. One whose answer
// was lost and whose nonce is nowhere was not made where a message has taken the
// place that it was to take; where an entry has changed more often than that, nobody
// knows.
func (c *commit) judge(last []record) (discovery.Revision, error) {
	for _, r := range last {
		if r.commit.nonce == c.nonce {
			return discovery.Revision(r.sequence + uint64(r.commit.follow)), nil
		}
	}
	fits, taken := true, false
	for i, r := range last {
		if c.fits(i, r) {
			continue
		}
		fits = false
		taken = taken || !c.moved && r.commit.nonce != "" && r.commit.replaced == c.expect[i]
	}
	switch {
	case fits:
		c.again(last)
		return 0, nil
	case !c.lost || taken:
		return 0, discovery.ErrConflict
	default:
		return 0, fmt.Errorf("%w: an entry has changed more than once", discovery.ErrUnknown)
	}
}

// fits reports whether an entry is as a change expects it.
func (c *commit) fits(i int, r record) bool {
	if c.changes[i].Expect == 0 {
		return !r.there()
	}
	return r.there() && r.sequence == uint64(c.changes[i].Expect)
}

func (c *commit) again(last []record) {
	for i, r := range last {
		if c.expect[i] != r.sequence {
			c.expect[i] = r.sequence
			c.moved = c.moved || c.lost
		}
	}
}

// messages are what is sent for the commit, once: another time has another batch.
func (c *commit) messages(n names, batch string, markerTTL time.Duration) []*nats.Msg {
	out := make([]*nats.Msg, len(c.changes))
	for i, change := range c.changes {
		header := nats.Header{}
		header.Set(headerCommit, mark{nonce: c.nonce, follow: len(c.changes) - 1 - i, replaced: c.expect[i]}.String())
		header.Set(jetstream.ExpectedLastSubjSeqHeader, strconv.FormatUint(c.expect[i], 10))
		if change.Delete {
			header.Set(headerDeleted, "true")
			header.Set(jetstream.MsgTTLHeader, markerTTL.String())
		}
		if len(c.changes) > 1 {
			header.Set(headerBatchID, batch)
			header.Set(headerBatchSequence, strconv.Itoa(i+1))
		}
		out[i] = &nats.Msg{Subject: n.entry(change.Key), Header: header, Data: change.Value}
	}
	if len(out) > 1 {
		out[len(out)-1].Header.Set(headerBatchCommit, "1")
	}
	return out
}

const (
	headerBatchID       = "Nats-Batch-Id"
	headerBatchSequence = "Nats-Batch-Sequence"
	headerBatchCommit   = "Nats-Batch-Commit"
)

// Commit implements discovery.Table. The revision of a commit of several is that of
// the last of them; each has its own, which is less.
func (s *Store) Commit(ctx context.Context, changes ...discovery.Operation) (discovery.Revision, error) {
	if err := discovery.ValidCommit(changes); err != nil {
		return 0, err
	}
	c := newCommit(uuid.NewString(), changes)
	for late := time.Now().Add(patience); ; {
		revision, err := s.attempt(ctx, c)
		switch {
		case revision != 0:
			s.remember(c, revision)
			return revision, nil
		case errors.Is(err, discovery.ErrUnknown), errors.Is(err, discovery.ErrConflict):
			return 0, err
		case c.lost, errors.Is(err, errRefused):
			// Whatever it is now, it may have been made before.
			c.doubt = true
		case !errors.Is(err, discovery.ErrUnavailable), time.Now().After(late):
			return 0, err
		}
		if !errors.Is(err, errRefused) && !pause(ctx) || ctx.Err() != nil {
			return 0, c.ended(ctx)
		}
	}
}

// ended is what is known when the context has.
func (c *commit) ended(ctx context.Context) error {
	if c.lost {
		return fmt.Errorf("%w: %w", discovery.ErrUnknown, ctx.Err())
	}
	return ended(ctx)
}

// attempt reads, where there is a doubt, and sends.
func (s *Store) attempt(ctx context.Context, c *commit) (revision discovery.Revision, err error) {
	err = s.once(ctx, s.table, func(ctx context.Context, on *session) error {
		if c.doubt {
			last, err := s.last(ctx, on, c.changes)
			if err != nil {
				return err
			}
			if revision, err = c.judge(last); revision != 0 || err != nil {
				return err
			}
			c.doubt = false
		}
		revision, err = s.send(ctx, on, c)
		c.lost = c.lost || errors.Is(err, errLost)
		return err
	})
	return revision, err
}

// last reads the last messages of all keys.
func (s *Store) last(ctx context.Context, on *session, changes []discovery.Operation) ([]record, error) {
	out := make([]record, len(changes))
	for i, change := range changes {
		var err error
		if out[i], err = on.get(ctx, s.names, s.table.Name, s.names.entry(change.Key)); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// send sends the commit once.
func (s *Store) send(ctx context.Context, on *session, c *commit) (discovery.Revision, error) {
	messages := c.messages(s.names, uuid.NewString(), s.markerTTL)
	last := len(messages) - 1
	for _, msg := range messages[:last] {
		// They change nothing until the last one.
		if err := on.nc.PublishMsg(msg); err != nil {
			return 0, errUnsent
		}
	}
	ack, err := on.publish(ctx, messages[last])
	return discovery.Revision(ack.Sequence), err
}
