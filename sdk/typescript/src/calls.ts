// The options of calls, and when a call is made again.

import { create } from "@bufbuild/protobuf";
import { type Duration, DurationSchema } from "@bufbuild/protobuf/wkt";
import { Cancelled, Disconnected, Fault, Unimplemented } from "./faults.js";
import {
  type InferRequest,
  InferRequestSchema,
  StepOptionsSchema,
} from "./gen/stagemesh/inference/v1/inference_pb.js";
import { Durability, type Value, ValueSchema } from "./gen/stagemesh/inference/v1/payload_pb.js";
import { encodeInputs, type Inputs } from "./values.js";
import { faultOf } from "./errors.js";

export type Parameter = boolean | number | bigint | string;

/** Options of a call, or of all calls of a mesh. */
export interface Options {
  /** For the whole call with its retries; the mesh gets it as the deadline. Infinity leaves it to the pipeline. */
  readonly timeoutMs?: number | undefined;
  /** For all steps. */
  readonly parameters?: Readonly<Record<string, Parameter>> | undefined;
  /** For single steps: parameters by the step's name. */
  readonly steps?: Readonly<Record<string, Readonly<Record<string, Parameter>>>> | undefined;
  /** Names of the only outputs to return. */
  readonly outputs?: readonly string[] | undefined;
  /** Above 0 is served first, below 0 yields. */
  readonly priority?: number | undefined;
  readonly durability?: "memory" | "file" | undefined;
  /** Whether to wait at the gateway for an overloaded stage. */
  readonly waitForCapacity?: boolean | undefined;
  /** Whether an answer that would be partial is a failure, of pipelines with blocks. */
  readonly complete?: boolean | undefined;
  /** For runners; only keys that the gateway allows. */
  readonly metadata?: Readonly<Record<string, string>> | undefined;
  /** By which the request runs once, however often it is sent. */
  readonly idempotencyKey?: string | undefined;
  /** How many tries may follow the first; 0 for none. */
  readonly retries?: number | undefined;
  /** Further headers, such as traceparent. */
  readonly headers?: Readonly<Record<string, string>> | undefined;
  /** Ends the call, and with it a request that is neither durable nor has a key. */
  readonly signal?: AbortSignal | undefined;
}

export interface Waiting extends Options {
  /** How long to wait for an answer that is not there yet. */
  readonly waitMs?: number | undefined;
}

// A wait at the gateway is asked for in pieces, and its answer comes within the slack.
export const WAIT_MS = 20_000;
export const SLACK_MS = 30_000;
/** Before a result that a gateway does not know is asked for again. */
export const PAUSE_MS = 500;

/** Options with their defaults. */
export type Settled = Options & { readonly timeoutMs: number; readonly retries: number };

const NAMES: Readonly<Record<keyof Options, true>> = {
  timeoutMs: true, parameters: true, steps: true, outputs: true, priority: true, durability: true, waitForCapacity: true,
  complete: true, metadata: true, idempotencyKey: true, retries: true, headers: true, signal: true,
};

/** Returns options with changes, headers added to headers; throws TypeError or RangeError for what is not valid. */
export function settle(options: Options, changes: Options = {}): Settled {
  const unknown = Object.keys(changes).filter((name) => !Object.hasOwn(NAMES, name));
  if (unknown.length > 0) {
    throw new TypeError(`unknown option ${unknown.join(", ")}; there are ${Object.keys(NAMES).join(", ")}`);
  }
  const given = Object.fromEntries(Object.entries(changes).filter(([, value]) => value !== undefined));
  const headers = { ...options.headers, ...changes.headers };
  const out = { timeoutMs: 60_000, retries: 5, ...options, ...given, headers } as Settled;
  if (typeof out.timeoutMs !== "number" || !(out.timeoutMs > 0)) {
    throw new RangeError(`timeoutMs: expected a number above 0, got ${out.timeoutMs}`);
  }
  if (!["", "memory", "file"].includes(out.durability ?? "")) {
    throw new RangeError(`durability: expected "memory" or "file", got ${out.durability}`);
  }
  if (!(out.retries >= 0)) {
    throw new RangeError(`retries: ${out.retries} is not 0 or more`);
  }
  return out;
}

/** Returns a new idempotency key. */
export function newKey(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16)); // randomUUID needs a page with TLS
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Returns the idempotency key of a first try: the caller's own, or a new one of a durable request. */
export function firstKey(options: Options): string {
  return options.idempotencyKey || (options.durability === "file" ? newKey() : "");
}

/** Returns the message of a request, without timeout and key; throws InvalidArgument. */
export async function encodeRequest(pipeline: string, inputs: Inputs, options: Options): Promise<InferRequest> {
  const durability = { memory: Durability.MEMORY, file: Durability.FILE, "": Durability.UNSPECIFIED };
  const out = create(InferRequestSchema, {
    pipeline,
    inputs: await encodeInputs(inputs),
    parameters: encodeParameters(options.parameters),
    durability: durability[options.durability ?? ""],
    priority: options.priority ?? 0,
    metadata: { ...options.metadata },
    outputs: [...(options.outputs ?? [])],
    complete: options.complete ?? false,
  });
  for (const [step, parameters] of Object.entries(options.steps ?? {})) {
    out.steps[step] = create(StepOptionsSchema, { parameters: encodeParameters(parameters) });
  }
  if (options.waitForCapacity !== undefined) {
    out.waitForCapacity = options.waitForCapacity;
  }
  return out;
}

