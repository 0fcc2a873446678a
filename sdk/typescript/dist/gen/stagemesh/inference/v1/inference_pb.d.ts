import type { GenFile, GenMessage, GenService } from "@bufbuild/protobuf/codegenv2";
import type { Duration } from "@bufbuild/protobuf/wkt";
import type { Durability, ModelRef, Part, Timeline, Value } from "./payload_pb.js";
import type { Message } from "@bufbuild/protobuf";
/**
 * Describes the file stagemesh/inference/v1/inference.proto.
 */
export declare const file_stagemesh_inference_v1_inference: GenFile;
/**
 * InferRequest is one request for one pipeline.
 *
 * @generated from message stagemesh.inference.v1.InferRequest
 */
export type InferRequest = Message<"stagemesh.inference.v1.InferRequest"> & {
    /**
     * Name of the pipeline. "stage:<name>" is a pipeline of that one stage.
     *
     * @generated from field: string pipeline = 1;
     */
    pipeline: string;
    /**
     * Inputs of the first step.
     *
     * @generated from field: repeated stagemesh.inference.v1.Part inputs = 2;
     */
    inputs: Part[];
    /**
     * Parameters for every step.
     *
     * @generated from field: map<string, stagemesh.inference.v1.Value> parameters = 3;
     */
    parameters: {
        [key: string]: Value;
    };
    /**
     * Options for single steps, by the step's name.
     *
     * @generated from field: map<string, stagemesh.inference.v1.StepOptions> steps = 4;
     */
    steps: {
        [key: string]: StepOptions;
    };
    /**
     * Scoped to tenant and pipeline. The first request with a key runs; later ones
     * wait for its answer or get the stored result, with its request ID. Another
     * payload is ALREADY_EXISTS. At most 256 bytes.
     *
     * @generated from field: string idempotency_key = 5;
     */
    idempotencyKey: string;
    /**
     * May only shorten the pipeline's own timeout.
     *
     * @generated from field: google.protobuf.Duration timeout = 6;
     */
    timeout?: Duration | undefined;
    /**
     * Where the request waits between stages.
     *
     * @generated from field: stagemesh.inference.v1.Durability durability = 7;
     */
    durability: Durability;
    /**
     * Above 0 is served first, below 0 yields. Default 0.
     *
     * @generated from field: int32 priority = 8;
     */
    priority: number;
    /**
     * Reaches the runners of every step; only keys that the gateway allows.
     *
     * @generated from field: map<string, string> metadata = 9;
     */
    metadata: {
        [key: string]: string;
    };
    /**
     * Names of the outputs wanted; empty means all.
     *
     * @generated from field: repeated string outputs = 10;
     */
    outputs: string[];
    /**
     * If a stage of the route is overloaded, wait for capacity until the deadline
     * instead of being rejected at once. Absent means the pipeline's setting.
     *
     * @generated from field: optional bool wait_for_capacity = 11;
     */
    waitForCapacity?: boolean | undefined;
    /**
     * Of a pipeline with blocks: an answer that would be partial is a failure.
     *
     * @generated from field: bool complete = 12;
     */
    complete: boolean;
};
/**
 * Describes the message stagemesh.inference.v1.InferRequest.
 * Use `create(InferRequestSchema)` to create a new message.
 */
export declare const InferRequestSchema: GenMessage<InferRequest>;
/**
 * InferManyRequest is one of many requests.
 *
 * @generated from message stagemesh.inference.v1.InferManyRequest
 */
export type InferManyRequest = Message<"stagemesh.inference.v1.InferManyRequest"> & {
    /**
     * @generated from field: stagemesh.inference.v1.InferRequest request = 1;
     */
    request?: InferRequest | undefined;
    /**
     * Comes back with the answer.
     *
     * @generated from field: string id = 2;
     */
    id: string;
    /**
     * The answer comes after those of all requests before. Answers that wait for others count as
     * running.
     *
     * @generated from field: bool in_order = 3;
     */
    inOrder: boolean;
};
/**
 * Describes the message stagemesh.inference.v1.InferManyRequest.
 * Use `create(InferManyRequestSchema)` to create a new message.
 */
export declare const InferManyRequestSchema: GenMessage<InferManyRequest>;
/**
 * InferManyResponse is the answer to one of many requests.
 *
 * @generated from message stagemesh.inference.v1.InferManyResponse
 */
