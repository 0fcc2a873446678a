// Package oipcodec converts parts and parameters to messages of the Open Inference Protocol,
// version 2, and back, for those that serve the protocol and those that are clients of it. It is
// pure. Contents have bounds that the caller sets: nothing is allocated before it agrees.
package oipcodec

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// ContentType is the parameter of a tensor that has the media type of a blob.
const ContentType = "content_type"

// AsTensor returns a part as a tensor: a blob is one element of bytes.
func AsTensor(p payload.Part) payload.Part {
	if p.Tensor != nil {
		return p
	}
	// A blob is not larger than a message, so its length fits.
	packed, err := tensor.FromBytes([]int64{1}, [][]byte{p.Blob.Data})
	if err != nil {
		packed = tensor.Tensor{Datatype: tensor.Bytes, Shape: []int64{0}}
	}
	out := payload.OfTensor(p.Name, packed)
	if out.Parameters = p.Parameters; p.Blob.ContentType != "" {
		out.Parameters = payload.Merge(p.Parameters, payload.Parameters{ContentType: payload.String(p.Blob.ContentType)})
	}
	return out
}

// AsBlob converts a BYTES tensor of one element to a blob if that is what is taken, or if the
// tensor has a media type.
func AsBlob(p payload.Part, isTaken bool) (payload.Part, error) {
	mediaType, hasType := p.Parameters[ContentType]
	if p.Tensor.Datatype != tensor.Bytes || !hasType && !isTaken {
		return p, nil
	}
	if n, ok := tensor.Elements(p.Tensor.Shape); ok && n != 1 {
		return p, fmt.Errorf("it has %d elements; the model takes a blob, which is one", n)
	}
	elements, err := p.Tensor.BytesElements()
	if err != nil {
		return p, err
	}
	out := payload.OfBlob(p.Name, "", elements[0])
	if hasType {
		out.Blob.ContentType = mediaType.String()
		delete(p.Parameters, ContentType)
	}
	if len(p.Parameters) > 0 {
		out.Parameters = p.Parameters
	}
	return out, nil
}

// Parameters converts parameters to messages.
func Parameters(p payload.Parameters) map[string]*oipv2.InferParameter {
	if len(p) == 0 {
		return nil
	}
	out := make(map[string]*oipv2.InferParameter, len(p))
	for name, value := range p {
		out[name] = parameterOf(value)
	}
	return out
}

func parameterOf(v payload.Value) *oipv2.InferParameter {
	switch v := v.Any().(type) {
	case bool:
		return &oipv2.InferParameter{ParameterChoice: &oipv2.InferParameter_BoolParam{BoolParam: v}}
	case int64:
		return &oipv2.InferParameter{ParameterChoice: &oipv2.InferParameter_Int64Param{Int64Param: v}}
	case uint64:
		return &oipv2.InferParameter{ParameterChoice: &oipv2.InferParameter_Uint64Param{Uint64Param: v}}
	case float64:
		return &oipv2.InferParameter{ParameterChoice: &oipv2.InferParameter_DoubleParam{DoubleParam: v}}
	default:
		text, _ := v.(string)
		return &oipv2.InferParameter{ParameterChoice: &oipv2.InferParameter_StringParam{StringParam: text}}
	}
}

// ParametersOf converts parameters of a request, or of an input. Errors name the field.
func ParametersOf(field string, in map[string]*oipv2.InferParameter) (payload.Parameters, error) {
	if len(in) == 0 {
		return nil, nil
	}
	if len(in) > payload.MaxParameters {
		return nil, fault.InField(fault.InvalidRequest, field, "%d, at most %d are allowed", len(in), payload.MaxParameters)
	}
	out := make(payload.Parameters, len(in))
	for name, p := range in {
		value, ok := valueOf(p)
		if !ok {
			return nil, fault.InField(fault.InvalidRequest, field, "%.*q has no value", fault.MaxQuoted, name)
		}
		out[name] = value
	}
	if err := out.Validate(); err != nil {
		return nil, fault.InField(fault.InvalidRequest, field, "%s", err)
	}
	return out, nil
}

