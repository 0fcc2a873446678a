// What callers give as inputs, and get as outputs.

import { create } from "@bufbuild/protobuf";
import type { Duration } from "@bufbuild/protobuf/wkt";
import { InvalidAnswer, InvalidArgument } from "./faults.js";
import type { InferResponse } from "./gen/stagemesh/inference/v1/inference_pb.js";
import {
  type BranchTiming,
  type Part,
  PartSchema,
  type StepTiming,
  type Timeline as TimelineMessage,
} from "./gen/stagemesh/inference/v1/payload_pb.js";
import { decodeTensor, encodeTensor, Tensor, type TensorData, tensorOfArray } from "./tensor.js";

export type Json = null | boolean | number | string | readonly Json[] | { readonly [name: string]: Json };

/** Typed arrays that are tensors of one axis. Those of bytes are bytes. */
export type NumberArray = Exclude<TensorData, Uint8Array | readonly Uint8Array[]> | Uint8ClampedArray;

/**
 * An input: text; bytes of the only type that the stage declares; a Blob or File, bytes of its type; a
 * tensor; any other value is JSON.
 */
export type Input = string | Uint8Array | ArrayBuffer | Blob | NumberArray | Tensor | Json;

/** Inputs by name; those that are undefined are left out. */
export type Inputs = Readonly<Record<string, Input | undefined>>;

/** An output: a tensor, text, bytes, or the document of JSON. */
export type Value = Tensor | string | Uint8Array | Json;

/** Outputs by name. */
export type Outputs = Readonly<Record<string, Value>>;

/** Returns the parts of a request; throws InvalidArgument. */
export async function encodeInputs(inputs: Inputs): Promise<Part[]> {
  if (typeof inputs !== "object" || inputs === null || ArrayBuffer.isView(inputs) || Array.isArray(inputs) || inputs instanceof Blob) {
    const kind = inputs === null ? "null" : typeof inputs === "object" ? (inputs as object).constructor.name : typeof inputs;
    throw new InvalidArgument(`inputs are given by name, such as { image: ... }, got ${kind}`, { reason: "INVALID_REQUEST" });
  }
  const given = Object.entries(inputs).filter(([, input]) => input !== undefined);
  if (given.length === 0) {
    throw new InvalidArgument("there are no inputs; give them by name", { reason: "INVALID_REQUEST" });
  }
  return Promise.all(given.map(([name, input]) => encodeInput(name, input as Input)));
}

async function encodeInput(name: string, input: Input): Promise<Part> {
  try {
    const tensor = tensorOf(input);
    if (tensor !== undefined) {
      const { datatype, shape } = tensor;
      const value = { datatype, shape: shape.map(BigInt), raw: encodeTensor(tensor) };
      return create(PartSchema, { name, body: { case: "tensor", value } });
    }
    return create(PartSchema, { name, body: { case: "blob", value: await blobOf(input) } });
  } catch (error) {
    const text = error instanceof Error ? error.message : String(error);
    throw new InvalidArgument(`input ${JSON.stringify(name)}: ${text}`, {
      reason: "INVALID_INPUT",
      violations: [{ field: `inputs.${name}`, description: text }],
      cause: error,
    });
  }
}

function tensorOf(input: Input): Tensor | undefined {
  if (input instanceof Uint8ClampedArray) {
    return new Tensor("UINT8", new Uint8Array(input.buffer, input.byteOffset, input.length));
  }
  const isBytes = !ArrayBuffer.isView(input) || input instanceof Uint8Array || input instanceof DataView;
  return input instanceof Tensor ? input : isBytes ? undefined : tensorOfArray(input);
}

