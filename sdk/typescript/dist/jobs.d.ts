import type { Client } from "@connectrpc/connect";
import { type Options, type Settled, type Waiting } from "./calls.js";
import { type Job as JobMessage, type JobGap, type JobPlace, type JobRestart, type JobService } from "./gen/stagemesh/inference/v1/job_pb.js";
import { Answer, Chunk, type Inputs, type Outputs } from "./values.js";
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
export declare class Job {
    readonly details: JobMessage;
    readonly id: string;
    readonly queue: string;
    /** One of queued, running, delayed, succeeded, failed, expired, cancelled. */
    readonly state: string;
    readonly attempts: number;
    readonly reason: string;
    readonly message: string;
    constructor(details: JobMessage);
    /** Whether the job has come to its end. */
    get ended(): boolean;
}
/** An event of a job. After a restart the chunks so far do not count; a gap stands for chunks that are not kept. */
export type JobEvent<O extends Outputs = Outputs> = {
    readonly kind: "state";
    readonly job: Job;
} | {
    readonly kind: "chunk";
    readonly chunk: Chunk<O>;
} | {
    readonly kind: "restart";
    readonly details: JobRestart;
} | {
    readonly kind: "gap";
    readonly details: JobGap;
};
/** The jobs of a mesh: mesh.jobs. A job is given as a Job or by its ID. */
export declare class Jobs {
    private readonly client;
    private readonly options;
    /** Mesh makes it. */
    constructor(client: Client<typeof JobService>, options: Settled);
    /** Returns the same jobs with other options. */
    withOptions(options: Options): Jobs;
    private call;
    /** Submits a job, once even if it is sent again: to a pipeline, or to the path of an HTTP target. */
    submit(queue: string, inputs: Inputs, options?: JobOptions): Promise<Job>;
    /** Returns a job as it is now. */
    get(job: Job | string, options?: Options): Promise<Job>;
    /** Cancels a job. */
    cancel(job: Job | string, options?: Options): Promise<Job>;
    /** Returns what holds a job, its position, and when it may start. */
    explain(job: Job | string, options?: Options): Promise<{
        job: Job;
        place: JobPlace | undefined;
    }>;
    /** Returns a job once it has ended, however it did; throws DeadlineExceeded if it has not after waitMs. */
    wait(job: Job | string, options?: Waiting): Promise<Job>;
    /**
     * Returns the answer of a job, for whose end it waits; throws the fault that it ended with. The answer of an HTTP
     * target is one output without a name.
     */
    result<O extends Outputs = Outputs>(job: Job | string, options?: Waiting): Promise<Answer<O>>;
    private awaitEnd;
    /**
     * Returns jobs that have not ended, or that have, and the number after which the next page begins. waitMs is how
     * long to wait for the first new end.
     */
    list(queue: string, options?: Waiting & {
        readonly ended?: boolean;
        readonly after?: number;
        readonly limit?: number;
    }): Promise<{
        jobs: Job[];
        next: number;
    }>;
    /** Yields the events of a job until its end; a connection that breaks is made again. */
    watch<O extends Outputs = Outputs>(job: Job | string, options?: Options): AsyncGenerator<JobEvent<O>, void, undefined>;
}
