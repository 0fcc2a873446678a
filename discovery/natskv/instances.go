package natskv

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/discovery"
)

const (
	// instanceTTL is how long the broker keeps an instance that is not renewed; watchers
	// learn of it within another second. renewInterval is how often it is renewed.
	instanceTTL   = 2 * time.Second
	renewInterval = instanceTTL / 4
	// removeTimeout bounds the removal of an instance.
	removeTimeout = 2 * time.Second
	// keepLost is how long a watcher keeps instances whose stream was lost, so that they
	// can register again.
	keepLost = 3 * time.Second
)

// Watchers learn of a killed instance in time: not negative, so it compiles.
const _ = uint(discovery.MaxDetectTime - instanceTTL - time.Second)

// instanceRecord is what the broker stores of an instance.
type instanceRecord struct {
	Address string            `json:"address,omitempty"`
	Meta    map[string]string `json:"meta,omitempty"`
	// Serving is what the instance's health check reports.
	Serving bool `json:"serving"`
}

// Announce implements discovery.Announcer.
func (s *Store) Announce(ctx context.Context, i discovery.Instance, report func(error)) error {
	if err := i.Validate(); err != nil {
		return err
	}
	check, err := newChecker(i.Address, i.ID, i.TLS)
	if err != nil {
		return fmt.Errorf("%w: address: %w", discovery.ErrInvalid, err)
	}
	defer check.close()
	a := &announcement{store: s, instance: i, check: check, report: report, subject: s.names.instance(i.Service, i.ID), nonce: uuid.NewString()}
	if err := a.maintain(ctx); err != nil {
		return err
	}
	return a.remove(ctx)
}

// announcement keeps an instance registered.
type announcement struct {
	store    *Store
	instance discovery.Instance
	subject  string
	// nonce tells its messages from another instance's with the same ID.
	nonce  string
	check  *checker
	report func(error)

	// sent is true once the instance may be registered. sequence numbers its latest
	// message, and renewed when that was sent.
	sent     bool
	sequence uint64
	renewed  time.Time
	// reported is true once report was called, and registered if that was with nil.
	reported, registered bool
	// uncheckable is true while the health check fails to reach the instance, and advice
	// is what was logged about that.
	uncheckable bool
	advice      string
}

