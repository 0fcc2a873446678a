package local

import (
	"reflect"
	"slices"
	"testing"

	"github.com/stagemesh/stagemesh/stagehost"
)

// What a mesh's file says of a stage is said to its hosts, also what is added to it.
func TestNoSettingOfAStageIsLostOnItsWay(t *testing.T) {
	t.Parallel()
	// These are the mesh's and the process's, or the first host's alone.
	others := []string{"Mesh", "Host", "Version", "Registry", "Bus", "Results", "DeadLetters", "Starts", "Listen", "Logger", "Meter"}
	var want stagehost.Settings
	value := reflect.ValueOf(&want).Elem()
	for i := range value.NumField() {
		if !slices.Contains(others, value.Type().Field(i).Name) {
			fill(value.Field(i))
		}
	}
	got := reflect.ValueOf(stageOf(want).host(want.Runner))
	for i := range value.NumField() {
		if !reflect.DeepEqual(got.Field(i).Interface(), value.Field(i).Interface()) {
			t.Errorf("%s is lost: %v", value.Type().Field(i).Name, got.Field(i))
		}
	}
	if stage := stageOf(stagehost.Settings{Listen: "x"}); stage.Listen != "x" {
		t.Error("Listen is lost")
	}
}

// fill makes a value another than its zero.
func fill(v reflect.Value) {
	switch v.Kind() {
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
	case reflect.String:
		v.SetString("x")
	case reflect.Int, reflect.Int64:
		v.SetInt(7)
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i))
		}
	}
}
