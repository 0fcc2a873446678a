// Package scale decides how many hosts a stage should have.
//
// A State is what is remembered between two polls of a stage. Next takes what a poll
// observed and returns the next state, with the hosts wanted and the reason in words:
//
//	target, err := scale.ParseTarget("wait=200ms")
//	state = state.Next(observation, target, scale.Bounds{Min: 1, Max: 8})
//	fmt.Println(state.Wanted, state.Reason)
//
// A stage needs hosts for the work that arrives, and more of them while more items wait
// than the target allows. Growth goes to the number at once. A stage shrinks to the most
// hosts that it needed within StableWindow, so that a step of load reverses the number
// at most once.
//
// The package is pure: time is an argument. A State is plain data that may be stored as
// JSON, so that all gateways of a mesh continue the same one.
package scale

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Constants of the decision.
const (
	// StableWindow is how long a stage must have needed fewer hosts before it shrinks.
	StableWindow = time.Minute
	// drainTime is the least time in which hosts work off the items that wait beyond the target.
	drainTime = 30 * time.Second
	// maxPolls is how many polls the mean rate of arrivals covers.
	maxPolls = 16
	// certainty is how many standard deviations prove that the rate of arrivals has changed.
	certainty = 2
	// hysteresis is the part by which hosts wanted may exceed what is needed before they shrink.
	hysteresis = .05
	// thrashAge is how recently the model that is evicted next was used where hosts have too
	// little memory for models.
	thrashAge = 5 * time.Minute
	// maxGap is the time between two polls after which rates begin anew.
	maxGap = time.Minute
	// maxStartup bounds the time that hosts are taken to need to start.
	maxStartup = 15 * time.Minute
	// costMemory is how many slot-seconds of saturated work the cost of an item covers.
	costMemory = 120
)

// Target is what hosts are wanted for: exactly one field is set.
type Target struct {
	// Wait is how long items may wait for a slot.
	Wait time.Duration
	// Busy is the part of what its hosts can do that a stage may have to do.
	Busy float64
	// Oldest is how old the oldest item of the stage may become.
	Oldest time.Duration
}

// DefaultTarget applies where nobody chooses one.
const DefaultTarget = "wait=200ms"

// Busy shares of the targets that are times: the rest is room for the waits to be short.
const (
	waitBusy   = .8
	oldestBusy = .9
)

// ParseTarget parses wait=200ms, busy=70% or oldest=5s. Errors begin with the text.
func ParseTarget(text string) (t Target, err error) {
	kind, value, found := strings.Cut(text, "=")
	if !found {
		return t, fmt.Errorf("%q: want wait=200ms, busy=70%% or oldest=5s", text)
	}
	var unit string
	switch kind {
	case "wait", "oldest":
		unit = "ms or s"
		d, perr := time.ParseDuration(value)
		if perr == nil && d > 0 && d <= time.Hour && !isNumber(value) {
			if kind == "wait" {
				return Target{Wait: d}, nil
			}
			return Target{Oldest: d}, nil
		}
	case "busy":
		unit = "%"
		share, hasUnit := strings.CutSuffix(value, "%")
		if n, perr := strconv.ParseFloat(share, 64); hasUnit && perr == nil && n >= 1 && n <= 100 {
			return Target{Busy: n / 100}, nil
		}
	default:
		return t, fmt.Errorf("%q: there is no %q; want wait=200ms, busy=70%% or oldest=5s", text, kind)
	}
	if isNumber(value) {
		return t, fmt.Errorf("%q: %s has no unit; add %s, as in %s", text, value, unit, exampleOf(kind))
	}
	return t, fmt.Errorf("%q: want %s, at least 1%% and at most 100%%, or over 0 and at most 1h", text, exampleOf(kind))
}

func isNumber(text string) bool {
	_, err := strconv.ParseFloat(text, 64)
	return err == nil
}

func exampleOf(kind string) string {
	return map[string]string{"wait": "wait=200ms", "busy": "busy=70%", "oldest": "oldest=5s"}[kind]
}

// String returns the target as ParseTarget takes it.
func (t Target) String() string {
	switch {
	case t.Wait > 0:
		return "wait=" + t.Wait.String()
	case t.Oldest > 0:
		return "oldest=" + t.Oldest.String()
	}
	return fmt.Sprintf("busy=%g%%", t.Busy*100)
}

// share is the part of their capacity that hosts may be busy, patience how long items may wait.
func (t Target) share() (share float64, patience time.Duration) {
	switch {
	case t.Wait > 0:
		return waitBusy, t.Wait
	case t.Oldest > 0:
		return oldestBusy, t.Oldest
	}
	return t.Busy, time.Second
}

