package natskv

import (
	"cmp"
	"context"
	"maps"
	"slices"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/discovery"
)

// Observe implements discovery.Table.
func (s *Store) Observe(ctx context.Context, below discovery.Key, o discovery.Observer[discovery.Change]) error {
	if err := validBelow(below); err != nil {
		return err
	}
	return s.follow(ctx, s.table, s.names.below(below), &changes{names: s.names, downs: downs{lost: o.Lose}, see: o.See})
}

// changes make changes out of messages.
type changes struct {
	downs
	names names
	see   func(discovery.Change)
	// reset says that all is to come; new is what has come and was not told.
	reset bool
	new   map[discovery.Key]record
}

// downs tells of each loss once.
type downs struct {
	lost func(error)
	down bool
}

func (d *downs) lose(err error) {
	if !d.down {
		d.down = true
		d.lost(err)
	}
}

func (c *changes) begin(*jetstream.StreamInfo) {
	c.reset, c.new = true, map[discovery.Key]record{}
}

func (c *changes) take(msg *nats.Msg, sequence uint64) {
	r := c.names.record(msg.Subject, msg.Header, msg.Data, sequence)
	c.new[r.key] = r
}

func (c *changes) settle() {
	if !c.reset && len(c.new) == 0 {
		return
	}
	change := discovery.Change{Reset: c.reset}
	inOrder := slices.SortedFunc(maps.Values(c.new), func(a, b record) int { return cmp.Compare(a.sequence, b.sequence) })
	for _, r := range inOrder {
		switch {
		case r.there():
			change.Entries = append(change.Entries, r.entry())
		case !c.reset:
			change.Gone = append(change.Gone, r.key)
		}
	}
	c.reset, c.down = false, false
	clear(c.new)
	c.see(change)
}
