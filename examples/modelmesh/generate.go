package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/examples/digits"
)

const (
	readers        = 300
	softmaxReaders = 270
	// digitCount is how many answers there are.
	digitCount = 10
)

// readerID is the ID of reader k, which answers (digit + k) mod 10.
func readerID(k int) string { return fmt.Sprintf("reader-%03d", k) }

// stageOf returns the stage of reader k, which is also the name of its pipeline.
func stageOf(k int) string {
	if k < softmaxReaders {
		return "softmax"
	}
	return "network"
}

// generate writes the files of all readers into the folder, and returns their records.
func generate(folder string) ([]*meshv1.Model, error) {
	var softmax struct {
		Weights [][]float64 `json:"weights"`
		Bias    []float64   `json:"bias"`
	}
	text, err := files.ReadFile("softmax.json")
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(text, &softmax); err != nil {
		return nil, err
	}
	network, err := digits.FS.ReadFile("digits.onnx")
	if err != nil {
		return nil, err
	}
	var out []*meshv1.Model
	for k := range readers {
		m := &meshv1.Model{Id: readerID(k), Stage: stageOf(k), Source: readerID(k) + ".json"}
		var content []byte
		if k < softmaxReaders {
			turned := softmax
			turned.Weights, turned.Bias = turn(softmax.Weights, k), turn(softmax.Bias, k)
			content, err = json.Marshal(turned)
		} else {
			m.Source = readerID(k) + ".onnx"
			content, err = turnNetwork(network, k)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(folder, m.GetSource()), content, 0o600)
		}
		if err != nil {
			return nil, err
		}
		out = append(out, m)
	}
	return out, nil
}

// turn moves element i to (i + k) mod the number of elements.
func turn[T any](list []T, k int) []T {
	at := len(list) - k%len(list)
	return slices.Concat(list[at:], list[:at])
}

// turnNetwork turns the outputs of the last layer: the rows of w3, and b3.
func turnNetwork(model []byte, k int) ([]byte, error) {
	out := slices.Clone(model)
	for _, name := range []string{"w3", "b3"} {
		raw, err := weight(out, name)
		if err != nil {
			return nil, err
		}
		at := len(raw) - k%digitCount*len(raw)/digitCount
		copy(raw, slices.Concat(raw[at:], raw[:at]))
	}
	return out, nil
}

// weight returns the bytes of a weight in an ONNX file: the raw_data (9) of the initializer (5)
// of that name (8) in the model's graph (7).
func weight(model []byte, name string) ([]byte, error) {
	for _, graph := range fields(model, 7) {
		for _, w := range fields(graph, 5) {
			if names, raw := fields(w, 8), fields(w, 9); len(raw) == 1 && len(names) == 1 && string(names[0]) == name {
				return raw[0], nil
			}
		}
	}
	return nil, errors.New("the network has no weight " + name)
}

// fields returns the fields of that number in a message, which share its memory.
func fields(message []byte, number protowire.Number) (out [][]byte) {
	for len(message) > 0 {
		n, kind, size := protowire.ConsumeField(message)
		if size < 0 {
			return nil
		}
		if n == number && kind == protowire.BytesType {
			_, _, tag := protowire.ConsumeTag(message)
			value, _ := protowire.ConsumeBytes(message[tag:])
			out = append(out, value)
		}
		message = message[size:]
	}
	return out
}
