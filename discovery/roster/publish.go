package roster

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"google.golang.org/protobuf/proto"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
)

// Defaults of Settings.
const (
	DefaultInterval = time.Second
	DefaultVerify   = 5 * time.Second

	// leaveTime is how long a record takes at most to be removed.
	leaveTime = 2 * time.Second
	// commitTime is how long one write takes at most.
	commitTime = 5 * time.Second
)

// Settings say what is published.
type Settings struct {
	// Current returns the host's record; its mesh, stage and host never change.
	Current func() *meshv1.HostRecord
	// Interval is the least time between two writes, Verify how often the registry
	// is asked whether it has the record still. 0 means the default.
	Interval, Verify time.Duration
	// Logger hears when the record cannot be written; nil discards it.
	Logger *slog.Logger
}

// Publish keeps a host's record in the table as the host is, until the context ends,
// and then removes it. It goes on where the registry cannot be reached, or refuses.
func Publish(ctx context.Context, t discovery.Table, s Settings) error {
	if s.Interval == 0 {
		s.Interval = DefaultInterval
	}
	if s.Verify == 0 {
		s.Verify = DefaultVerify
	}
	if s.Logger == nil {
		s.Logger = slog.New(slog.DiscardHandler)
	}
	first := s.Current()
	p := &publisher{table: t, settings: s, key: KeyOf(first.GetStage(), first.GetHost())}
	ticker := time.NewTicker(s.Interval)
	defer ticker.Stop()
	for {
		if err := p.once(ctx, time.Now()); ctx.Err() == nil {
			p.say(err)
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return p.remove(ctx)
		}
	}
}

// publisher is a record on its way.
type publisher struct {
	table    discovery.Table
	settings Settings
	key      discovery.Key

	// written is what the table has, nil where that is not known; revision is its.
	written  *meshv1.HostRecord
	revision discovery.Revision
	verified time.Time
	failing  bool
	// met says that another process was found to be this host.
	met bool
}

// once writes the record where that is due.
func (p *publisher) once(ctx context.Context, now time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, commitTime)
	defer cancel()
	if p.written == nil || now.Sub(p.verified) >= p.settings.Verify {
		if err := p.verify(ctx, now); err != nil {
			return err
		}
	}
	r := p.settings.Current()
	if p.written != nil && !Differs(p.written, r) {
		return nil
	}
	value, err := encode(r)
	if err != nil {
		return err
	}
	revision, err := p.table.Commit(ctx, discovery.Put(p.key, value, p.revision))
	if err != nil {
		p.written = nil
		return err
	}
	p.written, p.revision = r, revision
	return nil
}

// verify finds out what the table has. What another process has written there, or
// nobody, is to be written again.
func (p *publisher) verify(ctx context.Context, now time.Time) error {
	e, err := p.table.Get(ctx, p.key)
	if err != nil && !errors.Is(err, discovery.ErrNotFound) {
		return err
	}
	if e.Revision != p.revision || e.Revision == 0 {
		p.meet(e)
		p.written = nil
	}
	p.revision, p.verified = e.Revision, now
	return nil
}

// meet says once where another process has written over what this one wrote, as the
// same host: they go on to take turns.
func (p *publisher) meet(e discovery.Entry) {
	other, err := decode(e)
	if p.met || p.written == nil || err != nil || proto.Equal(other.GetStartedAt(), p.written.GetStartedAt()) {
		return
	}
	p.met = true
	p.settings.Logger.Warn("another process is this host too; give one of them another id", "stage", other.GetStage(), "host", other.GetHost(),
		"its_address", other.GetAddress(), "its_start", other.GetStartedAt().AsTime())
}

// say logs a failure once, and its end.
func (p *publisher) say(err error) {
	switch {
	case err != nil && !p.failing:
		p.settings.Logger.Warn("the host's record is not published; trying again", "error", err)
	case err == nil && p.failing:
		p.settings.Logger.Info("the host's record is published again")
	}
	p.failing = err != nil
}

// remove removes the record after the end of the context.
func (p *publisher) remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTime)
	defer cancel()
	for {
		e, err := p.table.Get(ctx, p.key)
		if errors.Is(err, discovery.ErrNotFound) {
			return nil
		}
		if err == nil {
			_, err = p.table.Commit(ctx, discovery.Delete(p.key, e.Revision))
		}
		if !errors.Is(err, discovery.ErrConflict) {
			return err
		}
	}
}
