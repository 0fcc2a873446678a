package worker_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/stagemesh/stagemesh/internal/worker/frame"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner/runnertest"
)

// What a row may ask a worker for, beside what package runnertest has. Every other
// number is given back.
const (
	raiseSlow    int64 = -100 - iota // answers after a while
	garbage                          // writes bytes that are no frame
	half                             // writes half a frame, and nothing more
	fewRows                          // answers with a row too few
	unknownItem                      // has a fault for an item that is not there
	strayResult                      // ends a batch that it was not given
	twice                            // ends its batch twice
	hang                             // never answers, and reads nothing
	freeze                           // stops itself, as SIGSTOP does
	outOfMemory                      // has too little memory for more than one item
	itemFault                        // has a fault for the item alone
	itemOutputs                      // answers item by item, with metadata
	chunks                           // sends three chunks for every item first
	drip                             // sends chunks until its item is cancelled
	big                              // answers with 50 MB more
	disconnect                       // closes its connection and stays
	leave                            // ends with exit code 0
	killed                           // is killed
	erring                           // reports that it failed, cleans up and exits
	hostsMessage                     // sends a message of hosts
	outside                          // has a part outside its body
	rankOneDies                      // rank 1 ends
	rankOneFails                     // rank 1 has an error
	noOutputs                        // answers without any output
	tooBig                           // claims a body beyond the limit
	unknownPong                      // answers a ping that nobody sent
	ownRank                          // answers with the pid and its rank
	endless                          // sends chunks and ignores cancels
	spans                            // returns a span of each rank
	spansFail                        // fails with one
	wrongSpan                        // returns one whose name is not text
)

// Modes of a worker that is started, in WORKER_MODE, separated by commas.
const (
	modeVariable = "WORKER_MODE"
	dieAtOnce    = "die"
	dieLater     = "die later" // as long as there is the file STATE
	mute         = "mute"      // never connects
	neverReady   = "never ready"
	stubborn     = "stubborn" // ignores signals, shutdown and its connection's end
	bytewise     = "bytewise"
	parent       = "parent" // has a child in its group
	flood        = "flood"
	initFails    = "init fails"
	coldFails    = "warm-up fails"
	coldDies     = "warm-up dies"
	coldLater    = "warm-up fails later" // as long as there is the file STATE
	coldHangs    = "warm-up hangs later" // the same
	withExamples = "examples"
	anyInput     = "any input"
	lists        = "lists" // batch axis none, blobs too
	specByFile   = "spec by file"
	versionTwo   = "version 2"
	oneSlot      = "one slot"
	growing      = "growing"   // one slot, and another one after the first batch
	narrowing    = "narrowing" // one slot, as long as there is the file STATE
	slowStart    = "slow start"
	readsNothing = "reads nothing"
	slow         = "slow"
	streams      = "streams"
	streamRows   = "stream rows" // a chunk for each row, as package runnertest wants it
	logOrder     = "log order"
	hangLater    = "hang later"  // at its start, as long as there is the file STATE
	leaveLater   = "leave later" // after its warm-up, the same
	prefetches   = "prefetches"  // runs batches one after the other
	host         = "host"
)

var errRow = errors.New("this row is bad")

// fake is a worker.
type fake struct {
	modes map[string]bool
	conn  net.Conn
	in    *bufio.Reader
	rank  int

	mu      sync.Mutex
	out     io.Writer
	running map[uint64]context.CancelFunc
	asked   chan struct{}
	grown   sync.Once
	// models are loaded, or are being loaded, by the mode models.
	models  map[string]*fakeModel
	runtime runnertest.ModelRuntime
}

// be is a worker's main function; it returns its exit code.
func be(mode string) int {
	f := &fake{
		modes: map[string]bool{}, running: map[uint64]context.CancelFunc{}, asked: make(chan struct{}, 1),
		models: map[string]*fakeModel{},
	}
	for _, m := range strings.Split(mode, ",") {
		f.modes[m] = true
	}
	f.rank, _ = strconv.Atoi(os.Getenv("RANK"))
	if f.modes[stubborn] {
		signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	} else {
		f.handleSignals()
		go f.watchLifeline()
	}
	switch {
	case f.modes[dieAtOnce], f.modes[dieLater] && exists(os.Getenv("STATE")):
		fmt.Fprintln(os.Stderr, "Traceback (most recent call last):\nImportError: no module named torch")
		return 3
	case f.modes[mute], f.modes[hangLater] && exists(os.Getenv("STATE")):
		fmt.Fprintln(os.Stdout, "waiting for a lock")
		select {}
	}
	if f.modes[parent] {
		child := exec.Command(os.Args[0])
		child.Env = append(os.Environ(), modeVariable+"="+stubborn+","+mute)
		_ = child.Start()
		fmt.Fprintln(os.Stdout, "child", child.Process.Pid)
	}
	return f.serve()
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func (f *fake) handleSignals() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		<-signals
		f.leave()
	}()
}

