package graph

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// join is a parallel block that runs.
type parallel struct {
	*pipeline.Parallel
	machine *Machine
	path    string
	scope   *scope
	names   []string
	// scopes are those of the branches, given what they gave; a branch is open until it has ended.
	scopes  []*scope
	given   [][]payload.Part
	isEnded []bool
	open    int
	// arrived counts the branches that have given their parts.
	arrived int
	isOver  bool
	done    given
}

func (m *Machine) runParallel(s *scope, p *pipeline.Parallel, path string, in parts, done given) {
	n := len(p.Branches)
	b := &parallel{
		Parallel: p, machine: m, path: path, scope: s.child(p.Within), names: slices.Sorted(maps.Keys(p.Branches)),
		given: make([][]payload.Part, n), isEnded: make([]bool, n), open: n, done: done,
	}
	b.scope.at(func() {
		for i := range b.names {
			b.end(i, nil, lateFault(join(path, b.names[i]), p.Within), Late)
		}
	})
	for range b.names {
		b.scopes = append(b.scopes, b.scope.child(0))
	}
	for i, name := range b.names {
		if b.isOver {
			return
		}
		branch := p.Branches[name]
		at := join(path, name)
		m.runSteps(b.scopes[i], branch.Steps, at, in, func(end parts, f *fault.Fault) {
			status := Failed
			if f != nil && f.Reason == fault.DeadlineExceeded {
				status = Late
			}
			b.end(i, take(pipeline.List{Steps: branch.Steps, Give: branch.Give}, end), f, status)
		})
	}
}

// need is how many branches have to arrive.
func (b *parallel) need() int { return cmp.Or(b.Quorum, len(b.names)) }

// end ends a branch.
func (b *parallel) end(i int, out []payload.Part, f *fault.Fault, status Status) {
	if b.isOver || b.isEnded[i] {
		return
	}
	b.isEnded[i] = true
	b.open--
	b.scopes[i].end()
	at, branch := join(b.path, b.names[i]), b.Branches[b.names[i]]
	if f == nil {
		b.arrived++
		b.given[i] = out
		b.machine.note(at, Done, "")
	} else {
		b.machine.note(at, status, string(f.Reason))
		isReplaced := branch.Optional || branch.Missing != nil || b.Quorum > 0
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
			b.machine.note(join(b.path, b.names[i]), Cancelled, "")
			b.given[i] = constants(b.Branches[b.names[i]].Missing)
		}
	}
	b.scope.end()
	if f != nil {
		b.done(nil, at(f, b.path))
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
	lists := step.Lists()
	for i, c := range step.Switch {
		name := join(path, lists[i].Name)
		isMatch, why := c.Else != nil, ""
		if !isMatch {
			var f *fault.Fault
			if isMatch, why, f = m.matches(c.When, in); f != nil {
				done(nil, at(f, name))
				return
			}
		}
		if !isMatch {
			m.note(name, Skipped, why)
			continue
		}
		if c.Fail != nil {
			m.note(name, Failed, why)
			done(nil, at(fault.New(c.Fail.Reason, c.Fail.Message), name))
			return
		}
		m.runList(s, lists[i], name, why, in, done)
		return
	}
}

// runList runs a list of steps and gives what it gives.
func (m *Machine) runList(s *scope, list pipeline.List, path, why string, in parts, done given) {
	m.runSteps(s, list.Steps, path, in, func(end parts, f *fault.Fault) {
		if f != nil {
			m.note(path, Failed, string(f.Reason))
			done(nil, at(f, path))
			return
		}
		m.note(path, Done, why)
		done(take(list, end), nil)
	})
}

// percent is the sum of the weights of a split.
const percent = 100

