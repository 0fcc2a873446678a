import type { GenEnum, GenFile, GenMessage, GenService } from "@bufbuild/protobuf/codegenv2";
import type { Duration, Timestamp } from "@bufbuild/protobuf/wkt";
import type { InferRequest, InferResponse } from "./inference_pb.js";
import type { Part } from "./payload_pb.js";
import type { Message } from "@bufbuild/protobuf";
/**
 * Describes the file stagemesh/inference/v1/job.proto.
 */
export declare const file_stagemesh_inference_v1_job: GenFile;
/**
 * Job is what is known of a job.
 *
 * @generated from message stagemesh.inference.v1.Job
 */
export type Job = Message<"stagemesh.inference.v1.Job"> & {
    /**
     * Minted by the gateway, "<queue>.<UUID>".
     *
     * @generated from field: string id = 1;
     */
    id: string;
    /**
     * @generated from field: string queue = 2;
     */
    queue: string;
    /**
     * @generated from field: stagemesh.inference.v1.JobState state = 3;
     */
    state: JobState;
    /**
     * Class within the queue: above 0 goes first, below 0 last.
     *
     * @generated from field: int32 priority = 4;
     */
    priority: number;
    /**
     * @generated from field: google.protobuf.Timestamp accepted_at = 5;
     */
    acceptedAt?: Timestamp | undefined;
    /**
     * When it expires; never absent.
     *
     * @generated from field: google.protobuf.Timestamp deadline = 6;
     */
    deadline?: Timestamp | undefined;
    /**
     * Attempts that began; those that were only interrupted by the end of a dispatcher are in
     * interruptions too.
     *
     * @generated from field: uint32 attempts = 7;
     */
    attempts: number;
    /**
     * @generated from field: uint32 interruptions = 8;
     */
    interruptions: number;
    /**
     * The latest attempt: when it began, and its request's ID in the mesh.
     *
     * @generated from field: google.protobuf.Timestamp started_at = 9;
     */
    startedAt?: Timestamp | undefined;
    /**
     * @generated from field: string request_id = 10;
     */
    requestId: string;
    /**
     * When the next attempt may begin, of a delayed job.
     *
     * @generated from field: google.protobuf.Timestamp not_before = 11;
     */
    notBefore?: Timestamp | undefined;
    /**
     * @generated from field: google.protobuf.Timestamp ended_at = 12;
     */
    endedAt?: Timestamp | undefined;
    /**
     * A caller has cancelled it, and the attempt still runs.
     *
     * @generated from field: bool cancel_requested = 13;
     */
    cancelRequested: boolean;
    /**
     * Why the last attempt, or the job, failed: a reason of docs/faults.md and a sentence.
     *
     * @generated from field: string reason = 14;
     */
    reason: string;
    /**
     * @generated from field: string message = 15;
     */
    message: string;
    /**
     * Free text of the submitter, for limits and lists.
     *
     * @generated from field: map<string, string> attributes = 16;
     */
    attributes: {
        [key: string]: string;
    };
    /**
     * Of a job for this mesh.
     *
     * @generated from field: string pipeline = 17;
     */
    pipeline: string;
    /**
     * What the attempts so far took. Complete once the job has ended.
     *
     * @generated from field: stagemesh.inference.v1.JobUsage usage = 18;
     */
    usage?: JobUsage | undefined;
};
/**
 * Describes the message stagemesh.inference.v1.Job.
 * Use `create(JobSchema)` to create a new message.
 */
export declare const JobSchema: GenMessage<Job>;
/**
 * JobUsage is what a job took, over all its attempts.
 *
 * @generated from message stagemesh.inference.v1.JobUsage
 */
