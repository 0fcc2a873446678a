package models

import (
	"maps"
	"math"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/internal/item"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

func TestMain(m *testing.M) { testbed.Main(m) }

func TestLoadOfAReplicaIsWhatTheSettingsSay(t *testing.T) {
	t.Parallel()
	const interval = int(scaleEvery / time.Second)
	use := modelUse{requests: 100 * interval / 60, busy: scaleEvery * 45 / 100, waited: time.Duration(100*interval/60) * 50 * time.Millisecond, slots: 1}
	for name, test := range map[string]struct {
		settings *meshv1.ScaleSettings
		want     float64
	}{
		"defaults":   {nil, .5},
		"requests":   {&meshv1.ScaleSettings{RequestsPerMinute: 50}, 96. / 50},
		"busy":       {&meshv1.ScaleSettings{Busy: .3}, 1.5},
		"queue time": {&meshv1.ScaleSettings{QueueTime: durationpb.New(25 * time.Millisecond)}, 2},
		"all":        {&meshv1.ScaleSettings{RequestsPerMinute: 1000, Busy: 1, QueueTime: durationpb.New(time.Second)}, .45},
	} {
		if got := use.load(test.settings); math.Abs(got-test.want) > .001 {
			t.Errorf("%s: it is %v, want %v", name, got, test.want)
		}
	}
	if got := (modelUse{}).load(&meshv1.ScaleSettings{QueueTime: durationpb.New(time.Second)}); got != 0 {
		t.Errorf("without requests it is %v", got)
	}
}

func TestUsesAreThoseSinceTheLastTime(t *testing.T) {
	t.Parallel()
	s := &set{uses: map[model.ID]modelUse{}, Models: &Models{Settings: Settings{Loader: inproc.NewModels(inproc.Settings{Concurrency: 4}, inproc.Models{}, nil)}}}
	a, b := payload.ModelRef{Model: "a"}, payload.ModelRef{Model: "b"}
	s.Ran(item.Ran{Model: a, Requests: 1, Waited: 2 * time.Second, Took: time.Second})
	s.Ran(item.Ran{Model: a, Requests: 2, Waited: 3 * time.Second, Took: 2 * time.Second})
	s.Ran(item.Ran{Model: b, Limit: &batch.Limit{Most: 1}, Requests: 1, Waited: time.Second, Took: time.Second})
	want := map[model.ID]modelUse{
		"a": {requests: 3, busy: 3 * time.Second, waited: 5 * time.Second, slots: 4},
		"b": {requests: 1, busy: time.Second, waited: time.Second, slots: 1},
	}
	if got := s.takeUses(); !maps.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if s.rate != 24 {
		t.Errorf("%d requests a minute, want 24 after four in ten seconds", s.rate)
	}
	if got := s.takeUses(); len(got) > 0 || s.rate != 0 {
		t.Errorf("without requests there are %v, %d a minute", got, s.rate)
	}
}
