package bed

import (
	"context"
	"encoding/json"
	"errors"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/stagemesh/stagemesh/services/bench/baseline"
	"github.com/stagemesh/stagemesh/services/meshfile"
)

// Flags of the part of a program that runs a Part.
const (
	FileFlag   = "mesh"
	StageFlag  = "stage"
	BrokerFlag = "nats"
	// BaselineFlag is a route of the baseline as JSON.
	BaselineFlag = "baseline"
)

// startProcesses starts the front, and then all hosts beside each other.
func startProcesses(ctx context.Context, s Settings) (*Bed, error) {
	// What is wrong with the file is told before a process is started.
	f, err := read(s.File)
	if err != nil {
		return nil, err
	}
	route, err := s.route(f)
	if err != nil {
		return nil, err
	}
	arguments := []string{"--" + FileFlag, s.File}
	if route != nil {
		text, err := json.Marshal(route)
		if err != nil {
			return nil, err
		}
		arguments = append(arguments, "--"+BaselineFlag, string(text))
	}
	front, err := startChild(ctx, s, "the broker and the gateway", arguments...)
	if err != nil {
		return nil, err
	}
	arguments = append(arguments, "--"+BrokerFlag, front.said.Broker)
	hosts, err := startHosts(ctx, s, f, route, arguments)
	// Hosts leave before what they are joined to.
	stop := func() error { return errors.Join(stopAll(hosts), front.stop()) }
	if err != nil {
		return nil, errors.Join(err, stop())
	}
	return &Bed{url: front.said.URL, baseline: front.said.Baseline, stop: stop}, nil
}

// startHosts starts the mesh's and the baseline's, and returns those that run, also where
// some do not.
func startHosts(ctx context.Context, s Settings, f *meshfile.File, route *baseline.Route, arguments []string) ([]*child, error) {
	var parts []hostPart
	for _, stage := range hostsOf(f, f.StageNames()) {
		// What has no baseline is one of the mesh's.
		parts = append(parts, hostPart{"a host of stage " + stage, []string{"--" + StageFlag, stage, "--" + BaselineFlag, ""}})
	}
	if route != nil {
		for _, stage := range hostsOf(f, route.StageNames()) {
			parts = append(parts, hostPart{"a host of the baseline's stage " + stage, []string{"--" + StageFlag, stage}})
		}
	}
	children := make([]*child, len(parts))
	starts, ctx := errgroup.WithContext(ctx)
	for i, part := range parts {
		starts.Go(func() (err error) {
			children[i], err = startChild(ctx, s, part.name, slices.Concat(arguments, part.arguments)...)
			return err
		})
	}
	err := starts.Wait()
	return children, err
}

// hostPart is a host to be started, and the arguments that say which.
type hostPart struct {
	name      string
	arguments []string
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
