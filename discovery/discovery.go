package discovery

import (
	"context"
	"crypto/tls"
	"errors"
	"time"
)

// Bounds and promises; see the package comment.
const (
	// MaxValue is the longest value, in bytes.
	MaxValue = 256 << 10
	// MaxOperations is the most that one commit may change.
	MaxOperations = 64
	// MaxCommit is the most bytes of values in one commit.
	MaxCommit = 320 << 10
	// MaxSegment is the longest segment of a key, MaxKey the longest escaped key, in
	// bytes.
	MaxSegment = 255
	MaxKey     = 1 << 10
	// MaxGone is how long a killed instance may be seen.
	MaxGone = 5 * time.Second
	// MaxRepair is how long a store may lack an instance that it has lost.
	MaxRepair = 10 * time.Second
)

// Errors of all implementations, to be told by errors.Is.
var (
	// ErrNotFound says that there is no such key.
	ErrNotFound = errors.New("there is no such entry")
	// ErrConflict says that an entry is not of the revision that was expected.
	// Nothing has changed.
	ErrConflict = errors.New("the entry has changed meanwhile")
	// ErrUnknown says that a commit may have been made or not.
	ErrUnknown = errors.New("it is not known whether the commit was made")
	// ErrUnavailable says that the store cannot be reached, or has no leader.
	ErrUnavailable = errors.New("the registry cannot be reached")
	// ErrDenied says that the store refuses the credentials.
	ErrDenied = errors.New("the registry refuses the credentials")
	// ErrFull says that the store has no room.
	ErrFull = errors.New("the registry has no room")
	// ErrInvalid says that an argument is not within the bounds.
	ErrInvalid = errors.New("invalid argument")
)

// Instance is one running member of a service.
type Instance struct {
	// Service is the name of what its members do alike: [a-z0-9-], at most 127
	// bytes.
	Service string
	// ID is the instance's own, among all of the service: [A-Za-z0-9-], at most 127
	// bytes.
	ID string
	// Address is where it is reached and checked, host:port; it may be empty.
	Address string
	// TLS is how the address is asked how it is, for whoever announces it, where it
	// has TLS; nil where it has none. A store that asks by itself, as Consul does,
	// takes no more of it than the server's name.
	TLS *tls.Config `json:"-"`
	// Meta is for whoever looks at it: at most 32 values of at most 256 bytes of
	// printable ASCII; keys are [a-z0-9_-].
	Meta map[string]string
}

// Announcer registers instances.
type Announcer interface {
	// Announce keeps the instance registered until the context ends, and then
	// removes it, for which it takes two seconds at most. It tells state nil
	// whenever it is registered, and why it is not where the store does not take it
	// at first, or does not have it any more; whether it is healthy is another
	// matter. state is not called at the same time twice, nor after the return. The
	// error is nil where the instance was removed, else what is left.
	Announce(ctx context.Context, i Instance, state func(error)) error
}

// Watcher sees who is healthy.
type Watcher interface {
	// Watch tells the observer who is healthy until the context ends.
	Watch(ctx context.Context, service string, o Observer[Snapshot]) error
}

// Registry is who is alive.
type Registry interface {
	Announcer
	Watcher
}

// Observer is told what is watched. Its methods are called one at a time and return
// soon.
type Observer[T any] interface {
	// See gets what there is.
	See(T)
	// Lose says that the store cannot be reached, so that what was seen may be out
	// of date.
	Lose(error)
}

// Snapshot is who is healthy.
type Snapshot struct {
	Instances []Instance
	// Revision grows with every change, until the store is wiped.
	Revision Revision
}

// Revision numbers changes in the order of a store. Those of two stores, or of one
// before and after a wipe, are not to be compared.
type Revision uint64

// Entry is what the table has under a key.
type Entry struct {
	Key      Key
	Value    []byte
	Revision Revision
}

// Change is what has happened below a key.
type Change struct {
	// Reset says that Entries are all that there are.
	Reset bool
	// Entries are new or have changed; Gone were deleted.
	Entries []Entry
	Gone    []Key
}

// Table is a versioned table.
type Table interface {
	// Get returns an entry, or ErrNotFound.
	Get(ctx context.Context, key Key) (Entry, error)
	// List returns the entries below a key, sorted by key; the key itself is not
	// one of them.
	List(ctx context.Context, below Key) ([]Entry, error)
	// Commit makes all changes or none. It returns the revision of the last of them;
	// the others' are not larger.
	Commit(ctx context.Context, changes ...Operation) (Revision, error)
	// Observe tells the observer what is below a key until the context ends.
	Observe(ctx context.Context, below Key, o Observer[Change]) error
}

// Operation is one change of a commit.
type Operation struct {
	Key Key
	// Value is what is put; Delete says that there is to be nothing.
	Value  []byte
	Delete bool
	// Expect is the revision that the entry has now; 0 is that there is none.
	Expect Revision
}

// Put writes a value.
func Put(key Key, value []byte, expect Revision) Operation {
	return Operation{Key: key, Value: value, Expect: expect}
}

// Delete removes an entry.
func Delete(key Key, expect Revision) Operation {
	return Operation{Key: key, Delete: true, Expect: expect}
}
