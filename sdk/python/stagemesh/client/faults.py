"""Faults: why a call failed, as exceptions.

The classes are those of docs/faults.md, one for each code of gRPC; ``reason`` is the stable
name to branch on. A test compares the table here with the one of the documentation.
"""

from __future__ import annotations

import json
import re
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple, Type


class Fault(Exception):
    """A call failed; the base of all classes here.

    message      for people; it may change
    reason       for programs, such as QUEUE_FULL
    retry_after  how long to wait before a retry, in seconds, where that is known
    stage, step, host, request_id  where it happened, as far as there is such a place
    violations   the fields at fault: pairs of a path and a description
    metadata     further facts, by name
    status       the status of HTTP; 0 if there was no answer
    key          the idempotency key of the request, by which its result may still be fetched
    """

    code = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        retry_after: Optional[float] = None,
        stage: str = "",
        step: str = "",
        host: str = "",
        request_id: str = "",
        violations: Sequence[Tuple[str, str]] = (),
        metadata: Optional[Mapping[str, str]] = None,
        status: int = 0,
        key: str = "",
    ) -> None:
        super().__init__(message)
        self.message, self.reason, self.retry_after = message, reason, retry_after
        self.stage, self.step, self.host, self.request_id = stage, step, host, request_id
        self.violations, self.metadata = tuple(violations), dict(metadata or {})
        self.status, self.key = status, key

    @property
    def retryable(self) -> bool:
        """Reports whether the same request may succeed later."""
        return self.reason in RETRYABLE and "final" not in self.metadata

    def __str__(self) -> str:
        place = f" at stage {self.stage}" if self.stage else ""
        request = f" (request {self.request_id})" if self.request_id else ""
        return f"{self.reason}{place}: {self.message}{request}"

    def __reduce__(self) -> Any:
        """Pickles the attributes, which are no arguments by position."""
        return type(self), (self.message,), self.__dict__


class Aborted(Fault):
    """Somebody else changed the same thing meanwhile."""

    code = "ABORTED"


class AlreadyExists(Fault):
    """The name or the idempotency key was used for something else."""

    code = "ALREADY_EXISTS"


class Cancelled(Fault):
    """The request was cancelled."""

    code = "CANCELLED"


class DeadlineExceeded(Fault):
    """The deadline passed before the answer; the request may still run if it is durable or has a key."""

    code = "DEADLINE_EXCEEDED"


class FailedPrecondition(Fault):
    """The state of the mesh does not permit the call."""

    code = "FAILED_PRECONDITION"


class Internal(Fault):
    """A stage failed, or the mesh did."""

    code = "INTERNAL"


class InvalidArgument(Fault):
    """The request or one of its inputs is not valid; ``violations`` names the fields."""

    code = "INVALID_ARGUMENT"


class NotFound(Fault):
    """The pipeline, model, queue, job or result does not exist."""

    code = "NOT_FOUND"


class PermissionDenied(Fault):
    """The token does not permit the call."""

    code = "PERMISSION_DENIED"


class ResourceExhausted(Fault):
    """The mesh has as many requests, or as much stored, as it may."""

    code = "RESOURCE_EXHAUSTED"


class Unauthenticated(Fault):
    """The token is missing or wrong."""

    code = "UNAUTHENTICATED"


class Unavailable(Fault):
    """The mesh cannot run the request now."""

    code = "UNAVAILABLE"


class Unimplemented(Fault):
    """The mesh does not do that."""

    code = "UNIMPLEMENTED"


class Disconnected(Unavailable):
    """The client's own: no gateway could be reached, or the connection broke before the answer."""

    # False if the gateway cannot have the request.
    sent = False


class InvalidAnswer(Fault):
    """The client's own: what answered is no gateway, or the answer is too large."""


