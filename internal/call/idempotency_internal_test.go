package call

import (
	"math"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestKeyIsFreeWithoutABindingAnswer(t *testing.T) {
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
		want   keyStatus
	}{
		"nobody has it":                        {nil, nil, false, keyFree},
		"it runs":                              {held(mine, time.Second), nil, false, keyRunning},
		"another runs":                         {held(others, time.Second), nil, false, keyMismatched},
		"it is answered":                       {held(mine, time.Second), answered(nil), false, keyAnswered},
		"it is answered, and its time over":    {held(mine, -time.Hour), answered(nil), false, keyAnswered},
		"another is answered":                  {held(others, -time.Hour), answered(nil), false, keyMismatched},
		"it failed for good":                   {held(mine, time.Second), answered(final), false, keyAnswered},
		"another failed for good":              {held(others, time.Second), answered(final), false, keyMismatched},
		"it may succeed later":                 {held(mine, time.Second), answered(retryable), false, keyFree},
		"another may succeed later":            {held(others, time.Second), answered(retryable), false, keyFree},
		"it was late":                          {held(mine, time.Second), answered(fault.New(fault.DeadlineExceeded, "")), false, keyFree},
		"it was cancelled":                     {held(mine, time.Second), answered(fault.New(fault.Cancelled, "")), false, keyFree},
		"its time is over":                     {held(mine, -grace-time.Millisecond), nil, false, keyFree},
		"another's time is over":               {held(others, -grace-time.Millisecond), nil, false, keyFree},
		"its time is just over":                {held(mine, -grace/2), nil, false, keyRunning},
		"its queue is lost":                    {held(mine, time.Second), nil, true, keyFree},
		"it was answered before the loss":      {held(mine, time.Second), answered(nil), true, keyAnswered},
		"it is released":                       {released(mine), nil, false, keyFree},
		"it is released, and the answer late":  {released(mine), answered(nil), false, keyAnswered},
		"it is released by its failure":        {released(mine), answered(retryable), false, keyFree},
		"another is released":                  {released(others), nil, false, keyFree},
		"another is released, with its answer": {released(others), answered(nil), false, keyFree},
	} {
		state := keyState{record: store.KeyRecord{Seq: 1, Claim: test.claim}, result: test.result, isLost: test.lost}
		if got := state.status(mine, now); got != test.want {
			t.Errorf("%s: %d, want %d", name, got, test.want)
		}
	}
}

func TestRequestKeepsItsKeyWhileItRunsOrIsAnswered(t *testing.T) {
	t.Parallel()
	queued, rejected := publishOutcome{receipt: bus.Receipt{Seq: 1}}, publishOutcome{err: bus.ErrQueueFull}
	for name, test := range map[string]struct {
		ended               fault.Reason
		answered, cancelled bool
		tries               int
		latest              publishOutcome
		frees               bool
	}{
		"answered by a final fault":             {ended: fault.RunnerFailed, answered: true, tries: 1, latest: queued},
		"answered, and not as it was asked for": {ended: fault.InvalidRequest, answered: true, tries: 1, latest: queued},
		"answered by a retryable fault":         {ended: fault.RunnerOutOfMemory, answered: true, tries: 1, latest: queued, frees: true},
		"answered that it was cancelled":        {ended: fault.Cancelled, answered: true, tries: 1, latest: queued, frees: true},
		"cancelled here":                        {ended: fault.Cancelled, cancelled: true, tries: 1, latest: queued, frees: true},
		"left by its caller":                    {ended: fault.Cancelled, tries: 1, latest: queued},
		"left, and perhaps queued":              {ended: fault.Cancelled, tries: 2, latest: rejected},
		"left, and never queued":                {ended: fault.Cancelled, tries: 1, latest: rejected, frees: true},
		"read too slowly":                       {ended: fault.SlowReader, tries: 1, latest: queued},
		"its answer has a gap":                  {ended: fault.StreamInterrupted, tries: 1, latest: queued},
		"its answer cannot be read":             {ended: fault.Internal, tries: 1, latest: queued},
		"out of time":                           {ended: fault.DeadlineExceeded, tries: 1, latest: queued, frees: true},
		"lost with its queue":                   {ended: fault.QueueLost, tries: 1, latest: queued, frees: true},
		"rejected":                              {ended: fault.QueueFull, tries: 1, latest: rejected, frees: true},
		"too large":                             {ended: fault.PayloadTooLarge, frees: true},
		"its gateway stopped":                   {ended: fault.ShuttingDown, tries: 1, latest: queued},
		"its answer finds no space":             {ended: fault.StoreFull, tries: 1, latest: queued},
		"answered that nothing is stored":       {ended: fault.StoreFull, answered: true, tries: 1, latest: queued, frees: true},
		"refused by a full store":               {ended: fault.StoreFull, tries: 1, latest: rejected, frees: true},
		"answered by a host that stops":         {ended: fault.ShuttingDown, answered: true, tries: 1, latest: queued, frees: true},
	} {
		x := &call{
			pending: pendingCall(t, test.cancelled), progress: progress{isFinal: test.answered},
			sending: sending{tries: test.tries, latest: published(test.latest)},
		}
		if got := x.freesKey(fault.New(test.ended, "")); got != test.frees {
			t.Errorf("%s: %t, want %t", name, got, test.frees)
		}
	}
}

