package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

type inferFlags struct {
	address    addressFlag
	timeout    time.Duration
	durability string
	waits      bool
	key        string
	stream     bool
	style      style
}

func newInfer() *cobra.Command {
	var flags inferFlags
	infer := &cobra.Command{
		Use:   "infer PIPELINE FILE...",
		Short: "Send files through a pipeline and print the answers",
		Long: "Send each file as a request through a pipeline of a running mesh, and print the answers. The content type follows from\n" +
			"the file's name, or else from its first bytes. - is standard input.",
		Example: "  stagemesh infer digits examples/digits/images/*.png\n  stagemesh infer stage:classify --json -\n  stagemesh infer digits image.png --durability file\n  stagemesh infer --stream chat question.txt",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) < 2 {
				return misused(cmd, errors.New("give a PIPELINE and at least one FILE"))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if flags.stream {
				return runStream(cmd.Context(), flags, args[0], args[1:], cmd.InOrStdin(), cmd.OutOrStdout())
			}
			return runInfer(cmd.Context(), flags, args[0], args[1:], cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
	flags.address.add(infer)
	infer.Flags().DurationVar(&flags.timeout, "timeout", 0, "the deadline of each request; the pipeline's timeout if 0")
	infer.Flags().StringVar(&flags.durability, "durability", "", "where requests are queued between stages: memory or file; the pipeline's own if empty. With file the request IDs are printed, for get result and cancel")
	infer.Flags().BoolVar(&flags.waits, "wait-for-capacity", false, "wait until the timeout while a stage is at capacity, instead of failing at once")
	infer.Flags().StringVar(&flags.key, "idempotency-key", "", "run the request with this key once; sending it again returns the first answer. For one FILE")
	infer.Flags().BoolVar(&flags.stream, "stream", false, "print the answer as it arrives: text as it is, or each message as a line with --json. For one FILE")
	flags.style.add(infer)
	return infer
}

// ErrFailed is returned when requests failed; each failure has been printed.
var ErrFailed = errors.New("some requests failed")

// sender sends files through one pipeline of a mesh.
type sender struct {
	client     inferencev1connect.InferenceServiceClient
	pipeline   string
	timeout    time.Duration
	durability pipeline.Durability
	waits      bool
	key        string
	stdin      io.Reader
}

// sender returns the sender that the flags describe, without its client.
func (f inferFlags) sender(name string, in io.Reader) (sender, error) {
	durability, err := pipeline.ParseDurability(f.durability)
	if err != nil {
		return sender{}, fmt.Errorf("--durability: %q: use memory or file", f.durability)
	}
	return sender{pipeline: name, timeout: f.timeout, durability: durability, waits: f.waits, key: f.key, stdin: in}, nil
}

func runInfer(ctx context.Context, flags inferFlags, name string, files []string, in io.Reader, out io.Writer) error {
	s, err := flags.sender(name, in)
	if err != nil {
		return err
	}
	if flags.key != "" && len(files) > 1 {
		return fmt.Errorf("--idempotency-key: needs exactly one FILE, not %d", len(files))
	}
	table := newPrinter(out, flags.style, "FILE")
	table.ids = s.durability == pipeline.File || flags.key != ""
	failed := 0
	err = flags.address.with(func(client inferencev1connect.InferenceServiceClient) (err error) {
		s.client = client
		failed, err = s.sendAll(ctx, files, table)
		return err
	})
	if err := errors.Join(err, table.flush()); err != nil {
		return err
	}
	if failed > 0 {
		return fmt.Errorf("%w: %d of %d", ErrFailed, failed, len(files))
	}
	return nil
}

// sendAll sends the files, prints each outcome and returns how many failed. It stops
// when the gateway is unreachable or the output cannot be written.
func (s sender) sendAll(ctx context.Context, files []string, table *printer) (failed int, err error) {
	for _, file := range files {
		begin := time.Now()
		response, err := s.send(ctx, file)
		switch {
		case hopeless(err):
			return failed, rpcError{err}
		case err != nil:
			failed++
			err = table.failure(filepath.Base(file), err)
		default:
			err = table.answer(filepath.Base(file), response, time.Since(begin))
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

// maxFile bounds a file to send, in bytes.
const maxFile = 64 << 20

func (s sender) request(file string) (*inferencev1.InferRequest, error) {
	data, err := readInput(file, s.stdin)
	if err != nil {
		return nil, err
	}
	request := &inferencev1.InferRequest{
		Pipeline:   s.pipeline,
		Durability: s.durability.ToProto(), IdempotencyKey: s.key,
		Inputs: []*inferencev1.Part{{Body: &inferencev1.Part_Blob{
			Blob: &inferencev1.Blob{ContentType: contentType(file, data), Data: data},
		}}},
	}
	if s.waits {
		request.WaitForCapacity = &s.waits
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
