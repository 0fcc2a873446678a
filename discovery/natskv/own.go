package natskv

import (
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/discovery"
)

// own is what this store has written of late, by which it knows a server that is
// behind.
type own struct {
	mu      sync.Mutex
	written map[discovery.Key]write
}

type write struct {
	sequence uint64
	at       time.Time
}

const (
	// ownFor is how long a write is remembered: no server that is behind for longer
	// answers, and a store that has lost it is taken as it is.
	ownFor = 10 * time.Second
	// maxOwn bounds the keys that are remembered.
	maxOwn = 4096
)

func newOwn() *own { return &own{written: map[discovery.Key]write{}} }

// remember keeps what a commit has written, where more than one server answers.
func (s *Store) remember(c *commit, last discovery.Revision) {
	if s.settings.Replicas > 1 {
		s.own.keep(c, uint64(last), time.Now())
	}
}

// keep remembers the messages of a commit, which have sequences in a row.
func (o *own) keep(c *commit, last uint64, now time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.written)+len(c.changes) > maxOwn {
		o.forget(now)
	}
	for i, change := range c.changes {
		o.written[change.Key] = write{last - uint64(len(c.changes)-1-i), now}
	}
}

// forget makes room: for what is old, or else for all.
func (o *own) forget(now time.Time) {
	for key, w := range o.written {
		if now.Sub(w.at) > ownFor {
			delete(o.written, key)
		}
	}
	if len(o.written) > maxOwn/2 {
		clear(o.written)
	}
}

// among reports whether the records have all that was written below a key.
func (o *own) among(records map[discovery.Key]record, below discovery.Key, now time.Time) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	for key, w := range o.written {
		if key.Below(below) && now.Sub(w.at) <= ownFor && records[key].sequence < w.sequence {
			return false
		}
	}
	return true
}
