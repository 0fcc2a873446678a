package config_test

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/config"
)

// file has a field of everything that can be read.
type file struct {
	Name     string            `yaml:"name"`
	Mode     mode              `yaml:"mode"`
	Size     int               `yaml:"size"`
	Small    int8              `yaml:"small"`
	Count    uint16            `yaml:"count"`
	Address  netip.Addr        `yaml:"address"`
	Ratio    float64           `yaml:"ratio"`
	On       bool              `yaml:"on"`
	Wait     time.Duration     `yaml:"wait"`
	MaybeFor *time.Duration    `yaml:"maybe_for"`
	Limit    int               `yaml:"limit,size"`
	List     []string          `yaml:"list"`
	Numbers  []float64         `yaml:"numbers"`
	Labels   map[string]string `yaml:"labels"`
	Any      map[string]any    `yaml:"any"`
	Stages   map[string]stage  `yaml:"stages"`
	Part     config.Section    `yaml:"part"`
	Most     int64             `yaml:"most,size"`
	Key      string            `yaml:"key,path"`
	Weights  weights           `yaml:"weights"`
	Gate     *batch            `yaml:"gate,value"`
	Inline   inline            `yaml:",inline"`
	Parts    []parts           `yaml:"parts"`
	embedded

	Skipped  string `yaml:"-"`
	Untagged string
}

type embedded struct {
	Below string `yaml:"below,path"`
}

type inline struct {
	Inner string `yaml:"inner"`
}

type parts int

func (p *parts) UnmarshalYAML(decode func(any) error) error {
	var list []string
	err := decode(&list)
	*p = parts(len(list))
	return err
}

type mode string

type stage struct {
	Batch *batch  `yaml:"batch"`
	Steps []batch `yaml:"steps"`
}

type weights struct {
	One int `yaml:"one"`
	Two int `yaml:"two"`
}

func (w *weights) SetDefaults() { *w = weights{One: 1, Two: 2} }

type batch struct {
	MaxSize int `yaml:"max_size"`
}

func parse(text string) (file, *config.Doc, error) {
	var f file
	doc, err := config.Parse("f.yaml", "etc", []byte(text), &f)
	return f, doc, err
}

func TestEveryTypeIsRead(t *testing.T) {
	t.Parallel()
	got, _, err := parse(`
name: a mesh   # with a comment
mode: eager
size: -12
small: +7
count: 65535
address: "::1"
ratio: 1e-3
on: True
wait: 1m30s
maybe_for: 250ms
limit: 4MiB
list: [a, "b", 3, true, 0x10, 010, '']
numbers: [1, .5, -2.5e1]
most: 64KiB
key: a.key
below: /b.key
inner: x
parts: [[], [a, b]]
labels: {1: one, true: yes}
any: {flag: false, whole: 3, large: 18446744073709551615, real: 0.5, word: x, quoted: "3", none: ~, list: [1, [a]], keys: {a: b}}
stages:
  a:
    batch: {max_size: 1}
    steps:
    - max_size: 2
    - {}
  b:
    batch: {}
  c:
weights: {two: 0}
`)
	if err != nil {
		t.Fatal(err)
	}
	wait := 250 * time.Millisecond
	want := file{
		Name: "a mesh", Mode: "eager", Size: -12, Small: 7, Count: 65535, Address: netip.MustParseAddr("::1"), Ratio: 1e-3, On: true,
		Wait: 90 * time.Second, MaybeFor: &wait, Limit: 4 << 20,
		List: []string{"a", "b", "3", "true", "0x10", "010", ""}, Numbers: []float64{1, .5, -25},
		Labels: map[string]string{"1": "one", "true": "yes"},
		Most:   64 << 10, Key: filepath.Join("etc", "a.key"), Inline: inline{"x"}, Parts: []parts{0, 2}, embedded: embedded{Below: "/b.key"}, Weights: weights{One: 1},
		Any: map[string]any{
			"flag": false, "whole": int64(3), "large": uint64(math.MaxUint64), "real": 0.5, "word": "x", "quoted": "3",
			"none": nil, "list": []any{int64(1), []any{"a"}}, "keys": map[string]any{"a": "b"},
		},
		Stages: map[string]stage{
			"a": {Batch: &batch{MaxSize: 1}, Steps: []batch{{MaxSize: 2}, {}}},
			"b": {Batch: &batch{}},
			"c": {},
		},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got\n%+v, want\n%+v", got, want)
	}
}

