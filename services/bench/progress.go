package bench

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"
)

const progressInterval = 200 * time.Millisecond

// showProgress shows a progress bar until stop is called, if the output is a terminal.
func showProgress(out io.Writer, s Settings, name string, r *Recorder) (stop func()) {
	if !isTerminal(out) {
		return func() {}
	}
	// The bar counts requests, or milliseconds.
	most := (s.Warmup + s.Duration).Milliseconds()
	if s.Requests > 0 {
		most = s.Requests
	}
	bar := progressbar.NewOptions64(most,
		progressbar.OptionSetWriter(out), progressbar.OptionClearOnFinish(),
		// Overwriting the bar with spaces would leave the ^C behind it.
		progressbar.OptionUseANSICodes(true),
		progressbar.OptionSetElapsedTime(false),
		progressbar.OptionSetPredictTime(false), progressbar.OptionSetWidth(30))
	begun := time.Now()
	tick := func(now time.Time) {
		answers, failures := r.Answered()
		passed := now.Sub(begun)
		text, at := fmt.Sprintf("run %s: %d answers, %d failures", name, answers, failures), passed.Milliseconds()
		if passed < s.Warmup {
			text = fmt.Sprintf("run %s: warming up", name)
		}
		if s.Requests > 0 {
			at = answers + failures
		}
		bar.Describe(text)
		_ = bar.Set64(min(at, most-1)) // a full bar would end
	}
	stopped := make(chan struct{})
	var showing sync.WaitGroup
	showing.Go(func() {
		ticks := time.NewTicker(progressInterval)
		defer ticks.Stop()
		for {
			select {
			case <-stopped:
				return
			case now := <-ticks.C:
				tick(now)
			}
		}
	})
	return sync.OnceFunc(func() {
		close(stopped)
		showing.Wait()
		_ = bar.Finish() // an error only affects the display
	})
}

func isTerminal(out io.Writer) bool {
	file, ok := out.(*os.File)
	if !ok {
		return false
	}
	info, err := file.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}
