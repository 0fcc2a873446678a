package rest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// many answers a request for each line of a body, with a line each. It holds the lines that run, and
// no more are read meanwhile.
type many struct {
	*handler
	w        http.ResponseWriter
	body     *lineBody
	template request.Request
	kind     kind
	inOrder  bool
	inFlight int

	writing sync.Mutex
	hasAny  bool
}

// manyLine is a line that runs. It has its turn once previous is closed, and closes done.
type manyLine struct {
	number         int
	memory         *budget.Account
	previous, done chan struct{}
}

// inferMany answers the lines of a body. It returns an error where no line has been written.
func (h *handler) inferMany(w http.ResponseWriter, r *http.Request, pipeline string) error {
	x := &many{handler: h, w: w, inFlight: transport.ManyInFlight}
	rest, err := x.takeQuery(r.URL.RawQuery)
	if err != nil {
		return err
	}
	r.URL.RawQuery = rest
	template, err := ReadOptions(r)
	if err != nil {
		return err
	}
	x.template = *template
	x.template.Pipeline, x.template.Trace, x.template.Origin = pipeline, transport.TraceContext(r.Header), transport.HTTPOrigin(r, PipelinesPrefix+"{pipeline}:many")
	if x.kind, err = contentType(r.Header.Get("Content-Type")); err != nil {
		return err
	}
	if x.kind.media != linesType {
		return fault.Newf(fault.UnsupportedMedia, "Content-Type %.*q: send a request in JSON on each line, as %s", fault.MaxQuoted, x.kind.full, linesType)
	}
	x.kind.media, x.kind.full = jsonType, jsonType
	budget.FromContext(r.Context()).HasMany()
	memory := budget.Of(r.Context(), 0)
	defer memory.Close()
	if err := memory.Reserve(lineBuffer); err != nil {
		return err
	}
	conn := http.NewResponseController(w)
	_ = conn.EnableFullDuplex() // without it, in tests, there is no connection
	x.body = &lineBody{idle: r.Body, stall: func() io.Reader { return transport.StallReader(w, r, h.settings) }, release: func() { transport.ReleaseBody(r) }}
	x.body.lines = bufio.NewReaderSize(x.body, lineBuffer)
	number, err := x.run(r.Context(), func() { _ = conn.SetReadDeadline(time.Unix(0, 0)) })
	switch {
	case err == nil && !x.hasAny:
		return emptyBody()
	case err != nil && !x.hasAny:
		return err
	case err != nil:
		_ = x.write(append(failedLine(number, err), '\n')) // a failed write is not an error: the caller has disconnected
	}
	return nil
}

// takeQuery takes what is of all lines together from a query, and returns the rest.
func (x *many) takeQuery(raw string) (rest string, err error) {
	others := url.Values{}
	err = eachQuery(raw, func(key, value string) (err error) {
		switch key {
		case "in_order":
			if x.inOrder, err = strconv.ParseBool(value); err != nil {
				err = fmt.Errorf("%.*q: use true or false", fault.MaxQuoted, value)
			}
		case "in_flight":
			if x.inFlight, err = strconv.Atoi(value); err != nil || x.inFlight < 1 || x.inFlight > transport.ManyInFlight {
				err = fmt.Errorf("%.*q: use a whole number from 1 to %d", fault.MaxQuoted, value, transport.ManyInFlight)
			}
		default:
			others.Set(key, value)
		}
		return err
	})
	return others.Encode(), err
}

// run reads the lines and returns when all are answered. An error is why no more lines were read, of
// the line with that number.
func (x *many) run(ctx context.Context, interrupt func()) (number int, err error) {
	// An interrupted read over HTTP/1 cancels the request's context, and the lines that run when the
	// gateway stops are answered.
	caller := ctx
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	defer context.AfterFunc(caller, func() {
		if !transport.IsClosed(x.settings.Stopping) {
			cancel(context.Cause(caller))
		}
	})()
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(x.inFlight)
	release := transport.InterruptReads(ctx, x.settings.Stopping, interrupt)
	number, err = x.start(ctx, group)
	release()
	switch {
	case err == nil:
	case transport.IsClosed(x.settings.Stopping): // lines that run are answered
		err = fault.New(fault.ShuttingDown, "the gateway is stopping; send this line and those after it again").WithRetryAfter(budget.RetryAfter)
	default:
		if _, isFault := errors.AsType[*fault.Fault](err); !isFault && ctx.Err() != nil {
			err = context.Cause(ctx) // the read failed because the call ended
		}
		err = transport.ReadFault(err)
		cancel(fault.Newf(fault.Cancelled, "the lines ended: %s", fault.From(err).Message))
	}
	if err != nil {
		interrupt() // net/http would read the rest
	}
	if ended := group.Wait(); err == nil {
		err = ended
	}
	return number, err
}

