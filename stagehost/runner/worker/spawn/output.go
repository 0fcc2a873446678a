package spawn

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"
)

const (
	// maxLine bounds a line of output, in bytes; what is longer is cut off.
	maxLine = 8 << 10
	// lastLines and lastLine bound what Last returns.
	lastLines = 20
	lastLine  = 512
)

// output is what a process writes.
type output struct {
	log            *slog.Logger
	stdout, stderr stream
	readers        sync.WaitGroup

	mu    sync.Mutex
	lines []string
}

type stream struct{ read, write *os.File }

func openOutput(log *slog.Logger) (*output, error) {
	o := &output{log: log}
	for _, s := range []*stream{&o.stdout, &o.stderr} {
		var err error
		if s.read, s.write, err = os.Pipe(); err != nil {
			o.closeWriters()
			return nil, errors.Join(fmt.Errorf("output: %w", err), o.closeReaders())
		}
	}
	return o, nil
}

// closeWriters closes the ends that are the process's.
func (o *output) closeWriters() {
	for _, s := range []stream{o.stdout, o.stderr} {
		if s.write != nil {
			_ = s.write.Close() // nothing was written
		}
	}
}

func (o *output) closeReaders() error {
	var errs []error
	for _, s := range []stream{o.stdout, o.stderr} {
		if s.read != nil {
			errs = append(errs, s.read.Close())
		}
	}
	return errors.Join(errs...)
}

// read has what is written logged until finish. Standard error is no worse than
// standard output: logging libraries write there whatever they have to say.
func (o *output) read() {
	o.readers.Go(func() { o.copy(o.stdout.read, "stdout") })
	o.readers.Go(func() { o.copy(o.stderr.read, "stderr") })
}

// finish returns when all is read, or nobody should wait for more.
func (o *output) finish() {
	until := time.Now().Add(outputPatience)
	for _, s := range []stream{o.stdout, o.stderr} {
		_ = s.read.SetReadDeadline(until) // else it ends with the file
	}
	o.readers.Wait()
	_ = o.closeReaders() // nothing was written
}

func (o *output) copy(from *os.File, name string) {
	r := bufio.NewReaderSize(from, maxLine)
	for {
		line, err := r.ReadSlice('\n')
		cut := errors.Is(err, bufio.ErrBufferFull)
		o.line(line, cut, name)
		for errors.Is(err, bufio.ErrBufferFull) {
			_, err = r.ReadSlice('\n')
		}
		if err != nil {
			return
		}
	}
}

func (o *output) line(raw []byte, cut bool, name string) {
	text := strings.ToValidUTF8(string(bytes.TrimRight(raw, "\r\n")), "\uFFFD")
	if text == "" {
		return
	}
	o.keep(text)
	if cut {
		o.log.Info(text, "stream", name, "cut", true)
		return
	}
	o.log.Info(text, "stream", name)
}

func (o *output) keep(line string) {
	if len(line) > lastLine {
		line = strings.ToValidUTF8(line[:lastLine], "") + "..."
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.lines = append(o.lines, line); len(o.lines) > lastLines {
		o.lines = o.lines[1:]
	}
}

func (o *output) last() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return append([]string(nil), o.lines...)
}
