package meshfile

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// blocksOf returns the blocks of a step by their keys: at most one in a valid pipeline.
func blocksOf(s pipeline.Step) (out []key) {
	v := reflect.ValueOf(s.Block)
	for i := range v.NumField() {
		if !v.Field(i).IsZero() {
			out = append(out, key{name: v.Type().Field(i).Tag.Get("yaml"), block: v.Field(i).Interface()})
		}
	}
	return out
}

// leavesOf is keysOf with the keys in blocks one by one.
func leavesOf(p pipeline.Pipeline) (out []key) {
	for _, k := range keysOf(p) {
		if k.block == nil {
			out = append(out, k)
			continue
		}
		leaves(k.path, reflect.ValueOf(k.block), func(path, value string) { out = append(out, key{path: path, value: value}) })
	}
	return out
}

// leaves calls add for each value in v, with its path.
func leaves(path string, v reflect.Value, add func(path, value string)) {
	switch {
	case v.Kind() == reflect.Pointer && !isScalar(v.Elem()):
		leaves(path, v.Elem(), add)
	case v.Kind() == reflect.Struct && !isScalar(v):
		fields(v, func(name string, value reflect.Value) { leaves(strings.TrimPrefix(path+"."+name, "."), value, add) })
	case v.Kind() == reflect.Map:
		for _, name := range slices.Sorted(maps.Keys(stringKeys(v))) {
			leaves(path+"."+name, stringKeys(v)[name], add)
		}
	case v.Kind() == reflect.Slice && v.Len() > 0 && !isScalar(v.Index(0)):
		for i := range v.Len() {
			leaves(fmt.Sprintf("%s[%d]", path, i), v.Index(i), add)
		}
	default:
		add(path, flowOf(v))
	}
}

// fields calls visit for each key of a struct that is set.
func fields(v reflect.Value, visit func(name string, value reflect.Value)) {
	for i := range v.NumField() {
		field, value := v.Type().Field(i), v.Field(i)
		tag, _, _ := strings.Cut(field.Tag.Get("yaml"), ",")
		switch {
		case tag == "-", value.IsZero():
		case tag == "":
			fields(value, visit)
		default:
			visit(tag, value)
		}
	}
}

func stringKeys(v reflect.Value) map[string]reflect.Value {
	out := make(map[string]reflect.Value, v.Len())
	for it := v.MapRange(); it.Next(); {
		out[it.Key().String()] = it.Value()
	}
	return out
}

func isScalar(v reflect.Value) bool {
	if v.Type() == reflect.TypeFor[payload.Value]() {
		return true
	}
	switch v.Kind() {
	case reflect.Struct, reflect.Map, reflect.Slice, reflect.Pointer:
		return false
	}
	return true
}

// Flow writes a value of a file on one line, as {key: value} and [item].
func Flow(v any) string { return flowOf(reflect.ValueOf(v)) }

func flowOf(v reflect.Value) string {
	switch one := v.Interface().(type) {
	case payload.Value:
		return value(one)
	case time.Duration:
		return one.String()
	}
	var parts []string
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		return flowOf(v.Elem())
	case reflect.String:
		return text(v.String())
	case reflect.Slice:
		for i := range v.Len() {
			parts = append(parts, flowOf(v.Index(i)))
		}
		return "[" + strings.Join(parts, ", ") + "]"
	case reflect.Map:
		all := stringKeys(v)
		for _, name := range slices.Sorted(maps.Keys(all)) {
			parts = append(parts, text(name)+": "+flowOf(all[name]))
		}
		return "{" + strings.Join(parts, ", ") + "}"
	case reflect.Struct:
		fields(v, func(name string, value reflect.Value) { parts = append(parts, name+": "+flowOf(value)) })
		return "{" + strings.Join(parts, ", ") + "}"
	case reflect.Float64:
		return value(payload.Double(v.Float()))
	}
	return fmt.Sprint(v.Interface())
}
