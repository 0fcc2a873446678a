package cli

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/sdk/python"
)

// checkGrace is how long a check that is stopped may take to stop its worker.
const checkGrace = 5 * time.Second

var errCheck = errors.New("the worker does not pass; the report above says why")

// newCheck returns the command that runs stagemesh.check of the Python SDK in this program.
func newCheck() *cobra.Command {
	var options string
	var models []string
	var maxSize int
	var patience time.Duration
	check := &cobra.Command{
		Use:     "check FILE",
		Short:   "Run a worker in Python as a host does, and report what is wrong with it",
		Example: "  stagemesh check classify.py --max-size 8",
		Args:    between(1, 1, "give one FILE to check"),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := process.SignalContext(cmd.Context())
			defer stop()
			folder, err := os.MkdirTemp("", "stagemesh-check-")
			if err != nil {
				return err
			}
			defer os.RemoveAll(folder) //nolint:errcheck // it is temporary
			if err := os.CopyFS(folder, python.Files()); err != nil {
				return err
			}
			run := exec.CommandContext(ctx, "python3", "-m", "stagemesh.check", "--options", options, "--max-size", strconv.Itoa(maxSize), fmt.Sprintf("--patience=%f", patience.Seconds()))
			for _, model := range models {
				run.Args = append(run.Args, "--model", model)
			}
			run.Args = append(run.Args, "--", args[0])
			paths := append(filepath.SplitList(os.Getenv("PYTHONPATH")), folder)
			run.Env = append(os.Environ(), "PYTHONPATH="+strings.Join(paths, string(filepath.ListSeparator)))
			run.Stdin, run.Stdout, run.Stderr = cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr()
			// The terminal sends its signal to the worker as well, and a second one would cut its end short.
			run.Cancel, run.WaitDelay = func() error { return nil }, checkGrace
			err = run.Run()
			if ctx.Err() != nil {
				return errors.New("the check was interrupted")
			}
			if _, failed := errors.AsType[*exec.ExitError](err); failed {
				return errCheck
			}
			return err
		},
	}
	check.Flags().StringVar(&options, "options", "{}", "ctx.options of setup, a JSON object")
	check.Flags().StringArrayVar(&models, "model", nil, "a model of a worker with several, as ID=SOURCE")
	check.Flags().IntVar(&maxSize, "max-size", 32, "rows of the largest batch")
	check.Flags().DurationVar(&patience, "patience", time.Minute, "how long to wait for each answer, such as that of setup")
	return check
}
