package rest

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"

	"github.com/stagemesh/stagemesh/internal/front/oipjson"
	"github.com/stagemesh/stagemesh/internal/msgpack"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// format is the format of a response that the caller asks for.
type format struct {
	// json asks for JSON, and packed for MessagePack, even where the response is one blob. At
	// most one of them is true.
	json, packed bool
	// id is the request's own, and is echoed.
	id string
	// line is the number of the request's line, 0 where it has none.
	line int
}

// formatOf returns JSON or MessagePack by the preference in Accept, and of equal ones the
// first.
func formatOf(h http.Header) (out format) {
	best := 0.0
	for media, q := range transport.AcceptedValues(h.Values("Accept")) {
		if (media == jsonType || msgpack.Is(media)) && q > best {
			best, out = q, format{json: media == jsonType, packed: media != jsonType}
		}
	}
	return out
}

// response is an encoded response.
type response struct {
	contentType string
	body        []byte
	// blob is true where the body is a stage's own bytes.
	blob              bool
	requestID, timing string
	metadata          map[string]string
}

// encode encodes a response.
func (f format) encode(r *request.Response) (*response, error) {
	out := &response{requestID: r.RequestID, metadata: r.Metadata, timing: transport.ServerTiming(r.Timeline.Total, r.Timeline.Steps, r.Timeline.Branches)}
	if len(r.Outputs) == 1 && r.Outputs[0].Tensor == nil && !f.json && !f.packed {
		blob := r.Outputs[0].Blob
		out.contentType, out.body, out.blob = mediaType(blob), blob.Data, true
		return out, nil
	}
	var err error
	if f.packed {
		out.contentType = msgpack.Type
		out.body, err = f.pack(r)
	} else {
		out.contentType = jsonType
		out.body, err = f.document(r)
	}
	if err != nil {
		return nil, transport.WithRequestID(err, r.RequestID)
	}
	return out, nil
}

// write sends the response. A failed write is not an error: the caller has disconnected.
func (a *response) write(w http.ResponseWriter) {
	w.Header().Set(transport.HeaderRequestID, a.requestID)
	w.Header().Set(transport.HeaderServerTiming, a.timing)
	transport.SetNotes(a.metadata, w.Header().Set)
	a.writeStatus(w, http.StatusOK)
}

// writeStatus is write with another status, and without what only requests to pipelines have.
func (a *response) writeStatus(w http.ResponseWriter, status int) {
	h := w.Header()
	h.Set("Content-Type", a.contentType)
	h.Set("Content-Length", strconv.Itoa(len(a.body)))
	h.Set("X-Content-Type-Options", "nosniff")
	if a.blob {
		// A browser must not run a stage's output as this gateway's own page.
		h.Set("Content-Security-Policy", "sandbox; default-src 'none'")
	}
	w.WriteHeader(status)
	_, _ = w.Write(a.body)
}

// Document returns a response as JSON.
func Document(r *request.Response) ([]byte, error) { return format{}.document(r) }

// document returns the response as JSON.
func (f format) document(r *request.Response) ([]byte, error) {
	dst := make([]byte, 0, 1024+2*payload.Size(r.Outputs))
	dst = append(dst, '{')
	if f.line > 0 {
		dst = append(strconv.AppendInt(append(dst, `"line":`...), int64(f.line), 10), ',')
	}
	dst = oipjson.AppendString(append(dst, `"request_id":`...), r.RequestID)
	if f.id != "" {
		dst = oipjson.AppendString(append(dst, `,"id":`...), f.id)
	}
	dst = oipjson.AppendString(append(dst, `,"model_name":`...), r.Pipeline)
	dst, err := appendOutputs(append(dst, `,"outputs":[`...), r.Outputs)
	if err != nil {
		return nil, err
	}
	dst = append(dst, ']')
	if len(r.Metadata) > 0 {
		dst = appendValue(append(dst, `,"metadata":`...), r.Metadata)
	}
	dst = appendValue(append(dst, `,"timeline":`...), timelineOf(r.Timeline))
	if f.line > 0 {
		transport.JoinLines(dst)
	}
	return append(dst, "}\n"...), nil
}

