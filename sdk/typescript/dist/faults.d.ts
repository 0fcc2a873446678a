/** A field at fault, such as inputs.x, and what is wrong with it. */
export interface Violation {
    readonly field: string;
    readonly description: string;
}
/** What a fault says beside its message. */
export type FaultDetails = {
    readonly reason: string;
    readonly cause?: unknown;
} & {
    readonly [Name in "retryAfterMs" | "stage" | "step" | "host" | "requestId" | "violations" | "metadata"]?: Fault[Name] | undefined;
};
/** A call failed: the base of all classes here. The message is for people, and may change. */
export declare class Fault extends Error {
    /** Code of gRPC that the class stands for, such as RESOURCE_EXHAUSTED. */
    readonly code: string;
    /** For programs, such as QUEUE_FULL: one of docs/faults.md, DISCONNECTED or INVALID_ANSWER. */
    readonly reason: string;
    /** How long to wait before a retry, where that is known. */
    readonly retryAfterMs: number | undefined;
    /** Where it happened; empty where there is no such place. */
    readonly stage: string;
    readonly step: string;
    readonly host: string;
    readonly requestId: string;
    readonly violations: readonly Violation[];
    /** Further facts by name, such as a limit. */
    readonly metadata: Readonly<Record<string, string>>;
    /** Idempotency key of the request, by which its result may still be fetched; empty without one. */
    key: string;
    constructor(message: string, { cause, ...details }: FaultDetails);
    /** Whether the same request may succeed later. */
    get retryable(): boolean;
    toString(): string;
}
/** Somebody else changed the same thing meanwhile. */
export declare class Aborted extends Fault {
}
/** The name or the idempotency key was used for something else. */
export declare class AlreadyExists extends Fault {
}
/** The request was cancelled. */
export declare class Cancelled extends Fault {
}
/** The deadline passed before the answer; the request may still run if it is durable or has a key. */
export declare class DeadlineExceeded extends Fault {
}
/** The state of the mesh does not permit the call. */
export declare class FailedPrecondition extends Fault {
}
/** A stage failed, or the mesh did. */
export declare class Internal extends Fault {
}
/** The request or one of its inputs is not valid; violations name the fields. */
export declare class InvalidArgument extends Fault {
}
/** The pipeline, model, queue, job or result does not exist. */
export declare class NotFound extends Fault {
}
/** The token does not permit the call. */
export declare class PermissionDenied extends Fault {
}
/** The mesh has as many requests, or as much stored, as it may. */
export declare class ResourceExhausted extends Fault {
}
/** The token is missing or wrong. */
export declare class Unauthenticated extends Fault {
}
/** The mesh cannot run the request now. */
export declare class Unavailable extends Fault {
}
/** The mesh does not do that. */
export declare class Unimplemented extends Fault {
}
/** The client's own: no gateway could be reached, or the connection broke before the answer. */
export declare class Disconnected extends Unavailable {
    readonly sent: boolean;
    /** Sent is false if the gateway cannot have the request. */
    constructor(message: string, sent: boolean, details?: Omit<FaultDetails, "reason">);
}
/** The client's own: what answered is no gateway, or the answer is too large. */
export declare class InvalidAnswer extends Fault {
    constructor(message: string, cause?: unknown);
}
type Kind = new (message: string, details: FaultDetails) => Fault;
/** The class and the reasons of each code of gRPC. */
export declare const CODES: Readonly<Record<string, readonly [Kind, string]>>;
/** Returns the fault of a reason, in the class of its code, or without one in that of the reason. */
export declare function faultOfReason(message: string, details: FaultDetails, code?: string): Fault;
/** The reasons after which the same request may succeed. */
export declare const RETRYABLE: ReadonlySet<string>;
export {};
