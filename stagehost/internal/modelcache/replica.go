package modelcache

import (
	"container/heap"
	"time"

	"github.com/stagemesh/stagemesh/mesh/model"
)

// Model is a model that is wanted.
type Model struct {
	ID   model.ID
	Type string
	// Size is a hint or a prediction; zero where it is unknown.
	Size    model.Size
	LastUse time.Time
}

// Priority is why a model is wanted.
type Priority int

// The priorities, the lowest first.
const (
	Requested Priority = iota + 1
	Waiting
)

// State is what a replica is doing.
type State int

// The states, in their order.
const (
	Ended State = iota // no longer in the cache
	Queued
	MakingRoom // has a load slot and waits for memory
	Loading
	Cancelling // was dropped, and unloads when its load has ended
	Loaded
	Draining // unloads when its items have ended
	Unloading
	Retrying // its unload failed and is due again
	states
)

// Replica is a copy of a model on this host, from the first Want to the end of its unload.
type Replica struct {
	// Size is what it takes of the capacity, LastUse the end of the last batch.
	Model

	state     State
	pins      int
	isKept    bool
	isRefused bool
	want      Priority  // without items; 0 where nobody wants it
	arrival   uint64    // numbers the arrivals of items at replicas that had none
	since     time.Time // the start of its load
	due       time.Time // the end of a state of limited time
	tries     int

	in *order
	at int
}

// State returns what the replica is doing.
func (r *Replica) State() State { return r.state }

// Pins returns how many items use the replica.
func (r *Replica) Pins() int { return r.pins }

// IsRefused reports whether the replica is not loaded, or no longer, because of a refusal.
func (r *Replica) IsRefused() bool { return r.isRefused }

func (r *Replica) priority() Priority {
	if r.pins > 0 {
		return Waiting
	}
	return r.want
}

// order is a heap of replicas, which know their place in it. It implements heap.Interface.
type order struct {
	replicas []*Replica
	before   func(a, b *Replica) bool
}

func byLastUse(a, b *Replica) bool { return a.LastUse.Before(b.LastUse) }

func byDue(a, b *Replica) bool {
	return a.due.Before(b.due) || a.due.Equal(b.due) && byPriority(a, b)
}

func byPriority(a, b *Replica) bool {
	switch p, q := a.priority(), b.priority(); {
	case p != q:
		return p > q
	case p == Waiting:
		return a.arrival < b.arrival
	}
	return a.LastUse.After(b.LastUse)
}

// move puts a replica into an order, or into none, and out of the one where it is. It may
// have changed since it was put there.
func (r *Replica) move(to *order) {
	if r.in != nil {
		heap.Remove(r.in, r.at)
	}
	if r.in = to; to != nil {
		heap.Push(to, r)
	}
}

func (o *order) first() *Replica {
	if len(o.replicas) == 0 {
		return nil
	}
	return o.replicas[0]
}

func (o *order) Len() int           { return len(o.replicas) }
func (o *order) Less(i, j int) bool { return o.before(o.replicas[i], o.replicas[j]) }

func (o *order) Swap(i, j int) {
	o.replicas[i], o.replicas[j] = o.replicas[j], o.replicas[i]
	o.replicas[i].at, o.replicas[j].at = i, j
}

func (o *order) Push(x any) {
	r := x.(*Replica)
	r.at = len(o.replicas)
	o.replicas = append(o.replicas, r)
}

func (o *order) Pop() any {
	last := len(o.replicas) - 1
	r := o.replicas[last]
	o.replicas[last] = nil
	o.replicas = o.replicas[:last]
	return r
}