func TestEmptyFileChangesNothing(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{
		"empty": "", "a comment": "# nothing\n", "a document without anything": "---\n", "null": "~",
		"keys without values": "name:\nsize:\nlist:\nstages:\nmaybe_for: null\npart:\n", "no keys": "{}",
		"a byte order mark": "\uFEFF",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			wait := time.Second
			f := file{Name: "before", Size: 3, MaybeFor: &wait, List: []string{"x"}}
			if _, err := config.Parse("f.yaml", "etc", []byte(text), &f); err != nil {
				t.Fatal(err)
			}
			f.Part = config.Section{}
			if want := (file{Name: "before", Size: 3, MaybeFor: &wait, List: []string{"x"}}); !reflect.DeepEqual(f, want) {
				t.Errorf("got %+v, want %+v", f, want)
			}
		})
	}
}

func TestMismatchesAreRejectedAtTheirPlace(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ text, want string }{
		"text for a whole number":      {"stages:\n  a:\n    batch: {max_size: 0x}", `f.yaml:3:23: stages.a.batch.max_size: "0x" is not a whole number`},
		"a fraction":                   {"size: 1.5", `f.yaml:1:7: size: "1.5" is not a whole number`},
		"a fraction of nothing":        {"size: 2.0", `f.yaml:1:7: size: "2.0" is not a whole number`},
		"a number in quotes":           {`size: "3"`, `f.yaml:1:7: size: "3" in quotes is text and not a whole number`},
		"a number of programmers":      {"size: 0x10", `f.yaml:1:7: size: "0x10" is not a whole number`},
		"a list for a number":          {"size: [1]", `f.yaml:1:7: size: a list is not a whole number`},
		"keys for a number":            {"size:\n  a: b", `f.yaml:2:3: size: a set of keys is not a whole number`},
		"too large a number":           {"small: 128", `f.yaml:1:8: small: "128" is too large`},
		"a negative count":             {"count: -1", `f.yaml:1:8: count: "-1" is not a whole number from 0 on`},
		"a list for a text type":       {"address: [1]", `f.yaml:1:10: address: a list is not a single value`},
		"text its type rejects":        {"address: x", `f.yaml:1:10: address: `},
		"text for a number":            {"ratio: x", `f.yaml:1:8: ratio: "x" is not a number`},
		"not a number":                 {"ratio: .nan", `f.yaml:1:8: ratio: ".nan" is not a number`},
		"infinity":                     {"ratio: .inf", `f.yaml:1:8: ratio: ".inf" is not a number`},
		"too large a float":            {"ratio: 1e999", `f.yaml:1:8: ratio: "1e999" is too large`},
		"too large for anything":       {"any: {a: [1e999]}", `f.yaml:1:11: any.a[0]: "1e999" is too large`},
		"yes":                          {"on: yes", `f.yaml:1:5: on: "yes" is not true or false`},
		"a truth in quotes":            {`on: "true"`, `f.yaml:1:5: on: "true" in quotes is text and not true or false`},
		"a number for a truth":         {"on: 1", `f.yaml:1:5: on: "1" is not true or false`},
		"a duration without a unit":    {"wait: 5", `f.yaml:1:7: wait: "5" is not a duration such as 250ms, 5s or 1m30s`},
		"a duration of days":           {"maybe_for: 1d", `f.yaml:1:12: maybe_for: "1d" is not a duration such as 250ms, 5s or 1m30s`},
		"a list for a duration":        {"wait: [5s]", `f.yaml:1:7: wait: a list is not a duration such as 250ms, 5s or 1m30s`},
		"an unknown unit":              {"limit: 4MX", `f.yaml:1:8: limit: "4MX" is not a size: use a number of bytes, or one with KiB, MiB, GiB, kB, MB or GB`},
		"a list for a size":            {"limit: [1]", `f.yaml:1:8: limit: a list is not a single value`},
		"keys for text":                {"name: {a: b}", `f.yaml:1:7: name: a set of keys is not text; if it is to be, put what has a colon in quotes`},
		"text for a list":              {"list: a", `f.yaml:1:7: list: "a" is not a list`},
		"text for a type of its own":   {"parts: [a]", `f.yaml:1:9: parts[0]: "a" is not a list`},
		"a key that needs a value":     {"gate:", `f.yaml:1:1: gate: has no value; give it one or remove the key`},
		"a hole in a list":             {"list: [a, ]\nnumbers:\n- 1\n-\n- 2", `f.yaml:4:2: numbers[1]: nothing is not allowed in a list`},
		"a list in a list":             {"list: [[a]]", `f.yaml:1:8: list[0]: a list is not text`},
		"a list for keys":              {"stages: [a]", `f.yaml:1:9: stages: a list is not a set of keys`},
		"text for keys":                {"stages: {a: 5}", `f.yaml:1:13: stages.a: "5" is not a set of keys`},
		"a list for the file":          {"- a", `f.yaml:1:1: a list is not a set of keys`},
		"text for the file":            {"hello", `f.yaml:1:1: "hello" is not a set of keys`},
		"an unknown key":               {"stages:\n  a:\n    batch:\n      max_sise: 3", `f.yaml:4:7: stages.a.batch: "max_sise" is not a key here; there are max_size`},
		"an unknown key at the top":    {"naem: x", `f.yaml:1:1: "naem" is not a key here; there are address, any, below, count, `},
		"a number for a key":           {"1: x", `f.yaml:1:1: "1" is not a key here`},
		"a key that is skipped":        {"Skipped: x", `f.yaml:1:1: "Skipped" is not a key here`},
		"a key without a tag":          {"untagged: x", `f.yaml:1:1: "untagged" is not a key here`},
		"a key in a list":              {"stages: {a: {steps: [{max_size: 1}, {size: 2}]}}", `f.yaml:1:38: stages.a.steps[1]: "size" is not a key here; there are max_size`},
		"a duplicate":                  {"name: a\nsize: 1\nname: b", `f.yaml:3:1: "name" is there twice, first on line 1`},
		"a duplicate deeper":           {"stages:\n  a: {batch: {}, batch: {}}", `f.yaml:2:18: "batch" is there twice, first on line 2`},
		"a duplicate in anything":      {"any:\n  x: {y: 1, \"y\": 2}", `f.yaml:2:13: "y" is there twice, first on line 2`},
		"a second document":            {"name: a\n---\nname: b", `f.yaml:2:1: a second document begins here; a file has one`},
		"a document after the end":     {"name: a\n...\nname: b", `f.yaml:3:1: a second document begins here; a file has one`},
		"an empty document before one": {"---\n---\nname: b", `f.yaml:2:1: a second document begins here; a file has one`},
		"a directive":                  {"%YAML 1.2\n---\nname: a", `f.yaml:1:1: directives are not accepted`},
		"a tag":                        {"name: !!str 5", `f.yaml:1:7: tags are not accepted; quotes make text of a number`},
		"an anchor that is not there":  {"name: *nobody", `f.yaml:1:7: there is no anchor &nobody before this`},
		"an anchor that comes later":   {"list: [*a]\nname: &a x", `f.yaml:1:8: there is no anchor &a before this`},
		"an anchor in itself":          {"any: &a {x: *a}", `f.yaml:1:13: there is no anchor &a before this`},
		"a merge of text":              {"any: {<<: x}", `f.yaml:1:11: "x" cannot be merged; << takes a set of keys`},
		"a key that is a list":         {"? [a]\n: b", `f.yaml:2:1: found an invalid key for this map`},
		"an open quote":                {"name: \"abc", `f.yaml:1:7: could not find end character of double-quoted text`},
		"a tab":                        {"\tname: a", `f.yaml:1:5: tab character cannot use as a map key directly`},
		"bytes that are no text":       {"name: a\nlist: [\xff]", "f.yaml:2:8: this is not UTF-8 text"},
		"half a surrogate pair":        {`name: "\udc00"`, "f.yaml:1:7: an escape is half a surrogate pair, which no text has"},
		"the other half":               {`name: "\ufffd \U0000D800"`, "f.yaml:1:7: an escape is half a surrogate pair, which no text has"},
		"a zero byte":                  {"name: \x00", "f.yaml:1:7: this is not UTF-8 text"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, _, err := parse(test.text)
			if err == nil || !strings.HasPrefix(err.Error(), test.want) || strings.Contains(err.Error(), "\n") {
				t.Fatalf("got  %v\nwant %s", err, test.want)
			}
			if _, ok := errors.AsType[*config.PositionError](err); !ok {
				t.Errorf("%v is not a PositionError", err)
			}
		})
	}
}

