package worker

import (
	"context"
	"log/slog"
	"math"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
)

const (
	// maxSpans bounds the spans of a batch. A host takes as many.
	maxSpans = 128
	// maxSpanText bounds the name of a span and a text among its attributes, in bytes.
	maxSpanText = 256
)

// Span is a timed part of a batch's run, for the trace of its requests. A nil span, which
// is that of a batch without a trace, does nothing.
type Span struct {
	batch *Batch
	index int
}

// spanKey is the key of a context's span.
type spanKey struct{}

// Span begins a span, which is a child of the context's span:
//
//	ctx, span := b.Span(ctx, "tokenize", slog.Int("rows", b.Rows))
//	defer span.End()
//
// Attributes are booleans, numbers and texts, and have nothing of the items' inputs. Later
// spans than the first 128 of a batch are left out.
func (b *Batch) Span(ctx context.Context, name string, attributes ...slog.Attr) (context.Context, *Span) {
	if b.Trace == "" {
		return ctx, nil
	}
	return b.beginSpan(ctx, name, attributes)
}

// Span is Batch.Span, for Settings.Stream.
func (i *Item) Span(ctx context.Context, name string, attributes ...slog.Attr) (context.Context, *Span) {
	return i.batch.Span(ctx, name, attributes...)
}

func (b *Batch) beginSpan(ctx context.Context, name string, attributes []slog.Attr) (context.Context, *Span) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.spans) == maxSpans {
		return ctx, nil
	}
	s := &Span{batch: b, index: len(b.spans)}
	span := frame.Span{Name: clipSpanText(name), Start: time.Now().UnixMicro()}
	if parent, ok := ctx.Value(spanKey{}).(*Span); ok && parent.batch == b {
		span.Parent = &parent.index
	}
	setAttributes(&span, attributes)
	b.spans = append(b.spans, span)
	return context.WithValue(ctx, spanKey{}, s), s
}

// Set adds attributes, such as those that are known at the end.
func (s *Span) Set(attributes ...slog.Attr) {
	s.edit(func(span *frame.Span) { setAttributes(span, attributes) })
}

// Fail marks the span as failed by an error of that type, a word such as "timeout".
func (s *Span) Fail(errorType string) {
	s.edit(func(span *frame.Span) { span.Error = clipSpanText(errorType) })
}

// End ends the span. One that has not ended ends with its parent.
func (s *Span) End() {
	s.edit(func(span *frame.Span) { span.End = time.Now().UnixMicro() })
}

// edit changes the span, unless its batch has been answered.
func (s *Span) edit(change func(*frame.Span)) {
	if s == nil {
		return
	}
	s.batch.mu.Lock()
	defer s.batch.mu.Unlock()
	if s.index < len(s.batch.spans) {
		change(&s.batch.spans[s.index])
	}
}

// takeSpans returns the spans. One that has not ended ends with its parent.
func (b *Batch) takeSpans() []frame.Span {
	if b.Trace == "" {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	out, now := b.spans, time.Now().UnixMicro()
	b.spans = nil
	for i := range out {
		switch span := &out[i]; {
		case span.End != 0:
		case span.Parent != nil: // which is before it
			span.End = max(span.Start, out[*span.Parent].End)
		default:
			span.End = now
		}
	}
	return out
}

func setAttributes(span *frame.Span, attributes []slog.Attr) {
	for _, a := range attributes {
		if span.Attributes == nil {
			span.Attributes = frame.Parameters{}
		}
		switch value := a.Value.Resolve(); v := value.Any().(type) {
		case bool, int64, uint64:
			span.Attributes[a.Key] = v
		case float64:
			if math.IsNaN(v) || math.IsInf(v, 0) {
				span.Attributes[a.Key] = value.String() // JSON has no such number
				continue
			}
			span.Attributes[a.Key] = v
		default:
			span.Attributes[a.Key] = clipSpanText(value.String())
		}
	}
}

func clipSpanText(text string) string {
	return strings.ToValidUTF8(text[:min(len(text), maxSpanText)], "")
}
