package graph

import (
	"cmp"
	"maps"
	"slices"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// itemsOf returns the parts of each item of a map.
func itemsOf(m *pipeline.Map, path string, reach []payload.Part) ([][]payload.Part, *fault.Fault) {
	var out [][]payload.Part
	first := ""
	for _, name := range slices.Sorted(maps.Keys(m.Over)) {
		source := m.Over[name]
		invalid := func(format string, args ...any) *fault.Fault {
			return fault.InField(fault.InvalidInput, source, path+": the part "+source+" "+format, args...)
		}
		part, is := payload.Find(reach, source)
		switch {
		case !is:
			return nil, invalid("is missing; map splits it into items")
		case part.Tensor == nil || len(part.Tensor.Shape) == 0:
			return nil, invalid("is not a tensor with at least one axis, so it has no items")
		}
		n := part.Tensor.Shape[0]
		switch most := int64(cmp.Or(m.MaxItems, pipeline.DefaultMaxItems)); {
		case n > most:
			return nil, invalid("has %d items, at most %d are allowed (max_items)", n, most)
		case first == "":
			first, out = source, make([][]payload.Part, n)
		case n != int64(len(out)):
			return nil, invalid("has %d items and %s has %d; they must have as many", n, first, len(out))
		}
		rows := slices.Repeat([]int64{1}, int(n))
		items, err := tensor.Split(*part.Tensor, rows)
		if err != nil {
			return nil, invalid("cannot be split: %v", err)
		}
		for i, item := range items {
			item.Shape = item.Shape[1:]
			out[i] = append(out[i], payload.OfTensor(name, item))
		}
	}
	return out, nil
}

// stack puts what the items gave together, in their order. A fault has the item that does not fit.
func (x *mapping) stack() (out []payload.Part, _ *fault.Fault, item int) {
	form := x.checkForms()
	var indices []int64
	var rows [][]payload.Part
	for i := range x.items {
		given := x.given[i]
		switch {
		case x.failed[i] == nil:
		case x.onError == pipeline.FillItems:
			given = inOrderOf(form, x.filled(form))
		case x.onError == pipeline.OmitItems:
			continue
		default:
			return nil, x.failed[i], i
		}
		if f := sameForm(x.path, rows, given); f != nil {
			return nil, f, i
		}
		rows, indices = append(rows, given), append(indices, int64(i))
	}
	if len(rows) == 0 {
		out = x.empty()
	} else {
		for at, first := range rows[0] {
			column := make([]tensor.Tensor, len(rows))
			for i, row := range rows {
				column[i] = *row[at].Tensor
				column[i].Shape = append([]int64{1}, column[i].Shape...)
			}
			stacked, err := tensor.Concat(column)
			if err != nil {
				return nil, fault.Newf(fault.RunnerOutputInvalid, "%s: the items' parts %q cannot be stacked: %v", x.path, first.Name, err), 0
			}
			out = append(out, payload.OfTensor(first.Name, stacked))
		}
	}
	if x.Indices != "" {
		list, err := tensor.FromInt64([]int64{int64(len(indices))}, indices)
		if err != nil {
			return nil, fault.From(err), 0
		}
		out = append(out, payload.OfTensor(x.Indices, list))
	}
	return out, nil, 0
}

// filled returns the parts of a failed item. One without a shape of its own has that of the other
// items, where it has as many elements.
func (x *mapping) filled(form []payload.Part) []payload.Part {
	out := constants(x.Fill)
	for _, part := range out {
		like, is := payload.Find(form, part.Name)
		if !is || like.Tensor == nil || x.Fill[part.Name].Shape != nil {
			continue
		}
		if n, ok := tensor.Elements(like.Tensor.Shape); ok && n == int64(len(x.Fill[part.Name].Data)) {
			part.Tensor.Shape = like.Tensor.Shape
		}
	}
	return out
}

// checkForms makes items fail whose parts have not the form of those of the first that is there,
// which it returns; where none is, that of the specs.
func (x *mapping) checkForms() (form []payload.Part) {
	var first [][]payload.Part
	for i := range x.items {
		if x.failed[i] != nil {
			continue
		}
		if first != nil {
			x.given[i] = inOrderOf(first[0], x.given[i])
		}
		if x.failed[i] = sameForm(x.path, first, x.given[i]); x.failed[i] == nil && first == nil {
			first = append(first, x.given[i])
		}
	}
	if first != nil {
		return first[0]
	}
	form = x.empty()
	for _, part := range form {
		part.Tensor.Shape = part.Tensor.Shape[1:]
	}
	return form
}

// inOrderOf returns the parts in the order of a form; parts that the form lacks come last.
func inOrderOf(form, parts []payload.Part) []payload.Part {
	place := func(p payload.Part) int {
		at := slices.IndexFunc(form, func(one payload.Part) bool { return one.Name == p.Name })
		return cmp.Or(at+1, len(form)+1)
	}
	return slices.SortedStableFunc(slices.Values(parts), func(a, b payload.Part) int { return cmp.Compare(place(a), place(b)) })
}

// sameForm checks that an item gives tensors of the names, datatypes and shapes of the first.
func sameForm(path string, before [][]payload.Part, given []payload.Part) *fault.Fault {
	for i, part := range given {
		switch {
		case part.Tensor == nil:
			return fault.Newf(fault.RunnerOutputInvalid, "%s: the part %q is not a tensor, and only tensors can be stacked", path, part.Name)
		case len(before) == 0:
			continue
		}
		first := before[0]
		if i >= len(first) || first[i].Name != part.Name || first[i].Tensor.Datatype != part.Tensor.Datatype || !slices.Equal(first[i].Tensor.Shape, part.Tensor.Shape) {
			return fault.Newf(fault.RunnerOutputInvalid, "%s: an item gives %q as %s%v, which is not the form of the first item's", path, part.Name, part.Tensor.Datatype, part.Tensor.Shape)
		}
	}
	if len(before) > 0 && len(given) < len(before[0]) {
		return fault.Newf(fault.RunnerOutputInvalid, "%s: an item gives %d parts, the first one %d", path, len(given), len(before[0]))
	}
	return nil
}

// empty returns the parts of a map without items: shape [0, ...] where the spec of its last step
// tells the rest.
func (x *mapping) empty() (out []payload.Part) {
	last := x.machine.request.Spec(x.Steps[len(x.Steps)-1].Stage)
	for _, spec := range last.GetOutputs() {
		t := spec.GetTensor()
		if t == nil {
			continue
		}
		shape := slices.Clone(t.GetShape())
		if last.GetBatchAxis() == stagev1.BatchAxis_BATCH_AXIS_ROWS && len(shape) > 0 {
			shape = shape[1:]
		}
		for i := range shape {
			shape[i] = max(0, shape[i])
		}
		made := tensor.Tensor{Datatype: tensor.Datatype(t.GetDatatype()), Shape: append([]int64{0}, shape...)}
		if len(x.Give) == 0 {
			out = append(out, payload.OfTensor(spec.GetName(), made))
		}
		for _, name := range slices.Sorted(maps.Keys(x.Give)) {
			if x.Give[name] == spec.GetName() {
				out = append(out, payload.OfTensor(name, made))
			}
		}
	}
	return out
}