// appendValue appends a value that always encodes.
func appendValue(dst []byte, value any) []byte {
	out, _ := json.Marshal(value)
	return append(dst, out...)
}

func appendOutputs(dst []byte, outputs []payload.Part) (_ []byte, err error) {
	for i, part := range outputs {
		if i > 0 {
			dst = append(dst, ',')
		}
		if part.Tensor != nil {
			dst, err = oipjson.AppendTensor(dst, part)
		} else {
			dst, err = appendBlob(dst, part)
		}
		if err != nil {
			return nil, err
		}
	}
	return dst, nil
}

// appendBlob appends a blob: text and JSON as such, all else in base64.
func appendBlob(dst []byte, p payload.Part) (_ []byte, err error) {
	contentType := mediaType(p.Blob)
	dst = oipjson.AppendString(append(dst, `{"name":`...), p.Name)
	dst = oipjson.AppendString(append(dst, `,"content_type":`...), contentType)
	if len(p.Parameters) > 0 {
		if dst, err = oipjson.AppendParameters(append(dst, `,"parameters":`...), "outputs."+p.Name, p.Parameters); err != nil {
			return nil, err
		}
	}
	switch data := p.Blob.Data; {
	case payload.IsJSON(contentType) && oipjson.IsValid(data):
		dst = append(append(dst, `,"json":`...), data...)
	case isText(contentType) && utf8.Valid(data):
		dst = oipjson.AppendString(append(dst, `,"text":`...), string(data))
	default:
		dst = base64.StdEncoding.AppendEncode(append(dst, `,"data_base64":"`...), data)
		dst = append(dst, '"')
	}
	return append(dst, '}'), nil
}

func mediaType(b payload.Blob) string { return cmp.Or(b.ContentType, payload.OctetStream) }

func isText(contentType string) bool {
	media, params, err := mime.ParseMediaType(contentType)
	if err != nil || !strings.HasPrefix(media, "text/") {
		return false
	}
	switch strings.ToLower(params["charset"]) {
	case "", "utf-8", "us-ascii":
		return true
	}
	return false
}

// timeline is a request.Timeline as JSON, in milliseconds.
type timeline struct {
	TotalMS  float64  `json:"total_ms"`
	Steps    []step   `json:"steps"`
	Branches []branch `json:"branches,omitempty"`
}

type branch struct {
	Path      string  `json:"path"`
	Block     string  `json:"block,omitempty"`
	Status    string  `json:"status"`
	Why       string  `json:"why,omitempty"`
	BeganMS   float64 `json:"began_ms"`
	TookMS    float64 `json:"took_ms"`
	Count     uint32  `json:"count,omitempty"`
	Items     uint32  `json:"items,omitempty"`
	Failed    uint32  `json:"failed,omitempty"`
	ItemP50MS float64 `json:"item_p50_ms,omitempty"`
	ItemMaxMS float64 `json:"item_max_ms,omitempty"`
}

type step struct {
	Step           string  `json:"step"`
	Stage          string  `json:"stage"`
	Host           string  `json:"host"`
	Attempt        uint32  `json:"attempt"`
	QueueWaitMS    float64 `json:"queue_wait_ms"`
	BatchWaitMS    float64 `json:"batch_wait_ms"`
	ModelWaitMS    float64 `json:"model_wait_ms,omitempty"`
	RunMS          float64 `json:"run_ms"`
	BatchSize      uint32  `json:"batch_size"`
	BatchRows      uint32  `json:"batch_rows"`
	Rows           uint32  `json:"rows"`
	DispatchReason string  `json:"dispatch_reason"`
	Local          bool    `json:"local"`
	Path           string  `json:"path,omitempty"`
}

