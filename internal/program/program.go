// Package program is what every program of this repository has beside its work: flags
// that are also variables of the environment, a log, and the port for operators.
//
//	flags := program.AddFlags(cmd)
//	cmd.RunE = program.WithEnvironment(func(cmd *cobra.Command, args []string) error {
//		log, err := flags.Apply(cmd.ErrOrStderr())
//		...
//		return program.Run(ctx, program.Settings{Listen: ops, Key: "--ops", Logger: log}, work)
//	})
package program

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/stagemesh/stagemesh/internal/cpuset"
)

// Flags configure a program's log and process.
type Flags struct {
	// Level is debug, info, warn or error.
	Level string
	// Format is text or json.
	Format string
	// CPUs is a set such as 0-3,6; empty means all.
	CPUs string
}

// AddFlags adds the flags to a command, which fills them in.
func AddFlags(cmd *cobra.Command) *Flags {
	f := &Flags{}
	cmd.Flags().StringVar(&f.Level, "log-level", "info", "debug, info, warn or error")
	cmd.Flags().StringVar(&f.Format, "log-format", "text", "text or json")
	cmd.Flags().StringVar(&f.CPUs, "cpus", "", "the CPUs of this process, such as 0-3,6; workers have cpus of their own")
	return f
}

// Apply has the process run on the CPUs of the flags, and returns the logger that they describe.
func (f Flags) Apply(out io.Writer) (*slog.Logger, error) {
	if f.CPUs != "" {
		cpus, err := cpuset.Parse(f.CPUs)
		if err == nil {
			err = cpuset.PinProcess(cpus)
		}
		if err != nil {
			return nil, fmt.Errorf("--cpus: %w", err)
		}
	}
	var at slog.Level
	if err := at.UnmarshalText([]byte(f.Level)); err != nil {
		return nil, fmt.Errorf("--log-level: %q is not debug, info, warn or error", f.Level)
	}
	options := &slog.HandlerOptions{Level: at}
	switch f.Format {
	case "text":
		return slog.New(slog.NewTextHandler(out, options)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(out, options)), nil
	}
	return nil, fmt.Errorf("--log-format: %q is not text or json", f.Format)
}

// EnvironmentHelp is the sentence of a command's help about its variables.
const EnvironmentHelp = "Each flag may be set by an environment variable instead, such as STAGEMESH_LOG_LEVEL for --log-level; a flag overrides its\nvariable."

// Variable returns the name of a flag's variable.
func Variable(flag string) string {
	return "STAGEMESH_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// WithEnvironment returns a function that runs the command with the flags that the
// environment sets. Errors about such a flag, which begin with it, name the variable.
func WithEnvironment(run func(*cobra.Command, []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		set, err := applyEnvironment(cmd.Flags())
		if err != nil {
			return err
		}
		return nameVariable(run(cmd, args), set)
	}
}

// applyEnvironment sets the flags that were not given and have a variable, and returns
// them. An empty variable counts as unset.
func applyEnvironment(flags *pflag.FlagSet) (set []string, err error) {
	flags.VisitAll(func(f *pflag.Flag) {
		value := os.Getenv(Variable(f.Name))
		if err != nil || value == "" || f.Changed || f.Name == "help" || f.Name == "version" {
			return
		}
		set = append(set, f.Name)
		err = nameVariable(flags.Set(f.Name, value), set)
	})
	return set, err
}

// nameVariable adds the variable's name to an error about a flag that it set.
func nameVariable(err error, set []string) error {
	if err == nil {
		return nil
	}
	for _, name := range set {
		text := err.Error()
		if strings.HasPrefix(text, "--"+name+":") || strings.Contains(text, `"--`+name+`" flag`) {
			return fmt.Errorf("%w (set by %s)", err, Variable(name))
		}
	}
	return err
}
