package bed

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sync/errgroup"

	"github.com/stagemesh/stagemesh/services/meshfile"
)

// Flags of the part of a program that runs a Part.
const (
	FileFlag   = "mesh"
	StageFlag  = "stage"
	BrokerFlag = "nats"
)

// startProcesses starts the front, and then all hosts beside each other.
func startProcesses(ctx context.Context, s Settings) (*Bed, error) {
	// What is wrong with the file is told before a process is started.
	f, err := read(s.File)
	if err != nil {
		return nil, err
	}
	front, err := startChild(ctx, s, "the broker and the gateway", "--"+FileFlag, s.File)
	if err != nil {
		return nil, err
	}
	hosts, err := startHosts(ctx, s, f, front.said.Broker)
	// Hosts leave before what they are joined to.
	stop := func() error { return errors.Join(stopAll(hosts), front.stop()) }
	if err != nil {
		return nil, errors.Join(err, stop())
	}
	return &Bed{url: front.said.URL, stop: stop}, nil
}

// startHosts returns those that run, also where some do not.
func startHosts(ctx context.Context, s Settings, f *meshfile.File, broker string) ([]*child, error) {
	var names []string
	for _, stage := range f.StageNames() {
		for range max(1, f.Stages[stage].Hosts) {
			names = append(names, stage)
		}
	}
	children := make([]*child, len(names))
	starts, ctx := errgroup.WithContext(ctx)
	for i, stage := range names {
		starts.Go(func() (err error) {
			children[i], err = startChild(ctx, s, fmt.Sprintf("a host of stage %s", stage),
				"--"+FileFlag, s.File, "--"+StageFlag, stage, "--"+BrokerFlag, broker)
			return err
		})
	}
	err := starts.Wait()
	return children, err
}

// stopAll stops those that there are, beside each other.
func stopAll(children []*child) error {
	errs := make([]error, len(children))
	var stops errgroup.Group
	for i, c := range children {
		if c != nil {
			stops.Go(func() error { errs[i] = c.stop(); return nil })
		}
	}
	_ = stops.Wait()
	return errors.Join(errs...)
}
