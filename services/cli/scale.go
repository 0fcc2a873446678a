package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"

	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const (
	// scaleRetry is the pause after the first failure of a command, which doubles up to maxScaleRetry.
	scaleRetry    = time.Second
	maxScaleRetry = time.Minute
	// scaleAgain is how long after a command that succeeded a stage may lack hosts before it runs again.
	scaleAgain = 5 * time.Minute
)

type scaleCommand struct {
	admin   port
	exec    string
	stages  []string
	timeout time.Duration

	out, errOut io.Writer
}

func newScale() *cobra.Command {
	var c scaleCommand
	cmd := &cobra.Command{
		Use:   "scale --exec COMMAND",
		Short: "Run a command whenever a stage should have another number of hosts",
		Long: "Ask a gateway each second how many hosts its stages should have, and run a command of sh where that changes, one at a\n" +
			"time: {stage} in it is the name of the stage, {hosts} how many hosts it should have. The environment has them as\n" +
			"STAGEMESH_STAGE and STAGEMESH_HOSTS. A command that fails is shown and runs again after a pause that grows to a minute.\n" +
			"The mesh file needs min_hosts or max_hosts in a stage, or the section gateway.scaler.",
		Example: "  stagemesh scale --exec 'docker compose up -d --no-recreate --scale {stage}={hosts}'\n" +
			"  stagemesh scale --stage classify --exec 'systemctl-scale classify {hosts}'",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := c.validate(); err != nil {
				return usageError(cmd, err)
			}
			c.out, c.errOut = cmd.OutOrStdout(), cmd.ErrOrStderr()
			ctx, stop := process.SignalContext(cmd.Context())
			defer stop()
			return c.admin.reach(func(client clients) error { return c.run(ctx, client) })
		},
	}
	c.admin.addAdmin(cmd)
	cmd.Flags().StringVar(&c.exec, "exec", "", "command to run by sh, with {stage} and {hosts} in it")
	cmd.Flags().StringSliceVar(&c.stages, "stage", nil, "scale only this stage; give it more than once for more")
	cmd.Flags().DurationVar(&c.timeout, "timeout", 5*time.Minute, "end a command after so long")
	return cmd
}

func (c *scaleCommand) validate() error {
	if !strings.Contains(c.exec, "{hosts}") {
		return errors.New("--exec: want a command with {hosts} in it, and {stage} unless it is for one --stage")
	}
	if !strings.Contains(c.exec, "{stage}") && len(c.stages) != 1 {
		return errors.New("--exec: the command needs {stage}, or is for one --stage")
	}
	for _, stage := range c.stages {
		if err := pipeline.ValidName("stage", stage); err != nil {
			return fmt.Errorf("--stage: %w", err)
		}
	}
	if c.timeout <= 0 {
		return fmt.Errorf("--timeout: %s is not a time to wait", c.timeout)
	}
	return nil
}

func (c *scaleCommand) run(ctx context.Context, client clients) error {
	known := applied{}
	for first := true; ctx.Err() == nil; first = false {
		stages, err := client.ListStages(ctx, connect.NewRequest(&adminv1.ListStagesRequest{}))
		switch {
		case ctx.Err() != nil:
		case err != nil && first:
			return err
		case err != nil:
			// The gateway answered before, and may again.
			fmt.Fprintln(c.errOut, "stagemesh:", visible(Describe(err)))
		default:
			if first && !slices.ContainsFunc(stages.Msg.GetStages(), func(s *adminv1.StageStatus) bool { return s.GetHostsWanted() != nil }) {
				fmt.Fprintln(c.errOut, "stagemesh: the gateway does not know yet how many hosts stages should have; the mesh file needs min_hosts or max_hosts in a stage, or the section gateway.scaler")
			}
			for _, wanted := range c.stages {
				if first && !slices.ContainsFunc(stages.Msg.GetStages(), func(s *adminv1.StageStatus) bool { return s.GetStage() == wanted }) {
					fmt.Fprintf(c.errOut, "stagemesh: --stage: the mesh has no stage %s yet\n", wanted)
				}
			}
			c.apply(ctx, known, stages.Msg.GetStages())
		}
		_ = process.Sleep(ctx, watchInterval) // its error is the context's
	}
	return nil
}

