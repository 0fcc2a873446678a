package discovery

import (
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
)

func TestOnlyNoticeableChangesArePublished(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		edit func(r *meshv1.HostRecord)
		want bool
	}{
		"nothing":            {func(*meshv1.HostRecord) {}, false},
		"one item more":      {func(r *meshv1.HostRecord) { r.InFlight++ }, false},
		"a fifth more":       {func(r *meshv1.HostRecord) { r.InFlight += 20 }, false},
		"half more":          {func(r *meshv1.HostRecord) { r.InFlight += 50 }, true},
		"none left":          {func(r *meshv1.HostRecord) { r.Running = 0 }, true},
		"a longer wait":      {func(r *meshv1.HostRecord) { r.QueueWait = durationpb.New(time.Second) }, true},
		"a wait like before": {func(r *meshv1.HostRecord) { r.QueueWait = durationpb.New(101 * time.Millisecond) }, false},
		"another version":    {func(r *meshv1.HostRecord) { r.Version = "2" }, true},
		"a worker that died": {func(r *meshv1.HostRecord) { r.Workers = []*meshv1.WorkerRecord{{State: "DEAD"}} }, true},
	} {
		old := &meshv1.HostRecord{Mesh: "m", Stage: "s", Host: "a", Version: "1", MaxInFlight: 96, Ready: true}
		old.InFlight, old.Running, old.QueueWait = 100, 2, durationpb.New(100*time.Millisecond)
		now := proto.CloneOf(old)
		test.edit(now)
		if got := differs(old, now); got != test.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}
