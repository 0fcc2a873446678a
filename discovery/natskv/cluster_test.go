package natskv_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/natskv"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// cluster returns three brokers of one cluster, not started.
func cluster(t *testing.T) []*server.Server {
	t.Helper()
	// No outgoing connection could take these ports meanwhile.
	ports, err := testbed.FreePorts(3)
	if err != nil {
		t.Fatal(err)
	}
	var routes []*url.URL
	for _, port := range ports {
		routes = append(routes, &url.URL{Scheme: "nats", Host: net.JoinHostPort("127.0.0.1", strconv.Itoa(port))})
	}
	var servers []*server.Server
	for i, port := range ports {
		options := testbed.BrokerOptions(t.TempDir())
		options.DontListen = false
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

func TestClusterConforms(t *testing.T) {
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
	// The servers elect a leader first.
	last := putWhenPossible(t, c, 0)
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
		change := newRecorder[discovery.Change]()
		testbed.Background(t, func(ctx context.Context) error { return c.Observe(ctx, "", change) })
		testbed.Receive(t, "all entries", change.updates)
		leader := config(t, streams(t, strings.Join(urls, ",")), "mesh_registry").Cluster.Leader
		for _, s := range servers {
			if s.Name() == leader {
				s.Shutdown()
			}
		}
		begin := time.Now()
		last = putWhenPossible(t, c, last)
		t.Logf("a put succeeded %s after the leader was lost", time.Since(begin).Round(time.Millisecond))
		for {
			got := testbed.Receive(t, "the put", change.updates)
			if slices.ContainsFunc(got.Entries, func(e discovery.Entry) bool { return e.Revision == last }) {
				return
			}
		}
	})
}

func replicated(url string) natskv.Settings {
	return settings(url, func(s *natskv.Settings) { s.Replicas = 3 })
}

// putWhenPossible puts a value as soon as that is possible.
func putWhenPossible(t *testing.T, c *natskv.Store, expect discovery.Revision) discovery.Revision {
	t.Helper()
	poll := time.NewTicker(50 * time.Millisecond)
	defer poll.Stop()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		revision, err := c.Put(ctx, "leader", nil, expect)
		if err == nil {
			return revision
		}
		if !errors.Is(err, discovery.ErrUnavailable) || ctx.Err() != nil {
			t.Fatal(err)
		}
		<-poll.C
	}
}

// writeAndRead puts an entry, reads it at once, and replaces it.
func writeAndRead(t *testing.T, c *natskv.Store, below discovery.Key, round int) {
	t.Helper()
	key := below + discovery.Key(fmt.Sprint("/", round))
	revision := discovery.Revision(0)
	for range 2 {
		var err error
		if revision, err = c.Put(t.Context(), key, nil, revision); err != nil {
			t.Fatal(err)
		}
		if e, err := c.Get(t.Context(), key); err != nil || e.Revision != revision {
			t.Fatalf("Get returns %+v, %v", e, err)
		}
	}
}
