// Package logflags has the flags by which every program here says what it logs,
// and how.
//
//	flags := logflags.Add(command)
//	log, err := flags.Logger(command.ErrOrStderr())
package logflags

import (
	"fmt"
	"io"
	"log/slog"

	"github.com/spf13/cobra"
)

// Flags are what the user said.
type Flags struct {
	// Level is debug, info, warn or error.
	Level string
	// Format is text or json.
	Format string
}

// Add adds the flags to a command, which fills them in.
func Add(cmd *cobra.Command) *Flags {
	f := &Flags{}
	cmd.Flags().StringVar(&f.Level, "log-level", "info", "debug, info, warn or error")
	cmd.Flags().StringVar(&f.Format, "log-format", "text", "text or json")
	return f
}

// Logger returns the logger that the flags ask for.
func (f Flags) Logger(out io.Writer) (*slog.Logger, error) {
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