export type InferManyResponse = Message<"stagemesh.inference.v1.InferManyResponse"> & {
    /**
     * The request's.
     *
     * @generated from field: string id = 1;
     */
    id: string;
    /**
     * The request's place in the stream, from 0.
     *
     * @generated from field: uint64 index = 2;
     */
    index: bigint;
    /**
     * @generated from oneof stagemesh.inference.v1.InferManyResponse.outcome
     */
    outcome: {
        /**
         * @generated from field: stagemesh.inference.v1.InferResponse response = 3;
         */
        value: InferResponse;
        case: "response";
    } | {
        /**
         * @generated from field: stagemesh.inference.v1.InferFailure failure = 4;
         */
        value: InferFailure;
        case: "failure";
    } | {
        case: undefined;
        value?: undefined;
    };
};
/**
 * Describes the message stagemesh.inference.v1.InferManyResponse.
 * Use `create(InferManyResponseSchema)` to create a new message.
 */
export declare const InferManyResponseSchema: GenMessage<InferManyResponse>;
/**
 * InferFailure is why one of many requests failed: what an RPC's status has otherwise.
 *
 * @generated from message stagemesh.inference.v1.InferFailure
 */
export type InferFailure = Message<"stagemesh.inference.v1.InferFailure"> & {
    /**
     * One of docs/faults.md.
     *
     * @generated from field: string reason = 1;
     */
    reason: string;
    /**
     * @generated from field: string message = 2;
     */
    message: string;
    /**
     * The mesh's ID of the request; empty where it got none.
     *
     * @generated from field: string request_id = 3;
     */
    requestId: string;
    /**
     * The same request may succeed later.
     *
     * @generated from field: bool retryable = 4;
     */
    retryable: boolean;
    /**
     * How long to wait before; absent where that is not known.
     *
     * @generated from field: google.protobuf.Duration retry_after = 5;
     */
    retryAfter?: Duration | undefined;
    /**
     * Where it failed; empty where no step was reached.
     *
     * @generated from field: string step = 6;
     */
    step: string;
    /**
     * @generated from field: string stage = 7;
     */
    stage: string;
};
/**
 * Describes the message stagemesh.inference.v1.InferFailure.
 * Use `create(InferFailureSchema)` to create a new message.
 */
export declare const InferFailureSchema: GenMessage<InferFailure>;
/**
 * GetResultRequest asks for one stored answer.
 *
 * @generated from message stagemesh.inference.v1.GetResultRequest
 */
export type GetResultRequest = Message<"stagemesh.inference.v1.GetResultRequest"> & {
    /**
     * The request's ID; or else pipeline and idempotency_key.
     *
     * @generated from field: string request_id = 1;
     */
    requestId: string;
    /**
     * How long to wait for an answer that is not there yet; absent or 0 means not
     * at all. A gateway waits no longer than it lets a request take.
     *
     * @generated from field: google.protobuf.Duration wait = 2;
     */
    wait?: Duration | undefined;
    /**
     * The request that has the idempotency key among those of the pipeline. NOT_FOUND
     * where none has it.
     *
     * @generated from field: string pipeline = 3;
     */
    pipeline: string;
    /**
     * @generated from field: string idempotency_key = 4;
     */
    idempotencyKey: string;
};
/**
 * Describes the message stagemesh.inference.v1.GetResultRequest.
 * Use `create(GetResultRequestSchema)` to create a new message.
 */
export declare const GetResultRequestSchema: GenMessage<GetResultRequest>;
/**
 * GetResultResponse is a stored answer.
 *
 * @generated from message stagemesh.inference.v1.GetResultResponse
 */
export type GetResultResponse = Message<"stagemesh.inference.v1.GetResultResponse"> & {
    /**
     * @generated from field: stagemesh.inference.v1.InferResponse result = 1;
     */
    result?: InferResponse | undefined;
};
/**
 * Describes the message stagemesh.inference.v1.GetResultResponse.
 * Use `create(GetResultResponseSchema)` to create a new message.
 */
export declare const GetResultResponseSchema: GenMessage<GetResultResponse>;
/**
 * CancelRequest names the request to cancel.
 *
 * @generated from message stagemesh.inference.v1.CancelRequest
 */
