package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/google/uuid"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// inferCommand is one call of stagemesh infer.
type inferCommand struct {
	gateway    port
	timeout    time.Duration
	durability string
	waits      bool
	complete   bool
	key        string
	stream     bool
	lines      linesCommand
	content    content
	style      style

	pipeline string
	stdin    io.Reader
}

func newInfer() *cobra.Command {
	var c inferCommand
	infer := &cobra.Command{
		Use:   "infer PIPELINE FILE...",
		Short: "Send files through a pipeline and print the answers",
		Long: "Send each file as a request through a pipeline of a running mesh, and print the answers. The content type follows from\n" +
			"the file's name, or else from its first bytes. - is standard input.",
		Example: "  stagemesh infer digits examples/digits/images/*.png\n  stagemesh infer stage:classify --json -\n  stagemesh infer stage:label --ndjson requests.ndjson >answers.ndjson\n  stagemesh infer digits image.png --durability file\n  stagemesh infer --stream chat question.txt",
		Args:    between(2, unlimited, "give a PIPELINE and at least one FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c.pipeline, c.stdin, c.lines.hints = args[0], cmd.InOrStdin(), cmd.ErrOrStderr()
			ctx, stop := process.SignalContext(cmd.Context())
			defer stop()
			defer context.AfterFunc(ctx, stop)() // a second signal ends the process, also while it reads input
			return c.run(ctx, args[1:], cmd.OutOrStdout())
		},
	}
	c.gateway.addPublic(infer)
	infer.Flags().DurationVar(&c.timeout, "timeout", 0, "the deadline of each request; the pipeline's timeout if 0")
	infer.Flags().StringVar(&c.durability, "durability", "", "where requests are queued between stages: memory or file; the pipeline's own if empty. With file the request IDs are printed, for get result and cancel")
	infer.Flags().BoolVar(&c.waits, "wait-for-capacity", false, "wait until the timeout while a stage is at capacity, instead of failing at once")
	infer.Flags().BoolVar(&c.complete, "complete", false, "fail where an answer would lack parts of a branch, or have constants in their place")
	infer.Flags().StringVar(&c.key, "idempotency-key", "", "run the request with this key once; sending it again returns the first answer. For one FILE")
	infer.Flags().BoolVar(&c.stream, "stream", false, "print the answer as it arrives: text as it is, or each message as a line with --json. For one FILE")
	c.lines.add(infer)
	c.content.add(infer)
	c.style.add(infer)
	return infer
}

// ErrFailed is returned when requests failed; each failure has been printed.
var ErrFailed = errors.New("some requests failed")

