// The jobs of a mesh: requests that need not run now.

import { create } from "@bufbuild/protobuf";
import { timestampFromDate } from "@bufbuild/protobuf/wkt";
import type { Client } from "@connectrpc/connect";
import * as calls from "./calls.js";
import { durationOf, link, type Options, type Settled, SLACK_MS, type Waiting, WAIT_MS } from "./calls.js";
import { DeadlineExceeded, Fault, faultOfReason, InvalidAnswer, InvalidArgument } from "./faults.js";
import { InferResponseSchema } from "./gen/stagemesh/inference/v1/inference_pb.js";
import {
  type GetJobResponse,
  type HttpCall,
  HttpCallSchema,
  type Job as JobMessage,
  type JobGap,
  type JobPlace,
  type JobRestart,
  type JobService,
  JobState,
  SubmitJobRequestSchema,
  type WatchJobResponse,
} from "./gen/stagemesh/inference/v1/job_pb.js";
import { PartSchema } from "./gen/stagemesh/inference/v1/payload_pb.js";
import { Tensor } from "./tensor.js";
import { Answer, blobOf, Chunk, type Inputs, type Outputs } from "./values.js";
import { faultOf } from "./errors.js";

/** Options of a job, beside those of its request. */
export interface JobOptions extends Options {
  /** May be left out if the queue has one. */
  readonly pipeline?: string | undefined;
  /** Of an HTTP target, such as /v1/chat/completions; the only input is the body. */
  readonly path?: string | undefined;
  /** When the job expires, at the earlier of the two; the queue's ttl without both. */
  readonly ttlMs?: number | undefined;
  readonly deadline?: Date | undefined;
  /** URL that gets the job once it has ended. */
  readonly webhook?: string | undefined;
  readonly attributes?: Readonly<Record<string, string>> | undefined;
}

/** A job as it was when it was asked for; details has all that the gateway says of it. */
export class Job {
  readonly id: string;
  readonly queue: string;
  /** One of queued, running, delayed, succeeded, failed, expired, cancelled. */
  readonly state: string;
  readonly attempts: number;
  readonly reason: string;
  readonly message: string;

  constructor(readonly details: JobMessage) {
    ({ id: this.id, queue: this.queue, attempts: this.attempts, reason: this.reason, message: this.message } = details);
    this.state = (JobState[details.state] ?? "unknown").toLowerCase();
  }

  /** Whether the job has come to its end. */
  get ended(): boolean {
    return this.details.endedAt !== undefined;
  }
}

/** An event of a job. After a restart the chunks so far do not count; a gap stands for chunks that are not kept. */
export type JobEvent<O extends Outputs = Outputs> =
  | { readonly kind: "state"; readonly job: Job }
  | { readonly kind: "chunk"; readonly chunk: Chunk<O> }
  | { readonly kind: "restart"; readonly details: JobRestart }
  | { readonly kind: "gap"; readonly details: JobGap };

// A watch is begun again after so long: a connection that died may be silent.
const WATCH_MS = 120_000;

/** The jobs of a mesh: mesh.jobs. A job is given as a Job or by its ID. */
export class Jobs {
  /** Mesh makes it. */
  constructor(private readonly client: Client<typeof JobService>, private readonly options: Settled) {}

  /** Returns the same jobs with other options. */
  withOptions(options: Options): Jobs {
    return new Jobs(this.client, calls.settle(this.options, options));
  }

  private call<T>(options: Options | undefined, call: (one: calls.Try) => Promise<T>, key = ""): Promise<T> {
    return calls.attempt(calls.settle(this.options, options), call, { key });
  }

