package envelope

import (
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/wire"
)

// What things take on the wire, in bytes, where their texts are of ordinary
// length: so much room is made for them.
const (
	aboutIdentity = 256 // an envelope's or reply's ids, names and times
	aboutHop      = 64
	aboutTiming   = 160
	aboutEntry    = 96
)

// Encode returns the envelope's bytes.
func (e *Envelope) Encode() ([]byte, error) {
	w := wire.NewWriter(e.wireSize())
	e.writeIdentity(&w)
	writeRoute(&w, e.Route)
	w.Uint(positionTag, uint64(uint32(e.Position)))
	e.writeTerms(&w)
	w.TextMap(traceTag, e.Trace)
	w.TextMap(metadataTag, e.Metadata)
	payload.Write(&w, partsTag, e.Parts)
	payload.Write(&w, keptTag, e.Kept)
	writeTimings(&w, timingsTag, e.Timings)
	w.Bool(takesChunksTag, e.TakesChunks)
	return w.Done()
}

func (e *Envelope) writeIdentity(w *wire.Writer) {
	w.Text(meshTag, string(e.Mesh))
	w.Text(tenantTag, e.Tenant)
	w.Text(requestIDTag, string(e.RequestID))
	w.Text(executionIDTag, string(e.ExecutionID))
	w.Uint(generationTag, uint64(e.Generation))
	w.Uint(attemptTag, uint64(e.Attempt))
	w.Text(gatewayTag, string(e.Gateway))
	w.Text(pipelineTag, string(e.Pipeline))
}

// writeTerms writes how the request is to be treated.
func (e *Envelope) writeTerms(w *wire.Writer) {
	w.Timestamp(deadlineTag, e.Deadline)
	w.Timestamp(admittedAtTag, e.AdmittedAt)
	w.Int(durabilityTag, int64(e.Durability.ToProto()))
	w.Int(priorityTag, int64(e.Priority))
	w.Text(idempotencyKeyTag, e.IdempotencyKey)
}

func (e *Envelope) wireSize() int {
	size := aboutIdentity + len(e.Tenant) + len(e.IdempotencyKey) + aboutEntry*(len(e.Trace)+len(e.Metadata))
	for i := range e.Route {
		hop := &e.Route[i]
		size += aboutHop + hop.Parameters.WireSize() + aboutEntry*(len(hop.Inputs)+len(hop.Keep))
	}
	return size + payload.WireSize(e.Parts) + payload.WireSize(e.Kept) + aboutTiming*len(e.Timings)
}
