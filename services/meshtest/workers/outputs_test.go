package workers_test

import (
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/services/meshtest/workers"
)

func TestFaultsReachTheRightCaller(t *testing.T) {
	t.Parallel()
	bed := workers.New(t, workers.Spec{File: "picky.py", Batch: full(3)})
	for name, test := range map[string]struct {
		text   string
		reason fault.Reason
		// message is for the caller, logged for the operator.
		message, logged string
	}{
		"preprocess refuses an item": {"seven", fault.InvalidInput, "is no number", ""},
		"preprocess raises":          {"crash", fault.RunnerFailed, "", "what the code looked for"},
		"an output is missing":       {"-1", fault.RunnerFailed, "request id", "returned no output 'double'"},
		"an output of another type":  {"-2", fault.RunnerFailed, "request id", "got a buffer of format 'd', wanted FP32"},
		"a row too many":             {"-3", fault.RunnerFailed, "request id", "one for each row"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, a := range bed.AskAll([]string{"1", test.text, "10"}) {
				if a.Text == test.text {
					a.Fails(t, test.reason, test.message)
					t.Logf("%s: %v", a.Text, a.Fault)
					continue
				}
				if a.Fault != nil {
					t.Errorf("%s beside %s is answered with %v", a.Text, test.text, a.Fault)
					continue
				}
				values, err := a.Response.Outputs[0].Tensor.FP32Values()
				if err != nil || len(values) != 1 || values[0] != map[string]float32{"1": 2, "10": 20}[a.Text] {
					t.Errorf("%s is answered with %v, %v", a.Text, values, err)
				}
			}
			if test.logged != "" {
				t.Log(bed.Log.Line(t, test.logged, "worker=0", "incarnation=1"))
			}
		})
	}
	if n := bed.Exits(); n > 0 {
		t.Errorf("%d processes ended", n)
	}
}

func TestWorkerOutputIsLogged(t *testing.T) {
	t.Parallel()
	bed := workers.New(t, workers.Spec{File: "obedient.py", Workers: 2})
	before := bed.Ask("print hello from within\nand a second line")
	before.Succeeds(t)
	for _, words := range []string{`"hello from within"`, `"and a second line"`} {
		line := bed.Log.Line(t, "msg="+words, "stream=stdout", "worker="+before.Worker(), "incarnation=1", "stage=work")
		t.Log(strings.TrimSpace(line))
	}
}
