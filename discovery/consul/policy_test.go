package consul_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/consul"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestPolicyThatHidesResultsIsDenied(t *testing.T) {
	t.Parallel()
	const master, service = "5f3e1f9a-2a4c-4c7b-9b58-2f1f6a5a1b01", "test-stage"
	a := testbed.StartConsul(t, func(c testbed.ConsulConfig) {
		c["acl"] = testbed.ConsulConfig{"enabled": true, "default_policy": "deny", "tokens": testbed.ConsulConfig{"initial_management": master, "agent": master}}
	})
	admin, err := api.NewClient(&api.Config{Address: a.Addr(), Token: master})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	with := func(token string) *consul.Registry {
		return client(t, a.Addr(), func(s *consul.Settings) { s.Token, s.WaitTime = token, 50*time.Millisecond })
	}
	under := func(policy, rules string) *consul.Registry {
		t.Helper()
		p, _, err := admin.ACL().PolicyCreate(&api.ACLPolicy{Name: policy, Rules: rules}, nil)
		if err != nil {
			t.Fatal(err)
		}
		token, _, err := admin.ACL().TokenCreate(&api.ACLToken{Policies: []*api.ACLLink{{ID: p.ID}}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return with(token.SecretID)
	}
	const keys, services, nodes = `key_prefix "stagemesh/test/" { policy = "read" } `, `service_prefix "test-" { policy = "read" } `, `node_prefix "" { policy = "read" } `
	documented, noKeys, noServices, noNodes := under("documented", keys+services+nodes), under("keys", services+nodes), under("services", keys+nodes), under("nodes", keys+services)
	early := make(chan error, 1) // of a watch that begins before the instance is there
	go func() { early <- noServices.Watch(ctx, service, noObserver[discovery.Snapshot]{}) }()
	right := with(master)
	if _, err := right.Put(ctx, "a", []byte("value"), 0); err != nil {
		t.Fatal(err)
	}
	if _, err := admin.KV().Put(&api.KVPair{Key: "stagemesh/other/a"}, nil); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{service, "other"} {
		testbed.Background(t, func(ctx context.Context) error {
			return right.Announce(ctx, discovery.Instance{Service: name, ID: "one"}, func(error) {})
		})
	}
	seen, table := &serviceRecorder{}, follow(t, documented)
	testbed.Background(t, func(ctx context.Context) error { return documented.Watch(ctx, service, seen) })
	eventually(t, "the documented policy shows the mesh", func() bool { return seen.has(1) && table.has("a", "value") })
	for name, err := range map[string]error{
		"entries":                 noKeys.Observe(ctx, "", noObserver[discovery.Change]{}),
		"instances":               noServices.Watch(ctx, service, noObserver[discovery.Snapshot]{}),
		"nodes of instances":      noNodes.Watch(ctx, service, noObserver[discovery.Snapshot]{}),
		"instances watched early": <-early,
	} {
		if !errors.Is(err, discovery.ErrDenied) {
			t.Errorf("hidden %s: %v", name, err)
		}
	}
	if ctx.Err() != nil {
		t.Error("the documented policy hides something", ctx.Err())
	}
}
