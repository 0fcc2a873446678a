package fleet

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats-server/v2/server"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/services/cli"
	"github.com/stagemesh/stagemesh/services/runners"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// programVariable makes the test's program a member of a fleet, and has the path of the
// file in which it records late timers, or noStalls.
const programVariable, noStalls = "STAGEMESH_FLEET_STALLS", "none"

// program runs a member and returns its exit code. It ends with the process of the test.
func program(args []string) int {
	process.ReduceCollections()
	ctx := testbed.UntilOrphaned(context.Background())
	if stalls := os.Getenv(programVariable); stalls != noStalls {
		go recordStalls(ctx, stalls)
	}
	var err error
	switch args[0] {
	case "broker":
		err = runBroker(ctx, args[1:])
	case "stage":
		cmd := stagemesh.StageCommand(append(runners.All(), stagemesh.KindOf(runnerKind, newRunner))...)
		cmd.SetArgs(args[1:])
		err = cmd.ExecuteContext(ctx)
	default:
		cmd := cli.New()
		cmd.SetArgs(args)
		err = cmd.ExecuteContext(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "stagemesh:", err)
		return 1
	}
	return 0
}

// runBroker runs a broker with its files in a folder, alone or in a cluster: then the
// arguments are the ports of the routes to all of its brokers.
func runBroker(ctx context.Context, args []string) error {
	ctx, stop := process.SignalContext(ctx)
	defer stop()
	flags := flag.NewFlagSet("broker", flag.ContinueOnError)
	listen, folder, name := flags.String("listen", anyPort, ""), flags.String("folder", "", ""), flags.String("name", "", "")
	cluster := flags.Int("cluster", 0, "")
	if err := flags.Parse(args); err != nil {
		return err
	}
	options := testbed.BrokerOptions(*folder)
	address, err := net.ResolveTCPAddr("tcp", *listen)
	if err != nil {
		return err
	}
	if address.Port != 0 {
		options.Port = address.Port
	}
	if *cluster > 0 {
		options.DontListen = false
		options.ServerName, options.Cluster = *name, server.ClusterOpts{Name: "fleet", Host: options.Host, Port: *cluster}
		for _, port := range flags.Args() {
			options.Routes = append(options.Routes, &url.URL{Scheme: "nats-route", Host: net.JoinHostPort(options.Host, port)})
		}
	}
	broker, err := server.NewServer(options)
	if err != nil {
		return err
	}
	if *cluster > 0 {
		broker.Start()
		if !broker.ReadyForConnections(10 * time.Second) {
			return errors.New("the broker does not start")
		}
	} else if err := testbed.StartServer(broker); err != nil {
		return err
	}
	fmt.Printf("broker is ready on %s\n", broker.Addr()) //nolint:forbidigo // the test reads it
	<-ctx.Done()
	broker.Shutdown()
	broker.WaitForShutdown()
	return nil
}

// recordStalls records timers that are more than a millisecond late in a file, until the
// context ends: when, and by how much.
func recordStalls(ctx context.Context, path string) {
	const every, late = 5 * time.Millisecond, time.Millisecond
	out, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		panic(err)
	}
	defer out.Close()
	timer := time.NewTimer(every)
	defer timer.Stop()
	for {
		due := time.Now().Add(every)
		timer.Reset(every)
		select {
		case <-timer.C:
			if now := time.Now(); now.Sub(due) > late {
				fmt.Fprintf(out, "%d %s\n", now.UnixNano(), now.Sub(due))
			}
		case <-ctx.Done():
			return
		}
	}
}

const (
	// runnerKind is the key of this runner in mesh files.
	runnerKind = "record"
	// holdPrefix begins a text that holds its runner.
	holdPrefix = "hold"
	// cancelledSuffix is added to the path of the record of runs: when they were cancelled.
	cancelledSuffix = ".cancelled"
	// atOnceSuffix is added to it: how many items have run at once.
	atOnceSuffix = ".at-once"
)

