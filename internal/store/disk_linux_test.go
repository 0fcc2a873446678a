package store_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime/metrics"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// smallDisk returns a folder with a filesystem of its own.
func smallDisk(t *testing.T, size string) string {
	t.Helper()
	folder := t.TempDir()
	if err := syscall.Mount("tmpfs", folder, "tmpfs", 0, "size="+size); err != nil {
		t.Fatalf("this test mounts a tmpfs, which needs root, or CAP_SYS_ADMIN in a container: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(folder, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return folder
}

// limitHeap ends the program if the heap grows by more: a broker that goes wild would take all memory.
func limitHeap(t *testing.T, most uint64) {
	t.Helper()
	heap := func() uint64 {
		sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
		metrics.Read(sample)
		return sample[0].Value.Uint64()
	}
	began, done, ended := heap(), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for tick := time.Tick(5 * time.Millisecond); ; {
			if now := heap(); now > began+most {
				panic(fmt.Sprintf("the heap has grown from %d MiB to %d", began>>20, now>>20))
			}
			select {
			case <-tick:
			case <-done:
				return
			}
		}
	}()
	t.Cleanup(func() { close(done); <-ended })
}

// The broker's write error used to list all sequences up to those of the queue, 22 GB in seconds.
func TestFullDiskCostsNoMemory(t *testing.T) {
	disk := smallDisk(t, "8m")
	b := testbed.StartBroker(t, func(o *server.Options) { o.StoreDir = disk }).Connect(mesh, func(s *bus.Settings) { s.AckTimeout = time.Second })
	s := newJobs(t, b, store.JobQueueSettings{})
	fill := filepath.Join(disk, "fill")
	file, err := os.Create(fill)
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = file.Write(make([]byte, 4<<10))
	}
	if err := os.Truncate(fill, 7<<20); err != nil { // less than the job is left
		t.Fatal(err)
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	limitHeap(t, 512<<20)
	random := rand.NewChaCha8([32]byte{})
	body := make([]byte, 4<<20)
	_, _ = random.Read(body)
	for range 2 {
		job := &meshv1.QueuedJob{Job: new(inferencev1.Job), Payload: &meshv1.QueuedJob_Http{Http: &inferencev1.HttpCall{Body: bytes.Clone(body)}}}
		if _, added, err := s.Submit(t.Context(), pipeline.NewJobID(queue), "", store.JobHeader{Deadline: time.Now().Add(time.Hour)}, job); added || err == nil {
			t.Errorf("a disk without space took a job: %t, %v", added, err)
		}
	}
	for stream := range b.JetStream().ListStreams(t.Context()).Info() {
		if stream.State.LastSeq > 1000 || stream.State.FirstSeq > 1000 {
			t.Errorf("stream %s is at number %d", stream.Config.Name, stream.State.LastSeq)
		}
	}
}
