package graph

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"slices"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// parallel is a Parallel that runs.
type parallel struct {
	*pipeline.Parallel
	machine *Machine
	path    string
	began   time.Time
	scope   *scope
	lists   []pipeline.List
	// scopes are the branches' scopes, given what they gave; a branch is open until it has ended.
	scopes  []*scope
	given   [][]payload.Part
	isEnded []bool
	open    int
	// arrived counts the branches that have given their parts.
	arrived int
	isOver  bool
	done    given
}

func (m *Machine) runParallel(s *scope, step *pipeline.Step, path string, in parts, done given) {
	n, lists := len(step.Parallel.Branches), step.Lists()
	b := &parallel{
		Parallel: step.Parallel, machine: m, path: path, began: m.now, scope: s.child(lists, step.Parallel.Within), lists: lists,
		given: make([][]payload.Part, n), isEnded: make([]bool, n), open: n, done: done,
	}
	b.scope.setTimer(func() {
		for i := range b.lists {
			b.end(i, nil, lateFault(join(path, b.lists[i].Name), b.scope.deadline.Sub(b.began)))
		}
	})
	for i, list := range b.lists {
		own := b.scope.child(nil, 0)
		if b.Quorum == 0 && b.isReplaceable(b.Branches[list.Name]) {
			own.endBy(s.fallbackAt(step.Name, 0), b.lists[i:i+1])
			own.setTimer(func() { b.end(i, nil, lateFault(join(path, list.Name), own.deadline.Sub(b.began))) })
		}
		b.scopes = append(b.scopes, own)
	}
	for i, list := range b.lists {
		if b.isOver {
			return
		}
		m.runList(b.scopes[i], list, join(path, list.Name), in, func(out []payload.Part, f *fault.Fault) { b.end(i, out, f) })
	}
}

// isReplaceable reports whether the block can continue without the branch.
func (b *parallel) isReplaceable(branch pipeline.Branch) bool {
	return !b.machine.request.IsComplete && (branch.Optional || branch.Missing != nil || b.Quorum > 0)
}

// need is how many branches have to arrive.
func (b *parallel) need() int { return cmp.Or(b.Quorum, len(b.lists)) }

// end ends a branch.
func (b *parallel) end(i int, out []payload.Part, f *fault.Fault) {
	if b.isOver || b.isEnded[i] {
		return
	}
	b.isEnded[i] = true
	b.open--
	b.scopes[i].end()
	at, branch := join(b.path, b.lists[i].Name), b.Branches[b.lists[i].Name]
	b.machine.note(Branch{Path: at, Began: b.began}, f)
	if f == nil {
		b.arrived++
		b.given[i] = out
	} else {
		isReplaced := b.isReplaceable(branch)
		if isReplaced {
			b.given[i] = constants(branch.Missing)
			b.machine.outcome.Partial = append(b.machine.outcome.Partial, at)
			if b.Quorum == 0 {
				b.arrived++
			}
		}
		if !isReplaced || b.arrived+b.open < b.need() {
			b.finish(f)
			return
		}
	}
	if b.arrived >= b.need() {
		b.finish(nil)
	}
}

// finish ends the block. The branches that are open are not needed.
func (b *parallel) finish(f *fault.Fault) {
	b.isOver = true
	for i, isEnded := range b.isEnded {
		if !isEnded {
			b.machine.note(Branch{Path: join(b.path, b.lists[i].Name), Status: Cancelled, Began: b.began}, nil)
			b.given[i] = constants(b.Branches[b.lists[i].Name].Missing)
		}
	}
	b.scope.end()
	if f != nil {
		b.done(nil, withPath(f, b.path))
		return
	}
	out := slices.Concat(b.given...)
	for i, part := range out {
		if _, isTwice := payload.Find(out[:i], part.Name); isTwice {
			b.done(nil, fault.Newf(fault.RunnerOutputInvalid, "%s: two branches give a part %q; rename one with give", b.path, part.Name))
			return
		}
	}
	b.done(out, nil)
}

func (m *Machine) runSwitch(s *scope, step *pipeline.Step, path string, in parts, done given) {
	for i, list := range step.Lists() {
		c, name := step.Switch[i], join(path, list.Name)
		isMatch, why := c.Else != nil, ""
		var f *fault.Fault
		if !isMatch {
			isMatch, why, f = m.matches(c.When, in)
		}
		switch {
		case f != nil:
			done(nil, withPath(f, name))
		case !isMatch:
			m.note(Branch{Path: name, Status: Skipped, Why: why}, nil)
			continue
		case c.Fail != nil:
			m.note(Branch{Path: name, Why: why}, fault.New(c.Fail.Reason, c.Fail.Message))
			done(nil, withPath(fault.New(c.Fail.Reason, c.Fail.Message), name))
		default:
			m.runBranch(s, list, Branch{Path: name, Why: why}, in, done)
		}
		return
	}
}

// runBranch runs the list of a block that was chosen.
func (m *Machine) runBranch(s *scope, list pipeline.List, b Branch, in parts, done given) {
	b.Began = m.now
	m.runList(s, list, b.Path, in, func(out []payload.Part, f *fault.Fault) {
		m.note(b, f)
		if f != nil {
			f = withPath(f, b.Path)
		}
		done(out, f)
	})
}

