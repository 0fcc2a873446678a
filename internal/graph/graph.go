// Package graph runs the blocks of a pipeline, as a pure machine: what happens goes in, what to do
// comes out.
//
//	m := graph.New(pipeline, request)
//	do := m.Start(now)                          // start these steps
//	do = m.Answered(id, outputs, now)           // of a step; or m.Failed(id, fault, now)
//	do = m.Tick(now)                            // at m.Due()
//	outcome := m.Outcome()                      // nil until the request has ended
//
// Every step of a pipeline with blocks is an execution of its own. What a part of the graph still
// runs when that has ended is cancelled; its answers are not asked for any more. A branch ends where
// its block ends, so nothing waits for what was skipped.
//
// There is no clock, lock, channel or goroutine here. A Machine is for one goroutine at a time.
package graph

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Request is what a graph runs for.
type Request struct {
	ID         pipeline.RequestID
	Tenant     string
	Inputs     []payload.Part
	Parameters payload.Parameters
	Metadata   map[string]string
	Deadline   time.Time
	// IsComplete is true where an answer that lacks parts is a failure.
	IsComplete bool
	// Spec returns the inputs and outputs of a stage, nil where they are not known.
	Spec func(pipeline.StageName) *stagev1.Spec
	// StepDuration returns the expected duration of a step, 0 if it is not known.
	StepDuration func(pipeline.StepName) time.Duration
}

// Start is a step to run.
type Start struct {
	// ID is the execution's.
	ID   int
	Step *pipeline.Step
	// Path is where the step stands, such as look/objects/detect, of items of a map with
	// their indices: labels[3]/classify.
	Path string
	// Parts are what the step before gave, Kept are earlier ones that it reads.
	Parts, Kept []payload.Part
	Deadline    time.Time
	// IsFirst is true while nothing of the request has run.
	IsFirst bool
	// IsLast is true where the answer is the request's.
	IsLast bool
}

// Actions are what to do, in this order.
type Actions struct {
	Cancel []int
	Start  []Start
}

// Status is what became of a branch.
type Status string

// The statuses of branches.
const (
	Done      Status = "done"
	Skipped   Status = "skipped"
	Late      Status = "late"
	Failed    Status = "failed"
	Cancelled Status = "cancelled"
)

// Branch is what became of a block, or of a branch of one.
type Branch struct {
	Path   string
	Status Status
	// Block is the kind of a block; empty for a branch.
	Block string
	// Why is the value that decided where a branch is skipped, or the reason why it failed.
	Why string
	// Began and Ended are equal where nothing ran.
	Began, Ended time.Time
	// Items counts the items of a map, of which Failed failed; ItemP50 and ItemMax are how long they took.
	Items, Failed    int
	ItemP50, ItemMax time.Duration
}

// Running is a step that has not ended.
type Running struct {
	ID    int
	Path  string
	Began time.Time
}

// Outcome is how a request has ended.
type Outcome struct {
	Outputs []payload.Part
	Fault   *fault.Fault
	// Partial are the paths of branches that were late or failed and whose parts are absent or
	// replaced.
	Partial []string
}

// Machine runs one request.
type Machine struct {
	pipeline *pipeline.Pipeline
	request  Request
	now      time.Time
	lastID   int
	// running are in the order of their start, and of their IDs.
	running  []running
	timers   []timer
	do       Actions
	hasRun   bool
	branches []Branch
	outcome  Outcome
	isOver   bool
	took     map[pipeline.StepName]time.Duration
}

// running is an execution that has not ended.
type running struct {
	id    int
	scope *scope
	then  given
	step  pipeline.StepName
	path  string
	began time.Time
}

// timer ends a part of the graph at its deadline.
type timer struct {
	scope *scope
	then  func()
}

// New returns a machine for a valid pipeline with blocks.
func New(p *pipeline.Pipeline, r Request) *Machine {
	return &Machine{
		pipeline: p, request: r, took: map[pipeline.StepName]time.Duration{},
		branches: make([]Branch, 0, 4), // as many as a block with two branches has, and one more
	}
}

// Start starts the request.
func (m *Machine) Start(now time.Time) Actions {
	return m.step(now, func() {
		root := &scope{machine: m, deadline: m.request.Deadline, lists: []pipeline.List{{Steps: m.pipeline.Steps}}}
		m.runSteps(root, m.pipeline.Steps, "", parts{reach: m.request.Inputs, previous: m.request.Inputs}, func(end parts, f *fault.Fault) {
			if f == nil {
				m.outcome.Outputs = m.outputs(end)
			}
			m.outcome.Fault, m.isOver = f, true
			root.end()
		})
	})
}

