package fleet_test

import (
	"flag"
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus/bustest"
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

// everyRequestAnswered fails the test unless each request got its own answer.
func everyRequestAnswered(t *testing.T, tally fleet.Tally, requests int) {
	t.Helper()
	t.Log(tally)
	if tally.Right != requests || tally.Wrong != 0 || len(tally.Refused) != 0 || len(tally.Broken) != 0 {
		t.Errorf("of %d requests: %s; %.3q", requests, tally, tally.Broken)
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
	again := 0
	for _, ids := range runs {
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

// slow logs how long the requests took that something happened to, and fails the
// test where one took longer than it may.
func slow(t *testing.T, tally fleet.Tally, median, longest time.Duration) {
	t.Helper()
	affected := tally.Over(time.Second)
	if len(affected) == 0 {
		return
	}
	middle, most := affected[len(affected)/2], affected[len(affected)-1]
	t.Logf("%d requests were held up: median %s, longest %s", len(affected), middle, most)
	if middle > median || most > longest {
		t.Errorf("held up by %s in the middle and %s at most, want %s and %s", middle, most, median, longest)
	}
}

func TestKilledHostsLoseNoRequest(t *testing.T) {
	t.Parallel()
	for _, durable := range []bool{false, true} {
		t.Run(fmt.Sprintf("durable=%v", durable), func(t *testing.T) {
			t.Parallel()
			f := fleet.New(t)
			hosts := []*fleet.Member{echo(f), echo(f)}
			gateway(f)
			gateway(f)
			requests := pick(20_000, 200_000)
			load := f.Load(fleet.LoadSpec{Pipeline: "echo", Requests: requests, InFlight: 64, Durable: durable})
			kills := whileLoaded(load, 2*time.Second, func(turn int) {
				hosts[turn%2].Kill()
				hosts[turn%2].Start()
			})
			tally := load.Wait()
			everyRequestAnswered(t, tally, requests)
			t.Logf("%d kills, %d re-executions", kills, reran(t, f, requests))
			if kills == 0 {
				t.Error("the load was over before a host was killed")
			}
		})
	}
}

func TestKilledHostHoldsNobodyUpForLong(t *testing.T) {
	t.Parallel()
	f := fleet.New(t)
	first := echo(f)
	echo(f)
	gateway(f)
	requests := pick(5_000, 50_000)
	load := f.Load(fleet.LoadSpec{Pipeline: "echo", Requests: requests, InFlight: 32})
	bustest.Eventually(t, "the load flows", func() bool { return load.Answered() > requests/10 })
	first.Kill()
	tally := load.Wait()
	everyRequestAnswered(t, tally, requests)
	slow(t, tally, 3*time.Second, 5*time.Second)
}

// What the paused host had asked for is delivered to it and comes back after the
// ack wait; what it asks for is over after the pull expiry of half a second.
func TestPausedHostHoldsNobodyUpForLong(t *testing.T) {
	t.Parallel()
	f := fleet.New(t)
	first := echo(f)
	echo(f)
	gateway(f)
	requests := pick(5_000, 50_000)
	load := f.Load(fleet.LoadSpec{Pipeline: "echo", Requests: requests, InFlight: 32})
	bustest.Eventually(t, "the load flows", func() bool { return load.Answered() > requests/10 })
	first.Pause()
	tally := load.Wait()
	first.Resume()
	everyRequestAnswered(t, tally, requests)
	slow(t, tally, 3*time.Second, 5500*time.Millisecond)
}

func TestDurableRequestsSurviveTheBroker(t *testing.T) {
	t.Parallel()
	f := fleet.New(t)
	f.Host(fleet.HostSpec{Stage: "echo", Base: 5 * time.Millisecond})
	gateway(f)
	requests := pick(2_000, 20_000)
	load := f.Load(fleet.LoadSpec{Pipeline: "echo", Requests: requests, InFlight: 32, Durable: true})
	bustest.Eventually(t, "the load flows", func() bool { return load.Answered() > requests/10 })
	f.Broker().Kill()
	f.Broker().Start()
	tally := load.Wait()
	t.Log(tally)
	// What was refused while the broker was away was not queued, and says so.
	if tally.Refused["BROKER_UNAVAILABLE"]+tally.Right != requests {
		t.Errorf("of %d requests: %s; %.3q", requests, tally, tally.Broken)
	}
	if tally.Right == 0 {
		t.Error("nothing was answered")
	}
}

func TestRollingRestartsAreNotNoticed(t *testing.T) {
	t.Parallel()
	f := fleet.New(t)
	hosts := []*fleet.Member{echo(f), echo(f)}
	gateway(f)
	requests := pick(10_000, 100_000)
	load := f.Load(fleet.LoadSpec{Pipeline: "echo", Requests: requests, InFlight: 32})
	restarts := whileLoaded(load, 300*time.Millisecond, func(turn int) {
		hosts[turn%2].Stop()
		hosts[turn%2].Start()
	})
	tally := load.Wait()
	everyRequestAnswered(t, tally, requests)
	if again := reran(t, f, requests); again != 0 || restarts == 0 {
		t.Errorf("%d restarts, %d re-executions", restarts, again)
	}
}

func TestAnotherGatewayReturnsWhatTheKilledOneWaitedFor(t *testing.T) {
	t.Parallel()
	const requests = 8
	f := fleet.New(t)
	f.Host(fleet.HostSpec{Stage: "echo", Base: time.Second})
	first := gateway(f)
	load := f.Load(fleet.LoadSpec{Pipeline: "echo", Requests: requests, InFlight: requests, Durable: true})
	bustest.Eventually(t, "all of it runs", func() bool { return len(f.Runs()) == requests })
	first.Kill()
	second := gateway(f)
	if tally := load.Wait(); len(tally.Broken) == 0 {
		t.Fatalf("every caller has its answer already: %s", tally)
	}
	for text, ids := range f.Runs() {
		if got := resultOf(t, second, ids[0]); got != text {
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
