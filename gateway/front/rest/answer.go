package rest

import (
	"encoding/base64"
	"encoding/json"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/oipjson"
	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/mesh/msgpack"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// answer is one that is ready to be sent.
type answer struct {
	contentType string
	body        []byte
	// blob says that the body is a stage's own bytes.
	blob              bool
	requestID, timing string
}

// answer encodes a response.
func (wished wish) answer(r *call.Response) (*answer, error) {
	out := &answer{requestID: r.RequestID, timing: transport.ServerTiming(r.Timeline)}
	if len(r.Outputs) == 1 && r.Outputs[0].Tensor == nil && !wished.json && !wished.packed {
		blob := r.Outputs[0].Blob
		out.contentType, out.body, out.blob = mediaType(blob), blob.Data, true
		return out, nil
	}
	if wished.packed {
		out.contentType, out.body = msgpack.Type, wished.pack(r)
		return out, nil
	}
	var err error
	out.contentType = jsonType
	if out.body, err = wished.document(r); err != nil {
		return nil, transport.WithRequestID(err, r.RequestID)
	}
	return out, nil
}

// write sends the answer. A caller that no longer listens is not told.
func (a *answer) write(w http.ResponseWriter) {
	h := w.Header()
	h.Set("Content-Type", a.contentType)
	h.Set("Content-Length", strconv.Itoa(len(a.body)))
	h.Set("X-Content-Type-Options", "nosniff")
	if a.blob {
		// Whatever a stage answers, a browser must not run it as this
		// gateway's own page.
		h.Set("Content-Security-Policy", "sandbox; default-src 'none'")
	}
	h.Set(transport.HeaderRequestID, a.requestID)
	h.Set(transport.HeaderServerTiming, a.timing)
	_, _ = w.Write(a.body)
}

// document returns the answer as JSON.
func (wished wish) document(r *call.Response) ([]byte, error) {
	dst := make([]byte, 0, 1024+2*payload.Size(r.Outputs))
	dst = oipjson.AppendString(append(dst, `{"request_id":`...), r.RequestID)
	if wished.id != "" {
		dst = oipjson.AppendString(append(dst, `,"id":`...), wished.id)
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
	return append(dst, "}\n"...), nil
}

// appendValue appends a value that Marshal has nothing to refuse in.
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
	case payload.IsJSON(contentType) && utf8.Valid(data) && json.Valid(data):
		dst = append(append(dst, `,"json":`...), data...)
	case isText(contentType) && utf8.Valid(data):
		dst = oipjson.AppendString(append(dst, `,"text":`...), string(data))
	default:
		dst = base64.StdEncoding.AppendEncode(append(dst, `,"data_base64":"`...), data)
		dst = append(dst, '"')
	}
	return append(dst, '}'), nil
}

func mediaType(b payload.Blob) string {
	if b.ContentType == "" {
		return payload.OctetStream
	}
	return b.ContentType
}

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
