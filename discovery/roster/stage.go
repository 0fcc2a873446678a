package roster

import (
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"
)

// Stage is a stage as its hosts are together.
type Stage struct {
	Name string
	// Hosts are those that are alive, Ready those of them that take items.
	Hosts, Ready int
	// Sums over the hosts that are alive.
	InHand, MaxInFlight, Running, Slots int
	// Durabilities are its queues, Spec is what it takes and gives, and Limits what a
	// host is limited to, as the host says that started last. They are empty where it
	// says nothing.
	Durabilities []string
	Spec         *stagev1.Spec
	Limits       *stagev1.Limits
}

// Stages returns the stages of hosts that are sorted by them, as Hosts returns them.
// Where no host of a stage is alive any more, what the stage takes is what the last
// one has said.
func Stages(hosts []Host) []Stage {
	var out []Stage
	for len(hosts) > 0 {
		name, n := hosts[0].Record.GetStage(), 0
		for n < len(hosts) && hosts[n].Record.GetStage() == name {
			n++
		}
		out = append(out, stageOf(name, hosts[:n]))
		hosts = hosts[n:]
	}
	return out
}

func stageOf(name string, hosts []Host) Stage {
	out := Stage{Name: name}
	last := hosts[0]
	for _, h := range hosts {
		if newer(h, last) {
			last = h
		}
		if !h.Alive {
			continue
		}
		r := h.Record
		out.Hosts++
		if r.GetReady() && !r.GetDraining() {
			out.Ready++
		}
		out.InHand += int(r.GetInFlight())
		out.MaxInFlight += int(r.GetMaxInFlight())
		out.Running += int(r.GetRunning())
		out.Slots += int(r.GetSlots())
	}
	out.Durabilities, out.Spec, out.Limits = last.Record.GetDurabilities(), last.Record.GetSpec(), last.Record.GetLimits()
	return out
}

// newer reports whether a host's word counts for more than another's: it is alive, or
// has started later.
func newer(a, b Host) bool {
	if a.Alive != b.Alive {
		return a.Alive
	}
	return a.Record.GetStartedAt().AsTime().After(b.Record.GetStartedAt().AsTime())
}
