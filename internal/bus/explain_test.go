package bus_test

import (
	"testing"

	"github.com/nats-io/nats.go"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestExplainPassesEachAnswerUntilOneIsEnough(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	asks, client := broker.Connect("m"), broker.Client()
	for _, name := range []string{"a", "b"} {
		err := broker.Connect("m").ServeExplain(func(id pipeline.RequestID, reply func(*meshv1.ExplainAnswer)) {
			reply(&meshv1.ExplainAnswer{Report: &meshv1.RequestReport{Gateway: name + string(id)}})
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := client.Subscribe(asks.ExplainSubject(), func(msg *nats.Msg) { _ = msg.Respond([]byte("\xff")) }); err != nil {
		t.Fatal(err)
	}
	if err := client.Flush(); err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	testbed.Eventually(t, "both answer in time", func() bool {
		err := asks.Explain(t.Context(), "1", func(a *meshv1.ExplainAnswer) bool {
			seen[a.GetReport().GetGateway()] = true
			return len(seen) == 2
		})
		return err == nil && seen["a1"] && seen["b1"]
	})
	askAgain := func() error {
		return asks.Explain(t.Context(), "1", func(*meshv1.ExplainAnswer) bool { return false })
	}
	if err := askAgain(); err != nil {
		t.Errorf("without an answer that is enough it ends with %v", err)
	}
	broker.Stop()
	testbed.Eventually(t, "it fails without a broker", func() bool { return askAgain() != nil })
}
