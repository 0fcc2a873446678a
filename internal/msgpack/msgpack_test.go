package msgpack_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/stagemesh/stagemesh/internal/msgpack"
)

const limit = 1 << 20

func TestValuesOfBothFormatsRoundTrip(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		data []byte
		want string
	}{
		"nothing":                {msgp.AppendNil(nil), `null`},
		"true":                   {msgp.AppendBool(nil, true), `true`},
		"a whole number":         {msgp.AppendInt64(nil, -7), `-7`},
		"the least":              {msgp.AppendInt64(nil, math.MinInt64), `-9223372036854775808`},
		"the greatest":           {msgp.AppendUint64(nil, math.MaxUint64), `18446744073709551615`},
		"a float":                {msgp.AppendFloat64(nil, 0.1), `0.1`},
		"a float that is whole":  {msgp.AppendFloat64(nil, 2), `2.0`},
		"negative zero":          {msgp.AppendFloat64(nil, math.Copysign(0, -1)), `-0.0`},
		"a large float":          {msgp.AppendFloat64(nil, 1e300), `1e+300`},
		"half the bits, exactly": {msgp.AppendFloat32(nil, 0.1), `0.10000000149011612`},
		"text":                   {msgp.AppendString(nil, "a\"\n\u00e9<"), `"a\"\n` + "\u00e9" + `<"`},
		"no text":                {msgp.AppendString(nil, ""), `""`},
		"a list":                 {msgp.AppendNil(msgp.AppendInt(msgp.AppendArrayHeader(nil, 2), 1)), `[1,null]`},
		"no list":                {msgp.AppendArrayHeader(nil, 0), `[]`},
		"keys in their order":    {msgp.AppendInt(msgp.AppendString(msgp.AppendInt(msgp.AppendString(msgp.AppendMapHeader(nil, 2), "z"), 1), "a"), 2), `{"z":1,"a":2}`},
		"no keys":                {msgp.AppendMapHeader(nil, 0), `{}`},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := msgpack.ToJSON(test.data, limit)
			if err != nil || string(got) != test.want {
				t.Fatalf("got %s, %v; want %s", got, err, test.want)
			}
			back, err := msgpack.AppendJSON(nil, got)
			if err != nil {
				t.Fatal(err)
			}
			if again, err := msgpack.ToJSON(back, limit); err != nil || string(again) != test.want {
				t.Errorf("came back as %s, %v", again, err)
			}
		})
	}
}

func in(key string, value []byte) []byte {
	return append(msgp.AppendString(msgp.AppendMapHeader(nil, 1), key), value...)
}

func listOf(values ...[]byte) []byte {
	return append(msgp.AppendArrayHeader(nil, uint32(len(values))), bytes.Join(values, nil)...)
}

func nested(depth int) []byte { return append(bytes.Repeat([]byte{0x91}, depth), 0xc0) }

func TestUnrepresentableValueIsRejectedByPlace(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		data     []byte
		at, says string
	}{
		"bytes":                   {in("image", msgp.AppendBytes(nil, []byte{1})), "x.image", "binary"},
		"a time":                  {in("at", []byte{0xd6, 0xff, 0, 0, 0, 0}), "x.at", "extension"},
		"an extension":            {listOf(msgp.AppendNil(nil), []byte{0xd4, 0x09, 0}), "x[1]", "extension"},
		"NaN":                     {in("a", listOf(msgp.AppendFloat64(nil, math.NaN()))), "x.a[0]", "NaN"},
		"infinity":                {msgp.AppendFloat32(nil, float32(math.Inf(-1))), "x", "infinite"},
		"a number as a key":       {in("a", []byte{0x81, 0x01, 0x01}), "x.a", "key that is not a string"},
		"no UTF-8":                {in("a", []byte{0xa1, 0xff}), "x.a", "not UTF-8"},
		"a key of no UTF-8":       {[]byte{0x81, 0xa1, 0xff, 0x01}, "x", "not UTF-8"},
		"a key that is odd":       {in("a b\"", []byte{0xc4, 0}), `x["a b\""]`, "binary"},
		"a long key":              {in(strings.Repeat("k", 100), []byte{0xc4, 0}), "x." + strings.Repeat("k", 40) + "...", "binary"},
		"too deep":                {nested(msgpack.MaxDepth + 1), "x" + strings.Repeat("[0]", 16), "deeper than 64"},
		"nothing there":           {nil, "x", "cut off"},
		"cut off":                 {in("a", []byte{0xcd, 1}), "x.a", "cut off"},
		"a list that lies":        {[]byte{0xdd, 0xff, 0xff, 0xff, 0xff}, "x[0]", "cut off"},
		"a map that lies":         {[]byte{0xdf, 0xff, 0xff, 0xff, 0xff}, "x", "cut off"},
		"text that lies":          {[]byte{0xdb, 0xff, 0xff, 0xff, 0xff, 'a'}, "x", "cut off"},
		"the byte that is unused": {[]byte{0xc1}, "x", "not MessagePack"},
		"more than one":           {[]byte{0x01, 0x02}, "x", "after its end, for 1 bytes"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := msgpack.ToJSON(test.data, limit)
			e, ok := errors.AsType[*msgpack.Error](err)
			if !ok || got != nil {
				t.Fatalf("got %s, %v", got, err)
			}
			if e.At("x") != test.at || !strings.Contains(e.Problem(), test.says) {
				t.Errorf("got %q at %q; want %q at %q", e.Problem(), e.At("x"), test.says, test.at)
			}
		})
	}
}