export type JobUsage = Message<"stagemesh.inference.v1.JobUsage"> & {
    /**
     * Attempts that ended, also those that count against no bound: refused or interrupted ones.
     *
     * @generated from field: uint32 attempts = 1;
     */
    attempts: number;
    /**
     * From acceptance to the end of the job, by state: before the first attempt, between attempts,
     * and while attempts ran.
     *
     * @generated from field: double queued_seconds = 2;
     */
    queuedSeconds: number;
    /**
     * @generated from field: double delayed_seconds = 3;
     */
    delayedSeconds: number;
    /**
     * @generated from field: double running_seconds = 4;
     */
    runningSeconds: number;
    /**
     * The part of queued and delayed in which the gate of the pool was closed.
     *
     * @generated from field: double closed_seconds = 5;
     */
    closedSeconds: number;
    /**
     * Time of runners in the mesh. Of a batch, the job has the part that its rows are.
     *
     * @generated from field: double runner_seconds = 6;
     */
    runnerSeconds: number;
    /**
     * Payloads and answers of the attempts that were not refused.
     *
     * @generated from field: uint64 bytes_in = 7;
     */
    bytesIn: bigint;
    /**
     * @generated from field: uint64 bytes_out = 8;
     */
    bytesOut: bigint;
    /**
     * As an HTTP target counts them.
     *
     * @generated from field: uint64 prompt_tokens = 9;
     */
    promptTokens: bigint;
    /**
     * @generated from field: uint64 completion_tokens = 10;
     */
    completionTokens: bigint;
    /**
     * By the rates of the mesh file, in its currency.
     *
     * @generated from field: double cost = 11;
     */
    cost: number;
    /**
     * @generated from field: string currency = 12;
     */
    currency: string;
    /**
     * @generated from field: double joules = 13;
     */
    joules: number;
};
/**
 * Describes the message stagemesh.inference.v1.JobUsage.
 * Use `create(JobUsageSchema)` to create a new message.
 */
export declare const JobUsageSchema: GenMessage<JobUsage>;
/**
 * HttpCall is a call of an HTTP target.
 *
 * @generated from message stagemesh.inference.v1.HttpCall
 */
export type HttpCall = Message<"stagemesh.inference.v1.HttpCall"> & {
    /**
     * Path and query below the target's URL, such as "/v1/chat/completions".
     *
     * @generated from field: string path = 1;
     */
    path: string;
    /**
     * @generated from field: string content_type = 2;
     */
    contentType: string;
    /**
     * @generated from field: bytes body = 3;
     */
    body: Uint8Array;
};
/**
 * Describes the message stagemesh.inference.v1.HttpCall.
 * Use `create(HttpCallSchema)` to create a new message.
 */
export declare const HttpCallSchema: GenMessage<HttpCall>;
/**
 * HttpAnswer is the answer of an HTTP target.
 *
 * @generated from message stagemesh.inference.v1.HttpAnswer
 */
export type HttpAnswer = Message<"stagemesh.inference.v1.HttpAnswer"> & {
    /**
     * @generated from field: uint32 status = 1;
     */
    status: number;
    /**
     * @generated from field: string content_type = 2;
     */
    contentType: string;
    /**
     * @generated from field: bytes body = 3;
     */
    body: Uint8Array;
};
/**
 * Describes the message stagemesh.inference.v1.HttpAnswer.
 * Use `create(HttpAnswerSchema)` to create a new message.
 */
export declare const HttpAnswerSchema: GenMessage<HttpAnswer>;
/**
 * SubmitJobRequest is one job.
 *
 * @generated from message stagemesh.inference.v1.SubmitJobRequest
 */
export type SubmitJobRequest = Message<"stagemesh.inference.v1.SubmitJobRequest"> & {
    /**
     * @generated from field: string queue = 1;
     */
    queue: string;
    /**
     * @generated from oneof stagemesh.inference.v1.SubmitJobRequest.payload
     */
    payload: {
        /**
         * For a queue whose target is this mesh. Its pipeline may be empty if the queue has one.
         * Its timeout and durability are those of each attempt. idempotency_key and
         * wait_for_capacity are refused, and priority is not used: the queue has a class.
         *
         * @generated from field: stagemesh.inference.v1.InferRequest infer = 2;
         */
        value: InferRequest;
        case: "infer";
    } | {
        /**
         * For a queue with an HTTP target.
         *
         * @generated from field: stagemesh.inference.v1.HttpCall http = 3;
         */
        value: HttpCall;
        case: "http";
    } | {
        case: undefined;
        value?: undefined;
    };
    /**
     * When the job expires: at the earlier of the two. Absent means the queue's ttl.
     *
     * @generated from field: google.protobuf.Timestamp deadline = 4;
     */
    deadline?: Timestamp | undefined;
    /**
     * @generated from field: google.protobuf.Duration ttl = 5;
     */
    ttl?: Duration | undefined;
    /**
     * At most 16, of 64 bytes each.
     *
     * @generated from field: map<string, string> attributes = 6;
     */
    attributes: {
        [key: string]: string;
    };
    /**
     * As in InferRequest, scoped to tenant and queue: a repeated submit returns the same job.
     *
     * @generated from field: string idempotency_key = 7;
     */
    idempotencyKey: string;
    /**
     * @generated from field: int32 priority = 8;
     */
    priority: number;
    /**
     * URL that gets the job once it has ended, as a Standard Webhook: https, unless the mesh
     * allows its host. It is not shown in the job.
     *
     * @generated from field: string webhook = 9;
     */
    webhook: string;
};
/**
 * Describes the message stagemesh.inference.v1.SubmitJobRequest.
 * Use `create(SubmitJobRequestSchema)` to create a new message.
 */
