package call

import (
	"crypto/sha256"
	"encoding/binary"
	"hash"
	"maps"
	"slices"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// digest is of what decides a request's answer: what runners see of it. Two
// requests have the same exactly when that is the same. What it asks to be shown
// of the answer, how long it waits and where it queues are no part of it.
func digest(r *Request) envelope.Digest {
	d := digester{sha256.New()}
	d.number(uint64(len(r.Inputs)))
	for _, part := range r.Inputs {
		d.part(part)
	}
	d.parameters(r.Parameters)
	d.number(uint64(len(r.Steps)))
	for _, name := range slices.Sorted(maps.Keys(r.Steps)) {
		step := r.Steps[name]
		d.texts(name, step.Model.Model, step.Model.Alias, step.Model.Version)
		d.parameters(step.Parameters)
	}
	d.number(uint64(len(r.Metadata)))
	for _, key := range slices.Sorted(maps.Keys(r.Metadata)) {
		d.texts(key, r.Metadata[key])
	}
	return envelope.Digest(d.hash.Sum(nil))
}

// digester writes values such that none can be taken for another: each text has
// its length before it, each list its number.
type digester struct{ hash hash.Hash }

func (d digester) part(p payload.Part) {
	d.texts(p.Name)
	if p.Tensor != nil {
		d.texts("tensor", string(p.Tensor.Datatype))
		d.number(uint64(len(p.Tensor.Shape)))
		for _, extent := range p.Tensor.Shape {
			d.number(uint64(extent))
		}
		d.bytes(p.Tensor.Raw)
	} else {
		d.texts("blob", p.Blob.ContentType)
		d.bytes(p.Blob.Data)
	}
	d.parameters(p.Parameters)
}

func (d digester) parameters(p payload.Parameters) {
	d.texts(p.Key(slices.Collect(maps.Keys(p))))
}

func (d digester) texts(texts ...string) {
	for _, text := range texts {
		d.bytes([]byte(text))
	}
}

func (d digester) bytes(b []byte) {
	d.number(uint64(len(b)))
	d.hash.Write(b)
}

func (d digester) number(n uint64) { d.hash.Write(binary.BigEndian.AppendUint64(nil, n)) }
