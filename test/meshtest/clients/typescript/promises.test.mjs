// The promises of @stagemesh/client with a real gateway: node promises.test.mjs.
//
// MESH is the URL of a mesh with the pipelines echo, slow, words and picture, with the token MESH_TOKEN
// and a certificate that MESH_CA has issued. It restarts after a line "restart", and then sends a line.
// With HTTP2 the client uses the transport of @connectrpc/connect-node, else fetch.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { createConnectTransport } from "@connectrpc/connect-node";
import * as client from "@stagemesh/client";
import { Mesh, newKey, Tensor } from "@stagemesh/client";
import { eventually, faultOf, link } from "./support.mjs";

const { MESH, MESH_TOKEN, MESH_CA, HTTP2 } = process.env;
const PATIENCE = 60_000;
const encoder = new TextEncoder();

function meshAt(url, settings = {}) {
  const ca = readFileSync(MESH_CA);
  const nodeOptions = { ca, maxSessionMemory: 2 ** 32 - 1 }; // as docs/clients.md says
  const transport = HTTP2 && createConnectTransport({ baseUrl: url, httpVersion: "2", nodeOptions });
  return new Mesh(url, { token: MESH_TOKEN, transport: transport || undefined, ...settings });
}

const mesh = meshAt(MESH);
process.on("warning", (warning) => { throw warning; });

test("inputs come back", async () => {
  const inputs = {
    tensor: new Tensor("INT16", [1, 2, 3, 4], [2, 2]),
    half: new Tensor("FP16", [0.5, Infinity]),
    words: new Tensor("BYTES", ["a", Uint8Array.of(255)]),
    floats: Float32Array.of(0.25, -1),
    large: BigInt64Array.of(-(2n ** 63n)),
    text: "\u00e9",
    document: { a: [1, null] },
    raw: Uint8Array.of(0, 1),
    picture: new Blob([Uint8Array.of(137, 80)], { type: "image/png" }),
    left: undefined,
  };
  const answer = await mesh.infer("echo", inputs);
  assert.deepEqual(answer.get("tensor").toArray(), [[1, 2], [3, 4]]);
  assert.deepEqual(answer.get("half").toArray(), [0.5, Infinity]);
  assert.deepEqual(answer.get("words").toArray().map((one) => [...one]), [[97], [255]]);
  assert.deepEqual([answer.get("floats").datatype, answer.get("floats").toArray()], ["FP32", [0.25, -1]]);
  assert.deepEqual(answer.get("large").data, inputs.large);
  assert.equal(answer.get("text"), "\u00e9");
  assert.deepEqual(answer.get("document"), { a: [1, null] });
  assert.deepEqual([...answer.get("raw")], [0, 1]);
  assert.deepEqual([[...answer.get("picture")], answer.contentTypes.picture], [[137, 80], "image/png"]);
  assert.throws(() => answer.get("left"), /no output "left"; there are tensor, half/);
  assert.throws(() => answer.value, /expected one output/);
  assert.deepEqual([answer.pipeline, answer.timeline.steps.map((step) => step.stage)], ["echo", ["echo"]]);
  assert.ok(answer.timeline.totalMs > 0 && answer.timeline.steps[0].runMs >= 0 && answer.requestId !== "");
  assert.match(String(answer.timeline), /step +queue +batch +run +batch of\n +e +/);
  const lines = String(answer);
  for (const line of ['tensor  INT16[2, 2] [[1,2],[3,4]]', 'half  FP16[2] [0.5,Infinity]', 'words  BYTES[2] ["a","1 bytes: ff"]', 'large  INT64[1] [-9223372036854775808]', 'raw  2 bytes']) {
    assert.ok(lines.includes(`\n  ${line}\n`), lines);
  }
  const { words, large } = JSON.parse(JSON.stringify(answer)).outputs;
  assert.deepEqual([words.data, large], [["a", "1 bytes: ff"], { datatype: "INT64", shape: [1], data: ["-9223372036854775808"] }]);
  const few = await mesh.infer("echo", inputs, { outputs: ["raw"] });
  assert.deepEqual(Object.keys(few.outputs), ["raw"]);
});

test("bytes take the type of the spec", async () => {
  assert.equal((await mesh.infer("stage:picture", { image: Uint8Array.of(137) })).value, "image/png");
  const wrong = await faultOf(mesh.infer("stage:picture", { image: new Blob(["x"], { type: "image/jpeg" }) }));
  assert.deepEqual([wrong.reason, wrong.stage], ["UNSUPPORTED_MEDIA_TYPE", "picture"]);
  assert.ok(wrong instanceof client.InvalidArgument);
});

