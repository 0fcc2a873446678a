package fault_test

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

const document = "../../docs/faults.md"

var update = flag.Bool("update", false, "write the table into "+document)

// rows returns the table of reasons as Markdown.
func rows() string {
	var b strings.Builder
	b.WriteString("| reason | gRPC code | HTTP status | retryable | meaning |\n|---|---|---|---|---|\n")
	for _, r := range fault.Reasons() {
		class := fault.Classify(r)
		fmt.Fprintf(&b, "| %s | %s | %d | %s | %s |\n", r, class.Code, class.HTTP, yes(class.Retryable), class.Meaning)
	}
	return b.String()
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

func TestDocsListEveryReason(t *testing.T) {
	t.Parallel()
	text := testbed.ReadFile(t, document)
	head, rest, begins := strings.Cut(string(text), "<!-- reasons: begin")
	line, rest, _ := strings.Cut(rest, "\n")
	table, tail, ends := strings.Cut(rest, "<!-- reasons: end -->")
	if !begins || !ends {
		t.Fatalf("%s has no place for the table", document)
	}
	if table == rows() {
		return
	}
	if !*update {
		t.Fatalf("%s differs from the table; run this test with -update\ngot:\n%s\nwant:\n%s", document, table, rows())
	}
	out := head + "<!-- reasons: begin" + line + "\n" + rows() + "<!-- reasons: end -->" + tail
	if err := os.WriteFile(document, []byte(out), 0o644); err != nil {
		t.Fatal(err)
	}
}