// maintain renews the instance until the context ends, or the broker rejects the
// credentials.
func (a *announcement) maintain(ctx context.Context) error {
	tick := time.NewTicker(renewInterval)
	defer tick.Stop()
	for ctx.Err() == nil {
		err := a.renew(ctx)
		if ctx.Err() != nil {
			return nil
		}
		a.reportChange(err)
		if errors.Is(err, discovery.ErrDenied) {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	return nil
}

// reportChange reports whether the instance is registered, if that has changed. It is
// registered as long as the broker keeps it.
func (a *announcement) reportChange(err error) {
	registered := err == nil || a.registered && time.Since(a.renewed) < instanceTTL
	if !a.reported || registered != a.registered {
		a.reported, a.registered = true, registered
		a.report(err)
	}
}

// renew checks the health of the instance, and registers it.
func (a *announcement) renew(ctx context.Context) error {
	serving, why := a.check.serving(ctx)
	a.logUncheckable(ctx, why)
	data, err := json.Marshal(instanceRecord{Address: a.instance.Address, Meta: a.instance.Meta, Serving: serving})
	if err != nil {
		return err
	}
	msg := &nats.Msg{Subject: a.subject, Data: data, Header: nats.Header{}}
	msg.Header.Set(jetstream.MsgTTLHeader, instanceTTL.String())
	msg.Header.Set(headerMark, mark{nonce: a.nonce}.String())
	begin := time.Now()
	return a.store.once(ctx, a.store.instances, func(ctx context.Context, on *session) error {
		a.sent = true
		sequence, err := on.publish(ctx, msg)
		if err == nil {
			a.sequence, a.renewed = sequence, begin
		}
		return err
	})
}

// logUncheckable logs why the health check cannot reach the instance, once for each kind
// of reason, until it can.
func (a *announcement) logUncheckable(ctx context.Context, why error) {
	if ctx.Err() != nil {
		return
	}
	hint := advice(why)
	if why != nil && (!a.uncheckable || hint != a.advice) {
		if hint != "" {
			why = fmt.Errorf("%w; %s", why, hint)
		}
		a.store.settings.Logger.Warn("the health check cannot reach an instance, so it counts as unhealthy", "service", a.instance.Service, "id", a.instance.ID, "address", a.instance.Address, "error", why)
	}
	a.uncheckable, a.advice = why != nil, hint
}

// remove removes the instance after the context has ended. Another instance that has
// registered under the same ID since stays.
func (a *announcement) remove(ctx context.Context) error {
	if !a.sent {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	err := a.store.retry(ctx, a.store.instances, func(ctx context.Context, on *session) error {
		msg := &nats.Msg{Subject: a.subject, Header: nats.Header{}}
		msg.Header.Set(headerDeleted, "true")
		msg.Header.Set(jetstream.MsgTTLHeader, expiredTTL.String())
		msg.Header.Set(jetstream.ExpectedLastSubjSeqHeader, strconv.FormatUint(a.sequence, 10))
		_, err := on.publish(ctx, msg)
		if !errors.Is(err, errWrongSequence) {
			return err
		}
		// The instance has expired, or another one replaced it, or an ack was lost.
		last, err := on.last(ctx, a.store.names, a.store.instances.Name, a.subject)
		if err != nil || last.mark.nonce != a.nonce {
			return err
		}
		a.sequence = last.sequence
		return fmt.Errorf("%w: the instance has another sequence", discovery.ErrUnavailable)
	})
	if err != nil {
		return fmt.Errorf("instance %s of %s expires in %s: %w", a.instance.ID, a.instance.Service, instanceTTL, err)
	}
	return nil
}

// Watch implements discovery.Watcher.
func (s *Store) Watch(ctx context.Context, service string, o discovery.Observer[discovery.Snapshot]) error {
	if err := discovery.ValidateService(service); err != nil {
		return err
	}
	return s.follow(ctx, s.instances, s.names.service(service), &serviceFollower{
		disconnects: disconnects{report: o.OnDisconnect}, service: service, update: o.OnUpdate, now: time.Now, members: map[string]member{},
	})
}

// readInstance reads a record that someone has stored.
func readInstance(service, id string, data []byte) (member, error) {
	var r instanceRecord
	if err := json.Unmarshal(data, &r); err != nil {
		return member{}, fmt.Errorf("instance %s of %s: %w", id, service, err)
	}
	i := discovery.Instance{Service: service, ID: id, Address: r.Address, Meta: r.Meta}
	return member{instance: i, serving: r.Serving}, i.Validate()
}

// serviceFollower turns messages into snapshots.
type serviceFollower struct {
	disconnects
	service string
	update  func(discovery.Snapshot)
	now     func() time.Time

	members map[string]member
	// created is when the stream was created, and revision its last known sequence.
	created  time.Time
	revision uint64
	// keepUntil is when members of a lost stream are dropped, zero if there are none.
	keepUntil time.Time
	// changed is true if there is something to report.
	changed bool
}

type member struct {
	instance discovery.Instance
	serving  bool
	// lost is true if the stream that had the member is lost.
	lost bool
}

func (m *serviceFollower) begin(stream *jetstream.StreamInfo) {
	if m.created.Equal(stream.Created) && stream.State.LastSeq >= m.revision {
		clear(m.members)
	} else {
		m.keepUntil = m.now().Add(keepLost)
		for id, member := range m.members {
			member.lost = true
			m.members[id] = member
		}
	}
	m.created, m.revision, m.changed = stream.Created, stream.State.LastSeq, true
}

func (m *serviceFollower) take(msg *nats.Msg, sequence uint64) {
	m.revision = max(m.revision, sequence)
	id := msg.Subject[strings.LastIndexByte(msg.Subject, '.')+1:]
	old := m.members[id]
	now, err := member{}, error(nil)
	if msg.Header.Get(headerDeleted) == "" && msg.Header.Get(jetstream.MarkerReasonHeader) == "" {
		now, err = readInstance(m.service, id, msg.Data)
	}
	// Only another program can have written a record that is unreadable.
	if err != nil || !now.serving {
		m.changed = m.changed || old.serving
		delete(m.members, id)
		return
	}
	m.changed = m.changed || !old.serving || old.instance.Address != now.instance.Address || !maps.Equal(old.instance.Meta, now.instance.Meta)
	m.members[id] = now
}

func (m *serviceFollower) flush() {
	if !m.keepUntil.IsZero() && m.now().After(m.keepUntil) {
		m.keepUntil = time.Time{}
		before := len(m.members)
		maps.DeleteFunc(m.members, func(_ string, member member) bool { return member.lost })
		m.changed = m.changed || len(m.members) != before
	}
	if !m.changed {
		return
	}
	snapshot := discovery.Snapshot{Revision: discovery.Revision(m.revision)}
	for _, id := range slices.Sorted(maps.Keys(m.members)) {
		snapshot.Instances = append(snapshot.Instances, m.members[id].instance)
	}
	m.changed, m.disconnected = false, false
	m.update(snapshot)
}
