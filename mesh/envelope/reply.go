package envelope

import (
	"fmt"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/wire"
)

// Reply is a message from a host to the gateway that waits: a chunk, or the
// terminal answer, which is Fault, Stored or else Parts.
type Reply struct {
	Mesh        pipeline.MeshName
	RequestID   pipeline.RequestID
	ExecutionID pipeline.ExecutionID
	// Seq counts the messages of the answer from 1.
	Seq     uint64
	Attempt uint32
	// Chunk says that more follows; a Fault ends the answer all the same.
	Chunk bool
	// NextWithin says with a chunk when the next message comes at the latest; 0 where
	// the host does not know.
	NextWithin time.Duration
	// Stored says that the answer is the request's stored result.
	Stored   bool
	Parts    []payload.Part
	Metadata map[string]string
	Fault    *fault.Fault
	Timings  []StepTiming
}

// Terminal reports whether the reply ends the answer.
func (r *Reply) Terminal() bool { return !r.Chunk || r.Stored || r.Fault != nil }

// Answer returns the start of a reply to e: everything but what it became.
func (e *Envelope) Answer() *Reply {
	return &Reply{Mesh: e.Mesh, RequestID: e.RequestID, ExecutionID: e.ExecutionID, Seq: 1, Timings: e.Timings}
}

// Encode returns the reply's bytes. A fault can always be encoded, and is small:
// its texts are cut and made UTF-8 where need be.
func (r *Reply) Encode() ([]byte, error) {
	w := wire.NewWriter(r.wireSize())
	r.write(&w)
	return w.Done()
}

func (r *Reply) wireSize() int {
	return aboutIdentity + payload.WireSize(r.Parts) + aboutEntry*len(r.Metadata) + aboutTiming*len(r.Timings)
}

func (r *Reply) write(w *wire.Writer) {
	w.Text(replyMeshTag, string(r.Mesh))
	w.Text(replyRequestIDTag, string(r.RequestID))
	w.Text(replyExecutionIDTag, string(r.ExecutionID))
	w.Uint(replySeqTag, r.Seq)
	w.Uint(replyAttemptTag, uint64(r.Attempt))
	r.writeOutcome(w)
	writeTimings(w, replyTimingsTag, r.Timings)
}

func (r *Reply) writeOutcome(w *wire.Writer) {
	switch {
	case r.Fault != nil:
		writeFault(w, r.Fault)
	case r.Stored:
		w.End(w.Begin(replyStoredTag, 0))
	case r.Chunk:
		r.writeOutput(w, replyChunkTag)
		if r.NextWithin > 0 {
			w.Duration(replyNextWithinTag, r.NextWithin)
		}
	default:
		r.writeOutput(w, replyOutputTag)
	}
}

func (r *Reply) writeOutput(w *wire.Writer, t wire.Tag) {
	start := w.Begin(t, payload.Size(r.Parts))
	payload.Write(w, outputPartsTag, r.Parts)
	w.TextMap(outputMetadataTag, r.Metadata)
	w.End(start)
}

// DecodeReply reads a reply from bytes that anybody may have sent. Its payload is
// the bytes themselves: they are the reply's from then on.
func DecodeReply(data []byte) (*Reply, error) {
	r := replyReader{reply: new(Reply)}
	m := wire.Read(data)
	r.read(&m)
	if err := m.Err(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if err := r.finish(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return r.reply, nil
}

// replyReader reads one reply: what needs no more than its field, straight into
// it.
type replyReader struct {
	reply      *Reply
	outcome    outcomeReader
	nextWithin wire.Time
	timings    timingReader
}

func (r *replyReader) read(m *wire.Message) {
	for m.Next() {
		switch m.Tag {
		case replyMeshTag:
			r.reply.Mesh = pipeline.MeshName(m.Text())
		case replyRequestIDTag:
			r.reply.RequestID = pipeline.RequestID(m.Text())
		case replyExecutionIDTag:
			r.reply.ExecutionID = pipeline.ExecutionID(m.Text())
		case replySeqTag:
			r.reply.Seq = m.Uint64()
		case replyAttemptTag:
			r.reply.Attempt = m.Uint32()
		case replyTimingsTag:
			r.timings.read(m)
		case replyNextWithinTag:
			r.nextWithin.Read(m)
		default:
			r.outcome.read(m)
		}
	}
}

// finish completes the reply, and says what is wrong with it.
func (r *replyReader) finish() (err error) {
	if err := checkIDs(string(r.reply.RequestID), string(r.reply.ExecutionID)); err != nil {
		return err
	}
	if r.reply.Timings, err = r.timings.timings(pipeline.MaxSteps); err != nil {
		return err
	}
	if err := r.outcome.finish(r.reply); err != nil {
		return err
	}
	if r.reply.Chunk {
		r.reply.NextWithin = r.nextWithin.AsDuration()
	}
	return nil
}
