package stagemesh

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"

	"github.com/stagemesh/stagemesh/services/bench/load"
	"github.com/stagemesh/stagemesh/services/bench/report"
)

// progressEvery is how often progress is shown.
const progressEvery = 200 * time.Millisecond

// showProgress shows how far a run is, where somebody sees it, until stop is called.
func showProgress(out io.Writer, s load.Settings, which string, r *report.Recorder) (stop func()) {
	if !isTerminal(out) {
		return func() {}
	}
	p := &progress{settings: s, which: which, recorder: r, begun: time.Now()}
	p.bar = progressbar.NewOptions64(p.most(),
		progressbar.OptionSetWriter(out), progressbar.OptionClearOnFinish(),
		// Spaces over what the bar wrote would leave the ^C behind it.
		progressbar.OptionUseANSICodes(true),
		progressbar.OptionSetElapsedTime(false),
		progressbar.OptionSetPredictTime(false), progressbar.OptionSetWidth(30))
	over := make(chan struct{})
	var showing sync.WaitGroup
	showing.Go(func() { p.show(over) })
	return sync.OnceFunc(func() {
		close(over)
		showing.Wait()
		_ = p.bar.Finish() // it is only seen
	})
}

// isTerminal reports whether somebody sees what is written.
func isTerminal(out io.Writer) bool {
	file, ok := out.(*os.File)
	if !ok {
		return false
	}
	info, err := file.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// progress is how far a run is.
type progress struct {
	settings load.Settings
	which    string
	recorder *report.Recorder
	begun    time.Time
	bar      *progressbar.ProgressBar
}

// most is what the bar counts to: requests, or milliseconds.
func (p *progress) most() int64 {
	if p.settings.Requests > 0 {
		return p.settings.Requests
	}
	return (p.settings.Warmup + p.settings.Duration).Milliseconds()
}

func (p *progress) show(over <-chan struct{}) {
	ticks := time.NewTicker(progressEvery)
	defer ticks.Stop()
	for {
		select {
		case <-over:
			return
		case now := <-ticks.C:
			p.tick(now.Sub(p.begun))
		}
	}
}

func (p *progress) tick(passed time.Duration) {
	answers, failures := p.recorder.Answered()
	what := fmt.Sprintf("run %s: %d answers, %d failures", p.which, answers, failures)
	if passed < p.settings.Warmup {
		what = fmt.Sprintf("run %s: warming up", p.which)
	}
	at := passed.Milliseconds()
	if p.settings.Requests > 0 {
		at = answers + failures
	}
	// A full bar would end it.
	p.bar.Describe(what)
	_ = p.bar.Set64(min(at, p.most()-1)) // it is only seen
}
