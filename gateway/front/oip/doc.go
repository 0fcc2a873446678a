// Package oip serves the Open Inference Protocol, version 2, to clients that were
// written for other servers of it: inference.GRPCInferenceService over gRPC, gRPC-Web
// and Connect, and the REST form with the binary extension.
//
//	path, handler := oip.New(caller, models, procedure.Settings{})
//	mux.Handle(path, handler)
//	mux.Handle(oip.Root+"/", oip.NewREST(caller, models, oip.RESTSettings{}))
//
// # Models
//
// A model is a pipeline, or "stage:<name>" for one stage; its only version is "1". What
// it takes is what the stage of its first step does, and what it gives what that of its
// last step does, as far as hosts have said so; where they have not, metadata leaves it
// out and requests are served all the same.
//
// # Tensors
//
// By gRPC tensors come as raw bytes or as typed contents, all of a request in one way,
// and are answered as raw bytes, which is what clients read; by REST in JSON or as bytes
// behind it, each as it says, and are answered as is asked. A stage that takes a blob takes a
// BYTES tensor of one element, and a blob that is answered is one: its media type is the
// tensor's parameter content_type.
//
// Parameters of a request go to every step, but for timeout, which is in microseconds
// and may only shorten the pipeline's. The id is echoed and means nothing else.
//
// # Failures
//
// are as on every protocol: the code of the fault, with its details; by REST its status
// and {"error": "REASON: message"}. Shapes that do not
// hold what comes are INVALID_INPUT before anything is allocated for them.
//
// Everything is safe for concurrent use, and starts no goroutine. To test with it, use
// a caller of gateway/front/fronttest.
package oip
