package bus

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

func TestStatusEndsItsOwnRequestOnly(t *testing.T) {
	t.Parallel()
	status := func(ask, code, pending string) *nats.Msg {
		msg := nats.NewMsg("_INBOX.x.1." + ask)
		msg.Header.Set("Status", code)
		if pending != "" {
			msg.Header.Set(pendingHeader, pending)
		}
		return msg
	}
	for _, test := range []struct {
		name      string
		msg       *nats.Msg
		requested int
		missing   bool
	}{
		{"an open ask ends", status("5", "408", "30"), 0, false},
		{"an open ask ends after items came", status("5", "408", "10"), 20, false},
		{"a lapsed ask ended before", status("2", "408", "30"), 30, false},
		{"the consumer is gone", status("5", "409", ""), 0, true},
		{"nobody has the stream", status("5", "503", ""), 0, true},
		{"the consumer of an earlier queue is gone", status("2", "409", ""), 30, false},
		{"a number that is none", status("!", "409", ""), 30, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			p := &Puller{credit: newCredit(40, 1)}
			p.credit.use(0, true)
			p.credit.plan(time.Time{})
			p.credit.closeAll()
			p.credit.plan(time.Time{})
			if missing, _ := p.endRequestLocked(normalClass, test.msg); missing != test.missing {
				t.Errorf("the queue is missing: %v, want %v", missing, test.missing)
			}
			if requested := p.credit.classQueues[normalClass].requested; requested != test.requested {
				t.Errorf("%d requested for, want %d", requested, test.requested)
			}
		})
	}
}
