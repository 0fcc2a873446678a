// Package clients holds a mesh to what clients of other servers expect of it: programs
// that others have written for the Open Inference Protocol ask it as they are.
//
//	mesh := clients.Start(t)
//	mesh.Address()  // of the public port, host:port
//	mesh.Checked(t) // the same, with every answer by REST held against the protocol
//
// A Mesh has the models
//
//	simple  INPUT0 and INPUT1, INT32 [-1, 16], to their sums OUTPUT0 and differences
//	        OUTPUT1: what the protocol's sample clients ask. A real worker in Python
//	        serves it.
//	words   text, to its words one by one as word: what streams. testdata/words.py, a
//	        worker too, says which words mean more
//	echo    answers its inputs, whatever they are
//	slow    answers nobody before the deadline
//
// The clients are tritonclient (folder python), @grpc/grpc-js with @grpc/proto-loader
// (folder node), grpcurl and curl. The versions of the first two are pinned by the
// files there; `make clients` installs them outside the tree and prints where they are.
// Without them the tests fail, and say what is missing: nothing is left out.
package clients
