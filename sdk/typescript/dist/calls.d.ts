import { type Duration } from "@bufbuild/protobuf/wkt";
import { Fault } from "./faults.js";
import { type InferRequest } from "./gen/stagemesh/inference/v1/inference_pb.js";
import { type Inputs } from "./values.js";
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
export declare const WAIT_MS = 20000;
export declare const SLACK_MS = 30000;
/** Before a result that a gateway does not know is asked for again. */
export declare const PAUSE_MS = 500;
/** Options with their defaults. */
export type Settled = Options & {
    readonly timeoutMs: number;
    readonly retries: number;
};
/** Returns options with changes, headers added to headers; throws TypeError or RangeError for what is not valid. */
export declare function settle(options: Options, changes?: Options): Settled;
/** Returns a new idempotency key. */
export declare function newKey(): string;
/** Returns the idempotency key of a first try: the caller's own, or a new one of a durable request. */
export declare function firstKey(options: Options): string;
/** Returns the message of a request, without timeout and key; throws InvalidArgument. */
export declare function encodeRequest(pipeline: string, inputs: Inputs, options: Options): Promise<InferRequest>;
export declare function durationOf(ms: number): Duration;
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
/** Returns how long to wait before the next try: with jitter, and at least as long as asked for. */
export declare function pauseBefore(failures: number, fault: Fault): number;
/**
 * Makes a call, again after faults that a retry may mend, until the deadline.
 *
 * The key is that of the first try. Without one, tries after a connection that broke have a new key if
 * mayKey says so, as the mesh may have the request by then.
 */
export declare function attempt<T>(options: Settled, call: (one: Try) => Promise<T>, { key, mayKey }?: {
    key?: string | undefined;
    mayKey?: boolean | undefined;
}): Promise<T>;
/** Returns options for Connect. */
export declare function callOptions(timeoutMs: number, headers: Options["headers"], signal?: AbortSignal): Call;
/** Waits; throws Cancelled once the signal is aborted. */
export declare function sleep(ms: number, signal?: AbortSignal): Promise<void>;
/** Lets a signal abort a controller too, until unlink is called. */
export declare function link(signal: AbortSignal | undefined, abort?: AbortController): {
    abort: AbortController;
    unlink: () => void | undefined;
};
