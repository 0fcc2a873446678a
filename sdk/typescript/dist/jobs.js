// The jobs of a mesh: requests that need not run now.
import { create } from "@bufbuild/protobuf";
import { timestampFromDate } from "@bufbuild/protobuf/wkt";
import * as calls from "./calls.js";
import { durationOf, link, SLACK_MS, WAIT_MS } from "./calls.js";
import { DeadlineExceeded, Fault, faultOfReason, InvalidAnswer, InvalidArgument } from "./faults.js";
import { InferResponseSchema } from "./gen/stagemesh/inference/v1/inference_pb.js";
import { HttpCallSchema, JobState, SubmitJobRequestSchema, } from "./gen/stagemesh/inference/v1/job_pb.js";
import { PartSchema } from "./gen/stagemesh/inference/v1/payload_pb.js";
import { Tensor } from "./tensor.js";
import { Answer, blobOf, Chunk } from "./values.js";
import { faultOf } from "./errors.js";
/** A job as it was when it was asked for; details has all that the gateway says of it. */
export class Job {
    details;
    id;
    queue;
    /** One of queued, running, delayed, succeeded, failed, expired, cancelled. */
    state;
    attempts;
    reason;
    message;
    constructor(details) {
        this.details = details;
        ({ id: this.id, queue: this.queue, attempts: this.attempts, reason: this.reason, message: this.message } = details);
        this.state = (JobState[details.state] ?? "unknown").toLowerCase();
    }
    /** Whether the job has come to its end. */
    get ended() {
        return this.details.endedAt !== undefined;
    }
}
// A watch is begun again after so long: a connection that died may be silent.
const WATCH_MS = 120_000;
/** The jobs of a mesh: mesh.jobs. A job is given as a Job or by its ID. */
export class Jobs {
    client;
    options;
    /** Mesh makes it. */
    constructor(client, options) {
        this.client = client;
        this.options = options;
    }
    /** Returns the same jobs with other options. */
    withOptions(options) {
        return new Jobs(this.client, calls.settle(this.options, options));
    }
    call(options, call, key = "") {
        return calls.attempt(calls.settle(this.options, options), call, { key });
    }
    /** Submits a job, once even if it is sent again: to a pipeline, or to the path of an HTTP target. */
    async submit(queue, inputs, options = {}) {
        const { pipeline = "", path, ttlMs, deadline, webhook = "", attributes, ...rest } = options;
        const settled = calls.settle(this.options, rest);
        const { priority = 0 } = settled;
        const request = create(SubmitJobRequestSchema, { queue, webhook, priority, attributes: { ...attributes } });
        const key = (request.idempotencyKey = settled.idempotencyKey || calls.newKey());
        if (path === undefined) {
            const value = await calls.encodeRequest(pipeline, inputs, { ...settled, priority: 0 });
            request.payload = { case: "infer", value };
        }
        else {
            request.payload = { case: "http", value: await httpCall(path, inputs) };
        }
        if (ttlMs !== undefined) {
            request.ttl = durationOf(ttlMs);
        }
        if (deadline !== undefined) {
            request.deadline = timestampFromDate(deadline);
        }
        return jobOf(await this.call(rest, (one) => this.client.submitJob(request, one), key));
    }
    /** Returns a job as it is now. */
    async get(job, options) {
        return jobOf(await this.call(options, (one) => this.client.getJob({ id: idOf(job) }, one)));
    }
    /** Cancels a job. */
    async cancel(job, options) {
        return jobOf(await this.call(options, (one) => this.client.cancelJob({ id: idOf(job) }, one)));
    }
    /** Returns what holds a job, its position, and when it may start. */
    async explain(job, options) {
        const answer = await this.call(options, (one) => this.client.explainJob({ id: idOf(job) }, one));
        return { job: jobOf(answer), place: answer.place };
    }
    /** Returns a job once it has ended, however it did; throws DeadlineExceeded if it has not after waitMs. */
    async wait(job, options) {
        return jobOf(await this.awaitEnd(job, options));
    }
    /**
     * Returns the answer of a job, for whose end it waits; throws the fault that it ended with. The answer of an HTTP
     * target is one output without a name.
     */
    async result(job, options) {
        const answer = await this.awaitEnd(job, options);
        const { state, reason, message, details } = jobOf(answer);
        const { requestId, pipeline } = details;
        if (state !== "succeeded") {
            throw faultOfReason(message || `the job is ${state}`, { reason: reason || "INTERNAL", requestId });
        }
        const { case: kind, value } = answer.result;
        if (kind === "infer") {
            return new Answer(value, pipeline);
        }
        const { contentType = "", body = new Uint8Array() } = value ?? {};
        const part = create(PartSchema, { body: { case: "blob", value: { contentType, data: body } } });
        return new Answer(create(InferResponseSchema, { requestId, outputs: [part] }), pipeline);
    }
    async awaitEnd(job, { waitMs = Infinity, ...options } = {}) {
        const end = performance.now() + waitMs;
        for (;;) {
            const piece = Math.max(0, Math.min(WAIT_MS, end - performance.now()));
            const request = { id: idOf(job), wait: durationOf(piece) };
            const settled = { ...options, timeoutMs: piece + SLACK_MS };
            const answer = await this.call(settled, (one) => this.client.getJob(request, one));
            const { ended, state } = jobOf(answer);
            if (ended) {
                return answer;
            }
            if (performance.now() >= end) {
                throw faultOfReason(`the job is ${state} after ${waitMs} ms`, { reason: "DEADLINE_EXCEEDED" });
            }
        }
    }
    /**
     * Returns jobs that have not ended, or that have, and the number after which the next page begins. waitMs is how
     * long to wait for the first new end.
     */
    async list(queue, options = {}) {
        const { ended = false, after = 0, limit = 50, waitMs = 0, ...rest } = options;
        const isWaiting = waitMs > 0;
        const wait = isWaiting ? { wait: durationOf(waitMs) } : {};
        const request = { queue, ended, after: BigInt(after), limit, ...wait };
        const settled = isWaiting ? { ...rest, timeoutMs: waitMs + SLACK_MS } : rest;
        const { jobs, next } = await this.call(settled, (one) => this.client.listJobs(request, one));
        return { jobs: jobs.map((one) => new Job(one)), next: Number(next) };
    }
    /** Yields the events of a job until its end; a connection that breaks is made again. */
    async *watch(job, options) {
        const { headers, retries, signal } = calls.settle(this.options, options);
        let [after, failures] = ["", 0];
        for (;;) {
            const { abort, unlink } = link(signal);
            const begun = performance.now();
            try {
                const call = calls.callOptions(WATCH_MS, headers, abort.signal);
                for await (const message of this.client.watchJob({ id: idOf(job), after }, call)) {
                    after = message.eventId || after;
                    const event = eventOf(message);
                    if (event !== undefined) {
                        failures = 0;
                        yield event;
                    }
                }
                return;
            }
            catch (error) {
                const fault = faultOf(error, signal);
                if (fault instanceof DeadlineExceeded && performance.now() - begun > WATCH_MS / 2) {
                    continue;
                }
                const mayMend = fault instanceof Fault && (fault.retryable || fault.reason === "STREAM_INTERRUPTED");
                if (!mayMend || ++failures > retries) {
                    throw fault;
                }
                await calls.sleep(calls.pauseBefore(failures, fault), signal);
            }
            finally {
                abort.abort();
                unlink();
            }
        }
    }
}
function idOf(job) {
    return typeof job === "string" ? job : job.id;
}
function jobOf({ job }) {
    if (job === undefined) {
        throw new InvalidAnswer("the answer has no job");
    }
    return new Job(job);
}
async function httpCall(path, inputs) {
    const [body, ...more] = Object.values(inputs);
    if (body === undefined || more.length > 0 || body instanceof Tensor) {
        throw new InvalidArgument("a call of an HTTP target has one input, no tensor", { reason: "INVALID_REQUEST" });
    }
    const { contentType, data } = await blobOf(body);
    return create(HttpCallSchema, { path, contentType: contentType || "application/octet-stream", body: data });
}
function eventOf({ event }) {
    switch (event.case) {
        case "state":
            return { kind: "state", job: new Job(event.value) };
        case "chunk":
            return {
                kind: "chunk",
                chunk: new Chunk(event.value.outputs, event.value.requestId, Number(event.value.seq)),
            };
        case "restart":
            return { kind: "restart", details: event.value };
        case "gap":
            return { kind: "gap", details: event.value };
        default:
            return undefined;
    }
}
