package bustest

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// atOnce is how many tests run beside each other where nobody says. What drains
// waits for half a second, and nearly every test with a broker waits for that
// and for nothing else.
const atOnce = "8"

// Main runs the tests of a package whose tests wait more than they work, and
// fails when they leave a goroutine behind.
func Main(m *testing.M, options ...goleak.Option) {
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if !given {
		if err := flag.Set("test.parallel", atOnce); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1) //nolint:forbidigo // this is main
		}
	}
	goleak.VerifyTestMain(m, options...)
}
