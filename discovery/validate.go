package discovery

import (
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
)

const (
	maxName      = 127
	maxMeta      = 32
	maxMetaValue = 256
)

// Validate says what is wrong with an instance.
func (i Instance) Validate() error {
	if err := ValidService(i.Service); err != nil {
		return err
	}
	if i.ID == "" || len(i.ID) > maxName || strings.ContainsFunc(i.ID, func(r rune) bool { return !letter(r) && (r < 'A' || r > 'Z') }) {
		return fmt.Errorf("%w: instance %q: use 1 to %d of A-Z, a-z, 0-9 and -", ErrInvalid, i.ID, maxName)
	}
	if i.Address != "" {
		if _, _, err := net.SplitHostPort(i.Address); err != nil {
			return fmt.Errorf("%w: address: %w", ErrInvalid, err)
		}
	}
	if len(i.Meta) > maxMeta {
		return fmt.Errorf("%w: %d values of meta, at most %d are possible", ErrInvalid, len(i.Meta), maxMeta)
	}
	for _, key := range slices.Sorted(maps.Keys(i.Meta)) {
		if key == "" || len(key) > maxName || strings.ContainsFunc(key, func(r rune) bool { return !letter(r) && r != '_' }) {
			return fmt.Errorf("%w: meta key %q: use a-z, 0-9, _ and -", ErrInvalid, key)
		}
		if value := i.Meta[key]; len(value) > maxMetaValue || strings.ContainsFunc(value, func(r rune) bool { return r < ' ' || r > '~' }) {
			return fmt.Errorf("%w: meta %s: at most %d bytes of printable ASCII are possible", ErrInvalid, key, maxMetaValue)
		}
	}
	return nil
}

// ValidService says what is wrong with the name of a service.
func ValidService(name string) error {
	if name == "" || len(name) > maxName || strings.ContainsFunc(name, func(r rune) bool { return !letter(r) }) {
		return fmt.Errorf("%w: service %q: use 1 to %d of a-z, 0-9 and -", ErrInvalid, name, maxName)
	}
	return nil
}

func letter(r rune) bool { return r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '-' }

// ValidCommit says what is wrong with the changes of a commit.
func ValidCommit(changes []Operation) error {
	if len(changes) == 0 || len(changes) > MaxOperations {
		return fmt.Errorf("%w: a commit of %d changes, 1 to %d are possible", ErrInvalid, len(changes), MaxOperations)
	}
	seen, size := map[Key]bool{}, 0
	for _, c := range changes {
		if _, err := c.Key.Segments(); err != nil {
			return err
		}
		if seen[c.Key] {
			return fmt.Errorf("%w: key %q is there twice", ErrInvalid, c.Key)
		}
		seen[c.Key] = true
		if len(c.Value) > MaxValue {
			return fmt.Errorf("%w: key %q: a value of %d bytes, at most %d are possible", ErrInvalid, c.Key, len(c.Value), MaxValue)
		}
		if c.Delete && (c.Expect == 0 || len(c.Value) > 0) {
			return fmt.Errorf("%w: key %q: a delete has the revision that it expects, and no value", ErrInvalid, c.Key)
		}
		size += len(c.Value)
	}
	if size > MaxCommit {
		return fmt.Errorf("%w: a commit of %d bytes, at most %d are possible", ErrInvalid, size, MaxCommit)
	}
	return nil
}
