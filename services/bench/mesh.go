package bench

import (
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/services/runners"
)

// LoadMesh reads the file of a mesh that is started for a measurement. It replaces the
// file's addresses by free ports of 127.0.0.1, and its store by a temporary folder, so
// that the mesh runs beside others and leaves their data alone. A file with nats.url
// shares that broker.
func LoadMesh(path string) (*meshfile.File, error) {
	f, err := meshfile.Load(path, runners.All()...)
	if err != nil {
		return nil, meshfile.FlagError("--mesh", err)
	}
	Separate(f)
	return f, nil
}

// Separate makes the changes of LoadMesh.
func Separate(f *meshfile.File) {
	const free = "127.0.0.1:0"
	f.Gateway.Listen, f.Gateway.Admin.Listen, f.Ops.Listen = free, free, free
	f.NATS.StoreDir = ""
	if f.NATS.Listen != "" {
		f.NATS.Listen = free
	}
	for name, stage := range f.Stages {
		if stage.Listen != "" {
			stage.Listen = free
			f.Stages[name] = stage
		}
	}
}