func (f *fake) watchLifeline() {
	fd, _ := strconv.Atoi(os.Getenv("STAGEMESH_LIFELINE"))
	_, _ = io.ReadAll(os.NewFile(uintptr(fd), "lifeline"))
	os.Exit(4) //nolint:forbidigo // the host is gone
}

// leave reports once that it leaves, and makes serve return.
func (f *fake) leave() {
	select {
	case f.asked <- struct{}{}:
		f.send(&frame.State{State: frame.Shutdown}, nil)
		_ = f.conn.(*net.UnixConn).CloseRead()
	default:
	}
}

func (f *fake) serve() int {
	conn, err := net.Dial("unix", os.Getenv("STAGEMESH_SOCKET"))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	f.conn, f.in, f.out = conn, bufio.NewReader(conn), conn
	if f.modes[bytewise] {
		f.out = byteWriter{conn}
	}
	hello := &frame.Hello{Protocols: []int{1}, Name: "fake", PID: os.Getpid()}
	if f.modes[versionTwo] {
		hello.Protocols = []int{2}
	}
	if f.modes[streams] || f.modes[streamRows] {
		hello.Capabilities = []string{frame.Stream}
	}
	if f.modes[prefetches] {
		hello.Capabilities = []string{frame.Prefetch}
	}
	if f.modes[modelsMode] {
		hello.Capabilities = []string{frame.Models}
	}
	f.send(hello, nil)
	m, _, err := frame.Read(f.in, 0)
	welcome, ok := m.(*frame.Welcome)
	if err != nil || !ok {
		fmt.Fprintln(os.Stderr, "no welcome:", err)
		return 1
	}
	if code, stays := f.load(welcome); !stays {
		return code
	}
	return f.listen(welcome)
}

func (f *fake) load(w *frame.Welcome) (int, bool) {
	fmt.Fprintln(os.Stdout, "options", string(w.Options), "devices", w.Devices)
	f.send(&frame.State{State: frame.Startup, Message: "loading shard 3 of 12"}, nil)
	switch {
	case f.modes[neverReady]:
		<-f.asked
		return 0, false
	case f.modes[slowStart]:
		<-time.After(300 * time.Millisecond)
	case f.modes[initFails]:
		f.send(&frame.Error{Kind: frame.Exception, Name: "FileNotFoundError", Message: "m.onnx", Traceback: "in setup"}, nil)
		f.send(&frame.State{State: frame.Shutdown}, nil)
		return 5, false
	case f.modes[modelsMode] && !slices.Contains(w.Capabilities, frame.Models):
		f.send(&frame.Error{Kind: frame.Exception, Name: "RuntimeError", Message: "give the stage a section models"}, nil)
		return 5, false
	case f.modes[flood]:
		for i := range 5000 {
			fmt.Fprintln(os.Stdout, "line", i)
		}
	}
	var body frame.Body
	slots := w.Slots
	if f.modes[oneSlot] || f.modes[growing] || f.modes[narrowing] && exists(os.Getenv("STATE")) {
		slots = 1
	}
	ready := &frame.Ready{Slots: slots, Spec: f.spec(&body)}
	if f.modes[modelsMode] {
		limits := runnertest.ModelLimits()
		ready.Models = &frame.ModelLimits{
			Capacity: frame.Memory{Host: limits.Capacity.Host}, DefaultSize: frame.Memory{Host: limits.DefaultSize.Host},
			LoadSlots: limits.LoadSlots, LoadTimeout: limits.LoadTimeout.Milliseconds(),
		}
	}
	f.send(ready, &body)
	if f.modes[readsNothing] {
		select {}
	}
	return 0, true
}

func (f *fake) spec(body *frame.Body) *frame.Spec {
	x := frame.PartSpec{Name: "x", Datatype: tensor.Int64, Shape: []int64{-1}}
	y := frame.PartSpec{Name: "y", Datatype: tensor.Int64, Shape: []int64{-1}}
	s := &frame.Spec{Inputs: []frame.PartSpec{x}, Outputs: []frame.PartSpec{y}}
	switch {
	case f.modes[anyInput]:
		s = &frame.Spec{}
	case f.modes[lists]:
		s = &frame.Spec{BatchAxis: frame.None}
	case f.modes[streamRows]:
		s.BatchAxis = frame.None
	case f.modes[specByFile] && exists(os.Getenv("STATE")):
		s.Inputs[0].Name = "z"
	}
	if f.modes[withExamples] {
		part := body.Tensor("x", -1, int64s(11, 12))
		s.Examples = []frame.Example{{Name: "two", Inputs: []frame.Part{part}}}
	}
	return s
}