_TABLE: Dict[Type[Fault], str] = {
    Aborted: "ALIAS_CONFLICT REVISION_MISMATCH",
    AlreadyExists: "IDEMPOTENCY_MISMATCH MODEL_EXISTS",
    Cancelled: "CANCELLED",
    DeadlineExceeded: "DEADLINE_EXCEEDED RUNNER_STALLED",
    FailedPrecondition: "INVALID_MODEL MODEL_IN_USE MODEL_TOO_LARGE NOT_REPLAYABLE PIPELINE_DOES_NOT_FIT",
    Internal: "ATTEMPTS_EXHAUSTED INTERNAL OUTPUT_TOO_LARGE RUNNER_CRASHED RUNNER_FAILED RUNNER_OUTPUT_INVALID",
    InvalidArgument: "INVALID_INPUT INVALID_REQUEST PAYLOAD_TOO_LARGE SCHEMA_VIOLATION UNSUPPORTED_MEDIA_TYPE",
    NotFound: "GONE NOT_FOUND UNKNOWN_MODEL UNKNOWN_PIPELINE UNKNOWN_QUEUE",
    PermissionDenied: "PERMISSION_DENIED",
    ResourceExhausted: "CACHE_FULL OVERLOADED QUEUE_FULL RUNNER_OUT_OF_MEMORY SLOW_READER STORE_FULL",
    Unauthenticated: "UNAUTHENTICATED",
    Unavailable: "BROKER_UNAVAILABLE MODEL_LOADING MODEL_LOAD_FAILED NO_CAPACITY QUEUE_LOST REGISTRY_UNAVAILABLE"
    " SHUTTING_DOWN STREAM_INTERRUPTED TARGET_FAILED",
    Unimplemented: "NOT_SUPPORTED",
    Disconnected: "DISCONNECTED",
    InvalidAnswer: "INVALID_ANSWER",
}
# The class of each reason; the last two are the client's own.
REASONS: Dict[str, Type[Fault]] = {reason: kind for kind, reasons in _TABLE.items() for reason in reasons.split()}
# The reasons after which the same request may succeed.
RETRYABLE = frozenset(
    "BROKER_UNAVAILABLE CACHE_FULL DEADLINE_EXCEEDED DISCONNECTED MODEL_LOADING MODEL_LOAD_FAILED NO_CAPACITY"
    " OVERLOADED QUEUE_FULL QUEUE_LOST REGISTRY_UNAVAILABLE RUNNER_OUT_OF_MEMORY RUNNER_STALLED SHUTTING_DOWN"
    " STORE_FULL TARGET_FAILED".split()
)
_BY_CODE = {kind.code: kind for kind in _TABLE if kind not in (Disconnected, InvalidAnswer)}
_QUOTED = 200  # the longest piece of a foreign answer in a message


def disconnected(message: str, sent: bool, final: bool = False) -> Disconnected:
    """Returns the fault of a connection; final if a retry cannot help."""
    out = Disconnected(message, reason="DISCONNECTED", metadata={"final": "true"} if final else None)
    out.sent = sent
    return out


def invalid_answer(message: str, status: int = 0) -> InvalidAnswer:
    """Returns the fault of an answer that cannot be read."""
    return InvalidAnswer(message, reason="INVALID_ANSWER", status=status)


def fault_of(status: int, headers: Mapping[str, str], body: Any) -> Fault:
    """Returns the fault of an answer that is none of a successful call."""
    pause = headers.get("retry-after", "")
    retry_after = float(pause) if re.fullmatch(r"\d{1,9}", pause) else None
    try:
        error = json.loads(bytes(body))["error"]
        reason, message = error["reason"] + "", error["message"] + ""
        if "retry_after_ms" in error:
            retry_after = error["retry_after_ms"] / 1000
        violations = [(one["field"], one["description"]) for one in error.get("violations", ())]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return _foreign(status, headers, bytes(body[:_QUOTED]), retry_after)
    names = ("stage", "step", "host", "metadata")
    return _BY_CODE.get(error.get("code"), Fault)(
        message,
        reason=reason,
        retry_after=retry_after,
        request_id=error.get("request_id") or headers.get("stagemesh-request-id", ""),
        violations=violations,
        status=status,
        **{name: error[name] for name in names if name in error},
    )


def _foreign(status: int, headers: Mapping[str, str], text: bytes, retry_after: Optional[float]) -> Fault:
    """Returns the fault of an answer that no gateway made, such as a proxy's."""
    if "location" in headers and 300 <= status < 400:
        where = headers["location"][:_QUOTED]
        return invalid_answer(f"HTTP {status} to {where!r}: redirects are not followed; use the gateway's URL", status)
    message = f"HTTP {status} without a fault of a gateway: {text.decode(errors='replace')!r}"
    if status not in (429, 502, 503, 504):
        return invalid_answer(message, status)
    out = disconnected(message, sent=True)
    out.status, out.retry_after = status, retry_after
    return out
