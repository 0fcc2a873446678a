package frame_test

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"strings"

	"github.com/stagemesh/stagemesh/internal/worker/frame"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// vectorCase is a message with its body, or a frame as it is.
type vectorCase struct {
	name, direction string
	m               frame.Message
	body            *frame.Body
	frame           []byte
	// why is what is wrong; empty for a valid case.
	why string
}

// Directions: who sends it.
const (
	worker = "worker"
	host   = "host"
)

func vectorCases() []vectorCase {
	var out []vectorCase
	out = append(out, workerMessages()...)
	out = append(out, hostMessages()...)
	out = append(out, modelMessages()...)
	out = append(out, batches()...)
	out = append(out, answers()...)
	out = append(out, otherSpellings()...)
	out = append(out, brokenFrames()...)
	out = append(out, brokenHeaders()...)
	out = append(out, brokenHostMessages()...)
	return append(out, brokenWorkerMessages()...)
}

func workerMessages() []vectorCase {
	batch := uint64(7)
	var examples frame.Body
	return []vectorCase{
		{name: "hello", direction: worker, m: &frame.Hello{Protocols: []int{1}, Name: "classify", PID: 4711}},
		{name: "hello-all-keys", direction: worker, m: &frame.Hello{
			Protocols: []int{1, 2}, Name: "Größe \"π\" 😀", SDK: "stagemesh-python 0.1.0", PID: 1, Capabilities: []string{frame.Stream, "later"},
		}},
		{name: "hello-of-streams", direction: worker, m: &frame.Hello{
			Protocols: []int{1}, Name: "chat", PID: 4711, Capabilities: []string{frame.Stream},
		}},
		{name: "state", direction: worker, m: &frame.State{State: frame.Startup, Message: "loading shard 3 of 12"}},
		{name: "state-shutdown", direction: worker, m: &frame.State{State: frame.Shutdown}},
		{name: "state-error", direction: worker, m: &frame.State{State: frame.Failed, Message: "no such file: m.onnx"}},
		{name: "ready", direction: worker, m: &frame.Ready{Slots: 2}},
		{name: "ready-with-engine", direction: worker, m: &frame.Ready{Spec: &frame.Spec{}, Engine: "onnxruntime 1.23.2, CPU, 2 threads"}},
		{name: "ready-without-keys", direction: worker, m: &frame.Ready{}},
		{name: "ready-with-parameters", direction: worker, m: &frame.Ready{Slots: 1, Spec: &frame.Spec{
			OneByOne: true, Parameters: []frame.ParameterSpec{{Name: "words", Type: frame.IntParameter, Description: "how many"}, {Name: "style"}},
		}}},
		{name: "ready-without-parameters", direction: worker, m: &frame.Ready{Slots: 1, Spec: &frame.Spec{Parameters: []frame.ParameterSpec{}}}},
		{name: "ready-with-schema", direction: worker, m: &frame.Ready{Slots: 8, Spec: &frame.Spec{
			BatchAxis: frame.None,
			Inputs: []frame.PartSpec{{
				Name: "request", ContentTypes: []string{"application/json"},
				Schema: json.RawMessage(`{"type":"object","properties":{"n":{"type":"integer","minimum":-1.5e0}},"required":["n"]}`),
			}},
			Outputs: []frame.PartSpec{{Name: "answer", Schema: json.RawMessage(`{}`), Optional: true}},
		}}},
		{name: "ready-with-spec", direction: worker, body: &examples, m: &frame.Ready{Spec: &frame.Spec{
			BatchAxis: frame.Rows,
			Inputs: []frame.PartSpec{
				{Name: "x", Datatype: tensor.FP32, Shape: []int64{-1, 4}, Description: "features"},
				{Name: "words", Datatype: tensor.Bytes, Shape: []int64{-1, -1}, Variable: frame.List, Optional: true},
				{Name: "ids", Datatype: tensor.Int64, Shape: []int64{-1, -1}, Variable: frame.Pad, Multiple: 8, Optional: true},
				{Name: "image", ContentTypes: []string{"image/png", "image/jpeg"}, Optional: true},
				{Name: "scale", Datatype: tensor.FP64, Shape: nil, Optional: true},
			},
			Outputs: []frame.PartSpec{{Name: "p", Datatype: tensor.FP32, Shape: []int64{-1, 2}}},
			Examples: []frame.Example{
				{Name: "two rows", Inputs: []frame.Part{
					examples.Tensor("x", -1, fp32([]int64{2, 4}, 0, 1, 2, 3, 4, 5, 6, 7)),
				}},
				{Name: "an image", Inputs: []frame.Part{
					examples.Tensor("x", -1, fp32([]int64{1, 4}, -1, 0.5, 1e-3, 2)),
					examples.Blob("image", -1, "image/png", []byte("\x89PNG\r\n\x1a\n")),
				}},
			},
		}}},
		{name: "pong", direction: worker, m: &frame.Pong{N: 41}},
		{name: "error-of-a-batch", direction: worker, m: &frame.Error{
			Batch: &batch, Kind: frame.Exception, Name: "ValueError", Message: "cannot reshape",
			Traceback: "Traceback (most recent call last):\n  File \"w.py\", line 3\nValueError: cannot reshape\n",
		}},
		{name: "error-out-of-memory", direction: worker, m: &frame.Error{Batch: &batch, Kind: frame.OutOfMemory, Name: "OutOfMemoryError", Message: "2 GiB"}},
		{name: "error-unsupported", direction: worker, m: &frame.Error{Kind: frame.Unsupported, Name: "Unsupported", Message: "load"}},
	}
}

