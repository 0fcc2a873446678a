package natskv

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/discovery"
)

// Watch implements discovery.Watcher.
func (s *Store) Watch(ctx context.Context, service string, o discovery.Observer[discovery.Snapshot]) error {
	if err := discovery.ValidService(service); err != nil {
		return err
	}
	return s.follow(ctx, s.instances, s.names.service(service), &members{
		downs: downs{lost: o.Lose}, service: service, see: o.See, now: time.Now, known: map[string]member{},
	})
}

// instanceRecord is what the broker has of an instance.
type instanceRecord struct {
	Address string            `json:"address,omitempty"`
	Meta    map[string]string `json:"meta,omitempty"`
	// Serving is what it says of itself.
	Serving bool `json:"serving"`
}

// readInstance reads a record that somebody has stored.
func readInstance(service, id string, data []byte) (member, error) {
	var r instanceRecord
	if err := json.Unmarshal(data, &r); err != nil {
		return member{}, fmt.Errorf("instance %s of %s: %w", id, service, err)
	}
	i := discovery.Instance{Service: service, ID: id, Address: r.Address, Meta: r.Meta}
	return member{instance: i, serving: r.Serving}, i.Validate()
}

// grace is how long those are kept whose stream was lost, for them to register again.
const grace = 3 * time.Second

// members make snapshots out of messages.
type members struct {
	downs
	service string
	see     func(discovery.Snapshot)
	now     func() time.Time

	known map[string]member
	// stream is when the stream was made, of which revision is the last sequence that
	// is known.
	stream   time.Time
	revision uint64
	// until is when those go that are kept.
	until time.Time
	// changed says that there is something to tell.
	changed bool
}

type member struct {
	instance discovery.Instance
	serving  bool
	// kept says that the stream which had it is lost.
	kept bool
}

func (m *members) begin(stream *jetstream.StreamInfo) {
	if m.stream.Equal(stream.Created) && stream.State.LastSeq >= m.revision {
		clear(m.known)
	} else {
		m.until = m.now().Add(grace)
		for id, member := range m.known {
			member.kept = true
			m.known[id] = member
		}
	}
	m.stream, m.revision, m.changed = stream.Created, stream.State.LastSeq, true
}

func (m *members) take(msg *nats.Msg, sequence uint64) {
	m.revision = max(m.revision, sequence)
	id := msg.Subject[strings.LastIndexByte(msg.Subject, '.')+1:]
	old := m.known[id]
	now, err := member{}, error(nil)
	if msg.Header.Get(headerDeleted) == "" && msg.Header.Get(jetstream.MarkerReasonHeader) == "" {
		now, err = readInstance(m.service, id, msg.Data)
	}
	// What is no record is no instance; only another program can have written it.
	if err != nil || !now.serving {
		m.changed = m.changed || old.serving
		delete(m.known, id)
		return
	}
	m.changed = m.changed || !old.serving || !same(old.instance, now.instance)
	m.known[id] = now
}

func same(a, b discovery.Instance) bool {
	return a.Address == b.Address && maps.Equal(a.Meta, b.Meta)
}

func (m *members) settle() {
	if !m.until.IsZero() && m.now().After(m.until) {
		m.until = time.Time{}
		before := len(m.known)
		maps.DeleteFunc(m.known, func(_ string, member member) bool { return member.kept })
		m.changed = m.changed || len(m.known) != before
	}
	if !m.changed {
		return
	}
	snapshot := discovery.Snapshot{Revision: discovery.Revision(m.revision)}
	for _, id := range slices.Sorted(maps.Keys(m.known)) {
		snapshot.Instances = append(snapshot.Instances, m.known[id].instance)
	}
	m.changed, m.down = false, false
	m.see(snapshot)
}
