package natskv_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/natskv"
)

// cluster returns three brokers that are one.
func cluster(t *testing.T) []*server.Server {
	t.Helper()
	var routes []*url.URL
	var ports []int
	for range 3 {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer listener.Close()
		routes = append(routes, &url.URL{Scheme: "nats", Host: listener.Addr().String()})
		ports = append(ports, listener.Addr().(*net.TCPAddr).Port)
	}
	var servers []*server.Server
	for i, port := range ports {
		// The others' ports are free by then too: the listeners are for the numbers.
		options := brokerOptions(t.TempDir())
		options.ServerName = fmt.Sprint("s", i)
		options.Cluster = server.ClusterOpts{Name: "cluster", Host: "127.0.0.1", Port: port}
		options.Routes = routes
		s, err := server.NewServer(options)
		if err != nil {
			t.Fatal(err)
		}
		servers = append(servers, s)
	}
	return servers
}

func TestAClusterKeepsThePromises(t *testing.T) {
	t.Parallel()
	servers := cluster(t)
	var urls []string
	for _, s := range servers {
		s.Start()
		t.Cleanup(func() {
			s.Shutdown()
			s.WaitForShutdown()
		})
	}
	for _, s := range servers {
		if !s.ReadyForConnections(patience) {
			t.Fatal("a server is not ready")
		}
		urls = append(urls, s.ClientURL())
	}
	c := client(t, replicated(strings.Join(urls, ",")))
	// The servers choose a leader first.
	last := commits(t, c, 0)
	t.Run("a writer reads its own writes from any server", func(t *testing.T) {
		var writers []*natskv.Store
		for _, url := range urls {
			writers = append(writers, client(t, replicated(url)))
		}
		for round := range 40 {
			for i, w := range writers {
				writeAndRead(t, w, discovery.KeyOf(fmt.Sprint("writer", i)), round)
			}
		}
	})
	t.Run("it goes on without its leader", func(t *testing.T) {
		change := newHeard[discovery.Change]()
		background(t, func(ctx context.Context) error { return c.Observe(ctx, "", change) })
		receive(t, "all entries", change.seen)
		leader := config(t, streams(t, strings.Join(urls, ",")), "mesh_table").Cluster.Leader
		for _, s := range servers {
			if s.Name() == leader {
				s.Shutdown()
			}
		}
		begin := time.Now()
		last = commits(t, c, last)
		t.Logf("a commit was made %s after the leader was lost", time.Since(begin).Round(time.Millisecond))
		for {
			told := receive(t, "the commit", change.seen)
			if slices.ContainsFunc(told.Entries, func(e discovery.Entry) bool { return e.Revision == last }) {
				return
			}
		}
	})
}

func replicated(url string) natskv.Settings {
	return settings(url, func(s *natskv.Settings) { s.Replicas = 3 })
}

// commits commits as soon as that is possible.
func commits(t *testing.T, c *natskv.Store, expect discovery.Revision) discovery.Revision {
	t.Helper()
	poll := time.NewTicker(50 * time.Millisecond)
	defer poll.Stop()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		revision, err := c.Commit(ctx, discovery.Put("leader", nil, expect))
		if err == nil {
			return revision
		}
		if !errors.Is(err, discovery.ErrUnavailable) || ctx.Err() != nil {
			t.Fatal(err)
		}
		<-poll.C
	}
}

// writeAndRead writes two entries below a key, and lists and gets them at once.
func writeAndRead(t *testing.T, c *natskv.Store, below discovery.Key, round int) {
	t.Helper()
	key := below + discovery.Key(fmt.Sprint("/", round))
	revision, err := c.Commit(t.Context(), discovery.Put(key, nil, 0), discovery.Put(key+"b", nil, 0))
	if err != nil {
		t.Fatal(err)
	}
	entries, err := c.List(t.Context(), below)
	if err != nil || len(entries) != 2*(round+1) {
		t.Fatalf("it lists %d entries of %d: %v", len(entries), 2*(round+1), err)
	}
	if e, err := c.Get(t.Context(), key+"b"); err != nil || e.Revision != revision {
		t.Fatalf("it gets %+v, %v", e, err)
	}
}
