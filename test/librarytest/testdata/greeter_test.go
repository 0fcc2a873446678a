// This is the program of docs/runners.md, which outside_test.go builds in a module of its
// own.
package main

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// config is what the file has below runner.greet.
type config struct {
	Greeting string `yaml:"greeting"`
}

func newGreeter(c config) (*inproc.Runner, error) {
	return inproc.Each(inproc.Settings{}, func(_ context.Context, item runner.Item) ([]payload.Part, error) {
		text := strings.TrimSpace(c.Greeting + " " + string(item.Inputs[0].Blob.Data))
		return []payload.Part{payload.OfBlob("text", "text/plain", []byte(text))}, nil
	}), nil
}

func main() {
	if err := stagemesh.Serve(stagemesh.KindOf("greet", newGreeter)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
