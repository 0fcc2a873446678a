package port_test

import (
	"testing"

	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/port"
	"github.com/stagemesh/stagemesh/internal/transport"
)

func TestFrontsKeepTheirPromises(t *testing.T) {
	t.Parallel()
	with := func(start starter) fronttest.Server {
		return func(t testing.TB, caller call.Caller, s transport.Settings, memory *transport.Memory) string {
			return start(t, port.PublicSettings{Settings: s, Caller: caller, Models: known{}, Port: port.Port{Memory: memory}})
		}
	}
	fronttest.CheckPromises(t, with(start), with(startGRPC))
}
