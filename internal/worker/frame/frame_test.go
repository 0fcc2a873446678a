package frame_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"net"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stagemesh/stagemesh/internal/worker/frame"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// frames returns all valid vectors' frames, one after the other, and how many.
func frames(t testing.TB) ([]byte, int) {
	t.Helper()
	var out bytes.Buffer
	n := 0
	for _, c := range vectorCases() {
		switch {
		case c.m != nil:
			if err := frame.Write(&out, c.m, c.body); err != nil {
				t.Fatal(err)
			}
		case c.why == "":
			out.Write(c.frame)
		default:
			continue
		}
		n++
	}
	return out.Bytes(), n
}

func TestFramesAreReadFromAnyReader(t *testing.T) {
	t.Parallel()
	data, n := frames(t)
	readers := map[string]func(io.Reader) io.Reader{
		"as they are":        func(r io.Reader) io.Reader { return r },
		"byte by byte":       iotest.OneByteReader,
		"in halves":          iotest.HalfReader,
		"EOF with the data":  iotest.DataErrReader,
		"byte by byte + EOF": func(r io.Reader) io.Reader { return iotest.DataErrReader(iotest.OneByteReader(r)) },
	}
	for name, reader := range readers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := reader(bytes.NewReader(data))
			for i := range n {
				if _, _, err := frame.Read(r, vectorLimit); err != nil {
					t.Fatalf("frame %d: %v", i, err)
				}
			}
			if _, _, err := frame.Read(r, vectorLimit); err != io.EOF { //nolint:errorlint // it is returned as it is
				t.Errorf("at the end: %v", err)
			}
		})
	}
}

func TestTornFrameIsUnexpectedEOF(t *testing.T) {
	t.Parallel()
	var body frame.Body
	data := predictFrame(&body)
	for n := range data {
		_, _, err := frame.Read(bytes.NewReader(data[:n]), vectorLimit)
		want := io.ErrUnexpectedEOF
		if n == 0 {
			want = io.EOF
		}
		if !errors.Is(err, want) || errors.Is(err, frame.ErrViolation) {
			t.Errorf("after %d bytes: %v", n, err)
		}
	}
}

func TestReaderErrorIsReturned(t *testing.T) {
	t.Parallel()
	mine := errors.New("mine")
	var body frame.Body
	data := predictFrame(&body)
	for _, n := range []int{0, 1, 16, 17, len(data) - 1} {
		_, _, err := frame.Read(io.MultiReader(bytes.NewReader(data[:n]), iotest.ErrReader(mine)), vectorLimit)
		if !errors.Is(err, mine) || errors.Is(err, frame.ErrViolation) {
			t.Errorf("after %d bytes: %v", n, err)
		}
	}
}

// A header is checked before a byte of the body is read.
func TestBodyIsNotReadAfterBadHeader(t *testing.T) {
	t.Parallel()
	data := raw(`{"type":"pong","n":-1}`, make([]byte, 100))
	r := bytes.NewReader(data)
	if _, _, err := frame.Read(r, 100); !errors.Is(err, frame.ErrViolation) || r.Len() != 100 {
		t.Errorf("%v, %d bytes left", err, r.Len())
	}
}

func TestBodyIsBoundedByCaller(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		limit int64
		ok    bool
	}{
		"exactly":  {8, true},
		"less":     {7, false},
		"none":     {0, false},
		"negative": {-1, false},
		"any":      {math.MaxInt64, true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var body frame.Body
			_, got, err := frame.Read(bytes.NewReader(predictFrame(&body)), test.limit)
			if ok := err == nil; ok != test.ok || ok && len(got) != 8 || !ok && !errors.Is(err, frame.ErrViolation) {
				t.Errorf("%d bytes, %v", len(got), err)
			}
		})
	}
}

func TestLargeBodyIsReadWhole(t *testing.T) {
	t.Parallel()
	for _, size := range []int{1<<20 - 1, 1 << 20, 1<<20 + 1, 1<<22 + 12345, 50 << 20} {
		data := make([]byte, size)
		for i := 0; i < size; i += 997 {
			data[i] = byte(i)
		}
		var body frame.Body
		m := &frame.Result{Batch: 1, Parts: []frame.Part{body.Blob("p", 0, "", data)}}
		r, w := io.Pipe()
		go func() { w.CloseWithError(frame.Write(w, m, &body)) }()
		_, got, err := frame.Read(iotest.HalfReader(r), 50<<20)
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes came as %d, %v", size, len(got), err)
		}
	}
}