/** Returns the bytes of an input that is no tensor, and their type; without a type they have that of the stage. */
export async function blobOf(input: Input): Promise<{ contentType: string; data: Uint8Array }> {
  if (input instanceof Blob) {
    return { contentType: input.type, data: new Uint8Array(await input.arrayBuffer()) };
  }
  if (input instanceof ArrayBuffer) {
    return { contentType: "", data: new Uint8Array(input) };
  }
  if (ArrayBuffer.isView(input)) {
    return { contentType: "", data: new Uint8Array(input.buffer, input.byteOffset, input.byteLength) };
  }
  const [contentType, text] =
    typeof input === "string" ? ["text/plain", input] : ["application/json", JSON.stringify(input, checkJson)];
  if (/\p{Surrogate}/u.test(text)) {
    throw new TypeError("the text has half a surrogate pair, which has no form in UTF-8");
  }
  return { contentType, data: new TextEncoder().encode(text) };
}

/** Passes values that JSON has, and undefined ones, which are left out; JSON.stringify would change others. */
function checkJson(_name: string, value: unknown): unknown {
  const isPlain = typeof value !== "object" || value === null || Array.isArray(value);
  const isJson = isPlain
    ? value == null || ["string", "boolean", "object"].includes(typeof value) || Number.isFinite(value)
    : [Object.prototype, null].includes(Object.getPrototypeOf(value));
  if (!isJson) {
    const got = isPlain ? String(value) : value.constructor.name;
    throw new TypeError(`got ${got}; give text, bytes, a Blob, a typed array, a Tensor, or a document of JSON`);
  }
  return value;
}

/** Outputs: the values by name, and the content types of those that are no tensors. */
export class Parts<O extends Outputs = Outputs> {
  readonly outputs: O;
  readonly contentTypes: Readonly<Record<string, string>>;

  constructor(parts: readonly Part[]) {
    const blobs = parts.flatMap(({ name, body }) => (body.case === "blob" ? [[name, body.value.contentType]] : []));
    this.contentTypes = Object.fromEntries(blobs) as Record<string, string>;
    this.outputs = Object.fromEntries(parts.map((part) => [part.name, decodePart(part)])) as unknown as O;
  }

  /** Returns an output; throws RangeError if there is none of that name. */
  get<K extends keyof O & string>(name: K): O[K] {
    if (!Object.hasOwn(this.outputs, name)) {
      throw new RangeError(`no output "${name}"; there are ${Object.keys(this.outputs).join(", ") || "none"}`);
    }
    return this.outputs[name];
  }

  /** The only output. */
  get value(): O[keyof O] {
    const [value, ...more] = Object.values(this.outputs);
    if (value === undefined || more.length > 0) {
      throw new RangeError(`expected one output, there are ${Object.keys(this.outputs).join(", ") || "none"}`);
    }
    return value as O[keyof O];
  }

  /** A line for each output: its name, and how its value begins. */
  toString(): string {
    return Object.entries(this.outputs).map(([name, value]) => `  ${name}  ${brief(value as Value)}`).join("\n");
  }
}

function brief(value: Value): string {
  const most = 60;
  const text = value instanceof Tensor ? String(value) : value instanceof Uint8Array ? `${value.length} bytes` : JSON.stringify(value);
  return text.length > most ? `${text.slice(0, most)}...` : text;
}

/** The answer to a request. */
export class Answer<O extends Outputs = Outputs> extends Parts<O> {
  readonly requestId: string;
  /** Metadata that runners returned beside the outputs. */
  readonly metadata: Readonly<Record<string, string>>;
  readonly timeline: Timeline;

  /** The pipeline is empty where the result was asked for by the request's ID. */
  constructor(message: InferResponse, readonly pipeline: string) {
    super(message.outputs);
    this.requestId = message.requestId;
    this.metadata = message.metadata;
    this.timeline = new Timeline(message.timeline);
  }

  /** The outputs, and where the time went. */
  override toString(): string {
    const head = `${this.pipeline}: ${this.timeline.totalMs.toFixed(1)} ms, request ${this.requestId}`;
    return [head, super.toString(), ...(this.timeline.steps.length > 0 ? [String(this.timeline)] : [])].join("\n");
  }
}

