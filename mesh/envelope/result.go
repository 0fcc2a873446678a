package envelope

import (
	"errors"
	"fmt"
	"time"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/wire"
)

// Result is a request's terminal answer as it is stored.
type Result struct {
	// Reply is terminal, and the answer itself.
	Reply    *Reply
	Tenant   string
	Pipeline pipeline.Name
	// AdmittedAt is on the gateway's clock, FinishedAt on the host's.
	AdmittedAt, FinishedAt time.Time
}

// Result returns what is stored of a terminal reply to e.
func (e *Envelope) Result(r *Reply, finished time.Time) *Result {
	return &Result{Reply: r, Tenant: e.Tenant, Pipeline: e.Pipeline, AdmittedAt: e.AdmittedAt, FinishedAt: finished}
}

// Encode returns the result's bytes.
func (r *Result) Encode() ([]byte, error) {
	size := r.Reply.wireSize()
	w := wire.NewWriter(size + aboutIdentity + len(r.Tenant))
	start := w.Begin(resultReplyTag, payload.Size(r.Reply.Parts))
	r.Reply.write(&w)
	w.End(start)
	w.Text(resultTenantTag, r.Tenant)
	w.Text(resultPipelineTag, string(r.Pipeline))
	w.Timestamp(resultAdmittedAtTag, r.AdmittedAt)
	w.Timestamp(resultFinishedAtTag, r.FinishedAt)
	return w.Done()
}

// DecodeResult reads a result from bytes that anybody may have stored. Its payload
// is the bytes themselves: they are the result's from then on.
func DecodeResult(data []byte) (*Result, error) {
	r := resultReader{reply: replyReader{reply: new(Reply)}}
	m := wire.Read(data)
	r.read(&m)
	if err := m.Err(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if err := r.finish(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return &r.result, nil
}

// resultReader reads one result.
type resultReader struct {
	result                 Result
	reply                  replyReader
	admittedAt, finishedAt wire.Time
}

func (r *resultReader) read(m *wire.Message) {
	for m.Next() {
		switch m.Tag {
		case resultReplyTag:
			reply := m.Inner()
			r.reply.read(&reply)
			m.Fail(reply.Err())
		case resultTenantTag:
			r.result.Tenant = m.Text()
		case resultPipelineTag:
			r.result.Pipeline = pipeline.Name(m.Text())
		case resultAdmittedAtTag:
			r.admittedAt.Read(m)
		case resultFinishedAtTag:
			r.finishedAt.Read(m)
		}
	}
}

// finish completes the result, and says what is wrong with it.
func (r *resultReader) finish() error {
	if err := r.reply.finish(); err != nil {
		return err
	}
	reply := r.reply.reply
	if !reply.Terminal() || reply.Stored {
		return errors.New("the reply is no answer")
	}
	if err := r.admittedAt.CheckTimestamp(); err != nil {
		return fmt.Errorf("admission: %w", err)
	}
	if err := r.finishedAt.CheckTimestamp(); err != nil {
		return fmt.Errorf("finish: %w", err)
	}
	r.result.Reply = reply
	r.result.AdmittedAt, r.result.FinishedAt = r.admittedAt.AsTime(), r.finishedAt.AsTime()
	return nil
}