// runnerSettings are a hostSpec in a mesh file.
type runnerSettings struct {
	Record string        `yaml:"record"`
	Run    time.Duration `yaml:"run"`
	Chunks int           `yaml:"chunks"`
	Slots  int           `yaml:"slots"`
	Tensor int           `yaml:"tensor"`
}

// recorder is a runner that records the items that it runs before it runs them.
type recorder struct {
	settings runnerSettings
	id       string
	runs     atomic.Int64
	// running are the items that run now, most is the highest number of them so far.
	running, most atomic.Int64
	// atOnce has the values of most.
	record, cancelled, atOnce *os.File
}

func newRunner(s runnerSettings) (*inproc.Runner, error) {
	r := &recorder{settings: s, id: uuid.NewString()}
	for path, file := range map[string]**os.File{s.Record: &r.record, s.Record + cancelledSuffix: &r.cancelled, s.Record + atOnceSuffix: &r.atOnce} {
		var err error
		if *file, err = os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600); err != nil {
			return nil, err
		}
	}
	return inproc.New(inproc.Settings{Spec: runner.Spec{Stream: s.Chunks > 0}, Concurrency: s.Slots}, r.run), nil
}

func (r *recorder) run(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
	// One write, so that SIGKILL leaves no part of a line.
	if err := write(r.record, batch, func(item runner.Item) string { return string(item.RequestID) }); err != nil {
		return err
	}
	run := r.runs.Add(1)
	for now := r.running.Add(int64(len(batch.Items))); now > r.most.Load(); {
		if most := r.most.Load(); now > most && r.most.CompareAndSwap(most, now) {
			if _, err := fmt.Fprintf(r.atOnce, "%d items\n", now); err != nil {
				return err
			}
		}
	}
	answers := make([][]payload.Part, len(batch.Items))
	for i, item := range batch.Items {
		answers[i] = []payload.Part{r.answer(item, run)}
	}
	err := r.work(ctx, batch, answers, sink)
	// Before the outcomes: whoever has one may send the next item.
	r.running.Add(-int64(len(batch.Items)))
	if err != nil {
		now := strconv.FormatInt(time.Now().UnixNano(), 10)
		return errors.Join(err, write(r.cancelled, batch, func(runner.Item) string { return now }))
	}
	for i, answer := range answers {
		if err := sink.SetOutcome(i, runner.Output(answer...)); err != nil {
			return err
		}
	}
	return nil
}

// write appends a line for each item: a word, and the item's text.
func write(to *os.File, batch runner.Batch, word func(runner.Item) string) error {
	var out bytes.Buffer
	for _, item := range batch.Items {
		fmt.Fprintf(&out, "%s %s\n", word(item), textOf(item))
	}
	_, err := to.Write(out.Bytes())
	return err
}

func (r *recorder) answer(item runner.Item, run int64) payload.Part {
	if n := r.settings.Tensor; n > 0 {
		return payload.OfTensor("y", tensor.Tensor{Datatype: tensor.FP32, Shape: []int64{1, int64(n / 4)}, Raw: make([]byte, n)})
	}
	return payload.OfBlob("", "text/plain", fmt.Appendf(nil, "%s %s/%d", textOf(item), r.id, run))
}

// work sends the chunks, the first of them at once, and returns when the batch has taken
// its time. The error is the context's.
func (r *recorder) work(ctx context.Context, batch runner.Batch, answers [][]payload.Part, sink runner.Sink) error {
	for range r.settings.Chunks {
		for i, answer := range answers {
			// An error means that the item is cancelled; the others go on.
			_ = sink.Chunk(i, answer)
		}
		if err := wait(ctx, r.settings.Run/time.Duration(r.settings.Chunks)); err != nil {
			return err
		}
	}
	for _, item := range batch.Items {
		if strings.HasPrefix(textOf(item), holdPrefix) {
			<-ctx.Done()
			return ctx.Err()
		}
	}
	if r.settings.Chunks > 0 {
		return nil
	}
	return wait(ctx, r.settings.Run)
}

func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func textOf(item runner.Item) string { return string(item.Inputs[0].Blob.Data) }
