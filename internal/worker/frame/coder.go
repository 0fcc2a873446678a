package frame

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// coder reads or writes the JSON of a header. Each type of the protocol names its
// keys once, in a method fields, which a coder calls in both directions:
//
//	func (m *Ping) fields(c *coder) { integer(c, "n", &m.N, 0, maxNumber, required) }
//
// The first error stays. After it a coder reads and writes nothing useful.
type coder struct {
	err error
	// path is where the error is; depth counts the lists and objects around a value.
	path  string
	depth int

	// kind is the value of the key type, which the outermost object has.
	kind string

	// writing is true for a coder that appends to buf.
	writing bool
	buf     []byte

	// input is what a reading coder reads, from byte at. It is valid UTF-8, and the
	// strings that are read are pieces of it.
	input string
	at    int
	in    object
}

// object is the state of an object that is being read.
type object struct {
	// key is the key whose value follows, where pending is true.
	key     string
	pending bool
	// matched is true once a field of this pass took a value.
	matched bool
	// index counts the fields of this pass. Bit i of needed and of seen is field i.
	index        int
	needed, seen uint32
	// naming is true in the pass that names a missing field.
	naming bool
}

// fielder is a pointer to a type of the protocol. Its method fields calls one method
// of the coder for each key. For a reading coder these calls are always the same.
type fielder interface{ fields(c *coder) }

// Whether a key has to be there. An optional key is not written for the zero value,
// which stands for its default.
const (
	optional = false
	required = true
)

// object reads or writes an object. A reading coder skips unknown keys. It refuses a
// known key that occurs twice, and an object without a required key. Keys mostly come
// in the order of the fields, so one pass over the fields reads most objects.
func (c *coder) object(v fielder) {
	outermost := c.depth == 0
	if c.writing {
		c.open('{', "")
		c.fieldsOf(v, outermost)
		c.close('}')
		return
	}
	outer := c.in
	c.in = object{}
	c.open('{', "an object")
	for c.nextKey(true); ; {
		c.in.index, c.in.matched = 0, false
		c.fieldsOf(v, outermost)
		if !c.in.pending || c.err != nil {
			break
		}
		if !c.in.matched {
			c.skip()
			c.nextKey(false)
		}
	}
	if c.err == nil && c.in.needed&^c.in.seen != 0 {
		c.in.index, c.in.naming = 0, true
		c.fieldsOf(v, outermost)
	}
	c.in = outer
}

func (c *coder) fieldsOf(v fielder, outermost bool) {
	if outermost {
		c.text("type", &c.kind, required)
	}
	v.fields(c)
}

// nextKey reads the next key of an object, or its end.
func (c *coder) nextKey(first bool) {
	if c.in.pending = c.more('}', first); c.in.pending {
		c.in.key = c.readName()
	}
}

// field begins a field, and reports whether the coder has to read or write its value.
// If so, done has to follow.
func (c *coder) field(name string, need, isZero bool) bool {
	if c.err != nil {
		return false
	}
	if c.writing {
		if isZero && !need {
			return false
		}
		c.comma()
		c.buf = append(c.buf, '"')
		c.buf = append(c.buf, name...)
		c.buf = append(c.buf, '"', ':')
		return true
	}
	in := &c.in
	bit := uint32(1) << in.index
	in.index++
	if need {
		in.needed |= bit
	}
	switch {
	case in.naming:
		if need && in.seen&bit == 0 {
			c.failAt(name, "it is missing")
		}
	case in.pending && in.key == name:
		if in.seen&bit != 0 {
			c.failAt(name, "it is there twice")
			break
		}
		in.seen |= bit
		in.matched = true
		return true
	}
	return false
}

// done ends a field.
func (c *coder) done(name string) {
	switch {
	case c.err != nil:
		c.within(name)
	case !c.writing:
		c.nextKey(false)
	}
}

// present reports whether the object that is being read has the field that was named
// last.
func (c *coder) present() bool {
	return !c.writing && c.err == nil && c.in.seen&(1<<(c.in.index-1)) != 0
}

// atEnd reports whether an object has been read to its end. It is true only after the
// last field of the last pass.
func (c *coder) atEnd() bool {
	return !c.writing && c.err == nil && !c.in.pending && !c.in.naming
}

// text is a string.
func (c *coder) text(name string, v *string, need bool) {
	if c.field(name, need, *v == "") {
		c.textValue(v)
		c.done(name)
	}
}

func (c *coder) textValue(v *string) {
	if c.writing {
		c.buf = appendText(c.buf, *v)
	} else {
		*v = c.readString()
	}
}

// choice is a string of a few. An empty one that is optional stands for the first.
func (c *coder) choice(name string, v *string, need bool, choices ...string) {
	if c.field(name, need, *v == "") {
		c.textValue(v)
		if c.err == nil && !slices.Contains(choices, *v) && (need || *v != "") {
			c.fail("expected one of %s, got %q", strings.Join(choices, ", "), clip(*v))
		}
		c.done(name)
	}
}

// flag is true or false.
func (c *coder) flag(name string, v *bool) {
	if c.field(name, optional, !*v) {
		if c.writing {
			c.buf = append(c.buf, "true"...)
		} else {
			*v = c.readBool()
		}
		c.done(name)
	}
}

// integer is a whole number from low to most.
func integer[T int | int64 | uint64](c *coder, name string, v *T, low, most int64, need bool) {
	if c.field(name, need, *v == 0) {
		integerValue(c, v, low, most)
		c.done(name)
	}
}

func integerValue[T int | int64 | uint64](c *coder, v *T, low, most int64) {
	if c.writing {
		c.writeInteger(int64(*v), low, most)
	} else {
		*v = T(c.readInteger(low, most))
	}
}