func TestAllMistakesAreReportedInOrder(t *testing.T) {
	t.Parallel()
	_, _, err := parse("size: x\nnope: 1\nwait: y\n")
	want := []string{"f.yaml:1:7: size:", `f.yaml:2:1: "nope"`, "f.yaml:3:7: wait:"}
	lines := strings.Split(fmt.Sprint(err), "\n")
	if len(lines) != len(want) {
		t.Fatalf("got %d lines: %v", len(lines), err)
	}
	for i := range want {
		if !strings.HasPrefix(lines[i], want[i]) {
			t.Errorf("line %d: got %s, want %s", i, lines[i], want[i])
		}
	}
}

func TestNumberOfMessagesIsBounded(t *testing.T) {
	t.Parallel()
	_, _, err := parse("numbers: [" + strings.Repeat(strings.Repeat("x", 1000)+", ", 500) + "x]")
	lines := strings.Split(fmt.Sprint(err), "\n")
	if len(lines) != 21 || lines[20] != "f.yaml: 481 more like these" {
		t.Errorf("got %d lines, the last of them %q", len(lines), lines[len(lines)-1])
	}
	if n := len(err.Error()); n > 4000 {
		t.Errorf("the message has %d bytes", n)
	}
}

func TestAnchorsAndMergesAreExpanded(t *testing.T) {
	t.Parallel()
	got, _, err := parse(`
any:
  small: &small {max_size: 1, max_bytes: 10}
  large: &large {max_size: 100, max_wait: 5ms}
  merged: {<<: *small, max_size: 2}
  both: {<<: [*small, *large]}
  inline: {<<: {a: 1}, b: 2}
name: &name decode
list: [*name, *name]
stages:
  a: &a {batch: &b {max_size: 3}}
  b: *a
  c:
    <<: *a
    steps: [*b]
`)
	if err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]map[string]any{
		"merged": {"max_size": int64(2), "max_bytes": int64(10)},
		"both":   {"max_size": int64(1), "max_bytes": int64(10), "max_wait": "5ms"},
		"inline": {"a": int64(1), "b": int64(2)},
	} {
		if !reflect.DeepEqual(got.Any[key], want) {
			t.Errorf("%s: got %v, want %v", key, got.Any[key], want)
		}
	}
	if !reflect.DeepEqual(got.List, []string{"decode", "decode"}) {
		t.Errorf("got the list %q", got.List)
	}
	three := batch{MaxSize: 3}
	want := map[string]stage{"a": {Batch: &three}, "b": {Batch: &three}, "c": {Batch: &three, Steps: []batch{three}}}
	if !reflect.DeepEqual(got.Stages, want) {
		t.Errorf("got the stages %+v", got.Stages)
	}
	if got.Stages["a"].Batch == got.Stages["b"].Batch {
		t.Error("two stages share one batch in memory")
	}
}

