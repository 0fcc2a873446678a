package frame_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stagemesh/stagemesh/internal/worker/frame"
)

var update = flag.Bool("update", false, "write sdk/vectors, and the examples of sdk/PROTOCOL.md")

const (
	vectorFolder = "../../../sdk/vectors"
	// vectorLimit is the longest body that readers of the vectors take, in bytes.
	vectorLimit = 1 << 20
)

// vector is a file of sdk/vectors.
type vector struct {
	Name      string `json:"name"`
	Direction string `json:"direction"`
	Valid     bool   `json:"valid"`
	// Why is what is wrong with an invalid vector.
	Why    string          `json:"why"`
	Header json.RawMessage `json:"header"`
	Parts  []vectorPart    `json:"parts"`
	Frame  string          `json:"frame"`
}

type vectorPart struct {
	Name        string  `json:"name"`
	Item        *int    `json:"item"`
	Datatype    *string `json:"datatype"`
	Shape       []int64 `json:"shape"`
	ContentType *string `json:"content_type"`
	Data        string  `json:"data"`
}

// raw puts a frame together, whatever is in it.
func raw(header string, body []byte) []byte {
	out := []byte("SMW1")
	out = binary.LittleEndian.AppendUint32(out, uint32(len(header)))
	out = binary.LittleEndian.AppendUint64(out, uint64(len(body)))
	return append(append(out, header...), body...)
}

// partsOf returns all parts of a message, and of its examples.
func partsOf(m frame.Message) []frame.Part {
	switch m := m.(type) {
	case *frame.Predict:
		return m.Parts
	case *frame.Result:
		return m.Parts
	case *frame.Chunk:
		return m.Parts
	case *frame.Ready:
		return examplesOf(m.Spec)
	case *frame.Loaded:
		return examplesOf(m.Spec)
	}
	return nil
}

func examplesOf(spec *frame.Spec) (out []frame.Part) {
	if spec != nil {
		for _, e := range spec.Examples {
			out = append(out, e.Inputs...)
		}
	}
	return out
}

// taken returns the parts with their bytes, as readers have to see them.
func taken(m frame.Message, body []byte) ([]vectorPart, error) {
	out := []vectorPart{}
	for _, p := range partsOf(m) {
		data, err := p.Bytes(body)
		if err != nil {
			return nil, err
		}
		part := vectorPart{Name: p.Name, Item: p.Item, Data: hex.EncodeToString(data)}
		if p.IsTensor() {
			if _, err := p.Tensor(body); err != nil {
				return nil, err
			}
			datatype := string(p.Datatype)
			part.Datatype, part.Shape = &datatype, append([]int64{}, p.Shape...)
		} else {
			part.ContentType = &p.ContentType
		}
		out = append(out, part)
	}
	return out, nil
}

// read returns what a frame holds, and nothing but the frame.
func read(data []byte) (frame.Message, []vectorPart, error) {
	r := bytes.NewReader(data)
	m, body, err := frame.Read(r, vectorLimit)
	if err != nil {
		return nil, nil, err
	}
	if r.Len() > 0 {
		return nil, nil, errors.New("the frame goes on")
	}
	parts, err := taken(m, body)
	return m, parts, err
}

// made is the vector that a case makes.
func (c vectorCase) made(t *testing.T) vector {
	t.Helper()
	data := c.frame
	if c.m != nil {
		var out bytes.Buffer
		if err := frame.Write(&out, c.m, c.body); err != nil {
			t.Fatal(err)
		}
		data = out.Bytes()
	}
	v := vector{
		Name: c.name, Direction: c.direction, Valid: c.why == "", Why: c.why,
		Header: json.RawMessage("null"), Parts: []vectorPart{}, Frame: hex.EncodeToString(data),
	}
	// One that nests thousands of lists would be indented by as much.
	if text := headerOf(data); json.Valid(text) && utf8.Valid(text) && len(text) < 4096 {
		v.Header = text
	}
	if v.Valid {
		_, parts, err := read(data)
		if err != nil {
			t.Fatal(err)
		}
		v.Parts = parts
	}
	return v
}

// headerOf returns the header of a frame, empty where it has none.
func headerOf(data []byte) []byte {
	if len(data) < 16 {
		return nil
	}
	size := int(binary.LittleEndian.Uint32(data[4:]))
	return data[16:min(len(data), 16+size)]
}

func (v vector) file(t *testing.T) []byte {
	t.Helper()
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// TestPackageWritesTheVectors holds the files against the cases of
// this package; -update writes them.
func TestPackageWritesTheVectors(t *testing.T) {
	if *update {
		writeVectors(t)
	}
	t.Parallel()
	for _, c := range vectorCases() {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(vectorFolder, c.name+".json")
			have, err := os.ReadFile(path)
			if err != nil {
				t.Fatalf("%v; -update writes it", err)
			}
			if !bytes.Equal(have, c.made(t).file(t)) {
				t.Errorf("%s is not what the case makes; -update writes it", path)
			}
		})
	}
}

func writeVectors(t *testing.T) {
	t.Helper()
	old, err := filepath.Glob(filepath.Join(vectorFolder, "*.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range old {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range vectorCases() {
		if err := os.WriteFile(filepath.Join(vectorFolder, c.name+".json"), c.made(t).file(t), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// TestPackageReadsTheVectors reads the files alone, as every other language does.
func TestPackageReadsTheVectors(t *testing.T) {
	t.Parallel()
	paths, err := filepath.Glob(filepath.Join(vectorFolder, "*.json"))
	if err != nil || len(paths) != len(vectorCases()) {
		t.Fatalf("%d files for %d cases, %v", len(paths), len(vectorCases()), err)
	}
	for _, path := range paths {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".json"), func(t *testing.T) {
			t.Parallel()
			checkVector(t, load(t, path))
		})
	}
}

func load(t *testing.T, path string) vector {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var v vector
	if err := json.Unmarshal(text, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

func checkVector(t *testing.T, v vector) {
	t.Helper()
	data, err := hex.DecodeString(v.Frame)
	if err != nil {
		t.Fatal(err)
	}
	m, parts, err := read(data)
	if !v.Valid {
		if !errors.Is(err, frame.ErrViolation) && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%v, although: %s", err, v.Why)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(parts, v.Parts) {
		t.Errorf("parts %+v, want %+v", parts, v.Parts)
	}
	again, err := frame.Encode(m, int64(len(data))-16-int64(len(headerOf(data))))
	if err != nil {
		t.Fatal(err)
	}
	if back, err := frame.Decode(again[16:]); err != nil || !reflect.DeepEqual(back, m) {
		t.Errorf("%+v came back as %+v, %v", m, back, err)
	}
}

func TestEveryMessageTypeHasVector(t *testing.T) {
	t.Parallel()
	valid := map[string]bool{}
	for _, c := range vectorCases() {
		if c.m != nil {
			valid[frame.Kind(c.m)] = true
		}
	}
	for _, kind := range strings.Fields("hello welcome state ready predict result chunk error cancel ping pong shutdown load loaded unload unloaded size sized") {
		if !valid[kind] {
			t.Errorf("there is none of %s", kind)
		}
	}
}
