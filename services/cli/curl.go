package cli

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/stagemesh/stagemesh/internal/front/oipjson"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// longestExample is the longest body that a line to copy may have, in bytes.
const longestExample = 2 << 10

// curl returns a command that sends the spec's first example, or zeros, to a
// pipeline of the gateway; false where the command does not fit in a line.
func curl(spec runner.Spec, gateway, name string) (string, bool) {
	inputs, ok := example(spec)
	if !ok {
		return "", false
	}
	url := fmt.Sprintf("%s/v1/pipelines/%s:infer", gateway, name)
	if len(inputs) == 1 && inputs[0].Tensor == nil {
		return curlBlob(inputs[0].Blob, url)
	}
	return curlTensors(inputs, url)
}

func curlBlob(b payload.Blob, url string) (string, bool) {
	text := string(b.Data)
	if !utf8.ValidString(text) || len(text) > longestExample || strings.HasPrefix(text, "@") || strings.ContainsFunc(text, func(r rune) bool { return r < ' ' && r != '\n' }) {
		return "", false
	}
	contentType := b.ContentType
	if contentType == "application/json" {
		contentType += "; form=blob"
	}
	return fmt.Sprintf("curl -H %s --data-binary %s %s", shellQuote("Content-Type: "+contentType), shellQuote(text), url), true
}

func curlTensors(inputs []payload.Part, url string) (string, bool) {
	body := []byte(`{"inputs":[`)
	for i, part := range inputs {
		if part.Tensor == nil {
			return "", false
		}
		if i > 0 {
			body = append(body, ',')
		}
		var err error
		if body, err = oipjson.AppendTensor(body, part); err != nil || len(body) > longestExample {
			return "", false
		}
	}
	return fmt.Sprintf("curl -H 'Content-Type: application/json' -d %s %s", shellQuote(string(body)+"]}"), url), true
}

// shellQuote returns a word of a shell.
func shellQuote(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }

// example returns the first example, or zeros where all inputs are tensors.
func example(spec runner.Spec) ([]payload.Part, bool) {
	if len(spec.Examples) > 0 {
		return spec.Examples[0].Inputs, len(spec.Examples[0].Inputs) > 0
	}
	var out []payload.Part
	for _, p := range spec.Inputs {
		if !p.IsTensor() || p.Datatype == tensor.Bytes {
			return nil, false
		}
		out = append(out, zeros(p))
	}
	return out, len(out) > 0
}

func zeros(p runner.PartSpec) payload.Part {
	shape := slices.Clone(p.Shape)
	for i, extent := range shape {
		if extent < 0 {
			shape[i] = 1
		}
	}
	n, _ := tensor.Elements(shape)
	return payload.OfTensor(p.Name, tensor.Tensor{Datatype: p.Datatype, Shape: shape, Raw: make([]byte, n*int64(p.Datatype.Size()))})
}
