// Package oiptest holds answers against the REST form of the Open Inference Protocol:
// the statuses, media types and documents of protocol.yaml, and what no schema says,
// that an answer fits its request and its tensors their shapes.
//
//	protocol := oiptest.New(t)
//	err := protocol.Check(request, requestBody, status, header, body)
//
// A Protocol is safe for concurrent use. It is linked into no program.
package oiptest
