package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/internal/clientgen"
	"github.com/stagemesh/stagemesh/internal/openapi"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

func newClient() *cobra.Command {
	var numpy bool
	python := newClientIn("python", "  stagemesh client python digits > digits.py\n  stagemesh client python --check digits.py",
		func(m clientgen.Mesh) ([]byte, error) { return clientgen.Python(m, numpy) })
	python.Flags().BoolVar(&numpy, "numpy", true, "type tensors as arrays of numpy; with --numpy=false as stagemesh.client.Tensor")
	return group("client", "Write a client with a typed function for each pipeline, or check one",
		"Write a client in Python or TypeScript with a function for each pipeline of a running mesh, typed by what its stages declare;\n"+
			"or check whether the mesh still fits such a client.",
		python, newClientIn("typescript", "  stagemesh client typescript digits > digits.ts\n  stagemesh client typescript --check digits.ts", clientgen.TypeScript))
}

// newClientIn returns the command for one language.
func newClientIn(language, example string, write func(clientgen.Mesh) ([]byte, error)) *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   language + " [PIPELINE...]",
		Short: "Print a client with a typed function for each pipeline, or for the named ones",
		Long: "Print a client with a function for each pipeline of a running mesh, or for the named ones: its inputs and outputs as types, with\n" +
			"their datatypes, shapes and descriptions. The same mesh gives the same bytes. A pipeline whose stages declare nothing gets a\n" +
			"function without types.\n\n" +
			"With --check nothing is written. Each difference between the pipelines of FILE and the mesh is printed: an error if calls may\n" +
			"fail or answers have other types, else a note. The exit code is 1 if there is an error.",
		Example: example,
	}
	askPublic(cmd, func(cmd *cobra.Command, client clients, names []string) error {
		if file != "" && len(names) > 0 {
			return usageError(cmd, errors.New("--check: FILE has the pipelines; leave PIPELINE out"))
		}
		mesh, err := readMesh(cmd.Context(), client)
		if err != nil {
			return err
		}
		if file != "" {
			return checkClient(cmd, file, mesh)
		}
		if mesh, err = mesh.Select(names...); err != nil {
			return err
		}
		text, err := write(mesh)
		if err != nil {
			return err
		}
		_, err = cmd.OutOrStdout().Write(text)
		return err
	})
	cmd.Flags().StringVar(&file, "check", "", "a FILE that this command has printed: compare it with the mesh")
	return cmd
}

// maxDocument bounds the document of a gateway, in bytes: its own bound on pipelines is a quarter of that.
const maxDocument = 4 * openapi.DefaultMaxBytes

// readMesh returns what the port shows its callers of the pipelines.
func readMesh(ctx context.Context, client clients) (clientgen.Mesh, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, answerTime, noAnswer(answerTime))
	defer cancel()
	response, err := client.send(ctx, http.MethodGet, openapi.DocumentPath, nil, nil)
	if err == nil {
		defer response.Body.Close() //nolint:errcheck // it was only read
		var text []byte
		if text, err = io.ReadAll(io.LimitReader(response.Body, maxDocument)); err == nil {
			return clientgen.Read(text)
		}
	}
	if f, ok := errors.AsType[*fault.Fault](err); ok && f.Reason == fault.NotFound {
		err = fmt.Errorf("%w; a gateway describes its pipelines unless gateway.docs is false", err)
	}
	if cause := context.Cause(ctx); errors.Is(cause, errSilent) {
		err = cause
	}
	return clientgen.Mesh{}, err
}

// errClientDoesNotFit is returned after the differences have been printed.
var errClientDoesNotFit = errors.New("the client does not fit the mesh; make it again, and adapt its callers")

func checkClient(cmd *cobra.Command, file string, mesh clientgen.Mesh) error {
	text, err := readInput(file, cmd.InOrStdin())
	if err != nil {
		return err
	}
	specs, err := clientgen.Specs(text)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	changes, out := clientgen.Compare(specs, mesh), cmd.OutOrStdout()
	fits := true
	for _, change := range changes {
		word := "note"
		if change.Breaks {
			word, fits = "error", false
		}
		fmt.Fprintf(out, "%s: %s\n", word, visible(change.Text))
	}
	if !fits {
		return errClientDoesNotFit
	}
	_, err = fmt.Fprintf(out, "%s fits the mesh: %s\n", file, count(len(specs), "pipeline"))
	return err
}
