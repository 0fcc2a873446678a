package load

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// finePacer waits until a timer of the system becomes readable, or a timer of Go fires,
// whichever is first. An idle process notices the system's timer at once, and Go's up to
// a millisecond late; a busy process looks at Go's timers all the time, and seldom polls
// what is readable. Unlike a call that sleeps, the wait takes no processor from the
// goroutines that are measured.
type finePacer struct {
	fd    int
	timer *os.File
	leave func() bool
}

// newFinePacer returns a pacer for waits that end with the context.
func newFinePacer(ctx context.Context) (*finePacer, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("timerfd_create", err)
	}
	p := &finePacer{fd: fd, timer: os.NewFile(uintptr(fd), "timer")}
	// Its only possible error is that the pacer has stopped.
	p.leave = context.AfterFunc(ctx, func() { _ = p.timer.SetReadDeadline(time.Unix(0, 1)) })
	return p, nil
}

func (p *finePacer) stop() {
	p.leave()
	_ = p.timer.Close() // nothing is written to it
}

func (p *finePacer) until(ctx context.Context, moment time.Time) error {
	wait := time.Until(moment)
	if wait <= 0 {
		return ctx.Err()
	}
	at := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(wait))}
	if err := unix.TimerfdSettime(p.fd, 0, &at, nil); err != nil {
		return os.NewSyscallError("timerfd_settime", err)
	}
	if err := p.timer.SetReadDeadline(moment); err != nil {
		return err
	}
	// If the context ended before this, its deadline has just been overwritten.
	if err := ctx.Err(); err != nil {
		return err
	}
	var times [8]byte
	if _, err := p.timer.Read(times[:]); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		return err
	}
	return ctx.Err()
}
