package questions_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/bench/compare"
	"github.com/stagemesh/stagemesh/bench/questions"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == compare.PartName {
		// It is a process of a mesh.
		if err := execute(context.Background(), compare.NewPartCommand(), os.Args[2:]...); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1) //nolint:forbidigo // it is that program's main
		}
		os.Exit(0) //nolint:forbidigo // it is that program's main
	}
	testbed.Main(m)
}

func execute(ctx context.Context, cmd *cobra.Command, args ...string) error {
	cmd.SetArgs(args)
	return cmd.ExecuteContext(ctx)
}

func TestMeasurementHasValues(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	cmd := questions.NewModels()
	cmd.SetOut(&out)
	if err := execute(t.Context(), cmd, "burst", "--pairs", "2", "--json", "-"); err != nil {
		t.Fatal(err)
	}
	report, err := compare.ReadJSON(&out)
	if err != nil || len(report.Values) != 1 || len(report.Values["queue"]) != 2 {
		t.Fatalf("got %+v, %v", report, err)
	}
	for _, value := range report.Values["queue"] {
		if value < 1 || value > 3 {
			t.Errorf("the longest of three queues has %v of the mean", value)
		}
	}
}

func TestCommandNamesWrongArguments(t *testing.T) {
	t.Parallel()
	for want, args := range map[string][]string{
		"give one of burst, cold, ":           {"nothing"},
		"--pairs and --duration: are above 0": {"burst", "--pairs", "0"},
	} {
		if err := execute(t.Context(), questions.NewModels(), args...); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v: %v", args, err)
		}
	}
}
