// A client of a mesh: requests, streams and jobs over Connect. docs/clients.md is the guide.
//
// mesh.ts has the calls and jobs.ts those of jobs; calls.ts has their options, and when they are made again;
// errors.ts makes faults of errors; values.ts and tensor.ts turn values into messages and back; faults.ts has what is
// thrown. gen has the messages, and the services for clients of one's own.
export { newKey } from "./calls.js";
export * from "./faults.js";
export { Job } from "./jobs.js";
export { Mesh } from "./mesh.js";
export { Tensor } from "./tensor.js";
export {} from "./values.js";
export {} from "./values.js";