func int64s(rows ...int64) tensor.Tensor {
	t, err := tensor.FromInt64([]int64{int64(len(rows))}, rows)
	if err != nil {
		panic(err)
	}
	return t
}

// listen handles the messages of the host until it is asked to leave.
func (f *fake) listen(w *frame.Welcome) int {
	var batches sync.WaitGroup
	ended := make(chan struct{}) // the batch before
	close(ended)
	for {
		m, body, err := frame.Read(f.in, w.MaxFrame)
		if err != nil {
			batches.Wait()
			if len(f.asked) > 0 {
				return 0
			}
			if f.modes[stubborn] {
				select {}
			}
			return 6
		}
		switch m := m.(type) {
		case *frame.Predict:
			if f.modes[logOrder] && !m.Warmup {
				fmt.Fprintln(os.Stdout, "has", f.rank, m.Batch)
			}
			ctx, cancel := context.WithCancel(context.Background())
			f.mu.Lock()
			f.running[m.Batch] = cancel
			f.mu.Unlock()
			before := ended
			if f.modes[prefetches] {
				ended = make(chan struct{})
			}
			after := ended
			batches.Go(func() {
				<-before
				f.predict(ctx, m, body)
				if after != before {
					close(after)
				}
			})
		case *frame.Cancel:
			fmt.Fprintln(os.Stdout, "cancel", m.Batch, m.Items)
			f.mu.Lock()
			if cancel := f.running[m.Batch]; cancel != nil && (len(m.Items) == 0 || f.modes[streamRows]) {
				cancel()
			}
			f.mu.Unlock()
		case frame.Request:
			f.startRequest(m)
		case *frame.Ping:
			f.send(&frame.Pong{N: m.N}, nil)
		case *frame.Stop:
			if !f.modes[stubborn] {
				f.leave()
			}
		}
	}
}

func (f *fake) send(m frame.Message, body *frame.Body) {
	f.mu.Lock()
	defer f.mu.Unlock()
	_ = frame.Write(f.out, m, body) // or the host is gone
}

func (f *fake) raw(data []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, _ = f.conn.Write(data)
}

func (f *fake) fail(batch uint64, kind string, err error) {
	f.send(&frame.Error{Batch: &batch, Kind: kind, Name: "ValueError", Message: err.Error(), Traceback: "in predict"}, nil)
}

// rowsIn returns the rows of every item, however they came.
func rowsIn(m *frame.Predict, body []byte) [][]int64 {
	out := make([][]int64, len(m.Items))
	for _, p := range m.Parts {
		if p.Name != "x" || !p.IsTensor() {
			continue
		}
		t, err := p.Tensor(body)
		if err != nil {
			panic(err)
		}
		values, err := t.Int64Values()
		if err != nil {
			panic(err)
		}
		if p.Item != nil {
			out[*p.Item] = values
			continue
		}
		for i, item := range m.Items {
			n := max(1, item.Rows)
			out[i], values = values[:n], values[n:]
		}
		if len(values) > 0 {
			panic("there are more rows than the items have")
		}
	}
	return out
}

func (f *fake) predict(ctx context.Context, m *frame.Predict, body []byte) {
	items := rowsIn(m, body)
	if f.modes[modelsMode] && !f.addModel(m, items) {
		f.fail(m.Batch, frame.InvalidModel, errRow)
		return
	}
	if m.Warmup {
		total := 0
		for _, rows := range items {
			total += len(rows)
		}
		fmt.Fprintln(os.Stdout, "warm-up of", len(m.Items), "items,", total, "rows", items[0])
		switch {
		case f.modes[coldFails], f.modes[coldLater] && exists(os.Getenv("STATE")):
			f.fail(m.Batch, frame.Exception, errRow)
			return
		case f.modes[coldHangs] && exists(os.Getenv("STATE")):
			return
		case f.modes[coldDies]:
			os.Exit(9) //nolint:forbidigo // that is what it is for
		}
	}
	if f.modes[streamRows] {
		f.stream(ctx, m, items)
		return
	}
	if f.modes[slow] && !m.Warmup {
		<-time.After(50 * time.Millisecond)
	}
	for i, rows := range items {
		for _, row := range rows {
			if row < 0 && row > -1000 && f.trouble(ctx, m, items, i, row) {
				return
			}
		}
	}
	f.answer(m, items, nil)
	if f.modes[leaveLater] && m.Warmup && len(m.Items) > 1 && exists(os.Getenv("STATE")) {
		os.Exit(3) //nolint:forbidigo // that is what it is for
	}
	f.grown.Do(func() {
		if f.modes[growing] {
			f.send(&frame.Ready{}, nil)
		}
	})
}