func hostMessages() []vectorCase {
	return []vectorCase{
		{name: "welcome", direction: host, m: &frame.Welcome{Protocol: 1, MaxFrame: 1 << 26}},
		{name: "welcome-all-keys", direction: host, m: &frame.Welcome{
			Protocol: 1, Options: json.RawMessage(`{"model":"m.onnx","depth":{"of":[1,2.5,true,null,"π"]}}`),
			Devices: []string{"0", "MIG-1"}, Slots: 2, MaxSize: 32, MaxFrame: 1<<53 - 1, Capabilities: []string{frame.Stream},
		}},
		{name: "cancel", direction: host, m: &frame.Cancel{Batch: 7}},
		{name: "cancel-items", direction: host, m: &frame.Cancel{Batch: 7, Items: []int{0, 3}}},
		{name: "ping", direction: host, m: &frame.Ping{N: 41}},
		{name: "shutdown", direction: host, m: &frame.Stop{Timeout: 5000}},
		{name: "error-protocol", direction: host, m: &frame.Error{Kind: frame.Protocol, Name: "Version", Message: "this host speaks 1"}},
	}
}

func modelMessages() []vectorCase {
	var examples, run frame.Body
	load, batch := uint64(3), uint64(7)
	record := frame.Load{
		Load: 1, Model: "Ирис/7", ModelType: "linear", Source: "iris/7.json", Options: map[string]string{"precision": "fp16", "": "π"}, Timeout: 90_000,
	}
	return []vectorCase{
		{name: "hello-of-models", direction: worker, m: &frame.Hello{Protocols: []int{1}, Name: "linear", PID: 4711, Capabilities: []string{frame.Models}}},
		{name: "welcome-of-models", direction: host, m: &frame.Welcome{
			Protocol: 1, MaxFrame: 1 << 26, Capabilities: []string{frame.Models}, Memory: frame.Memory{Host: 4 << 30, Device: 20 << 30},
		}},
		{name: "ready-of-models", direction: worker, m: &frame.Ready{Spec: &frame.Spec{}, Models: &frame.ModelLimits{
			Capacity: frame.Memory{Host: 512 << 20}, DefaultSize: frame.Memory{Host: 1 << 20}, LoadSlots: 2, LoadTimeout: 90_000,
		}}},
		{name: "ready-of-models-without-limits", direction: worker, m: &frame.Ready{Spec: &frame.Spec{}, Models: &frame.ModelLimits{}}},
		{name: "load", direction: host, m: &record},
		{name: "load-least", direction: host, m: &frame.Load{Model: strings.Repeat("m", frame.MaxModel)}},
		{name: "loaded", direction: worker, m: &frame.Loaded{Load: 1, Size: frame.Memory{Host: 12 << 10, Device: 1 << 53 >> 1}, MaxConcurrency: 4}},
		{name: "loaded-least", direction: worker, m: &frame.Loaded{Load: 1<<53 - 1}},
		{name: "loaded-with-spec", direction: worker, body: &examples, m: &frame.Loaded{Load: 2, Spec: &frame.Spec{
			Outputs:  []frame.PartSpec{{Name: "p", Datatype: tensor.FP32, Shape: []int64{-1, 3}}},
			Examples: []frame.Example{{Name: "one", Inputs: []frame.Part{examples.Tensor("x", -1, fp32([]int64{1, 2}, 1, 2))}}},
		}}},
		{name: "predict-of-a-model", direction: host, body: &run, m: &frame.Predict{
			Batch: 8, Model: &frame.Model{ID: "Ирис/7", Alias: "iris"}, Items: []frame.Item{{ID: "a"}},
			Parts: []frame.Part{run.Tensor("x", -1, fp32([]int64{1, 2}, 1, 2))},
		}},
		{name: "error-of-a-load-out-of-memory", direction: worker, m: &frame.Error{Load: &load, Kind: frame.OutOfMemory, Name: "MemoryError", Message: "12 KiB"}},
		{name: "error-of-a-load", direction: worker, m: &frame.Error{Load: &load, Kind: frame.InvalidModel, Name: "FileNotFoundError", Message: "iris/7.json"}},
		{name: "error-of-a-cancelled-load", direction: worker, m: &frame.Error{Load: &load, Kind: frame.Cancelled, Name: "Cancelled", Message: ""}},
		{name: "error-of-a-missing-model", direction: worker, m: &frame.Error{Batch: &batch, Kind: frame.InvalidModel, Name: "InvalidModel", Message: "iris"}},
		{name: "unload", direction: host, m: &frame.Unload{Load: frame.Load{Load: 4, Model: "m"}}},
		{name: "unloaded", direction: worker, m: &frame.Unloaded{Loaded: frame.Loaded{Load: 4}}},
		{name: "size", direction: host, m: &frame.Size{Load: record}},
		{name: "sized", direction: worker, m: &frame.Sized{Loaded: frame.Loaded{Load: 5, Size: frame.Memory{Host: 12 << 10}}}},
		{name: "sized-unknown", direction: worker, m: &frame.Sized{Loaded: frame.Loaded{Load: 5}}},
	}
}