export declare const SubmitJobRequestSchema: GenMessage<SubmitJobRequest>;
/**
 * SubmitJobResponse is the stored job.
 *
 * @generated from message stagemesh.inference.v1.SubmitJobResponse
 */
export type SubmitJobResponse = Message<"stagemesh.inference.v1.SubmitJobResponse"> & {
    /**
     * @generated from field: stagemesh.inference.v1.Job job = 1;
     */
    job?: Job | undefined;
};
/**
 * Describes the message stagemesh.inference.v1.SubmitJobResponse.
 * Use `create(SubmitJobResponseSchema)` to create a new message.
 */
export declare const SubmitJobResponseSchema: GenMessage<SubmitJobResponse>;
/**
 * SubmitJobsRequest is many jobs.
 *
 * @generated from message stagemesh.inference.v1.SubmitJobsRequest
 */
export type SubmitJobsRequest = Message<"stagemesh.inference.v1.SubmitJobsRequest"> & {
    /**
     * @generated from field: repeated stagemesh.inference.v1.SubmitJobRequest jobs = 1;
     */
    jobs: SubmitJobRequest[];
};
/**
 * Describes the message stagemesh.inference.v1.SubmitJobsRequest.
 * Use `create(SubmitJobsRequestSchema)` to create a new message.
 */
export declare const SubmitJobsRequestSchema: GenMessage<SubmitJobsRequest>;
/**
 * SubmitJobsResponse has the answer to each job, in their order.
 *
 * @generated from message stagemesh.inference.v1.SubmitJobsResponse
 */
export type SubmitJobsResponse = Message<"stagemesh.inference.v1.SubmitJobsResponse"> & {
    /**
     * @generated from field: repeated stagemesh.inference.v1.SubmitJobAnswer answers = 1;
     */
    answers: SubmitJobAnswer[];
};
/**
 * Describes the message stagemesh.inference.v1.SubmitJobsResponse.
 * Use `create(SubmitJobsResponseSchema)` to create a new message.
 */
export declare const SubmitJobsResponseSchema: GenMessage<SubmitJobsResponse>;
/**
 * SubmitJobAnswer is a stored job, or why there is none.
 *
 * @generated from message stagemesh.inference.v1.SubmitJobAnswer
 */
export type SubmitJobAnswer = Message<"stagemesh.inference.v1.SubmitJobAnswer"> & {
    /**
     * @generated from oneof stagemesh.inference.v1.SubmitJobAnswer.answer
     */
    answer: {
        /**
         * @generated from field: stagemesh.inference.v1.Job job = 1;
         */
        value: Job;
        case: "job";
    } | {
        /**
         * @generated from field: stagemesh.inference.v1.SubmitJobFailure failure = 2;
         */
        value: SubmitJobFailure;
        case: "failure";
    } | {
        case: undefined;
        value?: undefined;
    };
};
/**
 * Describes the message stagemesh.inference.v1.SubmitJobAnswer.
 * Use `create(SubmitJobAnswerSchema)` to create a new message.
 */
export declare const SubmitJobAnswerSchema: GenMessage<SubmitJobAnswer>;
/**
 * SubmitJobFailure is the status that SubmitJob would have had.
 *
 * @generated from message stagemesh.inference.v1.SubmitJobFailure
 */
export type SubmitJobFailure = Message<"stagemesh.inference.v1.SubmitJobFailure"> & {
    /**
     * A reason of docs/faults.md and a sentence.
     *
     * @generated from field: string reason = 1;
     */
    reason: string;
    /**
     * @generated from field: string message = 2;
     */
    message: string;
    /**
     * When to try again, if that may help.
     *
     * @generated from field: google.protobuf.Duration retry_after = 3;
     */
    retryAfter?: Duration | undefined;
};
/**
 * Describes the message stagemesh.inference.v1.SubmitJobFailure.
 * Use `create(SubmitJobFailureSchema)` to create a new message.
 */