// Answered continues with the outputs of an execution. One that was cancelled is ignored.
func (m *Machine) Answered(id int, outputs []payload.Part, now time.Time) Actions {
	return m.ended(id, outputs, nil, now)
}

// Failed continues after the failure of an execution.
func (m *Machine) Failed(id int, f *fault.Fault, now time.Time) Actions {
	return m.ended(id, nil, f, now)
}

func (m *Machine) ended(id int, outputs []payload.Part, f *fault.Fault, now time.Time) Actions {
	return m.step(now, func() {
		at, is := slices.BinarySearchFunc(m.running, id, func(r running, id int) int { return cmp.Compare(r.id, id) })
		if !is {
			return
		}
		r := m.running[at]
		m.running = slices.Delete(m.running, at, at+1)
		r.scope.count(-1)
		m.hasRun = true
		if f == nil {
			m.took[r.step] = max(m.took[r.step], now.Sub(r.began))
		} else { // a step that fails as its block is late is late
			m.endLate()
		}
		if !r.scope.isOver() {
			r.then(outputs, f)
		}
	})
}

// Due returns when the next part of the graph is late, the zero time for never.
func (m *Machine) Due() (at time.Time) {
	for i := range m.timers {
		if d := m.timers[i].scope.deadline; at.IsZero() || d.Before(at) {
			at = d
		}
	}
	return at
}

// Tick continues without the parts of the graph that are late.
func (m *Machine) Tick(now time.Time) Actions { return m.step(now, m.endLate) }

// endLate ends what is late, outer parts before those in them.
func (m *Machine) endLate() {
	for {
		i := slices.IndexFunc(m.timers, func(t timer) bool { return !m.now.Before(t.scope.deadline) })
		if i < 0 {
			return
		}
		then := m.timers[i].then
		m.timers = slices.Delete(m.timers, i, i+1)
		then()
	}
}

// Outcome returns how the request has ended, nil while it has not.
func (m *Machine) Outcome() *Outcome {
	if !m.isOver {
		return nil
	}
	return &m.outcome
}

// Branches returns the blocks and branches that have ended, in that order.
func (m *Machine) Branches() []Branch { return m.branches }

// StepDurations returns the duration of each step that succeeded: the longest, if it ran several times.
func (m *Machine) StepDurations() map[pipeline.StepName]time.Duration { return m.took }

// Running returns the steps that have not ended, in the order of their start.
func (m *Machine) Running() []Running {
	out := make([]Running, 0, len(m.running))
	for _, r := range m.running {
		out = append(out, Running{r.id, r.path, r.began})
	}
	return out
}

func (m *Machine) step(now time.Time, do func()) Actions {
	m.now = now
	if !m.isOver {
		do()
	}
	out := m.do
	m.do = Actions{}
	if len(out.Cancel) > 0 { // what was started and cancelled at once never starts
		out.Start = slices.DeleteFunc(out.Start, func(s Start) bool {
			if i := slices.Index(out.Cancel, s.ID); i >= 0 {
				out.Cancel = slices.Delete(out.Cancel, i, i+1)
				return true
			}
			return false
		})
	}
	return out
}

// scope is a part of the graph that ends together: the request, a block with a time limit, a branch.
type scope struct {
	machine  *Machine
	parent   *scope
	deadline time.Time
	// lists are the steps that have to end by the deadline.
	lists []pipeline.List
	// live counts the executions in it.
	live    int
	isEnded bool
}

// child returns a scope in this one for lists of steps that last at most so long; 0 is without a limit.
func (s *scope) child(lists []pipeline.List, within time.Duration) *scope {
	out := &scope{machine: s.machine, parent: s, deadline: s.deadline, lists: s.lists}
	if within > 0 {
		out.endBy(s.machine.now.Add(within), lists)
	}
	return out
}

// endBy has the lists of steps end earlier, if that is earlier.
func (s *scope) endBy(at time.Time, lists []pipeline.List) {
	if at.Before(s.deadline) {
		s.deadline, s.lists = at, lists
	}
}

// fallbackAt returns when a block that can go on without its steps gives up on them. It reserves twice the
// expected duration of the fallback and of the steps after the block, but at most half of the remaining time.
func (s *scope) fallbackAt(block pipeline.StepName, fallback time.Duration) time.Time {
	after, _ := s.machine.expectedAfter(s.lists, block)
	remaining := max(0, s.deadline.Sub(s.machine.now))
	return s.deadline.Add(-min(2*(fallback+after), remaining/2))
}