function encodeParameters(parameters: Readonly<Record<string, Parameter>> = {}): Record<string, Value> {
  return Object.fromEntries(Object.entries(parameters).map(([name, value]) => [name, encodeParameter(value)]));
}

function encodeParameter(value: Parameter): Value {
  switch (typeof value) {
    case "boolean":
      return create(ValueSchema, { kind: { case: "boolValue", value } });
    case "string":
      return create(ValueSchema, { kind: { case: "stringValue", value } });
    case "number":
      if (!Number.isSafeInteger(value)) {
        return create(ValueSchema, { kind: { case: "doubleValue", value } });
      }
  }
  const kind = value > 0x7fff_ffff_ffff_ffffn ? "uint64Value" : "int64Value";
  return create(ValueSchema, { kind: { case: kind, value: BigInt(value) } });
}

export function durationOf(ms: number): Duration {
  return create(DurationSchema, { seconds: BigInt(Math.floor(ms / 1000)), nanos: Math.floor((ms % 1000) * 1e6) });
}

/** Options for Connect. */
export interface Call {
  headers: Record<string, string>;
  signal?: AbortSignal;
  timeoutMs?: number;
}

/** What one try of a call gets: the time that is left, and its idempotency key. */
export interface Try extends Call {
  leftMs: number;
  key: string;
}

// The client waits this much longer than the deadline, for the gateway's own word.
const GRACE_MS = 500;
// Pauses before retries: the first, doubled after each, and the longest.
const FIRST_PAUSE_MS = 200;
const LONGEST_PAUSE_MS = 5000;
const LONGEST_TIMER_MS = 2 ** 31 - 1;

/** Returns how long to wait before the next try: with jitter, and at least as long as asked for. */
export function pauseBefore(failures: number, fault: Fault): number {
  const pause = Math.min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS * 2 ** (failures - 1)) * (0.5 + Math.random() / 2);
  return Math.max(pause, (fault.retryAfterMs ?? 0) * (1 + Math.random() / 10));
}

/**
 * Makes a call, again after faults that a retry may mend, until the deadline.
 *
 * The key is that of the first try. Without one, tries after a connection that broke have a new key if
 * mayKey says so, as the mesh may have the request by then.
 */
export async function attempt<T>(
  options: Settled,
  call: (one: Try) => Promise<T>,
  { key = "", mayKey = false } = {},
): Promise<T> {
  const end = performance.now() + options.timeoutMs;
  const { signal, headers } = options;
  let made = "";
  for (let failures = 1; ; failures++) {
    const leftMs = Math.max(1, end - performance.now());
    try {
      signal?.throwIfAborted();
      return await call({ ...callOptions(leftMs + GRACE_MS, headers, signal), leftMs, key: key || made });
    } catch (error) {
      const fault = faultOf(error, signal);
      if (!(fault instanceof Fault)) {
        throw fault;
      }
      fault.key = key || made;
      const pause = pauseBefore(failures, fault);
      const needsNoKey = made !== "" && fault instanceof Unimplemented; // a mesh without a broker has no keys
      const isLast = failures > options.retries || performance.now() + pause >= end;
      if (isLast || !(fault.retryable || needsNoKey)) {
        throw fault;
      }
      if (needsNoKey) {
        made = "";
      } else if (mayKey && key === "" && fault instanceof Disconnected && fault.sent) {
        made ||= newKey();
      }
      await sleep(pause, signal);
    }
  }
}

/** Returns options for Connect. */
export function callOptions(timeoutMs: number, headers: Options["headers"], signal?: AbortSignal): Call {
  return {
    headers: { ...headers },
    ...(signal === undefined ? {} : { signal }),
    ...(timeoutMs > LONGEST_TIMER_MS ? {} : { timeoutMs: Math.ceil(timeoutMs) }),
  };
}

/** Waits; throws Cancelled once the signal is aborted. */
export function sleep(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const abort = (): void => {
      clearTimeout(timer);
      reject(new Cancelled("the caller has cancelled the call", { reason: "CANCELLED", cause: signal?.reason }));
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", abort);
      resolve();
    }, ms);
    signal?.addEventListener("abort", abort, { once: true });
  });
}

/** Lets a signal abort a controller too, until unlink is called. */
export function link(signal: AbortSignal | undefined, abort = new AbortController()) {
  const follow = (): void => abort.abort(signal?.reason);
  signal?.addEventListener("abort", follow, { once: true });
  if (signal?.aborted === true) {
    follow();
  }
  return { abort, unlink: () => signal?.removeEventListener("abort", follow) };
}
