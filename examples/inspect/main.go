// Command inspect reads pages of handwritten digits by one pipeline with all five blocks: it looks
// at a page from two sides at once, refuses an empty one, reads each digit on it as an item of its
// own, and spells short numbers in words. It sends ten pages, prints what was read, and ends. With
// -graph it prints the pipeline as a tree instead.
package main

import (
	"bytes"
	"context"
	"embed"
	"errors"
	"flag"
	"fmt"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/examples/digits"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/program"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/services/cli"
	"github.com/stagemesh/stagemesh/services/runners"
)

//go:embed mesh.yaml
var files embed.FS

func main() {
	graph := flag.Bool("graph", false, "print the pipeline as a tree, and send nothing")
	flag.Parse()
	ctx, stop := process.SignalContext(context.Background())
	defer stop()
	if err := run(ctx, os.Stdout, *graph); err != nil {
		fmt.Fprintln(os.Stderr, "inspect:", err)
		os.Exit(1)
	}
}

// errDone ends the mesh after the pages.
var errDone = errors.New("done")

func run(ctx context.Context, out io.Writer, graph bool) error {
	folder, err := os.MkdirTemp("", "inspect-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder) //nolint:errcheck // what stays behind is in the system's folder for such things
	model, err := digits.FS.ReadFile("digits.onnx")
	if err != nil {
		return err
	}
	if err := errors.Join(os.CopyFS(folder, files), os.WriteFile(filepath.Join(folder, "digits.onnx"), model, 0o600)); err != nil {
		return err
	}
	file, err := meshfile.Load(filepath.Join(folder, "mesh.yaml"), append(kinds(), runners.All()...)...)
	if err != nil {
		return err
	}
	if graph {
		trees, err := file.Trees()
		fmt.Fprint(out, trees)
		return err
	}
	file.Gateway.Listen, file.Gateway.Admin.Listen, file.Ops.Listen = "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0"
	log, err := program.Flags{Level: "warn", Format: "text"}.Apply(os.Stderr)
	if err != nil {
		return err
	}
	p := stagemesh.Program{File: file, FileSettings: stagemesh.FileSettings{Logger: log}, Ready: func(m *stagemesh.Mesh, _ net.Addr) error {
		if err := show(ctx, out, m.URL()); err != nil {
			return err
		}
		return errDone
	}}
	if err := p.Run(ctx); !errors.Is(err, errDone) {
		return errors.Join(err, ctx.Err())
	}
	return nil
}

// pages are how many digits each page has.
var pages = []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 5}

// reading is what the mesh read on a page.
type reading struct {
	truth    string
	response *inferencev1.InferResponse
}

// show sends the pages all at once, and then an empty one.
func show(ctx context.Context, out io.Writer, address string) error {
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	client := inferencev1connect.NewInferenceServiceClient(&http.Client{Transport: transport}, address)
	images, err := fs.Glob(digits.FS, "images/*.png")
	if err != nil {
		return err
	}
	readings := make([]reading, len(pages))
	calls, calling := errgroup.WithContext(ctx)
	for i, n := range pages {
		page, truth, err := compose(images[:n])
		if err != nil {
			return err
		}
		images = images[n:]
		calls.Go(func() error {
			response, err := send(calling, client, page)
			readings[i] = reading{truth, response}
			return err
		})
	}
	if err := calls.Wait(); err != nil {
		return errors.New(cli.Describe(err))
	}
	if err := printTable(out, readings); err != nil {
		return err
	}
	empty, _, err := compose(nil)
	if err != nil {
		return err
	}
	_, err = send(ctx, client, empty)
	if err == nil {
		return errors.New("an empty page was read")
	}
	fmt.Fprintf(out, "\nAn empty page: %s\n", cli.Describe(err))
	return printPaths(out, readings[len(readings)-1])
}

func send(ctx context.Context, client inferencev1connect.InferenceServiceClient, page []byte) (*inferencev1.InferResponse, error) {
	response, err := client.Infer(ctx, connect.NewRequest(&inferencev1.InferRequest{
		Pipeline: "inspect",
		Inputs:   []*inferencev1.Part{{Name: "image", Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{ContentType: "image/png", Data: page}}}},
	}))
	if err != nil {
		return nil, err
	}
	return response.Msg, nil
}

// side is the width and the height of a digit's image, in pixels.
const side = 32

// compose puts digits side by side on a page, and returns it with what is written there. Without
// digits the page is empty.
func compose(files []string) (page []byte, truth string, _ error) {
	out := image.NewGray(image.Rect(0, 0, side*max(1, len(files)), side))
	draw.Draw(out, out.Bounds(), image.NewUniform(color.Black), image.Point{}, draw.Src)
	for i, file := range files {
		data, err := digits.FS.ReadFile(file)
		if err != nil {
			return nil, "", err
		}
		one, err := png.Decode(bytes.NewReader(data))
		if err != nil {
			return nil, "", fmt.Errorf("%s: %w", file, err)
		}
		draw.Draw(out, image.Rect(side*i, 0, side*(i+1), side), one, one.Bounds().Min, draw.Src)
		name := strings.TrimSuffix(file, ".png")
		truth += name[len(name)-1:]
	}
	var data bytes.Buffer
	err := png.Encode(&data, out)
	return data.Bytes(), truth, err
}

// texts returns the elements of a part of text.
func texts(r *inferencev1.InferResponse, name string) string {
	for _, part := range r.GetOutputs() {
		if t := part.GetTensor(); part.GetName() == name && t.GetDatatype() == string(tensor.Bytes) {
			all, err := tensor.Tensor{Datatype: tensor.Bytes, Shape: t.GetShape(), Raw: t.GetRaw()}.BytesElements()
			if err != nil {
				return err.Error()
			}
			return string(bytes.Join(all, nil))
		}
	}
	return "?"
}

func printTable(out io.Writer, readings []reading) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "PAGE\tREAD\tWRITTEN\tIN WORDS")
	right, all := 0, 0
	for _, r := range readings {
		read := texts(r.response, "digits")
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", r.truth, read, texts(r.response, "written"), texts(r.response, "text"))
		for i := range r.truth {
			if all++; i < len(read) && r.truth[i] == read[i] {
				right++
			}
		}
	}
	if err := table.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "\n%d of %d digits right\n", right, all)
	return err
}

// printPaths prints where the steps of a request stand in its blocks, and what they took.
func printPaths(out io.Writer, r reading) error {
	fmt.Fprintf(out, "\nThe steps of page %s (of each step of a map the three slowest items):\n", r.truth)
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, step := range r.response.GetTimeline().GetSteps() {
		fmt.Fprintf(table, "  %s\trun %.2f ms\tbatch of %d\n", step.GetPath(), float64(step.GetRun().AsDuration().Microseconds())/1000, step.GetBatchSize())
	}
	return table.Flush()
}
