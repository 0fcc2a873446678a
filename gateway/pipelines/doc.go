// Package pipelines is the pipelines of a mesh: as its registry keeps them, for all
// gateways to follow, or those of a file where there is no registry.
//
//	store, err := pipelines.New(pipelines.Settings{Table: table, Seeds: fromFile, Logger: log})
//	err = store.Run(ctx)                     // follows the registry, on a goroutine
//	p, f := store.Resolve("digits")          // what is served now
//	applied, err := store.Apply(ctx, p, nil) // changes it for all gateways
//
// # In the registry
//
// A pipeline is a record under "pipelines/<name>", in JSON. Each gateway mirrors all
// of them: requests never ask the registry, and go on while it is away. A store is
// Ready, and serves pipelines, once it has heard of the registry and its own seeds are
// there.
//
// Seeds are the pipelines of the gateway's file. A record remembers what a file said
// of it last. A gateway that starts writes a seed where the registry has no record of
// it, or where the file says something else than it did; so who changes a file and
// starts the gateways anew has the change, and what was changed or deleted by Apply and
// Delete stays so until a file changes. A deleted pipeline that is in a file leaves a
// record without a pipeline, which says so.
//
// A registry that is wiped is filled again by the gateways with what they had last: an
// entry beside the pipelines, the epoch, tells a wiped registry from one whose
// pipelines were deleted. Until the epoch is back, gateways serve what they had. A
// gateway that has missed a wipe, and a Delete after it, brings the pipeline back: to
// lose one that was applied would be worse.
//
// # Changes
//
// Apply and Delete are compared and set by revision. Errors are *fault.Fault:
// INVALID_REQUEST, UNKNOWN_PIPELINE, REVISION_MISMATCH, NOT_SUPPORTED without a
// registry, PERMISSION_DENIED where the registry refuses the gateway's credentials,
// and REGISTRY_UNAVAILABLE, also where it is not known whether the change was made:
// the same change may be asked for again.
//
// Check says what is wrong with a pipeline whose stages are known; it is a pure
// function.
//
// All methods are safe for concurrent use; Run is called once. To test with it, use
// natskv on a broker of mesh/bus/bustest.
package pipelines
