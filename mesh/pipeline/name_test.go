package pipeline_test

import (
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestNamesAreDNSLabels(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		name string
		ok   bool
	}{
		"one letter":        {"a", true},
		"one digit":         {"0", true},
		"letters and more":  {"image-decode-2", true},
		"as long as may be": {strings.Repeat("a", 63), true},
		"too long":          {strings.Repeat("a", 64), false},
		"empty":             {"", false},
		"only a hyphen":     {"-", false},
		"hyphen first":      {"-a", false},
		"hyphen last":       {"a-", false},
		"upper case":        {"Classify", false},
		"a subject's dot":   {"a.b", false},
		"a wildcard":        {"*", false},
		"everything":        {">", false},
		"a space":           {"a b", false},
		"a line break":      {"a\n", false},
		"a letter of two":   {"é", false},
		"not UTF-8":         {"\xff", false},
		"a NUL":             {"a\x00", false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := pipeline.ValidName("stage", test.name)
			if (err == nil) != test.ok {
				t.Fatalf("got %v", err)
			}
			if err != nil && !strings.HasPrefix(err.Error(), `stage name "`) {
				t.Errorf("the message does not say what is named: %v", err)
			}
		})
	}
}

func TestPipelinesHaveTheNamesOfTritonsModels(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"a", "Z", "0", "digits", "ResNet-50_v1.5", "a..b", "true", "1e5", "stagemesh", "grpcs.x", "inference.GRPCInferenceServices", strings.Repeat("A", 63)} {
		if err := pipeline.ValidPipelineName(name); err != nil {
			t.Error(err)
		}
	}
	for _, name := range []string{
		"", ".", "..", "_epoch", "a_", "-a", "a.", "a/b", "a:b", "stage:a", "a b", "a\n", "é", "\xff", "*", strings.Repeat("a", 64), strings.Repeat("\xff", 1<<20),
		"stagemesh.inference.v1.InferenceService", "grpc.health.v1.Health", "inference.GRPCInferenceService",
	} {
		if err := pipeline.ValidPipelineName(name); err == nil || len(err.Error()) > 512 {
			t.Errorf("%.80q: %.600v", name, err)
		}
	}
}

func TestNameErrorsAreShort(t *testing.T) {
	t.Parallel()
	if err := pipeline.ValidName("stage", strings.Repeat("\xff", 1<<20)); err == nil || len(err.Error()) > 512 {
		t.Fatalf("the message has %d bytes", len(err.Error()))
	}
}

// valid is the grammar of DESIGN, written another way.
func valid(name string) bool {
	const edge = "abcdefghijklmnopqrstuvwxyz0123456789"
	return name != "" && len(name) <= 63 && strings.Trim(name, edge+"-") == "" &&
		strings.ContainsRune(edge, rune(name[0])) && strings.ContainsRune(edge, rune(name[len(name)-1]))
}

func FuzzOnlyDNSLabelsAreNames(f *testing.F) {
	for _, name := range []string{"a", "a-b", "-", "A", "a.b", "\xff", strings.Repeat("a", 64)} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		if got := pipeline.ValidName("step", name) == nil; got != valid(name) {
			t.Fatalf("%q: valid = %t", name, got)
		}
	})
}