func batches() []vectorCase {
	var one, stacked, apart, blobs, words, scalars, variable, parameters, traced frame.Body
	limit := &frame.Predict{Batch: 1<<53 - 1, Warmup: true, Items: []frame.Item{{ID: "warm-up"}}, Parts: []frame.Part{}}
	return []vectorCase{
		{name: "predict", direction: host, body: &one, m: &frame.Predict{
			Batch: 1, Items: []frame.Item{{ID: "01932f5e-0000-7000-8000-000000000001", Timeout: 29_950}},
			Parts: []frame.Part{one.Tensor("x", -1, fp32([]int64{1, 4}, 1, 2, 3, 4))},
		}},
		{name: "predict-joined", direction: host, body: &stacked, m: &frame.Predict{
			Batch: 2, Items: []frame.Item{{ID: "a"}, {ID: "b", Rows: 2}, {ID: "c"}},
			Parts: []frame.Part{
				stacked.Tensor("x", -1, fp32([]int64{4, 2}, 0, 1, 2, 3, 4, 5, 6, 7)),
				stacked.Tensor("mask", -1, tensor.Tensor{Datatype: tensor.Bool, Shape: []int64{4}, Raw: []byte{1, 0, 0, 1}}),
			},
		}},
		{name: "predict-one-by-one", direction: host, body: &apart, m: &frame.Predict{
			Batch: 3, Items: []frame.Item{{ID: "a"}, {ID: "b"}, {ID: "c"}},
			Parts: []frame.Part{
				apart.Tensor("x", 0, fp32([]int64{3}, 0, 1, 2)),
				apart.Tensor("x", 1, fp32([]int64{3}, 3, 4, 5)),
				apart.Tensor("x", 2, fp32([]int64{3}, 6, 7, 8)),
			},
		}},
		{name: "predict-variable", direction: host, body: &variable, m: &frame.Predict{
			Batch: 4, Items: []frame.Item{{ID: "a"}, {ID: "b"}},
			Parts: []frame.Part{
				variable.Tensor("tokens", 0, int64s([]int64{1, 2}, 1, -2)),
				variable.Tensor("tokens", 1, int64s([]int64{1, 3}, 3, 4, 5)),
			},
		}},
		{name: "predict-blobs", direction: host, body: &blobs, m: &frame.Predict{
			Batch: 5, Items: []frame.Item{{ID: "a"}, {ID: "b"}, {ID: "c"}},
			Parts: []frame.Part{
				blobs.Blob("image", 0, "image/png", []byte("\x89PNG")),
				blobs.Blob("image", 1, "", nil),
				blobs.Blob("image", 2, "text/plain; charset=utf-8", []byte("text")),
			},
		}},
		{name: "predict-bytes", direction: host, body: &words, m: &frame.Predict{
			Batch: 6, Items: []frame.Item{{ID: "a"}, {ID: "b", Rows: 2}},
			Parts: []frame.Part{words.Tensor("text", -1, texts("one", "", "drei"))},
		}},
		{name: "predict-scalars", direction: host, body: &scalars, m: &frame.Predict{
			Batch: 7, Items: []frame.Item{{ID: "a"}},
			Parts: []frame.Part{
				scalars.Tensor("scale", 0, tensor.Tensor{Datatype: tensor.FP64, Raw: binary.LittleEndian.AppendUint64(nil, math.Float64bits(0.5))}),
				scalars.Tensor("none", 0, tensor.Tensor{Datatype: tensor.Int8, Shape: []int64{0, 4}}),
			},
		}},
		{name: "predict-parameters", direction: host, body: &parameters, m: &frame.Predict{
			Batch: 8, Model: &frame.Model{Alias: "best", Version: "2"},
			Items: []frame.Item{{
				ID: "a", Timeout: 1, Metadata: map[string]string{"tenant": "ü\u2028\x7f", "": "\x00\x1f\"\\/"},
				Parameters: frame.Parameters{
					"yes": true, "no": false, "zero": int64(0), "whole": int64(-42), "least": int64(math.MinInt64),
					"most": uint64(math.MaxUint64), "half": 0.5, "one": 1.0, "large": 1e300, "tiny": 5e-324, "minus": math.Copysign(0, -1),
					"text": "π 😀 \"quoted\"\n", "": "empty name",
				},
				InputParameters: map[string]frame.Parameters{"text": {"language": "en", "size": int64(5)}},
			}},
			Parts: []frame.Part{parameters.Blob("text", 0, "text/plain", []byte("hello"))},
		}},
		{name: "predict-warmup", direction: host, m: limit},
		{name: "predict-traced", direction: host, body: &traced, m: &frame.Predict{
			Batch: 9, Trace: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", Items: []frame.Item{{ID: "a"}},
			Parts: []frame.Part{traced.Tensor("x", -1, fp32([]int64{1, 2}, 1, 2))},
		}},
	}
}

