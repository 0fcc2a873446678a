package worker_test

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/sdk/go/worker"
)

type streams = func(context.Context, *worker.Item, *worker.Stream) error

// one is a batch of one item, whose input is a text.
func one(number uint64, text string) (*frame.Predict, *frame.Body) {
	body := &frame.Body{}
	return &frame.Predict{
		Batch: number, Items: items(1), Parts: []frame.Part{body.Blob("text", 0, "text/plain", []byte(text))},
	}, body
}

// words sends the words of the item's text one by one.
func words(_ context.Context, item *worker.Item, out *worker.Stream) error {
	text, err := item.Blob("text")
	if err != nil {
		return err
	}
	for word := range strings.FieldsSeq(string(text.Data)) {
		if err := out.Text("word", word); err != nil {
			return err
		}
	}
	item.SetMetadata("finish", "stop")
	return nil
}

// receiveAnswer returns the answer to one item: its chunks, as the bytes of their only
// parts, and the end.
func (h *host) receiveAnswer() (chunks []string, end frame.Message, body []byte) {
	h.t.Helper()
	for {
		m, body := h.receive()
		chunk, ok := m.(*frame.Chunk)
		if !ok {
			return chunks, m, body
		}
		data, err := chunk.Parts[0].Bytes(body)
		if err != nil || len(chunk.Parts) != 1 {
			h.t.Fatalf("%+v, %v", chunk, err)
		}
		chunks = append(chunks, string(data))
	}
}

// streamed runs one item, and returns its answer.
func streamed(t *testing.T, s worker.Settings, more ...string) (chunks []string, end frame.Message, body []byte) {
	t.Helper()
	h := listen(t)
	served := h.serve(t.Context(), s, more...)
	h.ready()
	h.send(one(7, "a b"))
	chunks, end, body = h.receiveAnswer()
	h.ask(served)
	return chunks, end, body
}

// sends sends chunks.
func sends(chunks ...worker.Outputs) streams {
	return func(_ context.Context, _ *worker.Item, out *worker.Stream) error {
		for _, chunk := range chunks {
			if err := out.Send(chunk); err != nil {
				return err
			}
		}
		return nil
	}
}

func TestChunksComeBeforeTheWholeAnswer(t *testing.T) {
	t.Parallel()
	h := listen(t)
	served := h.serve(t.Context(), worker.Settings{Stream: words, Spec: worker.Spec{BatchAxis: worker.Rows}})
	equal(t, h.welcome().Capabilities, []string{frame.Stream})
	ready, _ := receiveAs[*frame.Ready](h)
	equal(t, ready.Spec.BatchAxis, worker.None)
	for n := range uint64(3) {
		h.send(one(n, "the quick brown fox"))
		chunks, end, body := h.receiveAnswer()
		equal(t, chunks, []string{"the", "quick", "brown", "fox"})
		equal(t, string(body), "thequickbrownfox")
		result, ok := end.(*frame.Result)
		if !ok || result.Batch != n || *result.Parts[0].Item != 0 {
			t.Fatalf("%+v", end)
		}
		equal(t, result.Metadata, []frame.Metadata{{Values: map[string]string{"finish": "stop"}}})
	}
	h.ask(served)
}

