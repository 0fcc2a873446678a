// Package local runs a whole mesh in one process: broker, gateway and stage
// hosts, as they run apart, but without a network between them.
//
//	m, err := local.New(local.Settings{Mesh: "demo"})
//	err = m.AddStage(local.Stage{Name: "double", Runner: runner})
//	err = m.AddPipeline(pipeline.Pipeline{...})
//	err = m.Start(ctx)
//	answer, err := m.Infer(ctx, &call.Request{Pipeline: "double", Inputs: ...})
//	answer, err = m.Stream(ctx, request, func(c call.Chunk) error { ... })
//	answer, err = m.Result(ctx, requestID, wait)     // of a durable request
//	err = m.Cancel(ctx, requestID)
//	err = m.Stop()
//
// It is how a Go program embeds a mesh, and what `stagemesh up` runs. FromFile
// begins with what a mesh's file describes.
//
// Durable requests, their answers and dead letters are files of the broker. Those
// of the broker in the process are in Broker.StoreDir; without one they are in a
// temporary folder and end with Stop.
//
// A Mesh is started once, and Stop is called once Start has returned; what is
// used in another order says so in an error. Stages start beside each other, so
// the slowest runner is what Start waits for. A start that fails leaves nothing
// running.
package local
