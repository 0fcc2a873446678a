package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/compose-spec/compose-go/v2/types"
	"github.com/goccy/go-yaml"

	"github.com/stagemesh/stagemesh/internal/process"
)

// maxHosts is how many hosts a stage may get.
const maxHosts = 4

// scaler runs `stagemesh scale`, and the replicas of the stages that it orders.
type scaler struct {
	stack *stack
	// command is stagemesh scale, whose command writes a line for each order into the pipe.
	command *child
	pipe    string
	// replicas run each stage.
	replicas map[string][]*process.Group
}

// scaler returns the part that runs the stages.
func (s *stack) scaler() (part process.Part, err error) {
	pipe := filepath.Join(s.folder, "orders")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		return part, fmt.Errorf("%s: %w", pipe, err)
	}
	c := &child{stack: s, name: "scaler", grace: 10 * time.Second}
	c.cmd = exec.Command(s.programs["stagemesh"], "scale", "--admin", "127.0.0.1:"+s.port(replicaName("gateway", 1), "9080"), //nolint:noctx // run ends it
		"--exec", `echo {stage} {hosts} >"$ORDERS"`)
	c.cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + s.folder, "ORDERS=" + pipe}
	lines := &lineWriter{out: s.logger(c.name)}
	c.cmd.Stdout, c.cmd.Stderr = lines, lines
	out := &scaler{stack: s, command: c, pipe: pipe, replicas: map[string][]*process.Group{}}
	return process.Part{Name: c.name, Run: out.run}, nil
}

// isStage reports whether a service is a host of a stage.
func isStage(service *types.ServiceConfig) bool {
	return len(service.Command) > 0 && service.Command[0] == "stage"
}

// addScaler returns a mesh file whose stages have 0 to maxHosts hosts, unless they say otherwise.
func addScaler(text []byte) ([]byte, error) {
	var file map[string]any
	if err := yaml.Unmarshal(text, &file); err != nil {
		return nil, err
	}
	gateway, ok := file["gateway"].(map[string]any)
	if !ok {
		gateway = map[string]any{}
		file["gateway"] = gateway
	}
	if gateway["scaler"] == nil {
		gateway["scaler"] = map[string]any{}
	}
	stages, _ := file["stages"].(map[string]any) // the mesh itself refuses others
	for _, stage := range stages {
		if keys, ok := stage.(map[string]any); ok && keys["max_hosts"] == nil {
			keys["max_hosts"] = maxHosts
		}
	}
	return yaml.Marshal(file)
}

// run follows the orders until the context ends, and then stops what it has started.
func (r *scaler) run(ctx context.Context) (err error) {
	pipe, err := os.OpenFile(r.pipe, os.O_RDWR, 0) // it writes too, so the pipe does not end with an order
	if err != nil {
		return err
	}
	defer func() {
		for _, replicas := range r.replicas {
			err = errors.Join(err, stop(replicas))
		}
	}()
	following, end := context.WithCancel(ctx)
	defer end()
	ended := make(chan error, 1)
	go func() { ended <- r.command.run(following) }()
	context.AfterFunc(following, func() { _ = pipe.Close() }) // which ends the scan
	orders := make(chan error, 1)
	go func() { orders <- r.follow(following, pipe) }()
	select {
	case err = <-ended:
		end()
		<-orders //nolint:errcheck // it was ended
		return err
	case err = <-orders:
		end()
		return errors.Join(err, <-ended)
	}
}

// follow reads orders, and returns nil when the context ends.
func (r *scaler) follow(ctx context.Context, pipe *os.File) error {
	lines := bufio.NewScanner(pipe)
	for lines.Scan() {
		var stage string
		var hosts int
		if _, err := fmt.Sscan(lines.Text(), &stage, &hosts); err != nil || hosts < 0 {
			return fmt.Errorf("order %q: %w", lines.Text(), err)
		}
		if err := r.scale(ctx, stage, hosts); err != nil && ctx.Err() == nil {
			return err
		}
	}
	if err := lines.Err(); ctx.Err() == nil {
		return err
	}
	return nil
}

// scale starts or stops replicas of a stage, the last ones first.
func (r *scaler) scale(ctx context.Context, stage string, hosts int) error {
	if _, ok := r.stack.project.Services[stage]; !ok {
		return fmt.Errorf("the compose file has no service for the stage %s", stage)
	}
	for n := len(r.replicas[stage]); n < hosts; n++ {
		c, err := r.stack.child(stage, n+1)
		if err != nil {
			return err
		}
		group := process.New(slog.New(slog.DiscardHandler), process.Part{Name: c.name, Run: c.runAlways, Ready: c.awaitHealthy})
		if err := group.Start(ctx); err != nil {
			return err
		}
		r.replicas[stage] = append(r.replicas[stage], group)
	}
	leaving := r.replicas[stage][hosts:]
	r.replicas[stage] = r.replicas[stage][:hosts]
	if err := stop(leaving); err != nil {
		r.stack.logger("scaler").Print(err) // one slow host does not end the others
	}
	return nil
}

func stop(replicas []*process.Group) error {
	var errs []error
	for _, replica := range slices.Backward(replicas) {
		errs = append(errs, replica.Stop())
	}
	return errors.Join(errs...)
}
