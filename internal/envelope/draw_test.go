package envelope_test

import (
	"math"
	"time"

	"github.com/google/uuid"
	"pgregory.net/rapid"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// What is drawn here is what decoding would return for it: nil where the wire
// does not tell empty from absent, times in UTC.

func drawID(t *rapid.T, label string) string {
	id, err := uuid.FromBytes(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, label))
	if err != nil {
		t.Fatal(err)
	}
	return id.String()
}

func drawLabel(t *rapid.T, label string) string {
	return rapid.StringMatching(`[a-z0-9]([a-z0-9-]{0,9}[a-z0-9])?`).Draw(t, label)
}

func drawText(t *rapid.T, label string) string { return rapid.StringN(0, 4, 16).Draw(t, label) }

func drawMap(t *rapid.T, label string) map[string]string {
	out := rapid.MapOfN(rapid.StringN(0, 4, 16), rapid.StringN(0, 4, 16), 0, 2).Draw(t, label)
	if len(out) == 0 {
		return nil
	}
	return out
}

func drawParameters(t *rapid.T) payload.Parameters {
	var out payload.Parameters
	for range rapid.IntRange(0, 2).Draw(t, "parameters") {
		value := rapid.SampledFrom([]payload.Value{
			payload.Bool(true), payload.Int64(-1), payload.Uint64(math.MaxUint64), payload.Double(0.5), payload.String("x"), {},
		}).Draw(t, "value")
		out = payload.Merge(out, payload.Parameters{drawText(t, "parameter"): value})
	}
	return out
}

func bytesOrNil(b []byte) []byte {
	if len(b) == 0 {
		return nil
	}
	return b
}

func drawParts(t *rapid.T, label string) []payload.Part {
	names := rapid.SliceOfNDistinct(rapid.StringN(0, 4, 16), 0, 3, rapid.ID).Draw(t, label)
	out := make([]payload.Part, len(names))
	for i, name := range names {
		data := bytesOrNil(rapid.SliceOfN(rapid.Byte(), 0, 8).Draw(t, "data"))
		if rapid.Bool().Draw(t, "tensor") {
			out[i] = payload.OfTensor(name, tensor.Tensor{Datatype: tensor.Uint8, Shape: []int64{int64(len(data))}, Raw: data})
		} else {
			out[i] = payload.OfBlob(name, drawText(t, "type"), data)
		}
		out[i].Parameters = drawParameters(t)
	}
	return out
}

func drawHop(t *rapid.T) pipeline.Hop {
	out := pipeline.Hop{
		Step:       pipeline.StepName(drawLabel(t, "step")),
		Stage:      pipeline.StageName(drawLabel(t, "stage")),
		Parameters: drawParameters(t),
		Inputs:     drawMap(t, "inputs"),
		Model: rapid.SampledFrom([]payload.ModelRef{
			{}, {Model: "m"}, {Model: "m", Version: "1"}, {Alias: "prod"}, {Version: "2"},
		}).Draw(t, "model"),
	}
	if rapid.Bool().Draw(t, "addressed") {
		out.Host = pipeline.HostID(drawLabel(t, "host"))
	}
	if names := rapid.SliceOfN(rapid.SampledFrom([]string{"", "a", "b", "image"}), 0, 3).Draw(t, "keep"); len(names) > 0 {
		out.Keep = names
	}
	if hosts := rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "c"}), 0, pipeline.MaxVisited).Draw(t, "visited"); len(hosts) > 0 {
		out.Visited = hosts
	}
	return out
}

func drawTiming(t *rapid.T) envelope.StepTiming {
	duration := func(label string) time.Duration { return time.Duration(rapid.Int64().Draw(t, label)) }
	return envelope.StepTiming{
		Step: pipeline.StepName(drawLabel(t, "step")), Stage: pipeline.StageName(drawLabel(t, "stage")), Host: pipeline.HostID(drawLabel(t, "host")),
		Attempt:   rapid.Uint32().Draw(t, "attempt"),
		QueueWait: duration("queue"), BatchWait: duration("batch"), Run: duration("run"), Arrival: duration("arrival"), ModelWait: duration("model"),
		BatchSize: rapid.Uint32().Draw(t, "size"), BatchRows: rapid.Uint32().Draw(t, "rows"), Rows: rapid.Uint32().Draw(t, "own rows"),
		Dispatch: drawText(t, "dispatch"), Local: rapid.Bool().Draw(t, "local"),
	}
}

func drawTimings(t *rapid.T) []envelope.StepTiming {
	out := make([]envelope.StepTiming, rapid.IntRange(0, 2).Draw(t, "timings"))
	for i := range out {
		out[i] = drawTiming(t)
	}
	return out
}

func drawTime(t *rapid.T, label string) time.Time {
	// What a protobuf timestamp can say: years 1 to 9999.
	second := rapid.Int64Range(-62135596800, 253402300799).Draw(t, label)
	return time.Unix(second, rapid.Int64Range(0, 999_999_999).Draw(t, "ns")).UTC()
}

