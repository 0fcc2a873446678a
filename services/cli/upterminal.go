package cli

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
)

// terminalHandler writes what a worker's author looks for as the worker wrote it: lines of
// output, tracebacks, what a start is doing, each after its stage and request. Other records
// are the Handler's.
type terminalHandler struct {
	slog.Handler
	screen *screenState
	// attrs were given to With.
	attrs []slog.Attr
}

// screenState is what all handlers of one terminal share.
type screenState struct {
	mu  sync.Mutex
	out io.Writer
	// cause is the message of the last worker state ERROR; isShown is true once it is on the screen.
	cause   string
	isShown bool
}

func newTerminalHandler(out io.Writer, others slog.Handler) *terminalHandler {
	return &terminalHandler{Handler: others, screen: &screenState{out: out}}
}

// WithAttrs implements slog.Handler.
func (h *terminalHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &terminalHandler{h.Handler, h.screen, append(h.attrs[:len(h.attrs):len(h.attrs)], attrs...)}
}

// Handle implements slog.Handler.
func (h *terminalHandler) Handle(ctx context.Context, r slog.Record) error {
	attrs := h.attrs[:len(h.attrs):len(h.attrs)]
	r.Attrs(func(a slog.Attr) bool {
		attrs = append(attrs, a)
		return true
	})
	text := map[string]string{}
	for _, a := range attrs {
		text[a.Key] = a.Value.String()
	}
	h.screen.mu.Lock()
	defer h.screen.mu.Unlock()
	_, isOutput := text["stream"]
	trace, isException := text["traceback"]
	switch {
	case isOutput:
		return h.screen.write(text, r.Message)
	case isException:
		if trace == "" {
			trace = text["error"]
		}
		h.screen.isShown = h.screen.isShown || strings.Contains(trace+text["error"], strings.TrimRight(h.screen.cause, ": "))
		return h.screen.write(text, trace)
	case text["state"] == "STARTUP" && text["message"] != "":
		return h.screen.write(text, text["message"])
	case text["state"] == "ERROR":
		h.screen.cause, h.screen.isShown = text["message"], false // its exception may follow
		return nil
	}
	out := slog.NewRecord(r.Time, r.Level, r.Message, r.PC)
	for _, a := range attrs {
		switch cause := h.screen.cause; {
		case cause == "" || !strings.Contains(a.Value.String(), cause):
			out.AddAttrs(a)
		case !h.screen.isShown && (text["exits"] != "" || r.Level >= slog.LevelError): // no exception came
			h.screen.isShown = true
			if err := h.screen.write(text, cause); err != nil {
				return err
			}
		}
	}
	return h.Handler.Handle(ctx, out)
}

// write writes a text after its place: on the same line if it is one line.
func (s *screenState) write(attrs map[string]string, text string) error {
	place, gap := attrs["stage"], " "
	if attrs["request"] != "" {
		place += ", request " + attrs["request"]
	}
	if strings.Contains(text, "\n") {
		gap = "\n"
	}
	_, err := fmt.Fprintf(s.out, "%s:%s%s\n", place, gap, text)
	return err
}