export declare const SubmitJobFailureSchema: GenMessage<SubmitJobFailure>;
/**
 * GetJobRequest asks for one job.
 *
 * @generated from message stagemesh.inference.v1.GetJobRequest
 */
export type GetJobRequest = Message<"stagemesh.inference.v1.GetJobRequest"> & {
    /**
     * @generated from field: string id = 1;
     */
    id: string;
    /**
     * How long to wait for the job's end; absent or 0 means not at all.
     *
     * @generated from field: google.protobuf.Duration wait = 2;
     */
    wait?: Duration | undefined;
};
/**
 * Describes the message stagemesh.inference.v1.GetJobRequest.
 * Use `create(GetJobRequestSchema)` to create a new message.
 */
export declare const GetJobRequestSchema: GenMessage<GetJobRequest>;
/**
 * GetJobResponse is a job and, if it has one, its result.
 *
 * @generated from message stagemesh.inference.v1.GetJobResponse
 */
export type GetJobResponse = Message<"stagemesh.inference.v1.GetJobResponse"> & {
    /**
     * @generated from field: stagemesh.inference.v1.Job job = 1;
     */
    job?: Job | undefined;
    /**
     * @generated from oneof stagemesh.inference.v1.GetJobResponse.result
     */
    result: {
        /**
         * @generated from field: stagemesh.inference.v1.InferResponse infer = 2;
         */
        value: InferResponse;
        case: "infer";
    } | {
        /**
         * Also of a failed job, if the target has answered.
         *
         * @generated from field: stagemesh.inference.v1.HttpAnswer http = 3;
         */
        value: HttpAnswer;
        case: "http";
    } | {
        case: undefined;
        value?: undefined;
    };
};
/**
 * Describes the message stagemesh.inference.v1.GetJobResponse.
 * Use `create(GetJobResponseSchema)` to create a new message.
 */
export declare const GetJobResponseSchema: GenMessage<GetJobResponse>;
/**
 * CancelJobRequest names the job to cancel.
 *
 * @generated from message stagemesh.inference.v1.CancelJobRequest
 */
export type CancelJobRequest = Message<"stagemesh.inference.v1.CancelJobRequest"> & {
    /**
     * @generated from field: string id = 1;
     */
    id: string;
};
/**
 * Describes the message stagemesh.inference.v1.CancelJobRequest.
 * Use `create(CancelJobRequestSchema)` to create a new message.
 */
export declare const CancelJobRequestSchema: GenMessage<CancelJobRequest>;
/**
 * CancelJobResponse is the job as it is then.
 *
 * @generated from message stagemesh.inference.v1.CancelJobResponse
 */
export type CancelJobResponse = Message<"stagemesh.inference.v1.CancelJobResponse"> & {
    /**
     * @generated from field: stagemesh.inference.v1.Job job = 1;
     */
    job?: Job | undefined;
};
/**
 * Describes the message stagemesh.inference.v1.CancelJobResponse.
 * Use `create(CancelJobResponseSchema)` to create a new message.
 */
export declare const CancelJobResponseSchema: GenMessage<CancelJobResponse>;
/**
 * ListJobsRequest asks for a page of jobs.
 *
 * @generated from message stagemesh.inference.v1.ListJobsRequest
 */
export type ListJobsRequest = Message<"stagemesh.inference.v1.ListJobsRequest"> & {
    /**
     * @generated from field: string queue = 1;
     */
    queue: string;
    /**
     * List ended jobs instead of those that wait or run.
     *
     * @generated from field: bool ended = 2;
     */
    ended: boolean;
    /**
     * Where to go on, from the last page.
     *
     * @generated from field: uint64 after = 3;
     */
    after: bigint;
    /**
     * 50 if 0, at most 1000.
     *
     * @generated from field: uint32 limit = 4;
     */
    limit: number;
    /**
     * Of ended jobs: if there is none after that number, wait for the first so long at most. next
     * is then set unless the queue never had an end.
     *
     * @generated from field: google.protobuf.Duration wait = 5;
     */
    wait?: Duration | undefined;
};
/**
 * Describes the message stagemesh.inference.v1.ListJobsRequest.
 * Use `create(ListJobsRequestSchema)` to create a new message.
 */
