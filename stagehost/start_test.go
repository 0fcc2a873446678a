package stagehost_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// cannotStart runs a host and returns why it ended; it must not become ready.
func cannotStart(t *testing.T, edit func(*stagehost.Settings)) error {
	t.Helper()
	var said logs
	s := stagehost.Settings{
		Mesh: mesh, Stage: stage, Host: "host", Runner: inproc.Each(inproc.Settings{}, echo),
		Bus: bus.Settings{URL: "nats://127.0.0.1:1"}, Meter: &testbed.Counts{},
	}
	said.into(&s)
	s.Batch.MaxSize = 1
	edit(&s)
	h, err := stagehost.New(s)
	if err != nil {
		t.Fatal(err)
	}
	ended := h.Run(t.Context())
	if ended == nil {
		t.Fatal("ended without a reason")
	}
	if err := h.WaitReady(t.Context()); err == nil || slices.Contains(said.of(slog.LevelDebug), "ready") {
		t.Error("became ready")
	}
	return ended
}

func TestFailedStartNamesItsCause(t *testing.T) {
	t.Parallel()
	err := cannotStart(t, func(s *stagehost.Settings) {
		s.Runner = inproc.New(inproc.Settings{Setup: func(context.Context) error { return errors.New("no such model") }}, nil)
	})
	if want := "stage stage: start of the runner: no such model"; err.Error() != want {
		t.Errorf("says %q, want %q", err, want)
	}
}

// A model may take minutes to load: a taken address is reported before.
func TestTakenAddressFailsBeforeTheRunnerStarts(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { taken.Close() })
	address := taken.Addr().String()
	ended := cannotStart(t, func(s *stagehost.Settings) {
		s.Listen = address
		s.Runner = inproc.New(inproc.Settings{Setup: func(context.Context) error {
			t.Error("the runner starts")
			return nil
		}}, nil)
	})
	// Others name the key of the address, and find it by what kind of error it is.
	if op, ok := errors.AsType[*net.OpError](ended); !ok || op.Op != "listen" || !errors.Is(ended, syscall.EADDRINUSE) {
		t.Errorf("the reason is %v", ended)
	}
	for _, want := range []string{"stage stage: listen", address, "listen on another"} {
		if !strings.Contains(ended.Error(), want) {
			t.Errorf("%q does not say %q", ended, want)
		}
	}
}

func TestFailedStartFreesTheAddress(t *testing.T) {
	t.Parallel()
	address := ""
	refused := errors.New("refused")
	err := cannotStart(t, func(s *stagehost.Settings) {
		free, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		address = free.Addr().String()
		free.Close()
		s.Listen = address
		s.Runner = inproc.New(inproc.Settings{Setup: func(context.Context) error { return refused }}, nil)
	})
	if !errors.Is(err, refused) {
		t.Fatal(err)
	}
	again, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatalf("the host still has its address: %v", err)
	}
	again.Close()
}
