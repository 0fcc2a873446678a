// Package web puts every front of the gateway on one port: the RPC service in
// Connect, gRPC and gRPC-Web, plain HTTP under /v1/, the Open Inference Protocol in
// gRPC and under /v2, what there is to read of them, and what gateway/front/port
// has for all ports: gRPC health and reflection, the probes, and a guard against
// pages of origins that are not listed.
//
//	handler, err := web.Handler(web.Settings{Caller: service, Health: health})
//
// The names that Health is asked for are those of pipelines. With Tokens every call
// needs one, except for the probes, gRPC health, and the page of gateway/front/docs: the
// document that it shows needs one.
//
// # Concurrency
//
// Handlers are safe for concurrent use; nothing here starts a goroutine, but for
// those that streams have while they last. Once Stopping is closed, streams of many
// requests take no more and end when what they have in hand is answered. Faults
// are as in gateway/front/rpc and gateway/front/failure.
package web
