package config

import (
	"encoding"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
)

// reader fills values and collects what does not fit.
type reader struct {
	doc  *Doc
	errs []error
}

// maxErrors bounds what one reading reports.
const maxErrors = 20

// errTarget is a defect of the program, not of the file.
var errTarget = errors.New("a file cannot be read")

func (r *reader) result() error {
	if len(r.errs) > maxErrors {
		more := fmt.Errorf("%s: %d more like these", r.doc.name, len(r.errs)-maxErrors)
		return errors.Join(append(r.errs[:maxErrors:maxErrors], more)...)
	}
	return errors.Join(r.errs...)
}

func (r *reader) fail(at place, path Path, format string, args ...any) {
	r.errs = append(r.errs, &PositionError{
		File: r.doc.name, Line: at.line, Column: at.column, Key: path.String(), Err: fmt.Errorf(format, args...),
	})
}

// mismatch adds the error that the value is not of the wanted kind.
func (r *reader) mismatch(n *node, path Path, wanted string) {
	if n.kind == text && kindOf(n.text) != text {
		r.fail(n.place, path, "%s in quotes is text and not %s", n, wanted)
		return
	}
	r.fail(n.place, path, "%s is not %s", n, wanted)
}

var (
	durationType = reflect.TypeFor[time.Duration]()
	sectionType  = reflect.TypeFor[Section]()
	textType     = reflect.TypeFor[encoding.TextUnmarshaler]()
	yamlType     = reflect.TypeFor[unmarshaler]()
)

type unmarshaler interface {
	UnmarshalYAML(decode func(into any) error) error
}

// value reads the node into v, which can be set.
func (r *reader) value(v reflect.Value, n *node, path Path) {
	switch {
	case v.Type() == sectionType:
		v.Set(reflect.ValueOf(Section{doc: r.doc, node: n, path: path}))
	case reflect.PointerTo(v.Type()).Implements(yamlType):
		before := len(r.errs)
		err := v.Addr().Interface().(unmarshaler).UnmarshalYAML(func(into any) error {
			r.value(reflect.ValueOf(into).Elem(), n, path)
			return errors.Join(r.errs[before:]...)
		})
		if err != nil && len(r.errs) == before {
			r.fail(n.place, path, "%w", err)
		}
	case n.kind == null:
	case v.Kind() == reflect.Pointer:
		target := reflect.New(v.Type().Elem())
		r.value(target.Elem(), n, path)
		v.Set(target)
	case reflect.PointerTo(v.Type()).Implements(textType):
		r.unmarshal(v, n, path)
	case v.Type() == durationType:
		r.duration(v, n, path)
	case v.Kind() == reflect.Struct:
		r.fields(v, n, path)
	case v.Kind() == reflect.Map && v.Type().Key().Kind() == reflect.String:
		r.entries(v, n, path)
	case v.Kind() == reflect.Slice:
		r.items(v, n, path)
	case v.Kind() == reflect.Interface && v.NumMethod() == 0:
		r.anything(v, n, path)
	default:
		r.scalar(v, n, path)
	}
}

func (r *reader) scalar(v reflect.Value, n *node, path Path) {
	switch v.Kind() {
	case reflect.String:
		switch {
		case n.scalar():
			v.SetString(n.text)
		case n.kind == table:
			// The parser takes {list: [host:80]} for a key with a value.
			r.mismatch(n, path, "text; if it is to be, put what has a colon in quotes")
		default:
			r.mismatch(n, path, "text")
		}
	case reflect.Bool:
		if n.kind == boolean {
			v.SetBool(strings.EqualFold(n.text, "true"))
			return
		}
		r.mismatch(n, path, "true or false")
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		whole, err := strconv.ParseInt(n.text, 10, v.Type().Bits())
		r.number(n, path, err, "a whole number", func() { v.SetInt(whole) })
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		whole, err := strconv.ParseUint(n.text, 10, v.Type().Bits())
		r.number(n, path, err, "a whole number from 0 on", func() { v.SetUint(whole) })
	case reflect.Float32, reflect.Float64:
		float, err := strconv.ParseFloat(n.text, v.Type().Bits())
		r.number(n, path, err, "a number", func() { v.SetFloat(float) })
	default:
		r.errs = append(r.errs, fmt.Errorf("%s: %s: %w into a %s", r.doc.name, path, errTarget, v.Type()))
	}
}

func (n *node) scalar() bool { return n.kind != list && n.kind != table }

// number calls set where the node is a number that could be converted.
func (r *reader) number(n *node, path Path, err error, wanted string, set func()) {
	switch {
	case n.kind != number:
		r.mismatch(n, path, wanted)
	case errors.Is(err, strconv.ErrRange):
		r.fail(n.place, path, "%s is too large", n)
	case err != nil:
		r.mismatch(n, path, wanted)
	default:
		set()
	}
}