export declare const ListJobsRequestSchema: GenMessage<ListJobsRequest>;
/**
 * ListJobsResponse is a page of jobs.
 *
 * @generated from message stagemesh.inference.v1.ListJobsResponse
 */
export type ListJobsResponse = Message<"stagemesh.inference.v1.ListJobsResponse"> & {
    /**
     * @generated from field: repeated stagemesh.inference.v1.Job jobs = 1;
     */
    jobs: Job[];
    /**
     * Pass it as after for the next page; 0 means that there is none now.
     *
     * @generated from field: uint64 next = 2;
     */
    next: bigint;
};
/**
 * Describes the message stagemesh.inference.v1.ListJobsResponse.
 * Use `create(ListJobsResponseSchema)` to create a new message.
 */
export declare const ListJobsResponseSchema: GenMessage<ListJobsResponse>;
/**
 * ExplainJobRequest names the job.
 *
 * @generated from message stagemesh.inference.v1.ExplainJobRequest
 */
export type ExplainJobRequest = Message<"stagemesh.inference.v1.ExplainJobRequest"> & {
    /**
     * @generated from field: string id = 1;
     */
    id: string;
};
/**
 * Describes the message stagemesh.inference.v1.ExplainJobRequest.
 * Use `create(ExplainJobRequestSchema)` to create a new message.
 */
export declare const ExplainJobRequestSchema: GenMessage<ExplainJobRequest>;
/**
 * ExplainJobResponse is the job, and where it stands.
 *
 * @generated from message stagemesh.inference.v1.ExplainJobResponse
 */
export type ExplainJobResponse = Message<"stagemesh.inference.v1.ExplainJobResponse"> & {
    /**
     * @generated from field: stagemesh.inference.v1.Job job = 1;
     */
    job?: Job | undefined;
    /**
     * @generated from field: stagemesh.inference.v1.JobPlace place = 2;
     */
    place?: JobPlace | undefined;
};
/**
 * Describes the message stagemesh.inference.v1.ExplainJobResponse.
 * Use `create(ExplainJobResponseSchema)` to create a new message.
 */
export declare const ExplainJobResponseSchema: GenMessage<ExplainJobResponse>;
/**
 * JobPlace is where a job stands.
 *
 * @generated from message stagemesh.inference.v1.JobPlace
 */
export type JobPlace = Message<"stagemesh.inference.v1.JobPlace"> & {
    /**
     * What holds it: "paused" (its queue is), "no owner" (no dispatcher answers for its pool),
     * "closed" (its pool sends nothing), "full" (its pool has no room), "limit" (its tenant is at
     * one), "turn" (others go first), "delayed", "running" or "ended".
     *
     * @generated from field: string hold = 1;
     */
    hold: string;
    /**
     * More about that; may be empty.
     *
     * @generated from field: string why = 2;
     */
    why: string;
    /**
     * Since when it is so; absent if that is not known.
     *
     * @generated from field: google.protobuf.Timestamp since = 3;
     */
    since?: Timestamp | undefined;
    /**
     * Its position in its pool's order, 1 for the next; 0 if it does not wait for its turn.
     *
     * @generated from field: uint64 position = 4;
     */
    position: bigint;
    /**
     * The position is not counted, but estimated from weights and a part of the jobs.
     *
     * @generated from field: bool is_estimate = 5;
     */
    isEstimate: boolean;
    /**
     * When it starts by the pace of the pool's last minute, or has started; absent if that is not
     * known.
     *
     * @generated from field: google.protobuf.Timestamp starts_at = 6;
     */
    startsAt?: Timestamp | undefined;
    /**
     * @generated from field: string pool = 7;
     */
    pool: string;
};
/**
 * Describes the message stagemesh.inference.v1.JobPlace.
 * Use `create(JobPlaceSchema)` to create a new message.
 */
export declare const JobPlaceSchema: GenMessage<JobPlace>;
/**
 * WatchJobRequest asks for the events of a job.
 *
 * @generated from message stagemesh.inference.v1.WatchJobRequest
 */
export type WatchJobRequest = Message<"stagemesh.inference.v1.WatchJobRequest"> & {
    /**
     * @generated from field: string id = 1;
     */
    id: string;
    /**
     * The event_id of the last event that the caller has; empty means from the beginning.
     *
     * @generated from field: string after = 2;
     */
    after: string;
};
/**
 * Describes the message stagemesh.inference.v1.WatchJobRequest.
 * Use `create(WatchJobRequestSchema)` to create a new message.
 */