// Bounds are the fewest and the most hosts of a stage; a Max of 0 means no bound.
type Bounds struct{ Min, Max int }

// Counters count what a host has done since it started.
type Counters struct {
	// Items have run, Busy is the time for which slots were busy, added up.
	Items uint64        `json:"items"`
	Busy  time.Duration `json:"busy"`
	// Started is when the host started.
	Started time.Time `json:"-"`
}

// Observation is what a poll observed of a stage.
type Observation struct {
	At time.Time
	// Hosts have the counters of the hosts that are alive and do not drain; Ready of them
	// take items, with that many slots and batches together.
	Hosts        map[string]Counters
	Ready, Slots int
	// Items are in the stage: in its queues, or on hosts. Running of them run.
	Items, Running int
	// Waiting requests are held back by gateways until the stage has a host.
	Waiting int
	// Oldest is the age of the oldest item or waiting request.
	Oldest time.Duration
	// A batch of n rows runs for Start and n times PerRow, and has at most MaxRows: as hosts
	// have learnt. All are 0 where they have not.
	Start, PerRow time.Duration
	MaxRows       int
	// Models is set for a stage that loads models.
	Models *Models
}

// Models is what a poll observed of the models of a stage.
type Models struct {
	// Waiting loads wait or go on; Slots is how many all hosts load at a time, Time how long
	// one takes.
	Waiting, Slots int
	Time           time.Duration
	// IsFull is true if the next load on any host evicts a model; OldestUse is how long ago
	// the model that is evicted next was used.
	IsFull    bool
	OldestUse time.Duration
}

// State is what is known of a stage after a poll.
type State struct {
	At time.Time `json:"at"`
	// Wanted hosts, and why.
	Wanted int    `json:"wanted"`
	Reason string `json:"reason"`
	Parts  Parts  `json:"parts"`

	Hosts   map[string]Counters `json:"hosts"`
	Items   int                 `json:"items"`
	Waiting int                 `json:"waiting"`
	Ready   int                 `json:"ready"`
	// Polls are the last ones, the newest last.
	Polls []poll `json:"polls"`
	// Full is the work of polls in which hosts could not have done more.
	Full work `json:"full"`
	// PerHost are the slots of a host.
	PerHost float64 `json:"per_host"`
	// Peaks are the needs within StableWindow that no later one exceeds.
	Peaks []peak `json:"peaks"`
	// Asked is since when more hosts are wanted than ready, MostReady how many were ready at most since
	// then, Startup how long the last further host took.
	Asked     time.Time     `json:"asked"`
	MostReady int           `json:"most_ready"`
	Startup   time.Duration `json:"startup"`
	// Grew is when the hosts wanted grew last.
	Grew time.Time `json:"grew"`
}

// Parts are what the decision was made of.
type Parts struct {
	// Rate is in items a second, Cost in slot-seconds an item; Wait in seconds at the present hosts.
	Rate float64 `json:"rate"`
	Cost float64 `json:"cost"`
	Wait float64 `json:"wait"`
	// Hosts needed for the work that arrives, for items that wait beyond the target, for what
	// runs, and for models.
	Arrivals float64 `json:"arrivals"`
	Backlog  float64 `json:"backlog"`
	Running  float64 `json:"running"`
	Models   float64 `json:"models"`
}

type poll struct {
	Seconds float64 `json:"s"`
	Arrived float64 `json:"n"`
	work
}

// work is what was done: items, and the slot-seconds that they took.
type work struct {
	Items float64 `json:"items"`
	Busy  float64 `json:"busy"`
}

type peak struct {
	At   time.Time `json:"at"`
	Need float64   `json:"need"`
}

// Next returns the state after a poll. It changes nothing that s refers to.
func (s State) Next(o Observation, t Target, b Bounds) State {
	next := s
	next.At, next.Hosts, next.Items, next.Waiting, next.Ready = o.At, o.Hosts, o.Items, o.Waiting, o.Ready
	if s.At.IsZero() || o.At.Sub(s.At) > maxGap {
		// What the hosts are for is not known yet: none is taken away.
		s.Wanted, s.Peaks = o.Ready, []peak{{o.At, float64(o.Ready) / (1 + hysteresis)}}
		next.Polls = nil
	}
	next.observe(s, o)
	if !s.Asked.IsZero() && o.Ready > max(s.MostReady, s.Ready) { // another version writes states without MostReady
		next.Startup = min(o.At.Sub(s.Asked), maxStartup)
	}
	next.MostReady = max(s.MostReady, o.Ready)
	need, reason := next.need(o, t)
	next.Peaks = recordPeak(s.Peaks, peak{o.At, need})
	next.decide(s, need, reason, b)
	if next.Wanted > s.Wanted {
		next.Grew = o.At
	}
	if next.Wanted <= o.Ready {
		next.Asked, next.MostReady = time.Time{}, 0
	} else if next.Asked.IsZero() {
		next.Asked = o.At
	}
	return next
}