func timelineOf(t request.Timeline) timeline {
	out := timeline{TotalMS: transport.Milliseconds(t.Total), Steps: make([]step, len(t.Steps))}
	for i, s := range t.Steps {
		out.Steps[i] = step{
			Step: string(s.Step), Stage: string(s.Stage), Host: string(s.Host), Attempt: s.Attempt,
			QueueWaitMS: transport.Milliseconds(s.QueueWait), BatchWaitMS: transport.Milliseconds(s.BatchWait), ModelWaitMS: transport.Milliseconds(s.ModelWait), RunMS: transport.Milliseconds(s.Run),
			BatchSize: s.BatchSize, BatchRows: s.BatchRows, Rows: s.Rows, DispatchReason: s.Dispatch, Local: s.Local, Path: s.Path,
		}
	}
	for _, b := range t.Branches {
		out.Branches = append(out.Branches, branch{
			Path: b.Path, Block: b.Block, Status: b.Status, Why: b.Why, BeganMS: transport.Milliseconds(b.Began), TookMS: transport.Milliseconds(b.Took),
			Count: b.Count, Items: b.Items, Failed: b.Failed, ItemP50MS: transport.Milliseconds(b.ItemP50), ItemMaxMS: transport.Milliseconds(b.ItemMax),
		})
	}
	return out
}

// packedMap is a map in MessagePack: keys, each with its value.
type packedMap []any

// MarshalMsg implements msgp.Marshaler. It fails for no value of this package.
func (m packedMap) MarshalMsg(dst []byte) (_ []byte, err error) {
	dst = msgp.AppendMapHeader(dst, uint32(len(m)/2))
	for _, one := range m {
		if dst, err = msgp.AppendIntf(dst, one); err != nil {
			return dst, err
		}
	}
	return dst, nil
}

// pack returns the response as MessagePack: the keys of the JSON document, with the bytes of
// tensors and blobs as they are.
func (f format) pack(r *request.Response) ([]byte, error) {
	out := packedMap{"request_id", r.RequestID}
	if f.id != "" {
		out = append(out, "id", f.id)
	}
	outputs := make([]any, len(r.Outputs))
	for i, part := range r.Outputs {
		outputs[i] = packPart(part)
	}
	out = append(out, "model_name", r.Pipeline, "outputs", outputs)
	if len(r.Metadata) > 0 {
		out = append(out, "metadata", r.Metadata)
	}
	timeline, err := msgpack.AppendJSON(nil, appendValue(nil, timelineOf(r.Timeline)))
	if err != nil {
		return nil, err
	}
	return append(out, "timeline", msgp.Raw(timeline)).MarshalMsg(make([]byte, 0, 1024+payload.Size(r.Outputs)))
}

// packPart returns an output: {"name", "datatype", "shape", "parameters"?, "data"}, or
// {"name", "content_type", "parameters"?} and one of json, text and data.
func packPart(p payload.Part) packedMap {
	out, data := packedMap{"name", p.Name}, p.Blob.Data
	if p.Tensor != nil {
		out, data = append(out, "datatype", string(p.Tensor.Datatype), "shape", p.Tensor.Shape), p.Tensor.Raw
	} else {
		out = append(out, "content_type", mediaType(p.Blob))
	}
	if len(p.Parameters) > 0 {
		values := make(map[string]any, len(p.Parameters))
		for name, value := range p.Parameters {
			values[name] = value.Any()
		}
		out = append(out, "parameters", values)
	}
	if p.Tensor == nil {
		switch contentType := mediaType(p.Blob); {
		case payload.IsJSON(contentType) && oipjson.IsValid(data):
			if document, err := msgpack.AppendJSON(nil, data); err == nil { // else it has numbers beyond 64 bits
				return append(out, "json", msgp.Raw(document))
			}
		case isText(contentType) && utf8.Valid(data):
			return append(out, "text", string(data))
		}
	}
	return append(out, "data", data)
}
