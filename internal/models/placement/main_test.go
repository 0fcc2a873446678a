package placement_test

import (
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/internal/models/placement"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const mib = 1 << 20

// start is the present of the tables: late enough for hosts to be a day old.
var start = time.Date(2026, 3, 2, 12, 0, 0, 0, time.UTC)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newHost returns an idle host with room for 100 models of newModel.
func newHost(id pipeline.HostID, change ...func(*placement.Host)) placement.Host {
	h := placement.Host{
		ID: id, Version: "1", JoinedAt: start.Add(-24 * time.Hour), Alive: true,
		Capacity: model.Size{Host: 100 * mib}, LoadSlots: 2,
	}
	for _, c := range change {
		c(&h)
	}
	return h
}

// newModel returns a model of 1 MiB that a request waits for and that loads in 4 s.
func newModel(id model.ID, change ...func(*placement.Model)) *placement.Model {
	m := &placement.Model{
		Model: &model.Model{ID: id, Stage: "score"},
		Need:  model.Size{Host: mib}, LastUse: start, LoadTime: 4 * time.Second,
	}
	for _, c := range change {
		c(m)
	}
	return m
}

func view(hosts ...placement.Host) placement.View { return placement.View{Hosts: hosts} }
