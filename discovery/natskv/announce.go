package natskv

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/discovery"
)

const (
	// instanceTTL is how long the broker keeps an instance that is not renewed;
	// it tells so within another second. beatEvery is how often it is renewed.
	instanceTTL = 2 * time.Second
	beatEvery   = instanceTTL / 4
	// leaveWithin bounds the time that an instance takes to be removed.
	leaveWithin = 2 * time.Second
)

// Announce implements discovery.Announcer.
func (s *Store) Announce(ctx context.Context, i discovery.Instance, state func(error)) error {
	if err := i.Validate(); err != nil {
		return err
	}
	check, err := newChecker(i.Address, i.TLS)
	if err != nil {
		return fmt.Errorf("%w: address: %w", discovery.ErrInvalid, err)
	}
	defer check.close()
	a := &announcement{store: s, instance: i, check: check, state: state, subject: s.names.instance(i.Service, i.ID), nonce: uuid.NewString()}
	if err := a.keep(ctx); err != nil {
		return err
	}
	leaving, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveWithin)
	defer cancel()
	return a.leave(leaving)
}

// announcement is an instance that is kept registered.
type announcement struct {
	store    *Store
	instance discovery.Instance
	subject  string
	// nonce tells its messages from those of another of its name.
	nonce string
	check *checker
	state func(error)

	// sent says that something may have been registered, at is the sequence of the
	// last that was, and renewed is when.
	sent    bool
	at      uint64
	renewed time.Time
	// told is what state was told: nothing yet, that it is registered, or not.
	told told
	// unasked says that the instance cannot be asked how it is, and advised is what was
	// said to do about it.
	unasked bool
	advised string
}

type told int

const (
	nothing told = iota
	registered
	missing
)

// keep renews until the context ends, or nothing helps.
func (a *announcement) keep(ctx context.Context) error {
	tick := time.NewTicker(beatEvery)
	defer tick.Stop()
	for ctx.Err() == nil {
		err := a.beat(ctx)
		if ctx.Err() != nil {
			return nil
		}
		a.tell(err)
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

// tell says what has changed. An instance is registered for as long as the broker
// keeps it.
func (a *announcement) tell(err error) {
	switch {
	case err == nil && a.told != registered:
		a.told = registered
		a.state(nil)
	case err != nil && (a.told == nothing || a.told == registered && time.Since(a.renewed) >= instanceTTL):
		a.told = missing
		a.state(err)
	}
}

// beat asks the instance how it is, and registers it.
func (a *announcement) beat(ctx context.Context) error {
	serving, why := a.check.serving(ctx)
	a.explain(ctx, why)
	data, err := json.Marshal(instanceRecord{Address: a.instance.Address, Meta: a.instance.Meta, Serving: serving})
	if err != nil {
		return err
	}
	msg := &nats.Msg{Subject: a.subject, Data: data, Header: nats.Header{}}
	msg.Header.Set(jetstream.MsgTTLHeader, instanceTTL.String())
	msg.Header.Set(headerCommit, mark{nonce: a.nonce}.String())
	begin := time.Now()
	return a.store.once(ctx, a.store.instances, func(ctx context.Context, on *session) error {
		a.sent = true
		ack, err := on.publish(ctx, msg)
		if err == nil {
			a.at, a.renewed = ack.Sequence, begin
		}
		return err
	})
}

// explain says why an instance is not healthy that cannot be asked, once for each
// reason until it can.
func (a *announcement) explain(ctx context.Context, why error) {
	if ctx.Err() != nil {
		return
	}
	say := advice(why)
	if why != nil && (!a.unasked || say != a.advised) {
		if say != "" {
			why = fmt.Errorf("%w; %s", why, say)
		}
		a.store.settings.Logger.Warn("an instance does not say how it is, so it counts as gone", "service", a.instance.Service, "id", a.instance.ID, "address", a.instance.Address, "error", why)
	}
	a.unasked, a.advised = why != nil, say
}

// publish stores a message in a stream.
func (s *session) publish(ctx context.Context, msg *nats.Msg) (jetstream.PubAck, error) {
	var ack jetstream.PubAck
	answer, err := s.ask(ctx, msg)
	if err != nil {
		return ack, err
	}
	err = decode(answer.Data, &ack)
	if err == nil && ack.Sequence == 0 || errors.Is(err, errGarbled) {
		err = fmt.Errorf("%w: %q is none", errLost, answer.Data)
	}
	return ack, err
}

// leave removes the instance. Another of the same name that has come since stays.
func (a *announcement) leave(ctx context.Context) error {
	if !a.sent {
		return nil
	}
	err := a.store.reach(ctx, a.store.instances, a.remove)
	if err != nil {
		return fmt.Errorf("instance %s of %s is left for %s: %w", a.instance.ID, a.instance.Service, instanceTTL, err)
	}
	return nil
}

func (a *announcement) remove(ctx context.Context, on *session) error {
	msg := &nats.Msg{Subject: a.subject, Header: nats.Header{}}
	msg.Header.Set(headerDeleted, "true")
	msg.Header.Set(jetstream.MsgTTLHeader, expiredTTL.String())
	msg.Header.Set(jetstream.ExpectedLastSubjSeqHeader, strconv.FormatUint(a.at, 10))
	_, err := on.publish(ctx, msg)
	if !errors.Is(err, errRefused) {
		return err
	}
	// What is there has expired, or is another's, or its answer was lost.
	last, err := on.get(ctx, a.store.names, a.store.instances.Name, a.subject)
	if err != nil || last.commit.nonce != a.nonce {
		return err
	}
	a.at = last.sequence
	return errAgain
}

var errAgain = fmt.Errorf("%w: it has another sequence", discovery.ErrUnavailable)
