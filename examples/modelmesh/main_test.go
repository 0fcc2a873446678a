package main

import (
	"bytes"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

// A broker that ends while a queue is being made forgets the clock that all
// brokers of a process share.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"))
}

func TestReadersAnswerAsThemselves(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := run(t.Context(), &out, 400, "error", sendZipf); err != nil {
		t.Fatal(err)
	}
	figure := func(pattern string) float64 {
		t.Helper()
		found := regexp.MustCompile("(?m)^" + pattern).FindSubmatch(out.Bytes())
		if found == nil {
			t.Fatalf("no %s in\n%s", pattern, out.String())
		}
		value, err := strconv.ParseFloat(string(found[1]), 64)
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
	requests, hits := figure(`requests +(\d+)$`), figure(`hits +(\d+) of `)
	loads, evictions := figure(`loads +(\d+)$`), figure(`evictions +(\d+)$`)
	if requests != 400 || hits < 1 || loads <= evictions || evictions < 1 || loads-evictions > 110 {
		t.Errorf("the figures are\n%s", out.String())
	}
	// An answer of another model is wrong in nine of ten cases.
	if softmax, network := figure(`softmax .* accuracy ([\d.]+)$`), figure(`network .* accuracy ([\d.]+)$`); softmax < 0.9 || network < 1 {
		t.Errorf("the accuracies are\n%s", out.String())
	}
}

func TestAliasMovesUnderLoadWithoutFailures(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := run(t.Context(), &out, 1200, "error", switchReaders); err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{
		`reader-000 +\d+ by reader 0`, `reader-new, which is reader 1 +\d+ by reader 1`,
		`shadow: 50 % also to reader-011 +\d+ by reader 1`, `shadow: 50 % also to reader-003 +\d+ by reader 1`,
		// Of 200 each, and of those while the alias changes.
		`answers of shadows +([5-9]\d|[1-3]\d\d) equal, ([5-9]\d|[1-3]\d\d) different, 0 failed, 0 dropped`,
		`failed requests +0`,
	} {
		if !regexp.MustCompile("(?m)^" + line + "$").Match(out.Bytes()) {
			t.Errorf("no %s in\n%s", line, out.String())
		}
	}
	// Of 200, and of those until the phase ends.
	var stable, canary int
	_, line, _ := strings.Cut(out.String(), "canary: 10 % to reader-002")
	if _, err := fmt.Sscanf(line, "%d by reader 1, %d by reader 2\n", &stable, &canary); err != nil || stable+canary < 200 || 40*canary < stable+canary || 4*canary >= stable+canary {
		t.Errorf("the canary has %d of %d answers, %v, in\n%s", canary, stable+canary, err, out.String())
	}
}