export declare const WatchJobRequestSchema: GenMessage<WatchJobRequest>;
/**
 * WatchJobResponse is one event of a job. The state of its end is the last one. One without an
 * event comes first if there is nothing to send yet.
 *
 * @generated from message stagemesh.inference.v1.WatchJobResponse
 */
export type WatchJobResponse = Message<"stagemesh.inference.v1.WatchJobResponse"> & {
    /**
     * "<attempt>.<seq>" of the last chunk so far; of a state also the number of the job's record.
     *
     * @generated from field: string event_id = 1;
     */
    eventId: string;
    /**
     * @generated from oneof stagemesh.inference.v1.WatchJobResponse.event
     */
    event: {
        /**
         * @generated from field: stagemesh.inference.v1.Job state = 2;
         */
        value: Job;
        case: "state";
    } | {
        /**
         * @generated from field: stagemesh.inference.v1.JobChunk chunk = 3;
         */
        value: JobChunk;
        case: "chunk";
    } | {
        /**
         * @generated from field: stagemesh.inference.v1.JobRestart restart = 4;
         */
        value: JobRestart;
        case: "restart";
    } | {
        /**
         * @generated from field: stagemesh.inference.v1.JobGap gap = 5;
         */
        value: JobGap;
        case: "gap";
    } | {
        case: undefined;
        value?: undefined;
    };
};
/**
 * Describes the message stagemesh.inference.v1.WatchJobResponse.
 * Use `create(WatchJobResponseSchema)` to create a new message.
 */
export declare const WatchJobResponseSchema: GenMessage<WatchJobResponse>;
/**
 * JobChunk is a chunk of the answer of an attempt.
 *
 * @generated from message stagemesh.inference.v1.JobChunk
 */
export type JobChunk = Message<"stagemesh.inference.v1.JobChunk"> & {
    /**
     * Counts the attempts with chunks, and the runs of one that the mesh had to repeat.
     *
     * @generated from field: uint64 attempt = 1;
     */
    attempt: bigint;
    /**
     * Of its attempt, from 1.
     *
     * @generated from field: uint64 seq = 2;
     */
    seq: bigint;
    /**
     * @generated from field: string request_id = 3;
     */
    requestId: string;
    /**
     * @generated from field: repeated stagemesh.inference.v1.Part outputs = 4;
     */
    outputs: Part[];
};
/**
 * Describes the message stagemesh.inference.v1.JobChunk.
 * Use `create(JobChunkSchema)` to create a new message.
 */
export declare const JobChunkSchema: GenMessage<JobChunk>;
/**
 * JobRestart comes before the first chunk of another attempt: drop the chunks so far.
 *
 * @generated from message stagemesh.inference.v1.JobRestart
 */
export type JobRestart = Message<"stagemesh.inference.v1.JobRestart"> & {
    /**
     * @generated from field: uint64 attempt = 1;
     */
    attempt: bigint;
};
/**
 * Describes the message stagemesh.inference.v1.JobRestart.
 * Use `create(JobRestartSchema)` to create a new message.
 */
export declare const JobRestartSchema: GenMessage<JobRestart>;
/**
 * JobGap stands for chunks that are not kept. The result of the job has them, unless the stage
 * answers in chunks alone.
 *
 * @generated from message stagemesh.inference.v1.JobGap
 */
export type JobGap = Message<"stagemesh.inference.v1.JobGap"> & {
    /**
     * @generated from field: uint64 attempt = 1;
     */
    attempt: bigint;
    /**
     * The first and the last one.
     *
     * @generated from field: uint64 first = 2;
     */
    first: bigint;
    /**
     * @generated from field: uint64 last = 3;
     */
    last: bigint;
};
/**
 * Describes the message stagemesh.inference.v1.JobGap.
 * Use `create(JobGapSchema)` to create a new message.
 */
export declare const JobGapSchema: GenMessage<JobGap>;
/**
 * JobState is where a job is in its life.
 *
 * @generated from enum stagemesh.inference.v1.JobState
 */