func (c *inferCommand) run(ctx context.Context, files []string, out io.Writer) error {
	_, err := pipeline.ParseDurability(c.durability)
	switch {
	case c.timeout < 0:
		return fmt.Errorf("--timeout: %s is negative", c.timeout)
	case c.stream && len(files) > 1:
		return fmt.Errorf("--stream: needs exactly one FILE, not %d", len(files))
	case err != nil:
		return fmt.Errorf("--durability: %q: use memory or file", c.durability)
	case c.lines.inFlight < 0:
		return fmt.Errorf("--in-flight: %d is negative", c.lines.inFlight)
	case !c.lines.isSet && (c.lines.unordered || c.lines.inFlight > 0):
		return errors.New("--unordered and --in-flight are for --ndjson")
	case c.lines.isSet:
		return c.sendLines(ctx, files, out)
	case c.stream:
		to := &streamPrinter{out: out, style: c.style}
		return c.gateway.reach(func(client clients) error { return c.sendStream(ctx, client, files[0], to) })
	case c.key != "" && len(files) > 1:
		return fmt.Errorf("--idempotency-key: needs exactly one FILE, not %d", len(files))
	}
	table := &printer{style: c.style, out: out, first: "FILE", ids: c.durability == string(pipeline.File) || c.key != ""}
	failed := 0
	err = c.gateway.reach(func(client clients) (err error) {
		failed, err = c.sendAll(ctx, client, files, table)
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
func (c *inferCommand) sendAll(ctx context.Context, client clients, files []string, table *printer) (failed int, err error) {
	for i, file := range files {
		begin := time.Now()
		request, err := c.request(file)
		var response *connect.Response[inferencev1.InferResponse]
		if err == nil {
			response, err = client.Infer(ctx, connect.NewRequest(request))
		}
		switch {
		case err != nil && ctx.Err() != nil:
			return failed, fmt.Errorf("stopped by a signal after %d of %d files", i, len(files))
		case isHopeless(err):
			return failed, err
		case err != nil:
			failed++
			err = table.failure(filepath.Base(file), err)
		default:
			err = table.answer(filepath.Base(file), response.Msg, time.Since(begin))
		}
		if err != nil {
			return failed, err
		}
	}
	return failed, nil
}

// sendStream sends the file and prints each message of the answer.
func (c *inferCommand) sendStream(ctx context.Context, client clients, file string, to *streamPrinter) error {
	request, err := c.request(file)
	if err != nil {
		return err
	}
	answer, err := client.InferStream(ctx, connect.NewRequest(request))
	if err != nil {
		return to.fail(err)
	}
	defer answer.Close() //nolint:errcheck // the answer has ended
	for answer.Receive() {
		if err := to.message(answer.Msg()); err != nil {
			return err
		}
	}
	if err := answer.Err(); err != nil {
		return to.fail(err)
	}
	return nil
}

func (c *inferCommand) request(file string) (*inferencev1.InferRequest, error) {
	data, err := readInput(file, c.stdin)
	if err != nil {
		return nil, err
	}
	request := &inferencev1.InferRequest{
		Pipeline:   c.pipeline,
		Durability: pipeline.Durability(c.durability).ToProto(), IdempotencyKey: c.key, Complete: c.complete,
		Inputs: []*inferencev1.Part{{Body: &inferencev1.Part_Blob{
			Blob: &inferencev1.Blob{ContentType: cmp.Or(c.content.mediaType, contentType(file, data)), Data: data},
		}}},
		Parameters: c.content.values(),
	}
	if c.waits {
		request.WaitForCapacity = &c.waits
	}
	if c.timeout > 0 {
		request.Timeout = durationpb.New(c.timeout)
	}
	return request, nil
}

// maxFile bounds a file to send, in bytes.
const maxFile = 64 << 20

func openInput(file string, stdin io.Reader) (io.ReadCloser, error) {
	if file == "-" {
		return io.NopCloser(stdin), nil
	}
	return os.Open(file)
}

func readInput(file string, stdin io.Reader) ([]byte, error) {
	from, err := openInput(file, stdin)
	if err != nil {
		return nil, err
	}
	defer from.Close() //nolint:errcheck // it was only read
	data, err := io.ReadAll(io.LimitReader(from, maxFile+1))
	if err == nil && len(data) > maxFile {
		err = fmt.Errorf("%s: larger than %d bytes", file, maxFile)
	}
	return data, err
}

// namedTexts is a flag with a name and a text, which is all behind the first "=" as it stands.
type namedTexts struct{ to *map[string]string }

func (p namedTexts) String() string { return "" }
func (p namedTexts) Type() string   { return "name=value" }

// Set adds a pair.
func (p namedTexts) Set(text string) error {
	name, value, ok := strings.Cut(text, "=")
	if !ok || name == "" {
		return errors.New("must be name=value")
	}
	if *p.to == nil {
		*p.to = map[string]string{}
	}
	(*p.to)[name] = value
	return nil
}

// content is what to send beside a file.
type content struct {
	mediaType  string
	parameters map[string]string
}

func (c *content) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&c.mediaType, "content-type", "", "the content type of each FILE, such as text/plain, instead of the one that follows from its name")
	cmd.Flags().Var(namedTexts{&c.parameters}, "parameter", "a parameter for every step, as name=value: true, 3, 0.5, text, or \"3\" as text; may be repeated")
}

func (c content) values() map[string]*inferencev1.Value {
	out := payload.Parameters{}
	for name, value := range c.parameters {
		out[name] = payload.ParseValue(value)
	}
	return out.ToProto()
}

// contentType returns a file's media type by its name, or else by its bytes.
func contentType(file string, data []byte) string {
	if byName := mime.TypeByExtension(filepath.Ext(file)); byName != "" {
		return byName
	}
	return http.DetectContentType(data)
}

// requestName names a request: by its ID, or by its pipeline and idempotency key.
type requestName struct{ id, pipeline, key string }

func (n *requestName) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&n.pipeline, "pipeline", "", "with --idempotency-key: the pipeline that the request was sent to")
	cmd.Flags().StringVar(&n.key, "idempotency-key", "", "take the request that has this key instead of a REQUEST_ID")
}

