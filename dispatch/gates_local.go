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

func (c *ConstantGate) validate() error {
	if v := c.Value; v != nil && !(*v >= 0 && *v <= 1) {
		return fmt.Errorf("value: %v is not within 0 and 1", *v)
	}
	return nil
}

func (c *ConstantGate) build(_ *poolGate, name string) gate {
	out := constant{d: 1, at: time.Now(), source: name, timeless: true}
	if c.Value != nil {
		out.d = *c.Value
	}
	return out
}

type constant reading

func (c constant) read(time.Time) (reading, error) { return reading(c), nil }

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

func (c *ScheduleGate) validate() error {
	_, err := c.parse()
	return err
}

func (c *ScheduleGate) parse() (out schedule, err error) {
	var errs []error
	for i, day := range c.Days {
		at := slices.Index(weekdays, day)
		if at < 0 {
			errs = append(errs, fmt.Errorf("days[%d]: %q; use %s", i, day, strings.Join(weekdays, ", ")))
			continue
		}
		out.days[at] = true
	}
	if len(c.Days) == 0 {
		out.days = [7]bool{true, true, true, true, true, true, true}
	}
	from, to, ok := strings.Cut(cmp.Or(c.Hours, "00:00-24:00"), "-")
	out.from, out.to = minutesOf(from), minutesOf(to)
	if !ok || out.from < 0 || out.to < 0 || out.from == out.to || out.from == wholeDay {
		errs = append(errs, fmt.Errorf("hours: %q; use such as 22:00-06:00", c.Hours))
	}
	if out.zone, err = time.LoadLocation(c.Zone); err != nil {
		errs = append(errs, fmt.Errorf("zone: %w", err))
	}
	return out, errors.Join(errs...)
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

func (c *ScheduleGate) build(_ *poolGate, name string) gate {
	out, _ := c.parse() // Validate has seen it
	out.reading = reading{at: time.Now(), source: name, timeless: true}
	return out
}

type schedule struct {
	reading  reading
	days     [7]bool
	from, to int
	zone     *time.Location
}

func (s schedule) read(now time.Time) (reading, error) {
	now = now.In(s.zone)
	minute, today := now.Hour()*60+now.Minute(), int(now.Weekday())
	isOpen := minute >= s.from && minute < s.to && s.days[today]
	if s.from > s.to { // over midnight
		isOpen = minute >= s.from && s.days[today] || minute < s.to && s.days[(today+6)%7]
	}
	out := s.reading
	if isOpen {
		out.d = 1
	}
	return out, nil
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

func (c *AdaptiveGate) validate() error {
	err := errors.Join(config.NotNegative("window", c.Window), config.NotNegative("max_window", c.MaxWindow))
	if most := cmp.Or(c.MaxWindow, defaultMaxWindow); cmp.Or(c.Window, defaultWindow) > most {
		err = errors.Join(err, fmt.Errorf("window: %d is over the %d of max_window", cmp.Or(c.Window, defaultWindow), most))
	}
	return err
}

func (c *AdaptiveGate) build(p *poolGate, name string) gate {
	out := &adaptiveGate{
		credit: p.credit, source: name, began: time.Now(),
		window: cmp.Or(c.Window, defaultWindow), most: cmp.Or(c.MaxWindow, defaultMaxWindow),
	}
	p.adaptive = append(p.adaptive, out)
	return out
}

type adaptiveGate struct {
	credit *credit
	source string
	began  time.Time

	window, most, successes int
	// halved is when the window was halved last.
	halved time.Time
}

// read returns the reading whose budget is the window.
func (g *adaptiveGate) read(time.Time) (reading, error) {
	out := reading{at: g.began, source: g.source, timeless: true}
	if capacity := g.credit.ready * g.credit.each; capacity > 0 {
		out.d = clamp(g.credit.baseline + float64(g.window)/capacity)
	}
	return out, nil
}

func (g *adaptiveGate) note(out outcome, isLate bool, began, now time.Time) {
	switch {
	case out == latched || out != succeeded && isLate:
		// The attempts that began before are of the same flight.
		if began.After(g.halved) {
			g.window, g.halved, g.successes = max(1, g.window/2), now, 0
		}
	case out == succeeded:
		if g.successes++; g.successes >= g.window {
			g.window, g.successes = min(g.most, g.window+1), 0
		}
	}
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

func (c *MeshGate) validate() error { return config.NotNegative("max_wait", c.MaxWait) }

func (c *MeshGate) build(p *poolGate, name string) gate {
	most := cmp.Or(c.MaxWait, DefaultGateMaxWait)
	return p.poll(func(ctx context.Context) (reading, error) {
		if p.settings.Stages == nil {
			return reading{}, errors.New("this process knows no stages")
		}
		out := reading{d: 1, at: time.Now(), source: name}
		stages, err := p.settings.Stages(ctx, p.config.Target.Pipelines)
		if err == nil && len(stages) == 0 {
			err = errors.New("the pipelines have no stages")
		}
		for i, s := range stages {
			if s.MaxInFlight <= 0 {
				return reading{}, fmt.Errorf("stage %s has no ready host", s.Name)
			}
			capacity := float64(s.MaxInFlight)
			out.d = min(out.d, clamp(1-max(float64(s.Items)/capacity, s.Wait.Seconds()/most.Seconds())))
			if i == 0 || capacity < out.capacity {
				out.capacity = capacity
			}
		}
		return out, err
	})
}
