package natskv_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/internal/discoverytest"
	"github.com/stagemesh/stagemesh/discovery/natskv"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// The first two variables make this program a broker, with a folder and a port; an
// instance finds its broker by the third.
const (
	folderVariable = "NATSKV_FOLDER"
	portVariable   = "NATSKV_PORT"
	urlVariable    = "NATSKV_URL"
)

func TestMain(m *testing.M) {
	if folder := os.Getenv(folderVariable); folder != "" {
		if err := runBroker(folder, os.Getenv(portVariable)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1) //nolint:forbidigo // this is a main
		}
		return
	}
	discoverytest.Main(m, open, func() {})
}

// runBroker runs a broker until the process of the test ends.
func runBroker(folder, port string) error {
	options := testbed.BrokerOptions(folder)
	if _, err := fmt.Sscan(port, &options.Port); err != nil {
		return err
	}
	s, err := server.NewServer(options)
	if err != nil {
		return err
	}
	if err := testbed.StartServer(s); err != nil {
		return err
	}
	fmt.Println(s.ClientURL()) //nolint:forbidigo // the test reads it
	<-testbed.UntilOrphaned(context.Background()).Done()
	return nil
}

// store is a broker in a separate process, which ends after all that the test starts later.
type store struct {
	folder, port, url string
	cmd               *exec.Cmd
	in                io.Closer
}

func start(t testing.TB, _ bool) discoverytest.Store {
	s := &store{folder: filepath.Join(t.TempDir(), "js"), port: strconv.Itoa(testbed.FreePort(t))}
	s.Start(t)
	t.Cleanup(func() { s.Stop(t) })
	return s
}

// Start implements discoverytest.Store.
func (s *store) Start(t testing.TB) {
	t.Helper()
	s.cmd = exec.Command(os.Args[0])
	s.cmd.Env = append(os.Environ(), folderVariable+"="+s.folder, portVariable+"="+s.port, "GOCOVERDIR="+os.TempDir())
	s.cmd.Stderr = os.Stderr
	in, err := s.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	s.in = in
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("the broker does not start: %v", err)
	}
	s.url = strings.TrimSpace(line)
}

// Stop implements discoverytest.Store.
func (s *store) Stop(testing.TB) {
	_ = s.cmd.Process.Kill() // it may have been stopped
	_ = s.cmd.Wait()         // it was killed
	_ = s.in.Close()         // nobody reads it
}

// Wipe implements discoverytest.Store.
func (s *store) Wipe(t testing.TB) {
	t.Helper()
	if err := os.RemoveAll(s.folder); err != nil {
		t.Fatal(err)
	}
	s.Start(t)
}

// Env implements discoverytest.Store.
func (s *store) Env() []string { return []string{urlVariable + "=" + s.url} }

// Client implements discoverytest.Store.
func (s *store) Client(t testing.TB) discovery.Registry {
	t.Helper()
	return client(t, settings(s.url))
}

func settings(url string, edits ...func(*natskv.Settings)) natskv.Settings {
	out := natskv.Settings{Mesh: "mesh", URL: url, Name: "test", Logger: slog.New(slog.DiscardHandler), MaxTableBytes: 256 << 20}
	for _, edit := range edits {
		edit(&out)
	}
	return out
}

// client returns a store that runs until the test ends.
func client(t testing.TB, s natskv.Settings) *natskv.Store {
	t.Helper()
	c, err := natskv.New(s)
	if err != nil {
		t.Fatal(err)
	}
	testbed.Background(t, c.Run)
	return c
}

func open(ctx context.Context) (discovery.Registry, error) {
	c, err := natskv.New(settings(os.Getenv(urlVariable)))
	if err != nil {
		return nil, err
	}
	// It outlives the context, so that an instance can be removed.
	go func() { _ = c.Run(context.WithoutCancel(ctx)) }()
	return c, nil
}

// Lossy implements discoverytest.Store: instead of every fourth ack the connection ends.
func (s *store) Lossy(t testing.TB) discovery.Registry {
	t.Helper()
	var acks atomic.Int64
	p := startProxy(t, s.url, func(data []byte) bool {
		return strings.Contains(string(data), ackBegin) && !strings.Contains(string(data), `"error"`) && acks.Add(1)%4 == 0
	})
	return client(t, settings(p))
}

// ackBegin is how acks begin, and no other answers.
const ackBegin = "\r\n{\"stream\":\""

// startProxy returns the URL of a proxy before a broker. It breaks the connection
// instead of passing on data for which cut is true.
func startProxy(t testing.TB, url string, cut func([]byte) bool) string {
	t.Helper()
	listener := testbed.Listen(t)
	var work sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	work.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			work.Go(func() { pass(ctx, conn, strings.TrimPrefix(url, "nats://"), cut) })
		}
	})
	t.Cleanup(func() {
		cancel()
		listener.Close()
		work.Wait()
	})
	return "nats://" + listener.Addr().String()
}

func pass(ctx context.Context, conn net.Conn, to string, cut func([]byte) bool) {
	defer conn.Close()
	var dialer net.Dialer
	broker, err := dialer.DialContext(ctx, "tcp", to)
	if err != nil {
		return
	}
	defer broker.Close()
	stop := context.AfterFunc(ctx, func() {
		conn.Close()
		broker.Close()
	})
	defer stop()
	var forth sync.WaitGroup
	defer forth.Wait()
	forth.Go(func() {
		_, _ = io.Copy(broker, conn) // it ends when either does
		broker.Close()
	})
	defer conn.Close()
	buffer := make([]byte, 64<<10)
	for {
		n, err := broker.Read(buffer)
		if err != nil || cut(buffer[:n]) {
			return
		}
		if _, err := conn.Write(buffer[:n]); err != nil {
			return
		}
	}
}