func TestWriteIsOneFrameOnASocket(t *testing.T) {
	t.Parallel()
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	m, body := apart(2000)
	go func() {
		if err := frame.Write(a, m, body); err != nil {
			t.Error(err)
		}
	}()
	got, data, err := frame.Read(b, 1<<24)
	if err != nil || !reflect.DeepEqual(got, m) || int64(len(data)) != body.Len() {
		t.Fatalf("%d bytes, %v", len(data), err)
	}
}

// allocated returns how many bytes f allocates. No other test may run.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// Not parallel: it counts what is allocated.
func TestAllocationIsBoundedByInput(t *testing.T) {
	lying := func(header uint32, body uint64) []byte {
		out := binary.LittleEndian.AppendUint32([]byte("SMW1"), header)
		return binary.LittleEndian.AppendUint64(out, body)
	}
	full := func(begin, repeated, end string) []byte {
		n := (frame.MaxHeader - len(begin) - len(end)) / len(repeated)
		return raw(begin+strings.TrimSuffix(strings.Repeat(repeated, n), ",")+end, nil)
	}
	tests := map[string][]byte{
		"a header that does not come": lying(frame.MaxHeader, 0),
		"a body that does not come":   append(lying(20, 1<<40), `{"type":"pong","n":1}`[:20]...),
		"half of a body":              append(raw(`{"type":"pong","n":1}`, make([]byte, 3<<20))[:8], append(binary.LittleEndian.AppendUint64(nil, 1<<40), append([]byte(`{"type":"pong","n":1}`), make([]byte, 3<<20)...)...)...),
		"many items":                  full(`{"type":"predict","batch":1,"parts":[],"items":[`, `{"id":""},`, `]}`),
		"many parameters":             full(`{"type":"predict","batch":1,"parts":[],"items":[`, `{"id":"","parameters":{"":0}},`, `]}`),
		"many parts":                  full(`{"type":"result","batch":1,"parts":[`, `{"name":"","item":0,"content_type":"","at":0,"size":0},`, `]}`),
		"many faults":                 full(`{"type":"result","batch":1,"faults":[`, `{"item":0,"reason":"a","message":""},`, `]}`),
		"much metadata":               full(`{"type":"result","batch":1,"metadata":[`, `{"item":0,"values":{"":""}},`, `]}`),
		"many indices":                full(`{"type":"cancel","batch":1,"items":[`, `0,`, `]}`),
		"many capabilities":           full(`{"type":"hello","protocols":[1],"name":"","pid":1,"capabilities":[`, `"",`, `]}`),
		"many extents":                full(`{"type":"result","batch":1,"parts":[{"name":"","at":0,"size":0,"datatype":"INT8","shape":[`, `1,`, `]}]}`),
		"many inputs":                 full(`{"type":"ready","spec":{"inputs":[`, `{"name":""},`, `]}}`),
		"many examples":               full(`{"type":"ready","spec":{"examples":[`, `{"name":"","inputs":[]},`, `]}}`),
		"escapes":                     full(`{"type":"state","state":"STARTUP","message":"`, `\n`, `"}`),
		"many options":                full(`{"type":"welcome","protocol":1,"max_frame":1,"options":{"a":[`, `0,`, `]}}`),
		"many unknown keys":           full(`{"type":"pong","n":1`, `,"":0`, `}`),
	}
	for name, data := range tests {
		t.Run(name, func(t *testing.T) {
			bound := 64*uint64(len(data)) + 2<<20
			got := allocated(func() {
				_, _, err := frame.Read(bytes.NewReader(data), 1<<41)
				if err != nil && !errors.Is(err, frame.ErrViolation) && !errors.Is(err, io.ErrUnexpectedEOF) {
					t.Error(err)
				}
			})
			if got > bound {
				t.Errorf("%d bytes for %d, at most %d", got, len(data), bound)
			}
		})
	}
}