// stream gives the rows of the only item back in chunks, and then all of them; of
// rank 0 alone. It alone crashes, after its chunks: the crash of another rank would end
// the gang wherever rank 0 is by then.
func (f *fake) stream(ctx context.Context, m *frame.Predict, items [][]int64) {
	for _, row := range items[0] {
		if row == runnertest.Crash && f.rank > 0 {
			continue
		}
		if row < 0 && f.trouble(ctx, m, items, 0, row) {
			return
		}
		if f.rank == 0 {
			f.chunk(m.Batch, row)
		}
	}
	f.answer(m, items, nil)
}

// chunk sends a row of the only item.
func (f *fake) chunk(batch uint64, row int64) {
	var body frame.Body
	f.send(&frame.Chunk{Batch: batch, Parts: []frame.Part{body.Tensor("y", -1, int64s(row))}}, &body)
}

// answer gives the rows back, joined; of rank 0 alone.
func (f *fake) answer(m *frame.Predict, items [][]int64, edit func(r *frame.Result, body *frame.Body)) {
	var body frame.Body
	r := &frame.Result{Batch: m.Batch}
	if f.rank == 0 {
		if f.modes[lists] || f.modes[streamRows] {
			for i, rows := range items {
				r.Parts = append(r.Parts, body.Tensor("y", i, int64s(rows...)))
			}
		} else {
			var all []int64
			for _, rows := range items {
				all = append(all, rows...)
			}
			r.Parts = []frame.Part{body.Tensor("y", -1, int64s(all...))}
		}
	}
	if edit != nil {
		edit(r, &body)
	}
	f.send(r, &body)
}

// spans is one span that names the trace and the rank.
func (f *fake) spans(m *frame.Predict) []frame.Span {
	now := time.Now().UnixMicro()
	return []frame.Span{{Name: m.Trace, Start: now, End: now, Attributes: frame.Parameters{"rank": int64(f.rank)}}}
}

