package process_test

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/internal/process"
)

// patientVariable says that the test binary is to be a process that does not end,
// whatever signal it gets.
const patientVariable = "PROCESS_TEST_PATIENT"

func TestMain(m *testing.M) {
	if os.Getenv(patientVariable) != "" {
		bePatient()
	}
	goleak.VerifyTestMain(m)
}

func bePatient() {
	ctx, _ := process.SignalContext(context.Background())
	drain, _ := process.DrainContext(ctx, time.Hour)
	for _, end := range []struct {
		of   context.Context
		says string
	}{{context.Background(), "ready"}, {ctx, "draining"}, {drain, "shutdown"}} {
		if end.of.Done() != nil {
			<-end.of.Done()
		}
		fmt.Println(end.says) //nolint:forbidigo // its output is looked at
	}
	select {}
}