  /** Submits a job, once even if it is sent again: to a pipeline, or to the path of an HTTP target. */
  async submit(queue: string, inputs: Inputs, options: JobOptions = {}): Promise<Job> {
    const { pipeline = "", path, ttlMs, deadline, webhook = "", attributes, ...rest } = options;
    const settled = calls.settle(this.options, rest);
    const { priority = 0 } = settled;
    const request = create(SubmitJobRequestSchema, { queue, webhook, priority, attributes: { ...attributes } });
    const key = (request.idempotencyKey = settled.idempotencyKey || calls.newKey());
    if (path === undefined) {
      const value = await calls.encodeRequest(pipeline, inputs, { ...settled, priority: 0 });
      request.payload = { case: "infer", value };
    } else {
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
  async get(job: Job | string, options?: Options): Promise<Job> {
    return jobOf(await this.call(options, (one) => this.client.getJob({ id: idOf(job) }, one)));
  }

  /** Cancels a job. */
  async cancel(job: Job | string, options?: Options): Promise<Job> {
    return jobOf(await this.call(options, (one) => this.client.cancelJob({ id: idOf(job) }, one)));
  }

  /** Returns what holds a job, its position, and when it may start. */
  async explain(job: Job | string, options?: Options): Promise<{ job: Job; place: JobPlace | undefined }> {
    const answer = await this.call(options, (one) => this.client.explainJob({ id: idOf(job) }, one));
    return { job: jobOf(answer), place: answer.place };
  }

  /** Returns a job once it has ended, however it did; throws DeadlineExceeded if it has not after waitMs. */
  async wait(job: Job | string, options?: Waiting): Promise<Job> {
    return jobOf(await this.awaitEnd(job, options));
  }

  /**
   * Returns the answer of a job, for whose end it waits; throws the fault that it ended with. The answer of an HTTP
   * target is one output without a name.
   */
  async result<O extends Outputs = Outputs>(job: Job | string, options?: Waiting): Promise<Answer<O>> {
    const answer = await this.awaitEnd(job, options);
    const { state, reason, message, details } = jobOf(answer);
    const { requestId, pipeline } = details;
    if (state !== "succeeded") {
      throw faultOfReason(message || `the job is ${state}`, { reason: reason || "INTERNAL", requestId });
    }
    const { case: kind, value } = answer.result;
    if (kind === "infer") {
      return new Answer<O>(value, pipeline);
    }
    const { contentType = "", body = new Uint8Array() } = value ?? {};
    const part = create(PartSchema, { body: { case: "blob", value: { contentType, data: body } } });
    return new Answer<O>(create(InferResponseSchema, { requestId, outputs: [part] }), pipeline);
  }

  private async awaitEnd(job: Job | string, { waitMs = Infinity, ...options }: Waiting = {}): Promise<GetJobResponse> {
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
  async list(
    queue: string,
    options: Waiting & { readonly ended?: boolean; readonly after?: number; readonly limit?: number } = {},
  ): Promise<{ jobs: Job[]; next: number }> {
    const { ended = false, after = 0, limit = 50, waitMs = 0, ...rest } = options;
    const isWaiting = waitMs > 0;
    const wait = isWaiting ? { wait: durationOf(waitMs) } : {};
    const request = { queue, ended, after: BigInt(after), limit, ...wait };
    const settled = isWaiting ? { ...rest, timeoutMs: waitMs + SLACK_MS } : rest;
    const { jobs, next } = await this.call(settled, (one) => this.client.listJobs(request, one));
    return { jobs: jobs.map((one) => new Job(one)), next: Number(next) };
  }

  /** Yields the events of a job until its end; a connection that breaks is made again. */
  async *watch<O extends Outputs = Outputs>(
    job: Job | string,
    options?: Options,
  ): AsyncGenerator<JobEvent<O>, void, undefined> {
    const { headers, retries, signal } = calls.settle(this.options, options);
    let [after, failures] = ["", 0];
    for (;;) {
      const { abort, unlink } = link(signal);
      const begun = performance.now();
      try {
        const call = calls.callOptions(WATCH_MS, headers, abort.signal);
        for await (const message of this.client.watchJob({ id: idOf(job), after }, call)) {
          after = message.eventId || after;
          const event = eventOf<O>(message);
          if (event !== undefined) {
            failures = 0;
            yield event;
          }
        }
        return;
      } catch (error) {
        const fault = faultOf(error, signal);
        if (fault instanceof DeadlineExceeded && performance.now() - begun > WATCH_MS / 2) {
          continue;
        }
        const mayMend = fault instanceof Fault && (fault.retryable || fault.reason === "STREAM_INTERRUPTED");
        if (!mayMend || ++failures > retries) {
          throw fault;
        }
        await calls.sleep(calls.pauseBefore(failures, fault), signal);
      } finally {
        abort.abort();
        unlink();
      }
    }
  }
}

function idOf(job: Job | string): string {
  return typeof job === "string" ? job : job.id;
}

function jobOf({ job }: { job?: JobMessage | undefined }): Job {
  if (job === undefined) {
    throw new InvalidAnswer("the answer has no job");
  }
  return new Job(job);
}

async function httpCall(path: string, inputs: Inputs): Promise<HttpCall> {
  const [body, ...more] = Object.values(inputs);
  if (body === undefined || more.length > 0 || body instanceof Tensor) {
    throw new InvalidArgument("a call of an HTTP target has one input, no tensor", { reason: "INVALID_REQUEST" });
  }
  const { contentType, data } = await blobOf(body);
  return create(HttpCallSchema, { path, contentType: contentType || "application/octet-stream", body: data });
}

function eventOf<O extends Outputs>({ event }: WatchJobResponse): JobEvent<O> | undefined {
  switch (event.case) {
    case "state":
      return { kind: "state", job: new Job(event.value) };
    case "chunk":
      return {
        kind: "chunk",
        chunk: new Chunk<O>(event.value.outputs, event.value.requestId, Number(event.value.seq)),
      };
    case "restart":
      return { kind: "restart", details: event.value };
    case "gap":
      return { kind: "gap", details: event.value };
    default:
      return undefined;
  }
}
