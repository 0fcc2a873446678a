package stagemesh

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"
)

type inferFlags struct {
	address  string
	timeout  time.Duration
	json     bool
	timeline bool
}

func newInfer() *cobra.Command {
	var flags inferFlags
	infer := &cobra.Command{
		Use:   "infer PIPELINE FILE...",
		Short: "Send each file through a pipeline and print the answers",
		Long: "Infer sends each file as a request of its own through a pipeline of a running mesh, and prints the answers.\n" +
			"The content type is told by the file's name or, failing that, its first bytes. - is standard input.",
		Example: "  stagemesh infer digits examples/digits/images/*.png\n  stagemesh infer stage:classify --json -",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) < 2 {
				return misused(cmd, errors.New("give a PIPELINE, and a FILE or more"))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return runInfer(cmd.Context(), flags, args[0], args[1:], cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
	infer.Flags().StringVarP(&flags.address, "address", "a", "http://127.0.0.1:8080", "the gateway's address")
	infer.Flags().DurationVar(&flags.timeout, "timeout", 0, "how long each request may take; the pipeline's own timeout if 0")
	infer.Flags().BoolVar(&flags.json, "json", false, "print each answer as a line of JSON")
	infer.Flags().BoolVar(&flags.timeline, "timeline", false, "print where each request's time went")
	return infer
}

// ErrFailed says that some requests failed; each has been printed.
var ErrFailed = errors.New("some requests failed")

// sender sends files through one pipeline of a mesh.
type sender struct {
	client   inferencev1connect.InferenceServiceClient
	pipeline string
	timeout  time.Duration
	stdin    io.Reader
}

func runInfer(ctx context.Context, flags inferFlags, pipeline string, files []string, in io.Reader, out io.Writer) error {
	address, err := baseURL(flags.address)
	if err != nil {
		return err
	}
	transport := &http.Transport{Proxy: http.ProxyFromEnvironment}
	defer transport.CloseIdleConnections()
	client := inferencev1connect.NewInferenceServiceClient(&http.Client{Transport: transport}, address)
	s := sender{client: client, pipeline: pipeline, timeout: flags.timeout, stdin: in}
	table := newPrinter(out, flags)
	failed, err := s.sendAll(ctx, files, table)
	if err := errors.Join(unreachable(address, err), table.flush()); err != nil {
		return err
	}
	if failed > 0 {
		return fmt.Errorf("%w: %d of %d", ErrFailed, failed, len(files))
	}
	return nil
}

// sendAll prints what becomes of each file, and how many failed. It gives up
// where there is no gateway, or nobody to print for.
func (s sender) sendAll(ctx context.Context, files []string, table *printer) (failed int, err error) {
	for _, file := range files {
		begin := time.Now()
		response, err := s.send(ctx, file)
		switch {
		case isDial(err):
			return failed, err
		case err != nil:
			failed++
			err = table.failure(file, err)
		default:
			err = table.answer(file, response, time.Since(begin))
		}
		if err != nil {
			return failed, err
		}
	}
	return failed, nil
}

func (s sender) send(ctx context.Context, file string) (*inferencev1.InferResponse, error) {
	request, err := s.request(file)
	if err != nil {
		return nil, err
	}
	response, err := s.client.Infer(ctx, connect.NewRequest(request))
	if err != nil {
		return nil, err
	}
	return response.Msg, nil
}

// isDial reports whether the error is that nobody listens at the address.
func isDial(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "dial"
}

// unreachable says what to do where nobody listens at the address. Other errors
// stay as they are.
func unreachable(address string, err error) error {
	if !isDial(err) {
		return err
	}
	return fmt.Errorf("nobody answers at %s: %w; stagemesh up starts a mesh, --address names the gateway of another", address, err)
}

// baseURL returns the gateway's URL; who writes host:port means plain HTTP.
func baseURL(address string) (string, error) {
	if !strings.Contains(address, "://") {
		address = "http://" + address
	}
	u, err := url.Parse(address)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return "", fmt.Errorf("--address: %q is no address such as http://127.0.0.1:8080", address)
	}
	return address, nil
}

// maxFile bounds a file to send, in bytes.
const maxFile = 64 << 20

func (s sender) request(file string) (*inferencev1.InferRequest, error) {
	data, err := readInput(file, s.stdin)
	if err != nil {
		return nil, err
	}
	request := &inferencev1.InferRequest{
		Pipeline: s.pipeline,
		Inputs: []*inferencev1.Part{{Body: &inferencev1.Part_Blob{
			Blob: &inferencev1.Blob{ContentType: contentType(file, data), Data: data},
		}}},
	}
	if s.timeout > 0 {
		request.Timeout = durationpb.New(s.timeout)
	}
	return request, nil
}

func readInput(file string, stdin io.Reader) ([]byte, error) {
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		defer f.Close() //nolint:errcheck // it was only read
		stdin = f
	}
	data, err := io.ReadAll(io.LimitReader(stdin, maxFile+1))
	if err == nil && len(data) > maxFile {
		err = fmt.Errorf("%s: larger than %d bytes", file, maxFile)
	}
	return data, err
}
