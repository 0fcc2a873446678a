// Why a call failed. The classes are those of docs/faults.md, one for each code of gRPC; `reason` is the
// stable name to branch on. A test compares the table here with the one of the documentation.

/** A field at fault, such as inputs.x, and what is wrong with it. */
export interface Violation {
  readonly field: string;
  readonly description: string;
}

/** What a fault says beside its message. */
export type FaultDetails = { readonly reason: string; readonly cause?: unknown } & {
  readonly [Name in "retryAfterMs" | "stage" | "step" | "host" | "requestId" | "violations" | "metadata"]?:
    | Fault[Name]
    | undefined;
};

/** A call failed: the base of all classes here. The message is for people, and may change. */
export class Fault extends Error {
  /** Code of gRPC that the class stands for, such as RESOURCE_EXHAUSTED. */
  declare readonly code: string;
  /** For programs, such as QUEUE_FULL: one of docs/faults.md, DISCONNECTED or INVALID_ANSWER. */
  readonly reason: string = "";
  /** How long to wait before a retry, where that is known. */
  readonly retryAfterMs: number | undefined = undefined;
  /** Where it happened; empty where there is no such place. */
  readonly stage: string = "";
  readonly step: string = "";
  readonly host: string = "";
  readonly requestId: string = "";
  readonly violations: readonly Violation[] = [];
  /** Further facts by name, such as a limit. */
  readonly metadata: Readonly<Record<string, string>> = {};
  /** Idempotency key of the request, by which its result may still be fetched; empty without one. */
  key = "";

  constructor(message: string, { cause, ...details }: FaultDetails) {
    super(message, cause === undefined ? undefined : { cause });
    Object.assign(this, Object.fromEntries(Object.entries(details).filter(([, value]) => value !== undefined)));
  }

  /** Whether the same request may succeed later. */
  get retryable(): boolean {
    return RETRYABLE.has(this.reason) && !("final" in this.metadata);
  }

  override toString(): string {
    const place = this.stage && ` at stage ${this.stage}`;
    return `${this.reason}${place}: ${this.message}${this.requestId && ` (request ${this.requestId})`}`;
  }
}

/** Somebody else changed the same thing meanwhile. */
export class Aborted extends Fault {}

/** The name or the idempotency key was used for something else. */
export class AlreadyExists extends Fault {}

/** The request was cancelled. */
export class Cancelled extends Fault {}

/** The deadline passed before the answer; the request may still run if it is durable or has a key. */
export class DeadlineExceeded extends Fault {}

/** The state of the mesh does not permit the call. */
export class FailedPrecondition extends Fault {}

/** A stage failed, or the mesh did. */
export class Internal extends Fault {}

/** The request or one of its inputs is not valid; violations name the fields. */
export class InvalidArgument extends Fault {}

/** The pipeline, model, queue, job or result does not exist. */
export class NotFound extends Fault {}

/** The token does not permit the call. */
export class PermissionDenied extends Fault {}

/** The mesh has as many requests, or as much stored, as it may. */
export class ResourceExhausted extends Fault {}

/** The token is missing or wrong. */
export class Unauthenticated extends Fault {}

/** The mesh cannot run the request now. */
export class Unavailable extends Fault {}

/** The mesh does not do that. */
export class Unimplemented extends Fault {}

/** The client's own: no gateway could be reached, or the connection broke before the answer. */
export class Disconnected extends Unavailable {
  /** Sent is false if the gateway cannot have the request. */
  constructor(
    message: string,
    readonly sent: boolean,
    details: Omit<FaultDetails, "reason"> = {},
  ) {
    super(message, { ...details, reason: "DISCONNECTED" });
  }
}

/** The client's own: what answered is no gateway, or the answer is too large. */
export class InvalidAnswer extends Fault {
  constructor(message: string, cause?: unknown) {
    super(message, { reason: "INVALID_ANSWER", cause });
  }
}

type Kind = new (message: string, details: FaultDetails) => Fault;

