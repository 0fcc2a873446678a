// Package pipelines has the pipelines of a mesh: those in its registry, which all
// gateways follow, or those of a file if there is no registry.
//
//	store, err := pipelines.New(pipelines.Settings{Table: table, Seeds: fromFile, Logger: log})
//	err = store.Run(ctx)                     // follows the registry; run it on a goroutine
//	p, f := store.Resolve("digits")          // the served pipeline
//	applied, err := store.Apply(ctx, p, nil) // changes it for all gateways
//
// # In the registry
//
// A pipeline is a JSON record under "pipelines/<name>". Each gateway mirrors all of them:
// requests never wait for the registry, and go on while it is unavailable. A store is
// Ready, and serves pipelines, once it has loaded the registry and its own seeds are
// there.
//
// Seeds are the pipelines of the gateway's file. A record remembers the seed that was
// written last. A gateway that starts writes a seed if the registry has no record of it,
// or if the file has changed. So an operator changes a file and restarts the gateways,
// and changes by Apply and Delete stay until a file changes. A deleted pipeline that is
// in a file leaves a record without a pipeline.
//
// Gateways fill a wiped registry with the entries that they had last. An entry beside
// the pipelines, the epoch, tells a wiped registry from one whose pipelines were deleted;
// it is written last, and every write changes one key. Until the epoch is back, gateways
// serve the entries that they had. A gateway that has missed a wipe, and a Delete after
// it, brings the pipeline back: to lose an applied pipeline would be worse.
//
// # Changes
//
// Apply and Delete compare revisions. Errors are *fault.Fault: INVALID_REQUEST,
// UNKNOWN_PIPELINE, REVISION_MISMATCH, NOT_SUPPORTED without a registry,
// PERMISSION_DENIED if the registry rejects the gateway's credentials, and
// REGISTRY_UNAVAILABLE, also if it is unknown whether the change was made: callers may
// ask for the same change again.
//
// Check finds the problems of a pipeline whose stages are known; it is a pure function.
//
// All methods are safe for concurrent use; call Run once. To test with it, use natskv on
// a broker of mesh/bus/testbed.
package pipelines
