package natskv

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/discovery"
)

const (
	// headerMark is on every message of the table: the nonce of the change, and the
	// sequence that the message replaced.
	headerMark = "Stagemesh-Commit"
	// headerDeleted marks a message that deletes its entry or instance.
	headerDeleted = "Stagemesh-Deleted"
)

// epoch is when the stream of a table was created, in microseconds. A revision is the epoch and a
// sequence, so revisions grow also after the stream was created again, and none comes twice.
type epoch uint64

func epochOf(stream *jetstream.StreamInfo) epoch { return epoch(stream.Created.UnixMicro()) }

// in returns the record with its revision in place of its sequence.
func (r record) in(e epoch) record {
	if r.sequence != 0 {
		r.sequence += uint64(e)
	}
	return r
}

// record is the last message of a key; one with sequence 0 stands for no message.
type record struct {
	key      discovery.Key
	value    []byte
	sequence uint64
	deleted  bool
	mark     mark
}

// mark identifies the change that wrote a message.
type mark struct {
	nonce    string
	replaced uint64
}

func (m mark) String() string { return m.nonce + " " + strconv.FormatUint(m.replaced, 10) }

// readMark parses what String writes. Other text is an empty mark.
func readMark(text string) mark {
	nonce, rest, ok := strings.Cut(text, " ")
	replaced, err := strconv.ParseUint(rest, 10, 64)
	if !ok || nonce == "" || err != nil {
		return mark{}
	}
	return mark{nonce, replaced}
}

func (r record) exists() bool { return r.sequence != 0 && !r.deleted }

func (r record) entry() discovery.Entry {
	return discovery.Entry{Key: r.key, Value: r.value, Revision: discovery.Revision(r.sequence)}
}

// record reads a message of the table. The broker's own delete markers count as
// deletes too, in case an operator lets it write some.
func (n names) record(subject string, header nats.Header, value []byte, sequence uint64) record {
	return record{
		key: n.key(subject), value: value, sequence: sequence,
		deleted: header.Get(headerDeleted) != "" || header.Get(jetstream.MarkerReasonHeader) != "",
		mark:    readMark(header.Get(headerMark)),
	}
}

// Get implements discovery.Table. It asks the stream's leader.
func (s *Store) Get(ctx context.Context, key discovery.Key) (discovery.Entry, error) {
	if err := key.Validate(); err != nil {
		return discovery.Entry{}, err
	}
	var r record
	err := s.retry(ctx, s.table, func(ctx context.Context, on *session) error {
		stream, err := on.info(ctx, s.table.Name)
		if err == nil {
			r, err = on.last(ctx, s.names, s.table.Name, s.names.entry(key))
		}
		r = r.in(epochOf(stream))
		return err
	})
	if err == nil && !r.exists() {
		err = discovery.ErrNotFound
	}
	if err != nil {
		return discovery.Entry{}, err
	}
	return r.entry(), nil
}