// expectedDuration returns the expected duration of a list of steps. Of the lists of a block it counts
// the longest, of a try not its else.
func (m *Machine) expectedDuration(steps []pipeline.Step) (d time.Duration) {
	for i := range steps {
		lists := steps[i].Lists()
		if steps[i].Try != nil {
			lists = lists[:1]
		}
		longest := m.request.StepDuration(steps[i].Name)
		for _, list := range lists {
			longest = max(longest, m.expectedDuration(list.Steps))
		}
		d += longest
	}
	return d
}

// expectedAfter returns the expected duration of the steps after the named one, and whether the lists have it.
func (m *Machine) expectedAfter(lists []pipeline.List, name pipeline.StepName) (time.Duration, bool) {
	for _, list := range lists {
		for i := range list.Steps {
			d, isIn := m.expectedAfter(list.Steps[i].Lists(), name)
			if isIn || list.Steps[i].Name == name {
				return d + m.expectedDuration(list.Steps[i+1:]), true
			}
		}
	}
	return 0, false
}

func (s *scope) count(n int) {
	for ; s != nil; s = s.parent {
		s.live += n
	}
}

func (s *scope) isOver() bool {
	for ; s != nil; s = s.parent {
		if s.isEnded {
			return true
		}
	}
	return false
}

// end cancels what still runs in the scope, and its timers.
func (s *scope) end() {
	s.isEnded = true
	m := s.machine
	m.timers = slices.DeleteFunc(m.timers, func(t timer) bool { return t.scope.isOver() })
	if s.live == 0 {
		return
	}
	m.running = slices.DeleteFunc(m.running, func(r running) bool {
		if !r.scope.isOver() {
			return false
		}
		r.scope.count(-1)
		m.do.Cancel = append(m.do.Cancel, r.id)
		return true
	})
}

// setTimer sets a timer for the scope's deadline, where that is before the parent's.
func (s *scope) setTimer(then func()) {
	if !s.deadline.Before(s.parent.deadline) {
		return
	}
	s.machine.timers = append(s.machine.timers, timer{s, then})
}

// parts are what a step can read.
type parts struct {
	// reach are all by their names, previous those that the step before gave.
	reach, previous []payload.Part
}

// with returns the parts after a step that gave these; a step that gave nothing passes on.
func (p parts) with(given []payload.Part) parts {
	if len(given) == 0 {
		return p
	}
	out := parts{make([]payload.Part, 0, len(p.reach)+len(given)), given}
	for _, part := range p.reach {
		if _, isReplaced := payload.Find(given, part.Name); !isReplaced {
			out.reach = append(out.reach, part)
		}
	}
	out.reach = append(out.reach, given...)
	return out
}

// runSteps runs a list of steps one after another. It calls done once, with what can be read at its end,
// or with its fault.
func (m *Machine) runSteps(s *scope, steps []pipeline.Step, path string, p parts, done func(end parts, f *fault.Fault)) {
	if len(steps) == 0 {
		done(p, nil)
		return
	}
	m.runStep(s, &steps[0], join(path, string(steps[0].Name)), p, func(given []payload.Part, f *fault.Fault) {
		if n := len(given); n > payload.MaxParts {
			f = fault.Newf(fault.RunnerOutputInvalid, "%s gives %d parts, at most %d are allowed", join(path, string(steps[0].Name)), n, payload.MaxParts)
		}
		if f != nil {
			done(p, f)
			return
		}
		m.runSteps(s, steps[1:], path, p.with(given), done)
	})
}

func join(path, name string) string {
	if path == "" || name == "" {
		return path + name
	}
	return path + "/" + name
}

// given is called once, with what a step gives, or with its fault.
type given func(parts []payload.Part, f *fault.Fault)

func (m *Machine) runStep(s *scope, step *pipeline.Step, path string, p parts, done given) {
	if step.IsBlock() && step.Map == nil { // which has more to say
		began, end := m.now, done
		done = func(parts []payload.Part, f *fault.Fault) {
			m.note(Branch{Path: path, Block: kindOf(step), Began: began}, f)
			end(parts, f)
		}
	}
	switch {
	case step.Parallel != nil:
		m.runParallel(s, step, path, p, done)
	case step.Map != nil:
		m.runMap(s, step.Map, path, p, done)
	case step.Switch != nil:
		m.runSwitch(s, step, path, p, done)
	case step.Split != nil:
		m.runSplit(s, step, path, p, done)
	case step.Try != nil:
		m.runTry(s, step, path, p, done)
	default:
		m.lastID++
		parts, kept := m.feed(step, p)
		m.running = append(m.running, running{m.lastID, s, done, step.Name, path, m.now})
		s.count(1)
		m.do.Start = append(m.do.Start, Start{
			ID: m.lastID, Step: step, Path: path, Parts: parts, Kept: kept, Deadline: s.deadline, IsFirst: !m.hasRun,
			IsLast: len(m.pipeline.Outputs) == 0 && step == &m.pipeline.Steps[len(m.pipeline.Steps)-1],
		})
	}
}