func answers() []vectorCase {
	var joined, apart, mixed, chunk, rows, words, streamed frame.Body
	first, batch := 0, uint64(9)
	return []vectorCase{
		{name: "result", direction: worker, body: &joined, m: &frame.Result{
			Batch: 1, Parts: []frame.Part{joined.Tensor("p", -1, fp32([]int64{1, 2}, 0.25, 0.75))},
		}},
		{name: "result-one-by-one", direction: worker, body: &apart, m: &frame.Result{
			Batch: 2, Parts: []frame.Part{
				apart.Tensor("p", 0, fp32([]int64{1, 2}, 0, 1)),
				apart.Tensor("p", 1, fp32([]int64{2, 2}, 2, 3, 4, 5)),
				apart.Tensor("p", 2, fp32([]int64{1, 2}, 6, 7)),
			},
		}},
		{name: "result-with-faults", direction: worker, body: &mixed, m: &frame.Result{
			Batch: 3,
			Parts: []frame.Part{
				mixed.Tensor("p", -1, fp32([]int64{3, 1}, 1, 0, 3)),
				withParameters(mixed.Blob("label", 0, "text/plain", []byte("cat")), frame.Parameters{"language": "en"}),
				mixed.Blob("label", 2, "text/plain", []byte("dog")),
			},
			Faults:   []frame.Fault{{Item: 1, Reason: "INVALID_INPUT", Message: "not finite", Field: "x"}},
			Metadata: []frame.Metadata{{Item: 2, Values: map[string]string{"cache": "hit", "model": "m"}}},
		}},
		{name: "result-only-faults", direction: worker, m: &frame.Result{Batch: 4, Faults: []frame.Fault{
			{Item: 0, Reason: "RUNNER_FAILED", Message: ""}, {Item: 1, Reason: "RUNNER_OUT_OF_MEMORY", Message: "10 GiB"},
		}}},
		{name: "result-of-exceptions", direction: worker, m: &frame.Result{Batch: 4, Faults: []frame.Fault{
			{Item: 0, Reason: "RUNNER_FAILED", Message: "no", Exception: &frame.Raised{Name: "KeyError", Message: "'x'", Traceback: "in predict_item"}},
			{Item: 1, Reason: "RUNNER_FAILED", Message: "no", Exception: &frame.Raised{Name: "BadOutput", Message: "y"}},
		}}},
		{name: "result-of-rank-1", direction: worker, m: &frame.Result{Batch: 5}},
		{name: "chunk", direction: worker, body: &chunk, m: &frame.Chunk{
			Batch: 6, Item: 1, Parts: []frame.Part{chunk.Blob("text", 1, "text/plain", []byte("to"))},
		}},
		{name: "chunk-of-a-tensor", direction: worker, body: &rows, m: &frame.Chunk{
			Batch: 8, Parts: []frame.Part{rows.Tensor("p", -1, fp32([]int64{2, 2}, 0, 1, 2, 3))},
		}},
		{name: "chunk-of-blobs", direction: worker, body: &words, m: &frame.Chunk{
			Batch: 8, Parts: []frame.Part{
				words.Blob("text", -1, "text/plain", []byte("größer ")),
				words.Blob("usage", -1, "application/json", []byte(`{"tokens":2}`)),
				words.Blob("nothing", -1, "", nil),
			},
		}},
		{name: "result-of-a-stream", direction: worker, body: &streamed, m: &frame.Result{
			Batch: 8,
			Parts: []frame.Part{
				streamed.Tensor("p", 0, fp32([]int64{3, 2}, 0, 1, 2, 3, 4, 5)),
				streamed.Blob("text", 0, "text/plain", []byte("größer als")),
				streamed.Blob("usage", 0, "application/json", []byte(`[{"tokens":2},{"tokens":1}]`)),
			},
			Metadata: []frame.Metadata{{Item: 0, Values: map[string]string{"finish": "stop"}}},
		}},
		{name: "result-of-a-stream-that-failed", direction: worker, m: &frame.Result{
			Batch: 9, Faults: []frame.Fault{{Item: 0, Reason: "INVALID_INPUT", Message: "is empty", Field: "prompt"}},
		}},
		{name: "result-with-spans", direction: worker, m: &frame.Result{
			Batch: 9, Faults: []frame.Fault{{Item: 0, Reason: "RUNNER_FAILED", Message: "no"}},
			Spans: []frame.Span{
				{Name: "predict", Start: 1_700_000_000_000_000, End: 1_700_000_000_004_000, Error: "ValueError"},
				{Name: "tokenize", Parent: &first, Start: 1_700_000_000_001_000, End: 1_700_000_000_001_000, Attributes: frame.Parameters{
					"rows": int64(32), "share": 0.5, "cached": false, "model": "größer",
				}},
			},
		}},
		{name: "error-with-spans", direction: worker, m: &frame.Error{
			Batch: &batch, Kind: frame.Exception, Name: "ValueError", Message: "no",
			Spans: []frame.Span{{Name: "predict", Start: 0, End: 1<<53 - 1, Error: "ValueError"}},
		}},
	}
}

// otherSpellings are frames that the Go side does not write, and every reader
// takes.
func otherSpellings() []vectorCase {
	header := func(name, direction, text string, body []byte) vectorCase {
		return vectorCase{name: "spelling-" + name, direction: direction, frame: raw(text, body)}
	}
	return []vectorCase{
		header("spaces", host, " {\r\n\t\"type\" : \"cancel\" ,\n \"batch\" : 7 , \"items\" : [ 1 , 2 ] } \n", nil),
		header("type-last", host, `{"n":41,"type":"ping"}`, nil),
		header("escapes", host, `{"typ\u0065":"\u0070ing","n":1,"\ud83d\ude00":"\/\b\f\n\r\t\"\\"}`, nil),
		header("unknown-keys", host, `{"type":"ping","n":1,"later":{"a":[1,-2.5e3,null,true,{"n":"x"}]},"N":2,"Type":"x"}`, nil),
		header("defaults-spelt-out", host, `{"type":"predict","batch":1,"items":[{"id":"a","rows":1,"parameters":{},"metadata":{}}],`+
			`"parts":[{"name":"x","item":0,"datatype":"UINT8","shape":[2],"at":0,"size":2,"place":"inline","parameters":{}}],"warmup":false}`, []byte{1, 2}),
		header("places-in-any-order", host, `{"type":"predict","batch":1,"items":[{"id":"a"}],"parts":[`+
			`{"name":"b","item":0,"content_type":"","at":8,"size":2},{"name":"none","item":0,"content_type":"","at":9,"size":0},`+
			`{"name":"a","item":0,"content_type":"","at":1,"size":3}]}`, []byte("_abc____de_")),
		header("body-without-parts", worker, `{"type":"pong","n":1}`, []byte("unused")),
		header("numbers-of-parameters", host, `{"type":"predict","batch":1,"items":[{"id":"a","parameters":{`+
			`"a":1E2,"b":-0,"c":-0.0,"d":1e-7,"e":9007199254740993,"f":18446744073709551615,"g":-9223372036854775808}}],"parts":[]}`, nil),
		header("result-empty-lists", worker, `{"type":"result","batch":1,"parts":[],"faults":[],"metadata":[],"spans":[]}`, nil),
		header("deep", host, `{"type":"ping","n":1,"deep":`+strings.Repeat("[", 63)+strings.Repeat("]", 63)+`}`, nil),
	}
}