func TestMistakeBehindAliasNamesItsUse(t *testing.T) {
	t.Parallel()
	_, _, err := parse("any:\n  x: &x {max_size: many}\nstages:\n  a: {batch: *x}")
	if want := `f.yaml:2:20: stages.a.batch.max_size: "many" is not a whole number`; fmt.Sprint(err) != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

// Each level has ten times the values of the one before.
func TestAliasesCannotMakeASmallFileLarge(t *testing.T) {
	t.Parallel()
	text := "any:\n  l0: &l0 [x, x, x, x, x, x, x, x, x, x]\n"
	for i := 1; i <= 12; i++ {
		text += fmt.Sprintf("  l%d: &l%d [%s]\n", i, i, strings.Repeat(fmt.Sprintf("*l%d, ", i-1), 9)+fmt.Sprintf("*l%d", i-1))
	}
	_, _, err := parse(text)
	if want := "with all that its aliases stand for, this is more than 50000 values"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want %s", err, want)
	}
}

func TestMergesCannotMakeASmallFileLarge(t *testing.T) {
	t.Parallel()
	text := "any:\n  l0: &l0 {a: 1, b: 2, c: 3, d: 4}\n"
	for i := 1; i <= 20; i++ {
		text += fmt.Sprintf("  l%d: &l%d {a%d: *l%d, <<: *l%d, b%d: *l%d}\n", i, i, i, i-1, i-1, i, i-1)
	}
	if _, _, err := parse(text); err == nil || !strings.Contains(err.Error(), "more than 50000 values") {
		t.Errorf("got %v", err)
	}
}