func (m *Machine) runSplit(s *scope, step *pipeline.Step, path string, in parts, done given) {
	key, why := string(m.request.ID), "by request"
	if name := step.Split.ByMetadata; name != "" {
		if value, is := m.request.Metadata[name]; is {
			key, why = value, name+" is "+value
		}
	}
	sum := sha256.Sum256([]byte(path + "\x00" + key))
	draw := int(binary.BigEndian.Uint64(sum[:]) % percent)
	lists := step.Lists()
	chosen := slices.IndexFunc(lists, func(l pipeline.List) bool {
		draw -= step.Split.Branches[l.Name].Weight
		return draw < 0
	})
	m.runList(s, lists[chosen], join(path, lists[chosen].Name), why, in, done)
}

func (m *Machine) runTry(s *scope, t *pipeline.Try, path string, in parts, done given) {
	own, isOver := s.child(t.Within), false
	end := func(out []payload.Part, f *fault.Fault, status Status) {
		if isOver {
			return
		}
		isOver = true
		own.end()
		switch on := t.On; {
		case f == nil:
			m.note(join(path, "try"), Done, "")
			done(out, nil)
			return
		case len(on) == 0 && slices.Contains(pipeline.DefaultTryReasons(), f.Reason), slices.Contains(on, f.Reason):
			m.note(join(path, "try"), status, string(f.Reason))
			m.outcome.Partial = slices.DeleteFunc(m.outcome.Partial, func(p string) bool { return strings.HasPrefix(p, join(path, "try/")) })
			m.runList(s, pipeline.List{Steps: t.Else}, join(path, "else"), string(f.Reason), in, done)
		default:
			m.note(join(path, "try"), status, string(f.Reason))
			done(nil, at(f, path))
		}
	}
	own.at(func() { end(nil, lateFault(path, t.Within), Late) })
	m.runSteps(own, t.Steps, join(path, "try"), in, func(last parts, f *fault.Fault) {
		if f != nil {
			end(nil, f, Failed)
			return
		}
		end(last.previous, nil, Done)
	})
}

// mapWindow bounds the items of a map that run at a time, so that one request never has the most of
// a stage's queue.
const mapWindow = 64

// mapping is a map that runs.
type mapping struct {
	*pipeline.Map
	machine *Machine
	path    string
	scope   *scope
	in      parts
	items   [][]payload.Part
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
		Map: b, machine: m, path: path, scope: s.child(0), in: in, items: items, given: make([][]payload.Part, len(items)),
		failed: make([]*fault.Fault, len(items)), done: done,
	}
	x.advance()
}

// advance starts items while the window has room, and ends the block after the last.
func (x *mapping) advance() {
	for !x.isOver && x.next < len(x.items) && x.running < mapWindow {
		i := x.next
		x.next++
		x.running++
		at, isStarting := describeItems(x.path, i), true
		own := x.scope.child(0)
		x.machine.runSteps(own, x.Steps, at, x.in.with(x.items[i]), func(end parts, f *fault.Fault) {
			own.end()
			x.given[i] = take(pipeline.List{Steps: x.Steps, Give: x.Give}, end)
			x.running--
			if f != nil && !x.tolerates() {
				x.finish(nil, f, i)
				return
			}
			x.failed[i] = f
			if !isStarting {
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

func (x *mapping) tolerates() bool {
	return x.OnItemError == pipeline.OmitItems || x.OnItemError == pipeline.FillItems
}

func (x *mapping) finish(out []payload.Part, f *fault.Fault, item int) {
	if x.isOver {
		return
	}
	x.isOver = true
	x.scope.end()
	if f != nil {
		x.machine.note(x.path, Failed, fmt.Sprintf("item %d: %s", item, f.Reason))
		x.done(nil, at(f, describeItems(x.path, item)))
		return
	}
	why := fmt.Sprintf("%d items", len(x.items))
	bad := 0
	for _, f := range x.failed {
		if f != nil {
			bad++
		}
	}
	if bad > 0 {
		why += fmt.Sprintf(", %d failed", bad)
		x.machine.outcome.Partial = append(x.machine.outcome.Partial, x.path)
	}
	x.machine.note(x.path, Done, why)
	x.done(out, nil)
}
