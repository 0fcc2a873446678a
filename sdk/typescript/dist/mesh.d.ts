import { type Transport } from "@connectrpc/connect";
import * as calls from "./calls.js";
import { type Options, type Settled } from "./calls.js";
import { Fault } from "./faults.js";
import { type InferStreamResponse } from "./gen/stagemesh/inference/v1/inference_pb.js";
import { Jobs } from "./jobs.js";
import { Answer, Chunk, type Inputs, type Outputs } from "./values.js";
/** How a mesh is reached, and the options of its calls. */
export interface MeshSettings extends Options {
    /** Of the gateway's token file. */
    readonly token?: string | undefined;
    /** Used instead of the platform's. */
    readonly fetch?: typeof globalThis.fetch | undefined;
    /** Used instead of fetch, such as that of @connectrpc/connect-node; it has the URL. */
    readonly transport?: Transport | undefined;
}
/** A request: by its ID, or by its pipeline and idempotency key. */
export type RequestRef = {
    readonly requestId: string;
} | {
    readonly pipeline: string;
    readonly key: string;
};
/** What became of one item of inferMany, the numberth from 0: its answer, or its fault. */
export type Outcome<O extends Outputs = Outputs> = {
    readonly number: number;
    readonly answer: Answer<O>;
    readonly fault?: undefined;
} | {
    readonly number: number;
    readonly answer?: undefined;
    readonly fault: Fault;
};
/** A request that runs in the background; the key names it from the start, if it is durable or has one. */
export interface Pending<O extends Outputs = Outputs> {
    readonly pipeline: string;
    readonly key: string;
    /** Returns the answer once it is there; throws the fault. */
    result(): Promise<Answer<O>>;
    /** Cancels the request; result then throws Cancelled, if it is not done. */
    cancel(): Promise<void>;
}
/**
 * A mesh behind the URL of a gateway.
 *
 *     const mesh = new Mesh("http://127.0.0.1:8080");
 *     const answer = await mesh.infer("digits", { image: png });
 *
 * All failures are Faults. Options of a call win over those of the mesh; headers are added to them.
 */
export declare class Mesh {
    readonly url: string;
    readonly options: Settled;
    private readonly inference;
    /** The jobs of the mesh. */
    readonly jobs: Jobs;
    constructor(url: string, settings?: MeshSettings);
    /** Returns the same mesh with other options. */
    withOptions(options: Options): Mesh;
    private settle;
    /** Runs a request and returns its answer; a pipeline may also be stage:NAME or model:NAME. */
    infer<O extends Outputs = Outputs>(pipeline: string, inputs: Inputs, options?: Options): Promise<Answer<O>>;
    private run;
    /** Runs a request whose answer comes in chunks. It begins with the first; leaving the loop early ends the request. */
    stream<O extends Outputs = Outputs>(pipeline: string, inputs: Inputs, options?: Options): Stream<O>;
    /** Runs a request in the background. */
    start<O extends Outputs = Outputs>(pipeline: string, inputs: Inputs, options?: Options): Pending<O>;
    /**
     * Runs a request for each item, and yields their outcomes: in their order, or as they are ready. At most inFlight
     * items are read ahead of the outcomes that were taken.
     */
    inferMany<O extends Outputs = Outputs>(pipeline: string, items: Iterable<Inputs> | AsyncIterable<Inputs>, { inFlight, ordered, ...options }?: Options & {
        inFlight?: number;
        ordered?: boolean;
    }): AsyncGenerator<Outcome<O>, void, undefined>;
    /** Returns the stored answer of a durable request, or of one with a key; waits so long for it. */
    result<O extends Outputs = Outputs>(request: RequestRef, waiting?: calls.Waiting): Promise<Answer<O>>;
    /** Cancels a request. */
    cancel(request: RequestRef, options?: Options): Promise<void>;
}
interface Begun {
    readonly first: IteratorResult<InferStreamResponse>;
    readonly messages: AsyncIterator<InferStreamResponse>;
}
/** The chunks of an answer as they arrive, for one loop. */
export declare class Stream<O extends Outputs = Outputs> implements AsyncIterable<Chunk<O>> {
    private readonly pipeline;
    private readonly signal;
    private readonly begin;
    private whole;
    private hasBegun;
    private readonly own;
    /** Mesh.stream makes it. */
    constructor(pipeline: string, signal: AbortSignal | undefined, begin: (signal: AbortSignal) => Promise<Begun>);
    [Symbol.asyncIterator](): AsyncGenerator<Chunk<O>, void, undefined>;
    /** The whole answer, once the loop over the chunks has ended; throws before. */
    get answer(): Answer<O>;
    /** Ends the stream, and its request, unless that is durable or has a key. */
    close(): void;
}
export {};
