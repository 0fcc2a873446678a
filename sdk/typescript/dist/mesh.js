// Mesh: the calls of a mesh.
import { createClient } from "@connectrpc/connect";
import { createConnectTransport } from "@connectrpc/connect-web";
import * as calls from "./calls.js";
import { attempt, durationOf, firstKey, link, PAUSE_MS, SLACK_MS, sleep, WAIT_MS } from "./calls.js";
import { Fault, InvalidAnswer, NotFound } from "./faults.js";
import { InferenceService, } from "./gen/stagemesh/inference/v1/inference_pb.js";
import { JobService } from "./gen/stagemesh/inference/v1/job_pb.js";
import { Jobs } from "./jobs.js";
import { Answer, Chunk } from "./values.js";
import { faultOf } from "./errors.js";
/**
 * A mesh behind the URL of a gateway.
 *
 *     const mesh = new Mesh("http://127.0.0.1:8080");
 *     const answer = await mesh.infer("digits", { image: png });
 *
 * All failures are Faults. Options of a call win over those of the mesh; headers are added to them.
 */
export class Mesh {
    url;
    options;
    inference;
    /** The jobs of the mesh. */
    jobs;
    constructor(url, settings = {}) {
        const { token, fetch = globalThis.fetch, transport, ...options } = settings;
        const parsed = URL.canParse(url) ? new URL(url) : undefined;
        if (parsed === undefined || !/^https?:$/.test(parsed.protocol) || parsed.username !== "" || parsed.search !== "") {
            const shown = url.replace(/.*@/, "...@").replace(/\?.*/, "?...");
            throw new TypeError(`url: expected http:// or https:// and a host, without a user or a query, got ${shown}`);
        }
        const { origin, pathname } = parsed;
        if (!/^[\x20-\x7e]*$/.test(token ?? "")) {
            throw new TypeError("token: it has characters that no token has; is there a line end in it?");
        }
        this.url = origin + pathname.replace(/\/+$/, "");
        const authorization = token === undefined ? {} : { authorization: `Bearer ${token.trim()}` };
        this.options = calls.settle({ headers: authorization }, options);
        const used = transport ?? createConnectTransport({ baseUrl: this.url, useBinaryFormat: true, fetch });
        this.inference = createClient(InferenceService, used);
        this.jobs = new Jobs(createClient(JobService, used), this.options);
    }
    /** Returns the same mesh with other options. */
    withOptions(options) {
        const settled = this.settle(options);
        const changes = { options: settled, jobs: this.jobs.withOptions(settled) };
        return Object.assign(Object.create(Mesh.prototype), this, changes);
    }
    settle(options) {
        return calls.settle(this.options, options);
    }
    /** Runs a request and returns its answer; a pipeline may also be stage:NAME or model:NAME. */
    async infer(pipeline, inputs, options) {
        const settled = this.settle(options);
        return this.run(pipeline, inputs, settled, firstKey(settled));
    }
    async run(pipeline, inputs, o, key) {
        const request = await calls.encodeRequest(pipeline, inputs, o);
        const send = (one) => this.inference.infer(timed(request, one), one);
        return new Answer(await attempt(o, send, { key, mayKey: true }), pipeline);
    }
    /** Runs a request whose answer comes in chunks. It begins with the first; leaving the loop early ends the request. */
    stream(pipeline, inputs, options) {
        const settled = this.settle(options);
        return new Stream(pipeline, settled.signal, async (signal) => {
            const request = await calls.encodeRequest(pipeline, inputs, settled);
            const send = async (one) => {
                const messages = this.inference.inferStream(timed(request, one), one)[Symbol.asyncIterator]();
                return { first: await messages.next(), messages };
            };
            return attempt({ ...settled, signal }, send, { key: firstKey(settled) });
        });
    }
    /** Runs a request in the background. */
    start(pipeline, inputs, options) {
        const settled = this.settle(options);
        const { abort, unlink } = link(settled.signal);
        const key = firstKey(settled);
        const answer = this.run(pipeline, inputs, { ...settled, signal: abort.signal }, key).finally(unlink);
        answer.catch(() => { }); // nobody may ask for it
        const cancel = async () => {
            abort.abort();
            await (key && this.cancel({ pipeline, key }, { headers: settled.headers }));
        };
        return { pipeline, key, result: () => answer, cancel };
    }
    /**
     * Runs a request for each item, and yields their outcomes: in their order, or as they are ready. At most inFlight
     * items are read ahead of the outcomes that were taken.
     */
    async *inferMany(pipeline, items, { inFlight = 64, ordered = true, ...options } = {}) {
        if (!(inFlight >= 1)) {
            throw new RangeError(`inFlight: expected at least 1, got ${inFlight}`);
        }
        const { signal } = this.settle(options);
        const { abort, unlink } = link(signal);
        const settled = this.settle({ ...options, idempotencyKey: "" });
        const inside = new Set(); // Node warns where one signal has many listeners
        abort.signal.addEventListener("abort", () => inside.forEach((one) => one.abort(abort.signal.reason)));
        const done = new Map();
        let [begun, taken, hasEnded] = [0, 0, false];
        let failure = undefined; // of the items, or a defect
        const waiting = [];
        const change = () => new Promise((resolve) => waiting.push(resolve));
        const wake = () => waiting.splice(0).forEach((resolve) => resolve());
        const stop = () => {
            failure ??= { error: faultOf(undefined, signal) };
            wake();
        };
        signal?.addEventListener("abort", stop);
        if (signal?.aborted === true) {
            stop();
        }
        const run = async (number, inputs) => {
            const own = new AbortController();
            inside.add(own);
            try {
                const answer = await this.run(pipeline, inputs, { ...settled, signal: own.signal }, firstKey(settled));
                done.set(number, { number, answer });
            }
            catch (error) {
                failure ??= error instanceof Fault ? undefined : { error };
                done.set(number, { number, fault: error });
            }
            inside.delete(own);
            wake();
        };
        const feed = async () => {
            for await (const inputs of items) {
                if (abort.signal.aborted) {
                    return;
                }
                void run(begun++, inputs);
                while (begun - taken >= inFlight && !abort.signal.aborted) {
                    await change();
                }
            }
        };
        const end = (error) => {
            failure ??= error === undefined ? undefined : { error };
            hasEnded = true;
            wake();
        };
        feed().then(end, end);
        try {
            while (failure === undefined && !(hasEnded && taken === begun)) {
                const outcome = done.get(ordered ? taken : (done.keys().next().value ?? -1));
                if (outcome === undefined) {
                    await change();
                }
                else {
                    done.delete(outcome.number);
                    taken++;
                    wake();
                    yield outcome;
                }
            }
            if (failure !== undefined) {
                throw failure.error;
            }
        }
        finally {
            signal?.removeEventListener("abort", stop);
            abort.abort();
            wake();
            unlink();
            while (taken + done.size < begun) {
                await change();
            }
        }
    }
    /** Returns the stored answer of a durable request, or of one with a key; waits so long for it. */
    async result(request, waiting = {}) {
        const { waitMs = 0, ...options } = waiting;
        const end = performance.now() + waitMs;
        for (;;) {
            const asked = performance.now();
            const piece = Math.min(Math.max(0, end - asked), WAIT_MS);
            try {
                const message = { ...named(request), wait: durationOf(piece) };
                const settled = this.settle({ ...options, timeoutMs: piece + SLACK_MS });
                const { result } = await attempt(settled, (one) => this.inference.getResult(message, one));
                if (result === undefined) {
                    throw new InvalidAnswer("the answer has no result");
                }
                return new Answer(result, "key" in request ? request.pipeline : "");
            }
            catch (fault) {
                const now = performance.now();
                if (!(fault instanceof NotFound) || fault.reason !== "NOT_FOUND" || now >= end) {
                    throw fault;
                }
                if (now - asked < piece / 2) {
                    await sleep(Math.min(end - now, PAUSE_MS), options.signal); // a gateway that does not know the key yet does not wait
                }
            }
        }
    }
    /** Cancels a request. */
    async cancel(request, options) {
        await attempt(this.settle(options), (one) => this.inference.cancel(named(request), one));
    }
}
function named(request) {
    return "key" in request ? { pipeline: request.pipeline, idempotencyKey: request.key } : request;
}
/** Returns the request of a try. */
function timed(request, { leftMs, key }) {
    const out = { ...request, idempotencyKey: key };
    return leftMs === Infinity ? out : { ...out, timeout: durationOf(leftMs) };
}
/** The chunks of an answer as they arrive, for one loop. */
export class Stream {
    pipeline;
    signal;
    begin;
    whole;
    hasBegun = false;
    own = new AbortController();
    /** Mesh.stream makes it. */
    constructor(pipeline, signal, begin) {
        this.pipeline = pipeline;
        this.signal = signal;
        this.begin = begin;
    }
    async *[Symbol.asyncIterator]() {
        if (this.hasBegun) {
            throw new Error("a stream is read once");
        }
        this.hasBegun = true;
        const { own } = this;
        const { unlink } = link(this.signal, own);
        try {
            const { first, messages } = await this.begin(own.signal);
            for (let next = first; next.done !== true; next = await messages.next()) {
                const { message, requestId, seq } = next.value;
                if (message.case === "chunk") {
                    yield new Chunk(message.value.outputs, requestId, Number(seq));
                }
                else if (message.case === "final") {
                    this.whole = new Answer(message.value, this.pipeline);
                }
            }
        }
        catch (error) {
            throw faultOf(error, own.signal);
        }
        finally {
            own.abort();
            unlink();
        }
        if (this.whole === undefined) {
            throw new InvalidAnswer("the stream ended without an answer");
        }
    }
    /** The whole answer, once the loop over the chunks has ended; throws before. */
    get answer() {
        if (this.whole === undefined) {
            throw new Error("the stream has not ended; its answer comes after the last chunk");
        }
        return this.whole;
    }
    /** Ends the stream, and its request, unless that is durable or has a key. */
    close() {
        this.own.abort();
    }
}