func brokenFrames() []vectorCase {
	ping := raw(`{"type":"ping","n":1}`, nil)
	changed := func(at int, b ...byte) []byte {
		out := append([]byte(nil), ping...)
		copy(out[at:], b)
		return out
	}
	var body frame.Body
	predict := predictFrame(&body)
	bad := func(name, why string, data []byte) vectorCase {
		return vectorCase{name: "invalid-" + name, direction: host, frame: data, why: why}
	}
	return []vectorCase{
		bad("magic", "other first bytes", changed(3, '2')),
		bad("text", "other first bytes", []byte("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")),
		bad("header-of-1", "the header is shorter than 2 bytes", changed(4, 1, 0, 0, 0)),
		bad("header-of-0", "the header is shorter than 2 bytes", changed(4, 0, 0, 0, 0)),
		bad("header-too-long", "the header is longer than 1,048,576 bytes", changed(4, 1, 0, 0x10, 0)),
		bad("header-huge", "the header is longer than 1,048,576 bytes", changed(4, 0xff, 0xff, 0xff, 0xff)),
		bad("body-too-long", "the body is longer than the limit, here 1,048,576 bytes", changed(8, 1, 0, 0x10, 0)),
		bad("body-huge", "the body is longer than the limit", changed(8, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff)),
		bad("body-2-to-63", "the body is longer than the limit", changed(8, 0, 0, 0, 0, 0, 0, 0, 0x80)),
		bad("truncated-prefix", "it ends among the first 16 bytes", ping[:9]),
		bad("truncated-header", "it ends in the header", ping[:len(ping)-1]),
		bad("truncated-body", "it ends in the body", predict[:len(predict)-1]),
		bad("truncated-before-body", "it ends before the body", predict[:16+len(headerOf(predict))]),
	}
}

func predictFrame(body *frame.Body) []byte {
	head, err := frame.Encode(&frame.Predict{
		Batch: 1, Items: []frame.Item{{ID: "a"}},
		Parts: []frame.Part{body.Tensor("x", -1, fp32([]int64{1, 2}, 1, 2))},
	}, 8)
	if err != nil {
		panic(err)
	}
	return append(head, fp32(nil, 1, 2).Raw...)
}

func brokenHeaders() []vectorCase {
	utf16 := func(text string) string {
		var out []byte
		for _, c := range text {
			out = binary.LittleEndian.AppendUint16(out, uint16(c))
		}
		return string(out)
	}
	var out []vectorCase
	for _, c := range []struct{ name, why, header string }{
		{"no-json", "the header is not JSON", `type: ping`},
		{"array", "the header is not an object", `[{"type":"ping","n":1}]`},
		{"trailing-data", "there is more after the object", `{"type":"ping","n":1}{}`},
		{"trailing-zero", "there is more after the object", "{\"type\":\"ping\",\"n\":1}\x00"},
		{"trailing-comma", "no JSON", `{"type":"ping","n":1,}`},
		{"unfinished", "no JSON", `{"type":"ping","n":1`},
		{"single-quotes", "no JSON", `{'type':'ping','n':1}`},
		{"comment", "no JSON", `{"type":"ping","n":1/**/}`},
		{"control-character", "no JSON: a raw line feed in a string", "{\"type\":\"ping\",\"n\":1,\"k\":\"a\nb\"}"},
		{"escape", "no JSON: no such escape", `{"type":"ping","n":1,"k":"\x41"}`},
		{"escape-surrogate", "no JSON in UTF-8: half a surrogate pair", `{"type":"ping","n":1,"k":"\ud800"}`},
		{"byte-order-mark", "a byte order mark", "\xef\xbb\xbf" + `{"type":"ping","n":1}`},
		{"utf-16", "the header is UTF-16", utf16(`{"type":"ping","n":1}`)},
		{"utf-8", "the header is not UTF-8", "{\"type\":\"ping\",\"n\":1,\"k\":\"\xff\"}"},
		{"utf-8-surrogate", "the header is not UTF-8: half a surrogate pair", "{\"type\":\"ping\",\"n\":1,\"k\":\"\xed\xa0\x80\"}"},
		{"nan", "no JSON: NaN", `{"type":"ping","n":1,"k":NaN}`},
		{"leading-zero", "no JSON: a number with a leading zero", `{"type":"ping","n":01}`},
		{"no-type", "there is no type", `{"n":1}`},
		{"type-is-a-number", "the type is not a string", `{"type":1,"n":1}`},
		{"type-unknown", "a type that nobody knows", `{"type":"pingg","n":1}`},
		{"type-in-capitals", "a type that nobody knows", `{"type":"PING","n":1}`},
	} {
		out = append(out, vectorCase{name: "invalid-" + c.name, direction: host, frame: raw(c.header, nil), why: c.why})
	}
	return out
}