func TestInvalidMessageIsNotWritten(t *testing.T) {
	t.Parallel()
	item := []frame.Item{{ID: "a"}}
	minus := -1
	batch := uint64(1 << 53)
	first := 0
	part := func(p frame.Part) *frame.Predict {
		if p.Item == nil {
			p.Item = &first
		}
		return &frame.Predict{Items: item, Parts: []frame.Part{p}}
	}
	joined := func(p frame.Part) *frame.Predict { return &frame.Predict{Items: item, Parts: []frame.Part{p}} }
	parameters := func(v any) *frame.Predict {
		return &frame.Predict{Items: []frame.Item{{ID: "a", Parameters: frame.Parameters{"k": v}}}}
	}
	tests := map[string]struct {
		m        frame.Message
		wantText string
	}{
		"no versions":              {&frame.Hello{}, "protocols"},
		"a negative version":       {&frame.Hello{Protocols: []int{-1}}, "protocols"},
		"a negative process id":    {&frame.Hello{Protocols: []int{1}, PID: -1}, "pid"},
		"version 0":                {&frame.Welcome{}, "protocol"},
		"too many slots":           {&frame.Welcome{Protocol: 1, Slots: frame.MaxSlots + 1}, "slots"},
		"negative rows":            {&frame.Welcome{Protocol: 1, MaxSize: -1}, "max_size"},
		"a negative limit":         {&frame.Welcome{Protocol: 1, MaxFrame: -1}, "max_frame"},
		"options that are a list":  {&frame.Welcome{Protocol: 1, Options: []byte(`[]`)}, "options"},
		"options that are no JSON": {&frame.Welcome{Protocol: 1, Options: []byte(`{"a":}`)}, "options"},
		"options and more":         {&frame.Welcome{Protocol: 1, Options: []byte(`{} {}`)}, "options"},
		"options that are no text": {&frame.Welcome{Protocol: 1, Options: []byte("{\"a\":\"\xff\"}")}, "options"},
		"options that nest":        {&frame.Welcome{Protocol: 1, Options: []byte(`{"a":` + strings.Repeat("[", 63) + strings.Repeat("]", 63) + `}`)}, "options"},
		"no state":                 {&frame.State{State: "READY"}, "state"},
		"negative slots":           {&frame.Ready{Slots: -1}, "slots"},
		"no batch axis":            {&frame.Ready{Spec: &frame.Spec{BatchAxis: "x"}}, "spec.batch_axis"},
		"no datatype":              {&frame.Ready{Spec: &frame.Spec{Inputs: []frame.PartSpec{{Name: "x", Datatype: "F"}}}}, "spec.inputs[0].datatype"},
		"a shape of nothing":       {&frame.Ready{Spec: &frame.Spec{Outputs: []frame.PartSpec{{Shape: []int64{1}}}}}, "outputs[0]"},
		"an extent of -2":          {&frame.Ready{Spec: &frame.Spec{Inputs: []frame.PartSpec{{Datatype: "FP32", Shape: []int64{-2}}}}}, "spec.inputs[0].shape[0]: -2"},
		"too many axes":            {&frame.Ready{Spec: &frame.Spec{Inputs: []frame.PartSpec{{Datatype: "FP32", Shape: make([]int64, 17)}}}}, "axes"},
		"no such variable":         {&frame.Ready{Spec: &frame.Spec{Inputs: []frame.PartSpec{{Variable: "x"}}}}, "variable"},
		"an example outside":       {&frame.Ready{Spec: &frame.Spec{Examples: []frame.Example{{Inputs: []frame.Part{{Size: 1}}}}}}, "examples"},
		"no items":                 {&frame.Predict{}, "items"},
		"too many items":           {&frame.Predict{Items: make([]frame.Item, frame.MaxItems+1)}, "items"},
		"an item of -1 rows":       {&frame.Predict{Items: []frame.Item{{Rows: -1}}}, "items[0].rows"},
		"a negative timeout":       {&frame.Predict{Items: []frame.Item{{Timeout: -1}}}, "timeout"},
		"a batch beyond 53 bits":   {&frame.Predict{Batch: 1 << 53, Items: item}, "batch"},
		"NaN":                      {parameters(math.NaN()), "NaN"},
		"infinity":                 {parameters(math.Inf(-1)), "Inf"},
		"an int":                   {parameters(1), "not a int"},
		"nil":                      {parameters(nil), "not a <nil>"},
		"a key that is not text":   {&frame.Predict{Items: []frame.Item{{Metadata: map[string]string{"\xff": ""}}}}, "UTF-8"},
		"a part of item -1":        {part(frame.Part{Item: &minus}), "parts[0]: item"},
		"a place outside":          {part(frame.Part{At: 1}), "parts[0]: 0 bytes at 1 of a body of 0"},
		"a negative place":         {part(frame.Part{At: -1}), "parts[0]"},
		"a place that overflows":   {part(frame.Part{At: math.MaxInt64, Size: math.MaxInt64}), "parts[0]"},
		"shared memory":            {part(frame.Part{Place: "shm"}), "place"},
		"both kinds":               {part(frame.Part{Datatype: "INT8", Shape: []int64{0}, ContentType: "a"}), "a tensor or a blob"},
		"a blob with a shape":      {part(frame.Part{Shape: []int64{}}), "a tensor or a blob"},
		"no such datatype":         {part(frame.Part{Datatype: "x"}), "datatype"},
		"axes beyond 16":           {part(frame.Part{Datatype: "INT8", Shape: make([]int64, 17)}), "17 axes"},
		"a negative extent":        {part(frame.Part{Datatype: "INT8", Shape: []int64{-1}}), "shape"},
		"an extent beyond 53 bits": {part(frame.Part{Datatype: "INT8", Shape: []int64{0, 1 << 54}}), "shape"},
		"a size that lies":         {part(frame.Part{Datatype: "FP32", Shape: []int64{1}}), "size"},
		"a size that overflows":    {part(frame.Part{Datatype: "FP64", Shape: []int64{1 << 60}}), "size"},
		"a joined blob":            {joined(frame.Part{}), "blobs are not joined"},
		"a joined scalar":          {joined(frame.Part{Datatype: "INT8", Size: 1}), "a scalar joins no rows"},
		"too few rows":             {joined(frame.Part{Datatype: "INT8", Shape: []int64{0, 1}}), "0 rows of items that have 1"},
		"an example with an item":  {&frame.Ready{Spec: &frame.Spec{Examples: []frame.Example{{Inputs: []frame.Part{{Item: &first}}}}}}, "item"},
		"a chunk of two items":     {&frame.Chunk{Item: 1, Parts: []frame.Part{{Item: &first}}}, "parts[0]: item"},
		"a fault without a reason": {&frame.Result{Faults: []frame.Fault{{}}}, "faults[0]: reason"},
		"a fault of item -1":       {&frame.Result{Faults: []frame.Fault{{Item: -1, Reason: "x"}}}, "faults[0].item"},
		"metadata of item 65536":   {&frame.Result{Metadata: []frame.Metadata{{Item: frame.MaxItems}}}, "metadata[0].item"},
		"a chunk of item -1":       {&frame.Chunk{Item: -1}, "item"},
		"an error of no kind":      {&frame.Error{}, "kind"},
		"an error of no batch":     {&frame.Error{Kind: frame.Exception, Batch: &batch}, "batch"},
		"a cancelled item -1":      {&frame.Cancel{Items: []int{0, -1}}, "items[1]"},
		"a ping beyond 53 bits":    {&frame.Ping{N: math.MaxUint64}, "n"},
		"a negative stop":          {&frame.Stop{Timeout: -1}, "timeout"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			err := frame.Write(&out, test.m, nil)
			if err == nil || !strings.Contains(err.Error(), test.wantText) || out.Len() > 0 {
				t.Errorf("%v, %d bytes; want %q", err, out.Len(), test.wantText)
			}
		})
	}
}

