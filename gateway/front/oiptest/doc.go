// Package oiptest validates answers against the REST form of the Open Inference
// Protocol: the statuses, media types and documents of protocol.yaml. It also checks
// what no schema can express: that an answer matches its request, and its tensors match
// their shapes.
//
//	protocol := oiptest.New(t)
//	err := protocol.Check(request, requestBody, status, header, body)
//
// A Protocol is safe for concurrent use. No program links it.
package oiptest
