// When and how @stagemesh/client asks again: node retries.test.mjs.
//
// FRONT is the URL of a gateway's port whose pipelines are scripts (typescript_test.go): what comes
// first is "id", an input that names a series of tries, and the pipeline "seen" says what came of it.
// FAULTS is docs/faults.md.
import assert from "node:assert/strict";
import diagnostics from "node:diagnostics_channel";
import { once } from "node:events";
import { readFileSync } from "node:fs";
import http from "node:http";
import net from "node:net";
import { test } from "node:test";
import { createConnectTransport } from "@connectrpc/connect-node";
import * as client from "@stagemesh/client";
import { Mesh, newKey, Tensor } from "@stagemesh/client";
import { faultOf, link } from "./support.mjs";

const { FRONT, FAULTS, HTTP2 } = process.env;

function meshAt(url, settings = {}) {
  const transport = HTTP2 && createConnectTransport({ baseUrl: url, httpVersion: "2" });
  return new Mesh(url, { transport: transport || undefined, ...settings });
}

const mesh = meshAt(FRONT);

/** Returns what a gateway saw of a series: the key, timeout in ms, and options of each try. */
async function seen(id) {
  return (await mesh.infer("seen", { id })).value;
}

async function keys(id) {
  return (await seen(id)).map((one) => one.key);
}

test("the reasons are those of the documentation", () => {
  const rows = [...readFileSync(FAULTS, "utf8").matchAll(/^\| ([A-Z_]+) \| ([A-Z_]+) \| \d+ \| (yes|no) \|/gm)];
  assert.ok(rows.length > 40);
  const own = Object.entries(client.CODES).flatMap(([code, [, reasons]]) => reasons.split(" ").map((one) => [one, code]));
  assert.deepEqual(own.sort(), rows.map(([, reason, code]) => [reason, code]).sort());
  const retryable = rows.filter(([, , , can]) => can === "yes").map(([, reason]) => reason);
  assert.deepEqual([...client.RETRYABLE].sort(), [...retryable, "DISCONNECTED"].sort());
});

test("every reason is its class", async () => {
  for (const [code, [kind, reasons]] of Object.entries(client.CODES)) {
    for (const reason of reasons.split(" ")) {
      const fault = await faultOf(mesh.infer(`fails:${reason}`, { id: newKey() }, { retries: 0 }));
      assert.equal(fault.constructor, kind, reason);
      assert.deepEqual([fault.reason, fault.code, fault.name], [reason, code, kind.name]);
      assert.equal(fault.retryable, client.RETRYABLE.has(reason));
      assert.deepEqual([fault.stage, fault.step, fault.host], ["resnet", "classify", "host-1"]);
      assert.deepEqual([fault.retryAfterMs, fault.message], [1500, `what went wrong: ${reason}`]);
      assert.deepEqual(fault.violations.map(({ field, description }) => [field, description]), [["inputs.pixels.shape", "rank 3, not 4"]]);
      assert.match(fault.requestId, /^0199aaaa-/);
      assert.equal(String(fault), `${reason} at stage resnet: what went wrong: ${reason} (request ${fault.requestId})`);
    }
  }
  const unknown = await faultOf(mesh.infer("fails:OF_A_LATER_VERSION", { id: newKey() }, { retries: 0 }));
  assert.ok(unknown instanceof client.Internal && unknown.reason === "OF_A_LATER_VERSION" && !unknown.retryable);
});

test("retryable faults are tried again, without a key", async () => {
  for (const reason of ["QUEUE_FULL", "NO_CAPACITY", "RUNNER_STALLED"]) {
    const id = newKey();
    assert.equal((await mesh.infer(`flaky:2:${reason}`, { id })).value, id);
    assert.deepEqual(await keys(id), ["", "", ""]);
  }
});

test("other faults are thrown at once, and final ones too", async () => {
  for (const pipeline of ["flaky:1:RUNNER_FAILED", "flaky:1:INVALID_INPUT", "final:1:RUNNER_OUT_OF_MEMORY"]) {
    const id = newKey();
    const fault = await faultOf(mesh.infer(pipeline, { id }));
    assert.ok(!fault.retryable);
    assert.equal((await seen(id)).length, 1, pipeline);
  }
});

test("tries are bounded", async () => {
  for (const retries of [0, 2]) {
    const id = newKey();
    assert.equal((await faultOf(mesh.infer("flaky:9:QUEUE_FULL", { id }, { retries }))).reason, "QUEUE_FULL");
    assert.equal((await seen(id)).length, 1 + retries);
  }
});

