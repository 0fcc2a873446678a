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

// program is the path of Consul, which the repository builds where it is missing.
var program = sync.OnceValues(func() (string, error) {
	root, err := repository()
	if err != nil {
		return "", err
	}
	cmd := exec.Command("make", "--no-print-directory", "-s", "-C", root, "consul")
	var said strings.Builder
	cmd.Stderr = &said
	out, err := cmd.Output()
	path := strings.TrimSpace(string(out))
	if err == nil {
		_, err = os.Stat(path)
	}
	if err != nil {
		return "", fmt.Errorf("there is no Consul for the tests, which need a real one; make consul builds it: %w\n%s", err, &said)
	}
	return path, nil
})

// repository returns the folder of the repository, above that of the test.
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

// The ports are below those that systems give to outgoing connections: an agent that
// does not run for a while finds its own free.
const firstPort, lastPort = 20_000, 30_000

// givenOut are ports of agents of this process, which may not listen there yet.
var givenOut sync.Map

// freePorts returns ports that are free now.
func freePorts(n int) ([]int, error) {
	var out []int
	for tries := 0; len(out) < n; tries++ {
		port := firstPort + rand.IntN(lastPort-firstPort) //nolint:gosec // it keeps no secret
		if _, given := givenOut.LoadOrStore(port, true); given {
			continue
		}
		l, err := net.Listen("tcp", local(port))
		if err == nil {
			defer l.Close() //nolint:errcheck // it served nobody
			out = append(out, port)
		} else if tries > lastPort-firstPort {
			return nil, err
		}
	}
	return out, nil
}

func local(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
