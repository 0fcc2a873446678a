package main

import (
	"bytes"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

// A broker that ends while a queue is being made forgets the clock that all brokers of a
// process share.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"))
}

func TestPagesAreRead(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := run(t.Context(), &out, false); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	for _, want := range []string{
		"50 of 50 digits right",
		"INVALID_INPUT", "the page is empty",
		"look/sharp/sharpness", "digits[", "/classify", // the blocks' paths
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}

func TestTreeHasTypes(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := run(t.Context(), &out, true); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"├─ look  parallel, all within 2s -> sharp FP32[1], tiles FP32[-1,64]\n",
		"│  ├─ classify  classify",
		"└─ say  try within 150ms -> text BYTES[1]\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}
