package rest

import (
	"encoding/json"
	"unicode/utf8"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/mesh/msgpack"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// pack returns the answer as MessagePack: the document's keys, with the bytes of
// tensors and blobs as they are.
func (wished wish) pack(r *call.Response) []byte {
	dst := make([]byte, 0, 1024+payload.Size(r.Outputs))
	members := 4
	for _, there := range []bool{wished.id != "", len(r.Metadata) > 0} {
		if there {
			members++
		}
	}
	dst = packText(msgpack.AppendMap(dst, members), "request_id", r.RequestID)
	if wished.id != "" {
		dst = packText(dst, "id", wished.id)
	}
	dst = packText(dst, "model_name", r.Pipeline)
	dst = msgpack.AppendList(msgpack.AppendString(dst, "outputs"), len(r.Outputs))
	for _, part := range r.Outputs {
		dst = packPart(dst, part)
	}
	if len(r.Metadata) > 0 {
		dst = packValue(msgpack.AppendString(dst, "metadata"), r.Metadata)
	}
	return packValue(msgpack.AppendString(dst, "timeline"), timelineOf(r.Timeline))
}

func packText(dst []byte, key, text string) []byte {
	return msgpack.AppendString(msgpack.AppendString(dst, key), text)
}

// packValue appends a value in which neither Marshal nor MessagePack has anything to
// refuse.
func packValue(dst []byte, value any) []byte {
	text, _ := json.Marshal(value)
	dst, _ = msgpack.AppendJSON(dst, text)
	return dst
}

// packPart appends an output: {"name", "datatype", "shape", "parameters"?, "data"}, or
// {"name", "content_type", "parameters"?} and one of json, text and data.
func packPart(dst []byte, p payload.Part) []byte {
	members := 3
	if p.Tensor != nil {
		members++
	}
	if len(p.Parameters) > 0 {
		members++
	}
	dst = packText(msgpack.AppendMap(dst, members), "name", p.Name)
	if p.Tensor == nil {
		dst = packText(dst, "content_type", mediaType(p.Blob))
		return packBlob(packParameters(dst, p.Parameters), p.Blob)
	}
	dst = packText(dst, "datatype", string(p.Tensor.Datatype))
	dst = msgpack.AppendList(msgpack.AppendString(dst, "shape"), len(p.Tensor.Shape))
	for _, extent := range p.Tensor.Shape {
		dst = msgpack.AppendInt(dst, extent)
	}
	return packData(packParameters(dst, p.Parameters), p.Tensor.Raw)
}

func packData(dst, data []byte) []byte {
	return msgpack.AppendBinary(msgpack.AppendString(dst, "data"), data)
}

func packParameters(dst []byte, p payload.Parameters) []byte {
	if len(p) == 0 {
		return dst
	}
	dst = msgpack.AppendMap(msgpack.AppendString(dst, "parameters"), len(p))
	for name, value := range p {
		dst = msgpack.AppendScalar(msgpack.AppendString(dst, name), value.Any())
	}
	return dst
}

// packBlob appends what is in a blob: JSON that MessagePack can say as what it says,
// text as text, all else as bytes.
func packBlob(dst []byte, b payload.Blob) []byte {
	switch contentType := mediaType(b); {
	case payload.IsJSON(contentType) && utf8.Valid(b.Data) && json.Valid(b.Data):
		if out, err := msgpack.AppendJSON(msgpack.AppendString(dst, "json"), b.Data); err == nil {
			return out
		}
	case isText(contentType) && utf8.Valid(b.Data):
		return packText(dst, "text", string(b.Data))
	}
	return packData(dst, b.Data)
}
