import type { Duration } from "@bufbuild/protobuf/wkt";
import type { InferResponse } from "./gen/stagemesh/inference/v1/inference_pb.js";
import { type BranchTiming, type Part, type StepTiming, type Timeline as TimelineMessage } from "./gen/stagemesh/inference/v1/payload_pb.js";
import { Tensor, type TensorData } from "./tensor.js";
export type Json = null | boolean | number | string | readonly Json[] | {
    readonly [name: string]: Json;
};
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
export declare function encodeInputs(inputs: Inputs): Promise<Part[]>;
/** Returns the bytes of an input that is no tensor, and their type; without a type they have that of the stage. */
export declare function blobOf(input: Input): Promise<{
    contentType: string;
    data: Uint8Array;
}>;
/** Outputs: the values by name, and the content types of those that are no tensors. */
export declare class Parts<O extends Outputs = Outputs> {
    readonly outputs: O;
    readonly contentTypes: Readonly<Record<string, string>>;
    constructor(parts: readonly Part[]);
    /** Returns an output; throws RangeError if there is none of that name. */
    get<K extends keyof O & string>(name: K): O[K];
    /** The only output. */
    get value(): O[keyof O];
    /** A line for each output: its name, and how its value begins. */
    toString(): string;
}
/** The answer to a request. */
export declare class Answer<O extends Outputs = Outputs> extends Parts<O> {
    readonly pipeline: string;
    readonly requestId: string;
    /** Metadata that runners returned beside the outputs. */
    readonly metadata: Readonly<Record<string, string>>;
    readonly timeline: Timeline;
    /** The pipeline is empty where the result was asked for by the request's ID. */
    constructor(message: InferResponse, pipeline: string);
    /** The outputs, and where the time went. */
    toString(): string;
}
/** A piece of a streamed answer. */
export declare class Chunk<O extends Outputs = Outputs> extends Parts<O> {
    readonly requestId: string;
    readonly seq: number;
    /** The seq counts from 1. */
    constructor(parts: readonly Part[], requestId: string, seq: number);
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
export declare class Timeline {
    readonly totalMs: number;
    readonly steps: readonly Step[];
    readonly branches: readonly Branch[];
    constructor(message: TimelineMessage | undefined);
    /** A table of the steps. */
    toString(): string;
}
/** Returns a duration of a message in milliseconds. */
export declare function milliseconds(duration: Duration | undefined): number;
/** Returns JSON as its document and text as a string, if their bytes are that. */
export declare function decodeBlob(contentType: string, data: Uint8Array): Value;
export {};
