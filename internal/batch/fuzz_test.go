package batch_test

import (
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// FuzzBatcher reads what to do from bytes: the first three are the settings,
// every other one is a step, with one to four bytes more for an item.
func FuzzBatcher(f *testing.F) {
	f.Add([]byte{0, 8, 2, 0, 1, 0, 0, 1, 1, 1, 3, 7, 4, 0, 5})
	f.Add([]byte{1, 4, 1, 0, 0x21, 3, 9, 0, 0x13, 1, 2, 5, 5, 2, 1})
	f.Add([]byte{2, 2, 0, 0, 0x80, 1, 1, 0, 0x41, 2, 0, 3, 6, 4, 0})
	f.Fuzz(func(t *testing.T, script []byte) {
		in := reader(script)
		d := newDriver(t, in.settings(), 1+int(in.next())%3)
		for len(in) > 0 && d.added < 200 {
			in.step(d)
		}
		d.empty()
	})
}

// reader takes a script byte by byte; zeros follow its end.
type reader []byte

func (r *reader) next() byte {
	if len(*r) == 0 {
		return 0
	}
	first := (*r)[0]
	*r = (*r)[1:]
	return first
}

func (r *reader) settings() batch.Settings {
	mode, size := r.next(), r.next()
	s := batch.Settings{Mode: batch.Adaptive, MaxSize: 1 + int(size)%16, MaxBytes: int(size>>4) * 20, MaxWait: time.Duration(mode>>2) * ms / 2}
	switch {
	case mode&1 == 1:
		s.Mode = batch.Window
		s.MaxWait += ms
	case mode&2 == 2:
		s.Mode = batch.Eager
	}
	return s
}

func (r *reader) step(d *driver) {
	switch op := r.next(); op % 8 {
	case 0, 1:
		d.add(r.item(d.now))
	case 2:
		d.remove(batch.ID(r.next()))
	case 3:
		d.settle()
	case 4:
		d.now = d.now.Add(time.Duration(r.next()) * 100 * time.Microsecond)
	case 5:
		if len(d.running) > 0 {
			d.finish(int(r.next())%len(d.running), time.Duration(op>>3)*ms)
		}
	case 6:
		d.sleep()
	case 7:
		if op == 255 {
			d.drain()
		}
		d.dispatch()
	}
}

func (r *reader) item(now time.Time) batch.Item {
	what, size, left := r.next(), r.next(), r.next()
	it := batch.Item{
		Key:     batch.Key("abcd"[what&3 : what&3+1]),
		Rows:    1 + int(size&3),
		Bytes:   int(size >> 2),
		Arrival: now.Add(-time.Duration(what>>6) * 700 * ms),
		Class:   pipeline.Classes()[int(what>>2&15)%3],
		Alone:   what>>2&15 == 15,
	}
	if left > 0 {
		it.Deadline = now.Add(time.Duration(left) * ms / 4)
	}
	return it
}
