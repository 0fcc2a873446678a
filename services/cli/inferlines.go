package cli

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/internal/transport"
)

// linesCommand is what stagemesh infer --ndjson has beside the others.
type linesCommand struct {
	isSet, unordered bool
	inFlight         int
	hints            io.Writer
}

func (l *linesCommand) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.BoolVar(&l.isSet, "ndjson", false, "send each line of FILE, which is JSON, as a request, and print a line of JSON for each, in their order. For one FILE")
	flags.BoolVar(&l.unordered, "unordered", false, "with --ndjson: print the answers as they are ready; line is the number of the request's line")
	flags.IntVar(&l.inFlight, "in-flight", 0, "with --ndjson: how many requests run at a time; as many as the gateway allows if 0")
}

// linesPath returns the path that answers lines.
func (c *inferCommand) linesPath() string {
	query := url.Values{}
	query.Set("in_order", strconv.FormatBool(!c.lines.unordered))
	if c.lines.inFlight > 0 {
		query.Set("in_flight", strconv.Itoa(c.lines.inFlight))
	}
	for name, value := range c.content.parameters {
		query.Set("parameters."+name, value)
	}
	return "/v1/pipelines/" + url.PathEscape(c.pipeline) + ":many?" + query.Encode()
}

// sendLines sends a request for each line of the file, and prints the answers.
func (c *inferCommand) sendLines(ctx context.Context, files []string, out io.Writer) error {
	switch {
	case len(files) > 1:
		return fmt.Errorf("--ndjson: needs exactly one FILE, not %d", len(files))
	case c.stream || c.style.timeline || c.content.mediaType != "":
		return errors.New("--ndjson: cannot be used with --stream, --timeline or --content-type; each answer has its timeline")
	}
	header := http.Header{}
	header.Set("Content-Type", "application/x-ndjson")
	for name, value := range map[string]string{transport.HeaderDurability: c.durability, transport.HeaderIdempotencyKey: c.key} {
		if value != "" {
			header.Set(name, value)
		}
	}
	if c.waits {
		header.Set(transport.HeaderWaitForCapacity, "true")
	}
	if c.complete {
		header.Set(transport.HeaderComplete, "true")
	}
	if c.timeout > 0 {
		header.Set(transport.HeaderTimeout, c.timeout.String())
	}
	from, err := openInput(files[0], c.stdin)
	if err != nil {
		return err
	}
	defer from.Close() //nolint:errcheck // it was only read
	bar := c.lines.newBar(from, out)
	failed, answered := 0, 0
	err = c.gateway.reach(func(client clients) error {
		response, err := client.send(ctx, http.MethodPost, c.linesPath(), header, io.TeeReader(from, bar))
		if err != nil {
			return err
		}
		defer response.Body.Close() //nolint:errcheck // it was only read
		failed, answered, err = printLines(response.Body, out, bar)
		return err
	})
	_ = bar.Finish() // only a broken terminal fails
	if err == nil && failed > 0 {
		err = fmt.Errorf("%w: %d of %d", ErrFailed, failed, answered)
	}
	return err
}

// newBar returns a bar of what is sent of a file, which is shown on a terminal that has not the answers.
func (l *linesCommand) newBar(from io.Reader, out io.Writer) *progressbar.ProgressBar {
	size := int64(-1)
	if file, ok := from.(*os.File); ok {
		if info, err := file.Stat(); err == nil && info.Mode().IsRegular() && info.Size() > 0 {
			size = info.Size()
		}
	}
	return progressbar.NewOptions64(size, progressbar.OptionSetWriter(l.hints), progressbar.OptionSetVisibility(isTerminal(l.hints) && !isTerminal(out)),
		progressbar.OptionClearOnFinish(), progressbar.OptionShowBytes(true), progressbar.OptionThrottle(barInterval))
}

// barInterval is how often a bar changes.
const barInterval = 100 * time.Millisecond

// printLines prints the answers as they come, and returns how many there are.
func printLines(answers io.Reader, out io.Writer, bar *progressbar.ProgressBar) (failed, answered int, err error) {
	from, isStart := bufio.NewReader(answers), true
	for shown := time.Now(); ; {
		part, err := from.ReadSlice('\n')
		if isStart && len(part) > 0 {
			answered++
			if _, rest, _ := bytes.Cut(part, []byte(",")); bytes.HasPrefix(rest, []byte(`"error":`)) {
				failed++
			}
			if now := time.Now(); now.Sub(shown) >= barInterval {
				shown = now
				bar.Describe(count(answered, "answer"))
			}
		}
		isStart = err == nil
		if _, failure := out.Write(part); failure != nil {
			return failed, answered, failure
		}
		switch {
		case errors.Is(err, io.EOF):
			return failed, answered, nil
		case err != nil && !errors.Is(err, bufio.ErrBufferFull):
			return failed, answered, err
		}
	}
}