func TestWholeAnswerJoinsItsChunks(t *testing.T) {
	t.Parallel()
	scalar := func(x float32) tensor.Tensor {
		return tensor.Tensor{Datatype: tensor.FP32, Shape: []int64{}, Raw: fp32([]int64{1}, x).Raw}
	}
	document := func(text string) worker.Outputs {
		return worker.Outputs{"y": worker.Blobs(worker.Blob{ContentType: "application/json; charset=utf-8", Data: []byte(text)})}
	}
	packed := func(texts ...string) (chunks []worker.Outputs) {
		for _, text := range texts {
			chunks = append(chunks, worker.Outputs{"y": worker.Blobs(worker.Blob{ContentType: "application/msgpack", Data: []byte(text)})})
		}
		return chunks
	}
	rows := func(t tensor.Tensor) worker.Outputs { return worker.Outputs{"y": worker.Joined(t)} }
	for name, test := range map[string]struct {
		chunks []worker.Outputs
		spec   []worker.PartSpec
		want   string
		shape  []int64
	}{
		"text":              {[]worker.Outputs{{"y": worker.Texts("a")}, {"y": worker.Texts("")}, {"y": worker.Texts("b")}}, nil, "ab", nil},
		"documents":         {[]worker.Outputs{document(`{"a":1}`), document("2")}, nil, `[{"a":1},2]`, nil},
		"an empty document": {[]worker.Outputs{document("1"), document(""), document("2")}, nil, "[1,2]", nil},
		"packed documents":  {packed("\x81\xa1a\x01", "\x02"), nil, "\x92\x81\xa1a\x01\x02", nil},
		"20 packed":         {packed(slices.Repeat([]string{"\x01"}, 20)...), nil, "\xdc\x00\x14" + strings.Repeat("\x01", 20), nil},
		"70000 packed":      {packed(slices.Repeat([]string{"\x01"}, 70_000)...), nil, "\xdd\x00\x01\x11\x70" + strings.Repeat("\x01", 70_000), nil},
		"none packed":       {nil, []worker.PartSpec{{Name: "y", ContentTypes: []string{"application/x-msgpack"}}}, "\x90", nil},
		"rows":              {[]worker.Outputs{rows(fp32([]int64{1, 2}, 1, 2)), rows(fp32([]int64{2, 2}, 3, 4, 5, 6))}, nil, string(fp32([]int64{6}, 1, 2, 3, 4, 5, 6).Raw), []int64{3, 2}},
		"elements of bytes": {[]worker.Outputs{rows(texts("a")), rows(texts("bc"))}, nil, string(texts("a", "bc").Raw), []int64{2}},
		"without axes":      {[]worker.Outputs{{"y": worker.Each(scalar(1))}, {"y": worker.Each(scalar(2))}}, nil, string(scalar(2).Raw), []int64{}},
		"no chunks":         {nil, []worker.PartSpec{{Name: "y", ContentTypes: []string{"text/*", "text/plain"}}}, "", nil},
		"no documents":      {nil, []worker.PartSpec{{Name: "y", ContentTypes: []string{"application/ld+json"}}}, "[]", nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			chunks, end, body := streamed(t, worker.Settings{Stream: sends(test.chunks...), Spec: worker.Spec{Outputs: test.spec}})
			result, ok := end.(*frame.Result)
			if !ok || len(result.Parts) != 1 || len(chunks) != len(test.chunks) {
				t.Fatalf("%d chunks, %+v", len(chunks), end)
			}
			equal(t, string(body), test.want)
			if !slices.Equal(result.Parts[0].Shape, test.shape) {
				t.Errorf("shape %v", result.Parts[0].Shape)
			}
		})
	}
}

func TestChunksOnlySendsNoWholeAnswer(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]struct {
		settings worker.Settings
		more     []string
		chunks   []string
	}{
		"chunks only":   {worker.Settings{Stream: words, ChunksOnly: true}, nil, []string{"a", "b"}},
		"another rank":  {worker.Settings{Stream: words}, []string{"RANK", "1", "WORLD_SIZE", "2"}, nil},
		"optional part": {worker.Settings{Stream: sends(), Spec: worker.Spec{Outputs: []worker.PartSpec{{Name: "y", Optional: true}}}}, nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			chunks, end, _ := streamed(t, s.settings, s.more...)
			equal(t, chunks, s.chunks)
			if result, ok := end.(*frame.Result); !ok || len(result.Parts)+len(result.Faults) > 0 {
				t.Errorf("%+v", end)
			}
		})
	}
}

func TestChunksOnlyOutputsAreOptional(t *testing.T) {
	t.Parallel()
	h := listen(t)
	outputs := []worker.PartSpec{{Name: "word"}}
	served := h.serve(t.Context(), worker.Settings{Stream: words, ChunksOnly: true, Spec: worker.Spec{Outputs: outputs}})
	ready, _ := h.ready()
	if !ready.Spec.Outputs[0].Optional || outputs[0].Optional {
		t.Errorf("%+v, and the caller's own %+v", ready.Spec.Outputs, outputs)
	}
	h.ask(served)
}

