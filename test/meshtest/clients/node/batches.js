// Runs a batch on a mesh with openai: node batches.js HOST:PORT. It ends with 1 when an answer is
// not as promised.
"use strict";

const assert = require("node:assert/strict");
const {OpenAI, toFile} = require("openai");

const client = new OpenAI({baseURL: `http://${process.argv[2]}/v1`, apiKey: "none"});
const patience = 60_000;
const ends = ["completed", "failed", "expired", "cancelled"];

const line = (custom_id, body) => JSON.stringify({custom_id, method: "POST", url: "/v1/embeddings", body}) + "\n";

async function main() {
  const content = line("a", {model: "echo", input: "x"}) + line("b", {model: "echo", input: "y"});
  const file = await client.files.create({
    file: await toFile(Buffer.from(content), "in.jsonl"), purpose: "batch", expires_after: {anchor: "created_at", seconds: 3600},
  });
  assert.deepEqual([file.bytes, file.filename, file.expires_at - file.created_at], [content.length, "in.jsonl", 3600]);

  let batch = await client.batches.create({input_file_id: file.id, endpoint: "/v1/embeddings", completion_window: "24h"});
  const deadline = Date.now() + patience;
  while (!ends.includes(batch.status) && Date.now() < deadline) {
    batch = await client.batches.retrieve(batch.id);
  }
  assert.equal(batch.status, "completed");
  assert.deepEqual(batch.request_counts, {total: 2, completed: 2, failed: 0});
  const text = await (await client.files.content(batch.output_file_id)).text();
  const lines = text.trim().split("\n").map((one) => JSON.parse(one));
  assert.deepEqual(lines.map((one) => [one.custom_id, one.response.body.input, one.error]), [["a", "x", null], ["b", "y", null]]);

  const listed = [];
  for await (const one of client.batches.list({limit: 1})) {
    listed.push(one.id);
  }
  assert.ok(listed.includes(batch.id));
  await assert.rejects(client.batches.cancel(batch.id), (err) => err instanceof OpenAI.BadRequestError);
  assert.equal((await client.files.delete(file.id)).deleted, true);
  await assert.rejects(client.files.retrieve(file.id), (err) => err instanceof OpenAI.NotFoundError && err.code === "not_found");
  console.log("2 lines are done");
}

main().catch((err) => {
  console.error(err);
  process.exit(1);
});
