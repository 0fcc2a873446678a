// Package suite is the standard suite of benchmarks: its loads and meshes, its results,
// its goals, and the page that shows them.
//
//	results, err := suite.Run(ctx, suite.Settings{
//		Program: "bin/bench", Folder: "bench", Items: suite.Items(suite.Full()), Log: os.Stderr,
//	})
//	err = results.Write("bench/results.json")
//	page, err := suite.Page(results)
//
// An item is a question. Its rounds are command lines of `bench run` on mesh files of one
// folder. The suite runs them as child processes and reads their reports, so anybody can
// repeat a figure of the page with the command beside it.
//
// # Alternation
//
// The commands of a round alternate, in reverse order every second time, so that a
// disturbance of the machine affects all that are compared. Figures are medians of the
// repetitions, with the least and the greatest.
//
// # Results
//
// Results contain what the page needs and no more: no curve, no path, and no name of a
// machine or a user. The page is computed from them, so the two cannot disagree; a test
// checks the committed ones.
//
// # Failure
//
// Each child has a limit on its time and on its output. The error of a failed child has
// its command line and its standard error, and the suite drops the child's item. All
// functions but Run, Short and the command are pure. Tests run scripts instead of the
// program.
package suite

import (
	"fmt"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/internal/load"

	"github.com/stagemesh/stagemesh/bench/questions"
)

// Number identifies an item.
type Number int

// Item is one question, answered by commands.
type Item struct {
	Number Number
	Title  string
	// Rounds are run one after the other.
	Rounds []Round
}

// Round is commands that alternate, Times times.
type Round struct {
	Times    int
	Commands []Command
}

// Takes is the approximate duration of the item.
func (i Item) Takes() (out time.Duration) {
	for _, round := range i.Rounds {
		for _, c := range round.Commands {
			out += time.Duration(round.Times) * c.Takes()
		}
	}
	return out
}

// Select returns the items of those numbers.
func Select(items []Item, numbers []int) ([]Item, error) {
	var out []Item
	for _, n := range numbers {
		found := false
		for _, item := range items {
			if item.Number == Number(n) {
				out, found = append(out, item), true
			}
		}
		if !found {
			return nil, fmt.Errorf("--only: there is no item %d; there are 1 to %d", n, len(items))
		}
	}
	return out, nil
}

// Pace sets the durations and repetitions of the suite.
type Pace struct {
	// Quick marks figures that only try the suite out.
	Quick bool
	// Warmup precedes each run. Run is its length; Long is the length of loads whose last
	// answers come late.
	Warmup, Run, Long time.Duration
	// Pairs of mesh and baseline, and Repeats without a baseline.
	Pairs, Repeats int
	// Soak is the length of the load that shows whether memory grows.
	Soak time.Duration
}

// Full is the pace of published figures.
func Full() Pace {
	return Pace{Warmup: time.Second, Run: 3 * time.Second, Long: 10 * time.Second, Pairs: 5, Repeats: 5, Soak: 270 * time.Second}
}

// Quick is the pace of a trial.
func Quick() Pace {
	return Pace{Quick: true, Warmup: 200 * time.Millisecond, Run: 500 * time.Millisecond, Long: 2 * time.Second, Pairs: 2, Repeats: 2, Soak: 20 * time.Second}
}

// The items of the suite; PeersBatching and PeersNoop are with other servers.
const (
	Processes Number = 1 + iota
	InProcess
	Stages
	Hosts
	Batching
	Noop
	Overload
	Payloads
	Durability
	Soak
	Tracing
	Handlers
	PeersBatching
	PeersNoop
	Models
	Jobs
	Graphs
)

// Names of commands that other commands or the page refer to.
const (
	peak      = "peak"
	soak      = "soak"
	absent    = "without"
	carried   = "context carried"
	sampled   = "1 % traced"
	allTraced = "all traced"
	inMemory  = "memory"
	onFile    = "file"
	only      = "all"
	oneCaller = "grpc, three stages"
	// The pipelines of Graphs, in bench/blocks.yaml: plain ones, and those with blocks.
	nap, five, late         = "nap", "five", "late"
	classify, mapped        = "classify", "mapped"
	unbatched               = "unbatched"
	plain, switched         = "plain", "switched"
	threeSteps, threeBlocks = "list", "blocks"
	// inOneProcess ends the names of commands whose mesh is one process.
	inOneProcess = ", in one process"
)

// size is the default size of a payload.
const size = "1KiB"