// apply runs the command for each stage that is due.
func (c *scaleCommand) apply(ctx context.Context, known applied, stages []*adminv1.StageStatus) {
	for _, s := range stages {
		name, wanted := s.GetStage(), s.GetHostsWanted()
		// The name becomes part of a command: it may have the characters of names alone.
		if wanted == nil || len(c.stages) > 0 && !slices.Contains(c.stages, name) || pipeline.ValidName("stage", name) != nil || ctx.Err() != nil {
			continue
		}
		if !known.isDue(name, s.GetHosts(), wanted.GetHosts(), time.Now()) {
			continue
		}
		fmt.Fprintf(c.out, "stage %s: %s, %d wanted: %s\n", name, count(int(s.GetHosts()), "host"), wanted.GetHosts(), visible(wanted.GetReason()))
		err := c.execute(ctx, name, wanted.GetHosts())
		pause := known.record(name, wanted.GetHosts(), err, time.Now())
		if err != nil && ctx.Err() == nil {
			fmt.Fprintf(c.errOut, "stagemesh: stage %s: the command for %s failed: %s; it runs again in %s\n", name, count(int(wanted.GetHosts()), "host"), err, pause)
		}
	}
}

// execute runs the command until it ends, or the context or its time does.
func (c *scaleCommand) execute(ctx context.Context, stage string, hosts uint32) error {
	limited, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	n := strconv.FormatUint(uint64(hosts), 10)
	cmd := exec.CommandContext(limited, "sh", "-c", strings.NewReplacer("{stage}", stage, "{hosts}", n).Replace(c.exec)) //nolint:gosec // the operator's command
	cmd.Env = append(os.Environ(), "STAGEMESH_STAGE="+stage, "STAGEMESH_HOSTS="+n)
	cmd.Stdout, cmd.Stderr = c.out, c.errOut
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a signal of the terminal comes once
	kill := func(s syscall.Signal) error {
		if err := syscall.Kill(-cmd.Process.Pid, s); !errors.Is(err, syscall.ESRCH) {
			return err
		}
		return os.ErrProcessDone
	}
	cmd.Cancel = func() error { return kill(syscall.SIGINT) }
	cmd.WaitDelay = 5 * time.Second
	err := cmd.Run()
	if err != nil && cmd.Process != nil && limited.Err() != nil {
		_ = kill(syscall.SIGKILL) // children that ignored SIGINT
	}
	if err != nil && errors.Is(limited.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("it took more than %s: %w", c.timeout, err)
	}
	return err
}

// applied is what the command was run for last, by stage.
type applied map[string]*application

type application struct {
	hosts    uint32
	at       time.Time
	failures int
	// notBefore is when it may run again after a failure.
	notBefore time.Time
}

// isDue reports whether the command has to run for a stage with that many hosts.
func (a applied) isDue(stage string, hosts, wanted uint32, now time.Time) bool {
	last := a[stage]
	switch {
	case last == nil:
		return hosts != wanted
	case last.failures > 0:
		return !now.Before(last.notBefore)
	case last.hosts != wanted:
		return true
	}
	return hosts != wanted && now.Sub(last.at) >= scaleAgain
}

// record takes how the command ended, and returns how long it is not run again after a failure.
func (a applied) record(stage string, hosts uint32, err error, now time.Time) (pause time.Duration) {
	next := &application{hosts: hosts, at: now}
	if err != nil {
		if last := a[stage]; last != nil {
			next.failures = last.failures
		}
		pause = min(scaleRetry<<min(next.failures, 10), maxScaleRetry)
		next.failures++
		next.notBefore = now.Add(pause)
	}
	a[stage] = next
	return pause
}
