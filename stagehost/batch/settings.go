package batch

import (
	"errors"
	"fmt"
	"time"
)

// Mode says when a batch may be held although a worker is idle.
type Mode string

// The modes.
const (
	// Eager gives an idle worker what is there at once, but for gathering. It
	// is what an empty mode means.
	Eager Mode = "eager"
	// Window holds a batch up to max_wait for more items.
	Window Mode = "window"
	// Stream gives every item to an idle worker by itself, at once. It is for workers
	// that answer in chunks.
	Stream Mode = "stream"
	// Adaptive is to hold only while that pays. This version refuses it.
	Adaptive Mode = "adaptive"
)

// Settings are the limits of one stage's batches.
type Settings struct {
	Mode Mode `yaml:"mode"`
	// MaxSize is the most rows of a batch, at least 1.
	MaxSize int `yaml:"max_size"`
	// MaxBytes is the most payload bytes of a batch; 0 is no limit.
	MaxBytes int `yaml:"max_bytes,size"`
	// MaxWait is the longest that an item is held while a worker is idle,
	// counted from its arrival in window mode. In eager mode it is a limit to
	// gathering, and 0 turns that off.
	MaxWait time.Duration `yaml:"max_wait"`
	// By names the parameters that items of one batch must agree on. The host makes the
	// items' batch keys of them.
	By []string `yaml:"by"`
}

// Validate reports every setting that cannot be used, by its key.
func (s Settings) Validate() error {
	errs := []error{s.Mode.validate()}
	if s.MaxSize < 1 {
		errs = append(errs, fmt.Errorf("batch.max_size: %d rows is less than 1", s.MaxSize))
	}
	if s.MaxBytes < 0 {
		errs = append(errs, fmt.Errorf("batch.max_bytes: %d is negative; 0 is no limit", s.MaxBytes))
	}
	if s.MaxWait < 0 {
		errs = append(errs, fmt.Errorf("batch.max_wait: %s is negative", s.MaxWait))
	}
	if s.Mode == Window && s.MaxWait == 0 {
		errs = append(errs, errors.New("batch.max_wait: window mode needs a time to wait; use eager mode to wait for nothing"))
	}
	return errors.Join(errs...)
}

func (m Mode) validate() error {
	switch m {
	case "", Eager, Window, Stream:
		return nil
	case Adaptive:
		return errors.New("batch.mode: adaptive is not in this version; use eager, window or stream")
	default:
		return fmt.Errorf("batch.mode: %q is none of eager, window and stream", string(m))
	}
}
