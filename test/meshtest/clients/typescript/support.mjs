// What the tests of the client for TypeScript share.
import net from "node:net";

// Links stand between a client and a gateway, and break where a test says so.

/** Passes connections to a gateway. onData sees what comes back, and returns how much of it may pass. */
export async function link(url, onData = (data) => data.length) {
  const target = new URL(url);
  const sockets = new Set();
  const server = net.createServer((client) => {
    const gateway = net.connect(Number(target.port), target.hostname);
    for (const one of [client, gateway]) {
      sockets.add(one);
      one.on("error", () => {});
      one.on("close", () => {
        sockets.delete(one);
        client.destroy();
        gateway.destroy();
      });
    }
    client.pipe(gateway);
    gateway.on("data", (data) => {
      const passed = onData(data);
      client.write(data.subarray(0, passed), () => passed < data.length && client.resetAndDestroy());
    });
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const close = () =>
    new Promise((resolve) => {
      for (const one of sockets) {
        one.destroy();
      }
      server.close(resolve);
    });
  return { url: `${target.protocol}//127.0.0.1:${server.address().port}`, close };
}

/** Returns the fault that work throws. */
export async function faultOf(work) {
  try {
    await work;
  } catch (fault) {
    return fault;
  }
  throw new Error("there is no fault");
}

/** Waits until something is true. */
export async function eventually(what, isTrue) {
  for (let tries = 0; tries < 3000; tries++) {
    if (await isTrue()) {
      return;
    }
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
  throw new Error(`not so after 30 s: ${what}`);
}
