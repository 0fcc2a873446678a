package discovery

import (
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

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
		"another label":      {func(r *meshv1.HostRecord) { r.Labels = map[string]string{"gpu": "2"} }, true},

		"no models any more":       {func(r *meshv1.HostRecord) { r.Cache = nil }, true},
		"less memory for models":   {func(r *meshv1.HostRecord) { r.Cache.Capacity.Host-- }, true},
		"a model more":             {func(r *meshv1.HostRecord) { r.Cache.Models++; r.Cache.Used.Host += 50; r.Cache.Used.Device += 50 }, false},
		"more memory used":         {func(r *meshv1.HostRecord) { r.Cache.Used.Host += 51 }, true},
		"more device memory used":  {func(r *meshv1.HostRecord) { r.Cache.Used.Device += 51 }, true},
		"full":                     {func(r *meshv1.HostRecord) { r.Cache.Full = true }, true},
		"another load slot":        {func(r *meshv1.HostRecord) { r.Cache.LoadSlots++ }, true},
		"one load more":            {func(r *meshv1.HostRecord) { r.Cache.Loading++ }, false},
		"half the queue more":      {func(r *meshv1.HostRecord) { r.Cache.Queued += 4 }, true},
		"an oldest use just later": {func(r *meshv1.HostRecord) { r.Cache.OldestUse.Seconds += 60 }, false},
		"an oldest use later":      {func(r *meshv1.HostRecord) { r.Cache.OldestUse.Seconds += 61 }, true},
		"a fifth of the rate more": {func(r *meshv1.HostRecord) { r.Cache.Rate += 200 }, false},
		"half the rate more":       {func(r *meshv1.HostRecord) { r.Cache.Rate += 500 }, true},
		"no requests any more":     {func(r *meshv1.HostRecord) { r.Cache.Rate = 0 }, true},
	} {
		old := &meshv1.HostRecord{Mesh: "m", Stage: "s", Host: "a", Version: "1", MaxInFlight: 96, Ready: true}
		old.InFlight, old.Running, old.QueueWait = 100, 2, durationpb.New(100*time.Millisecond)
		old.Cache = &meshv1.CacheRecord{
			Capacity: &meshv1.ModelSize{Host: 1000, Device: 1000}, Used: &meshv1.ModelSize{Host: 500, Device: 500}, Models: 10,
			LoadSlots: 2, Queued: 6, Loading: 2, Rate: 1000, OldestUse: timestamppb.New(time.Unix(1000, 0)),
		}
		now := proto.CloneOf(old)
		test.edit(now)
		if got := differs(old, now); got != test.want {
			t.Errorf("%s: %t", name, got)
		}
	}
	now := &meshv1.HostRecord{Cache: &meshv1.CacheRecord{Rate: minRateChange}}
	if differs(&meshv1.HostRecord{Cache: &meshv1.CacheRecord{}}, now) {
		t.Error("a few requests now and then")
	}
}
