package suite

import (
	"context"
	"io"
	"time"
)

// Output is output.
func Output(ctx context.Context, limit time.Duration, program string, arguments ...string) ([]byte, error) {
	return output(ctx, limit, program, arguments...)
}

// ShortOf is Short with another command.
func ShortOf(ctx context.Context, c Command, program, folder string, out io.Writer) error {
	return short(ctx, c, program, folder, out)
}

// ShortCommand is the command of Short.
func ShortCommand() Command { return shortCommand() }

// CPUModel is cpuModel.
func CPUModel(file string) string { return cpuModel(file) }

// Slope is slope.
func Slope(xs, ys []float64) float64 { return slope(xs, ys) }

// Limit is limit.
func (c Command) Limit() time.Duration { return c.limit() }
