package local_test

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// atOnce is how many tests run beside each other where nobody says. A mesh
// takes half a second to drain, and nearly every test waits for that and for
// nothing else.
const atOnce = "8"

// A broker that ends while a queue is being made forgets the clock that all
// brokers of a process share; there is one of it, however many meshes there
// were.
func TestMain(m *testing.M) {
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if !given {
		if err := flag.Set("test.parallel", atOnce); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1) //nolint:forbidigo // this is main
		}
	}
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"))
}
