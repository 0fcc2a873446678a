package worker_test

import (
	"testing"

	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/runnertest"
)

func conforms(t *testing.T, mode string, edit func(s *worker.Settings, slots int)) {
	t.Helper()
	runnertest.Test(t, func(t *testing.T, slots int) runner.Runner {
		s := settings(t, mode)
		edit(&s, slots)
		r, err := worker.New(s)
		if err != nil {
			t.Fatal(err)
		}
		return r
	})
}

func streamConforms(t *testing.T, edit func(s *worker.Settings, slots int)) {
	t.Helper()
	runnertest.TestStream(t, func(t *testing.T, slots int) runner.Runner {
		s := settings(t, streamRows)
		edit(&s, slots)
		r, err := worker.New(s)
		if err != nil {
			t.Fatal(err)
		}
		return r
	})
}

func TestOneWorkerOfManyStreamsIsARunner(t *testing.T) {
	t.Parallel()
	streamConforms(t, func(s *worker.Settings, slots int) { s.Slots = slots })
}

func TestManyWorkersThatStreamAreARunner(t *testing.T) {
	t.Parallel()
	streamConforms(t, func(s *worker.Settings, slots int) { s.Replicas = make([]worker.Replica, slots) })
}

func TestGangsThatStreamAreARunner(t *testing.T) {
	t.Parallel()
	streamConforms(t, func(s *worker.Settings, slots int) {
		s.Slots, s.Replicas = slots, []worker.Replica{{Ranks: 2}}
	})
}

func TestOneWorkerOfManySlotsIsARunner(t *testing.T) {
	t.Parallel()
	conforms(t, "", func(s *worker.Settings, slots int) { s.Slots = slots })
}

func TestManyWorkersAreARunner(t *testing.T) {
	t.Parallel()
	conforms(t, "", func(s *worker.Settings, slots int) { s.Replicas = make([]worker.Replica, slots) })
}

func TestGangsAreARunner(t *testing.T) {
	t.Parallel()
	conforms(t, "", func(s *worker.Settings, slots int) {
		s.Slots, s.Replicas = slots, []worker.Replica{{Ranks: 2}}
	})
}

func TestSlowlyWritingWorkerIsARunner(t *testing.T) {
	t.Parallel()
	conforms(t, bytewise, func(s *worker.Settings, slots int) { s.Slots = slots })
}
