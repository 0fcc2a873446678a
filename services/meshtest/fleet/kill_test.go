package fleet_test

import (
	"flag"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/meshtest/fleet"
)

// long says to run the long forms of the tests: make soak.
var long = flag.Bool("soak", false, "run the long forms")

// pick returns what is for every day, or for the long form.
func pick(short, soak int) int {
	if *long {
		return soak
	}
	return short
}

// everyRequestAnswered fails the test unless each request got its own answer,
// once.
func everyRequestAnswered(t *testing.T, tally *fleet.Tally, requests int) {
	t.Helper()
	t.Log(tally)
	if tally.Right != requests || tally.Wrong+tally.Twice+len(tally.Refused)+len(tally.Broken) != 0 {
		t.Errorf("of %d requests: %s", requests, tally)
	}
}

// reran returns how many runs there were beyond one for each request, and fails
// the test where a request never ran.
func reran(t *testing.T, f *fleet.Fleet, requests int) int {
	t.Helper()
	runs := f.Runs()
	if len(runs) != requests {
		t.Errorf("%d of %d requests ran", len(runs), requests)
	}
	return repeats(f)
}

// repeats returns how many runs of an item have begun that had begun before.
func repeats(f *fleet.Fleet) int {
	again := 0
	for _, ids := range f.Runs() {
		again += len(ids) - 1
	}
	return again
}

func whileLoaded(load *fleet.Load, every time.Duration, do func(turn int)) (turns int) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			do(turns)
			turns++
		case <-load.Done():
			return turns
		}
	}
}

const redelivered = "stagemesh_stage_redelivered_total"

func TestKilledHostsLoseNoRequest(t *testing.T) {
	t.Parallel()
	for _, durability := range []pipeline.Durability{pipeline.Memory, pipeline.File} {
		t.Run(string(durability), func(t *testing.T) {
			t.Parallel()
			f := newFleet(t)
			hosts := []*fleet.Member{echo(f), echo(f)}
			gateways := []*fleet.Member{gateway(f), gateway(f)}
			requests := pick(20_000, 200_000)
			durable := durability == pipeline.File
			load := f.Load(fleet.LoadSpec{Pipeline: "echo", Requests: requests, InFlight: 64, Durable: durable})
			told := 0
			kills := whileLoaded(load, 2*time.Second, func(turn int) {
				told += hosts[turn%2].Count(redelivered)
				hosts[turn%2].Kill()
				hosts[turn%2].Start()
			})
			tally := load.Wait()
			everyRequestAnswered(t, tally, requests)
			if kills == 0 {
				t.Error("the load was over before a host was killed")
			}
			again, repeats := reran(t, f, requests), f.Queue("echo", durability).Redeliveries()
			t.Logf("%d kills: %d redeliveries by the broker, of which hosts lived to count %d; %d re-executions",
				kills, repeats, told+fleet.Sum(hosts, redelivered), again)
			if again > repeats {
				t.Errorf("%d re-executions of %d redeliveries", again, repeats)
			}
			secondAnswers(t, gateways)
			if durable {
				answersAreStoredOnce(t, f, tally)
			}
		})
	}
}

// secondAnswers logs the replies that came to gateways for calls that had one, or
// were over: no caller gets them.
func secondAnswers(t *testing.T, gateways []*fleet.Member) {
	t.Helper()
	const dropped = "stagemesh_gateway_dropped_replies_total"
	t.Logf("replies that gateways dropped: %d late, %d duplicate", fleet.Sum(gateways, dropped, `disposition="late"`), fleet.Sum(gateways, dropped, `disposition="duplicate"`))
}

// answersAreStoredOnce fails the test unless there is one stored message for each
// request and never was another, and it is what its caller got. No two runs give
// the same answer.
func answersAreStoredOnce(t *testing.T, f *fleet.Fleet, tally *fleet.Tally) {
	t.Helper()
	requests := len(tally.Heard)
	state := f.Results().State()
	differing := gateway(f).Differing(tally.Heard)
	t.Logf("%d requests: %d stored answers, %d ever written, %d that another gateway reads otherwise", requests, state.Msgs, state.LastSeq, len(differing))
	if int(state.Msgs) != requests || int(state.LastSeq) != requests || len(differing) > 0 {
		t.Errorf("of %d requests: %d stored answers, %d ever; %d differ: %q", requests, state.Msgs, state.LastSeq, len(differing), differing[:min(len(differing), 3)])
	}
}

func TestAnotherGatewayReturnsWhatTheKilledOneWaitedFor(t *testing.T) {
	t.Parallel()
	const requests = 8
	f := newFleet(t)
	f.Host(fleet.HostSpec{Stage: "echo", Base: time.Second})
	first := gateway(f)
	load := f.Load(fleet.LoadSpec{Pipeline: "echo", Requests: requests, InFlight: requests, Durable: true})
	testbed.Eventually(t, "all of it runs", func() bool { return len(f.Runs()) == requests })
	first.Kill()
	second := gateway(f)
	if tally := load.Wait(); len(tally.Broken) == 0 {
		t.Fatalf("every caller has its answer already: %s", tally)
	}
	for text, ids := range f.Runs() {
		if got := resultOf(t, second, ids[0]); !strings.HasPrefix(got, text+" ") {
			t.Errorf("request %s: result %q, want %q", ids[0], got, text)
		}
	}
}

// resultOf returns a request's stored answer.
func resultOf(t *testing.T, g *fleet.Member, request string) string {
	t.Helper()
	ask, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+g.Addr()+"/v1/requests/"+request+"/result?wait=20s", nil)
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{DisableKeepAlives: true}
	response, err := (&http.Client{Transport: transport}).Do(ask)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	if response.StatusCode != http.StatusOK {
		t.Errorf("result of %s: %s: %s", request, response.Status, body)
	}
	return string(body)
}