func TestStreamFailsAlone(t *testing.T) {
	t.Parallel()
	fails := func(err error) streams {
		return func(_ context.Context, _ *worker.Item, out *worker.Stream) error {
			_ = out.Text("word", "a")
			return err
		}
	}
	text := worker.Outputs{"y": worker.Texts("a")}
	tensors := worker.Outputs{"y": worker.Joined(fp32([]int64{1, 2}, 1, 2))}
	for name, test := range map[string]struct {
		stream streams
		spec   []worker.PartSpec
		fault  string
		failed string
	}{
		"its fault":             {stream: fails(worker.InvalidInput("text", "is rude")), fault: "INVALID_INPUT is rude"},
		"its own bad input":     {stream: fails(errors.New("a secret")), failed: "a secret"},
		"out of memory":         {stream: fails(worker.ErrOutOfMemory), failed: "out of memory"},
		"a panic":               {stream: func(context.Context, *worker.Item, *worker.Stream) error { panic("at the disco") }, failed: "at the disco"},
		"an empty chunk":        {stream: sends(worker.Outputs{}), failed: "it has no outputs"},
		"two texts":             {stream: sends(worker.Outputs{"y": worker.Texts("a", "b")}), failed: `output "y": 2 of a chunk of one item`},
		"what is not declared":  {stream: sends(text), spec: []worker.PartSpec{{Name: "x"}}, failed: "it is not declared"},
		"a tensor that is none": {stream: sends(worker.Outputs{"y": worker.Joined(tensor.Tensor{Datatype: tensor.FP32, Shape: []int64{3}})}), failed: `output "y"`},
		"a tensor after a text": {stream: sends(text, tensors), failed: "the chunks cannot be joined"},
		"a text after a tensor": {stream: sends(tensors, text), failed: "the chunks cannot be joined"},
		"rows of another shape": {stream: sends(tensors, worker.Outputs{"y": worker.Joined(fp32([]int64{1, 1}, 1))}), failed: "the chunks cannot be joined"},
		"too many rows":         {stream: sends(tensors, tensors), spec: []worker.PartSpec{{Name: "y", Datatype: tensor.FP32, Shape: []int64{1, 2}}}, failed: "shape [2 2] of all chunks together"},
		"no tensor":             {stream: sends(), spec: []worker.PartSpec{{Name: "y", Datatype: tensor.FP32}}, failed: "it has no outputs"},
		"an error that is left": {stream: func(_ context.Context, _ *worker.Item, out *worker.Stream) error {
			_ = out.Send(nil)
			_ = out.Send(text)
			return nil
		}, failed: "it has no outputs"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, end, _ := streamed(t, worker.Settings{Stream: test.stream, Spec: worker.Spec{Outputs: test.spec}})
			switch m := end.(type) {
			case *frame.Result:
				if len(m.Faults) != 1 || m.Faults[0].Reason+" "+m.Faults[0].Message != test.fault {
					t.Errorf("%+v", m)
				}
			case *frame.Error:
				if test.failed == "" || !strings.Contains(m.Message, test.failed) || *m.Batch != 7 {
					t.Errorf("%+v", m)
				}
			}
		})
	}
}

func TestChunkAndWholeAnswerAreBounded(t *testing.T) {
	t.Parallel()
	big := worker.Outputs{"y": worker.Blobs(worker.Blob{Data: make([]byte, 1<<23)})} // of 1<<24
	chunks, end, _ := streamed(t, worker.Settings{Stream: sends(big, big, big)})
	result, ok := end.(*frame.Result)
	if !ok || len(result.Faults) != 1 || !strings.Contains(result.Faults[0].Message, "takes more than the 16777216 bytes") || len(chunks) != 2 {
		t.Errorf("%d chunks, %+v", len(chunks), end)
	}
	chunks, end, _ = streamed(t, worker.Settings{Stream: sends(big, big, big), ChunksOnly: true})
	if result, ok := end.(*frame.Result); !ok || len(result.Faults) != 0 || len(chunks) != 3 {
		t.Errorf("%d chunks, %+v", len(chunks), end)
	}
	huge := worker.Outputs{"y": worker.Blobs(worker.Blob{Data: make([]byte, 1<<24+1)})}
	if _, end, _ = streamed(t, worker.Settings{Stream: sends(huge)}); frame.Kind(end) != "error" {
		t.Errorf("%+v", end)
	}
}

// held sends one chunk, and then waits until its context ends.
func held(ctx context.Context, _ *worker.Item, out *worker.Stream) error {
	if err := out.Text("word", "first"); err != nil {
		return err
	}
	<-ctx.Done()
	return out.Text("word", "too late")
}

func TestCancelledStreamEnds(t *testing.T) {
	t.Parallel()
	h := listen(t)
	served := h.serve(t.Context(), worker.Settings{Stream: held})
	h.ready()
	for n := range uint64(3) {
		h.send(one(n, ""))
		receiveAs[*frame.Chunk](h)
		begun := time.Now()
		h.send(&frame.Cancel{Batch: n, Items: []int{0}}, nil)
		m, _ := receiveAs[*frame.Result](h)
		if took := time.Since(begun); len(m.Faults) != 1 || took > patience/2 {
			t.Errorf("%+v after %s", m, took)
		}
	}
	h.ask(served)
}