export declare enum JobState {
    /**
     * @generated from enum value: JOB_STATE_UNSPECIFIED = 0;
     */
    UNSPECIFIED = 0,
    /**
     * It waits for its first attempt.
     *
     * @generated from enum value: JOB_STATE_QUEUED = 1;
     */
    QUEUED = 1,
    /**
     * An attempt runs.
     *
     * @generated from enum value: JOB_STATE_RUNNING = 2;
     */
    RUNNING = 2,
    /**
     * An attempt has failed; it waits for the next one.
     *
     * @generated from enum value: JOB_STATE_DELAYED = 3;
     */
    DELAYED = 3,
    /**
     * Ends.
     *
     * @generated from enum value: JOB_STATE_SUCCEEDED = 4;
     */
    SUCCEEDED = 4,
    /**
     * @generated from enum value: JOB_STATE_FAILED = 5;
     */
    FAILED = 5,
    /**
     * Its deadline passed before it succeeded.
     *
     * @generated from enum value: JOB_STATE_EXPIRED = 6;
     */
    EXPIRED = 6,
    /**
     * @generated from enum value: JOB_STATE_CANCELLED = 7;
     */
    CANCELLED = 7
}
/**
 * Describes the enum stagemesh.inference.v1.JobState.
 */
export declare const JobStateSchema: GenEnum<JobState>;
/**
 * JobService takes requests that need not run now. A job waits in a queue on disk until a
 * dispatcher forwards it, and has exactly one end. docs/jobs.md is the guide.
 *
 * A failure of a method is the RPC's status, as for InferenceService. The failure of a job is
 * a part of the job.
 *
 * @generated from service stagemesh.inference.v1.JobService
 */
export declare const JobService: GenService<{
    /**
     * SubmitJob stores a job. Its answer means that the job is on disk. NOT_FOUND: there is no
     * such queue or pipeline. RESOURCE_EXHAUSTED, QUEUE_FULL: retry later.
     *
     * @generated from rpc stagemesh.inference.v1.JobService.SubmitJob
     */
    submitJob: {
        methodKind: "unary";
        input: typeof SubmitJobRequestSchema;
        output: typeof SubmitJobResponseSchema;
    };
    /**
     * SubmitJobs stores up to 1,000 jobs, and answers each in its place: a bad one fails alone.
     *
     * @generated from rpc stagemesh.inference.v1.JobService.SubmitJobs
     */
    submitJobs: {
        methodKind: "unary";
        input: typeof SubmitJobsRequestSchema;
        output: typeof SubmitJobsResponseSchema;
    };
    /**
     * GetJob returns a job's state and, once it has ended, its result. It may wait for the end.
     * NOT_FOUND: there is no such job of this tenant, or its retention has passed.
     *
     * @generated from rpc stagemesh.inference.v1.JobService.GetJob
     */
    getJob: {
        methodKind: "unary";
        input: typeof GetJobRequestSchema;
        output: typeof GetJobResponseSchema;
    };
    /**
     * CancelJob cancels a job: one that waits never runs, one that runs is stopped. A job that
     * has ended stays as it is.
     *
     * @generated from rpc stagemesh.inference.v1.JobService.CancelJob
     */
    cancelJob: {
        methodKind: "unary";
        input: typeof CancelJobRequestSchema;
        output: typeof CancelJobResponseSchema;
    };
    /**
     * ListJobs lists the tenant's jobs of a queue: those that wait or run in the order of their
     * acceptance, or those that have ended in the order of their ends.
     *
     * @generated from rpc stagemesh.inference.v1.JobService.ListJobs
     */
    listJobs: {
        methodKind: "unary";
        input: typeof ListJobsRequestSchema;
        output: typeof ListJobsResponseSchema;
    };
    /**
     * ExplainJob says where a job stands: what holds it, how many go first, and when it may start.
     *
     * @generated from rpc stagemesh.inference.v1.JobService.ExplainJob
     */
    explainJob: {
        methodKind: "unary";
        input: typeof ExplainJobRequestSchema;
        output: typeof ExplainJobResponseSchema;
    };
    /**
     * WatchJob sends the events of a job until its end: its state after each change, and the chunks
     * of its answer. Any gateway resumes it after the last event that the caller has.
     *
     * @generated from rpc stagemesh.inference.v1.JobService.WatchJob
     */
    watchJob: {
        methodKind: "server_streaming";
        input: typeof WatchJobRequestSchema;
        output: typeof WatchJobResponseSchema;
    };
}>;
