// Package oip serves the Open Inference Protocol, version 2, to clients of other servers:
// inference.GRPCInferenceService over gRPC, gRPC-Web and Connect, with ModelStreamInfer as Triton
// has it, and the REST form with the binary and the generate extension.
//
//	path, handler := oip.New(caller, models, transport.Settings{})
//	mux.Handle(path, handler)
//	mux.Handle(oip.Root+"/", oip.NewREST(caller, models, transport.Settings{}))
//
// # Models
//
// A model is a pipeline, or "stage:<name>" for one stage; its only version is "1". It takes what
// the stage of its first step takes, and returns what the stage of its last step returns, as far
// as hosts have registered it. Metadata leaves out the rest; requests are served all the same.
//
// # Tensors
//
// Over gRPC tensors come as raw bytes or as typed contents, all of a request in one way, and
// responses have raw bytes, which clients read. Over REST each tensor comes in JSON or as bytes
// behind it, and responses use the form that the request asks for. A stage that takes a blob
// takes a BYTES tensor of one element, and a blob in a response is one; the tensor's parameter
// content_type is its media type.
//
// Parameters of a request go to every step, except timeout, in microseconds, which may only
// shorten the pipeline's. The id is echoed and has no other meaning.
//
// # Streams
//
// ModelStreamInfer takes many requests on one stream, at most 64 in flight at a time. Responses
// come as they are ready, each with its request's id and in its own order. Each chunk is a
// message, and so is a response without chunks; after chunks the whole outputs are not repeated.
// Each message has the parameter triton_final_response. It is true for a response without
// chunks, for a failure, and for the last message without outputs that a request gets after its
// chunks if it has the parameter triton_enable_empty_final_response. No chunk is delayed to learn
// whether it is the last. A failed request is a message with error_message and its id, and the
// stream goes on. Neither parameter reaches a runner.
//
// # Generate
//
// A body of generate is an object whose members are inputs by name: a string is a BYTES tensor
// of one element or a blob of text; a number is one element; a list is the last axis of a shape
// whose other axes are 1; and a blob of JSON takes any JSON. id, parameters and all other scalars
// belong to the request. text_input is also the model's only input of text and, for a model whose
// inputs are not known, a blob of text without a name. A response is an object of outputs by
// name; an output without a name is text_output. generate_stream sends such an object as an event
// for each chunk, or one for a response without chunks.
//
// # Failures
//
// Over RPC a fault is its code with details, as on every protocol; over REST its status and
// {"error": "REASON: message"}, in an event after the first event. Shapes that do not fit the
// data are INVALID_INPUT before anything is allocated for them.
//
// Everything is safe for concurrent use. The goroutines of a stream have ended when it has. To
// test with it, use a Caller of gateway/front/fronttest.
package oip
