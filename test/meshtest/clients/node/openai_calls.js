// Calls the models of a mesh with openai: node openai_calls.js HOST:PORT. Its token is "sesame". It
// ends with 1 when an answer is not as promised.
"use strict";

const assert = require("node:assert/strict");
const {OpenAI} = require("openai");

const options = {baseURL: `http://${process.argv[2]}/v1`, apiKey: "sesame", maxRetries: 0};
const client = new OpenAI(options);
const messages = [{role: "user", content: "I am afraid of my dog."}];
const answer = "How long have you been afraid of your dog?";
const chat = (body, ...more) => client.chat.completions.create({model: "eliza-1966", messages, ...body}, ...more);

async function main() {
  const whole = await chat({temperature: 0});
  assert.deepEqual([whole.choices[0].message.content, whole.choices[0].finish_reason, whole.usage.total_tokens], [answer, "stop", 15]);
  assert.equal(whole.id, `chatcmpl-${whole._request_id}`);

  let text = "", usage = null;
  for await (const chunk of await chat({temperature: 0, stream: true, stream_options: {include_usage: true}})) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.deepEqual([text, usage.completion_tokens], [answer, 9]);

  const endless = await chat({model: "endless", stream: true});
  for await (const chunk of endless) {
    assert.equal(chunk.choices[0].delta.content, "again ");
    break; // which closes the connection
  }

  const tale = await client.completions.create({model: "tale", prompt: "The ferryman", max_tokens: 2, temperature: 0});
  assert.equal(tale.choices[0].text, " said,");

  const floats = await client.embeddings.create({model: "hashing-256", input: "a ferry", encoding_format: "float"});
  const packed = await client.embeddings.create({model: "hashing-256", input: ["a ferry", "a boat"]});
  assert.equal(packed.data.length, 2);
  floats.data[0].embedding.forEach((x, i) => assert.ok(Math.abs(x - packed.data[0].embedding[i]) < 1e-6));

  assert.ok((await client.models.list()).data.some((one) => one.id === "tale"));
  assert.equal((await client.models.retrieve("org/a:b")).id, "org/a:b");
  await assert.rejects(chat({model: "none"}), (err) => err instanceof OpenAI.NotFoundError && err.code === "model_not_found");
  await assert.rejects(chat({n: 2}), (err) => err instanceof OpenAI.BadRequestError && err.param === "n");
  await assert.rejects(chat({model: "slow"}, {timeout: 300}), OpenAI.APIConnectionTimeoutError);
  const late = chat({model: "slow"}, {headers: {"Stagemesh-Timeout": "300ms"}});
  await assert.rejects(late, (err) => err.status === 504 && err.code === "deadline_exceeded" && Boolean(err.requestID));
  const stranger = new OpenAI({...options, apiKey: "wrong"});
  await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
  console.log("all calls are answered");
}

main().catch((err) => {
  console.error(err);
  process.exit(1);
});
