// What @stagemesh/client says where there is no connection: node connections.test.mjs.
//
// MESH is the URL of a gateway with TLS. FILES is a folder with certificates and keys that CA has
// issued, for 127.0.0.1 (good, old) and for another host (other), and one that it has not (foreign).
import assert from "node:assert/strict";
import { once } from "node:events";
import { readFileSync } from "node:fs";
import http from "node:http";
import http2 from "node:http2";
import net from "node:net";
import { after, test } from "node:test";
import { createConnectTransport } from "@connectrpc/connect-node";
import * as client from "@stagemesh/client";
import { Mesh } from "@stagemesh/client";
import { faultOf } from "./support.mjs";

const { MESH, CA, FILES, HTTP2 } = process.env;
const pair = (name) => ({ cert: readFileSync(`${FILES}/${name}.pem`), key: readFileSync(`${FILES}/${name}.key`) });

// CA is trusted: by NODE_EXTRA_CA_CERTS with fetch, else by the transport.
function meshAt(url) {
  const nodeOptions = { ca: readFileSync(CA) };
  return new Mesh(url, { retries: 1, transport: HTTP2 && createConnectTransport({ baseUrl: url, httpVersion: "2", nodeOptions }) });
}

const secure = (settings) => http2.createSecureServer({ allowHTTP1: true, ...settings }, (_, answer) => answer.end("hello"));
const raw = (onData) => net.createServer((socket) => socket.on("error", () => {}).once("data", () => onData(socket)));

for (const [name, server, { retryable = false, sent = false, says }] of [
  ["no TLS", http.createServer((_, answer) => answer.end()), { says: /the port does not speak TLS: use http:/ }],
  ["another protocol", raw((socket) => socket.end("SSH-2.0-x\r\n")), { says: /the port does not speak TLS/ }],
  ["an old version of TLS", secure({ ...pair("good"), minVersion: "TLSv1.1", maxVersion: "TLSv1.1", ciphers: "DEFAULT@SECLEVEL=0" }), { says: /no common version of TLS/ }],
  ["a foreign certificate", secure(pair("foreign")), { says: /certificate is not trusted: set NODE_EXTRA_CA_CERTS/ }],
  ["an old certificate", secure(pair("old")), { says: /certificate is not valid now/ }],
  ["the certificate of another host", secure(pair("other")), { says: /certificate is for other names/ }],
  ["a port that wants a certificate", secure({ ...pair("good"), requestCert: true, maxVersion: "TLSv1.2" }), { says: /requires a client certificate/ }],
  ["an end in the handshake", raw((socket) => socket.end()), { retryable: true, says: /ended before TLS began/ }],
  ["a reset", raw((socket) => socket.resetAndDestroy()), { retryable: true, sent: true, says: /gateway, or a proxy before it, has ended the connection/ }],
]) {
  test(name, async () => {
    let connections = 0;
    server.on("connection", () => { connections++; });
    await once(server.listen(0, "127.0.0.1"), "listening");
    after(() => server.close());
    const fault = await faultOf(meshAt(`https://127.0.0.1:${server.address().port}`).infer("echo", { x: "1" }));
    assert.ok(fault instanceof client.Disconnected, String(fault));
    assert.match(fault.message, says);
    assert.doesNotMatch(fault.message, /SSL routines/);
    assert.deepEqual([fault.retryable, fault.sent], [retryable, sent], fault.message);
    assert.equal(connections, retryable ? 2 : 1);
  });
}

test("nobody listens", async () => {
  const server = net.createServer();
  await once(server.listen(0, "127.0.0.1"), "listening");
  const { port } = server.address();
  await once(server.close(), "close");
  const fault = await faultOf(meshAt(`https://127.0.0.1:${port}`).infer("echo", { x: "1" }));
  assert.match(fault.message, /ECONNREFUSED.*; look at the host and the port of the URL, and whether the gateway runs/);
  assert.deepEqual([fault.retryable, fault.sent], [true, false]);
});

test("a gateway with TLS, without it", async () => {
  const fault = await faultOf(meshAt(MESH.replace("https:", "http:")).infer("echo", { x: "1" }));
  assert.match(fault.message, /https:/, String(fault));
});
