// Command local runs docker-compose.yml without Docker: each service is a process of this
// machine, with its command, environment, files and health check, and started in its order.
// Services listen on loopback, on the ports that they publish and on free ones. Grafana is
// left out. SIGINT and SIGTERM stop all processes in reverse order, and so do a closed terminal
// and a closed pipe; a second signal kills them.
//
//	local --scale classify=3 bin/stagemesh bin/nats .../consul .../jaeger .../prometheus
//
// With --scaler `stagemesh scale` sets the replicas of the stages.
//
// `make stack` does that.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"

	"github.com/stagemesh/stagemesh/internal/process"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "stack:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) (err error) {
	flags := flag.NewFlagSet("local", flag.ContinueOnError)
	scale := flags.String("scale", "", "replicas of services, such as classify=3,label=2")
	scaler := flags.Bool("scaler", false, fmt.Sprintf("have stagemesh scale set the replicas of each stage, 0 to %d", maxHosts))
	if err := flags.Parse(args); err != nil {
		return err
	}
	running, end := process.SignalContext(context.Background())
	defer end()
	// They end it too: nobody sees it any more.
	lost := []os.Signal{syscall.SIGPIPE}
	if !signal.Ignored(syscall.SIGHUP) { // nohup
		lost = append(lost, syscall.SIGHUP)
	}
	running, unwatch := signal.NotifyContext(running, lost...)
	defer unwatch()
	programs, err := programsOf(flags.Args())
	if err != nil {
		return err
	}
	project, err := load(running, *scale, "docker-compose.yml")
	if err != nil {
		return err
	}
	folder, err := os.MkdirTemp("", "stagemesh-stack-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(folder)) }()
	s := newStack(project, programs, folder, out)
	s.scales = *scaler
	group, err := s.group(running)
	if err != nil {
		return err
	}
	switch err := group.Start(running); {
	case running.Err() != nil:
		return group.Stop() // it was asked to stop, perhaps before it was ready
	case err != nil:
		return err
	}
	s.logger("stack").Print("ready: " + s.published() + "; Grafana is left out, it runs with Docker only; stop with Ctrl-C")
	return cmp.Or(group.Wait(running), group.Stop())
}

// load reads compose files as docker compose does with monitoring, with other numbers of replicas.
func load(ctx context.Context, scale string, files ...string) (*types.Project, error) {
	options, err := cli.NewProjectOptions(files, cli.WithWorkingDirectory(filepath.Dir(files[0])),
		cli.WithEnv([]string{"COMPOSE_PROFILES=monitoring"}), cli.WithOsEnv, cli.WithDotEnv, cli.WithProfiles([]string{"monitoring"}))
	if err != nil {
		return nil, err
	}
	project, err := options.LoadProject(ctx)
	if err != nil || scale == "" {
		return project, err
	}
	for one := range strings.SplitSeq(scale, ",") {
		name, text, _ := strings.Cut(one, "=")
		service, ok := project.Services[name]
		replicas, err := strconv.Atoi(text)
		if !ok || err != nil || replicas < 0 || replicas > 1 && len(service.Ports) > 0 {
			return nil, fmt.Errorf("--scale: %q is not a service that may have replicas, and their number, as in classify=3", one)
		}
		service.SetScale(replicas)
		project.Services[name] = service
	}
	return project, nil
}

// programsOf returns the paths of programs by their names.
func programsOf(paths []string) (map[string]string, error) {
	out := map[string]string{}
	for _, path := range paths {
		name := filepath.Base(path)
		path, err := filepath.Abs(path)
		if _, missing := os.Stat(path); err != nil || missing != nil {
			return nil, fmt.Errorf("the program %s is missing: %w; make stack builds it", name, errors.Join(err, missing))
		}
		out[name] = path
	}
	return out, nil
}
