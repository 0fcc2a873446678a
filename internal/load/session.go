package load

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/services/runners"
)

// Session is a measurement that a command makes.
type Session struct {
	Loads []Settings
	// Client has no address yet.
	Client ClientSettings
	// Report has no run and no place yet.
	Report Report

	deadline time.Duration
	progress io.Writer
}

// Try makes one request, so that an error that all requests would have is reported at
// once. It ignores errors that may pass.
func (s *Session) Try(ctx context.Context, target Target) error {
	err := target(ctx, &Answer{})
	if of, ok := errors.AsType[*RequestError](err); ok && of.Retryable {
		return nil
	}
	if err != nil {
		return fmt.Errorf("the first request failed: %w", err)
	}
	return nil
}

// Run makes a run, which the progress bar names.
func (s *Session) Run(ctx context.Context, target Target, load Settings, name string) (Run, error) {
	recorder := NewRecorder(s.deadline)
	meter := StartMeter(s.Report.Subject.Place == InProcess)
	defer meter.Stop()
	stop := showProgress(s.progress, load, name, recorder)
	outcome, err := RunLoad(ctx, load, target, recorder.Record)
	stop()
	if err != nil {
		return Run{}, err
	}
	out := recorder.Run(load, outcome)
	meter.Into(&out)
	return out, nil
}

// RunAll makes a run of each load and adds it to the report, until the context ends.
func (s *Session) RunAll(ctx context.Context, target Target) error {
	for i, load := range s.Loads {
		run, err := s.Run(ctx, target, load, fmt.Sprintf("%d of %d", i+1, len(s.Loads)))
		if err != nil {
			return err
		}
		s.Report.Runs = append(s.Report.Runs, run)
		if run.Interrupted {
			break // the report has what was measured
		}
	}
	return nil
}

// check returns an error if no run has an answer.
func (s *Session) check() error {
	for _, run := range s.Report.Runs {
		if run.Answered > 0 || run.Interrupted {
			return nil
		}
	}
	return errors.New("no request was answered; the report above lists the failures")
}

// Execute makes a measurement, and writes its report where the flags say. The function
// measures, and returns the report and what writes it as text. Without inputs they are
// generated.
func (f *Flags) Execute(cmd *cobra.Command, name string, inputs [][]payload.Part, measure func(*Session) (report any, text func(io.Writer) error, err error)) (err error) {
	session, err := f.session(name, inputs, cmd.ErrOrStderr())
	if err != nil {
		return err
	}
	// The file is opened before the measurement, so that a wrong path fails early, and truncated after it.
	var file *os.File
	if f.json != "" && f.json != "-" {
		if file, err = os.OpenFile(f.json, os.O_WRONLY|os.O_CREATE, 0o666); err != nil { //nolint:gosec // as os.Create
			return fmt.Errorf("--json: %w", err)
		}
		defer func() { err = errors.Join(err, file.Close()) }()
	}
	report, text, err := measure(session)
	if err != nil {
		return err
	}
	toJSON := io.Discard
	switch {
	case f.json == "-":
		toJSON, text = cmd.OutOrStdout(), func(io.Writer) error { return nil }
	case file != nil:
		_ = file.Truncate(0) // pipes and devices cannot be truncated
		toJSON = file
	}
	return cmp.Or(text(cmd.OutOrStdout()), WriteJSON(toJSON, report), session.check())
}

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

// LoadMesh reads the file of a mesh that is started for a measurement. It replaces the
// file's addresses by free ports of 127.0.0.1, its store by a temporary folder, and its
// registry by one in the broker, so that the mesh runs beside others and leaves their data
// alone. A file with nats.url shares that broker, and the registry.
func LoadMesh(path string) (*meshfile.File, error) {
	f, err := meshfile.Load(path, runners.All()...)
	if err != nil {
		return nil, meshfile.FlagError("--mesh", err)
	}
	Separate(f)
	return f, nil
}

// Separate makes the changes of LoadMesh.
func Separate(f *meshfile.File) {
	const free = "127.0.0.1:0"
	f.Gateway.Listen, f.Gateway.GRPCListen, f.Gateway.Admin.Listen, f.Ops.Listen = free, free, free, free
	if f.Gateway.Scaler != nil && f.Gateway.Scaler.Listen != "" {
		f.Gateway.Scaler.Listen = free
	}
	if f.NATS.URL == "" {
		f.Registry = meshfile.RegistryConfig{None: f.Registry.None}
	}
	f.NATS.StoreDir = ""
	if f.NATS.Listen != "" {
		f.NATS.Listen = free
	}
	for name, stage := range f.Stages {
		if stage.Listen != "" {
			stage.Listen = free
			f.Stages[name] = stage
		}
	}
}