// statusOf returns the status of a branch that ended with a fault, or with nil.
func statusOf(f *fault.Fault) Status {
	switch {
	case f == nil:
		return Done
	case f.Reason == fault.DeadlineExceeded:
		return Late
	}
	return Failed
}

// percent is the sum of the weights of a split.
const percent = 100

func (m *Machine) runSplit(s *scope, step *pipeline.Step, path string, in parts, done given) {
	key := string(m.request.ID)
	if value, is := m.request.Metadata[step.Split.ByMetadata]; is {
		key = value
	}
	sum := sha256.Sum256([]byte(path + "\x00" + key))
	draw := int(binary.BigEndian.Uint64(sum[:]) % percent)
	lists := step.Lists()
	chosen := slices.IndexFunc(lists, func(l pipeline.List) bool {
		draw -= step.Split.Branches[l.Name].Weight
		return draw < 0
	})
	m.runBranch(s, lists[chosen], Branch{Path: join(path, lists[chosen].Name)}, in, done)
}

func (m *Machine) runTry(s *scope, step *pipeline.Step, path string, in parts, done given) {
	t, tried, began := step.Try, join(path, "try"), m.now
	on := t.On
	if len(on) == 0 {
		on = pipeline.DefaultTryReasons()
	}
	lists := step.Lists()[:1]
	own := s.child(lists, t.Within)
	if slices.Contains(on, fault.DeadlineExceeded) {
		own.endBy(s.fallbackAt(step.Name, m.expectedDuration(t.Else)), lists)
	}
	end := func(out []payload.Part, f *fault.Fault) {
		if own.isEnded {
			return
		}
		own.end()
		m.note(Branch{Path: tried, Began: began}, f)
		switch {
		case f == nil:
			done(out, nil)
		case slices.Contains(on, f.Reason):
			m.outcome.Partial = slices.DeleteFunc(m.outcome.Partial, func(p string) bool { return strings.HasPrefix(p, tried+"/") })
			m.runBranch(s, pipeline.List{Steps: t.Else}, Branch{Path: join(path, "else")}, in, done)
		default:
			done(nil, withPath(f, path))
		}
	}
	own.setTimer(func() { end(nil, lateFault(path, own.deadline.Sub(began))) })
	m.runList(own, pipeline.List{Steps: t.Steps}, tried, in, end)
}

// mapWindow bounds the items of a map that run at a time, so that one request never has the most of
// a stage's queue.
const mapWindow = 64

// mapping is a map that runs.
type mapping struct {
	*pipeline.Map
	machine *Machine
	path    string
	began   time.Time
	scope   *scope
	in      parts
	items   [][]payload.Part
	// onError is what becomes of an item that fails, took how long those that have ended took.
	onError pipeline.ItemError
	took    []time.Duration
	// given is what each item gave, failed why it did not.
	given  [][]payload.Part
	failed []*fault.Fault
	// next is the first item that has not started, running how many have not ended.
	next, running int
	isOver        bool
	done          given
}

func (m *Machine) runMap(s *scope, b *pipeline.Map, path string, in parts, done given) {
	items, f := itemsOf(b, path, in.reach)
	if f != nil {
		done(nil, f)
		return
	}
	x := &mapping{
		Map: b, machine: m, path: path, began: m.now, scope: s.child(nil, 0), in: in, items: items, onError: b.OnItemError, given: make([][]payload.Part, len(items)),
		failed: make([]*fault.Fault, len(items)), done: done,
	}
	if m.request.IsComplete {
		x.onError = pipeline.FailItems
	}
	x.advance()
}

// advance starts items while the window has room, and ends the block after the last.
func (x *mapping) advance() {
	for !x.isOver && x.next < len(x.items) && x.running < mapWindow {
		i := x.next
		x.next++
		x.running++
		own, isStarting, began := x.scope.child(nil, 0), true, x.machine.now
		x.machine.runList(own, pipeline.List{Steps: x.Steps, Give: x.Give}, itemPath(x.path, i), x.in.with(x.items[i]), func(out []payload.Part, f *fault.Fault) {
			own.end()
			x.given[i], x.failed[i] = out, f
			x.took = append(x.took, x.machine.now.Sub(began))
			x.running--
			switch {
			case f != nil && x.onError != pipeline.OmitItems && x.onError != pipeline.FillItems:
				x.finish(nil, f, i)
			case !isStarting:
				x.advance()
			}
		})
		isStarting = false
	}
	if !x.isOver && x.running == 0 && x.next == len(x.items) {
		out, f, i := x.stack()
		x.finish(out, f, i)
	}
}

func (x *mapping) finish(out []payload.Part, f *fault.Fault, item int) {
	if x.isOver {
		return
	}
	x.isOver = true
	x.scope.end()
	b := Branch{Path: x.path, Block: Map, Began: x.began, Items: len(x.items)}
	for _, f := range x.failed {
		if f != nil {
			b.Failed++
		}
	}
	if n := len(x.took); n > 0 {
		slices.Sort(x.took)
		b.ItemP50, b.ItemMax = x.took[(n-1)/2], x.took[n-1]
	}
	x.machine.note(b, f)
	if f != nil {
		x.done(nil, withPath(f, itemPath(x.path, item)))
		return
	}
	if b.Failed > 0 {
		x.machine.outcome.Partial = append(x.machine.outcome.Partial, x.path)
	}
	x.done(out, nil)
}