// pointer is a number that may be missing, which is nil.
func pointer[T int | uint64](c *coder, name string, v **T, most int64) {
	if c.field(name, optional, *v == nil) {
		if *v == nil {
			*v = new(T)
		}
		integerValue(c, *v, 0, most)
		c.done(name)
	}
}

// member is an object that may be missing, which is nil.
func member[T any, P interface {
	*T
	fielder
}](c *coder, name string, v **T,
) {
	if c.field(name, optional, *v == nil) {
		if *v == nil {
			*v = new(T)
		}
		c.object(P(*v))
		c.done(name)
	}
}

// list is a list of values that element reads or writes. An empty one that is read is
// nil.
func list[T any](c *coder, name string, v *[]T, need bool, element func(*coder, *T)) {
	if c.field(name, need, len(*v) == 0) {
		if c.writing {
			c.writeList(len(*v), func(i int) { element(c, &(*v)[i]) })
		} else {
			*v = readList(c, element)
		}
		c.done(name)
	}
}

func readList[T any](c *coder, element func(*coder, *T)) []T {
	var out []T
	c.open('[', "a list")
	for c.more(']', len(out) == 0) {
		if len(out) == cap(out) {
			// append would grow a long list by a quarter, again and again.
			out = slices.Grow(out, max(4, len(out)))
		}
		out = out[:len(out)+1]
		if element(c, &out[len(out)-1]); c.err != nil {
			c.withinElement(len(out) - 1)
			return nil
		}
	}
	return out
}

func (c *coder) writeList(n int, element func(i int)) {
	c.open('[', "")
	for i := 0; i < n && c.err == nil; i++ {
		c.comma()
		if element(i); c.err != nil {
			c.withinElement(i)
		}
	}
	c.close(']')
}

// each reads or writes an element of a list of objects.
func each[T any, P interface {
	*T
	fielder
}](c *coder, v *T,
) {
	c.object(P(v))
}

func indexValue(c *coder, v *int) { integerValue(c, v, 0, MaxItems-1) }

func countValue(c *coder, v *int) { integerValue(c, v, 0, maxCount) }

// table is an object with any keys, each once, whose values value reads or writes. It
// is written by the order of its keys. An empty one that is read is nil.
func table[T any](c *coder, name string, v *map[string]T, need bool, value func(*coder, *T)) {
	if c.field(name, need, len(*v) == 0) {
		tableValue(c, v, value)
		c.done(name)
	}
}

func tableValue[T any](c *coder, v *map[string]T, value func(*coder, *T)) {
	if c.writing {
		writeTable(c, *v, value)
	} else {
		*v = readTable(c, value)
	}
}

func writeTable[T any](c *coder, values map[string]T, value func(*coder, *T)) {
	var one T
	c.open('{', "")
	for _, key := range slices.Sorted(maps.Keys(values)) {
		if !utf8.ValidString(key) {
			c.fail("the key %q is not UTF-8", key)
		}
		c.comma()
		c.buf = append(appendText(c.buf, key), ':')
		one = values[key]
		if value(c, &one); c.err != nil {
			c.within(clip(key))
			return
		}
	}
	c.close('}')
}

func readTable[T any](c *coder, value func(*coder, *T)) map[string]T {
	var out map[string]T
	var one T
	c.open('{', "an object")
	for c.more('}', out == nil) {
		if out == nil {
			out = make(map[string]T, 1)
		}
		key := c.readName()
		value(c, &one)
		if _, twice := out[key]; twice {
			c.fail("it is there twice")
		}
		if c.err != nil {
			c.within(clip(key))
			return nil
		}
		out[key] = one
	}
	return out
}

// raw is a JSON object that is kept as it is written. An empty one is written as {}.
func (c *coder) raw(name string, v *json.RawMessage, need bool) {
	if !c.field(name, need, len(*v) == 0) {
		return
	}
	switch {
	case !c.writing:
		*v = json.RawMessage(c.readObject())
	case len(*v) == 0:
		c.buf = append(c.buf, "{}"...)
	case !utf8.Valid(*v):
		c.fail("must be UTF-8")
	default:
		check := coder{input: string(*v), depth: c.depth}
		check.readObject()
		check.end()
		c.err = check.failure()
		c.buf = append(c.buf, *v...)
	}
	c.done(name)
}

// datatype is the name of a datatype.
func (c *coder) datatype(name string, v *tensor.Datatype) {
	if c.field(name, optional, *v == "") {
		c.textValue((*string)(v))
		if c.err == nil && !v.Valid() {
			c.fail("unknown datatype %q", clip(string(*v)))
		}
		c.done(name)
	}
}

// shape is a list of extents, of which none is below low. It is written where a
// datatype is.
func (c *coder) shape(name string, v *[]int64, low int64) {
	if !c.field(name, optional, false) {
		return
	}
	if c.writing {
		if len(*v) > tensor.MaxRank {
			c.fail("%d axes, at most %d are supported", len(*v), tensor.MaxRank)
		}
		c.writeList(len(*v), func(i int) { c.writeInteger((*v)[i], low, maxNumber) })
	} else {
		*v = c.readShape(low)
	}
	c.done(name)
}

func (c *coder) readShape(low int64) []int64 {
	var axes [tensor.MaxRank]int64
	n := 0
	c.open('[', "a list")
	for c.more(']', n == 0) {
		if n == len(axes) {
			c.fail("more than %d axes", len(axes))
			return nil
		}
		axes[n] = c.readInteger(low, maxNumber)
		n++
	}
	return append([]int64(nil), axes[:n]...)
}