test("large inputs come back", async () => {
  const large = new Uint8Array(3 << 20).map((_, i) => i * 31);
  assert.deepEqual((await mesh.infer("echo", { x: large })).value, large);
  assert.equal((await faultOf(mesh.infer("echo", { x: new Uint8Array(6 << 20) }))).reason, "PAYLOAD_TOO_LARGE");
  // Of a body that is refused unread, the system may lose the answer with the connection.
  const huge = await faultOf(mesh.infer("echo", { x: new Uint8Array(100 << 20) }, { retries: 0 }));
  assert.match(huge.reason, /PAYLOAD_TOO_LARGE|DISCONNECTED/);
});

test("wrong token and unknown authority", async () => {
  for (const token of ["", "wrong"]) {
    const fault = await faultOf(meshAt(MESH, { token }).infer("echo", { x: "1" }));
    assert.ok(fault instanceof client.Unauthenticated, String(fault));
  }
  if (HTTP2) { // nobody has told this process of the authority
    const fault = await faultOf(new Mesh(MESH, { token: MESH_TOKEN }).infer("echo", { x: "1" }));
    assert.ok(fault instanceof client.Disconnected && !fault.sent && !fault.retryable, String(fault));
    assert.match(fault.message, /certificate/);
    const transport = createConnectTransport({ baseUrl: MESH, httpVersion: "2" });
    const other = await faultOf(new Mesh(MESH, { token: MESH_TOKEN, transport }).infer("echo", { x: "1" }));
    assert.ok(other instanceof client.Disconnected && !other.sent && !other.retryable, String(other));
  }
});

test("the deadline is the gateway's", async () => {
  const fault = await faultOf(mesh.infer("slow", { x: "1" }, { timeoutMs: 300 }));
  assert.ok(fault instanceof client.DeadlineExceeded);
  assert.deepEqual([fault.reason, fault.stage], ["DEADLINE_EXCEEDED", "slow"]);
  const stream = mesh.stream("slow", { x: "1" }, { timeoutMs: 300, retries: 0 });
  assert.equal((await faultOf(stream[Symbol.asyncIterator]().next())).reason, "DEADLINE_EXCEEDED");
});

test("a cancelled request is cancelled", async () => {
  const pending = mesh.start("slow", { x: "1" }, { idempotencyKey: newKey() });
  await eventually("the gateway has it", async () => {
    const fault = await faultOf(mesh.result({ pipeline: "slow", key: pending.key }));
    assert.ok(fault instanceof client.NotFound);
    return !fault.message.includes("no request");
  });
  await mesh.cancel({ pipeline: "slow", key: pending.key });
  const fault = await faultOf(pending.result());
  assert.ok(fault instanceof client.Cancelled && fault.requestId !== "", String(fault));
  assert.equal(fault.key, pending.key);

  const left = mesh.start("slow", { x: "1" });
  assert.equal(left.key, "");
  await left.cancel();
  assert.ok((await faultOf(left.result())) instanceof client.Cancelled);
});

test("a durable result is fetched by its key", async () => {
  const pending = mesh.start("echo", { x: "kept" }, { durability: "file" });
  const answer = await pending.result();
  for (const request of [{ pipeline: "echo", key: pending.key }, { requestId: answer.requestId }]) {
    const again = await mesh.result(request, { waitMs: PATIENCE });
    assert.deepEqual([again.value, again.requestId], ["kept", answer.requestId]);
  }
  assert.ok((await faultOf(mesh.result({ pipeline: "echo", key: newKey() }))) instanceof client.NotFound);
});

test("a result is waited for before its request comes", async () => {
  const key = newKey();
  const early = mesh.result({ pipeline: "echo", key }, { waitMs: PATIENCE });
  const answer = await mesh.infer("echo", { x: "late" }, { durability: "file", idempotencyKey: key });
  assert.equal((await early).requestId, answer.requestId);
  const begin = performance.now();
  assert.ok((await faultOf(mesh.result({ pipeline: "echo", key: newKey() }, { waitMs: 300 }))) instanceof client.NotFound);
  assert.ok(performance.now() - begin >= 290);
});

