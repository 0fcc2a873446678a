// Command ocr reads the text in pictures, by a mesh in this process whose stages have the models
// of the Python package rapidocr, and prints it. Without arguments it reads its own pictures.
package main

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/program"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/services/runners"
)

//go:embed mesh.yaml ocr.py pictures prepare.py
var files embed.FS

// inFlight is how many pictures are sent at a time: enough for all stages to work.
const inFlight = 8

func main() {
	level := flag.String("log-level", "warn", "debug, info, warn or error")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: ocr [--log-level LEVEL] [PICTURE...]")
		flag.PrintDefaults()
	}
	flag.Parse()
	ctx, stop := process.SignalContext(context.Background())
	defer stop()
	if err := run(ctx, os.Stdout, *level, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "ocr:", err)
		os.Exit(1)
	}
}

// errDone ends the mesh after the pictures.
var errDone = errors.New("done")

// run starts the mesh and prints what it reads in the pictures.
func run(ctx context.Context, out io.Writer, level string, pictures []string) error {
	folder, err := os.MkdirTemp("", "ocr-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder) //nolint:errcheck // what stays behind is in the system's folder for such things
	if err := os.CopyFS(folder, files); err != nil {
		return err
	}
	if err := prepareModels(ctx, folder); err != nil {
		return err
	}
	if len(pictures) == 0 {
		if pictures, err = filepath.Glob(filepath.Join(folder, "pictures", "*.*")); err != nil {
			return err
		}
	}
	file, err := meshfile.Load(filepath.Join(folder, "mesh.yaml"), runners.All()...)
	if err != nil {
		return err
	}
	file.Gateway.Listen, file.Gateway.Admin.Listen, file.Ops.Listen = "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0"
	log, err := program.Flags{Level: level, Format: "text"}.Apply(os.Stderr)
	if err != nil {
		return err
	}
	var failed error
	p := stagemesh.Program{File: file, FileSettings: stagemesh.FileSettings{Logger: log}, Ready: func(m *stagemesh.Mesh, _ net.Addr) error {
		failed = readAll(ctx, out, m, pictures)
		return errDone
	}}
	if err := p.Run(ctx); !errors.Is(err, errDone) {
		return errors.Join(err, ctx.Err())
	}
	return failed
}

// prepareModels writes the models to the folder.
func prepareModels(ctx context.Context, folder string) error {
	cmd := exec.CommandContext(ctx, "python3", "prepare.py", "models")
	cmd.Dir = folder
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s; to install what the models need: python3 -m pip install -r examples/ocr/requirements.txt", err, out)
	}
	return nil
}

// line is a line of text in a picture.
type line struct {
	Text  string        `json:"text"`
	Score float64       `json:"score"` // 0 to 1
	Box   [4][2]float64 `json:"box"`   // x and y of the corners, in pixels
}

// readAll prints the lines of all pictures, in their order. One that cannot be read is an error of its own.
func readAll(ctx context.Context, out io.Writer, mesh *stagemesh.Mesh, pictures []string) error {
	texts, errs := make([]string, len(pictures)), make([]error, len(pictures))
	var calls errgroup.Group
	calls.SetLimit(inFlight)
	for i, path := range pictures {
		calls.Go(func() error {
			lines, err := read(ctx, mesh, path)
			if err != nil {
				errs[i] = fmt.Errorf("%s: %w", path, err)
				return nil
			}
			texts[i] = filepath.Base(path) + "\n"
			for _, l := range lines {
				texts[i] += fmt.Sprintf("  %.3f  %s\n", l.Score, l.Text)
			}
			return nil
		})
	}
	errs = append(errs, calls.Wait())
	_, err := io.WriteString(out, strings.Join(texts, ""))
	return errors.Join(append(errs, err)...)
}

// read returns the lines of text in a picture.
func read(ctx context.Context, mesh *stagemesh.Mesh, path string) (lines []line, err error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	answer, err := mesh.Infer(ctx, &stagemesh.Request{
		Pipeline: "ocr",
		Inputs:   []payload.Part{payload.OfBlob("image", "image/*", data)},
	})
	if err != nil {
		return nil, err
	}
	return lines, json.Unmarshal(answer.Outputs[0].Blob.Data, &lines)
}