// trouble does what a row asks for. It reports whether the batch is over with that.
func (f *fake) trouble(ctx context.Context, m *frame.Predict, items [][]int64, item int, row int64) bool {
	switch row {
	case runnertest.Bad:
		f.fail(m.Batch, frame.Exception, errRow)
	case runnertest.Crash:
		os.Exit(3) //nolint:forbidigo // that is what it is for
	case runnertest.Hold:
		<-ctx.Done()
		f.fail(m.Batch, frame.Exception, ctx.Err())
	case raiseSlow:
		<-time.After(200 * time.Millisecond)
		return false
	case garbage:
		f.raw([]byte("HTTP/1.1 200 OK\r\n\r\n"))
	case half:
		head, _ := frame.Encode(&frame.Result{Batch: m.Batch}, 1<<20)
		f.mu.Lock() // for ever: there is nothing more, pongs neither
		_, _ = f.conn.Write(head)
		_, _ = f.conn.Write(make([]byte, 1<<19))
		select {}
	case tooBig:
		head, _ := frame.Encode(&frame.Result{Batch: m.Batch}, 1<<50)
		f.raw(head)
	case fewRows:
		f.answer(m, append(items[:item:item], items[item][1:]), nil)
	case unknownItem:
		f.answer(m, items, func(r *frame.Result, _ *frame.Body) {
			r.Faults = []frame.Fault{{Item: len(items), Reason: "INVALID_INPUT", Message: "no"}}
		})
	case noOutputs:
		f.send(&frame.Result{Batch: m.Batch}, nil)
	case strayResult:
		f.send(&frame.Result{Batch: m.Batch + 1000}, nil)
	case twice:
		f.answer(m, items, nil)
		f.answer(m, items, nil)
	case hang:
		select {}
	case freeze:
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
		select {} // it takes a moment to stop
	case outOfMemory:
		if len(items) == 1 {
			return false
		}
		f.fail(m.Batch, frame.OutOfMemory, errors.New("CUDA out of memory"))
	case itemFault:
		f.answer(m, items, func(r *frame.Result, _ *frame.Body) {
			r.Faults = []frame.Fault{{Item: item, Reason: "INVALID_INPUT", Message: "is not finite", Field: "x"}}
		})
	case itemOutputs:
		f.answer(m, items, func(r *frame.Result, body *frame.Body) {
			r.Parts, *body = nil, frame.Body{}
			for i := len(items) - 1; i >= 0; i-- {
				r.Parts = append(r.Parts, body.Tensor("y", i, int64s(items[i]...)), body.Blob("t", i, "text/plain", []byte(m.Items[i].ID)))
				r.Metadata = append(r.Metadata, frame.Metadata{Item: i, Values: map[string]string{"id": m.Items[i].ID}})
			}
		})
	case spans:
		f.answer(m, items, func(r *frame.Result, _ *frame.Body) { r.Spans = f.spans(m) })
	case spansFail:
		f.send(&frame.Error{Batch: &m.Batch, Kind: frame.Exception, Spans: f.spans(m)}, nil)
	case wrongSpan:
		f.raw(rawFrame(fmt.Sprintf(`{"type":"result","batch":%d,"spans":[{"name":1,"start":1,"end":1}]}`, m.Batch)))
	case drip:
		for ctx.Err() == nil {
			f.chunk(m.Batch, 1)
			<-time.After(10 * time.Millisecond)
		}
		f.chunk(m.Batch, 2) // which nobody gets
		f.fail(m.Batch, frame.Exception, ctx.Err())
	case endless:
		for {
			f.chunk(m.Batch, 1)
			<-time.After(10 * time.Millisecond)
		}
	case chunks:
		for n := range 3 {
			for i := range items {
				var body frame.Body
				f.send(&frame.Chunk{Batch: m.Batch, Item: i, Parts: []frame.Part{body.Tensor("y", i, int64s(int64(n)))}}, &body)
			}
		}
		return false
	case big:
		f.answer(m, items, func(r *frame.Result, body *frame.Body) {
			data := make([]byte, 50<<20)
			for at := 0; at < len(data); at += 4096 {
				binary.LittleEndian.PutUint64(data[at:], uint64(at))
			}
			for i := range items {
				r.Parts = append(r.Parts, body.Blob("big", i, "application/octet-stream", data))
			}
		})
	case disconnect:
		_ = f.conn.Close()
		select {}
	case leave:
		os.Exit(0) //nolint:forbidigo // that is what it is for
	case killed:
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	case erring:
		f.send(&frame.State{State: frame.Failed, Message: "the device is gone"}, nil)
		f.leave()
	case hostsMessage:
		f.send(&frame.Ping{N: 1}, nil)
	case unknownPong:
		f.send(&frame.Pong{N: 99}, nil)
	case outside:
		f.raw(rawFrame(fmt.Sprintf(`{"type":"result","batch":%d,"parts":[{"name":"y","datatype":"INT64","shape":[1],"at":0,"size":8}]}`, m.Batch)))
	case rankOneDies, rankOneFails:
		switch {
		case f.rank != 1:
			return false
		case row == rankOneFails:
			f.fail(m.Batch, frame.Exception, errRow)
		default:
			os.Exit(3) //nolint:forbidigo // that is what it is for
		}
	case ownRank:
		f.answer(m, items, func(r *frame.Result, body *frame.Body) {
			values := map[string]string{"pid": strconv.Itoa(os.Getpid())}
			for _, name := range []string{"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "STAGEMESH_STAGE", "STAGEMESH_WORKER", "STAGEMESH_INCARNATION", "CUDA_VISIBLE_DEVICES", "A", "B"} {
				values[name] = os.Getenv(name)
			}
			if text, err := os.ReadFile("/proc/self/status"); err == nil {
				_, list, _ := strings.Cut(string(text), "Cpus_allowed_list:\t")
				values["cpus"], _, _ = strings.Cut(list, "\n")
			}
			for i := range items {
				r.Metadata = append(r.Metadata, frame.Metadata{Item: i, Values: values})
			}
		})
	default:
		return false
	}
	return true
}

// rawFrame returns a frame of a header that no codec would write.
func rawFrame(header string) []byte {
	out := binary.LittleEndian.AppendUint32([]byte("SMW1"), uint32(len(header)))
	return append(binary.LittleEndian.AppendUint64(out, 0), header...)
}

// byteWriter writes every byte by itself.
type byteWriter struct{ w io.Writer }

func (b byteWriter) Write(data []byte) (int, error) {
	for i := range data {
		if _, err := b.w.Write(data[i : i+1]); err != nil {
			return i, err
		}
	}
	return len(data), nil
}
