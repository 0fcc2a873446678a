package fleet

import (
	"context"
	"net/http"
	"slices"
	"time"

	"connectrpc.com/connect"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"
)

// View is what a gateway says of the hosts of its mesh.
type View struct {
	// Alive are the ids of the hosts that are, sorted.
	Alive []string
	// Stale says that the registry is away.
	Stale bool
}

// viewTime bounds how long a gateway takes to say it.
const viewTime = 5 * time.Second

// View asks a gateway for its hosts, and fails the test where it does not say.
func (m *Member) View() View {
	t := m.fleet.t
	t.Helper()
	m.mu.Lock()
	url := "http://" + m.hello.Admin
	m.mu.Unlock()
	client := adminv1connect.NewMeshServiceClient(&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}, url)
	ctx, cancel := context.WithTimeout(t.Context(), viewTime)
	defer cancel()
	answer, err := client.ListHosts(ctx, connect.NewRequest(&adminv1.ListHostsRequest{}))
	if err != nil {
		t.Fatalf("%s: %v", m.name, err)
	}
	v := View{Stale: answer.Msg.GetStaleSince() != nil}
	for _, host := range answer.Msg.GetHosts() {
		if host.GetAlive() {
			v.Alive = append(v.Alive, host.GetRecord().GetHost())
		}
	}
	slices.Sort(v.Alive)
	return v
}

// Shows reports whether exactly these hosts are alive, by what the registry says now.
func (v View) Shows(hosts ...*Member) bool { return v.Has(hosts...) && len(v.Alive) == len(hosts) }

// Has reports whether these hosts are alive, by what the registry says now.
func (v View) Has(hosts ...*Member) bool {
	return !v.Stale && !slices.ContainsFunc(hosts, func(m *Member) bool { return !slices.Contains(v.Alive, m.Addr()) })
}