test("the same key runs once", async () => {
  const keyed = mesh.withOptions({ idempotencyKey: newKey() });
  const [first, second] = [await keyed.infer("echo", { x: "a" }), await keyed.infer("echo", { x: "a" })];
  assert.equal(first.requestId, second.requestId);
  const fault = await faultOf(keyed.infer("echo", { x: "b" }));
  assert.ok(fault instanceof client.AlreadyExists && fault.reason === "IDEMPOTENCY_MISMATCH");
});

async function cancelled() {
  return Number((await mesh.infer("words", { text: "cancelled?" })).value);
}

test("streams, and leaving them early", async () => {
  const stream = mesh.stream("words", { text: "one two" });
  assert.throws(() => stream.answer, /has not ended/);
  const words = [];
  for await (const chunk of stream) {
    words.push([chunk.seq, chunk.get("word"), chunk.requestId]);
  }
  const { requestId, value, pipeline } = stream.answer;
  assert.deepEqual(words, [[1, "one ", requestId], [2, "two ", requestId]]);
  assert.deepEqual([value, pipeline], ["one two ", "words"]);
  assert.match((await faultOf(stream[Symbol.asyncIterator]().next())).message, /read once/);

  const leave = {
    "the loop ends": async () => {
      for await (const chunk of mesh.stream("words", { text: "forever" })) {
        assert.equal(chunk.value, "forever ");
        break;
      }
    },
    "the stream is closed": async () => {
      const endless = mesh.stream("words", { text: "forever" });
      const chunks = endless[Symbol.asyncIterator]();
      await chunks.next();
      endless.close();
      await assert.rejects(async () => { for (;;) await chunks.next().then((n) => assert.ok(!n.done)); }, client.Cancelled);
    },
    "the signal is aborted": async () => {
      const abort = new AbortController();
      const work = (async () => {
        for await (const _ of mesh.stream("words", { text: "forever" }, { signal: abort.signal })) {
          abort.abort(new Error("enough"));
        }
      })();
      const fault = await faultOf(work);
      assert.ok(fault instanceof client.Cancelled && fault.cause.message === "enough", String(fault));
    },
  };
  for (const [how, end] of Object.entries(leave)) {
    const before = await cancelled();
    await end();
    await eventually(`the request is cancelled when ${how}`, async () => (await cancelled()) > before);
  }
});

test("a stream fails after its chunks", async () => {
  const words = [];
  const work = (async () => {
    for await (const chunk of mesh.stream("words", { text: "one fail" })) {
      words.push(chunk.value);
    }
  })();
  const fault = await faultOf(work);
  assert.deepEqual([words, fault.reason, fault.stage], [["one "], "INVALID_INPUT", "words"]);
});

test("a stream that is cut in the middle is disconnected, and not begun again", async (t) => {
  let passed = 0;
  const cut = await link(MESH, (data) => {
    const room = Math.max(0, 20_000 - passed); // after the handshake and some words
    passed += data.length;
    return Math.min(room, data.length);
  });
  t.after(cut.close);
  let words = 0;
  const work = (async () => {
    for await (const _ of meshAt(cut.url).stream("words", { text: "forever" })) {
      words++;
    }
  })();
  const fault = await faultOf(work);
  assert.ok(fault instanceof client.Disconnected && fault.sent, String(fault));
  assert.ok(words > 0);
});

test("a slow reader gets all of a stream", async () => {
  const text = Array.from({ length: 200 }, (_, i) => `w${i}`).join(" ");
  let got = "";
  for await (const chunk of mesh.stream("words", { text })) {
    got += chunk.value;
    await new Promise((resolve) => setTimeout(resolve, 2));
  }
  assert.equal(got, `${text} `);
});

test("many requests", async () => {
  async function* items() {
    for (let n = 0; n < 200; n++) {
      yield n % 10 === 0 ? {} : { x: n };
    }
  }
  const got = [];
  for await (const { number, answer, fault } of mesh.inferMany("echo", items(), { inFlight: 16 })) {
    got.push([number, answer?.value ?? fault.reason]);
  }
  assert.deepEqual(got, Array.from({ length: 200 }, (_, n) => [n, n % 10 === 0 ? "INVALID_REQUEST" : n]));
});