// rows is a tensor of one row and the same size, for the workers.
const rows = "x=UINT8[1,1024]"

// callerTimeout is the timeout of requests during overload, as of an impatient user.
const callerTimeout = 500 * time.Millisecond

// Items returns the whole suite but for the items of PeerItems.
func Items(p Pace) []Item {
	return []Item{
		{Processes, "Three stages, in processes", p.comparePairs(p.echo("echo3.yaml", only, true, 1, 8, 64, 256))},
		{InProcess, "Three stages, in one process", p.comparePairs(p.echo("echo3.yaml", only, false, 1, 8, 64, 256))},
		{Stages, "One to eight stages", p.stages()},
		{Hosts, "Hosts of a stage", p.hosts()},
		{Batching, "Batches", p.repeat(p.worker("batching", 1, 8, 32, 64, 128))},
		{Noop, "A worker that does nothing", p.repeat(p.worker("noop", 1, 32, 64))},
		{Overload, "Overload", p.overload()},
		{Payloads, "Payloads", p.payloads()},
		{Durability, "Memory and file", p.durabilities()},
		{Soak, "A long load", p.soak()},
		{Tracing, "Tracing", p.tracing()},
		{Handlers, "A handler without a mesh", p.handlers()},
		{Models, "Many models", p.measured("models", questions.ModelGoals())},
		{Jobs, "Jobs", p.measured("jobs", questions.JobGoals())},
		{Graphs, "Graphs", p.graphs()},
	}
}

// peers are the other servers: their names with the versions that bench/peers pins, by
// their folders.
var peers = []struct{ name, folder string }{{mosec, "mosec"}, {"BentoML 1.4.39", "bentoml"}, {"Ray Serve 2.60.0", "ray"}}

// mosec is the peer that has goals. It is measured beside a mesh in processes too.
const (
	mosec          = "MOSEC 0.9.8"
	mosecProcesses = mosec + ", mesh in processes"
)

// PeerItems returns the items 5 and 6 with other servers, which must be installed.
func PeerItems(p Pace) []Item {
	commands := func(name string, callers ...int) (out []Command) {
		for _, peer := range peers {
			out = append(out, Command{
				Name: peer.name, Pipeline: name, Mesh: "peers/" + name + ".yaml", Input: "peers/body.json", Protocol: string(load.HTTP),
				Concurrency: callers, Peer: peer.folder, Warmup: p.Warmup, Duration: p.Run,
			})
		}
		return out
	}
	batching := commands("batching", 1, 8, 32, 64, 128)
	again := batching[0]
	again.Name, again.Processes = mosecProcesses, true
	return []Item{
		{PeersBatching, "Batches, and other servers", p.comparePairs(append(batching, again)...)},
		{PeersNoop, "A worker that does nothing, and other servers", p.comparePairs(commands("noop", 1, 32, 64)...)},
	}
}

// echo measures stages that return their input.
func (p Pace) echo(mesh, name string, processes bool, callers ...int) Command {
	return Command{
		Name: name, Pipeline: "echo", Mesh: mesh, Processes: processes, Payload: size, Concurrency: callers,
		Warmup: p.Warmup, Duration: p.Run,
	}
}

// worker measures a stage whose worker is a process in Python.
func (p Pace) worker(name string, callers ...int) Command {
	return Command{
		Name: only, Pipeline: name, Mesh: name + ".yaml", Processes: true, Tensor: rows, Concurrency: callers,
		Warmup: p.Warmup, Duration: p.Run,
	}
}

// comparePairs runs commands once, each in pairs with the baseline.
func (p Pace) comparePairs(commands ...Command) []Round {
	for i := range commands {
		commands[i].Pairs = p.Pairs
	}
	return []Round{{Times: 1, Commands: commands}}
}

// repeat alternates commands.
func (p Pace) repeat(commands ...Command) []Round {
	return []Round{{Times: p.Repeats, Commands: commands}}
}

func (p Pace) stages() []Round {
	var commands []Command
	for _, n := range []int{1, 4, 8} {
		commands = append(commands, p.echo(fmt.Sprintf("echo%d.yaml", n), fmt.Sprint(n), true, 1, 64))
	}
	for _, n := range []int{1, 8} {
		commands = append(commands, p.echo(fmt.Sprintf("echo%d.yaml", n), fmt.Sprint(n, inOneProcess), false, 64))
	}
	return p.comparePairs(commands...)
}