func (n *requestName) String() string {
	if n.id != "" {
		return n.id
	}
	return fmt.Sprintf("the request of pipeline %s with the key %q", n.pipeline, n.key)
}

// read reads the arguments of a command.
func (n *requestName) read(cmd *cobra.Command, args []string) error {
	byKey := n.pipeline != "" || n.key != ""
	switch {
	case byKey && (len(args) > 0 || n.pipeline == "" || n.key == ""):
		return usageError(cmd, errors.New("give one REQUEST_ID, or --pipeline and --idempotency-key"))
	case byKey:
		return nil
	case len(args) != 1:
		return usageError(cmd, errors.New("give one REQUEST_ID"))
	}
	n.id = args[0]
	if _, err := uuid.Parse(args[0]); err != nil {
		return usageError(cmd, fmt.Errorf("REQUEST_ID: %q is not an ID such as 01a1fc37-9c70-7089-b8a4-eabc34a6f203", args[0]))
	}
	return nil
}

func newGetResult() *cobra.Command {
	var style style
	var wait time.Duration
	var name requestName
	result := &cobra.Command{
		Use:   "result [REQUEST_ID]",
		Short: "Print the stored result of a durable request",
		Long: "Print the stored result of a request of --durability file, or of one with an idempotency key. Any gateway of the mesh\n" +
			"has it. A failed request's failure is the error. NOT_FOUND means that no result is stored: not yet, or not any more.",
		Example: "  stagemesh get result 01a1fc37-9c70-7089-b8a4-eabc34a6f203 --wait 5s\n" +
			"  stagemesh get result --pipeline digits --idempotency-key order-4711",
		Args: name.read,
	}
	name.add(result)
	result.Flags().DurationVar(&wait, "wait", 0, "how long to wait for a result that is not stored yet")
	style.add(result)
	return askPublic(result, func(cmd *cobra.Command, client clients, _ []string) error {
		if wait < 0 {
			return usageError(cmd, fmt.Errorf("--wait: %s is negative", wait))
		}
		out := &printer{style: style, out: cmd.OutOrStdout(), first: "REQUEST"}
		request := &inferencev1.GetResultRequest{RequestId: name.id, Pipeline: name.pipeline, IdempotencyKey: name.key, Wait: durationpb.New(wait)}
		response, err := client.GetResult(cmd.Context(), connect.NewRequest(request))
		if err != nil {
			return err
		}
		answer := response.Msg.GetResult()
		err = out.answer(answer.GetRequestId(), answer, answer.GetTimeline().GetTotal().AsDuration())
		return errors.Join(err, out.flush())
	})
}

func newCancel() *cobra.Command {
	var name requestName
	cancel := &cobra.Command{
		Use:   "cancel [REQUEST_ID]",
		Short: "Cancel a request by its ID or idempotency key",
		Long: "Cancel a request by its ID or idempotency key, whichever gateway of the mesh took it. Its caller gets CANCELLED, its queued item is dropped,\n" +
			"and its running item is asked to stop. This is best effort: a finished request stays finished, and an unknown ID is not an error.",
		Example: "  stagemesh cancel 01a1fc37-9c70-7089-b8a4-eabc34a6f203\n" +
			"  stagemesh cancel --pipeline digits --idempotency-key order-4711",
		Args: name.read,
	}
	name.add(cancel)
	return askPublic(cancel, func(cmd *cobra.Command, client clients, _ []string) error {
		if _, err := client.Cancel(cmd.Context(), connect.NewRequest(&inferencev1.CancelRequest{RequestId: name.id, Pipeline: name.pipeline, IdempotencyKey: name.key})); err != nil {
			return err
		}
		_, err := fmt.Fprintf(cmd.OutOrStdout(), "the mesh was asked to cancel %s; finished work stays finished\n", &name)
		return err
	})
}