/** The class and the reasons of each code of gRPC. */
export const CODES: Readonly<Record<string, readonly [Kind, string]>> = {
  ABORTED: [Aborted, "ALIAS_CONFLICT REVISION_MISMATCH"],
  ALREADY_EXISTS: [AlreadyExists, "IDEMPOTENCY_MISMATCH MODEL_EXISTS"],
  CANCELLED: [Cancelled, "CANCELLED"],
  DEADLINE_EXCEEDED: [DeadlineExceeded, "DEADLINE_EXCEEDED RUNNER_STALLED"],
  FAILED_PRECONDITION: [
    FailedPrecondition,
    "INVALID_MODEL MODEL_IN_USE MODEL_TOO_LARGE NOT_REPLAYABLE PIPELINE_DOES_NOT_FIT",
  ],
  INTERNAL: [
    Internal,
    "ATTEMPTS_EXHAUSTED INTERNAL OUTPUT_TOO_LARGE RUNNER_CRASHED RUNNER_FAILED RUNNER_OUTPUT_INVALID",
  ],
  INVALID_ARGUMENT: [
    InvalidArgument,
    "INVALID_INPUT INVALID_REQUEST PAYLOAD_TOO_LARGE SCHEMA_VIOLATION UNSUPPORTED_MEDIA_TYPE",
  ],
  NOT_FOUND: [NotFound, "GONE NOT_FOUND UNKNOWN_MODEL UNKNOWN_PIPELINE UNKNOWN_QUEUE"],
  PERMISSION_DENIED: [PermissionDenied, "PERMISSION_DENIED"],
  RESOURCE_EXHAUSTED: [
    ResourceExhausted,
    "CACHE_FULL OVERLOADED QUEUE_FULL RUNNER_OUT_OF_MEMORY SLOW_READER STORE_FULL",
  ],
  UNAUTHENTICATED: [Unauthenticated, "UNAUTHENTICATED"],
  UNAVAILABLE: [
    Unavailable,
    "BROKER_UNAVAILABLE MODEL_LOADING MODEL_LOAD_FAILED NO_CAPACITY QUEUE_LOST REGISTRY_UNAVAILABLE " +
      "SHUTTING_DOWN STREAM_INTERRUPTED TARGET_FAILED",
  ],
  UNIMPLEMENTED: [Unimplemented, "NOT_SUPPORTED"],
};

// The names must not come from the classes: tools that make programs smaller change those.
const name = (kind: { readonly prototype: Fault }, values: { name: string; code?: string }): void => {
  Object.assign(kind.prototype, values);
};
name(Fault, { name: "Fault", code: "UNKNOWN" });
for (const [code, [kind]] of Object.entries(CODES)) {
  name(kind, { name: code.toLowerCase().replace(/(?:^|_)(.)/g, (_, letter: string) => letter.toUpperCase()), code });
}
name(Disconnected, { name: "Disconnected" });
name(InvalidAnswer, { name: "InvalidAnswer" });

/** Returns the fault of a reason, in the class of its code, or without one in that of the reason. */
export function faultOfReason(message: string, details: FaultDetails, code = ""): Fault {
  const found = Object.values(CODES).find(([, reasons]) => reasons.split(" ").includes(details.reason));
  const [kind] = (code === "" ? found : CODES[code]) ?? [Fault];
  return new kind(message, details);
}

/** The reasons after which the same request may succeed. */
export const RETRYABLE: ReadonlySet<string> = new Set(
  (
    "BROKER_UNAVAILABLE CACHE_FULL DEADLINE_EXCEEDED DISCONNECTED MODEL_LOADING MODEL_LOAD_FAILED NO_CAPACITY " +
    "OVERLOADED QUEUE_FULL QUEUE_LOST REGISTRY_UNAVAILABLE RUNNER_OUT_OF_MEMORY RUNNER_STALLED SHUTTING_DOWN " +
    "STORE_FULL TARGET_FAILED"
  ).split(" "),
);
