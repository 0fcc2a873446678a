package call

import (
	"context"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/graph"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const (
	// maxBranches bounds the blocks and branches in a timeline, maxShownSteps the running steps in a
	// report.
	maxBranches, maxShownSteps = 64, 16
	running                    = "running"
	waiting                    = "waiting"
)

// branchesOf returns the blocks and branches that have ended, as a timeline has them: those in the items
// of a map together, by their status.
func branchesOf(m *graph.Machine, env *envelope.Envelope) []envelope.Branch {
	out := make([]envelope.Branch, 0, min(len(m.Branches()), maxBranches))
	type group struct{ path, block, status string }
	groups := map[group]int{}
	for _, b := range m.Branches() {
		one := envelope.Branch{
			Path: envelope.WithoutIndices(b.Path), Block: b.Block, Status: string(b.Status), Why: b.Why, Began: b.Began.Sub(env.AdmittedAt), Took: b.Ended.Sub(b.Began),
			Items: uint32(b.Items), Failed: uint32(b.Failed), ItemP50: b.ItemP50, ItemMax: b.ItemMax,
		}
		if one.Path != b.Path {
			one.Count = 1
			like := group{one.Path, one.Block, one.Status}
			if i, is := groups[like]; is {
				all := &out[i]
				all.Count, all.Items, all.Failed = all.Count+1, all.Items+one.Items, all.Failed+one.Failed
				all.Took, all.ItemP50, all.ItemMax = max(all.Took, one.Took), max(all.ItemP50, one.ItemP50), max(all.ItemMax, one.ItemMax)
				continue
			}
			groups[like] = len(out)
		}
		if len(out) == maxBranches {
			break
		}
		out = append(out, one)
	}
	return out
}

// view returns the branches that have ended and the steps that run or wait, also while the call runs.
func (g *graphRun) view(env *envelope.Envelope) []envelope.Branch {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.machine == nil {
		return nil
	}
	out := branchesOf(g.machine, env)
	for i, r := range g.machine.Running() {
		if i == maxShownSteps {
			break
		}
		one := envelope.Branch{Path: r.Path, Status: waiting, Began: r.Began.Sub(env.AdmittedAt), Took: time.Since(r.Began)}
		if g.running[r.ID] != nil {
			one.Status, one.Why = running, string(pieceID(env.RequestID, r.Path))
		}
		out = append(out, one)
	}
	return out
}

// spanOf returns the span of the branch or block at a path, which it starts if there is none; the
// request's for the empty path. Those of a map are the parents of what its items run.
func (x *call) spanOf(path string, began time.Time) trace.Span {
	if path == "" || !x.span.IsRecording() {
		return x.span
	}
	if s := x.graph.spans[path]; s != nil {
		return s
	}
	_, s := x.service.tracer.Start(contextOf(x.spanOf(parentPath(path), began)), envelope.WithoutIndices(path), trace.WithTimestamp(began),
		trace.WithAttributes(attribute.String("stagemesh.graph.path", path)))
	if x.graph.spans == nil {
		x.graph.spans = map[string]trace.Span{}
	}
	x.graph.spans[path] = s
	return s
}

// traceBranches ends the spans of what has ended since the last call.
func (x *call) traceBranches() {
	all := x.graph.machine.Branches()
	if !x.span.IsRecording() {
		return
	}
	for _, b := range all[x.graph.traced:] {
		attributes := []attribute.KeyValue{attribute.String("stagemesh.graph.status", string(b.Status))}
		if why, _, _ := strings.Cut(b.Why, ` is "`); why != "" { // spans have no text of payloads or metadata
			attributes = append(attributes, attribute.String("stagemesh.graph.why", why))
		}
		if b.Status == graph.Skipped {
			x.spanOf(parentPath(b.Path), b.Began).AddEvent("stagemesh.graph.skipped", trace.WithTimestamp(b.Ended),
				trace.WithAttributes(append(attributes, attribute.String("stagemesh.graph.path", b.Path))...))
			continue
		}
		if b.Block != "" {
			attributes = append(attributes, attribute.String("stagemesh.graph.block", b.Block))
		}
		if b.Items > 0 {
			attributes = append(attributes, attribute.Int("stagemesh.graph.items", b.Items), attribute.Int("stagemesh.graph.failed_items", b.Failed))
		}
		s := x.spanOf(b.Path, b.Began)
		s.SetAttributes(attributes...)
		if b.Status == graph.Failed {
			s.SetStatus(codes.Error, b.Why)
		}
		x.endSpans(b.Path, b.Ended)
	}
	x.graph.traced = len(all)
}

// endSpans ends the spans at a path and below; all for the empty one.
func (x *call) endSpans(path string, at time.Time) {
	for below, s := range x.graph.spans {
		if rest, is := strings.CutPrefix(below, path); is && (path == "" || rest == "" || rest[0] == '/' || rest[0] == '[') {
			s.End(trace.WithTimestamp(at))
			delete(x.graph.spans, below)
		}
	}
}

// parentPath returns the path of the branch or block around a path. The items of a map have none of their own.
func parentPath(path string) string {
	path = path[:max(0, strings.LastIndexByte(path, '/'))]
	if strings.HasSuffix(path, "]") {
		path = path[:strings.LastIndexByte(path, '[')]
	}
	return path
}

// branchLabel is what a branch is counted by.
type branchLabel struct {
	pipeline pipeline.Name
	path     string
	status   graph.Status
}

func (l branchLabel) options() []metric.AddOption {
	return []metric.AddOption{metric.WithAttributeSet(attribute.NewSet(
		attribute.String("pipeline", string(l.pipeline)), attribute.String("branch", l.path), attribute.String("status", string(l.status)),
	))}
}

// countBranches counts the branches of a request that has ended, and for how long its joins waited.
func (m *metrics) countBranches(name pipeline.Name, all []graph.Branch) {
	// firstEnds has the first end in each block, as all is in the order of ends.
	ctx, firstEnds := context.Background(), map[string]time.Time{}
	for _, b := range all {
		path := envelope.WithoutIndices(b.Path)
		if b.Block == "" || b.Block == graph.Map {
			m.branches.Add(ctx, 1, m.branchLabels.of(branchLabel{name, path, b.Status})...)
		}
		if b.Block == graph.Parallel {
			m.joinWait.Record(ctx, b.Ended.Sub(firstEnds[b.Path]).Seconds(), metric.WithAttributeSet(attribute.NewSet(attribute.String("pipeline", string(name)), attribute.String("block", path))))
		}
		if block := b.Path[:max(0, strings.LastIndexByte(b.Path, '/'))]; firstEnds[block].IsZero() {
			firstEnds[block] = b.Ended
		}
	}
}
