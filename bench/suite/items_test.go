package suite_test

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/bench/compare"
	"github.com/stagemesh/stagemesh/bench/questions"
	"github.com/stagemesh/stagemesh/bench/suite"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/runners"
)

// parse returns the command that has parsed these arguments.
func parse(arguments []string) (*cobra.Command, error) {
	cmd := compare.NewCommand()
	switch arguments[0] {
	case "models":
		cmd = questions.NewModels()
	case "jobs":
		cmd = questions.NewJobs()
	}
	if arguments[0] != cmd.Name() {
		return nil, fmt.Errorf("the command is %s", arguments[0])
	}
	if err := cmd.ParseFlags(arguments[1:]); err != nil {
		return nil, err
	}
	return cmd, cmd.ValidateArgs(cmd.Flags().Args())
}

func commandsOf(items []suite.Item) (out []suite.Command) {
	for _, item := range items {
		for _, round := range item.Rounds {
			out = append(out, round.Commands...)
		}
	}
	return out
}

func everyItem() []suite.Item {
	all := append(suite.Items(suite.Full()), suite.PeerItems(suite.Full())...)
	slices.SortFunc(all, func(a, b suite.Item) int { return int(a.Number - b.Number) })
	return all
}

func TestProgramAcceptsCommandsOfSuite(t *testing.T) {
	t.Parallel()
	for _, c := range append(commandsOf(everyItem()), suite.ShortCommand()) {
		cmd, err := parse(c.Arguments(repository + "/bench"))
		if err != nil {
			t.Errorf("%s: %v", c.Line(), err)
		}
		if err != nil || c.Measure != "" {
			continue
		}
		name, _ := cmd.Flags().GetString("mesh")
		f, err := meshfile.Load(name, runners.All()...)
		if err != nil {
			t.Errorf("%s: %v", c.Line(), err)
			continue
		}
		routes, err := f.Routes()
		if err != nil || !slices.ContainsFunc(routes, func(p pipeline.Pipeline) bool { return string(p.Name) == c.Pipeline }) {
			t.Errorf("%s: %s has no such pipeline, %v", c.Line(), name, err)
		}
	}
}

func TestEveryMeshFileIsMeasured(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(repository + "/bench/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("%q, %v", files, err)
	}
	for _, file := range files {
		if !slices.ContainsFunc(commandsOf(suite.Items(suite.Full())), func(c suite.Command) bool { return c.Mesh == filepath.Base(file) }) {
			t.Errorf("nothing measures %s", file)
		}
	}
}

func TestSuiteTakesAtMostFiftyMinutes(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		pace suite.Pace
		most time.Duration
	}{"full": {suite.Full(), 50 * time.Minute}, "quick": {suite.Quick(), 7 * time.Minute}} {
		var all time.Duration
		for _, item := range suite.Items(test.pace) {
			all += item.Takes()
		}
		if all > test.most || all < test.most/3 {
			t.Errorf("a %s suite takes %s", name, all)
		}
	}
}

func TestPublishedFiguresAreMeasuredFiveTimes(t *testing.T) {
	t.Parallel()
	for _, item := range everyItem() {
		for _, round := range item.Rounds {
			for _, c := range round.Commands {
				if round.Times < 5 && c.Pairs < 5 && !c.Watched {
					t.Errorf("item %d: %s is measured %d times", item.Number, c.Line(), round.Times)
				}
			}
		}
	}
}

func TestItemsAndCommandsAreUnique(t *testing.T) {
	t.Parallel()
	for i, item := range everyItem() {
		names := map[string]bool{}
		for _, c := range commandsOf([]suite.Item{item}) {
			if names[c.Name] || c.Name == "" {
				t.Errorf("item %d has %q twice, or no name", item.Number, c.Name)
			}
			names[c.Name] = true
		}
		if int(item.Number) != i+1 || item.Title == "" {
			t.Errorf("item %d is %+v", i+1, item)
		}
	}
}

func TestShortIsShort(t *testing.T) {
	t.Parallel()
	if takes := suite.ShortCommand().Takes(); takes >= time.Minute {
		t.Errorf("it takes %s", takes)
	}
}

func TestSelectReturnsNamedItems(t *testing.T) {
	t.Parallel()
	all := suite.Items(suite.Quick())
	some, err := suite.Select(all, []int{5, 1})
	if err != nil || len(some) != 2 || some[0].Number != suite.Batching || some[1].Number != suite.Processes {
		t.Errorf("got %v, %v", some, err)
	}
	if _, err := suite.Select(all, []int{1, 13}); err == nil || !strings.HasPrefix(err.Error(), "--only: there is no item 13") {
		t.Errorf("got %v", err)
	}
}

func TestLineIsQuoted(t *testing.T) {
	t.Parallel()
	c := suite.Command{Pipeline: "p", Mesh: "m.yaml", Tensor: "x=UINT8[1,4]", Rate: 12.5, Timeout: time.Second, Deadline: time.Second, Durability: "file", Traced: true, Pairs: 3}
	const want = "bin/bench run p --mesh bench/m.yaml --tensor 'x=UINT8[1,4]' --rate 12.5 --arrivals poisson --timeout 1s --deadline 1s " +
		"--durability file --traced --baseline --pairs 3 --warmup 0s --duration 0s"
	if got := c.Line(); got != want {
		t.Errorf("got %s", got)
	}
	c = suite.Command{Pipeline: "p", Mesh: "m.yaml", Input: "i.json", Protocol: "http", Concurrency: []int{1}, Pairs: 3, Peer: "other"}
	const wantPeer = "bin/bench run p bench/i.json --mesh bench/m.yaml --protocol http --concurrency 1 " +
		"--peer 'bin/peers/other/bin/python bench/peers/run.py other p' --pairs 3 --warmup 0s --duration 0s"
	if got := c.Line(); got != wantPeer {
		t.Errorf("got %s", got)
	}
	if limit := c.Limit(); limit <= c.Takes() {
		t.Errorf("%s for what takes %s", limit, c.Takes())
	}
}

func TestPeersHaveThePinnedVersions(t *testing.T) {
	t.Parallel()
	for _, c := range commandsOf(suite.PeerItems(suite.Full())) {
		pin := read(t, filepath.Join(repository, "bench/peers", c.Peer+".txt"))
		_, version, _ := strings.Cut(strings.TrimSpace(pin), "==")
		if name, _, _ := strings.Cut(c.Name, ","); version == "" || !strings.HasSuffix(name, " "+version) {
			t.Errorf("%s has the version %q", c.Name, version)
		}
	}
}

func TestMakeMeasuresThePeers(t *testing.T) {
	t.Parallel()
	if want := fmt.Sprintf("--only %d,%d\n", suite.PeersBatching, suite.PeersNoop); !strings.Contains(read(t, repository+"/Makefile"), want) {
		t.Errorf("bench-peers does not have %q", want)
	}
}
