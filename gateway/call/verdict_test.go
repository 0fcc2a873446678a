package call

import (
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/store"
)

func TestAKeyIsFreeExactlyWhereNoAnswerBindsAndNoneWillCome(t *testing.T) {
	t.Parallel()
	now := time.Now()
	mine, others := envelope.Digest{1}, envelope.Digest{2}
	answered := func(f *fault.Fault) *envelope.Result { return &envelope.Result{Reply: &envelope.Reply{Fault: f}} }
	held := func(d envelope.Digest, left time.Duration) *envelope.Claim {
		return &envelope.Claim{Digest: d, Deadline: now.Add(left)}
	}
	released := func(d envelope.Digest) *envelope.Claim { return &envelope.Claim{Digest: d, Released: true} }
	retryable, final := fault.New(fault.QueueFull, ""), fault.New(fault.RunnerFailed, "")
	for name, test := range map[string]struct {
		claim  *envelope.Claim
		result *envelope.Result
		lost   bool
		want   verdict
	}{
		"nobody has it":                        {nil, nil, false, free},
		"it runs":                              {held(mine, time.Second), nil, false, running},
		"another runs":                         {held(others, time.Second), nil, false, mismatched},
		"it is answered":                       {held(mine, time.Second), answered(nil), false, finished},
		"it is answered, and its time over":    {held(mine, -time.Hour), answered(nil), false, finished},
		"another is answered":                  {held(others, -time.Hour), answered(nil), false, mismatched},
		"it failed for good":                   {held(mine, time.Second), answered(final), false, finished},
		"another failed for good":              {held(others, time.Second), answered(final), false, mismatched},
		"it may succeed later":                 {held(mine, time.Second), answered(retryable), false, free},
		"another may succeed later":            {held(others, time.Second), answered(retryable), false, free},
		"it was late":                          {held(mine, time.Second), answered(fault.New(fault.DeadlineExceeded, "")), false, free},
		"it was called off":                    {held(mine, time.Second), answered(fault.New(fault.Cancelled, "")), false, free},
		"its time is over":                     {held(mine, -grace-time.Millisecond), nil, false, free},
		"another's time is over":               {held(others, -grace-time.Millisecond), nil, false, free},
		"its time is just over":                {held(mine, -grace/2), nil, false, running},
		"its queue is lost":                    {held(mine, time.Second), nil, true, free},
		"it was answered before the loss":      {held(mine, time.Second), answered(nil), true, finished},
		"it is released":                       {released(mine), nil, false, free},
		"it is released, and the answer late":  {released(mine), answered(nil), false, finished},
		"it is released by its failure":        {released(mine), answered(retryable), false, free},
		"another is released":                  {released(others), nil, false, free},
		"another is released, with its answer": {released(others), answered(nil), false, free},
	} {
		at := seen{record: store.KeyRecord{Seq: 1, Claim: test.claim}, result: test.result, lost: test.lost}
		if got := at.verdict(mine, now); got != test.want {
			t.Errorf("%s: %d, want %d", name, got, test.want)
		}
	}
}

func TestARequestKeepsItsKeyWhereItGoesOnOrIsAnswered(t *testing.T) {
	t.Parallel()
	queued, refused := published{receipt: bus.Receipt{Seq: 1}}, published{err: bus.ErrQueueFull}
	for name, test := range map[string]struct {
		ended               fault.Reason
		answered, calledOff bool
		tries               int
		latest              published
		frees               bool
	}{
		"answered by a final fault":             {ended: fault.RunnerFailed, answered: true, tries: 1, latest: queued},
		"answered, and not as it was asked for": {ended: fault.InvalidRequest, answered: true, tries: 1, latest: queued},
		"answered by a retryable fault":         {ended: fault.RunnerOutOfMemory, answered: true, tries: 1, latest: queued, frees: true},
		"answered that it was called off":       {ended: fault.Cancelled, answered: true, tries: 1, latest: queued, frees: true},
		"called off here":                       {ended: fault.Cancelled, calledOff: true, tries: 1, latest: queued, frees: true},
		"left by its caller":                    {ended: fault.Cancelled, tries: 1, latest: queued},
		"left, and perhaps queued":              {ended: fault.Cancelled, tries: 2, latest: refused},
		"left, and never queued":                {ended: fault.Cancelled, tries: 1, latest: refused, frees: true},
		"read too slowly":                       {ended: fault.SlowReader, tries: 1, latest: queued},
		"its answer has a gap":                  {ended: fault.StreamInterrupted, tries: 1, latest: queued},
		"its answer cannot be read":             {ended: fault.Internal, tries: 1, latest: queued},
		"out of time":                           {ended: fault.DeadlineExceeded, tries: 1, latest: queued, frees: true},
		"lost with its queue":                   {ended: fault.QueueLost, tries: 1, latest: queued, frees: true},
		"refused":                               {ended: fault.QueueFull, tries: 1, latest: refused, frees: true},
		"too large":                             {ended: fault.PayloadTooLarge, frees: true},
	} {
		c := &exchange{answered: test.answered, calledOff: test.calledOff, tries: test.tries, latest: &test.latest, published: make(chan published, 1)}
		if got := c.frees(fault.New(test.ended, "")); got != test.frees {
			t.Errorf("%s: %t, want %t", name, got, test.frees)
		}
	}
}
