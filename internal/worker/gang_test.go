package worker_test

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stagemesh/stagemesh/internal/cpuset"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/runnertest"
)

func gang(t *testing.T, ranks int, mode string) *bed {
	t.Helper()
	s := settings(t, mode)
	s.Replicas = []worker.Replica{{Ranks: ranks}}
	return start(t, s)
}

func TestGangAnswersByRankZero(t *testing.T) {
	t.Parallel()
	b := gang(t, 3, "")
	outcomes, err := b.do(item(ownRank))
	if err != nil {
		t.Fatal(err)
	}
	metadata := outcomes[0].Metadata
	for name, want := range map[string]string{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "STAGEMESH_STAGE": "test", "STAGEMESH_WORKER": "0", "STAGEMESH_INCARNATION": "1"} {
		if metadata[name] != want {
			t.Errorf("%s is %q, want %q", name, metadata[name], want)
		}
	}
	if metadata["MASTER_PORT"] == "" {
		t.Error("there is no MASTER_PORT")
	}
	b.works()
	// Every rank has got every batch, the warm-ups among them.
	for rank := range 3 {
		b.logs("warm-up of 8 items", fmt.Sprintf("rank=%d", rank))
	}
}

// What ranks do together they have to do in one order.
func TestRanksGetBatchesInOneOrder(t *testing.T) {
	t.Parallel()
	s := settings(t, logOrder)
	s.Replicas, s.Slots = []worker.Replica{{Ranks: 2}}, 8
	b := start(t, s)
	var running sync.WaitGroup
	for range s.Slots {
		running.Go(func() {
			for range 40 {
				if _, err := b.do(item(1)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	running.Wait()
	b.stop()
	var order [2][]string
	for line := range strings.Lines(b.log.String()) {
		if _, metadata, ok := strings.Cut(line, `msg="has `); ok {
			words := strings.Fields(metadata)
			rank, err := strconv.Atoi(words[0])
			if err != nil {
				t.Fatal(line)
			}
			order[rank] = append(order[rank], words[1])
		}
	}
	if len(order[0]) != 8*40 || !slices.Equal(order[0], order[1]) {
		t.Errorf("rank 0 had %d batches, rank 1 %d, and the order differs", len(order[0]), len(order[1]))
	}
}

// Rank 0 may answer before the others have the batch. They get a cancel only after it.
func TestRefusedStreamEndsOnEveryRank(t *testing.T) {
	t.Parallel()
	s := settings(t, streamRows)
	s.Replicas, s.Slots = []worker.Replica{{Ranks: 4}}, 8
	b := start(t, s)
	var running sync.WaitGroup
	for range s.Slots {
		running.Go(func() {
			for range 50 {
				refusing := newCounter()
				refusing.err = runner.ErrCancelled
				if err := <-b.stream(t.Context(), item(1, runnertest.Hold), refusing); err == nil || errors.Is(err, runner.ErrCrashed) {
					t.Errorf("got %v", err)
					return
				}
			}
		})
	}
	running.Wait()
}

func TestGangDiesTogether(t *testing.T) {
	t.Parallel()
	b := gang(t, 3, "")
	ready := b.await(worker.Ready)
	if len(ready.PIDs) != 3 {
		t.Fatalf("it has processes %v", ready.PIDs)
	}
	_, err := b.do(item(rankOneDies))
	if !errors.Is(err, runner.ErrCrashed) || !strings.Contains(err.Error(), "rank 1: exit code 3") {
		t.Errorf("got %v", err)
	}
	dead := b.await(worker.Dead)
	if exits := fmt.Sprint(dead.Exits); exits != "[signal: killed exit code 3 signal: killed]" {
		t.Errorf("they ended by %s", exits)
	}
	for _, pid := range ready.PIDs {
		if testbed.IsRunning(pid) {
			t.Errorf("process %d is left", pid)
		}
	}
	b.works()
}

func TestAnyRankErrorFailsBatch(t *testing.T) {
	t.Parallel()
	b := gang(t, 2, "")
	if _, err := b.do(item(rankOneFails)); err == nil || err.Error() != "ValueError: this row is bad" {
		t.Errorf("got %v", err)
	}
	if _, err := b.do(item(runnertest.Bad)); err == nil || err.Error() != "ValueError: this row is bad" {
		t.Errorf("got %v", err)
	}
	b.works()
}

func TestReplicasHaveTheirOwnDevicesAndEnvironment(t *testing.T) {
	t.Parallel()
	s := settings(t, "")
	s.Env["A"], s.Env["B"] = "all", "all"
	s.Replicas = []worker.Replica{{Devices: []string{"0", "1"}, Env: map[string]string{"A": "own"}}, {Devices: []string{"MIG-2"}}}
	b := start(t, s)
	slots := []runner.Slot{b.acquire(), b.acquire()}
	for _, slot := range slots {
		outcomes, err := b.doOn(t.Context(), slot, item(ownRank))
		if err != nil {
			t.Fatal(err)
		}
		metadata := outcomes[0].Metadata
		got := strings.Join([]string{metadata["CUDA_VISIBLE_DEVICES"], metadata["A"], metadata["B"], metadata["WORLD_SIZE"], metadata["MASTER_PORT"]}, " ")
		if want := map[string]string{"0": "0,1 own all 1 ", "1": "MIG-2 all all 1 "}[metadata["STAGEMESH_WORKER"]]; got != want {
			t.Errorf("worker %s has %q, want %q", metadata["STAGEMESH_WORKER"], got, want)
		}
	}
}

func TestReplicasRunOnTheirCPUs(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Skip("this system cannot pin processes")
	}
	_, list, _ := strings.Cut(string(text), "Cpus_allowed_list:\t")
	list, _, _ = strings.Cut(list, "\n")
	usable, err := cpuset.Parse(list)
	if err != nil {
		t.Fatal(err)
	}
	s := settings(t, "")
	s.Replicas = nil
	for _, cpu := range usable[:min(2, len(usable))] {
		s.Replicas = append(s.Replicas, worker.Replica{CPUs: fmt.Sprint(cpu)})
	}
	b := start(t, s)
	var slots []runner.Slot
	for range s.Replicas {
		slots = append(slots, b.acquire())
	}
	for _, slot := range slots {
		outcomes, err := b.doOn(t.Context(), slot, item(ownRank))
		if err != nil {
			t.Fatal(err)
		}
		metadata := outcomes[0].Metadata
		if index := int(metadata["STAGEMESH_WORKER"][0] - '0'); metadata["cpus"] != s.Replicas[index].CPUs {
			t.Errorf("worker %d runs on %s, want %s", index, metadata["cpus"], s.Replicas[index].CPUs)
		}
	}
}
