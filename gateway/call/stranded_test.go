package call

import (
	"context"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/gateway/admission"
	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
)

func TestAStrandedCallTakesBackWhatIsItsOwn(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		// published is nil where the queue has not said yet.
		published *published
		tries     int
		seq       uint64
		want      uint64
	}{
		"queued":                          {&published{receipt: bus.Receipt{Seq: 7}}, 1, 0, 7},
		"found queued at the second try":  {&published{receipt: bus.Receipt{Seq: 7, Duplicate: true}}, 2, 0, 7},
		"swallowed: the id was another's": {&published{receipt: bus.Receipt{Seq: 7, Duplicate: true}}, 1, 0, 0},
		"refused":                         {&published{err: bus.ErrQueueFull}, 1, 0, 0},
		"not confirmed yet":               {nil, 1, 0, 0},
		"its answer has begun":            {&published{receipt: bus.Receipt{Seq: 7}}, 1, 1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var took uint64
			o := &callOffs{inside: admission.NewLimiter(1), turns: make(chan struct{}, 1), takeBack: func(_ context.Context, _ bus.Message, seq uint64) (bool, error) {
				took = seq
				return false, nil // it has gone on meanwhile
			}}
			c := &exchange{
				service: &Service{callOffs: o}, env: &envelope.Envelope{Deadline: time.Now().Add(time.Hour)},
				published: make(chan published, 1), tries: test.tries, seq: test.seq,
			}
			if test.published != nil {
				c.published <- *test.published
			}
			if err := c.withdraw(t.Context()); err != nil {
				t.Error(err)
			}
			if took != test.want {
				t.Errorf("took back item %d, want %d", took, test.want)
			}
		})
	}
}
