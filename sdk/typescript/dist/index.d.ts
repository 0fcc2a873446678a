export { newKey, type Options, type Parameter, type Waiting } from "./calls.js";
export * from "./faults.js";
export { Job, type JobEvent, type JobOptions, type Jobs } from "./jobs.js";
export { Mesh, type MeshSettings, type Outcome, type Pending, type RequestRef, type Stream } from "./mesh.js";
export { type Datatype, type Nested, Tensor, type TensorData, type TensorElement } from "./tensor.js";
export { type Answer, type Branch, type Chunk, type Input, type Inputs, type Json } from "./values.js";
export { type NumberArray, type Outputs, type Step, type Timeline, type Value } from "./values.js";
