package cli

import (
	"strings"
	"testing"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
)

func TestTapNamesTenant(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	if err := printRequest(&out, &adminv1.TapModelResponse{Model: "iris-v1", Shadow: true, Tenant: "blue", Fault: &meshv1.Fault{Reason: "RUNNER_FAILED"}}); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), " iris-v1 (shadow) of tenant blue ") {
		t.Errorf("printed %q", &out)
	}
}
