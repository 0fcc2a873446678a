package copies_test

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/services/meshtest/copies"
)

func TestMain(m *testing.M) {
	if copies.IsProgram() {
		os.Exit(copies.Main()) //nolint:forbidigo // this is main
	}
	goleak.VerifyTestMain(m)
}