func TestTooLongHeaderIsErrHeaderSize(t *testing.T) {
	t.Parallel()
	room := frame.MaxHeader - len(`{"type":"state","state":"STARTUP","message":""}`)
	for n, ok := range map[int]bool{room: true, room + 1: false} {
		_, err := frame.Encode(&frame.State{State: frame.Startup, Message: strings.Repeat("a", n)}, 0)
		if ok != (err == nil) || !ok && !errors.Is(err, frame.ErrHeaderSize) {
			t.Errorf("a message of %d bytes: %v", n, err)
		}
	}
}

func TestErrorNamesItsPath(t *testing.T) {
	t.Parallel()
	tests := map[string]struct{ header, wantText string }{
		"in an item":      {`{"type":"predict","batch":1,"items":[{"id":"a"},{"id":"b","rows":"c"}],"parts":[]}`, "predict: items[1].rows: byte 65: expected a number, found a string"},
		"a missing key":   {`{"type":"result","batch":1,"faults":[{"item":0,"reason":"a"}]}`, "result: faults[0].message: it is missing"},
		"a parameter":     {`{"type":"predict","batch":1,"items":[{"id":"a","parameters":{"k":null}}],"parts":[]}`, "items[0].parameters.k: a parameter is"},
		"an axis":         {`{"type":"ready","spec":{"inputs":[{"name":"x","datatype":"FP32","shape":[1,-2]}]}}`, "spec.inputs[0].shape: -2"},
		"an unknown type": {`{"type":"` + strings.Repeat("x", 100) + `"}`, `"` + strings.Repeat("x", 40) + `..." is not known`},
		"another value":   {`{"type":"state","state":{}}`, "state: state: byte 24: expected a string, found an object"},
		"the end":         {`{"type":"state","state":`, "found the end"},
		"a key twice":     {`{"type":"pong","n":1,"n":1}`, "pong: n: it is there twice"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := frame.Decode([]byte(test.header))
			if !errors.Is(err, frame.ErrViolation) || !strings.Contains(err.Error(), test.wantText) {
				t.Errorf("%v; want %q", err, test.wantText)
			}
		})
	}
}

