package oipjson

import (
	"cmp"
	"errors"
	"strconv"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// input takes one element of inputs.
func (d *decoder) input(i int) error {
	if i == payload.MaxParts {
		return wrong("inputs", "at most %d are taken", payload.MaxParts)
	}
	start := d.scanner
	err := d.inputOf(i, "")
	if f, ok := errors.AsType[*fault.Fault](err); !ok || f.Reason != fault.InvalidInput {
		return err
	}
	// A message has the name, though that may come after what is wrong.
	if name := nameIn(start); name != "" {
		again := *d
		again.scanner, again.memory = start, nil // it had room for what is made again
		return cmp.Or(again.inputOf(i, name), err)
	}
	return err
}

// nameIn returns the name of the input that begins there, as far as it can be read.
func nameIn(s scanner) (name string) {
	_ = s.object(func(key string) (err error) {
		if key != "name" || s.next() != '"' {
			return s.skip()
		}
		if name, err = s.text(); err != nil || len(name) > payload.MaxName {
			name = ""
		}
		return errStop
	})
	return name
}

// inputOf takes one element of inputs. The name is for messages.
func (d *decoder) inputOf(i int, name string) error {
	in := inputDecoder{decoder: d, index: i, called: name}
	if d.next() != '{' {
		return wrong(in.path(), "is no object")
	}
	if err := d.object(in.member); err != nil {
		return err
	}
	if err := in.finish(); err != nil {
		return err
	}
	d.request.Inputs = append(d.request.Inputs, in.out)
	return nil
}

// inputDecoder fills one input. Members come in any order; data can be decoded
// where it stands if datatype and shape came before it, as clients have it, and
// is otherwise left for the end.
type inputDecoder struct {
	*decoder

	index int
	// called is what it will be called, where that is known ahead.
	called string
	out    Input
	seen   keys
	late   *scanner
}

func (d *inputDecoder) path() string { return InputPath(d.index, cmp.Or(d.out.Name, d.called)) }

func (d *inputDecoder) member(key string) (err error) {
	if err := d.seen.add(key, func() string { return d.path() + "." + key }); err != nil {
		return err
	}
	switch key {
	case "name":
		d.out.Name, err = d.name(d.path() + ".name")
	case "datatype":
		err = d.datatype()
	case "shape":
		err = d.shape()
	case "parameters":
		d.out.Parameters, err = d.parameters(d.path() + ".parameters")
	case "data":
		err = d.data()
	default:
		err = d.skip()
	}
	return err
}

func (d *inputDecoder) datatype() error {
	path := d.path() + ".datatype"
	name, err := d.name(path)
	if err != nil {
		return err
	}
	d.out.Tensor.Datatype = tensor.Datatype(name)
	if !d.out.Tensor.Datatype.Valid() {
		return wrong(path, "%q is none of the Open Inference Protocol's", clip(name))
	}
	return nil
}

func (d *inputDecoder) shape() error {
	path := d.path() + ".shape"
	if d.next() != '[' {
		return wrong(path, "is no array")
	}
	shape := []int64{}
	err := d.array(func(i int) error {
		if i == tensor.MaxRank {
			return wrong(path, "has more than %d axes", tensor.MaxRank)
		}
		raw, err := d.number()
		if err != nil {
			return err
		}
		extent, err := strconv.ParseInt(string(raw), 10, 64)
		if err != nil || extent < 0 {
			return wrong(path, "has an axis of %s", clip(string(raw)))
		}
		shape = append(shape, extent)
		return nil
	})
	d.out.Tensor.Shape = shape
	return err
}

func (d *inputDecoder) data() (err error) {
	if d.next() != '[' {
		return wrong(d.path()+".data", "is no array")
	}
	if d.out.Tensor.Datatype != "" && d.out.Tensor.Shape != nil {
		d.out.Tensor.Raw, err = elements(&d.scanner, d.path()+".data", d.out.Tensor, d.memory)
		return err
	}
	d.late = &scanner{data: d.scanner.data, at: d.at, depth: d.depth, packed: d.packed}
	return d.skip()
}

// finish checks that nothing is missing and decodes data that came too early.
func (d *inputDecoder) finish() (err error) {
	switch {
	case d.out.Tensor.Datatype == "":
		return wrong(d.path()+".datatype", "is missing")
	case d.out.Tensor.Shape == nil:
		return wrong(d.path()+".shape", "is missing")
	case d.late != nil:
		d.out.Tensor.Raw, err = elements(d.late, d.path()+".data", d.out.Tensor, d.memory)
	}
	return err
}
