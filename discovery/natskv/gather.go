package natskv

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/nats-io/nats.go"

	"github.com/stagemesh/stagemesh/discovery"
)

// mailbox bounds the bytes that wait for a reader.
const mailbox = 64 << 20

// subscribe opens a mailbox of one's own.
func (s *session) subscribe() (*nats.Subscription, error) {
	sub, err := s.nc.SubscribeSync(s.nc.NewInbox())
	if err != nil {
		return nil, errUnsent
	}
	if err := sub.SetPendingLimits(-1, mailbox); err != nil {
		return nil, err
	}
	return sub, nil
}

// gather asks the broker's API what it answers with many messages, and hands them
// over until take is done.
func (s *session) gather(ctx context.Context, subject string, what any, take func(*nats.Msg) (done bool, err error)) error {
	data, err := json.Marshal(what)
	if err != nil {
		return err
	}
	ctx, cancel := s.bind(ctx)
	defer cancel(nil)
	q := &question{subject: apiPrefix + subject, refuse: cancel}
	s.link.enter(q)
	defer s.link.leave(q)
	within, stop := context.WithTimeout(ctx, answerTimeout)
	defer stop()
	sub, err := s.subscribe()
	if err != nil {
		return err
	}
	defer s.unsubscribe(sub)
	if err := s.nc.PublishRequest(q.subject, sub.Subject, data); err != nil {
		return errUnsent
	}
	for {
		msg, err := sub.NextMsgWithContext(within)
		if errors.Is(context.Cause(ctx), discovery.ErrDenied) {
			return context.Cause(ctx)
		}
		switch {
		case errors.Is(err, nats.ErrNoResponders):
			return errMissing
		case err != nil:
			return errLost
		}
		if done, err := take(msg); done || err != nil {
			return err
		}
	}
}

// unsubscribe closes a mailbox. A connection that is gone has closed it.
func (s *session) unsubscribe(sub *nats.Subscription) { _ = sub.Unsubscribe() }
