// Package pipeline is the vocabulary of routes: names of meshes, stages, hosts
// and gateways, what a pipeline is, whether one is valid, and how a request's
// own options turn it into the route that travels in its envelope.
//
// Everything here is a plain value without clock, lock or goroutine. Validation
// errors name the pipeline, the step and the key at fault.
package pipeline