export type CancelRequest = Message<"stagemesh.inference.v1.CancelRequest"> & {
    /**
     * The request's ID; or else pipeline and idempotency_key.
     *
     * @generated from field: string request_id = 1;
     */
    requestId: string;
    /**
     * The request that has the idempotency key among those of the pipeline. NOT_FOUND
     * where none has it.
     *
     * @generated from field: string pipeline = 2;
     */
    pipeline: string;
    /**
     * @generated from field: string idempotency_key = 3;
     */
    idempotencyKey: string;
};
/**
 * Describes the message stagemesh.inference.v1.CancelRequest.
 * Use `create(CancelRequestSchema)` to create a new message.
 */
export declare const CancelRequestSchema: GenMessage<CancelRequest>;
/**
 * CancelResponse means that the cancel notice was published.
 *
 * @generated from message stagemesh.inference.v1.CancelResponse
 */
export type CancelResponse = Message<"stagemesh.inference.v1.CancelResponse"> & {};
/**
 * Describes the message stagemesh.inference.v1.CancelResponse.
 * Use `create(CancelResponseSchema)` to create a new message.
 */
export declare const CancelResponseSchema: GenMessage<CancelResponse>;
/**
 * StepOptions are a request's options for one step.
 *
 * @generated from message stagemesh.inference.v1.StepOptions
 */
export type StepOptions = Message<"stagemesh.inference.v1.StepOptions"> & {
    /**
     * @generated from field: stagemesh.inference.v1.ModelRef model = 1;
     */
    model?: ModelRef | undefined;
    /**
     * @generated from field: map<string, stagemesh.inference.v1.Value> parameters = 2;
     */
    parameters: {
        [key: string]: Value;
    };
};
/**
 * Describes the message stagemesh.inference.v1.StepOptions.
 * Use `create(StepOptionsSchema)` to create a new message.
 */
export declare const StepOptionsSchema: GenMessage<StepOptions>;
/**
 * InferResponse is the one answer to a request.
 *
 * @generated from message stagemesh.inference.v1.InferResponse
 */
export type InferResponse = Message<"stagemesh.inference.v1.InferResponse"> & {
    /**
     * Minted by the gateway (UUIDv7).
     *
     * @generated from field: string request_id = 1;
     */
    requestId: string;
    /**
     * Outputs of the last step.
     *
     * @generated from field: repeated stagemesh.inference.v1.Part outputs = 2;
     */
    outputs: Part[];
    /**
     * Metadata that runners returned beside the outputs.
     *
     * @generated from field: map<string, string> metadata = 3;
     */
    metadata: {
        [key: string]: string;
    };
    /**
     * @generated from field: stagemesh.inference.v1.Timeline timeline = 4;
     */
    timeline?: Timeline | undefined;
};
/**
 * Describes the message stagemesh.inference.v1.InferResponse.
 * Use `create(InferResponseSchema)` to create a new message.
 */
export declare const InferResponseSchema: GenMessage<InferResponse>;
/**
 * InferStreamResponse is one message of a streamed answer.
 *
 * @generated from message stagemesh.inference.v1.InferStreamResponse
 */
export type InferStreamResponse = Message<"stagemesh.inference.v1.InferStreamResponse"> & {
    /**
     * @generated from field: string request_id = 1;
     */
    requestId: string;
    /**
     * Counts the messages of this answer from 1, without gaps.
     *
     * @generated from field: uint64 seq = 2;
     */
    seq: bigint;
    /**
     * As in StepTiming, of the step that sent this message.
     *
     * @generated from field: uint32 attempt = 3;
     */
    attempt: number;
    /**
     * @generated from oneof stagemesh.inference.v1.InferStreamResponse.message
     */
    message: {
        /**
         * @generated from field: stagemesh.inference.v1.Chunk chunk = 4;
         */
        value: Chunk;
        case: "chunk";
    } | {
        /**
         * @generated from field: stagemesh.inference.v1.InferResponse final = 5;
         */
        value: InferResponse;
        case: "final";
    } | {
        /**
         * Comes before all others, without a seq, while the request waits for the first host of a
         * stage.
         *
         * @generated from field: stagemesh.inference.v1.Activating activating = 6;
         */
        value: Activating;
        case: "activating";
    } | {
        case: undefined;
        value?: undefined;
    };
};
/**
 * Describes the message stagemesh.inference.v1.InferStreamResponse.
 * Use `create(InferStreamResponseSchema)` to create a new message.
 */
