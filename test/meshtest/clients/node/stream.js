// Asks a mesh for the model "words" on one stream both ways, and leaves another one in
// its middle: node stream.js HOST:PORT PROTO. It ends with 1 when an answer is not as
// promised.
"use strict";

const assert = require("node:assert/strict");
const {once} = require("node:events");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, proto] = process.argv.slice(2);
const patience = 30_000;
const soon = 5_000; // on a busy machine; without a cancel a stream goes on until its deadline

const definition = loader.loadSync(proto, {keepCase: true, longs: String, enums: String, defaults: true, oneofs: true});
const {GRPCInferenceService} = grpc.loadPackageDefinition(definition).inference;
const client = new GRPCInferenceService(address, grpc.credentials.createInsecure());

const deadline = () => ({deadline: Date.now() + patience});

function request(id, text) {
  return {
    model_name: "words",
    id,
    parameters: {triton_enable_empty_final_response: {bool_param: true}},
    inputs: [{name: "text", datatype: "BYTES", shape: [1], contents: {bytes_contents: [Buffer.from(text)]}}],
  };
}

// word reads the one element of a message's output, after its length; null where there is none.
function word({infer_response: {raw_output_contents: [raw]}}) {
  return raw ? raw.subarray(4).toString().trim() : null;
}

// sideBySide asks for several texts, none of which goes on before all have begun.
async function sideBySide() {
  const call = client.ModelStreamInfer(deadline());
  const want = {};
  for (const id of ["a", "b", "c"]) {
    want[id] = ["meet:3", `${id}1`, `${id}2`, null];
    call.write(request(id, want[id].filter(Boolean).join(" ")));
  }
  call.write(request("bad", "x fail y"));
  call.end();
  const got = {};
  let error = "";
  for await (const message of call) {
    const {id, parameters} = message.infer_response;
    if (message.error_message) {
      assert.equal(id, "bad");
      error = message.error_message;
      continue;
    }
    (got[id] ??= []).push(word(message));
    assert.equal(parameters.triton_final_response.bool_param, got[id].at(-1) === null);
  }
  assert.deepEqual(got, {...want, bad: ["x"]});
  assert.match(error, /^INVALID_INPUT: .*says fail/);
}

// cancelled asks how many texts the worker has given up.
async function cancelled() {
  const call = client.ModelStreamInfer(deadline());
  call.end(request("how many", "cancelled?"));
  let many;
  for await (const message of call) many ??= Number(word(message));
  return many;
}

// leaving goes away from an answer that has no end.
async function leaving() {
  const before = await cancelled();
  const call = client.ModelStreamInfer(deadline());
  call.write(request("long", "forever"));
  const [message] = await once(call, "data");
  assert.equal(word(message), "forever");
  const left = once(call, "error").catch((error) => [error]);
  call.cancel();
  assert.equal((await left)[0].code, grpc.status.CANCELLED);
  const late = Date.now() + soon;
  while ((await cancelled()) === before) assert.ok(Date.now() < late, "the worker goes on");
}

sideBySide()
  .then(leaving)
  .then(() => console.log("words came in order, and stopped when nobody listened"))
  .catch((error) => {
    console.error(error);
    process.exitCode = 1;
  })
  .finally(() => client.close());
