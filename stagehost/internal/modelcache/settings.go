package modelcache

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/stagemesh/stagemesh/mesh/model"
)

const (
	// MaxQueued is the most loads that are queued.
	MaxQueued = 256
	minWeight = 8 << 10 // bounds the number of models
	maxSize   = 1 << 50 // keeps sums of sizes far from overflow
)

// Settings are the memory of a host and the limits of its loads.
type Settings struct {
	// DefaultSize is assumed of a model of unknown size.
	Capacity, DefaultSize model.Size
	LoadSlots             int
	// LoadTimeout bounds a load and an unload.
	LoadTimeout time.Duration
}

// Validate reports a setting that cannot be used, by its key.
func (s Settings) Validate() error {
	limit, least := model.Size{Host: maxSize, Device: maxSize}, s.least()
	switch {
	case s.Capacity == model.Size{}:
		return errors.New("models.capacity: is required, because this runner reports no limit; set one, such as 1GiB")
	case s.DefaultSize == model.Size{} || !fits(model.Size{}, s.DefaultSize) || !fits(s.DefaultSize, limit):
		return fmt.Errorf("models.default_size: %+v is not the size of a model", s.DefaultSize)
	case !fits(least, s.Capacity) || !fits(s.Capacity, limit):
		return fmt.Errorf("models.capacity: %+v is out of bounds; with this default_size it is at least %+v", s.Capacity, least)
	case s.LoadSlots < 1 || s.LoadSlots > MaxQueued:
		return fmt.Errorf("models.load_slots: %d is not between 1 and %d", s.LoadSlots, MaxQueued)
	case s.LoadTimeout <= 0:
		return fmt.Errorf("models.load_timeout: %s is not positive", s.LoadTimeout)
	}
	return nil
}

// least returns the least capacity, which the default size needs.
func (s Settings) least() model.Size {
	return combine(s.DefaultSize, s.DefaultSize, func(size, _ int64) int64 { return max(2*size, min(512<<20, 10*size)) })
}

// WithCapacity returns the settings with another capacity, within the present one and what the
// default size needs; 0 leaves it.
func (s Settings) WithCapacity(wanted model.Size) Settings {
	wanted = combine(wanted, s.Capacity, func(n, most int64) int64 { return min(cmp.Or(n, most), most) })
	s.Capacity = combine(wanted, s.least(), func(n, least int64) int64 { return max(n, least) })
	return s
}

// weight returns what a model of the size takes of the capacity: nothing of one that does not
// count, and no more than it takes to be too large.
func (s Settings) weight(size model.Size) model.Size {
	return combine(size, s.Capacity, func(size, capacity int64) int64 {
		return min(capacity, 1) * min(max(size, minWeight), capacity+1)
	})
}

// unloadBuffer returns the memory that loads borrow while evicted models unload.
func (s Settings) unloadBuffer() model.Size {
	return combine(s.DefaultSize, s.Capacity, func(size, capacity int64) int64 {
		share := size * int64(s.LoadSlots) / 4
		if s.LoadSlots <= 2 {
			share *= 2
		}
		return min(max(share, capacity/100), capacity/10)
	})
}

// reserve returns the free memory below which a cache is full.
func (s Settings) reserve() model.Size {
	slots := int64(s.LoadSlots)
	return combine(s.DefaultSize, s.Capacity, func(size, capacity int64) int64 {
		return max(size*min(slots, 2), min(size*slots, capacity/20))
	})
}

func combine(a, b model.Size, f func(a, b int64) int64) model.Size {
	return model.Size{Host: f(a.Host, b.Host), Device: f(a.Device, b.Device)}
}

func add(a, b model.Size) model.Size {
	return model.Size{Host: a.Host + b.Host, Device: a.Device + b.Device}
}

func sub(a, b model.Size) model.Size {
	return model.Size{Host: a.Host - b.Host, Device: a.Device - b.Device}
}
func fits(a, b model.Size) bool { return a.Host <= b.Host && a.Device <= b.Device }
