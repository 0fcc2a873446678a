// Package local runs a whole mesh in one process: broker, gateway and stage
// hosts, as they run apart, but without a network between them.
//
//	m, err := local.New(local.Settings{Mesh: "demo"})
//	err = m.AddStage(local.Stage{Name: "double", Runner: runner})
//	err = m.AddPipeline(pipeline.Pipeline{...})
//	err = m.Start(ctx)
//	answer, err := m.Infer(ctx, &call.Request{Pipeline: "double", Inputs: ...})
//	answer, err = m.Stream(ctx, request, func(c call.Chunk) error { ... })
//	err = m.Stop()
//
// It is how a Go program embeds a mesh, and what `stagemesh up` runs. FromFile
// begins with what a mesh's file describes.
//
// A Mesh is started once, and Stop is called once Start has returned; what is
// used in another order says so in an error. Stages start beside each other, so
// the slowest runner is what Start waits for. A start that fails leaves nothing
// running.
package local
