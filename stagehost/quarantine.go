package stagehost

import (
	"time"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// loneDeaths is how many processes an item may end by runs alone on this host
// before it is blamed: one may have been ended by somebody else.
const loneDeaths = 2

// quarantine has the items of a batch run again, each alone and one at a time,
// so that the one that ended the process ends no more than one at a time. An item
// that was alone is blamed when that has happened too often.
//
// Streams share their process, so an item was alone only where it was said to be; and
// as one that is alone keeps all others from their process, it is run beside them once
// more before.
func (l *loop) quarantine(e *ran, items []*item) {
	alone := len(e.run.items) == 1 && (e.run.batch.Suspect || !l.host.streams())
	for _, it := range l.unstreamed(items, e.err) {
		if l.host.streams() && !alone && !it.beside {
			it.beside = true
			l.requeue([]*item{it})
			continue
		}
		if alone {
			it.deaths = append(it.deaths, envelope.RunRecord{Host: l.host.settings.Host, At: e.run.started})
		}
		if len(it.deaths) >= min(loneDeaths, l.host.settings.CrashLimit) {
			l.blame(it)
			continue
		}
		it.lonely = true
		l.requeue([]*item{it})
	}
}

// blame gives up on an item that ended its processes here.
func (l *loop) blame(it *item) {
	last := it.deaths[len(it.deaths)-1]
	l.bury(it, it.deaths, crashed(len(it.deaths), last))
}

func crashed(times int, last envelope.RunRecord) *fault.Fault {
	return fault.Newf(fault.RunnerCrashed,
		"the process that ran the item alone ended %d times, last on host %s at %s", times, last.Host, last.At.Format(time.RFC3339))
}

// takeHalf returns a batch to run again, which is not one in quarantine while
// another of those runs.
func (l *loop) takeHalf(now time.Time) []*item {
	for i := 0; i < len(l.halves); i++ {
		half := l.live(l.halves[i], now)
		if len(half) > 0 && half[0].lonely && l.lonely {
			l.halves[i] = half
			continue
		}
		l.halves = append(l.halves[:i], l.halves[i+1:]...)
		if len(half) > 0 {
			return half
		}
		i--
	}
	return nil
}
