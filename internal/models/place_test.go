package models_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/natskv"
	"github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Hosts a and b differ in one thing each time; their records and the settings of the stage say
// where models go.
func TestModelsArePlacedByTheRecordsOfHosts(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		a     func(r *meshv1.HostRecord)
		b     func(r *meshv1.HostRecord)
		model string // its type
		// lastUse is the model's where no request waits for it.
		lastUse time.Time
		want    string
	}{
		"equal hosts share":         {want: "[a b]"},
		"a required label":          {a: labels("gpu", "1"), model: "gpu", want: "[a]"},
		"a required value":          {a: labels("gpu", "1"), b: labels("gpu", "h100"), model: "h100", want: "[b]"},
		"a preferred label":         {a: labels("disk", "1"), model: "large", want: "[a]"},
		"labels that others need":   {a: labels("gpu", "1"), model: "other", want: "[b]"},
		"no host has the label":     {model: "gpu", want: "[NO_CAPACITY]"},
		"a queue of loads":          {a: func(r *meshv1.HostRecord) { r.Cache.Queued = 9 }, want: "[b]"},
		"loads in all slots":        {a: func(r *meshv1.HostRecord) { r.Cache.Loading = 2 }, want: "[b]"},
		"more slots":                {a: func(r *meshv1.HostRecord) { r.Cache.Loading, r.Cache.LoadSlots = 2, 4 }, b: func(r *meshv1.HostRecord) { r.Cache.Loading = 2 }, want: "[a]"},
		"memory in use":             {a: func(r *meshv1.HostRecord) { r.Cache.Used.Host = 90 << 20 }, want: "[b]"},
		"many models":               {a: func(r *meshv1.HostRecord) { r.Cache.Models = 50 }, want: "[b]"},
		"a high rate":               {a: func(r *meshv1.HostRecord) { r.Cache.Rate = 1000 }, want: "[b]"},
		"a high rate, an old model": {a: func(r *meshv1.HostRecord) { r.Cache.Rate = 1000 }, lastUse: time.Now().Add(-48 * time.Hour), want: "[a]"},
		"a host that leaves":        {a: func(r *meshv1.HostRecord) { r.Draining = true }, want: "[b]"},
		"an older version":          {a: func(r *meshv1.HostRecord) { r.Version, r.StartedAt = "2", timestamppb.Now() }, want: "[a]"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			broker := testbed.StartBroker(t)
			store := table(t, broker).(*natskv.Store)
			registry := gateway(t, broker)
			if err := registry.SetStageSettings(t.Context(), "score", &meshv1.ModelSettings{Types: map[string]*meshv1.TypeConstraint{
				"gpu": {Required: []string{"gpu"}}, "h100": {Required: []string{"gpu=h100"}}, "large": {Preferred: []string{"disk"}},
			}}); err != nil {
				t.Fatal(err)
			}
			for host, edit := range map[string]func(r *meshv1.HostRecord){"a": test.a, "b": test.b} {
				announce(t, store, host, edit)
			}
			members := discovery.NewMembership(store, store, "test", slog.New(slog.DiscardHandler))
			testbed.Background(t, members.Run)
			testbed.Eventually(t, "both hosts are known", func() bool {
				known := members.Hosts()
				return len(known) == 2 && known[0].Alive && known[1].Alive
			})
			var hosts []pipeline.HostID
			for i := range 40 {
				placer := models.NewPlacer(registry, members) // which has promised nothing
				id := model.ID(fmt.Sprint("m", i))
				host, err := pipeline.HostID(""), error(nil)
				if test.lastUse.IsZero() {
					var f *fault.Fault
					if host, f = placer.Place(time.Now(), &models.Model{Model: model.Model{ID: id, Stage: "score", Type: test.model}}, &meshv1.ReplicasRecord{}, nil); f != nil {
						err = f
					}
				} else {
					register(t, registry, string(id))
					host, err = placer.Load(t.Context(), id, models.Wanted{Replicas: 1, LastUse: test.lastUse})
				}
				if err != nil {
					host = pipeline.HostID(fault.From(err).Reason)
				}
				hosts = append(hosts, host)
			}
			slices.Sort(hosts)
			if got := fmt.Sprint(slices.Compact(hosts)); got != test.want {
				t.Errorf("placed on %s, want %s", got, test.want)
			}
		})
	}
}

func labels(name, value string) func(r *meshv1.HostRecord) {
	return func(r *meshv1.HostRecord) { r.Labels = map[string]string{name: value} }
}

// announce keeps a host with 100 MiB for models announced, as one that joined a day ago.
func announce(t *testing.T, store *natskv.Store, host string, edit func(r *meshv1.HostRecord)) {
	t.Helper()
	r := &meshv1.HostRecord{
		Mesh: "test", Stage: "score", Host: host, Version: "1", Ready: true, StartedAt: timestamppb.New(time.Now().Add(-24 * time.Hour)),
		Cache: &meshv1.CacheRecord{
			Capacity: &meshv1.ModelSize{Host: 100 << 20}, Used: &meshv1.ModelSize{}, DefaultSize: &meshv1.ModelSize{Host: 1 << 20}, LoadSlots: 2,
			LoadTimes: map[string]*durationpb.Duration{},
		},
	}
	for _, modelType := range []string{"", "gpu", "h100", "large", "other", "linear"} {
		r.Cache.LoadTimes[modelType] = durationpb.New(4 * time.Second)
	}
	if edit != nil {
		edit(r)
	}
	log := slog.New(slog.DiscardHandler)
	testbed.Background(t, func(ctx context.Context) error {
		return discovery.KeepAnnounced(ctx, store, discovery.HostInstance(r), func(error) {}, log)
	})
	testbed.Background(t, func(ctx context.Context) error {
		return discovery.PublishHost(ctx, store, func() *meshv1.HostRecord { return r }, log)
	})
}

// Loads that were placed a moment ago count until the host publishes them.
func TestPlacedLoadsCountAtOnce(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	store := table(t, broker).(*natskv.Store)
	announce(t, store, "a", func(r *meshv1.HostRecord) { r.Cache.Queued = 3 })
	announce(t, store, "b", nil)
	members := discovery.NewMembership(store, store, "test", slog.New(slog.DiscardHandler))
	testbed.Background(t, members.Run)
	testbed.Eventually(t, "both hosts are known", func() bool {
		known := members.Hosts()
		return len(known) == 2 && known[0].Alive && known[1].Alive
	})
	placer, now, placed := models.NewPlacer(gateway(t, broker), members), time.Now(), map[pipeline.HostID]int{}
	place := func(now time.Time, id string) pipeline.HostID {
		t.Helper()
		host, f := placer.Place(now, &models.Model{Model: model.Model{ID: model.ID(id), Stage: "score"}}, &meshv1.ReplicasRecord{}, nil)
		if f != nil {
			t.Fatal(f)
		}
		return host
	}
	for i := range 23 {
		placed[place(now, fmt.Sprint("m", i))]++
	}
	if placed["a"] < 9 || placed["a"] > 11 {
		t.Errorf("23 loads are placed as %v; host a had three more in its queue", placed)
	}
	if host := place(now.Add(2*time.Second), "late"); host != "b" {
		t.Errorf("once what was placed must be published the next one is on %s", host)
	}
}
