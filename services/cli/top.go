package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	tea "charm.land/bubbletea/v2"
	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"

	"github.com/stagemesh/stagemesh/internal/figures"
)

// topPatience bounds one poll: a gateway that is silent is shown as that.
const topPatience = 5 * time.Second

type topCommand struct {
	admin      port
	once, json bool
}

func newTop() *cobra.Command {
	var c topCommand
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Watch the requests and stages of a mesh",
		Long: "Show requests, stages and hosts of a mesh each second, of all gateways together. Rates and quantiles are those of the\n" +
			"last five seconds. The command asks the admin port of any gateway of the mesh.\n\n" +
			"Up and down select a stage, enter shows its hosts and workers, esc goes back, s and S sort by another column, p pauses,\n" +
			"q quits.",
		Example: "  stagemesh top\n  stagemesh top --once\n  stagemesh top --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			onScreen := !c.once && !c.json
			if onScreen && (!isTerminal(cmd.InOrStdin()) || !isTerminal(cmd.OutOrStdout())) {
				return errors.New("input and output have to be a terminal; --once prints the screen once, --json the figures")
			}
			return c.admin.reach(func(client clients) error {
				first, err := askTop(cmd.Context(), client)
				switch {
				case err != nil:
					return err
				case onScreen:
					poll := func(ctx context.Context) (figures.Sample, error) { return askTop(ctx, client) }
					return c.show(cmd, first, poll)
				}
				return c.print(cmd.Context(), client, first, cmd.OutOrStdout(), cmd.ErrOrStderr())
			})
		},
	}
	c.admin.addAdmin(cmd)
	cmd.Flags().BoolVar(&c.once, "once", false, "print the screen of one second as plain text")
	cmd.Flags().BoolVar(&c.json, "json", false, "print the figures of each second as a line of JSON; with --once one line")
	return cmd
}

func isTerminal(stream any) bool {
	file, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(file.Fd()))
}

// askTop asks a gateway for all that it knows.
func askTop(ctx context.Context, client clients) (out figures.Sample, err error) {
	ctx, cancel := context.WithTimeout(ctx, topPatience)
	defer cancel()
	metrics, err := client.ListMetrics(ctx, connect.NewRequest(&adminv1.ListMetricsRequest{}))
	if err != nil {
		return out, err
	}
	status, err := askStatus(ctx, client, "")
	return figures.Sample{
		At: time.Now(), Processes: figures.ReadProcesses(metrics.Msg.GetProcesses()), Stages: status.stages.GetStages(), Hosts: status.hosts.GetHosts(),
	}, err
}

// print prints the figures of each second, or of one.
func (c *topCommand) print(ctx context.Context, client clients, first figures.Sample, out, errOut io.Writer) error {
	window, view := figures.Window{first}, topView{address: redact(c.admin.address)}
	ticker := time.NewTicker(watchInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
		now, err := askTop(ctx, client)
		if err != nil && !c.once {
			// The gateway answered before, and may again.
			fmt.Fprintln(errOut, "stagemesh:", visible(Describe(err)))
			continue
		}
		window.Add(now)
		switch {
		case err != nil:
		case c.json:
			err = json.NewEncoder(out).Encode(window.Figures())
		default:
			_, err = fmt.Fprintln(out, strings.Join(view.lines(window.Figures()), "\n"))
		}
		if err != nil || c.once {
			return err
		}
	}
}

// show shows the screen until a key or a signal ends it.
func (c *topCommand) show(cmd *cobra.Command, first figures.Sample, ask func(context.Context) (figures.Sample, error)) error {
	ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGHUP)
	defer stop()
	m := &topModel{
		topView: topView{address: redact(c.admin.address)},
		// Bubble Tea does not wait for what it polls: the context ends that.
		poll: func() tea.Msg {
			select {
			case <-time.After(watchInterval):
			case <-ctx.Done():
			}
			sample, err := ask(ctx)
			return topAnswer{sample, err}
		},
	}
	m.take(first)
	// It gives the terminal back also after a signal, an error or a panic.
	_, err := tea.NewProgram(m, tea.WithContext(ctx), tea.WithInput(cmd.InOrStdin()), tea.WithOutput(cmd.OutOrStdout())).Run()
	if errors.Is(err, tea.ErrInterrupted) || ctx.Err() != nil {
		return nil
	}
	return err
}
