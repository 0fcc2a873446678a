package adminapi_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"connectrpc.com/connect"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/adminapi"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// fakeMembership is a membership that a test constructs.
type fakeMembership struct {
	hosts []discovery.Host
	early bool
	since time.Time
	why   error
}

func (k fakeMembership) Hosts() []discovery.Host { return k.hosts }

func (k fakeMembership) Loaded(context.Context) error {
	if k.early {
		return context.DeadlineExceeded
	}
	return nil
}

func (k fakeMembership) Changed() <-chan struct{} { return nil }

func (k fakeMembership) Stale() (time.Time, error) { return k.since, k.why }

func hostOf(stage, host string, alive bool) discovery.Host {
	return discovery.Host{Record: &meshv1.HostRecord{Stage: stage, Host: host}, Alive: alive}
}

func TestHostsMatchRegistry(t *testing.T) {
	t.Parallel()
	since := time.Now().Add(-time.Minute).Truncate(time.Second)
	url := serve(t, adminapi.Settings{DeadLetters: newBed(t), Membership: fakeMembership{
		hosts: []discovery.Host{hostOf("a", "1", true), hostOf("a", "2", false), hostOf("b", "3", true)}, since: since, why: errors.New("it is unreachable"),
	}})
	for _, p := range protocols() {
		client := adminv1connect.NewMeshServiceClient(fronttest.Client(t, p.h2c), url, p.options...)
		all, err := client.ListHosts(t.Context(), connect.NewRequest(&adminv1.ListHostsRequest{}))
		if err != nil {
			t.Fatalf("%s: %v", p.name, err)
		}
		if hosts := all.Msg.GetHosts(); len(hosts) != 3 || !hosts[0].GetAlive() || hosts[1].GetAlive() || hosts[2].GetRecord().GetHost() != "3" {
			t.Errorf("%s: lists %v", p.name, hosts)
		}
		if got := all.Msg.GetStaleSince().AsTime(); !got.Equal(since) || all.Msg.GetStaleCause() != "it is unreachable" {
			t.Errorf("%s: stale since %s: %s", p.name, got, all.Msg.GetStaleCause())
		}
		some, err := client.ListHosts(t.Context(), connect.NewRequest(&adminv1.ListHostsRequest{Stage: "b"}))
		if err != nil || len(some.Msg.GetHosts()) != 1 || some.Msg.GetHosts()[0].GetRecord().GetHost() != "3" {
			t.Errorf("%s: of one stage it lists %v, %v", p.name, some, err)
		}
		_, err = client.ListHosts(t.Context(), connect.NewRequest(&adminv1.ListHostsRequest{Stage: "B"}))
		expect(t, p.name+": no stage", err, fault.InvalidRequest)
	}
}

func TestRequestsAreListedWithinTheLimit(t *testing.T) {
	t.Parallel()
	url := serve(t, adminapi.Settings{DeadLetters: newBed(t), Traffic: traffic{}})
	client := adminv1connect.NewMeshServiceClient(fronttest.Client(t, false), url)
	for limit, want := range map[uint32]int{0: 2, 1: 1, 1 << 31: 2} {
		got, err := client.ListRequests(t.Context(), connect.NewRequest(&adminv1.ListRequestsRequest{Stage: "c", Limit: limit}))
		if err != nil || len(got.Msg.GetRequests()) != want || got.Msg.GetTotal() != 2 {
			t.Fatalf("limit %d: got %v, %v", limit, got, err)
		}
		first := got.Msg.GetRequests()[0]
		if first.GetRequestId() != "1" || first.GetIdempotencyKey() != "k" || len(first.GetStages()) != 2 || first.GetDeadline().AsTime().Unix() != 1010 {
			t.Errorf("got %v", first)
		}
		if first.GetGateway() != "g" || first.GetStep() != "two" || first.GetStage() != "b" || first.GetHost() != "h" || first.GetState() != "it waits in the queue of the stage" {
			t.Errorf("it is at %v", first)
		}
		if want > 1 && got.Msg.GetRequests()[1].GetState() != "in a queue" {
			t.Errorf("the other is at %v", got.Msg.GetRequests()[1])
		}
	}
	_, err := client.ListRequests(t.Context(), connect.NewRequest(&adminv1.ListRequestsRequest{Stage: "C"}))
	expect(t, "no stage", err, fault.InvalidRequest)
}

func TestMetricsNeedTheBroker(t *testing.T) {
	t.Parallel()
	list := func(failure error) (*connect.Response[adminv1.ListMetricsResponse], error) {
		url := serve(t, adminapi.Settings{DeadLetters: newBed(t), Metrics: func(context.Context) ([]*meshv1.ProcessMetrics, error) {
			return []*meshv1.ProcessMetrics{{Process: "1", Families: []byte("x")}}, failure
		}})
		client := adminv1connect.NewMeshServiceClient(fronttest.Client(t, false), url)
		return client.ListMetrics(t.Context(), connect.NewRequest(&adminv1.ListMetricsRequest{}))
	}
	got, err := list(nil)
	if err != nil || len(got.Msg.GetProcesses()) != 1 || string(got.Msg.GetProcesses()[0].GetFamilies()) != "x" {
		t.Errorf("got %v, %v", got, err)
	}
	_, err = list(errors.New("it is disconnected"))
	expect(t, "without the broker", err, fault.BrokerUnavailable)
}

func TestHostsAreUnavailableWithoutRegistry(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		membership adminapi.Membership
		want       fault.Reason
	}{
		"there is no registry": {nil, fault.NotSupported},
		"it is not loaded yet": {fakeMembership{early: true}, fault.RegistryUnavailable},
	} {
		url := serve(t, adminapi.Settings{DeadLetters: newBed(t), Membership: test.membership})
		client := adminv1connect.NewMeshServiceClient(fronttest.Client(t, false), url)
		_, err := client.ListHosts(t.Context(), connect.NewRequest(&adminv1.ListHostsRequest{}))
		expect(t, name, err, test.want)
	}
}