func TestPartReturnsOnlyItsBytes(t *testing.T) {
	t.Parallel()
	body := []byte("0123456789")
	tests := map[string]struct {
		at, size int64
		want     string
		ok       bool
	}{
		"all":       {0, 10, "0123456789", true},
		"some":      {2, 3, "234", true},
		"none":      {10, 0, "", true},
		"too many":  {2, 9, "", false},
		"behind":    {11, 0, "", false},
		"negative":  {-1, 1, "", false},
		"less":      {1, -1, "", false},
		"overflows": {math.MaxInt64, math.MaxInt64, "", false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := frame.Part{Name: "p", At: test.at, Size: test.size}.Bytes(body)
			if string(got) != test.want || (err == nil) != test.ok || err != nil && !errors.Is(err, frame.ErrViolation) {
				t.Fatalf("%q, %v", got, err)
			}
			if cap(got) != len(got) {
				t.Error("an append would write on into the body")
			}
		})
	}
	wrong := frame.Part{Datatype: tensor.Bytes, Shape: []int64{1}, Size: 10}
	if _, err := wrong.Tensor(body); !errors.Is(err, frame.ErrViolation) {
		t.Errorf("an element of BYTES that is longer than its place: %v", err)
	}
}

func TestEqualTensorsFollowWithoutGap(t *testing.T) {
	t.Parallel()
	var b frame.Body
	var at []int64
	for _, p := range []frame.Part{
		b.Tensor("x", 0, fp32(nil, 1, 2, 3)), b.Tensor("x", 1, fp32(nil, 4, 5, 6)),
		b.Tensor("x", 2, fp32(nil, 7)),                           // another shape
		b.Tensor("y", 0, fp32(nil, 8)),                           // another name
		b.Tensor("y", 1, int64s([]int64{1}, 9)),                  // another datatype
		b.Tensor("y", -1, int64s([]int64{1}, 9)),                 // of all
		b.Tensor("y", -1, int64s([]int64{1}, 9)),                 // again
		b.Blob("z", 0, "", []byte("a")), b.Blob("z", 1, "", nil), // blobs
	} {
		at = append(at, p.At)
	}
	if want := []int64{0, 12, 64, 128, 192, 256, 320, 384, 448}; !reflect.DeepEqual(at, want) {
		t.Errorf("places %v, want %v", at, want)
	}
	if b.Len() != 448 {
		t.Errorf("%d bytes", b.Len())
	}
	if none := (*frame.Body)(nil); none.Len() != 0 {
		t.Error("no body has bytes")
	}
}