test("a pause is as long as asked for, and none is waited for beyond the deadline", async () => {
  let begun = performance.now();
  await mesh.infer("paused:1:700", { id: newKey() });
  assert.ok(performance.now() - begun >= 700);
  begun = performance.now();
  const fault = await faultOf(mesh.infer("paused:1:60000", { id: newKey() }, { timeoutMs: 5000 }));
  assert.deepEqual([fault.reason, fault.retryAfterMs], ["QUEUE_FULL", 60_000]);
  assert.ok(performance.now() - begun < 4000);
});

test("later tries have the time that is left, and without a timeout none is sent", async () => {
  const [id, other] = [newKey(), newKey()];
  await mesh.infer("flaky:2:QUEUE_FULL", { id }, { timeoutMs: 20_000 });
  const [first, second, third] = (await seen(id)).map((one) => one.timeout_ms);
  assert.ok(first <= 20_000 && first > 19_000 && second <= first - 100 && third <= second - 200, `${first} ${second} ${third}`);
  await mesh.infer("flaky:1:QUEUE_FULL", { id: other }, { timeoutMs: Infinity });
  assert.deepEqual((await seen(other)).map((one) => one.timeout_ms), [0, 0]);
});

/** Passes nothing of the first answers of a gateway. */
async function breaking(t, times) {
  let left = times;
  const broken = await link(FRONT, (data) => {
    // The frames by which HTTP/2 begins are no answer.
    const isAnswer = data.includes("application/") || data.length > 100;
    return isAnswer && left-- > 0 ? 0 : data.length;
  });
  t.after(broken.close);
  return meshAt(broken.url);
}

test("after a broken connection tries have one new key", async (t) => {
  const id = newKey();
  await (await breaking(t, 2)).infer("flaky:0:QUEUE_FULL", { id });
  const [first, second, third, ...more] = await keys(id);
  assert.deepEqual([first, third, more], ["", second, []]);
  assert.match(second, /^[0-9a-f]{32}$/);
});

test("a mesh without keys gets none", async (t) => {
  const id = newKey();
  assert.equal((await (await breaking(t, 1)).infer("keyless", { id })).value, id);
  const [first, second, third] = await keys(id);
  assert.ok(first === "" && second !== "" && third === "");
});

test("a durable request and a caller's own key are there from the first try", async (t) => {
  const [id, own] = [newKey(), newKey()];
  const broken = await breaking(t, 1);
  await broken.infer("flaky:0:QUEUE_FULL", { id }, { durability: "file" });
  const [first, second] = await keys(id);
  assert.ok(first !== "" && first === second);
  await mesh.infer("flaky:1:QUEUE_FULL", { id: own }, { idempotencyKey: "order-4711" });
  assert.deepEqual(await keys(own), ["order-4711", "order-4711"]);
  const fault = await faultOf(mesh.infer("fails:RUNNER_FAILED", { id: newKey() }, { idempotencyKey: "k" }));
  assert.equal(fault.key, "k");
});

test("a gateway that cannot be reached is disconnected", async () => {
  const gone = await link(FRONT);
  await gone.close();
  const fault = await faultOf(meshAt(gone.url).infer("echo", { id: "1" }, { retries: 1 }));
  assert.ok(fault instanceof client.Disconnected && fault instanceof client.Unavailable, String(fault));
  assert.deepEqual([fault.reason, fault.sent, fault.retryable, fault.key], ["DISCONNECTED", false, true, ""]);
});

// The error occurs while connecting, or after the request was sent.
test("a network error is unsent only while connecting", async (t) => {
  let fail;
  const server = net.createServer((socket) => socket.on("error", () => {}).once("data", () => fail()));
  await once(server.listen(0, "127.0.0.1"), "listening");
  t.after(() => server.close());
  const url = `http://localhost:${server.address().port}`;
  for (const code of ["EHOSTUNREACH", "ENETUNREACH", "ENETDOWN", "ETIMEDOUT"]) {
    for (const syscall of ["connect", "read", "write"]) {
      const watch = ({ socket }) => {
        fail = () => socket.destroy(Object.assign(new Error(`${syscall} ${code}`), { code, syscall }));
        if (syscall === "connect") {
          socket.once("lookup", fail);
        }
      };
      diagnostics.subscribe("net.client.socket", watch);
      const fault = await faultOf(meshAt(url).infer("echo", { id: "1" }, { retries: 0 }));
      diagnostics.unsubscribe("net.client.socket", watch);
      assert.deepEqual([fault.reason, fault.sent, fault.retryable], ["DISCONNECTED", syscall !== "connect", true], `${syscall} ${code}: ${fault}`);
      assert.match(fault.message, new RegExp(`${syscall} ${code}`));
    }
  }
});

