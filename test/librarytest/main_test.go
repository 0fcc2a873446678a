package librarytest

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// A broker that ends while a queue is being made forgets the clock that all
// brokers of a process share; there is one of it, however many meshes there
// were.
func TestMain(m *testing.M) {
	testbed.Main(m, goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"))
}
