package cli

import (
	"testing"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
)

func TestDisconnectedHostHasItsCause(t *testing.T) {
	t.Parallel()
	h := &adminv1.HostStatus{Record: &meshv1.HostRecord{
		Cause: "no worker is ready", Workers: []*meshv1.WorkerRecord{{Index: 1, State: "dead", Cause: "exit status 1"}},
	}}
	if got := whyOf(h); got != "no worker is ready" {
		t.Errorf("disconnected: %q", got)
	}
	h.Alive = true
	if got := whyOf(h); got != "no worker is ready; worker 1 is dead, exit status 1" {
		t.Errorf("alive: %q", got)
	}
}
