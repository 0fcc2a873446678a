package main

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/examples/digits"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

const (
	// alias is the name that requests have, newest a model that is registered under load.
	alias  = "digit-reader"
	newest = "reader-new"
	// changing is the phase in which the alias changes.
	changing = "while the alias changes"
)

// load is requests for the alias. Their answers are counted by phase and by reader.
type load struct {
	*caller

	// zero has the answers of reader 0 by image: reader k answers k more.
	zero map[string]int

	mu       sync.Mutex
	phase    string
	answers  map[string]map[int]int
	failures int
}

// switchReaders moves the alias under load, and prints which readers answered in each phase.
func switchReaders(ctx context.Context, out io.Writer, c *caller, requests int) error {
	l := &load{caller: c, zero: map[string]int{}, phase: changing, answers: map[string]map[int]int{}}
	images, err := fs.Glob(digits.FS, "images/*.png")
	if err != nil {
		return err
	}
	for _, image := range images {
		if l.zero[image], err = c.read(ctx, "softmax", payload.ModelRef{Model: readerID(0)}, image); err != nil {
			return err
		}
	}
	if err := l.set(ctx, &meshv1.AliasRoute{Model: readerID(0)}); err != nil {
		return err
	}
	running, stop := context.WithCancel(ctx)
	var calls sync.WaitGroup
	for i := range inFlight / 8 {
		calls.Go(func() {
			for n := i; running.Err() == nil; n++ {
				l.ask(ctx, images[n%len(images)])
			}
		})
	}
	err = l.phases(ctx, out, requests/6)
	stop()
	calls.Wait()
	fmt.Fprintf(out, "%-34s%d\n", "failed requests", l.failures)
	return err
}

// phases changes the alias from phase to phase, each of so many answers.
func (l *load) phases(ctx context.Context, out io.Writer, answers int) error {
	for _, one := range []struct {
		name  string
		route *meshv1.AliasRoute
	}{
		{"reader-000", &meshv1.AliasRoute{Model: readerID(0)}},
		{"reader-new, which is reader 1", &meshv1.AliasRoute{Model: newest}},
		{"canary: 10 % to reader-002", &meshv1.AliasRoute{Model: newest, Weights: map[string]uint32{readerID(2): 10}}},
		{"shadow: 50 % also to reader-011", &meshv1.AliasRoute{Model: newest, Shadow: &meshv1.AliasShadow{Model: readerID(11), Percent: 50}}},
		{"shadow: 50 % also to reader-003", &meshv1.AliasRoute{Model: newest, Shadow: &meshv1.AliasShadow{Model: readerID(3), Percent: 50}}},
		{"reader-new again", &meshv1.AliasRoute{Model: newest}},
	} {
		if one.route.GetModel() == newest {
			if err := l.register(ctx, &meshv1.Model{Id: newest, Stage: stageOf(1), Source: readerID(1) + ".json"}); err != nil {
				return err
			}
		}
		if err := l.set(ctx, one.route); err != nil {
			return err
		}
		for l.enter(one.name); l.count(one.name) < answers; {
			if err := process.Sleep(ctx, 10*time.Millisecond); err != nil {
				return err
			}
		}
		l.print(out, one.name)
	}
	l.print(out, changing)
	shadows := `gateway_shadow_requests_total{result="`
	sums, err := l.sum(ctx, shadows+"equal", shadows+"different", shadows+"failed", shadows+"dropped")
	fmt.Fprintf(out, "%-34s%.0f equal, %.0f different, %.0f failed, %.0f dropped\n", "answers of shadows",
		sums[shadows+"equal"], sums[shadows+"different"], sums[shadows+"failed"], sums[shadows+"dropped"])
	return err
}

// set changes the alias, and returns when that has taken effect.
func (l *load) set(ctx context.Context, route *meshv1.AliasRoute) error {
	l.enter(changing)
	_, err := l.models.SetAlias(ctx, connect.NewRequest(&adminv1.SetAliasRequest{Name: alias, Route: route, Wait: true}))
	return err
}

func (l *load) enter(phase string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.phase = phase
}

func (l *load) count(phase string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, answers := range l.answers[phase] {
		n += answers
	}
	return n
}

func (l *load) print(out io.Writer, phase string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var counts []string
	for _, k := range slices.Sorted(maps.Keys(l.answers[phase])) {
		counts = append(counts, fmt.Sprintf("%d by reader %d", l.answers[phase][k], k))
	}
	fmt.Fprintf(out, "%-34s%s\n", phase, strings.Join(counts, ", "))
}

// ask sends a request, and counts it as changing if its phase ends before it does.
func (l *load) ask(ctx context.Context, image string) {
	l.mu.Lock()
	phase := l.phase
	l.mu.Unlock()
	answer, err := l.read(ctx, "softmax", payload.ModelRef{Alias: alias}, image)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		l.failures++
		return
	}
	if l.phase != phase {
		phase = changing
	}
	if l.answers[phase] == nil {
		l.answers[phase] = map[int]int{}
	}
	l.answers[phase][(answer-l.zero[image]+digitCount)%digitCount]++
}