func brokenHostMessages() []vectorCase {
	var out []vectorCase
	add := func(name, why, header string) {
		out = append(out, vectorCase{name: "invalid-" + name, direction: host, frame: raw(header, []byte("01234567")), why: why})
	}
	for _, c := range []struct{ name, why, value string }{
		{"missing", "n is missing", ""},
		{"null", "a number is null", `,"n":null`},
		{"string", "a number is a string", `,"n":"1"`},
		{"boolean", "a number is a boolean", `,"n":true`},
		{"float", "the number is not whole", `,"n":1.0`},
		{"exponent", "the number is not written as a whole one", `,"n":1e2`},
		{"negative", "the number is negative", `,"n":-1`},
		{"too-large", "the number is above 9,007,199,254,740,991", `,"n":9007199254740992`},
		{"huge", "the number is above 9,007,199,254,740,991", `,"n":100000000000000000000000000000`},
		{"in-capitals", "n is missing: keys have one case", `,"N":1`},
	} {
		add("ping-n-"+c.name, c.why, `{"type":"ping"`+c.value+`}`)
	}
	for _, c := range []struct{ name, why, keys string }{
		{"protocol-0", "there is no version 0", `"protocol":0,"options":{},"max_frame":1`},
		{"options-missing", "options are missing", `"protocol":1,"max_frame":1`},
		{"options-list", "options are no object", `"protocol":1,"options":[],"max_frame":1`},
		{"slots-0", "slots are at least 1", `"protocol":1,"options":{},"max_frame":1,"slots":0`},
		{"max-size-0", "max_size is at least 1", `"protocol":1,"options":{},"max_frame":1,"max_size":0`},
		{"devices", "devices are strings", `"protocol":1,"options":{},"max_frame":1,"devices":[0]`},
	} {
		add("welcome-"+c.name, c.why, `{"type":"welcome",`+c.keys+`}`)
	}
	for _, c := range []struct{ name, why, header string }{
		{"welcome-memory-number", "memory is not an object", `"type":"welcome","protocol":1,"options":{},"max_frame":1,"memory":1`},
		{"welcome-memory-negative", "a negative size", `"type":"welcome","protocol":1,"options":{},"max_frame":1,"memory":{"device":-1}`},
		{"load-without-load", "load is missing", `"type":"load","model":"m"`},
		{"load-without-model", "model is missing", `"type":"load","load":1`},
		{"load-model-object", "the model is not a string", `"type":"load","load":1,"model":{"id":"m"}`},
		{"load-model-empty", "the model has no name", `"type":"load","load":1,"model":""`},
		{"load-model-long", "a name of 256 bytes", `"type":"load","load":1,"model":"` + strings.Repeat("π", 128) + `"`},
		{"load-model-control", "a control character", `"type":"load","load":1,"model":"a\u007f"`},
		{"load-source-number", "the source is not a string", `"type":"load","load":1,"model":"m","source":1`},
		{"load-model-type-number", "the type is not a string", `"type":"load","load":1,"model":"m","model_type":1`},
		{"load-options-number", "an option is not a string", `"type":"load","load":1,"model":"m","options":{"a":1}`},
		{"load-timeout-0", "a timeout is at least 1", `"type":"load","load":1,"model":"m","timeout":0`},
		{"unload-without-load", "load is missing", `"type":"unload","model":"m"`},
		{"unload-model-empty", "the model has no name", `"type":"unload","load":1,"model":""`},
		{"size-without-model", "model is missing", `"type":"size","load":1`},
		{"size-options-list", "options are no object", `"type":"size","load":1,"model":"m","options":[]`},
	} {
		add(c.name, c.why, "{"+c.header+"}")
	}
	item := func(keys string) string { return fmt.Sprintf(`"batch":1,"items":[{"id":"a"%s}],"parts":[]`, keys) }
	part := func(keys string) string {
		return fmt.Sprintf(`"batch":1,"items":[{"id":"a"},{"id":"b"}],"parts":[{"name":"x",%s}]`, keys)
	}
	blob := func(keys string) string { return part(`"item":0,"content_type":"",` + keys) }
	two := func(first, second string) string {
		return `"batch":1,"items":[{"id":"a"}],"parts":[{"name":"x","item":0,"content_type":"",` + first + `},{"name":"y","item":0,"content_type":"",` + second + `}]`
	}
	for _, c := range []struct{ name, why, keys string }{
		{"without-items", "there are no items", `"batch":1,"items":[],"parts":[]`},
		{"items-missing", "items are missing", `"batch":1,"parts":[]`},
		{"parts-missing", "parts are missing", `"batch":1,"items":[{"id":"a"}]`},
		{"items-object", "items are no list", `"batch":1,"items":{},"parts":[]`},
		{"batch-negative", "a negative number", `"batch":-1,"items":[{"id":"a"}],"parts":[]`},
		{"warmup-number", "a boolean is a number", item("") + `,"warmup":1`},
		{"trace-number", "a trace is a number", item("") + `,"trace":1`},
		{"model-text", "a model is a string", item("") + `,"model":"m"`},
		{"item-without-id", "id is missing", `"batch":1,"items":[{}],"parts":[]`},
		{"rows-0", "rows are at least 1", item(`,"rows":0`)},
		{"rows-negative", "a negative number", item(`,"rows":-1`)},
		{"timeout-0", "a timeout is at least 1", item(`,"timeout":0`)},
		{"parameter-null", "a parameter is null", item(`,"parameters":{"a":null}`)},
		{"parameter-list", "a parameter is a list", item(`,"parameters":{"a":[1]}`)},
		{"parameter-nan", "no JSON: NaN", item(`,"parameters":{"a":NaN}`)},
		{"parameter-infinity", "no JSON: Infinity", item(`,"parameters":{"a":-Infinity}`)},
		{"parameter-beyond-double", "a number that no double holds", item(`,"parameters":{"a":1e400}`)},
		{"parameter-beyond-64-bits", "a whole number of more than 64 bits", item(`,"parameters":{"a":18446744073709551616}`)},
		{"parameter-below-64-bits", "a whole number of more than 64 bits", item(`,"parameters":{"a":-9223372036854775809}`)},
		{"metadata-number", "metadata are strings", item(`,"metadata":{"a":1}`)},
		{"place-outside", "a place outside the body", blob(`"at":4,"size":5`)},
		{"place-behind", "a place outside the body", blob(`"at":9,"size":0`)},
		{"place-overflow", "a place outside the body, whose end overflows", blob(`"at":9007199254740991,"size":9007199254740991`)},
		{"at-negative", "a negative number", blob(`"at":-1,"size":1`)},
		{"size-negative", "a negative number", blob(`"at":1,"size":-1`)},
		{"size-missing", "size is missing", blob(`"at":0`)},
		{"places-overlap", "two places overlap", two(`"at":0,"size":5`, `"at":4,"size":1`)},
		{"places-overlap-backwards", "two places overlap", two(`"at":4,"size":4`, `"at":0,"size":5`)},
		{"item-outside", "the index of no item", part(`"item":2,"content_type":"","at":0,"size":0`)},
		{"part-of-no-kind", "neither a tensor nor a blob", part(`"item":0,"at":0,"size":0`)},
		{"part-of-two-kinds", "both a tensor and a blob", part(`"item":0,"datatype":"INT8","shape":[1],"content_type":"","at":0,"size":1`)},
		{"shape-missing", "a tensor without a shape", part(`"item":0,"datatype":"INT8","at":0,"size":1`)},
		{"shape-negative", "a negative extent", part(`"item":0,"datatype":"INT8","shape":[-1],"at":0,"size":1`)},
		{"shape-overflow", "more elements than can be counted", part(`"item":0,"datatype":"INT8","shape":[4294967296,4294967296],"at":0,"size":0`)},
		{"shape-of-17-axes", "more than 16 axes", part(`"item":0,"datatype":"INT8","shape":[1` + strings.Repeat(",1", 16) + `],"at":0,"size":1`)},
		{"shape-lies", "the size is not that of the shape", part(`"item":0,"datatype":"FP32","shape":[1],"at":0,"size":8`)},
		{"datatype", "no datatype", part(`"item":0,"datatype":"fp32","shape":[1],"at":0,"size":4`)},
		{"place-shm", "a place that is reserved", blob(`"at":0,"size":1,"place":"shm"`)},
		{"blob-without-item", "a blob that is of no item", part(`"content_type":"","at":0,"size":0`)},
		{"scalar-without-item", "a scalar that is of no item", part(`"datatype":"INT8","shape":[],"at":0,"size":1`)},
		{"rows-of-joined", "a joined tensor whose axis 0 is not the sum of the items' rows", part(`"datatype":"INT8","shape":[3],"at":0,"size":3`)},
		{"bytes-too-few", "elements of BYTES go beyond its place", part(`"item":0,"datatype":"BYTES","shape":[1],"at":0,"size":8`)},
	} {
		add("predict-"+c.name, c.why, `{"type":"predict",`+c.keys+`}`)
	}
	add("cancel-without-items", "an empty list of items", `{"type":"cancel","batch":1,"items":[]}`)
	add("cancel-item-negative", "a negative number", `{"type":"cancel","batch":1,"items":[-1]}`)
	add("shutdown-timeout-negative", "a negative number", `{"type":"shutdown","timeout":-1}`)
	return out
}

