package schema

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"slices"
	"strings"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Complete merges the spec that a runner declares with the parts that an operator
// configures. If the runner declares no inputs, or no outputs, the operator's parts
// are used. Otherwise each of the operator's parts must be one of the runner's. It may
// narrow the shape and the content types, and add a schema and a description. A
// contradiction is an error that begins with the part's key, such as
// "inputs[0].datatype: ". Complete is idempotent.
func Complete(declared runner.Spec, inputs, outputs []runner.PartSpec) (runner.Spec, error) {
	var err error
	if declared.Inputs, err = completeAll("inputs", declared.Inputs, inputs); err != nil {
		return runner.Spec{}, err
	}
	declared.Outputs, err = completeAll("outputs", declared.Outputs, outputs)
	if err != nil {
		return runner.Spec{}, err
	}
	return declared, nil
}

func completeAll(key string, declared, added []runner.PartSpec) ([]runner.PartSpec, error) {
	if len(added) == 0 {
		return declared, nil
	}
	if len(declared) == 0 {
		return added, nil
	}
	out := slices.Clone(declared)
	for i, add := range added {
		at := slices.IndexFunc(out, func(s runner.PartSpec) bool { return s.Name == add.Name })
		if at < 0 {
			return nil, fmt.Errorf("%s[%d].name: the runner has no %q; it has %s", key, i, add.Name, namesOf(declared))
		}
		var err error
		if out[at], err = completeOne(out[at], add); err != nil {
			return nil, fmt.Errorf("%s[%d].%w", key, i, err)
		}
	}
	return out, nil
}

func namesOf(specs []runner.PartSpec) string {
	out := make([]string, len(specs))
	for i, s := range specs {
		out[i] = s.Name
	}
	return strings.Join(out, ", ")
}

// completeOne adds an operator's part to the runner's part of that name. Its errors
// begin with a key.
func completeOne(declared, add runner.PartSpec) (runner.PartSpec, error) {
	if add.Optional && !declared.Optional {
		return declared, errors.New("optional: the runner wants it")
	}
	if add.Description != "" {
		declared.Description = add.Description
	}
	if declared.IsTensor() {
		return narrowTensor(declared, add)
	}
	return narrowBlob(declared, add)
}

func narrowTensor(declared, add runner.PartSpec) (runner.PartSpec, error) {
	switch {
	case len(add.ContentTypes) > 0:
		return declared, fmt.Errorf("content_types: the runner declares that it is a tensor %s%s", declared.Datatype, shape(declared.Shape))
	case len(add.Schema) > 0:
		return declared, fmt.Errorf("schema: the runner declares that it is a tensor %s%s", declared.Datatype, shape(declared.Shape))
	case !add.IsTensor():
		return declared, nil
	case add.Datatype != declared.Datatype:
		return declared, fmt.Errorf("datatype: %s, the runner declares %s", add.Datatype, declared.Datatype)
	case !matches(add.Shape, declared.Shape):
		return declared, fmt.Errorf("shape: %s is not one of the runner's %s", shape(add.Shape), shape(declared.Shape))
	}
	declared.Shape = add.Shape
	return declared, nil
}

func narrowBlob(declared, add runner.PartSpec) (runner.PartSpec, error) {
	if add.IsTensor() {
		return declared, fmt.Errorf("datatype: %s, the runner declares that it is a blob%s", add.Datatype, ofType(strings.Join(declared.ContentTypes, " or ")))
	}
	if len(declared.ContentTypes) > 0 {
		for _, one := range add.ContentTypes {
			if !takesType(declared, one) {
				return declared, fmt.Errorf("content_types: %s is not one of the runner's %s", one, strings.Join(declared.ContentTypes, ", "))
			}
		}
	}
	if len(add.ContentTypes) > 0 {
		declared.ContentTypes = add.ContentTypes
	}
	if len(add.Schema) > 0 {
		if len(declared.Schema) > 0 && !sameJSON(declared.Schema, add.Schema) {
			return declared, errors.New("schema: the runner has one of its own, and it is another")
		}
		declared.Schema = add.Schema
	}
	return declared, nil
}

func sameJSON(a, b json.RawMessage) bool {
	var x, y bytes.Buffer
	return json.Compact(&x, a) == nil && json.Compact(&y, b) == nil && bytes.Equal(x.Bytes(), y.Bytes())
}

// maxParts bounds the number of inputs, and of outputs, of a stage.
const maxParts = payload.MaxParts

// ValidParts checks the parts that an operator configures, and compiles their schemas.
// An error begins with the invalid key, such as "inputs[0].shape: ".
func ValidParts(key string, parts []runner.PartSpec) error {
	if len(parts) > maxParts {
		return fmt.Errorf("%s: %d, at most %d are allowed", key, len(parts), maxParts)
	}
	var errs []error
	for i, p := range parts {
		if slices.ContainsFunc(parts[:i], func(other runner.PartSpec) bool { return other.Name == p.Name }) {
			errs = append(errs, fmt.Errorf("%s[%d].name: %q is there twice", key, i, p.Name))
		}
		if err := validPart(p); err != nil {
			errs = append(errs, fmt.Errorf("%s[%d].%w", key, i, err))
		}
	}
	if len(errs) == 0 {
		_, err := compileAll(key, parts)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func validPart(p runner.PartSpec) error {
	if err := payload.ValidName(p.Name); err != nil || p.Name == "" {
		return fmt.Errorf("name: expected 1 to %d bytes of text, got %.80q", payload.MaxName, p.Name)
	}
	if p.IsTensor() {
		return validTensor(p)
	}
	if len(p.Shape) > 0 {
		return errors.New("shape: without a datatype there is no tensor")
	}
	for _, one := range p.ContentTypes {
		if _, _, err := mime.ParseMediaType(one); err != nil || !strings.Contains(one, "/") {
			return fmt.Errorf("content_types: %.80q is not a media type such as application/json or image/*", one)
		}
	}
	return nil
}

func validTensor(p runner.PartSpec) error {
	if !p.Datatype.Valid() {
		return fmt.Errorf("datatype: unknown %.80q; use one such as FP32, INT64, BOOL or BYTES", string(p.Datatype))
	}
	if len(p.ContentTypes) > 0 {
		return errors.New("content_types: a tensor has none; leave out them or the datatype")
	}
	if len(p.Schema) > 0 {
		return errors.New("schema: it is for the JSON of a blob, and this is a tensor")
	}
	if len(p.Shape) > tensor.MaxRank {
		return fmt.Errorf("shape: %d axes, at most %d are supported", len(p.Shape), tensor.MaxRank)
	}
	for _, extent := range p.Shape {
		if extent < -1 {
			return fmt.Errorf("shape: an extent of %d; -1 is any", extent)
		}
	}
	return nil
}