// The parser takes quadratic time in what these have a lot of.
func TestFilesThatParseSlowlyAreRejected(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ text, want string }{
		"keys":                 {strings.Repeat("k: v\n", 100_000), "more than 50000 words and signs"},
		"brackets":             {"any: {x: " + strings.Repeat("[", 40_000), "nested deeper than 64"},
		"braces":               {strings.Repeat("{a: ", 15_000), "nested deeper than 64"},
		"lists on one line":    {strings.Repeat("- ", 40_000), "nested deeper than 64"},
		"questions":            {strings.Repeat("? ", 40_000), "nested deeper than 64"},
		"indentation":          {deep(1000), "nested deeper than 64"},
		"anchors upon anchors": {"any: " + strings.Repeat("&a ", 10_000), "f.yaml:1:"},
		"bytes":                {"# " + strings.Repeat("x", 1<<20), "f.yaml: larger than 1MiB"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			begin := time.Now()
			_, _, err := parse(test.text)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %s", err, test.want)
			}
			t.Logf("refused after %s", time.Since(begin))
		})
	}
}

func deep(levels int) string {
	var out strings.Builder
	for i := range levels {
		out.WriteString(strings.Repeat(" ", i) + "any:\n")
	}
	return out.String()
}

func TestLoadReadsFiles(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "mesh.yaml")
	if err := os.WriteFile(path, []byte("name: a\nsize: x"), 0o600); err != nil {
		t.Fatal(err)
	}
	var f file
	if _, err := config.Load(path, &f); err == nil || !strings.HasPrefix(err.Error(), path+":2:7: size: ") {
		t.Errorf("got %v", err)
	}
	if _, err := config.Load(path+".nope", &f); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), path+".nope") {
		t.Errorf("got %v", err)
	}
	if _, err := config.Load(t.TempDir(), &f); err == nil {
		t.Error("a folder is read")
	}
	if err := os.WriteFile(path, make([]byte, 2<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := config.Load(path, &f); err == nil || !strings.Contains(err.Error(), "larger than 1MiB") {
		t.Errorf("got %v", err)
	}
}

func TestUnsupportedTargetsAreErrors(t *testing.T) {
	t.Parallel()
	var channel struct {
		C chan int `yaml:"c"`
	}
	var byNumber struct {
		C map[int]string `yaml:"c"`
	}
	var stringer struct {
		C fmt.Stringer `yaml:"c"`
	}
	var nowhere *file
	for name, into := range map[string]any{
		"no pointer": file{}, "nil": nil, "a nil pointer": nowhere,
		"a channel": &channel, "a map by number": &byNumber, "an interface with methods": &stringer,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if _, err := config.Parse("f.yaml", "etc", []byte("c: {1: x}"), into); err == nil || !strings.Contains(err.Error(), "a file cannot be read into a") {
				t.Errorf("got %v", err)
			}
		})
	}
}
