package stagehost_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// narrow are loads of which model "narrow" runs one batch at a time, each when the gate lets it,
// and reports how many items it had. A batch of several with the text "bad" fails.
type narrow struct {
	loads
	gate  chan struct{}
	ended chan int

	mu            sync.Mutex
	running, most int
}

func newNarrow() *narrow {
	n := &narrow{gate: make(chan struct{}), ended: make(chan int, roomy)}
	n.describe = func(id model.ID) runner.LoadedModel {
		if id == "narrow" {
			return runner.LoadedModel{MaxConcurrency: 1}
		}
		return runner.LoadedModel{}
	}
	n.run = func(id model.ID, batch runner.Batch) error {
		if id != "narrow" {
			return nil
		}
		defer n.count(-1)
		n.count(1)
		<-n.gate
		for _, item := range batch.Items {
			if first(item.Inputs) == "bad" && len(batch.Items) > 1 {
				n.ended <- 0
				return errors.New("one of them is bad")
			}
		}
		n.ended <- len(batch.Items)
		return nil
	}
	return n
}

func (n *narrow) count(by int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.running += by
	n.most = max(n.most, n.running)
}

func TestModelOfOneBatchAtATimeLeavesSlotsToOthers(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	b.register("narrow", "wide")
	n := newNarrow()
	h := b.host(&n.loads, 8, maxSize(4))
	var calls []*call
	for i := range 12 {
		text := fmt.Sprint(i)
		if i == 5 {
			text = "bad" // its batch runs again in halves
		}
		calls = append(calls, b.ask(text, of("narrow"), at(h)))
	}
	testbed.Eventually(t, "a batch runs", func() bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.running > 0
	})
	for ran := 0; ran < len(calls); {
		checkModel(t, "wide", b.ask("x", of("wide"), at(h)))
		n.gate <- struct{}{}
		ran += testbed.Receive(t, "end of a batch", n.ended)
	}
	for _, c := range calls {
		checkModel(t, "narrow", c)
	}
	if n.most != 1 {
		t.Errorf("%d batches ran at a time", n.most)
	}
}

func TestOverflowOfAModelIsOverloaded(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	b.register("narrow")
	n := newNarrow()
	const places, more = 16, 4
	h := b.host(&n.loads, 8, maxSize(1), func(s *stagehost.Settings) { s.MaxInFlight = 3 * places })
	calls := []*call{b.ask("first", of("narrow"), at(h))}
	testbed.Eventually(t, "it runs", func() bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.running > 0
	})
	for i := range places - 1 {
		calls = append(calls, b.ask(fmt.Sprint(i), of("narrow"), at(h)))
	}
	h.awaitItems(places)
	for range more {
		f := b.ask("too many", of("narrow"), at(h)).fault(fault.Overloaded)
		if f.RetryAfter <= 0 || !strings.Contains(f.Message, "narrow") {
			t.Errorf("the fault is %+v", f)
		}
	}
	// A durable request waits in its queue.
	calls = append(calls, b.ask("durable", of("narrow"), func(e *envelope.Envelope) { e.Durability = pipeline.File }))
	h.awaitItems(places + more + 1)
	close(n.gate)
	for _, c := range calls {
		checkModel(t, "narrow", c)
	}
}

func TestModelHasItsOwnInputsAndOutputs(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	b.register("own", "none", "broken", "liar")
	part := func(name string, shape ...int64) []runner.PartSpec {
		return []runner.PartSpec{{Name: name, Datatype: tensor.FP32, Shape: shape}}
	}
	specs := map[model.ID]*runner.Spec{
		"own":    {BatchAxis: runner.BatchRows, Inputs: part("x", -1, 2), Outputs: part("x", -1, 2)},
		"liar":   {BatchAxis: runner.BatchRows, Inputs: part("x", -1, 2), Outputs: part("y", -1, 2)},
		"broken": {Inputs: []runner.PartSpec{{Name: "x", ContentTypes: []string{"application/json"}, Schema: []byte(`{"type": 7}`)}}},
	}
	goOn := make(chan struct{})
	l := &loads{describe: func(id model.ID) runner.LoadedModel {
		if id == "own" {
			<-goOn
		}
		return runner.LoadedModel{Spec: specs[id]}
	}}
	h := b.host(l, 8)
	row := func(values ...float32) []payload.Part {
		one, err := tensor.FromFP32([]int64{1, int64(len(values))}, values)
		if err != nil {
			t.Fatal(err)
		}
		return []payload.Part{payload.OfTensor("x", one)}
	}
	good := b.askParts(row(1, 2), of("own"), at(h))
	bad := b.askParts(row(1, 2, 3), of("own"), at(h))
	h.awaitItems(2)
	close(goOn)
	for range 2 { // while it is loaded, and after that
		if got := good.output().Parts; len(got) != 1 || got[0].Tensor == nil {
			t.Errorf("answered with %v", got)
		}
		if f := bad.fault(fault.InvalidInput); !strings.Contains(f.Message, "[-1, 2]") {
			t.Errorf("the fault is %v", f)
		}
		good, bad = b.askParts(row(3, 4), of("own"), at(h)), b.askParts(row(1), of("own"), at(h))
	}
	checkModel(t, "none", b.ask("x", of("none"), at(h))) // it has the stage's, which takes anything
	b.askParts(row(1, 2), of("liar"), at(h)).fails(fault.RunnerOutputInvalid)
	if f := b.ask("x", of("broken"), at(h)).fault(fault.ModelLoadFailed); !strings.Contains(f.Message, "spec") {
		t.Errorf("the fault is %v", f)
	}
	testbed.Eventually(t, "the model without a contract is unloaded", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		_, there := l.now["broken"]
		return !there && l.of["broken"] == 1
	})
}