func (r *reader) duration(v reflect.Value, n *node, path Path) {
	d, err := time.ParseDuration(n.text)
	if err != nil || !n.scalar() {
		r.mismatch(n, path, "a duration such as 250ms, 5s or 1m30s")
		return
	}
	v.SetInt(int64(d))
}

func (r *reader) size(v reflect.Value, n *node, path Path) {
	if !n.scalar() {
		r.mismatch(n, path, "a single value")
		return
	}
	size, err := ParseBytes(n.text)
	if err != nil {
		r.fail(n.place, path, "%w", err)
	}
	v.SetInt(int64(size))
}

// unmarshal reads a scalar into a value that parses its own text.
func (r *reader) unmarshal(v reflect.Value, n *node, path Path) {
	if !n.scalar() {
		r.mismatch(n, path, "a single value")
		return
	}
	if err := v.Addr().Interface().(encoding.TextUnmarshaler).UnmarshalText([]byte(n.text)); err != nil {
		r.fail(n.place, path, "%w", err)
	}
}

// items reads a list into a slice.
func (r *reader) items(v reflect.Value, n *node, path Path) {
	if n.kind != list {
		r.mismatch(n, path, "a list")
		return
	}
	out := reflect.MakeSlice(v.Type(), len(n.items), len(n.items))
	for i, item := range n.items {
		if item.kind == null {
			r.mismatch(item, path.with(index(i)), "allowed in a list")
			continue
		}
		r.value(out.Index(i), item, path.with(index(i)))
	}
	v.Set(out)
}

// entries reads a table into a map by string.
func (r *reader) entries(v reflect.Value, n *node, path Path) {
	if n.kind != table {
		r.mismatch(n, path, "a set of keys")
		return
	}
	out := reflect.MakeMapWithSize(v.Type(), len(n.entries))
	for _, e := range n.entries {
		value := reflect.New(v.Type().Elem()).Elem()
		r.value(value, e.value, path.with(e.key))
		out.SetMapIndex(reflect.ValueOf(e.key).Convert(v.Type().Key()), value)
	}
	v.Set(out)
}

// fields reads a table into a struct.
func (r *reader) fields(v reflect.Value, n *node, path Path) {
	if n.kind != table {
		r.mismatch(n, path, "a set of keys")
		return
	}
	if d, ok := v.Addr().Interface().(Defaulter); ok {
		d.SetDefaults()
	}
	fields := map[string]field{}
	addFields(fields, v.Type(), nil)
	for _, e := range n.entries {
		f, ok := fields[e.key]
		if !ok {
			r.fail(e.place, path, "%s is not a key here; there are %s", quote(e.key), strings.Join(slices.Sorted(maps.Keys(fields)), ", "))
			continue
		}
		target, at := v.FieldByIndex(f.index), path.with(e.key)
		switch {
		case e.value.kind == null && f.option == "value":
			r.fail(e.place, at, "has no value; give it one or remove the key")
		case e.value.kind == null:
			r.value(target, e.value, at)
		case f.option == "size":
			r.size(target, e.value, at)
		case f.option == "path":
			r.value(target, e.value, at)
			if target.Kind() == reflect.String {
				target.SetString(r.doc.relative(target.String()))
				continue
			}
			for i := range target.Len() {
				target.Index(i).SetString(r.doc.relative(target.Index(i).String()))
			}
		default:
			r.value(target, e.value, at)
		}
	}
}

// field is where a struct has a key, and the option behind it.
type field struct {
	index  []int
	option string
}

// addFields adds the fields of a struct by key, with the fields of the structs that it embeds.
func addFields(into map[string]field, t reflect.Type, index []int) {
	for i := range t.NumField() {
		f := t.Field(i)
		at := append(index[:len(index):len(index)], i)
		key, option, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		switch {
		case option == "inline", f.Anonymous && key == "":
			addFields(into, f.Type, at)
		case key != "" && key != "-":
			into[key] = field{index: at, option: option}
		}
	}
}

// anything reads a value as bool, int64, uint64, float64, string, []any or
// map[string]any.
func (r *reader) anything(v reflect.Value, n *node, path Path) {
	as := reflect.TypeFor[string]()
	switch n.kind {
	case list:
		as = reflect.TypeFor[[]any]()
	case table:
		as = reflect.TypeFor[map[string]any]()
	case boolean:
		as = reflect.TypeFor[bool]()
	case number:
		value, err := numberOf(n.text)
		r.number(n, path, err, "a number", func() { v.Set(reflect.ValueOf(value)) })
		return
	}
	value := reflect.New(as).Elem()
	r.value(value, n, path)
	v.Set(value)
}

// numberOf returns a number as an int64, a uint64 or else a float64.
func numberOf(s string) (any, error) {
	if whole, err := strconv.ParseInt(s, 10, 64); err == nil {
		return whole, nil
	}
	if whole, err := strconv.ParseUint(s, 10, 64); err == nil {
		return whole, nil
	}
	return strconv.ParseFloat(s, 64)
}
