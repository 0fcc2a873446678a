// Package oip serves the Open Inference Protocol, version 2, to clients of other servers:
// inference.GRPCInferenceService over gRPC, gRPC-Web and Connect, with ModelStreamInfer as Triton
// has it, and the REST form with the binary and the generate extension. docs/clients.md says what
// clients see.
//
//	path, handler := oip.New(caller, models, transport.Settings{})
//	mux.Handle(path, handler)
//	mux.Handle(oip.Root+"/", oip.NewREST(caller, models, transport.Settings{}))
//
// A model takes what the stage of its first step takes, and returns what the stage of its last
// step returns, as far as hosts have registered it. Metadata leaves out the rest; requests are
// served all the same. Shapes that do not fit the data are INVALID_INPUT before anything is
// allocated for them. No chunk of a stream is delayed to learn whether it is the last, so
// triton_final_response is on an empty message after it.
//
// The index of the repository is written as it is read over REST. Over gRPC it is one message,
// which counts against the budget of the request.
//
// Everything is safe for concurrent use. The goroutines of a stream have ended when it has. To
// test with it, use a Caller of internal/front/fronttest.
package oip
