package stagehost

import (
	"math"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
)

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