func valueOf(p *oipv2.InferParameter) (payload.Value, bool) {
	switch v := p.GetParameterChoice().(type) {
	case *oipv2.InferParameter_BoolParam:
		return payload.Bool(v.BoolParam), true
	case *oipv2.InferParameter_Int64Param:
		return payload.Int64(v.Int64Param), true
	case *oipv2.InferParameter_StringParam:
		return payload.String(v.StringParam), true
	case *oipv2.InferParameter_DoubleParam:
		return payload.Double(v.DoubleParam), true
	case *oipv2.InferParameter_Uint64Param:
		return payload.Uint64(v.Uint64Param), true
	}
	return payload.Value{}, false
}

// Contents returns a tensor of typed contents. It checks the number of elements against
// the shape, and reserves their bytes, before it allocates.
func Contents(d tensor.Datatype, shape []int64, c *oipv2.InferTensorContents, reserve func(n int64) error) (tensor.Tensor, error) {
	out := tensor.Tensor{Datatype: d, Shape: shape}
	if len(shape) > tensor.MaxRank {
		return out, fmt.Errorf("it has %d axes, at most %d are allowed", len(shape), tensor.MaxRank)
	}
	n, ok := tensor.Elements(shape)
	if !ok {
		return out, fmt.Errorf("shape %v is not valid", shape)
	}
	// take reserves the size of so many elements.
	take := func(have int, size int64) error {
		if int64(have) != n {
			return fmt.Errorf("it has %d elements of contents for %s, and its shape has %d", have, d, n)
		}
		return reserve(size)
	}
	var err error
	switch d {
	case tensor.Bool:
		out.Raw, err = pack(c.GetBoolContents(), d, take)
	case tensor.Int8, tensor.Int16, tensor.Int32:
		bits := 8*d.Size() - 1
		out.Raw, err = packFitting(c.GetIntContents(), -1<<bits, 1<<bits-1, d, take)
	case tensor.Uint8, tensor.Uint16, tensor.Uint32:
		out.Raw, err = packFitting(c.GetUintContents(), 0, 1<<(8*d.Size())-1, d, take)
	case tensor.Int64:
		out.Raw, err = pack(c.GetInt64Contents(), d, take)
	case tensor.Uint64:
		out.Raw, err = pack(c.GetUint64Contents(), d, take)
	case tensor.FP32:
		out.Raw, err = pack(c.GetFp32Contents(), d, take)
	case tensor.FP64:
		out.Raw, err = pack(c.GetFp64Contents(), d, take)
	case tensor.Bytes:
		const lengthSize = 4
		elements, size := c.GetBytesContents(), int64(0)
		for _, e := range elements {
			size += lengthSize + int64(len(e))
		}
		if err = take(len(elements), size); err == nil {
			return tensor.FromBytes(shape, elements)
		}
	case tensor.FP16, tensor.BF16:
		err = errors.New("has no typed contents; send it in raw_input_contents")
	default:
		err = fmt.Errorf("datatype %.*q is unknown", fault.MaxQuoted, d)
	}
	return out, err
}

// pack returns elements as raw bytes.
func pack[E bool | int64 | uint64 | float32 | float64](elements []E, d tensor.Datatype, take func(have int, size int64) error) ([]byte, error) {
	size := len(elements) * d.Size()
	if err := take(len(elements), int64(size)); err != nil {
		return nil, err
	}
	return binary.Append(make([]byte, 0, size), binary.LittleEndian, elements)
}

// packFitting returns integers as the raw bytes of a datatype that has the integers from least
// to most.
func packFitting[E int32 | uint32](elements []E, least, most int64, d tensor.Datatype, take func(have int, size int64) error) ([]byte, error) {
	size := d.Size()
	if err := take(len(elements), int64(len(elements)*size)); err != nil {
		return nil, err
	}
	out := make([]byte, 0, len(elements)*size)
	var raw [8]byte
	for i, e := range elements {
		if int64(e) < least || int64(e) > most {
			return nil, fmt.Errorf("element %d, %v, does not fit %s", i, e, d)
		}
		binary.LittleEndian.PutUint64(raw[:], uint64(e))
		out = append(out, raw[:size]...)
	}
	return out, nil
}