test("jobs", async () => {
  const options = { pipeline: "echo", ttlMs: 3_600_000, attributes: { team: "a" }, priority: 1 };
  const job = await mesh.jobs.submit("nightly", { x: "later" }, options);
  assert.ok(job.id.startsWith("nightly.") && job.queue === "nightly");
  let last;
  for await (const event of mesh.jobs.watch(job)) {
    assert.equal(event.kind, "state");
    last = event.job;
  }
  assert.deepEqual([last.id, last.state, last.ended], [job.id, "succeeded", true]);
  assert.equal((await mesh.jobs.wait(job, { waitMs: PATIENCE })).state, "succeeded");
  assert.equal((await mesh.jobs.result(job.id)).value, "later");
  assert.equal((await mesh.jobs.get(job)).details.attributes.team, "a");
  assert.equal((await mesh.jobs.explain(job)).place.hold, "ended");
  assert.equal((await mesh.jobs.cancel(job)).state, "succeeded");
  assert.ok(Array.isArray((await mesh.jobs.list("nightly")).jobs));
  const { jobs, next } = await mesh.jobs.list("nightly", { ended: true, limit: 100 });
  assert.ok(jobs.some((one) => one.id === job.id) && Number.isInteger(next));
  const again = mesh.withOptions({ idempotencyKey: newKey() });
  const [one, two] = [await again.jobs.submit("nightly", { x: "a" }, options), await again.jobs.submit("nightly", { x: "a" }, options)];
  assert.equal(one.id, two.id);
  const fault = await faultOf(mesh.jobs.submit("none", { x: "a" }, { pipeline: "echo" }));
  assert.ok(fault instanceof client.NotFound && fault.reason === "UNKNOWN_QUEUE", String(fault));
  const unknown = job.id.slice(0, -1) + (job.id.endsWith("0") ? "1" : "0");
  assert.equal((await faultOf(mesh.jobs.get(unknown))).code, "NOT_FOUND");
});

test("a job fails with its fault, and is waited for no longer than asked", async () => {
  const failing = await mesh.jobs.submit("nightly", { text: "one fail" }, { pipeline: "words" });
  const ended = await mesh.jobs.wait(failing, { waitMs: PATIENCE });
  assert.deepEqual([ended.state, ended.reason], ["failed", "INVALID_INPUT"]);
  const fault = await faultOf(mesh.jobs.result(failing));
  assert.ok(fault instanceof client.InvalidArgument && fault.reason === "INVALID_INPUT", String(fault));

  const slow = await mesh.jobs.submit("nightly", { x: "1" }, { pipeline: "slow" });
  const late = await faultOf(mesh.jobs.wait(slow, { waitMs: 100 }));
  assert.ok(late instanceof client.DeadlineExceeded && /after 100 ms/.test(late.message), String(late));
  const stop = new AbortController();
  const waiting = faultOf(mesh.jobs.wait(slow, { signal: stop.signal }));
  stop.abort();
  assert.ok((await waiting) instanceof client.Cancelled);
  await mesh.jobs.cancel(slow);
  assert.ok((await faultOf(mesh.jobs.result(slow, { waitMs: PATIENCE }))) instanceof client.Cancelled);
});

test("a watch goes on where its connection broke", async (t) => {
  const text = Array.from({ length: 400 }, (_, i) => `w${i}`).join(" ");
  const job = await mesh.jobs.submit("nightly", { text }, { pipeline: "words" });
  await mesh.jobs.wait(job, { waitMs: PATIENCE });
  let cuts = 0;
  let passed = 0;
  const cut = await link(MESH, (data) => {
    passed += data.length;
    if (passed < 12_000 || cuts >= 3) {
      return data.length;
    }
    [passed, cuts] = [0, cuts + 1];
    return data.length - 1;
  });
  t.after(cut.close);
  const seqs = [];
  let state;
  for await (const event of meshAt(cut.url).jobs.watch(job)) {
    if (event.kind === "chunk") {
      seqs.push(event.chunk.seq);
    } else if (event.kind === "state") {
      state = event.job.state;
    } else {
      assert.equal(event.kind, "restart");
    }
  }
  assert.deepEqual([seqs, state], [Array.from({ length: 400 }, (_, i) => i + 1), "succeeded"]);
  assert.ok(cuts > 0, "nothing was cut");
});

test("a restart of the gateway costs no answer", async () => {
  const restarted = new Promise((resolve) => process.stdin.once("data", resolve));
  let isUp = false;
  void restarted.then(() => (isUp = true));
  process.stdout.write("restart\n");
  for (let asked = 0; !isUp; asked++) {
    assert.equal((await mesh.infer("echo", { x: asked }, { retries: 100 })).value, asked);
  }
  assert.equal((await mesh.infer("echo", { x: "after" }, { retries: 100 })).value, "after");
  process.stdin.destroy();
});