// start starts a request for each line, until the last.
func (x *many) start(ctx context.Context, group *errgroup.Group) (number int, err error) {
	turn := make(chan struct{})
	close(turn)
	for number = 1; ; number++ {
		data, err := x.body.next(x.settings.MaxMessageBytes)
		isLong, isLast := errors.Is(err, errLongLine), errors.Is(err, io.EOF)
		switch {
		case len(data) == 0 && isLast:
			return number, nil
		case err != nil && !isLong && !isLast:
			return number, err
		case len(data) == 0 && !isLong:
			continue
		}
		line := manyLine{number, budget.Of(ctx, x.settings.MaxPayload), turn, make(chan struct{})}
		turn = line.done
		group.Go(func() error { return x.answer(ctx, line, data, isLong) })
		if isLast {
			return number, nil
		}
	}
}

// answer answers a line. An error is one of the connection.
func (x *many) answer(ctx context.Context, line manyLine, data []byte, isLong bool) error {
	defer close(line.done)
	defer line.memory.Close()
	document, err := []byte(nil), error(transport.TooLarge(int64(x.settings.MaxMessageBytes)))
	if !isLong {
		document, err = x.infer(budget.NewContext(ctx, line.memory), line, data)
	}
	if err != nil {
		document = append(failedLine(line.number, err), '\n')
	}
	if x.inOrder {
		select {
		case <-line.previous:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return x.write(document)
}

// infer runs the request of a line, and returns its answer as a line.
func (x *many) infer(ctx context.Context, line manyLine, data []byte) ([]byte, error) {
	if err := line.memory.Reserve(int64(len(data))); err != nil {
		return nil, err
	}
	in, f := x.template, format{line: line.number}
	if err := x.takeBody(&in, &f, x.kind, data, line.memory); err != nil {
		return nil, err
	}
	if err := payload.Validate("inputs", in.Inputs); err != nil {
		return nil, err
	}
	if in.IdempotencyKey != "" {
		in.IdempotencyKey = fmt.Sprintf("%s/%d", in.IdempotencyKey, line.number)
	}
	out, err := x.caller.Infer(ctx, &in)
	if err != nil {
		return nil, err
	}
	document, err := f.document(out)
	if err != nil {
		return nil, transport.WithRequestID(err, out.RequestID)
	}
	return document, nil
}

// write sends a line, which is complete.
func (x *many) write(line []byte) error {
	x.writing.Lock()
	defer x.writing.Unlock()
	if !x.hasAny {
		x.hasAny = true
		x.w.Header().Set("Content-Type", linesType)
	}
	if _, err := x.w.Write(line); err != nil {
		return err
	}
	return http.NewResponseController(x.w).Flush()
}

// lineBody reads the lines of a body. Its caller may be silent between two lines, and not within one.
type lineBody struct {
	lines *bufio.Reader
	// idle reads the first byte of a line, inLine the others, which stall returns with a new timeout.
	idle, inLine io.Reader
	stall        func() io.Reader
	release      func()
	isBetween    bool
}

// Read implements io.Reader.
func (b *lineBody) Read(buf []byte) (int, error) {
	from := b.inLine
	if b.isBetween {
		b.isBetween, from, buf = false, b.idle, buf[:1]
	}
	return from.Read(buf)
}

// next returns the next line, as readLine does. The memory of the one before is released.
func (b *lineBody) next(limit int) ([]byte, error) {
	b.release()
	b.isBetween, b.inLine = b.lines.Buffered() == 0, b.stall()
	return readLine(b.lines, limit, b.release)
}
