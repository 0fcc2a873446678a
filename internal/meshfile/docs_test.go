package meshfile_test

import (
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/modelserver"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/runners"
	"github.com/stagemesh/stagemesh/stagehost"
)

// reference, jobsReference and blocksReference are what docs_test holds against the File; the paths start at
// this package's folder.
const (
	reference       = "../../docs/configuration.md"
	jobsReference   = "../../docs/configuration-jobs.md"
	blocksReference = "../../docs/graphs.md"
)

func text(t *testing.T, page string) string {
	t.Helper()
	data := testbed.ReadFile(t, page)
	return string(data)
}

// settings lists the settings of each kind of runner.
var settings = map[string]reflect.Type{
	"image_decode": reflect.TypeFor[runners.ImageDecodeSettings](),
	"model_server": reflect.TypeFor[modelserver.Settings](),
	"onnx":         reflect.TypeFor[runners.OnnxSettings](),
	"onnx_models":  reflect.TypeFor[runners.OnnxModelsSettings](),
	"top_k":        reflect.TypeFor[runners.TopKSettings](),
	"echo":         reflect.TypeFor[runners.EchoSettings](),
	"echo_models":  reflect.TypeFor[runners.EchoSettings](),
	"worker":       reflect.TypeFor[runners.WorkerSettings](),
	"sleep":        reflect.TypeFor[runners.SleepSettings](),
	"burn":         reflect.TypeFor[runners.BurnSettings](),
	"stream":       reflect.TypeFor[runners.StreamSettings](),
}

// Each section of the reference has a table of exactly the keys that there are.
func TestReferenceHasExactlyTheKeys(t *testing.T) {
	t.Parallel()
	documented := sections(text(t, reference) + text(t, jobsReference) + text(t, blocksReference))
	there := keysOf("", reflect.TypeFor[meshfile.File]())
	for kind, of := range settings {
		maps.Copy(there, keysOf("stages.<name>.runner."+kind, of))
		there["stages.<name>.runner"] = append(there["stages.<name>.runner"], kind)
	}
	for section, keys := range there {
		if section == "" {
			section = "the file"
		}
		listed, ok := documented[section]
		if !ok {
			t.Errorf("there is no section %q", section)
			continue
		}
		for _, key := range keys {
			if !slices.Contains(listed, key) {
				t.Errorf("section %q does not have the key `%s`", section, key)
			}
		}
		for _, key := range listed {
			if !slices.Contains(keys, key) {
				t.Errorf("section %q has the key `%s`, which there is not", section, key)
			}
		}
	}
}

// Where the code has a constant, the reference has its value.
func TestReferenceDefaultsMatchTheCode(t *testing.T) {
	t.Parallel()
	page := text(t, reference)
	for row, want := range map[string]string{
		"`crash_limit` | number":   fmt.Sprint(stagehost.DefaultCrashLimit),
		"`max_items` | number":     fmt.Sprint(stagehost.DefaultMaxItems),
		"`max_bytes` | size":       config.Bytes(stagehost.DefaultMaxBytes).String(),
		"`ack_wait` | duration":    stagehost.DefaultAckWait.String(),
		"`retention` | duration":   strconv.Itoa(int(store.DefaultResultRetention.Hours())) + "h",
		"`max_timeout` | duration": strconv.Itoa(int(call.DefaultMaxTimeout.Minutes())) + "m",
		"`timeout` | duration":     call.DefaultTimeout.String(),
		"`host_grace` | duration":  bus.DefaultHostGrace.String(),
		"`max_in_flight` | number": fmt.Sprint(call.DefaultMaxInFlight),
	} {
		if !strings.Contains(page, "| "+row+" | "+want+" |") {
			t.Errorf("the default of %s is %s", row, want)
		}
	}
	for _, want := range []string{
		fmt.Sprintf("defaults to %s, or", config.Bytes(gateway.DefaultMaxInFlightBytes)),
		fmt.Sprintf("| `retention` | duration | %dh |", int(store.DefaultDeadLetterRetention.Hours())),
		fmt.Sprintf("| `max_bytes` | size | %s | all results", config.Bytes(store.DefaultMaxBytes)),
		fmt.Sprintf("| `max_bytes` | size | %s | all dead letters", config.Bytes(store.DefaultMaxBytes)),
		fmt.Sprintf("| `max_bytes` | size | %s | all keys", config.Bytes(store.DefaultMaxBytes)),
	} {
		if !strings.Contains(page, want) {
			t.Errorf("there is no %s", want)
		}
	}
}

// A message about a kind that there is not lists all that there are.
func TestReferenceHasEveryRunnerKind(t *testing.T) {
	t.Parallel()
	_, err := meshfile.Parse("x", []byte("mesh: m\nstages: {s: {runner: {other: {}}}}"), "", runners.All()...)
	if err == nil {
		t.Fatal("a kind that there is not was taken")
	}
	message := fmt.Sprint(err)
	for kind := range settings {
		if !strings.Contains(message, kind) {
			t.Errorf("%q does not list %s", message, kind)
		}
	}
	if got := len(runners.All()); got != len(settings) {
		t.Errorf("there are %d kinds of runners, this test and %s know %d", got, reference, len(settings))
	}
}

var (
	heading = regexp.MustCompile("^#+ `?(.*?)`?$")
	keyCell = regexp.MustCompile("^\\| `([a-z_]+)` \\|")
)

// sections returns the keys in the first column of each section's tables. A heading may
// name several sections.
func sections(text string) map[string][]string {
	out := map[string][]string{}
	var at []string
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if match := heading.FindStringSubmatch(line); match != nil {
			at = strings.Split(strings.ToLower(match[1]), "` and `")
			for _, section := range at {
				out[section] = nil
			}
		}
		if match := keyCell.FindStringSubmatch(line); match != nil {
			for _, section := range at {
				out[section] = append(out[section], match[1])
			}
		}
	}
	return out
}

// keysOf returns the keys of a struct and of those in it, by the path to it:
// "stages.<name>.runner". Maps of structs are by name, lists by [].
func keysOf(at string, of reflect.Type) map[string][]string {
	out := map[string][]string{}
	for i := range of.NumField() {
		field := of.Field(i)
		key, option, _ := strings.Cut(field.Tag.Get("yaml"), ",")
		if option == "inline" || field.Anonymous && key == "" {
			for section, keys := range keysOf(at, field.Type) {
				out[section] = append(out[section], keys...)
			}
			continue
		}
		if key == "" || key == "-" {
			continue
		}
		out[at] = append(out[at], key)
		path := key
		if at != "" {
			path = at + "." + key
		}
		below, inner := structIn(path, field.Type)
		isInBlock := inner == reflect.TypeFor[pipeline.Step]() && strings.Contains(at, "steps[]")
		if inner == nil || inner == of || isInBlock { // a gate has gates, and a block steps
			continue
		}
		for section, keys := range keysOf(below, inner) {
			out[section] = keys
		}
	}
	return out
}

func structIn(path string, of reflect.Type) (string, reflect.Type) {
	switch of.Kind() {
	case reflect.Pointer:
		return structIn(path, of.Elem())
	case reflect.Map:
		return structIn(path+".<name>", of.Elem())
	case reflect.Slice:
		return structIn(path+"[]", of.Elem())
	case reflect.Struct:
		return path, of
	default:
		return path, nil
	}
}
