package runner_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

func TestErrorBecomesItsFault(t *testing.T) {
	t.Parallel()
	own := fault.New(fault.SchemaViolation, "too small")
	tests := map[string]struct {
		err      error
		reason   fault.Reason
		wantText string
	}{
		"a fault":            {own, fault.SchemaViolation, "too small"},
		"a fault in a chain": {fmt.Errorf("decode: %w", own), fault.SchemaViolation, "too small"},
		"out of memory":      {fmt.Errorf("cuda: %w", runner.ErrOutOfMemory), fault.RunnerOutOfMemory, "cuda: out of memory"},
		"a dead process":     {fmt.Errorf("%w: signal: killed", runner.ErrCrashed), fault.RunnerCrashed, "the process that ran the item ended"},
		"a bad output":       {fmt.Errorf("%w: no rows", runner.ErrBadOutput), fault.RunnerOutputInvalid, "invalid output: no rows"},
		"not started":        {runner.ErrNotStarted, fault.RunnerFailed, "the batch did not start"},
		"the end of time":    {context.DeadlineExceeded, fault.RunnerFailed, "context deadline exceeded"},
		"anything else":      {errors.New("no such file"), fault.RunnerFailed, "no such file"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := runner.FaultOf(test.err)
			if f.Reason != test.reason || f.Message != test.wantText {
				t.Errorf("got %v, want %s: %s", f, test.reason, test.wantText)
			}
			if !errors.Is(f, test.err) && !errors.Is(test.err, f) {
				t.Errorf("%v has lost its cause %v", f, test.err)
			}
		})
	}
}

func TestBatchAxisHasConfigurationName(t *testing.T) {
	t.Parallel()
	if none, rows := runner.BatchNone.String(), runner.BatchRows.String(); none != "none" || rows != "rows" {
		t.Errorf("got %s and %s", none, rows)
	}
}

func TestSpecWithDatatypeIsTensor(t *testing.T) {
	t.Parallel()
	if (runner.PartSpec{Name: "b", ContentTypes: []string{"image/*"}}).IsTensor() || !(runner.PartSpec{Datatype: tensor.Bytes}).IsTensor() {
		t.Error("a blob is taken for a tensor, or a tensor for a blob")
	}
}

func TestOutcomesAndInputsHaveTheirParts(t *testing.T) {
	t.Parallel()
	part := payload.OfBlob("a", "text/plain", []byte("x"))
	if o := runner.Output(part); len(o.Parts) != 1 || o.Fault != nil {
		t.Errorf("got %v", o)
	}
	f := fault.New(fault.RunnerFailed, "no")
	if o := runner.Failed(f); o.Fault != f || o.Parts != nil {
		t.Errorf("got %v", o)
	}
	item := runner.Item{Inputs: []payload.Part{part}}
	if got, ok := item.Input("a"); !ok || string(got.Blob.Data) != "x" {
		t.Errorf("got %v, %t", got, ok)
	}
	if _, ok := item.Input("b"); ok {
		t.Error("an input that is not there is found")
	}
}
