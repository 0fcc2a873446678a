// Package bed starts a mesh for the time of a measurement, of a mesh's file: in this
// process, or as processes of this program.
//
//	b, err := bed.Start(ctx, bed.Settings{File: "mesh.yaml"})
//	... b.URL() ...
//	err = b.Stop()
//
// The mesh is that of the file, but that it takes free ports of 127.0.0.1, and that a
// broker in it keeps its files in a temporary folder: so it is beside other meshes, and
// does not touch what they keep. A mesh whose file has nats.url shares that broker, and
// stores what is durable there.
//
// # Processes
//
// With Settings.Program the broker and the gateway are one process, and each host of a
// stage one: that program, with the arguments that Part and its verbs understand. A
// process says on a line of JSON that it is ready, and where. It ends when its standard
// input does, which is also when this process dies, and so none is left behind. What a
// process writes to its standard error is kept, bounded, for the error that tells of
// its end.
//
// A Bed is stopped once; Start leaves nothing behind when it fails.
package bed
