package bed

import (
	"maps"
	"net"
	"slices"

	"github.com/stagemesh/stagemesh/services/meshfile"
	"github.com/stagemesh/stagemesh/services/runners"
)

// anywhere is a free port that only this machine reaches.
const anywhere = "127.0.0.1:0"

// read reads a mesh's file, and sets it apart from the mesh that it is of.
func read(path string) (*meshfile.File, error) {
	f, err := meshfile.Load(path, runners.All()...)
	if err != nil {
		return nil, meshfile.FlagError("--mesh", err)
	}
	apart(f)
	return f, nil
}

func apart(f *meshfile.File) {
	f.Gateway.Listen, f.Gateway.Admin.Listen, f.Ops.Listen = anywhere, anywhere, anywhere
	f.NATS.StoreDir = ""
	if f.NATS.Listen != "" {
		f.NATS.Listen = anywhere
	}
	for _, name := range slices.Collect(maps.Keys(f.Stages)) {
		stage := f.Stages[name]
		if stage.Listen != "" {
			stage.Listen = anywhere
			f.Stages[name] = stage
		}
	}
}

// reachable has the broker listen for the other processes.
func reachable(f *meshfile.File) {
	if f.NATS.URL == "" {
		f.NATS.Listen = net.JoinHostPort("127.0.0.1", "0")
	}
}
