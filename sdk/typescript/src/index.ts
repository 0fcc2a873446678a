// A client of a mesh: requests, streams and jobs over Connect. docs/clients.md is the guide.
//
// mesh.ts has the calls and jobs.ts those of jobs; calls.ts has their options, and when they are made again;
// errors.ts makes faults of errors; values.ts and tensor.ts turn values into messages and back; faults.ts has what is
// thrown. gen has the messages, and the services for clients of one's own.

export { newKey, type Options, type Parameter, type Waiting } from "./calls.js";
export * from "./faults.js";
export { Job, type JobEvent, type JobOptions, type Jobs } from "./jobs.js";
export { Mesh, type MeshSettings, type Outcome, type Pending, type RequestRef, type Stream } from "./mesh.js";
export { type Datatype, type Nested, Tensor, type TensorData, type TensorElement } from "./tensor.js";
export { type Answer, type Branch, type Chunk, type Input, type Inputs, type Json } from "./values.js";
export { type NumberArray, type Outputs, type Step, type Timeline, type Value } from "./values.js";