/** A piece of a streamed answer. */
export class Chunk<O extends Outputs = Outputs> extends Parts<O> {
  /** The seq counts from 1. */
  constructor(parts: readonly Part[], readonly requestId: string, readonly seq: number) {
    super(parts);
  }
}

type Hidden = "$typeName" | "$unknown";

/** Where the time of one step went. */
export interface Step extends Omit<StepTiming, Hidden | "queueWait" | "batchWait" | "modelWait" | "run" | "arrival"> {
  readonly queueWaitMs: number;
  readonly batchWaitMs: number;
  readonly modelWaitMs: number;
  readonly runMs: number;
}

/** What became of a block of the pipeline, or of a branch of one. */
export interface Branch extends Omit<BranchTiming, Hidden | "began" | "took" | "itemP50" | "itemMax"> {
  readonly beganMs: number;
  readonly tookMs: number;
}

/** Where the time of a request went. */
export class Timeline {
  readonly totalMs: number;
  readonly steps: readonly Step[];
  readonly branches: readonly Branch[];

  constructor(message: TimelineMessage | undefined) {
    this.totalMs = milliseconds(message?.total);
    this.steps = (message?.steps ?? []).map(
      ({ $typeName, $unknown, queueWait, batchWait, modelWait, run, arrival, ...rest }) => ({
        ...rest,
        queueWaitMs: milliseconds(queueWait),
        batchWaitMs: milliseconds(batchWait),
        modelWaitMs: milliseconds(modelWait),
        runMs: milliseconds(run),
      }),
    );
    this.branches = (message?.branches ?? []).map(
      ({ $typeName, $unknown, began, took, itemP50, itemMax, ...rest }) => ({
        ...rest,
        beganMs: milliseconds(began),
        tookMs: milliseconds(took),
      }),
    );
  }

  /** A table of the steps. */
  toString(): string {
    const rows = this.steps.map((s) => {
      const times = [s.queueWaitMs, s.batchWaitMs, s.runMs].map((ms) => `${ms.toFixed(1)} ms`);
      return [s.step, ...times, `${s.batchSize}, ${s.dispatchReason}`];
    });
    const table = [["step", "queue", "batch", "run", "batch of"], ...rows];
    const widths = table[0]!.map((_, i) => Math.max(...table.map((row) => row[i]!.length)));
    return table.map((row) => `  ${row.map((cell, i) => cell.padEnd(widths[i]!)).join("  ").trimEnd()}`).join("\n");
  }
}

/** Returns a duration of a message in milliseconds. */
export function milliseconds(duration: Duration | undefined): number {
  return duration === undefined ? 0 : Number(duration.seconds) * 1000 + duration.nanos / 1e6;
}

function decodePart({ name, body }: Part): Value {
  switch (body.case) {
    case "blob":
      return decodeBlob(body.value.contentType, body.value.data);
    case "tensor":
      try {
        return decodeTensor(body.value.datatype, body.value.shape.map(Number), body.value.raw);
      } catch (error) {
        throw new InvalidAnswer(`the answer cannot be read: output "${name}": ${String(error)}`, error);
      }
    default:
      throw new InvalidAnswer(`the answer cannot be read: output "${name}" is neither bytes nor a tensor`);
  }
}

/** Returns JSON as its document and text as a string, if their bytes are that. */
export function decodeBlob(contentType: string, data: Uint8Array): Value {
  const [type = "", ...parameters] = contentType.toLowerCase().split(";").map((part) => part.trim());
  const isJson = type === "application/json" || type.endsWith("+json");
  const charset = parameters.find((one) => one.startsWith("charset="))?.slice("charset=".length) ?? "utf-8";
  if (isJson || (type.startsWith("text/") && ["utf-8", '"utf-8"', "us-ascii"].includes(charset))) {
    try {
      const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(data);
      return isJson ? (JSON.parse(text) as Json) : text;
    } catch {
      // They are bytes then.
    }
  }
  return data;
}