export declare const InferStreamResponseSchema: GenMessage<InferStreamResponse>;
/**
 * Activating is how long a request has waited for the first host of a stage.
 *
 * @generated from message stagemesh.inference.v1.Activating
 */
export type Activating = Message<"stagemesh.inference.v1.Activating"> & {
    /**
     * @generated from field: string stage = 1;
     */
    stage: string;
    /**
     * @generated from field: google.protobuf.Duration waited = 2;
     */
    waited?: Duration | undefined;
};
/**
 * Describes the message stagemesh.inference.v1.Activating.
 * Use `create(ActivatingSchema)` to create a new message.
 */
export declare const ActivatingSchema: GenMessage<Activating>;
/**
 * Chunk is a part of an answer that is sent while the runner still works.
 *
 * @generated from message stagemesh.inference.v1.Chunk
 */
export type Chunk = Message<"stagemesh.inference.v1.Chunk"> & {
    /**
     * @generated from field: repeated stagemesh.inference.v1.Part outputs = 1;
     */
    outputs: Part[];
};
/**
 * Describes the message stagemesh.inference.v1.Chunk.
 * Use `create(ChunkSchema)` to create a new message.
 */
export declare const ChunkSchema: GenMessage<Chunk>;
/**
 * InferenceService is what applications call: one request in, one answer out,
 * through every step of a pipeline.
 *
 * A failure is the RPC's status with google.rpc details: ErrorInfo (domain
 * "stagemesh", the reason, and where it happened), RetryInfo where a retry can
 * help, BadRequest where an input is at fault. The table of reasons is in
 * docs/faults.md.
 *
 * @generated from service stagemesh.inference.v1.InferenceService
 */
export declare const InferenceService: GenService<{
    /**
     * Infer runs one request through a pipeline.
     *
     * buf:lint:ignore RPC_REQUEST_RESPONSE_UNIQUE
     *
     * @generated from rpc stagemesh.inference.v1.InferenceService.Infer
     */
    infer: {
        methodKind: "unary";
        input: typeof InferRequestSchema;
        output: typeof InferResponseSchema;
    };
    /**
     * InferStream is Infer for pipelines whose last stage answers in chunks. It
     * takes the same request, so a client switches by the method's name alone.
     * The stream ends with one `final`; a failure is the RPC's status.
     *
     * buf:lint:ignore RPC_REQUEST_STANDARD_NAME
     * buf:lint:ignore RPC_REQUEST_RESPONSE_UNIQUE
     *
     * @generated from rpc stagemesh.inference.v1.InferenceService.InferStream
     */
    inferStream: {
        methodKind: "server_streaming";
        input: typeof InferRequestSchema;
        output: typeof InferStreamResponseSchema;
    };
    /**
     * InferMany answers any number of requests on one stream, at most 64 of them at a time: no more
     * are read meanwhile, so a stream of any length takes constant memory. A request that fails is a
     * response with its failure. Answers come as they are ready, or in the order of the requests. A
     * caller that closes the stream cancels what is left.
     *
     * @generated from rpc stagemesh.inference.v1.InferenceService.InferMany
     */
    inferMany: {
        methodKind: "bidi_streaming";
        input: typeof InferManyRequestSchema;
        output: typeof InferManyResponseSchema;
    };
    /**
     * GetResult returns the stored result of a durable request, or of one with an
     * idempotency key, through any gateway.
     * If the request failed, its fault is this RPC's status. NOT_FOUND: there is no
     * stored result, not yet or no longer.
     *
     * @generated from rpc stagemesh.inference.v1.InferenceService.GetResult
     */
    getResult: {
        methodKind: "unary";
        input: typeof GetResultRequestSchema;
        output: typeof GetResultResponseSchema;
    };
    /**
     * Cancel cancels a request through any gateway: its caller gets CANCELLED, hosts
     * drop its waiting items and stop its streams. It is best effort: a request that
     * is done stays done.
     *
     * @generated from rpc stagemesh.inference.v1.InferenceService.Cancel
     */
    cancel: {
        methodKind: "unary";
        input: typeof CancelRequestSchema;
        output: typeof CancelResponseSchema;
    };
}>;