func (p Pace) hosts() []Round {
	return p.comparePairs(
		p.echo("echo3.yaml", "1", true, 64), p.echo("echo3-hosts2.yaml", "2", true, 64), p.echo("echo3-hosts4.yaml", "4", true, 64))
}

func (p Pace) payloads() []Round {
	var commands []Command
	for _, payload := range []string{"1KiB", "64KiB", "1MiB"} {
		c := p.echo("echo3.yaml", payload, true, 8)
		c.Payload = payload
		commands = append(commands, c)
	}
	return p.comparePairs(commands...)
}

func (p Pace) durabilities() []Round {
	memory, file := p.echo("echo3.yaml", inMemory, true, 8, 64), p.echo("echo3.yaml", onFile, true, 8, 64)
	memory.Durability, file.Durability = "memory", "file"
	return p.comparePairs(memory, file)
}

// overload measures the peak first, and then offers multiples of it.
func (p Pace) overload() []Round {
	most := Command{
		Name: peak, Pipeline: "overload", Mesh: "overload.yaml", Processes: true, Payload: size, Concurrency: []int{64},
		Timeout: callerTimeout, Deadline: callerTimeout, Warmup: p.Warmup, Duration: p.Long,
	}
	offered := func(times float64) Command {
		c := most
		c.Name, c.Concurrency, c.Share, c.Peak = fmt.Sprint(times), nil, times, peak
		return c
	}
	return append(p.repeat(most), p.repeat(offered(2), offered(5))...)
}

func (p Pace) soak() []Round {
	most := p.echo("echo3.yaml", peak, false, 64)
	steady := most
	steady.Name, steady.Concurrency, steady.Share, steady.Peak, steady.Duration = soak, nil, 0.5, peak, p.Soak
	steady.Watched = true
	return append(p.repeat(most), Round{Times: 1, Commands: []Command{steady}})
}

// handlers measures stages in one process, and a handler that returns its input.
func (p Pace) handlers() []Round {
	lone, http, rpc := p.echo("echo3.yaml", oneCaller, false, 1), p.echo("echo1.yaml", string(load.HTTP), false, 64), p.echo("echo1.yaml", string(load.Connect), false, 64)
	http.Protocol, rpc.Protocol = http.Name, rpc.Name
	commands := []Command{lone, http, rpc}
	for i := range commands {
		commands[i].Handler = true
	}
	return p.comparePairs(commands...)
}

// mapItems is how many items a request of the pipeline mapped has.
const mapItems = 8

// graphs measures pipelines with blocks in turns with plain ones.
func (p Pace) graphs() []Round {
	of := func(pipeline, tensor string, callers ...int) Command {
		return Command{
			Name: pipeline, Pipeline: pipeline, Mesh: "blocks.yaml", Tensor: tensor, Concurrency: callers, Warmup: p.Warmup, Duration: p.Run,
		}
	}
	list, blocks := of(threeSteps, "x=FP32[4]", 8), of(threeBlocks, "x=FP32[4]", 8)
	list.Durability, blocks.Durability = "file", "file"
	return p.repeat(
		of(nap, "x=FP32[4]", 1), of(five, "x=FP32[4]", 1), of(late, "x=FP32[4]", 8),
		of(classify, "x=FP32[1,64]", 40, 40*mapItems), of(mapped, fmt.Sprintf("x=FP32[%d,64]", mapItems), 40),
		of(unbatched, "x=FP32[1,64]", 40),
		of(plain, "x=FP32[4]", 1), of(switched, "x=FP32[4]", 1), list, blocks)
}

// measured are the measurements of a command that have goals, each with as many repetitions as
// other items have pairs.
func (p Pace) measured(command string, goals []questions.Goal) []Round {
	out := Round{Times: 1}
	for _, goal := range goals {
		c := Command{Name: goal.Measurement, Measure: command, Pairs: p.Pairs, Warmup: p.Warmup, Duration: p.Run * 2 / 3}
		if !slices.ContainsFunc(out.Commands, func(other Command) bool { return other.Name == c.Name }) {
			out.Commands = append(out.Commands, c)
		}
	}
	return []Round{out}
}

func (p Pace) tracing() []Round {
	without := p.echo("echo3.yaml", absent, true, 1, 64)
	without.Duration = p.Run / 2
	with, some, all := without, without, without
	with.Name, with.Traced, with.Concurrency = carried, true, []int{64}
	some.Name, some.Spans = sampled, "0.01"
	all.Name, all.Spans, all.Concurrency = allTraced, "1", []int{64}
	return p.repeat(without, with, some, all)
}