func TestAPartOfAnAnswerIsNoWholeOne(t *testing.T) {
	t.Parallel()
	h := listen(t)
	served := h.serve(t.Context(), worker.Settings{Stream: func(ctx context.Context, _ *worker.Item, out *worker.Stream) error {
		_ = out.Text("word", "the first half")
		<-ctx.Done()
		return nil
	}})
	h.ready()
	h.send(one(7, ""))
	receiveAs[*frame.Chunk](h)
	h.send(&frame.Cancel{Batch: 7}, nil)
	if m, body := receiveAs[*frame.Result](h); len(m.Faults) != 1 || len(m.Parts) > 0 {
		t.Errorf("%+v with %q", m, body)
	}
	h.ask(served)
}

func TestStreamsRunSideBySide(t *testing.T) {
	t.Parallel()
	h := listen(t)
	var all sync.WaitGroup
	all.Add(3)
	served := h.serve(t.Context(), worker.Settings{Slots: 3, Stream: func(ctx context.Context, item *worker.Item, out *worker.Stream) error {
		all.Done()
		all.Wait()
		return words(ctx, item, out)
	}})
	h.ready()
	for n := range uint64(3) {
		h.send(one(n, "a b c"))
	}
	chunks, ends := map[uint64]string{}, 0
	for ends < 3 {
		switch m, body := h.receive(); m := m.(type) {
		case *frame.Chunk:
			chunks[m.Batch] += string(body)
		case *frame.Result:
			ends++
		}
	}
	equal(t, chunks, map[uint64]string{0: "abc", 1: "abc", 2: "abc"})
	h.ask(served)
}

func TestNothingIsSentAfterStreamEnd(t *testing.T) {
	t.Parallel()
	h := listen(t)
	kept := make(chan *worker.Stream, 1)
	served := h.serve(t.Context(), worker.Settings{Stream: func(_ context.Context, _ *worker.Item, out *worker.Stream) error {
		kept <- out
		return nil
	}})
	h.ready()
	h.send(one(1, ""))
	receiveAs[*frame.Result](h)
	if err := (<-kept).Text("word", "more"); err == nil {
		t.Error("a chunk can be sent after the end")
	}
	h.ask(served)
}

func TestStreamsEndWithGrace(t *testing.T) {
	t.Parallel()
	h := listen(t)
	served := h.serve(t.Context(), worker.Settings{Stream: held})
	h.ready()
	h.send(one(1, ""))
	receiveAs[*frame.Chunk](h)
	h.send(&frame.Stop{Timeout: 50}, nil)
	receiveAs[*frame.State](h)
	h.ended() // without a word about the batch
	if err := outcome(t, served); !errors.Is(err, worker.ErrUnfinished) {
		t.Errorf("got %v", err)
	}
}

func TestHostWithoutChunksIsRefused(t *testing.T) {
	t.Parallel()
	h := listen(t)
	served := h.serve(t.Context(), worker.Settings{Stream: words})
	h.accept()
	receiveAs[*frame.Hello](h)
	h.send(&frame.Welcome{Protocol: 1, MaxFrame: 1 << 24, Options: json.RawMessage(`{}`)}, nil)
	m, _ := receiveAs[*frame.State](h)
	if m.State != frame.Failed || !strings.Contains(m.Message, "does not accept chunks") {
		t.Errorf("%+v", m)
	}
	if err := outcome(t, served); err == nil {
		t.Error("it serves")
	}
}

func TestStreamRefusesBatchOfSeveral(t *testing.T) {
	t.Parallel()
	h := listen(t)
	served := h.serve(t.Context(), worker.Settings{Stream: words})
	h.ready()
	h.predict(1, 2)
	m, _ := receiveAs[*frame.Error](h)
	if m.Kind != frame.Protocol || !strings.Contains(m.Message, "2 items for a worker that streams") {
		t.Errorf("%+v", m)
	}
	if err := outcome(t, served); !errors.Is(err, frame.ErrViolation) {
		t.Errorf("got %v", err)
	}
}

func TestInvalidSettingsAreNamed(t *testing.T) {
	t.Parallel()
	for want, s := range map[string]worker.Settings{
		"Settings.Predict is nil, and Stream too":   {},
		"Settings: Predict and Stream are both set": {Predict: double, Stream: words},
		"Settings.ChunksOnly goes with Stream":      {Predict: double, ChunksOnly: true},
		"Settings.Slots: -1 is not between":         {Stream: words, Slots: -1},
	} {
		err := worker.Serve(t.Context(), s)
		if err == nil || !strings.Contains(err.Error(), want) || worker.ExitCode(err) != worker.ExitMisused {
			t.Errorf("got %v, exit code %d", err, worker.ExitCode(err))
		}
	}
}
