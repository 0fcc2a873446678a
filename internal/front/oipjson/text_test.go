package oipjson_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/oipjson"
)

// FuzzStringsMatchEncodingJSON compares strings with the standard library.
func FuzzStringsMatchEncodingJSON(f *testing.F) {
	for _, seed := range []string{`a`, `\n\t\b\f\r\"\\\/`, `\u00e9`, `\ud83d\ude00`, `\ud83d`, `\ud83d\u0041`, `\ude00\ud83d`, `\u12`, `\u+123`, `\x`, `\'`, "é"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, between string) {
		text := []byte(`{"inputs":[],"id":"` + between + `"}`)
		var want struct{ ID *string }
		valid := json.Unmarshal(text, &want) == nil && want.ID != nil
		got, err := oipjson.Decode(text, nil)
		if err != nil || !valid {
			return // FuzzDecode covers rejected texts
		}
		if got.ID != *want.ID {
			t.Errorf("%s is %q, and %q to encoding/json", text, got.ID, *want.ID)
		}
		got, err = oipjson.Decode(one("BYTES", "[1]", `["`+between+`"]`), nil)
		if err != nil {
			return // the text goes on behind the string
		}
		if raw := got.Inputs[0].Tensor.Raw; string(raw[4:]) != *want.ID || cap(raw) != len(raw) {
			t.Errorf("%s is %q in %d bytes", text, raw, cap(raw))
		}
	})
}

func TestInvalidStringsAreRejected(t *testing.T) {
	t.Parallel()
	for _, between := range []string{`\u12`, `\u+123`, `\u1_23`, `\x`, `\'`, `\`, `\u`} {
		if _, err := oipjson.Decode([]byte(`{"inputs":[],"id":"`+between+`"}`), nil); err == nil {
			t.Errorf("%s is accepted", between)
		}
	}
}

func TestHalvesOfSurrogatePairsAreRefused(t *testing.T) {
	t.Parallel()
	for _, half := range []string{`\ud800`, `\udc00`, `\udc00\ud800`, `\ud800x`, `\ud83d\u0041`, `\uD83d\n`} {
		for _, text := range []string{
			`{"inputs":[],"id":"` + half + `"}`,
			`{"inputs":[],"` + half + `":1}`,
			`{"inputs":[],"parameters":{"` + half + `":1}}`,
			`{"inputs":[],"parameters":{"k":"` + half + `"}}`,
			`{"inputs":[{"name":"` + half + `","datatype":"BYTES","shape":[1],"data":["a"]}]}`,
			`{"inputs":[{"name":"x","datatype":"BYTES","shape":[1],"data":["` + half + `"]}]}`,
		} {
			_, err := oipjson.Decode([]byte(text), nil)
			_, ferr := oipjson.DecodeFields([]byte(text))
			if err == nil || ferr == nil || oipjson.Check([]byte(text)) == nil {
				t.Errorf("%s is accepted: %v, %v", text, err, ferr)
			}
		}
	}
	if err := oipjson.Check([]byte(`{"a":"\ud83d\ude00","a":"\ufffd"}`)); err != nil {
		t.Error(err)
	}
}

func TestEscapedTextTakesOnlyItsValue(t *testing.T) {
	t.Parallel()
	const size = 1 << 20
	text := `{"inputs":[{"name":"a","datatype":"BYTES","shape":[1],"data":["` + strings.Repeat(`\u0436`, size/2) + `"]}]}`
	pool := budget.NewPool(budget.Settings{Limit: 2 * size})
	var before, reserved int64
	h := fronttest.WithMemory(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		before = pool.Held()
		memory := budget.Of(r.Context(), size+4)
		defer memory.Close()
		in, err := oipjson.Decode([]byte(text), memory)
		reserved = pool.Held() - before
		if err != nil || len(in.Inputs) != 1 || string(in.Inputs[0].Tensor.Raw[4:]) != strings.Repeat("ж", size/2) {
			t.Errorf("decoded %v", err)
		}
	}), pool)
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", strings.NewReader("body")))
	if reserved != size+4 {
		t.Errorf("%d bytes are reserved for a value of %d", reserved, size)
	}
}