// observe takes what hosts have done, and how many items have arrived, since the last poll.
func (s *State) observe(before State, o Observation) {
	if o.Ready > 0 && o.Slots > 0 {
		s.PerHost = float64(o.Slots) / float64(o.Ready)
	}
	took := o.At.Sub(before.At)
	if before.At.IsZero() || took > maxGap {
		return
	}
	var done work
	for id, now := range o.Hosts {
		was, isKnown := before.Hosts[id]
		isNew := now.Started.After(before.At) // others were counted before, and missed one poll
		if (isKnown || isNew) && now.Items >= was.Items && now.Busy >= was.Busy {
			done.Items += float64(now.Items - was.Items)
			done.Busy += (now.Busy - was.Busy).Seconds()
		}
	}
	arrived := max(0, done.Items+float64(o.Items+o.Waiting-before.Items-before.Waiting))
	s.Polls = append(slices.Clone(before.Polls[max(0, len(before.Polls)-maxPolls+1):]), poll{max(took.Seconds(), .001), arrived, done})
	// Hosts could not have done more where all slots were busy, and items waited at both ends.
	if done.Items > 0 && done.Busy >= .9*float64(o.Slots)*took.Seconds() && before.Ready == o.Ready && min(before.Items, o.Items) > max(o.Running, o.Slots) {
		s.Full.Items, s.Full.Busy = s.Full.Items+done.Items, s.Full.Busy+done.Busy
		if keep := costMemory / s.Full.Busy; keep < 1 {
			s.Full.Items, s.Full.Busy = s.Full.Items*keep, s.Full.Busy*keep
		}
	}
}

// rate is in items a second: the mean of the last polls, as far back as none of them proves that
// the rate was another one.
func (s *State) rate() (rate float64) {
	var seconds, arrived float64
	least, most := 0.0, math.Inf(1)
	for _, p := range slices.Backward(s.Polls) {
		seconds, arrived = seconds+p.Seconds, arrived+p.Arrived
		noise := certainty * math.Sqrt(arrived+1)
		from, to := (arrived-noise)/seconds, (arrived+noise)/seconds
		if from > most || to < least {
			break
		}
		least, most = max(least, from), min(most, to)
		rate = min(max(arrived/seconds, least), most)
	}
	return rate
}

// cost is how many slot-seconds an item takes when its stage has enough to do; 0 where that is
// not known.
func (s *State) cost(o Observation, rows int) float64 {
	var seen work
	for _, p := range s.Polls {
		seen.Items, seen.Busy = seen.Items+p.Items, seen.Busy+p.Busy
	}
	perItem := func(w work) float64 {
		if w.Items < 1 {
			return 0
		}
		return w.Busy / w.Items
	}
	best := perItem(s.Full)
	if best == 0 && o.PerRow+o.Start > 0 {
		best = o.Start.Seconds()/float64(rows) + o.PerRow.Seconds()
	}
	// Batches that are not full cost more for each item, never less.
	if observed := perItem(seen); best == 0 || observed > 0 && observed < best {
		best = observed
	}
	return best
}

// rows is how many rows a batch may have to end within the patience.
func (o Observation) rows(patience time.Duration) int {
	most := max(1, o.MaxRows)
	if o.PerRow <= 0 {
		return most
	}
	return max(1, min(most, int((patience-o.Start)/o.PerRow)))
}

// need returns how many hosts the stage needs now, and why.
func (s *State) need(o Observation, t Target) (float64, string) {
	share, patience := t.share()
	rows := o.rows(patience)
	perHost := max(s.PerHost, 1)
	p := Parts{Rate: s.rate(), Cost: s.cost(o, rows)}
	queued := max(0, o.Items-max(o.Running, min(o.Items, o.Slots*rows))) + o.Waiting
	excess := float64(queued) - p.Rate*patience.Seconds()
	if t.Oldest > 0 {
		excess = 0
		if o.Oldest > patience {
			excess = float64(queued)
		}
	}
	// Hosts that are not there yet cannot drain anything: a backlog that grew for as long as they
	// take to start is drained in as long.
	within := max(patience, drainTime, s.Startup)
	if !s.Asked.IsZero() {
		within = max(within, min(o.At.Sub(s.Asked), maxStartup))
	}
	p.Arrivals = p.Rate * p.Cost / share / perHost
	p.Backlog = max(0, excess) * p.Cost / within.Seconds() / perHost
	p.Running = math.Ceil(float64(o.Running) / float64(rows) / perHost)
	p.Models = s.modelNeed(o, perHostOf(o), max(patience, drainTime, s.Startup))
	if o.Slots > 0 {
		p.Wait = float64(queued) * p.Cost / float64(o.Slots)
	}
	s.Parts = p
	return s.explain(o, t, within, queued)
}

