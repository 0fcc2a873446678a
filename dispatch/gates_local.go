package dispatch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/mesh/config"
)

// ConstantGate always says the same.
type ConstantGate struct {
	// Value is in [0, 1]; nil means 1.
	Value *float64 `yaml:"value"`
}

func (c *ConstantGate) build(_ *poolGate, source string) (gate, error) {
	out := reading{d: 1, at: time.Now(), source: source, timeless: true}
	if c.Value != nil {
		out.d = *c.Value
	}
	if !(out.d >= 0 && out.d <= 1) {
		return nil, fmt.Errorf("value: %v is not within 0 and 1", out.d)
	}
	return func(time.Time) (reading, error) { return out, nil }, nil
}

// ScheduleGate is open at some hours of some days.
type ScheduleGate struct {
	// Days are mon to sun; none means all.
	Days []string `yaml:"days"`
	// Hours are "22:00-06:00"; empty means all day. Those over midnight belong to the day on
	// which they begin.
	Hours string `yaml:"hours"`
	// Zone is Europe/Berlin or such; empty means UTC.
	Zone string `yaml:"zone"`
}

var weekdays = []string{"sun", "mon", "tue", "wed", "thu", "fri", "sat"}

func (c *ScheduleGate) build(_ *poolGate, source string) (gate, error) {
	var errs []error
	for i, day := range c.Days {
		if !slices.Contains(weekdays, day) {
			errs = append(errs, fmt.Errorf("days[%d]: %q; use %s", i, day, strings.Join(weekdays, ", ")))
		}
	}
	begin, end, ok := strings.Cut(cmp.Or(c.Hours, "00:00-24:00"), "-")
	from, to := minutesOf(begin), minutesOf(end)
	if !ok || from < 0 || to < 0 || from == to || from == wholeDay {
		errs = append(errs, fmt.Errorf("hours: %q; use such as 22:00-06:00", c.Hours))
	}
	zone, err := time.LoadLocation(c.Zone)
	if err != nil {
		errs = append(errs, fmt.Errorf("zone: %w", err))
	}
	isOn := func(day time.Weekday) bool { return len(c.Days) == 0 || slices.Contains(c.Days, weekdays[day]) }
	out := reading{at: time.Now(), source: source, timeless: true}
	return func(now time.Time) (reading, error) {
		now = now.In(zone)
		minute, today := now.Hour()*60+now.Minute(), now.Weekday()
		isOpen := minute >= from && minute < to && isOn(today)
		if from > to { // over midnight
			isOpen = minute >= from && isOn(today) || minute < to && isOn((today+6)%7)
		}
		if out.d = 0; isOpen {
			out.d = 1
		}
		return out, nil
	}, errors.Join(errs...)
}

const wholeDay = 24 * 60

// minutesOf returns the minutes of a day until a time such as 06:30, or -1.
func minutesOf(text string) int {
	if text == "24:00" {
		return wholeDay
	}
	t, err := time.Parse("15:04", text)
	if err != nil {
		return -1
	}
	return t.Hour()*60 + t.Minute()
}

// AdaptiveGate finds out how many jobs the target takes: one more after each window of
// successes, half as many after a refusal or a timeout.
type AdaptiveGate struct {
	// Window is the first window; 0 means 4. MaxWindow bounds it; 0 means 256.
	Window    int `yaml:"window"`
	MaxWindow int `yaml:"max_window"`
}

const (
	defaultWindow    = 4
	defaultMaxWindow = 256
)

func (c *AdaptiveGate) build(p *poolGate, source string) (gate, error) {
	window, most, successes := cmp.Or(c.Window, defaultWindow), cmp.Or(c.MaxWindow, defaultMaxWindow), 0
	err := errors.Join(config.NotNegative("window", c.Window), config.NotNegative("max_window", c.MaxWindow))
	if window > most {
		err = errors.Join(err, fmt.Errorf("window: %d is over the %d of max_window", window, most))
	}
	var halved time.Time
	p.notes = append(p.notes, func(out outcome, isLate bool, began, now time.Time) {
		switch {
		case out == latched || out != succeeded && isLate:
			// The attempts that began before are of the same flight.
			if began.After(halved) {
				window, halved, successes = max(1, window/2), now, 0
			}
		case out == succeeded:
			if successes++; successes >= window {
				window, successes = min(most, window+1), 0
			}
		}
	})
	out := reading{at: time.Now(), source: source, timeless: true}
	return func(time.Time) (reading, error) {
		if out.d = 0; p.credit.capacity() > 0 {
			out.d = roomOf(*p.credit.Baseline+float64(window)/p.credit.capacity(), ofBudget) // the budget is the window
		}
		return out, nil
	}, err
}

// MeshGate looks at the stages of the pool's pipelines. The one that is busiest counts.
type MeshGate struct {
	// MaxWait is the estimated wait in front of a stage at which nothing more is sent; 0 means
	// DefaultGateMaxWait.
	MaxWait time.Duration `yaml:"max_wait"`
}

// DefaultGateMaxWait is that of MeshGate.
const DefaultGateMaxWait = 5 * time.Second

// StageLoad is what a stage has to do.
type StageLoad struct {
	Name string
	// Items wait in its queues, or are in flight. MaxInFlight is the sum of what its ready hosts
	// hold.
	Items, MaxInFlight int
	// Wait is how long an item will wait in its queues; 0 where that is not known.
	Wait time.Duration
}

func (c *MeshGate) build(p *poolGate, source string) (gate, error) {
	most := cmp.Or(c.MaxWait, DefaultGateMaxWait)
	return p.poll(func(ctx context.Context) (reading, error) {
		out := reading{d: 1, at: time.Now(), source: source, counts: true}
		stages, err := p.settings.Stages(ctx, p.pipelines)
		if err == nil && len(stages) == 0 {
			err = errors.New("the pipelines have no stages")
		}
		for i, s := range stages {
			if s.MaxInFlight <= 0 {
				return reading{}, fmt.Errorf("stage %s has no ready host", s.Name)
			}
			capacity := float64(s.MaxInFlight)
			out.d = min(out.d, roomOf(max(float64(s.Items)/capacity, s.Wait.Seconds()/most.Seconds()), saturation))
			if i == 0 || capacity < out.capacity {
				out.capacity = capacity
			}
		}
		return out, err
	}), config.NotNegative("max_wait", c.MaxWait)
}
