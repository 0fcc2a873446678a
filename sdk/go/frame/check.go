package frame

import (
	"errors"
	"fmt"
	"slices"
)

var (
	errNegative = errors.New("a number is negative")
	errNoItems  = errors.New("items: there are none")
)

// Bounds of a message's lists, so that a peer cannot make much out of a little.
const (
	maxItems = 1 << 16
	maxParts = 1 << 18
	maxSlots = 1 << 10
)

func (m *Hello) check() error {
	if len(m.Protocols) == 0 {
		return errors.New("protocols: there are none")
	}
	return nil
}

func (m *Welcome) check() error {
	if m.Protocol < 1 || m.MaxFrame < 0 {
		return errNegative
	}
	return nil
}

func (m *State) check() error {
	switch m.State {
	case Startup, Failed, Shutdown:
		return nil
	}
	return fmt.Errorf("state: %.40q is none", m.State)
}

func (m *Ready) check() error {
	if m.Slots < 0 || m.Slots > maxSlots {
		return fmt.Errorf("slots: %d is not between 1 and %d", m.Slots, maxSlots)
	}
	if m.Spec == nil {
		return nil
	}
	return m.Spec.check()
}

func (m *Predict) check() error {
	if len(m.Items) == 0 {
		return errNoItems
	}
	if len(m.Items) > maxItems {
		return fmt.Errorf("items: %d, at most %d are taken", len(m.Items), maxItems)
	}
	for i, item := range m.Items {
		if item.Rows < 0 || item.Timeout < 0 {
			return fmt.Errorf("items[%d]: %w", i, errNegative)
		}
	}
	return checkParts(m.Parts)
}

func (m *Result) check() error {
	for i, f := range m.Faults {
		if f.Item < 0 || f.Reason == "" {
			return fmt.Errorf("faults[%d]: it needs an item and a reason", i)
		}
	}
	for i, metadata := range m.Metadata {
		if metadata.Item < 0 {
			return fmt.Errorf("metadata[%d]: %w", i, errNegative)
		}
	}
	return checkParts(m.Parts)
}

func (m *Chunk) check() error {
	if m.Item < 0 {
		return errNegative
	}
	return checkParts(m.Parts)
}

func (m *Error) check() error {
	switch m.Kind {
	case Exception, OutOfMemory, Protocol, Unsupported:
		return nil
	}
	return fmt.Errorf("kind: %.40q is none", m.Kind)
}

func (m *Cancel) check() error {
	if slices.ContainsFunc(m.Items, func(i int) bool { return i < 0 }) {
		return errNegative
	}
	return nil
}

func (m *Stop) check() error {
	if m.Timeout < 0 {
		return errNegative
	}
	return nil
}

func (*Ping) check() error   { return nil }
func (*Pong) check() error   { return nil }
func (*Load) check() error   { return nil }
func (*Unload) check() error { return nil }

// checkParts checks what can be told without the body.
func checkParts(parts []Part) error {
	if len(parts) > maxParts {
		return fmt.Errorf("parts: %d, at most %d are taken", len(parts), maxParts)
	}
	for i, p := range parts {
		if err := p.check(); err != nil {
			return fmt.Errorf("parts[%d]: %w", i, err)
		}
	}
	return nil
}