test("answers of others are not taken for faults", async (t) => {
  const answers = {
    404: { "Content-Type": "text/html" },
    200: { "Content-Type": "text/html" },
    302: { Location: "http://127.0.0.1:1/" },
    503: { "Content-Type": "text/plain" },
  };
  const server = http.createServer((request, response) => {
    request.resume().on("end", () => {
      const status = Number(request.url.split("/")[1]);
      response.writeHead(status, answers[status]).end("of a proxy");
    });
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  t.after(() => { server.closeAllConnections(); server.close(); });
  const url = `http://127.0.0.1:${server.address().port}`;
  for (const [path, kind] of [["404", client.InvalidAnswer], ["200", client.InvalidAnswer], ["503", client.Disconnected]]) {
    const fault = await faultOf(new Mesh(`${url}/${path}/`, { retries: 0 }).infer("p", { id: "1" }));
    assert.equal(fault.constructor, kind, `${path}: ${fault}`);
  }
  // A redirect is an error of fetch, as a broken connection is.
  assert.ok((await faultOf(new Mesh(`${url}/302/`, { retries: 0 }).infer("p", { id: "1" }))) instanceof client.Fault);
});

test("a silent gateway is a passed deadline", async (t) => {
  const silent = await link(FRONT, (data) => (data.includes("application/") || data.length > 100 ? -1 : data.length));
  silent.close();
  const server = http.createServer(() => {});
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  t.after(() => { server.closeAllConnections(); server.close(); });
  const begun = performance.now();
  const fault = await faultOf(new Mesh(`http://127.0.0.1:${server.address().port}`).infer("p", { id: "1" }, { timeoutMs: 200 }));
  assert.ok(fault instanceof client.DeadlineExceeded, String(fault));
  const took = performance.now() - begun;
  assert.ok(took >= 650 && took < 5000, `it took ${took} ms`);
});

test("an aborted signal ends calls and pauses", async () => {
  for (const pipeline of ["waits", "paused:9:60000"]) {
    const id = newKey();
    const abort = new AbortController();
    const work = faultOf(mesh.infer(pipeline, { id }, { timeoutMs: Infinity, signal: abort.signal }));
    while ((await seen(id)).length === 0);
    abort.abort(new Error("enough"));
    const fault = await work;
    assert.ok(fault instanceof client.Cancelled && fault.cause.message === "enough", String(fault));
    const before = await faultOf(mesh.infer(pipeline, { id }, { signal: abort.signal }));
    assert.ok(before instanceof client.Cancelled);
    assert.equal((await seen(id)).length, 1);
  }
});

test("a stream is tried again before its first chunk, and not after it", async () => {
  const [id, late] = [newKey(), newKey()];
  const got = [];
  for await (const chunk of mesh.stream("flaky:2:QUEUE_FULL", { id })) {
    got.push(chunk.value);
  }
  assert.deepEqual([got, (await seen(id)).length], [[], 3]);
  const work = (async () => {
    for await (const chunk of mesh.stream("late:9:QUEUE_FULL", { id: late })) {
      got.push(chunk.value);
    }
  })();
  assert.equal((await faultOf(work)).reason, "QUEUE_FULL");
  assert.deepEqual([got, (await seen(late)).length], [["one ", "two "], 1]);
});

test("options are sent", async () => {
  const id = newKey();
  await mesh.withOptions({ priority: 3, metadata: { user: "u" }, parameters: { a: true } }).infer("flaky:0:x", { id }, {
    parameters: { yes: true, n: 3, half: 0.5, big: 2n ** 63n, text: "3" },
    steps: { classify: { top: 3 } },
    outputs: ["id"],
    durability: "file",
    waitForCapacity: false,
    complete: true,
    headers: { traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01" },
  });
  const [{ key, timeout_ms, ...options }] = await seen(id);
  assert.ok(key !== "" && timeout_ms > 0);
  assert.deepEqual(options, {
    parameters: { yes: true, n: 3, half: 0.5, big: 2 ** 63, text: "3" },
    steps: { classify: { top: 3 } },
    outputs: ["id"],
    priority: 3,
    durability: "file",
    metadata: { user: "u" },
    wait_for_capacity: false,
    complete: true,
    trace: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
  });
});

test("what is not valid is refused before anything is sent", async () => {
  const id = newKey();
  const bad = {
    "no inputs": [{}, "INVALID_REQUEST"],
    "a function": [{ id, x: () => 1 }, "INVALID_INPUT"],
    "a number of no JSON": [{ id, x: [1, NaN] }, "INVALID_INPUT"],
    "a map": [{ id, x: new Map() }, "INVALID_INPUT"],
    "a big number": [{ id, x: 1n }, "INVALID_INPUT"],
    "half a pair": [{ id, x: "\ud800" }, "INVALID_INPUT"],
  };
  for (const [what, [inputs, reason]] of Object.entries(bad)) {
    const fault = await faultOf(mesh.infer("flaky:0:x", inputs));
    assert.ok(fault instanceof client.InvalidArgument && fault.reason === reason, `${what}: ${fault}`);
    if (reason === "INVALID_INPUT") {
      assert.equal(fault.violations[0].field, "inputs.x");
    }
  }
  assert.deepEqual(await seen(id), []);
  for (const options of [{ timeoutMs: 0 }, { timeoutMs: NaN }, { timeoutMs: "3" }, { retries: -1 }, { durability: "disk" }]) {
    assert.throws(() => mesh.withOptions(options), RangeError);
  }
  assert.throws(() => mesh.withOptions({ timeout: 3 }), /unknown option timeout; there are timeoutMs, /);
  for (const inputs of [undefined, null, "text", new Uint8Array(3), ["a"], new Blob(["b"])]) {
    assert.match((await faultOf(mesh.infer("flaky:0:x", inputs))).message, /^inputs are given by name, such as \{ image: \.\.\. \}, got /);
  }
  for (const [url, settings] of [["ftp://x"], ["http://a:b@x"], ["http://x", { token: "a\nb" }], ["x"]]) {
    assert.throws(() => new Mesh(url, settings), TypeError, url);
  }
});

test("tensors hold only what they can", () => {
  for (const [datatype, data, shape] of [
    ["FP33", [1]], ["INT8", [128]], ["INT8", [0.5]], ["UINT64", [-1n]], ["INT64", [2 ** 63]], ["BOOL", [2]], ["FP32", ["1"]],
    ["BYTES", [1]], ["FP32", [1, 2], [3]], ["FP32", [1], [-1]], ["INT32", [[1]]],
  ]) {
    assert.throws(() => new Tensor(datatype, data, shape), /datatype|element|shape/, `${datatype} ${data}`);
  }
  const nested = new Tensor("FP64", Float64Array.from({ length: 24 }, (_, i) => i), [2, 3, 4]).toArray();
  assert.deepEqual(nested[1][2], [20, 21, 22, 23]);
  assert.deepEqual(new Tensor("INT8", [], [2, 0]).toArray(), [[], []]);
  assert.equal(new Tensor("FP32", [7], []).toArray(), 7);
  assert.deepEqual(new Tensor("BOOL", [true, 0], [1, 2]).toArray(), [[true, false]]);
  assert.deepEqual(new Tensor("BYTES", ["\u00e9", "b"]).texts(), ["\u00e9", "b"]);
  assert.deepEqual(new Tensor("INT64", [1, 2n]).data, BigInt64Array.of(1n, 2n));
});

test("tensors are printed whatever they hold", () => {
  const bytes = [Buffer.from("h\u00e9"), Uint8Array.from({ length: 20 }, () => 0xff)];
  for (const [datatype, data, text, json] of [
    ["INT64", [2n ** 53n + 1n, 1n], "[9007199254740993,1]", ["9007199254740993", 1]],
    ["FP32", [NaN, -Infinity, 0.5], "[NaN,-Infinity,0.5]", ["NaN", "-Infinity", 0.5]],
    ["BOOL", [true, false], "[true,false]", [true, false]],
    ["BYTES", bytes, `["h\u00e9","20 bytes: ${"ff ".repeat(16)}..."]`, ["h\u00e9", `20 bytes: ${"ff ".repeat(16)}...`]],
  ]) {
    const tensor = new Tensor(datatype, data);
    assert.equal(String(tensor), `${datatype}[${data.length}] ${text}`);
    assert.deepEqual(JSON.parse(JSON.stringify(tensor)).data, json);
  }
  assert.match(String(new Tensor("INT8", new Int8Array(60), [6, 10])), /^INT8\[6, 10\] \[(0,){49}0\]\.\.\.$/);
});

test("half floats are rounded as IEEE 754 has it", () => {
  const bits = (datatype, x) => new Tensor(datatype, [x]).data[0];
  const cases = {
    FP16: [
      [0, 0], [-0, 0x8000], [1, 0x3c00], [-2, 0xc000], [65504, 0x7bff], [65519.9, 0x7bff], [65520, 0x7c00], [1e9, 0x7c00],
      [Infinity, 0x7c00], [-Infinity, 0xfc00], [NaN, 0x7e00], [2 ** -24, 1], [2 ** -25, 0], [2 ** -25 * 1.001, 1],
      [2 ** -14, 0x400], [2 ** -14 - 2 ** -24, 0x3ff], [1 + 2 ** -11, 0x3c00], [1 + 3 * 2 ** -11, 0x3c02], [0.1, 0x2e66],
    ],
    BF16: [[1, 0x3f80], [3.14159274, 0x4049], [Infinity, 0x7f80], [NaN, 0x7fc0], [3.4e38, 0x7f80], [2 ** -133, 1], [-0.5, 0xbf00]],
  };
  for (const [datatype, pairs] of Object.entries(cases)) {
    for (const [x, want] of pairs) {
      assert.equal(bits(datatype, x), want, `${datatype} of ${x}`);
    }
    for (let value = 0; value < 1 << 16; value++) { // each value comes back
      const [x] = new Tensor(datatype, Uint16Array.of(value)).toArray();
      if (!Number.isNaN(x)) {
        assert.equal(bits(datatype, x), value);
      }
    }
  }
});

test("many requests: order, bounds, and ends", async () => {
  const items = (n) => Array.from({ length: n }, (_, i) => ({ id: `${i}` }));
  const numbers = [];
  for await (const { number, answer } of mesh.inferMany("shuffled", items(40), { inFlight: 8 })) {
    assert.equal(answer.value, `${number}`);
    numbers.push(number);
  }
  assert.deepEqual(numbers, Array.from({ length: 40 }, (_, i) => i));
  const unordered = [];
  for await (const { number } of mesh.inferMany("shuffled", items(40), { inFlight: 8, ordered: false })) {
    unordered.push(number);
  }
  assert.notDeepEqual(unordered, numbers);
  assert.deepEqual(unordered.sort((a, b) => a - b), numbers);

  let read = 0;
  let returned = false;
  function* endless() {
    try {
      for (;;) {
        yield { id: `${read++}` };
      }
    } finally {
      returned = true;
    }
  }
  let taken = 0;
  for await (const outcome of mesh.inferMany("shuffled", endless(), { inFlight: 4 })) {
    assert.ok(outcome.answer);
    assert.ok(read - taken <= 5, `${read} are read when ${taken} were taken`);
    if (++taken === 20) {
      break;
    }
  }
  assert.ok(returned);

  const waiting = newKey();
  for await (const { number } of mesh.inferMany("waits", [{ id: waiting }, { id: newKey() }], { timeoutMs: 100, retries: 0 })) {
    assert.equal(number, 0);
    break;
  }

  const broken = (async () => {
    for await (const _ of mesh.inferMany("shuffled", (function* () { yield { id: "1" }; throw new Error("no more"); })()));
  })();
  assert.equal((await faultOf(broken)).message, "no more");

  const abort = new AbortController();
  const aborted = (async () => {
    for await (const { fault } of mesh.inferMany("waits", items(3), { signal: abort.signal, timeoutMs: Infinity })) {
      assert.ok(fault instanceof client.Cancelled);
    }
  })();
  abort.abort();
  assert.ok((await faultOf(aborted)) instanceof client.Cancelled);

  // One whose items pause ends too, and one that was aborted before begins nothing.
  const pausing = new AbortController();
  const paused = (async () => {
    const none = { [Symbol.asyncIterator]: () => ({ next: () => new Promise(() => {}) }) };
    for await (const _ of mesh.inferMany("waits", none, { signal: pausing.signal }));
  })();
  pausing.abort();
  assert.ok((await faultOf(paused)) instanceof client.Cancelled);
  const before = (async () => {
    for await (const _ of mesh.inferMany("shuffled", items(3), { signal: AbortSignal.abort() }));
  })();
  assert.ok((await faultOf(before)) instanceof client.Cancelled);
  await assert.rejects(mesh.inferMany("shuffled", items(3), { inFlight: 0 }).next(), RangeError);
});

test("outcomes come while the items still do", async () => {
  let more;
  const asked = new Promise((resolve) => (more = resolve));
  async function* items() {
    yield { id: "first" };
    await asked; // nobody asks before the first outcome
    yield { id: "second" };
  }
  const got = [];
  for await (const { answer } of mesh.inferMany("shuffled", items())) {
    got.push(answer.value);
    more();
  }
  assert.deepEqual(got, ["first", "second"]);
});
