package suite

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"
)

// grossly is the ratio of throughput below which something is broken. It is below what has
// been measured on machines that were busy with other things, as these must not fail a
// build; it is no goal.
const grossly = 0.4

// ErrSlow says that the mesh is far slower than it was.
var ErrSlow = errors.New("this is a gross regression, if the machine was not busy with something else for a while: run it again, and then make bench")

// Short measures one ratio, which takes half a minute, and says it. It fails where that
// is far too low.
func Short(ctx context.Context, program, folder string, out io.Writer) error {
	return short(ctx, shortCommand(), program, folder, out)
}

func shortCommand() Command {
	p := Full()
	p.Pairs = 3
	return p.compared(p.echo("echo3.yaml", only, false, 64))[0].Commands[0]
}

// shortLimit is how long it may take: on a machine that is very busy too.
const shortLimit = 2 * time.Minute

func short(ctx context.Context, c Command, program, folder string, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, shortLimit)
	defer cancel()
	got, err := measure(ctx, program, folder, c)
	if err != nil {
		return err
	}
	if len(got.Comparisons) != 1 {
		return fmt.Errorf("%s: the report has no comparison", c.Line())
	}
	ratio := got.Comparisons[0].Throughput
	fmt.Fprintf(out, "three stages in one process, 64 in flight: %s of the baseline's answers a second, at least %s is asked for\n", told(ratio, times), times(grossly))
	if ratio.Median < grossly {
		return fmt.Errorf("%s: the mesh has %s of the baseline's throughput, and at least %s is asked for: %w", c.Line(), told(ratio, times), times(grossly), ErrSlow)
	}
	return nil
}
