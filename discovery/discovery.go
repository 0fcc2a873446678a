package discovery

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"time"
)

// Limits and promises; see the package comment.
const (
	// MaxValue is the longest value, in bytes.
	MaxValue = 256 << 10
	// MaxSegment is the longest segment of a key, MaxKey the longest escaped key, in
	// bytes.
	MaxSegment = 255
	MaxKey     = 1 << 10
	// MaxDetectTime is how long watchers may see an instance after it was killed.
	MaxDetectTime = 5 * time.Second
	// MaxRepairTime is how long a store may lack an instance that it has lost.
	MaxRepairTime = 10 * time.Second
)

// Errors of all implementations; test for them with errors.Is.
var (
	// ErrNotFound means that there is no entry under the key.
	ErrNotFound = errors.New("entry not found")
	// ErrConflict means that the entry does not have the expected revision. Nothing
	// has changed.
	ErrConflict = errors.New("the entry has another revision")
	// ErrUnknown means that a change may have been made or not.
	ErrUnknown = errors.New("it is unknown whether the change was made")
	// ErrUnavailable means that the store is unreachable, or has no leader.
	ErrUnavailable = errors.New("the registry is unavailable")
	// ErrDenied means that the store rejects the credentials.
	ErrDenied = errors.New("the registry rejects the credentials")
	// ErrFull means that the store has no space left.
	ErrFull = errors.New("the registry is full")
	// ErrInvalid means that an argument is out of bounds.
	ErrInvalid = errors.New("invalid argument")
)

// Announcer registers instances.
type Announcer interface {
	// Announce keeps the instance registered until the context ends, and then
	// removes it within two seconds. It calls report with nil whenever the instance
	// becomes registered, and with the reason when the store rejects it at first or has
	// lost it. Health is another matter. Calls of report never overlap, and none
	// follows the return. The error is nil if the instance was removed, else it names
	// what remains.
	Announce(ctx context.Context, i Instance, report func(error)) error
}

// Watcher observes healthy instances.
type Watcher interface {
	// Watch reports the healthy instances of a service until the context ends.
	Watch(ctx context.Context, service string, o Observer[Snapshot]) error
}

// Table is a versioned key-value table.
type Table interface {
	// Get returns an entry, or ErrNotFound.
	Get(ctx context.Context, key Key) (Entry, error)
	// Put writes a value if the entry has the expected revision, and returns its new
	// one. 0 expects that there is no entry.
	Put(ctx context.Context, key Key, value []byte, expect Revision) (Revision, error)
	// Delete removes an entry that has the expected revision.
	Delete(ctx context.Context, key Key, expect Revision) error
	// Observe reports the entries below a key until the context ends.
	Observe(ctx context.Context, below Key, o Observer[Change]) error
}

// Registry is what a store implements.
type Registry interface {
	Announcer
	Watcher
	Table
}

// Observer receives what is watched. Calls of its methods never overlap, and return
// quickly.
type Observer[T any] interface {
	// OnUpdate receives a new state, or a change of it.
	OnUpdate(T)
	// OnDisconnect receives why the store is unavailable. The state may be out of
	// date until the next OnUpdate.
	OnDisconnect(error)
}

// Instance is one running member of a service.
type Instance struct {
	// Service is the name that all members share: [a-z0-9-], at most 127 bytes.
	Service string
	// ID is unique among the instances of the service: [A-Za-z0-9-], at most 127
	// bytes.
	ID string
	// Address is where the instance is called and checked, host:port; it may be empty. There
	// the instance serves grpc.health.v1, with its ID as a service: another process at the
	// address does not know the ID.
	Address string
	// TLS configures the health check of an address with TLS; nil means plain text.
	// Stores that check by themselves, such as Consul, use its server name only.
	TLS *tls.Config `json:"-"`
	// Meta has at most 32 values of at most 256 bytes of printable ASCII; keys are
	// [a-z0-9_-].
	Meta map[string]string
}

// Snapshot is the healthy instances of a service.
type Snapshot struct {
	// Instances are sorted by ID.
	Instances []Instance
	// Revision grows with every change, until the store is wiped.
	Revision Revision
}

// Revision numbers the changes of one store in order. Do not compare revisions of two
// stores, or of one before and after a wipe.
type Revision uint64

// Entry is a key's value.
type Entry struct {
	Key      Key
	Value    []byte
	Revision Revision
}

// Change is a change of the entries below a key.
type Change struct {
	// Reset means that Entries replace everything known before.
	Reset bool
	// Entries are new or have changed.
	Entries []Entry
	// Deleted are the keys whose entries are gone.
	Deleted []Key
}

const (
	maxName      = 127
	maxMeta      = 32
	maxMetaValue = 256
)

// Validate checks the bounds of an instance.
func (i Instance) Validate() error {
	if err := ValidateService(i.Service); err != nil {
		return err
	}
	if i.ID == "" || len(i.ID) > maxName || strings.ContainsFunc(i.ID, func(r rune) bool { return !isNameRune(r) && (r < 'A' || r > 'Z') }) {
		return fmt.Errorf("%w: instance %q: use 1 to %d of A-Z, a-z, 0-9 and -", ErrInvalid, i.ID, maxName)
	}
	if i.Address != "" {
		if _, _, err := net.SplitHostPort(i.Address); err != nil {
			return fmt.Errorf("%w: address: %w", ErrInvalid, err)
		}
	}
	if len(i.Meta) > maxMeta {
		return fmt.Errorf("%w: meta has %d values, at most %d are possible", ErrInvalid, len(i.Meta), maxMeta)
	}
	for _, key := range slices.Sorted(maps.Keys(i.Meta)) {
		if key == "" || len(key) > maxName || strings.ContainsFunc(key, func(r rune) bool { return !isNameRune(r) && r != '_' }) {
			return fmt.Errorf("%w: meta key %q: use a-z, 0-9, _ and -", ErrInvalid, key)
		}
		if value := i.Meta[key]; len(value) > maxMetaValue || strings.ContainsFunc(value, func(r rune) bool { return r < ' ' || r > '~' }) {
			return fmt.Errorf("%w: meta %s: at most %d bytes of printable ASCII are possible", ErrInvalid, key, maxMetaValue)
		}
	}
	return nil
}

// ValidateService checks the name of a service.
func ValidateService(name string) error {
	if name == "" || len(name) > maxName || strings.ContainsFunc(name, func(r rune) bool { return !isNameRune(r) }) {
		return fmt.Errorf("%w: service %q: use 1 to %d of a-z, 0-9 and -", ErrInvalid, name, maxName)
	}
	return nil
}

func isNameRune(r rune) bool { return r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '-' }

// ValidatePut checks the arguments of Put.
func ValidatePut(key Key, value []byte) error {
	if len(value) > MaxValue {
		return fmt.Errorf("%w: key %q: the value has %d bytes, at most %d are possible", ErrInvalid, key, len(value), MaxValue)
	}
	return key.Validate()
}

// ValidateDelete checks the arguments of Delete.
func ValidateDelete(key Key, expect Revision) error {
	if expect == 0 {
		return fmt.Errorf("%w: key %q: a delete needs the revision that it expects", ErrInvalid, key)
	}
	return key.Validate()
}