// last reads the last message of a subject.
func (s *session) last(ctx context.Context, n names, stream, subject string) (record, error) {
	var out struct {
		Message struct {
			Sequence uint64 `json:"seq"`
			Header   []byte `json:"hdrs"`
			Data     []byte `json:"data"`
		} `json:"message"`
	}
	err := s.api(ctx, "STREAM.MSG.GET."+stream, map[string]string{"last_by_subj": subject}, &out)
	if hasCode(err, jetstream.JSErrCodeMessageNotFound) {
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

// Put implements discovery.Table.
func (s *Store) Put(ctx context.Context, key discovery.Key, value []byte, expect discovery.Revision) (discovery.Revision, error) {
	if err := discovery.ValidatePut(key, value); err != nil {
		return 0, err
	}
	c := newChange(s.names.entry(key), expect)
	c.value = value
	return s.commit(ctx, c)
}

// Delete implements discovery.Table.
func (s *Store) Delete(ctx context.Context, key discovery.Key, expect discovery.Revision) error {
	if err := discovery.ValidateDelete(key, expect); err != nil {
		return err
	}
	c := newChange(s.names.entry(key), expect)
	c.header.Set(headerDeleted, "true")
	c.header.Set(jetstream.MsgTTLHeader, s.markerTTL.String())
	_, err := s.commit(ctx, c)
	return err
}

// change is a Put or Delete on its way.
type change struct {
	nonce   string
	subject string
	value   []byte
	header  nats.Header
	// revision is what the entry has to have, 0 that there is to be none. sequence is
	// what the broker has to find: the revision, or a delete marker's, with the epoch.
	revision discovery.Revision
	sequence uint64
	// lost is true once an answer was lost: the change may have been made. check is
	// true if the entry has to be read before the change is sent again. moved is true if
	// sequence has changed since an answer was lost.
	lost, check, moved bool
}

func newChange(subject string, expect discovery.Revision) *change {
	return &change{nonce: uuid.NewString(), subject: subject, header: nats.Header{}, revision: expect, sequence: uint64(expect)}
}

// settle decides what became of a change by the last message of its key. It returns the
// revision if the change was made, an error if it was not or nobody can know, and
// neither if it has to be sent again.
//
// The nonce identifies a change that was made. A change whose answer was lost and whose
// nonce is not there was not made if another message replaced the one that it was to
// replace. If the entry has changed more often than that, nobody can know.
func (c *change) settle(last record) (discovery.Revision, error) {
	if last.mark.nonce == c.nonce {
		return discovery.Revision(last.sequence), nil
	}
	asExpected := !last.exists()
	if c.revision != 0 {
		asExpected = last.exists() && last.sequence == uint64(c.revision)
	}
	replaced := !c.moved && last.mark.nonce != "" && last.mark.replaced == c.sequence
	switch {
	case asExpected:
		c.moved = c.moved || c.lost && c.sequence != last.sequence
		c.sequence = last.sequence
		return 0, nil
	case !c.lost || replaced:
		return 0, discovery.ErrConflict
	default:
		return 0, fmt.Errorf("%w: the entry has changed more than once", discovery.ErrUnknown)
	}
}

// message returns what is sent.
func (c *change) message(at epoch) *nats.Msg {
	c.header.Set(headerMark, mark{nonce: c.nonce, replaced: c.sequence}.String())
	c.header.Set(jetstream.ExpectedLastSubjSeqHeader, strconv.FormatUint(c.sequence-min(c.sequence, uint64(at)), 10))
	return &nats.Msg{Subject: c.subject, Header: c.header, Data: c.value}
}

// commit sends a change until it knows the outcome.
func (s *Store) commit(ctx context.Context, c *change) (discovery.Revision, error) {
	for tried := newAttempts(); ; {
		revision, err := s.try(ctx, c)
		switch {
		case revision != 0:
			return revision, nil
		case errors.Is(err, discovery.ErrUnknown), errors.Is(err, discovery.ErrConflict):
			return 0, err
		case c.lost, errors.Is(err, errWrongSequence):
			// An earlier try may have made the change.
			c.check = true
		case !errors.Is(err, discovery.ErrUnavailable), tried.areOver(err):
			return 0, err
		}
		if !errors.Is(err, errWrongSequence) {
			pause(ctx)
		}
		switch {
		case ctx.Err() == nil:
		case c.lost:
			return 0, fmt.Errorf("%w: %w", discovery.ErrUnknown, ctx.Err())
		default:
			return 0, timeoutError(ctx)
		}
	}
}

// try sends a change once, after it has read the entry if that is necessary.
func (s *Store) try(ctx context.Context, c *change) (revision discovery.Revision, err error) {
	err = s.once(ctx, s.table, func(ctx context.Context, on *session) error {
		stream, err := on.info(ctx, s.table.Name)
		if err != nil {
			return err
		}
		at := epochOf(stream)
		if c.check {
			last, err := on.last(ctx, s.names, s.table.Name, c.subject)
			if err != nil {
				return err
			}
			if revision, err = c.settle(last.in(at)); revision != 0 || err != nil {
				return err
			}
			c.check = false
		}
		if c.sequence != 0 && c.sequence <= uint64(at) {
			return errWrongSequence // it is of an earlier stream
		}
		if s.settings.Full != nil {
			if err := s.settings.Full(); err != nil {
				return fmt.Errorf("%w: %w", discovery.ErrFull, err)
			}
		}
		sequence, err := on.publish(ctx, c.message(at))
		c.lost = c.lost || errors.Is(err, errLost)
		revision = discovery.Revision(record{sequence: sequence}.in(at).sequence)
		return err
	})
	return revision, err
}

// Observe implements discovery.Table.
func (s *Store) Observe(ctx context.Context, below discovery.Key, o discovery.Observer[discovery.Change]) error {
	if err := below.ValidatePrefix(); err != nil {
		return err
	}
	return s.follow(ctx, s.table, s.names.below(below), &tableFollower{names: s.names, disconnects: disconnects{report: o.OnDisconnect}, update: o.OnUpdate})
}

// tableFollower turns messages into changes.
type tableFollower struct {
	disconnects
	names  names
	epoch  epoch
	update func(discovery.Change)
	// reset is true until all entries have come, and pending are the messages that were
	// not reported yet.
	reset   bool
	pending map[discovery.Key]record
}

func (f *tableFollower) begin(stream *jetstream.StreamInfo) {
	f.epoch, f.reset, f.pending = epochOf(stream), true, map[discovery.Key]record{}
}

func (f *tableFollower) take(msg *nats.Msg, sequence uint64) {
	r := f.names.record(msg.Subject, msg.Header, msg.Data, sequence)
	f.pending[r.key] = r.in(f.epoch)
}

func (f *tableFollower) flush() {
	if !f.reset && len(f.pending) == 0 {
		return
	}
	change := discovery.Change{Reset: f.reset}
	inOrder := slices.SortedFunc(maps.Values(f.pending), func(a, b record) int { return cmp.Compare(a.sequence, b.sequence) })
	for _, r := range inOrder {
		switch {
		case r.exists():
			change.Entries = append(change.Entries, r.entry())
		case !f.reset:
			change.Deleted = append(change.Deleted, r.key)
		}
	}
	f.reset, f.disconnected = false, false
	f.pending = map[discovery.Key]record{}
	f.update(change)
}