func TestToJSONStopsAtItsLimit(t *testing.T) {
	t.Parallel()
	data := append(msgp.AppendArrayHeader(nil, 1000), bytes.Repeat([]byte{0xc2}, 1000)...) // false, a thousand times
	if _, err := msgpack.ToJSON(data, 6001); err != nil {
		t.Errorf("what fits is refused: %v", err)
	}
	if got, err := msgpack.ToJSON(data, 3000); err == nil || !strings.Contains(err.Error(), "more than 3000 bytes") {
		t.Errorf("got %d bytes, %v", len(got), err)
	}
}

func TestCheckAcceptsAnyCompleteDocument(t *testing.T) {
	t.Parallel()
	for name, data := range map[string][]byte{
		"bytes": msgp.AppendBytes(nil, []byte("x")), "an extension": {0xd4, 0x09, 0}, "keys of numbers": {0x81, 0x01, 0xc0},
		"as deep as may be": nested(msgpack.MaxDepth),
	} {
		if err := msgpack.Check(data); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, data := range map[string][]byte{
		"nothing": nil, "half": {0x92, 0x01}, "two": {0x01, 0x02}, "too deep": nested(msgpack.MaxDepth + 1), "a lie": {0xdd, 0xff, 0xff, 0xff, 0xff},
	} {
		if err := msgpack.Check(data); err == nil {
			t.Errorf("%s is taken", name)
		}
	}
}

func TestElementsAreVisited(t *testing.T) {
	t.Parallel()
	var got []string
	err := msgpack.Elements(listOf([]byte{7}, msgp.AppendFloat64(nil, 0.5), msgp.AppendBool(nil, true), msgp.AppendNil(nil)), func(i int, value []byte) error {
		text, err := msgpack.AppendScalar(nil, value)
		got = append(got, fmt.Sprintf("%d: %s", i, text))
		return err
	})
	if want := []string{"0: 7", "1: 0.5", "2: true", "3: null"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("got %q, %v", got, err)
	}
	enough := errors.New("enough")
	if err := msgpack.Elements(listOf([]byte{1}, []byte{2}), func(i int, _ []byte) error {
		if i > 0 {
			t.Error("it went on")
		}
		return enough
	}); !errors.Is(err, enough) {
		t.Errorf("got %v", err)
	}
}

func TestConversionLeavesValuesOut(t *testing.T) {
	t.Parallel()
	raw := msgp.AppendBytes(nil, []byte{1, 2})
	data := in("list", listOf(in("raw", raw), in("other", []byte{7})))
	c := msgpack.Conversion{Limit: limit, Skip: func(depth int, key []byte) bool { return depth == 2 && string(key) == "raw" }}
	text, err := c.JSON(data)
	offset := bytes.Index(data, raw)
	if want := fmt.Sprintf(`{"list":[{"raw":%d},{"other":7}]}`, offset); err != nil || string(text) != want {
		t.Errorf("got %s, %v; want %s", text, err, want)
	}
	if value, _, err := msgpack.Next(data[offset:]); err != nil || !bytes.Equal(value, raw) {
		t.Errorf("got %x, %v", value, err)
	}
}

func TestConversionReservesBeforeItAllocates(t *testing.T) {
	t.Parallel()
	reserved, full := int64(0), errors.New("full")
	reserve := func(n int64) error {
		if reserved += n; reserved > 4096 {
			return full
		}
		return nil
	}
	data := in("text", msgp.AppendString(nil, strings.Repeat("\x01", 600))) // six times as long as JSON
	c := msgpack.Conversion{Limit: limit, Reserve: reserve}
	if text, err := c.JSON(data); err != nil || int64(cap(text)) > reserved {
		t.Errorf("%d bytes of %d reserved, %v", cap(text), reserved, err)
	}
	c = msgpack.Conversion{Limit: limit, Reserve: reserve}
	if text, err := c.JSON(in("text", msgp.AppendString(nil, strings.Repeat("x", 5000)))); !errors.Is(err, full) || text != nil {
		t.Errorf("got %d bytes, %v", len(text), err)
	}
}

func TestLookupPassesOverKeysThatAreNotStrings(t *testing.T) {
	t.Parallel()
	odd := []byte{0x84, 1, 2, 0xa1, 'a', 0x92, 7, 8, 0xc0, 1, 0xa1, 'a', 3}
	for i, want := range []byte{7, 8} {
		if value, ok := msgpack.Lookup(odd, "a", i); !ok || !bytes.Equal(value, []byte{want}) {
			t.Errorf("got %x, %t", value, ok)
		}
	}
	if value, ok := msgpack.Lookup(odd, "a", 2); ok {
		t.Errorf("got %x", value)
	}
	for name, data := range map[string][]byte{
		"nothing": nil, "a number": {1}, "another key": {0x81, 0xa1, 'b', 1}, "a map that lies": {0xdf, 0xff, 0xff, 0xff, 0xff}, "half": {0x81, 0xa1, 'a'},
		"a lie before it": {0x82, 0xc6, 0xff, 0xa1, 'a', 1}, "half of a header": {0xdf, 0}, "a binary key": {0x81, 0xc4, 1, 'a', 1},
	} {
		if value, ok := msgpack.Lookup(data, "a"); ok {
			t.Errorf("%s has %x", name, value)
		}
	}
	for name, data := range map[string][]byte{"nothing": nil, "a map": {0x80}, "none": {0x90}, "a lie": {0xdd, 0xff, 0xff, 0xff, 0xff}, "half of a header": {0xdd, 0}} {
		if value, ok := msgpack.Lookup(data, 0); ok {
			t.Errorf("%s has %x", name, value)
		}
	}
}

func TestTruncatedDocumentIsRejected(t *testing.T) {
	t.Parallel()
	for name, data := range map[string][]byte{
		"nothing": nil, "a number": {1}, "a map that lies": {0xdf, 0xff, 0xff, 0xff, 0xff}, "a list that lies": {0xdd, 0xff, 0xff, 0xff, 0xff},
		"a key of numbers": {0x81, 1, 1}, "half": {0x81, 0xa1, 'a'}, "more": {0x80, 1}, "more than a list": {0x90, 1},
	} {
		err := msgpack.Elements(data, func(int, []byte) error { return nil })
		if _, ok := errors.AsType[*msgpack.Error](err); !ok {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, data := range map[string][]byte{"a lie": {0xc6, 0xff, 0xff, 0xff, 0xff, 1}, "text": {0xa1, 'a'}, "more": {0xc4, 1, 1, 1}} {
		if raw, ok := msgpack.Binary(data); ok {
			t.Errorf("%s is %x", name, raw)
		}
	}
}

func TestJSONNumbersKeepTheirKind(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]msgp.Type{
		"1": msgp.IntType, "-9223372036854775808": msgp.IntType, "18446744073709551615": msgp.UintType,
		"1.0": msgp.Float64Type, "1e3": msgp.Float64Type, "-0": msgp.Float64Type, "0": msgp.IntType, "18446744073709551616": msgp.Float64Type,
	} {
		data, err := msgpack.AppendJSON(nil, []byte(text))
		if err != nil || msgp.NextType(data) != want {
			t.Errorf("%s is a %s, %v; want a %s", text, msgp.NextType(data), err, want)
		}
	}
	for _, text := range []string{"1e999", "", "{", "[1", "[1,]", "1 2", "1]", "[1]]", "{}}", "1,", "1:", strings.Repeat("[", 1000), `{"a"}`} {
		if data, err := msgpack.AppendJSON(nil, []byte(text)); err == nil {
			t.Errorf("%.20s became %x", text, data)
		}
	}
}

func TestMessagePackContentTypesAreRecognized(t *testing.T) {
	t.Parallel()
	for contentType, want := range map[string]bool{
		"application/msgpack": true, "Application/X-MsgPack ; a=b": true, "application/vnd.msgpack": true,
		"application/json": false, "": false, "application/msgpackish": false,
	} {
		if got := msgpack.Is(contentType); got != want {
			t.Errorf("%q: %t", contentType, got)
		}
	}
}

// FuzzToJSON holds four promises: nothing panics; every refusal is an Error; what
// is taken is JSON; and JSON that is written back is the same JSON again.
func FuzzToJSON(f *testing.F) {
	f.Add(in("a", listOf(msgp.AppendInt(nil, 1), msgp.AppendFloat32(nil, 0.5), msgp.AppendBytes(nil, []byte{1}))))
	f.Add([]byte{0xdd, 0xff, 0xff, 0xff, 0xff})
	f.Add(nested(70))
	f.Add([]byte{0xd6, 0xff, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		whole := msgpack.Check(data)
		text, err := msgpack.ToJSON(data, limit)
		if err != nil {
			if _, ok := errors.AsType[*msgpack.Error](err); !ok || len(err.Error()) > 4<<10 {
				t.Fatalf("refused by %T %v", err, err)
			}
			return
		}
		if whole != nil || !json.Valid(text) {
			t.Fatalf("%x is %s, and %v", data, text, whole)
		}
		back, err := msgpack.AppendJSON(nil, text)
		if err != nil {
			t.Fatalf("%s cannot be written: %v", text, err)
		}
		if again, err := msgpack.ToJSON(back, 2*limit); err != nil || !bytes.Equal(again, text) {
			t.Fatalf("%s came back as %s, %v", text, again, err)
		}
	})
}

func TestZeroKeepsItsSign(t *testing.T) {
	t.Parallel()
	data, err := msgpack.AppendJSON(nil, []byte("-0"))
	if err != nil {
		t.Fatal(err)
	}
	if got, _, err := msgp.ReadFloat64Bytes(data); err != nil || got != 0 || !math.Signbit(got) {
		t.Errorf("-0 became %v, %v", got, err)
	}
	if text, err := msgpack.ToJSON(data, limit); err != nil || string(text) != "-0.0" {
		t.Errorf("and came back as %s, %v", text, err)
	}
}

// FuzzAppendJSON holds two promises: what is not JSON is refused, and nothing else is
// but what nests too deep or has numbers beyond 64 bits; and what is taken is one
// document.
func FuzzAppendJSON(f *testing.F) {
	for _, text := range []string{`{"a":[1,-0,1e3]}`, "1]", "[1]]", `{"a"}`, "1 2", " null ", "[1,]", "1e999", "\"\xff\"", `"\ud800"`} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		data, err := msgpack.AppendJSON(nil, text)
		if err == nil && (!json.Valid(text) || msgpack.Check(data) != nil) {
			t.Fatalf("%q became %x", text, data)
		}
		if err != nil && json.Valid(text) && !strings.Contains(err.Error(), "nests deeper than") && !strings.Contains(err.Error(), "is beyond 64 bits") {
			t.Fatalf("%q is JSON, and refused: %v", text, err)
		}
	})
}

func BenchmarkToJSON(b *testing.B) {
	one := in("name", msgp.AppendString(nil, "a product")) // a map of one key
	data, err := msgpack.AppendJSON(nil, []byte(`{"items":[`+strings.Repeat(`{"name":"a product","price":12.5,"count":3},`, 49)+`{"name":"last","price":1,"count":3}]}`))
	if err != nil {
		b.Fatal(err)
	}
	for name, data := range map[string][]byte{"small": one, "items": data} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(len(data)))
			for b.Loop() {
				if _, err := msgpack.ToJSON(data, limit); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
