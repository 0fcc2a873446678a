package worker_test

import (
	"testing"

	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/runnertest"
)

// factory returns what makes the runners of a suite: with the settings of a mode, edited.
func factory(settings func(t testing.TB, mode string) worker.Settings, mode string, edit func(s *worker.Settings, slots int)) func(t *testing.T, slots int) runner.Runner {
	return func(t *testing.T, slots int) runner.Runner {
		s := settings(t, mode)
		edit(&s, slots)
		r, err := worker.New(s)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
}

func conforms(t *testing.T, mode string, edit func(s *worker.Settings, slots int)) {
	t.Helper()
	runnertest.Test(t, factory(settings, mode, edit))
}

func streamConforms(t *testing.T, edit func(s *worker.Settings, slots int)) {
	t.Helper()
	runnertest.TestStream(t, factory(settings, streamRows, edit))
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