func brokenWorkerMessages() []vectorCase {
	var out []vectorCase
	for _, c := range []struct{ name, why, header string }{
		{"hello-protocols-empty", "it speaks no version", `{"type":"hello","protocols":[],"name":"a","pid":1}`},
		{"hello-name-missing", "name is missing", `{"type":"hello","protocols":[1],"pid":1}`},
		{"hello-pid-string", "a number is a string", `{"type":"hello","protocols":[1],"name":"a","pid":"1"}`},
		{"state-unknown", "no such state", `{"type":"state","state":"READY"}`},
		{"ready-slots-0", "slots are at least 1", `{"type":"ready","slots":0}`},
		{"ready-engine-long", "an engine has at most 200 bytes", `{"type":"ready","engine":"` + strings.Repeat("x", 201) + `"}`},
		{"ready-batch-axis", "no such batch axis", `{"type":"ready","spec":{"batch_axis":"columns"}}`},
		{"ready-extent", "an extent below -1", `{"type":"ready","spec":{"inputs":[{"name":"x","datatype":"FP32","shape":[-2]}]}}`},
		{"ready-variable", "no such value of variable", `{"type":"ready","spec":{"inputs":[{"name":"x","datatype":"FP32","shape":[-1,-1],"variable":"any"}]}}`},
		{"ready-example-outside", "a place outside the body", `{"type":"ready","spec":{"examples":[{"name":"a","inputs":[{"name":"x","content_type":"","at":8,"size":1}]}]}}`},
		{"ready-examples-overlap", "two places overlap", `{"type":"ready","spec":{"examples":[` +
			`{"name":"a","inputs":[{"name":"x","content_type":"","at":0,"size":8}]},{"name":"b","inputs":[{"name":"x","content_type":"","at":0,"size":8}]}]}}`},
		{"result-batch-missing", "batch is missing", `{"type":"result"}`},
		{"result-place-outside", "a place outside the body", `{"type":"result","batch":1,"parts":[{"name":"p","datatype":"FP32","shape":[4],"at":0,"size":16}]}`},
		{"result-blob-without-item", "a blob that is of no item", `{"type":"result","batch":1,"parts":[{"name":"p","content_type":"","at":0,"size":8}]}`},
		{"result-fault-item-negative", "a negative number", `{"type":"result","batch":1,"faults":[{"item":-1,"reason":"INVALID_INPUT","message":""}]}`},
		{"result-fault-without-reason", "a fault without a reason", `{"type":"result","batch":1,"faults":[{"item":0,"reason":"","message":""}]}`},
		{"result-exception-text", "an exception is an object", `{"type":"result","batch":1,"faults":[{"item":0,"reason":"RUNNER_FAILED","message":"","exception":"KeyError"}]}`},
		{"result-metadata-number", "metadata are strings", `{"type":"result","batch":1,"metadata":[{"item":0,"values":{"a":1}}]}`},
		{"result-span-without-end", "end is missing", `{"type":"result","batch":1,"spans":[{"name":"a","start":1}]}`},
		{"result-span-name-number", "a name is a number", `{"type":"result","batch":1,"spans":[{"name":1,"start":1,"end":2}]}`},
		{"result-span-start-float", "a time is not whole", `{"type":"result","batch":1,"spans":[{"name":"a","start":1.5,"end":2}]}`},
		{"result-span-attribute-list", "an attribute is a list", `{"type":"result","batch":1,"spans":[{"name":"a","start":1,"end":2,"attributes":{"k":[1]}}]}`},
		{"result-spans-object", "spans are no list", `{"type":"result","batch":1,"spans":{}}`},
		{"error-span-parent-negative", "a negative number", `{"type":"error","batch":1,"kind":"exception","error":"E","message":"","spans":[{"name":"a","parent":-1,"start":1,"end":2}]}`},
		{"error-kind", "no such kind", `{"type":"error","kind":"oops","error":"E","message":""}`},
		{"error-batch-null", "a number is null", `{"type":"error","batch":null,"kind":"exception","error":"E","message":""}`},
		{"error-message-missing", "message is missing", `{"type":"error","kind":"exception","error":"E"}`},
		{"ready-example-with-item", "an example is of no item", `{"type":"ready","spec":{"examples":[{"name":"a","inputs":[{"name":"x","item":0,"content_type":"","at":0,"size":1}]}]}}`},
		{"chunk-of-two-items", "a part of another item", `{"type":"chunk","batch":1,"item":0,"parts":[{"name":"x","item":1,"content_type":"","at":0,"size":1}]}`},
		{"chunk-item-missing", "item is missing", `{"type":"chunk","batch":1,"parts":[]}`},
		{"chunk-batch-missing", "batch is missing", `{"type":"chunk","item":0,"parts":[]}`},
		{"chunk-parts-missing", "parts are missing", `{"type":"chunk","batch":1,"item":0}`},
		{"chunk-item-negative", "a negative number", `{"type":"chunk","batch":1,"item":-1,"parts":[]}`},
		{"chunk-place-outside", "a place outside the body", `{"type":"chunk","batch":1,"item":0,"parts":[{"name":"x","content_type":"","at":8,"size":1}]}`},
		{"chunk-shape-lies", "a tensor that does not fill its place", `{"type":"chunk","batch":1,"item":0,"parts":[{"name":"p","datatype":"FP32","shape":[1],"at":0,"size":8}]}`},
		{"ready-parameter-type", "a type that is none", `{"type":"ready","spec":{"parameters":[{"name":"p","type":"number"}]}}`},
		{"ready-schema-text", "a schema that is not an object", `{"type":"ready","spec":{"inputs":[{"name":"x","schema":"{}"}]}}`},
		{"ready-models-list", "limits are no object", `{"type":"ready","models":[]}`},
		{"ready-capacity-negative", "a negative size", `{"type":"ready","models":{"capacity":{"host":-1}}}`},
		{"ready-capacity-number", "a size is not an object", `{"type":"ready","models":{"capacity":1048576}}`},
		{"ready-default-size-beyond-capacity", "no model of the default size fits", `{"type":"ready","models":{"capacity":{"host":8},"default_size":{"host":9}}}`},
		{"ready-load-slots-0", "load_slots are at least 1", `{"type":"ready","models":{"load_slots":0}}`},
		{"ready-load-slots-many", "load_slots are at most 1,024", `{"type":"ready","models":{"load_slots":1025}}`},
		{"ready-load-timeout-0", "a timeout is at least 1", `{"type":"ready","models":{"load_timeout":0}}`},
		{"loaded-without-load", "load is missing", `{"type":"loaded","size":{"host":1}}`},
		{"loaded-size-huge", "a size beyond 9,007,199,254,740,991", `{"type":"loaded","load":1,"size":{"host":9007199254740992}}`},
		{"loaded-size-float", "a size that is not whole", `{"type":"loaded","load":1,"size":{"device":0.5}}`},
		{"loaded-max-concurrency-0", "max_concurrency is at least 1", `{"type":"loaded","load":1,"max_concurrency":0}`},
		{"loaded-max-concurrency-many", "max_concurrency is at most 1,024", `{"type":"loaded","load":1,"max_concurrency":1025}`},
		{"loaded-spec-example-outside", "a place outside the body", `{"type":"loaded","load":1,"spec":{"examples":[{"name":"a","inputs":[{"name":"x","content_type":"","at":8,"size":1}]}]}}`},
		{"unloaded-without-load", "load is missing", `{"type":"unloaded","model":"m"}`},
		{"sized-without-load", "load is missing", `{"type":"sized","size":{"host":1}}`},
		{"sized-negative", "a negative size", `{"type":"sized","load":1,"size":{"host":-1}}`},
		{"error-load-negative", "a negative number", `{"type":"error","load":-1,"kind":"exception","error":"E","message":""}`},
		{"error-of-two", "an error of a batch and of a load", `{"type":"error","batch":1,"load":1,"kind":"exception","error":"E","message":""}`},
		{"error-cancelled-batch", "only loads are cancelled by an error", `{"type":"error","batch":1,"kind":"cancelled","error":"E","message":""}`},
		{"error-invalid-model-of-none", "an invalid model of no load and no batch", `{"type":"error","kind":"invalid_model","error":"E","message":""}`},
		{"ready-schema-boolean", "a schema that is not an object", `{"type":"ready","spec":{"outputs":[{"name":"x","schema":true}]}}`},
	} {
		out = append(out, vectorCase{name: "invalid-" + c.name, direction: worker, frame: raw(c.header, []byte("01234567")), why: c.why})
	}
	return out
}

func withParameters(p frame.Part, parameters frame.Parameters) frame.Part {
	p.Parameters = parameters
	return p
}

func fp32(shape []int64, values ...float32) tensor.Tensor {
	if shape == nil {
		shape = []int64{int64(len(values))}
	}
	return must(tensor.FromFP32(shape, values))
}

func int64s(shape []int64, values ...int64) tensor.Tensor {
	return must(tensor.FromInt64(shape, values))
}

func texts(values ...string) tensor.Tensor {
	var elements [][]byte
	for _, v := range values {
		elements = append(elements, []byte(v))
	}
	return must(tensor.FromBytes([]int64{int64(len(elements))}, elements))
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}
