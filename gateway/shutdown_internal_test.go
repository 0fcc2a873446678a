package gateway

import (
	"context"
	"net/http"
	"testing"
)

func TestOverdueStopOfAdminPortEnds(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s := &server{http: &http.Server{}, served: make(chan struct{}), disconnected: make(chan struct{})} //nolint:gosec // it has no connections
	close(s.served)
	if err := s.stop(ctx); err != nil {
		t.Error(err)
	}
}
