// Package oip serves the Open Inference Protocol, version 2, to clients that were
// written for other servers of it: inference.GRPCInferenceService over gRPC, gRPC-Web
// and Connect, with ModelStreamInfer as Triton has it, and the REST form with the binary
// and the generate extension.
//
//	path, handler := oip.New(caller, models, procedure.Settings{})
//	mux.Handle(path, handler)
//	mux.Handle(oip.Root+"/", oip.NewREST(caller, models, transport.Settings{}))
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
// # Streams
//
// ModelStreamInfer takes many requests on one stream, of which 64 are in hand at a time.
// Their answers come as they are ready, each with its request's id and in its own order.
// A chunk is a message, and an answer without chunks is one; where there were chunks the
// outputs of the whole answer are not repeated. Each message has the parameter
// triton_final_response, which is true for the answer without chunks, for a failure, and
// for the last message without outputs that a request gets after its chunks where it has the
// parameter triton_enable_empty_final_response; no chunk is held back to learn whether it
// is the last. What fails a request is its message's error_message, with its id, and the
// stream goes on. Neither parameter reaches a runner.
//
// # Generate
//
// A body of generate is an object whose members are inputs by their names: a string is a
// BYTES tensor of one element, or a blob of text; a number is one element, and a list
// the last axis of a shape whose others are one; and where a blob of JSON is taken, any
// JSON is it. id, parameters, and all other scalars are the request's. text_input is also the
// model's only input of text, and, for a model that does not say what it takes, a blob of
// text without a name. An answer is an object of the outputs by their names, and an output
// without one is text_output. generate_stream sends such an object for each chunk, as
// gateway/front/eventstream has it, or one for an answer without chunks.
//
// # Failures
//
// are as on every protocol: the code of the fault, with its details; by REST its status
// and {"error": "REASON: message"}, which is an event where some were sent before. Shapes that do not
// hold what comes are INVALID_INPUT before anything is allocated for them.
//
// Everything is safe for concurrent use. A stream has goroutines, all of which have ended
// when it has: see gateway/front/procedure and gateway/front/eventstream. To test with it, use
// a caller of gateway/front/fronttest.
package oip