func drawEnvelope(t *rapid.T) *envelope.Envelope {
	route := make([]pipeline.Hop, rapid.IntRange(1, 3).Draw(t, "hops"))
	for i := range route {
		route[i] = drawHop(t)
	}
	return &envelope.Envelope{
		Mesh:           pipeline.MeshName(drawLabel(t, "mesh")),
		Tenant:         drawText(t, "tenant"),
		RequestID:      pipeline.RequestID(drawID(t, "request")),
		ExecutionID:    pipeline.ExecutionID(drawID(t, "execution")),
		Generation:     rapid.Uint32().Draw(t, "generation"),
		Gateway:        pipeline.GatewayID(drawLabel(t, "gateway")),
		Pipeline:       pipeline.Name(drawLabel(t, "pipeline")),
		Route:          route,
		Position:       rapid.IntRange(0, len(route)-1).Draw(t, "position"),
		Deadline:       drawTime(t, "deadline"),
		AdmittedAt:     drawTime(t, "admitted"),
		Durability:     rapid.SampledFrom([]pipeline.Durability{"", pipeline.Memory, pipeline.File}).Draw(t, "durability"),
		Priority:       rapid.Int32().Draw(t, "priority"),
		IdempotencyKey: drawText(t, "key"),
		TakesChunks:    rapid.Bool().Draw(t, "takes chunks"),
		Trace:          envelope.Trace{Parent: drawText(t, "parent"), State: drawText(t, "state")},
		Metadata:       drawMap(t, "metadata"),
		Parts:          drawParts(t, "parts"),
		Kept:           drawParts(t, "kept"),
		Timings:        drawTimings(t),
		LocalAttempts:  rapid.Uint32().Draw(t, "local attempts"),
		LocalCrash:     rapid.Bool().Draw(t, "local crash"),
		StoreResult:    rapid.Bool().Draw(t, "store result"),
	}
}

func drawFault(t *rapid.T) *fault.Fault {
	out := fault.New(rapid.SampledFrom(fault.Reasons()).Draw(t, "reason"), drawText(t, "message"))
	out.Code = out.GRPCCode()
	out.Stage, out.Step, out.Host = drawLabel(t, "stage"), drawLabel(t, "step"), drawLabel(t, "host")
	out.Metadata = drawMap(t, "metadata")
	out.RetryAfter = time.Duration(rapid.Int64Range(0, int64(time.Hour)).Draw(t, "retry"))
	for range rapid.IntRange(0, 2).Draw(t, "violations") {
		out.Violations = append(out.Violations, fault.Violation{Field: drawText(t, "field"), Description: drawText(t, "description")})
	}
	return out
}

func drawReply(t *rapid.T) *envelope.Reply {
	out := &envelope.Reply{
		Mesh:        pipeline.MeshName(drawLabel(t, "mesh")),
		RequestID:   pipeline.RequestID(drawID(t, "request")),
		ExecutionID: pipeline.ExecutionID(drawID(t, "execution")),
		Seq:         rapid.Uint64().Draw(t, "seq"),
		Attempt:     rapid.Uint32().Draw(t, "attempt"),
		Timings:     drawTimings(t),
	}
	switch rapid.IntRange(0, 3).Draw(t, "outcome") {
	case 0:
		out.Fault = drawFault(t)
		return out
	case 3:
		out.Stored = true
		return out
	case 1:
		out.Chunk = true
		out.NextWithin = time.Duration(rapid.Int64Range(0, int64(time.Hour)).Draw(t, "next within"))
	}
	out.Parts, out.Metadata = drawParts(t, "outputs"), drawMap(t, "metadata")
	return out
}

func drawResult(t *rapid.T) *envelope.Result {
	reply := rapid.Custom(drawReply).Filter(func(r *envelope.Reply) bool { return r.Terminal() && !r.Stored }).Draw(t, "reply")
	return &envelope.Result{
		Reply: reply, Tenant: drawText(t, "tenant"), Pipeline: pipeline.Name(drawLabel(t, "pipeline")),
		AdmittedAt: drawTime(t, "admitted"), FinishedAt: drawTime(t, "finished"),
	}
}

func drawClaim(t *rapid.T) *envelope.Claim {
	out := &envelope.Claim{
		Mesh: pipeline.MeshName(drawLabel(t, "mesh")), Tenant: drawText(t, "tenant"), Pipeline: pipeline.Name(drawLabel(t, "pipeline")),
		RequestID:  pipeline.RequestID(drawID(t, "request")),
		Durability: rapid.SampledFrom([]pipeline.Durability{pipeline.Memory, pipeline.File}).Draw(t, "durability"),
		Released:   rapid.Bool().Draw(t, "released"),
	}
	copy(out.Digest[:], rapid.SliceOfN(rapid.Byte(), len(out.Digest), len(out.Digest)).Draw(t, "digest"))
	if !out.Released {
		out.AdmittedAt, out.Deadline = drawTime(t, "admitted"), drawTime(t, "deadline")
	}
	return out
}

func drawDeadLetter(t *rapid.T) *envelope.DeadLetter {
	out := &envelope.DeadLetter{
		Mesh:           pipeline.MeshName(drawLabel(t, "mesh")),
		Stage:          pipeline.StageName(drawLabel(t, "stage")),
		Host:           pipeline.HostID(drawLabel(t, "host")),
		Durability:     rapid.SampledFrom([]pipeline.Durability{pipeline.Memory, pipeline.File}).Draw(t, "durability"),
		Priority:       rapid.Int32().Draw(t, "priority"),
		Fault:          drawFault(t),
		Item:           bytesOrNil(rapid.SliceOf(rapid.Byte()).Draw(t, "item")),
		Deliveries:     rapid.IntRange(0, 30).Draw(t, "deliveries"),
		QueuedAt:       drawTime(t, "queued"),
		DeadLetteredAt: drawTime(t, "died"),
		Queue:          pipeline.QueueName(drawLabel(t, "queue")),
		Job:            drawLabel(t, "job"),
		Tenant:         drawLabel(t, "tenant"),
	}
	for range rapid.IntRange(0, 2).Draw(t, "starts") {
		out.Runs = append(out.Runs, envelope.RunRecord{Host: pipeline.HostID(drawLabel(t, "host")), At: drawTime(t, "start")})
	}
	return out
}
