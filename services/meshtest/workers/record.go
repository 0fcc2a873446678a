package workers

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// Entry is a line of the record that workers keep. SIGKILL does not take it back.
type Entry struct {
	// What happened: "start" of a process, "run" of a batch, "cancelled".
	What   string
	Worker int
	PID    int
	// Texts are those of the batch.
	Texts []string
}

// record is the file that workers write to, as far as it was read.
type record struct {
	t    testing.TB
	path string

	mu      sync.Mutex
	read    int64
	entries []Entry
}

func newRecord(t testing.TB, folder string) *record {
	return &record{t: t, path: filepath.Join(folder, "record")}
}

// all returns the entries of that kind.
func (r *record) all(what string) []Entry {
	r.t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.readOn()
	var out []Entry
	for _, e := range r.entries {
		if e.What == what {
			out = append(out, e)
		}
	}
	return out
}

// readOn reads the lines that were written since the last time.
func (r *record) readOn() {
	r.t.Helper()
	file, err := os.Open(r.path)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err != nil {
		r.t.Fatal(err)
	}
	defer file.Close() //nolint:errcheck // it was only read
	data, err := io.ReadAll(io.NewSectionReader(file, r.read, math.MaxInt64-r.read))
	if err != nil {
		r.t.Fatal(err)
	}
	data = data[:bytes.LastIndexByte(data, '\n')+1]
	for line := range bytes.Lines(data) {
		var e Entry
		if err := json.Unmarshal(line, &e); err != nil {
			r.t.Fatalf("%s: %v", line, err)
		}
		r.entries = append(r.entries, e)
	}
	r.read += int64(len(data))
}

// await waits for an entry of that kind that has the text, and returns the first.
func (r *record) await(what, text string) Entry {
	r.t.Helper()
	var found Entry
	testbed.Eventually(r.t, what+" of "+text, func() bool {
		for _, e := range r.all(what) {
			if slices.Contains(e.Texts, text) {
				found = e
				return true
			}
		}
		return false
	})
	return found
}

// Log is what is written to it, readable meanwhile.
type Log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write implements io.Writer.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// String returns all of it.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Line waits for a line that has all of the words, and returns the first.
func (l *Log) Line(t testing.TB, words ...string) string {
	t.Helper()
	var found string
	testbed.Eventually(t, "a line with "+strings.Join(words, ", "), func() bool {
		for line := range strings.Lines(l.String()) {
			if !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(line, word) }) {
				found = line
				return true
			}
		}
		return false
	})
	return found
}