// pendingCall is a call that may have been cancelled.
func pendingCall(t *testing.T, isCancelled bool) *pending {
	t.Helper()
	table, p := tableOf(1, 0), &pending{execution: "execution", env: &envelope.Envelope{RequestID: "request"}}
	if err := table.register(p); err != nil {
		t.Fatal(err)
	}
	if isCancelled {
		table.cancel("request", "", cancelledFault())
	}
	return p
}

// fullRequest is a request with every field.
func fullRequest() *request.Request {
	return &request.Request{
		Pipeline: "p", IdempotencyKey: "k", Timeout: time.Second, Priority: 1, Durability: pipeline.File,
		Inputs: []payload.Part{
			{Name: "a", Blob: payload.Blob{ContentType: "text/plain", Data: []byte("xy")}, Parameters: payload.Parameters{"p": payload.Int64(1)}},
			payload.OfTensor("b", tensor.Tensor{Datatype: tensor.Uint8, Shape: []int64{2, 1}, Raw: []byte("xy")}),
		},
		Parameters: payload.Parameters{"a": payload.Bool(true), "b": payload.Double(0.5), "c": payload.String("x")},
		Steps: map[pipeline.StepName]pipeline.StepOptions{
			"one": {Model: payload.ModelRef{Model: "m", Version: "1"}, Parameters: payload.Parameters{"d": payload.Uint64(math.MaxUint64)}},
			"two": {Model: payload.ModelRef{Alias: "x"}},
		},
		Metadata: map[string]string{"user": "u", "group": "g"},
		Outputs:  []string{"out"},
		Trace:    envelope.Trace{Parent: "x"},
	}
}

func TestDigestCoversWhatRunnersSee(t *testing.T) {
	t.Parallel()
	same := digest(fullRequest())
	for range 100 { // maps have no order
		if digest(fullRequest()) != same {
			t.Fatal("one request has two digests")
		}
	}
	for name, edit := range map[string]func(*request.Request){
		"outputs":    func(r *request.Request) { r.Outputs = nil },
		"timeout":    func(r *request.Request) { r.Timeout = 0 },
		"priority":   func(r *request.Request) { r.Priority = 0 },
		"durability": func(r *request.Request) { r.Durability = pipeline.Memory },
		"trace":      func(r *request.Request) { r.Trace = envelope.Trace{} },
	} {
		r := fullRequest()
		edit(r)
		if digest(r) != same {
			t.Errorf("%s: another digest", name)
		}
	}
	seen := map[[32]byte]string{same: "the whole"}
	for name, edit := range map[string]func(*request.Request){
		"no input":             func(r *request.Request) { r.Inputs = nil },
		"one input":            func(r *request.Request) { r.Inputs = r.Inputs[:1] },
		"inputs the other way": func(r *request.Request) { r.Inputs[0], r.Inputs[1] = r.Inputs[1], r.Inputs[0] },
		"another name":         func(r *request.Request) { r.Inputs[0].Name = "b" },
		"other bytes":          func(r *request.Request) { r.Inputs[0].Blob.Data = []byte("xz") },
		"text cut elsewhere": func(r *request.Request) {
			r.Inputs[0].Blob = payload.Blob{ContentType: "text/plainx", Data: []byte("y")}
		},
		"another type":       func(r *request.Request) { r.Inputs[0].Blob.ContentType = "" },
		"a part's parameter": func(r *request.Request) { r.Inputs[0].Parameters = nil },
		"its value's type":   func(r *request.Request) { r.Inputs[0].Parameters = payload.Parameters{"p": payload.Uint64(1)} },
		"another shape":      func(r *request.Request) { r.Inputs[1].Tensor.Shape = []int64{1, 2} },
		"fewer axes":         func(r *request.Request) { r.Inputs[1].Tensor.Shape = []int64{2} },
		"another datatype":   func(r *request.Request) { r.Inputs[1].Tensor.Datatype = tensor.Int8 },
		"a tensor's bytes":   func(r *request.Request) { r.Inputs[1].Tensor.Raw = []byte("yx") },
		"no parameters":      func(r *request.Request) { r.Parameters = nil },
		"a parameter":        func(r *request.Request) { r.Parameters["a"] = payload.Bool(false) },
		"a parameter more":   func(r *request.Request) { r.Parameters["e"] = payload.String("") },
		"no steps":           func(r *request.Request) { r.Steps = nil },
		"a step's model":     func(r *request.Request) { r.Steps["two"] = pipeline.StepOptions{Model: payload.ModelRef{Model: "x"}} },
		"a step's parameter": func(r *request.Request) {
			r.Steps["two"] = pipeline.StepOptions{Parameters: payload.Parameters{"d": payload.Int64(1)}}
		},
		"no metadata":           func(r *request.Request) { r.Metadata = nil },
		"whom it is for":        func(r *request.Request) { r.Metadata["user"] = "v" },
		"metadata cut elsewise": func(r *request.Request) { r.Metadata = map[string]string{"use": "ru", "group": "g"} },
	} {
		r := fullRequest()
		edit(r)
		d := digest(r)
		if as, ok := seen[d]; ok {
			t.Errorf("%s: the digest of %s", name, as)
		}
		seen[d] = name
	}
}
