package cli

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/program"
)

const (
	// healthTime bounds a question for health.
	healthTime = 5 * time.Second
	// maxHealth bounds the answer, in bytes.
	maxHealth = 64 << 10
)

func newHealth() *cobra.Command {
	var ops string
	cmd := &cobra.Command{
		Use:   "health",
		Short: "Check whether a process of this machine is ready",
		Long: "Ask the operations port of a gateway, a stage or a whole mesh for /readyz, and fail if it is not ready. Containers that\n" +
			"have no shell use this as their health check.\n\n" + program.EnvironmentHelp,
		Example: "  stagemesh health --ops 127.0.0.1:9091",
		Args:    cobra.NoArgs,
		RunE: program.WithEnvironment(func(cmd *cobra.Command, _ []string) error {
			if err := config.Address("--ops", ops); err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), healthTime)
			defer cancel()
			answer, err := askReady(ctx, ops)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), answer)
			return err
		}),
	}
	cmd.Flags().StringVar(&ops, "ops", meshfile.DefaultOps, "the operations address of the process; of all addresses the loopback one")
	return cmd
}

// askReady returns what is wrong with a process although it is ready, after "ok", or the
// reason why it is not ready.
func askReady(ctx context.Context, listen string) (string, error) {
	address := config.Advertised(listen, "127.0.0.1")
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/readyz", http.NoBody)
	if err != nil {
		return "", err
	}
	request.Close = true
	response, err := (&http.Client{Transport: &http.Transport{}}).Do(request) // without a proxy
	if err != nil {
		return "", err
	}
	defer response.Body.Close() //nolint:errcheck // it was read
	body, err := io.ReadAll(io.LimitReader(response.Body, maxHealth))
	text := strings.TrimSpace(string(body))
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("not ready: %s", text)
	}
	return text, err
}
