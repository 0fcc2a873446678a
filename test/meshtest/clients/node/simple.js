// Asks a mesh for the model "simple" as clients of the protocol without generated code
// do: node simple.js HOST:PORT PROTO. It ends with 1 when an answer is not as promised.
"use strict";

const assert = require("node:assert/strict");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, proto] = process.argv.slice(2);
const patience = 30_000;

// The service as the file describes it; 64-bit integers are strings.
const definition = loader.loadSync(proto, {keepCase: true, longs: String, enums: String, defaults: true, oneofs: true});
const {GRPCInferenceService} = grpc.loadPackageDefinition(definition).inference;
const client = new GRPCInferenceService(address, grpc.credentials.createInsecure());

// ask calls a method and returns a promise of its answer.
function ask(method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, {deadline: Date.now() + patience}, (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

// int32s reads the raw bytes of an output.
function int32s(raw) {
  assert.equal(raw.length % 4, 0);
  return Array.from({length: raw.length / 4}, (_, i) => raw.readInt32LE(4 * i));
}

async function main() {
  assert.equal((await ask("ServerLive", {})).live, true);
  assert.equal((await ask("ServerReady", {})).ready, true);

  const model = await ask("ModelMetadata", {name: "simple"});
  const described = (list) => list.map(({name, datatype, shape}) => [name, datatype, ...shape].join(" "));
  assert.deepEqual(described(model.inputs), ["INPUT0 INT32 -1 16", "INPUT1 INT32 -1 16"]);
  assert.deepEqual(described(model.outputs), ["OUTPUT0 INT32 -1 16", "OUTPUT1 INT32 -1 16"]);

  const one = Array.from({length: 16}, (_, i) => i - 2 ** 31);
  const two = Array.from({length: 16}, (_, i) => 3 * i);
  const input = (name, values) => ({name, datatype: "INT32", shape: [1, 16], contents: {int_contents: values}});
  const answer = await ask("ModelInfer", {
    model_name: "simple",
    id: "from node",
    inputs: [input("INPUT0", one), input("INPUT1", two)],
    outputs: [{name: "OUTPUT0"}, {name: "OUTPUT1"}],
  });
  assert.equal(answer.id, "from node");
  assert.deepEqual(described(answer.outputs), ["OUTPUT0 INT32 1 16", "OUTPUT1 INT32 1 16"]);
  const [sum, difference] = answer.raw_output_contents.map(int32s);
  assert.deepEqual(sum, one.map((value, i) => (value + two[i]) | 0));
  assert.deepEqual(difference, one.map((value, i) => (value - two[i]) | 0));

  await assert.rejects(ask("ModelInfer", {model_name: "nothing"}), {code: grpc.status.NOT_FOUND});
  await assert.rejects(
    ask("ModelInfer", {model_name: "simple", inputs: [input("INPUT0", one.slice(1)), input("INPUT1", two)]}),
    ({code, details}) => code === grpc.status.INVALID_ARGUMENT && details.includes("INPUT0"),
  );
  console.log("16 sums and 16 differences are right");
}

main()
  .catch((error) => {
    console.error(error);
    process.exitCode = 1;
  })
  .finally(() => client.close());
