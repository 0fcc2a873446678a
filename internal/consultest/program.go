package consultest

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
)

// program returns the path of Consul, which the repository builds if it is missing.
var program = sync.OnceValues(func() (string, error) {
	root, err := repository()
	if err != nil {
		return "", err
	}
	cmd := exec.Command("make", "--no-print-directory", "-s", "-C", root, "consul")
	var log strings.Builder
	cmd.Stderr = &log
	out, err := cmd.Output()
	path := strings.TrimSpace(string(out))
	if err == nil {
		_, err = os.Stat(path)
	}
	if err != nil {
		return "", fmt.Errorf("the tests need a real Consul, which make consul builds: %w\n%s", err, &log)
	}
	return path, nil
})

// repository returns the root of the repository, above the folder of the test.
func repository() (string, error) {
	folder, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		_, err := os.Stat(filepath.Join(folder, "go.work"))
		if !errors.Is(err, fs.ErrNotExist) {
			return folder, err
		}
		above := filepath.Dir(folder)
		if above == folder {
			return "", fmt.Errorf("no go.work above the test: %w", err)
		}
		folder = above
	}
}

// The ports are below those of outgoing connections, so that an agent which restarts
// finds its own free.
const firstPort, lastPort = 20_000, 30_000

// reservedPorts are ports of agents that may not listen yet.
var reservedPorts sync.Map

// freePorts returns ports that are free now.
func freePorts(n int) ([]int, error) {
	var out []int
	for tries := 0; len(out) < n; tries++ {
		port := firstPort + rand.IntN(lastPort-firstPort) //nolint:gosec // it keeps no secret
		if _, reserved := reservedPorts.LoadOrStore(port, true); reserved {
			continue
		}
		l, err := net.Listen("tcp", local(port))
		if err == nil {
			defer l.Close() //nolint:errcheck // it accepted nothing
			out = append(out, port)
		} else if tries > lastPort-firstPort {
			return nil, err
		}
	}
	return out, nil
}

func local(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// TLS returns an edit that adds a port with TLS to an agent, and its address. The agent
// presents the certificate, and checks instances only if theirs is of the authority.
// All arguments are files.
func TLS(authority, cert, key string) (edit func(c Config), addr string, err error) {
	ports, err := freePorts(1)
	if err != nil {
		return nil, "", err
	}
	return func(c Config) {
		if own, ok := c["ports"].(Config); ok {
			own["https"] = ports[0]
		}
		c["enable_agent_tls_for_checks"] = true
		c["tls"] = Config{"defaults": Config{"ca_file": authority, "cert_file": cert, "key_file": key}}
	}, local(ports[0]), nil
}
