package natskv

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/discovery"
)

const (
	// headerCommit is of every entry: the commit's nonce, how many messages of it
	// follow, and the sequence that this one took the place of.
	headerCommit = "Stagemesh-Commit"
	// headerDeleted says that there is no entry.
	headerDeleted = "Stagemesh-Deleted"
)

// record is the last message of a key; none has sequence 0.
type record struct {
	key      discovery.Key
	value    []byte
	sequence uint64
	deleted  bool
	commit   mark
}

// mark is what a commit leaves on each of its messages.
type mark struct {
	nonce    string
	follow   int
	replaced uint64
}

func (m mark) String() string {
	return m.nonce + " " + strconv.Itoa(m.follow) + " " + strconv.FormatUint(m.replaced, 10)
}

// readMark reads what String has written; what it did not write is no mark.
func readMark(text string) mark {
	var m mark
	parts := strings.Split(text, " ")
	if len(parts) != 3 || parts[0] == "" {
		return mark{}
	}
	follow, err := strconv.ParseUint(parts[1], 10, 8)
	if err != nil {
		return mark{}
	}
	if m.replaced, err = strconv.ParseUint(parts[2], 10, 64); err != nil {
		return mark{}
	}
	m.nonce, m.follow = parts[0], int(follow)
	return m
}

// there reports whether the record is an entry.
func (r record) there() bool { return r.sequence != 0 && !r.deleted }

func (r record) entry() discovery.Entry {
	return discovery.Entry{Key: r.key, Value: r.value, Revision: discovery.Revision(r.sequence)}
}

// record reads a message of the table. Markers of the broker's own, where somebody
// has had it leave some, are deletes too.
func (n names) record(subject string, header nats.Header, value []byte, sequence uint64) record {
	return record{
		key: n.key(subject), value: value, sequence: sequence,
		deleted: header.Get(headerDeleted) != "" || header.Get(jetstream.MarkerReasonHeader) != "",
		commit:  readMark(header.Get(headerCommit)),
	}
}

// direct reads a message that was got directly.
func (n names) direct(msg *nats.Msg) (record, error) {
	sequence, err := strconv.ParseUint(msg.Header.Get(jetstream.SequenceHeader), 10, 64)
	if err != nil {
		return record{}, fmt.Errorf("a message of the broker has no sequence: %w", err)
	}
	return n.record(msg.Header.Get(jetstream.SubjectHeader), msg.Header, msg.Data, sequence), nil
}
