package models

import (
	"reflect"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/models/placement"
	"github.com/stagemesh/stagemesh/mesh/model"
)

func TestPlacementHasTheFiguresOfARecord(t *testing.T) {
	t.Parallel()
	joined, oldest := time.Unix(1000, 0).UTC(), time.Unix(2000, 0).UTC()
	got := hostOf(discovery.Host{Alive: true, Record: &meshv1.HostRecord{
		Host: "a", Stage: "s", Version: "2", StartedAt: timestamppb.New(joined), Draining: true, Labels: map[string]string{"gpu": "h100", "zone": "x"},
		Cache: &meshv1.CacheRecord{
			Capacity: &meshv1.ModelSize{Host: 100, Device: 200}, Used: &meshv1.ModelSize{Host: 10, Device: 20}, Models: 3, Queued: 4, Loading: 5,
			OldestUse: timestamppb.New(oldest), Full: true, LoadSlots: 6, Rate: 7,
		},
	}})
	slices.Sort(got.Labels)
	want := placement.Host{
		ID: "a", Version: "2", JoinedAt: joined, Alive: true, Draining: true, Labels: []string{"gpu", "gpu=h100", "zone", "zone=x"},
		Capacity: model.Size{Host: 100, Device: 200}, Used: model.Size{Host: 10, Device: 20}, Models: 12, Queued: 4, Loading: 5,
		OldestUse: oldest, Full: true, LoadSlots: 6, Rate: 7,
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if h := hostOf(discovery.Host{Record: &meshv1.HostRecord{Cache: &meshv1.CacheRecord{}}}); !h.OldestUse.IsZero() {
		t.Errorf("without models the oldest use is %v", h.OldestUse)
	}
}
