// What callers give as inputs, and get as outputs.
import { create } from "@bufbuild/protobuf";
import { InvalidAnswer, InvalidArgument } from "./faults.js";
import { PartSchema, } from "./gen/stagemesh/inference/v1/payload_pb.js";
import { decodeTensor, encodeTensor, Tensor, tensorOfArray } from "./tensor.js";
/** Returns the parts of a request; throws InvalidArgument. */
export async function encodeInputs(inputs) {
    if (typeof inputs !== "object" || inputs === null || ArrayBuffer.isView(inputs) || Array.isArray(inputs) || inputs instanceof Blob) {
        const kind = inputs === null ? "null" : typeof inputs === "object" ? inputs.constructor.name : typeof inputs;
        throw new InvalidArgument(`inputs are given by name, such as { image: ... }, got ${kind}`, { reason: "INVALID_REQUEST" });
    }
    const given = Object.entries(inputs).filter(([, input]) => input !== undefined);
    if (given.length === 0) {
        throw new InvalidArgument("there are no inputs; give them by name", { reason: "INVALID_REQUEST" });
    }
    return Promise.all(given.map(([name, input]) => encodeInput(name, input)));
}
async function encodeInput(name, input) {
    try {
        const tensor = tensorOf(input);
        if (tensor !== undefined) {
            const { datatype, shape } = tensor;
            const value = { datatype, shape: shape.map(BigInt), raw: encodeTensor(tensor) };
            return create(PartSchema, { name, body: { case: "tensor", value } });
        }
        return create(PartSchema, { name, body: { case: "blob", value: await blobOf(input) } });
    }
    catch (error) {
        const text = error instanceof Error ? error.message : String(error);
        throw new InvalidArgument(`input ${JSON.stringify(name)}: ${text}`, {
            reason: "INVALID_INPUT",
            violations: [{ field: `inputs.${name}`, description: text }],
            cause: error,
        });
    }
}
function tensorOf(input) {
    if (input instanceof Uint8ClampedArray) {
        return new Tensor("UINT8", new Uint8Array(input.buffer, input.byteOffset, input.length));
    }
    const isBytes = !ArrayBuffer.isView(input) || input instanceof Uint8Array || input instanceof DataView;
    return input instanceof Tensor ? input : isBytes ? undefined : tensorOfArray(input);
}
/** Returns the bytes of an input that is no tensor, and their type; without a type they have that of the stage. */
export async function blobOf(input) {
    if (input instanceof Blob) {
        return { contentType: input.type, data: new Uint8Array(await input.arrayBuffer()) };
    }
    if (input instanceof ArrayBuffer) {
        return { contentType: "", data: new Uint8Array(input) };
    }
    if (ArrayBuffer.isView(input)) {
        return { contentType: "", data: new Uint8Array(input.buffer, input.byteOffset, input.byteLength) };
    }
    const [contentType, text] = typeof input === "string" ? ["text/plain", input] : ["application/json", JSON.stringify(input, checkJson)];
    if (/\p{Surrogate}/u.test(text)) {
        throw new TypeError("the text has half a surrogate pair, which has no form in UTF-8");
    }
    return { contentType, data: new TextEncoder().encode(text) };
}
/** Passes values that JSON has, and undefined ones, which are left out; JSON.stringify would change others. */
function checkJson(_name, value) {
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
export class Parts {
    outputs;
    contentTypes;
    constructor(parts) {
        const blobs = parts.flatMap(({ name, body }) => (body.case === "blob" ? [[name, body.value.contentType]] : []));
        this.contentTypes = Object.fromEntries(blobs);
        this.outputs = Object.fromEntries(parts.map((part) => [part.name, decodePart(part)]));
    }
    /** Returns an output; throws RangeError if there is none of that name. */
    get(name) {
        if (!Object.hasOwn(this.outputs, name)) {
            throw new RangeError(`no output "${name}"; there are ${Object.keys(this.outputs).join(", ") || "none"}`);
        }
        return this.outputs[name];
    }
    /** The only output. */
    get value() {
        const [value, ...more] = Object.values(this.outputs);
        if (value === undefined || more.length > 0) {
            throw new RangeError(`expected one output, there are ${Object.keys(this.outputs).join(", ") || "none"}`);
        }
        return value;
    }
    /** A line for each output: its name, and how its value begins. */
    toString() {
        return Object.entries(this.outputs).map(([name, value]) => `  ${name}  ${brief(value)}`).join("\n");
    }
}
function brief(value) {
    const most = 60;
    const text = value instanceof Tensor ? String(value) : value instanceof Uint8Array ? `${value.length} bytes` : JSON.stringify(value);
    return text.length > most ? `${text.slice(0, most)}...` : text;
}
/** The answer to a request. */
export class Answer extends Parts {
    pipeline;
    requestId;
    /** Metadata that runners returned beside the outputs. */
    metadata;
    timeline;
    /** The pipeline is empty where the result was asked for by the request's ID. */
    constructor(message, pipeline) {
        super(message.outputs);
        this.pipeline = pipeline;
        this.requestId = message.requestId;
        this.metadata = message.metadata;
        this.timeline = new Timeline(message.timeline);
    }
    /** The outputs, and where the time went. */
    toString() {
        const head = `${this.pipeline}: ${this.timeline.totalMs.toFixed(1)} ms, request ${this.requestId}`;
        return [head, super.toString(), ...(this.timeline.steps.length > 0 ? [String(this.timeline)] : [])].join("\n");
    }
}
/** A piece of a streamed answer. */
export class Chunk extends Parts {
    requestId;
    seq;
    /** The seq counts from 1. */
    constructor(parts, requestId, seq) {
        super(parts);
        this.requestId = requestId;
        this.seq = seq;
    }
}
/** Where the time of a request went. */
export class Timeline {
    totalMs;
    steps;
    branches;
    constructor(message) {
        this.totalMs = milliseconds(message?.total);
        this.steps = (message?.steps ?? []).map(({ $typeName, $unknown, queueWait, batchWait, modelWait, run, arrival, ...rest }) => ({
            ...rest,
            queueWaitMs: milliseconds(queueWait),
            batchWaitMs: milliseconds(batchWait),
            modelWaitMs: milliseconds(modelWait),
            runMs: milliseconds(run),
        }));
        this.branches = (message?.branches ?? []).map(({ $typeName, $unknown, began, took, itemP50, itemMax, ...rest }) => ({
            ...rest,
            beganMs: milliseconds(began),
            tookMs: milliseconds(took),
        }));
    }
    /** A table of the steps. */
    toString() {
        const rows = this.steps.map((s) => {
            const times = [s.queueWaitMs, s.batchWaitMs, s.runMs].map((ms) => `${ms.toFixed(1)} ms`);
            return [s.step, ...times, `${s.batchSize}, ${s.dispatchReason}`];
        });
        const table = [["step", "queue", "batch", "run", "batch of"], ...rows];
        const widths = table[0].map((_, i) => Math.max(...table.map((row) => row[i].length)));
        return table.map((row) => `  ${row.map((cell, i) => cell.padEnd(widths[i])).join("  ").trimEnd()}`).join("\n");
    }
}
/** Returns a duration of a message in milliseconds. */
export function milliseconds(duration) {
    return duration === undefined ? 0 : Number(duration.seconds) * 1000 + duration.nanos / 1e6;
}
function decodePart({ name, body }) {
    switch (body.case) {
        case "blob":
            return decodeBlob(body.value.contentType, body.value.data);
        case "tensor":
            try {
                return decodeTensor(body.value.datatype, body.value.shape.map(Number), body.value.raw);
            }
            catch (error) {
                throw new InvalidAnswer(`the answer cannot be read: output "${name}": ${String(error)}`, error);
            }
        default:
            throw new InvalidAnswer(`the answer cannot be read: output "${name}" is neither bytes nor a tensor`);
    }
}
/** Returns JSON as its document and text as a string, if their bytes are that. */
export function decodeBlob(contentType, data) {
    const [type = "", ...parameters] = contentType.toLowerCase().split(";").map((part) => part.trim());
    const isJson = type === "application/json" || type.endsWith("+json");
    const charset = parameters.find((one) => one.startsWith("charset="))?.slice("charset=".length) ?? "utf-8";
    if (isJson || (type.startsWith("text/") && ["utf-8", '"utf-8"', "us-ascii"].includes(charset))) {
        try {
            const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(data);
            return isJson ? JSON.parse(text) : text;
        }
        catch {
            // They are bytes then.
        }
    }
    return data;
}