// explain returns the need of the parts, and the largest of them in words.
func (s *State) explain(o Observation, t Target, within time.Duration, queued int) (need float64, reason string) {
	p := s.Parts
	share, _ := t.share()
	work := p.Arrivals + p.Backlog
	switch need = max(work, p.Running, p.Models); {
	case p.Cost == 0 && p.Models == 0 && o.Items+o.Waiting > 0:
		// Nobody has finished an item yet.
		need, reason = max(need, 1, float64(o.Ready)), "it is not known yet how long an item takes"
		if o.Ready == 0 {
			reason = fmt.Sprintf("%d items wait for the first host", o.Items+o.Waiting)
		}
	case need == 0 && o.Items+o.Waiting == 0:
		return 0, "there is no work"
	case need == p.Models && p.Models > work:
		reason = fmt.Sprintf("%d loads of models wait", o.Models.Waiting)
		if o.Models.IsFull && o.Models.OldestUse < 2*thrashAge {
			reason = fmt.Sprintf("memory for models is full, the next one evicted was used %s ago", o.Models.OldestUse.Round(time.Second))
		}
	case need == p.Running && p.Running > work:
		reason = fmt.Sprintf("%d items run", o.Running)
	default:
		reason = fmt.Sprintf("%.3g items/s of %.3gms at %.0f%% busy need %.3g", p.Rate, p.Cost*1000, share*100, p.Arrivals)
		if p.Backlog > 0 {
			reason += fmt.Sprintf(", %d queued items in %s %.3g more", queued, within.Round(time.Second), p.Backlog)
		}
	}
	if o.Ready == 0 && o.Waiting > 0 {
		reason += fmt.Sprintf("; %d requests wait for a host", o.Waiting)
	}
	return max(need, math.SmallestNonzeroFloat64), reason
}

// perHostOf is how many models a host loads at a time.
func perHostOf(o Observation) float64 {
	if o.Models == nil || o.Ready == 0 {
		return 1
	}
	return max(1, float64(o.Models.Slots)/float64(o.Ready))
}

// modelNeed is how many hosts the models need.
func (s *State) modelNeed(o Observation, slots float64, within time.Duration) float64 {
	m := o.Models
	if m == nil || o.Ready == 0 {
		return 0
	}
	need := 0.0
	if took := max(m.Time, within); float64(m.Waiting) > slots*float64(o.Ready) {
		need = float64(m.Waiting) * max(m.Time, time.Second).Seconds() / took.Seconds() / slots
	}
	switch {
	case !m.IsFull:
	case m.OldestUse < thrashAge && o.Ready >= s.Wanted && o.At.Sub(s.Grew) >= StableWindow:
		need = max(need, float64(o.Ready+1))
	case m.OldestUse < 2*thrashAge:
		need = max(need, float64(min(o.Ready, s.Wanted)))
	}
	return need
}

// recordPeak returns the peaks with one more, without those that are over.
func recordPeak(peaks []peak, p peak) []peak {
	out := make([]peak, 0, len(peaks)+1)
	for _, old := range peaks {
		if old.Need > p.Need && p.At.Sub(old.At) < StableWindow {
			out = append(out, old)
		}
	}
	const maxPeaks = 64
	return append(out[max(0, len(out)-maxPeaks+1):], p)
}

// decide sets the hosts wanted.
func (s *State) decide(before State, need float64, reason string, b Bounds) {
	ceil := func(hosts float64) int { return int(math.Ceil(min(hosts, math.MaxInt32) - 1e-9)) }
	grown, peak := ceil(need), s.Peaks[0].Need
	if need > 0 {
		grown = max(grown, 1)
	}
	held := ceil(peak * (1 + hysteresis))
	if peak > 0 {
		held = max(held, 1)
	}
	s.Wanted, s.Reason = grown, reason
	if kept := min(before.Wanted, held); kept > grown {
		s.Wanted, s.Reason = kept, fmt.Sprintf("kept at %d, for a need within the last %s; now: %s", kept, StableWindow, reason)
	}
	if s.Wanted < b.Min {
		s.Wanted, s.Reason = b.Min, fmt.Sprintf("min_hosts is %d; %s", b.Min, reason)
	}
	if b.Max > 0 && s.Wanted > b.Max {
		s.Wanted, s.Reason = b.Max, fmt.Sprintf("max_hosts is %d; %s", b.Max, reason)
	}
}
