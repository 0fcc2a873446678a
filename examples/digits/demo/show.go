package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"path"
	"strings"
	"text/tabwriter"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/examples/digits"
	"github.com/stagemesh/stagemesh/services/cli"
)

// reading is what the mesh read in one image.
type reading struct {
	file, label, digit string
	score              float32
	response           *inferencev1.InferResponse
}

// inFlight is how many images are sent at a time: enough for batches to form.
const inFlight = 16

// show sends every image to the mesh at the address and prints the answers.
func show(ctx context.Context, out io.Writer, address string) error {
	files, err := fs.Glob(digits.FS, "images/*.png")
	if err != nil {
		return err
	}
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	client := inferencev1connect.NewInferenceServiceClient(&http.Client{Transport: transport}, address)
	readings := make([]reading, len(files))
	calls, calling := errgroup.WithContext(ctx)
	calls.SetLimit(inFlight)
	for i, file := range files {
		calls.Go(func() error {
			r, err := read(calling, client, file)
			readings[i] = r
			return err
		})
	}
	if err := calls.Wait(); err != nil {
		return err
	}
	// One more request, on the idle mesh.
	alone, err := read(ctx, client, files[0])
	if err != nil {
		return err
	}
	return errors.Join(printTable(out, readings), printTimeline(out, alone))
}

func read(ctx context.Context, client inferencev1connect.InferenceServiceClient, file string) (reading, error) {
	data, err := digits.FS.ReadFile(file)
	if err != nil {
		return reading{}, err
	}
	response, err := client.Infer(ctx, connect.NewRequest(&inferencev1.InferRequest{
		Pipeline: "digits",
		Inputs: []*inferencev1.Part{{Name: "image", Body: &inferencev1.Part_Blob{
			Blob: &inferencev1.Blob{ContentType: "image/png", Data: data},
		}}},
	}))
	if err != nil {
		return reading{}, fmt.Errorf("%s: %s", file, cli.Describe(err))
	}
	r := reading{file: path.Base(file), label: labelOf(file), response: response.Msg}
	r.digit, r.score, err = best(response.Msg.GetOutputs())
	return r, err
}

// labelOf returns the digit in a file's name: images/07-3.png.
func labelOf(file string) string {
	_, label, _ := strings.Cut(strings.TrimSuffix(path.Base(file), ".png"), "-")
	return label
}

var errNoAnswer = errors.New("the answer has no labels and scores")

// best returns the likeliest digit of an answer.
func best(outputs []*inferencev1.Part) (digit string, score float32, err error) {
	var labels [][]byte
	var scores []float32
	for _, part := range outputs {
		t := tensor.Tensor{Datatype: tensor.Datatype(part.GetTensor().GetDatatype()), Shape: part.GetTensor().GetShape(), Raw: part.GetTensor().GetRaw()}
		switch part.GetName() {
		case "labels":
			labels, err = t.BytesElements()
		case "scores":
			scores, err = t.FP32Values()
		}
		if err != nil {
			return "", 0, err
		}
	}
	if len(labels) == 0 || len(scores) == 0 {
		return "", 0, errNoAnswer
	}
	return string(labels[0]), scores[0], nil
}

func printTable(out io.Writer, readings []reading) error {
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "IMAGE\tLABEL\tREAD\tSCORE")
	right := 0
	for _, r := range readings {
		mark := "  wrong"
		if r.digit == r.label {
			right++
			mark = ""
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%.3f%s\n", r.file, r.label, r.digit, r.score, mark)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "\n%d of %d right: accuracy %.2f\n", right, len(readings), float64(right)/float64(len(readings)))
	return err
}

func printTimeline(out io.Writer, r reading) error {
	_, err := fmt.Fprintf(out, "\nWhere the time of one request went (%s in all):\n", cli.Milliseconds(r.response.GetTimeline().GetTotal().AsDuration()))
	for _, step := range r.response.GetTimeline().GetSteps() {
		fmt.Fprintln(out, "  "+cli.RenderStep(step))
	}
	return err
}

// printHint prints how to send requests to the mesh, which keeps serving.
func printHint(out io.Writer, address, admin string) error {
	_, err := fmt.Fprintf(out, `
Try it from another terminal:
  curl -H 'Content-Type: image/png' --data-binary @examples/digits/images/00-1.png %[1]s/v1/pipelines/digits:infer

Or in a browser: %[1]s/docs
Where the time goes: %[2]s/

The mesh keeps serving; stop it with Ctrl-C.
`, address, admin)
	return err
}