// feed returns what a step gets: the parts that its stage reads, or where that is not known what
// the step before gave and what the step renames.
func (m *Machine) feed(step *pipeline.Step, p parts) (previous, kept []payload.Part) {
	spec := m.request.Spec(step.Stage)
	var sources []string
	for _, input := range spec.GetInputs() {
		sources = append(sources, cmp.Or(step.Inputs[input.GetName()], input.GetName()))
	}
	if len(sources) == 0 {
		sources = slices.Collect(maps.Values(step.Inputs))
	}
	for _, part := range p.reach {
		_, isPrevious := payload.Find(p.previous, part.Name)
		switch isRead := slices.Contains(sources, part.Name); {
		case isPrevious && (isRead || len(spec.GetInputs()) == 0):
			previous = append(previous, part)
		case !isPrevious && isRead:
			kept = append(kept, part)
		}
	}
	switch {
	case len(previous) == 0 && len(kept) > 0:
		return kept, nil
	case len(previous) == 0:
		return p.previous, nil // one part feeds the only input, whatever its name
	}
	return previous, kept
}

// runList runs a list of steps in a block. It gives the parts named that are not absent, or what its
// last step gave; without steps it gives nothing.
func (m *Machine) runList(s *scope, list pipeline.List, path string, in parts, done given) {
	m.runSteps(s, list.Steps, path, in, func(end parts, f *fault.Fault) {
		var out []payload.Part
		switch {
		case f != nil:
		case len(list.Give) == 0 && len(list.Steps) > 0:
			out = end.previous
		default:
			for _, name := range slices.Sorted(maps.Keys(list.Give)) {
				if part, is := payload.Find(end.reach, list.Give[name]); is {
					part.Name = name
					out = append(out, part)
				}
			}
		}
		done(out, f)
	})
}

// outputs returns the request's.
func (m *Machine) outputs(end parts) (out []payload.Part) {
	if len(m.pipeline.Outputs) == 0 {
		return end.previous
	}
	for _, name := range m.pipeline.Outputs {
		if part, is := payload.Find(end.reach, name); is { // one that is not may be absent
			out = append(out, part)
		}
	}
	return out
}

// The kinds of blocks.
const (
	Parallel    = "parallel"
	Map         = "map"
	switchBlock = "switch"
	splitBlock  = "split"
	tryBlock    = "try"
)

func kindOf(step *pipeline.Step) string {
	switch {
	case step.Parallel != nil:
		return Parallel
	case step.Switch != nil:
		return switchBlock
	case step.Split != nil:
		return splitBlock
	}
	return tryBlock
}

// note records what ends now, with a fault or nil, unless it has a status.
func (m *Machine) note(b Branch, f *fault.Fault) {
	if b.Ended = m.now; b.Began.IsZero() {
		b.Began = m.now
	}
	if b.Status == "" {
		b.Status = statusOf(f)
	}
	if f != nil && b.Why == "" {
		b.Why = string(f.Reason)
	}
	m.branches = append(m.branches, b)
}

// constants returns the parts of constants, which are valid.
func constants(of map[string]pipeline.Constant) (out []payload.Part) {
	for _, name := range slices.Sorted(maps.Keys(of)) {
		if part, err := of[name].Part(name); err == nil {
			out = append(out, part)
		}
	}
	return out
}

// lateFault is the fault of what did not end in its time.
func lateFault(path string, within time.Duration) *fault.Fault {
	return fault.Newf(fault.DeadlineExceeded, "%s: no answer within %s", path, within.Round(time.Millisecond)).Final()
}

// withPath returns a fault with the path at which it happened.
func withPath(f *fault.Fault, path string) *fault.Fault {
	if f.Metadata["path"] != "" {
		return f
	}
	return f.WithMetadata("path", path)
}

func itemPath(path string, i int) string { return fmt.Sprintf("%s[%d]", path, i) }
