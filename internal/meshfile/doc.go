// Package meshfile reads the one file that describes a mesh: its name, its
// stages with runner and batching, its pipelines, and how the gateway listens.
// docs/configuration.md is its reference.
//
// The program passes the kinds of runners that it has, so that it links no others:
//
//	decode := meshfile.KindOf("image_decode", runners.NewImageDecode)
//
//	f, err := meshfile.Load("mesh.yaml", runners.All()...)   // for all of the mesh
//	routes, err := f.Routes()
//
//	f, err := meshfile.Read("mesh.yaml", decode)             // for one stage of it
//	host, err := f.Host("decode")
//
// Every error names file, line, column and key. A File that nobody changes may
// be used concurrently.
package meshfile
