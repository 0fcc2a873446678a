"""Calls: the options of a request, when it is sent again, and the events of streams and jobs."""

from __future__ import annotations

import json
import numbers
import random
import re
from typing import Any, Callable, Deque, Dict, Mapping, NamedTuple, Optional, Sequence, Union
from urllib.parse import quote, urlencode

from .faults import Fault, InvalidArgument, Unavailable, fault_of, invalid_answer
from .values import PACKED, Answer, Chunk, encode_request

Parameter = Union[bool, int, float, str]


class Options(NamedTuple):
    """The options of calls; ``Mesh.with_options`` describes and changes them."""

    timeout: Optional[float] = 60.0
    parameters: Mapping[str, Parameter] = {}
    steps: Mapping[str, Mapping[str, Parameter]] = {}
    outputs: Sequence[str] = ()
    priority: int = 0
    durability: str = ""
    wait_for_capacity: Optional[bool] = None
    idempotency_key: str = ""
    retries: int = 5
    headers: Mapping[str, str] = {}

    def changed(self, **changes: Any) -> Options:
        """Returns other options; raises TypeError or ValueError for what is not valid."""
        unknown = changes.keys() - set(self._fields)
        if unknown:
            raise TypeError(f"unknown option {', '.join(sorted(unknown))}; there are {', '.join(self._fields)}")
        out = self._replace(**changes)
        if out.timeout is not None and not (isinstance(out.timeout, numbers.Real) and out.timeout > 0):
            raise ValueError(f"timeout: expected seconds above 0, got {out.timeout!r}")
        if not out.idempotency_key.isascii() or not out.idempotency_key.isprintable() or len(out.idempotency_key) > 256:
            raise ValueError("idempotency_key: expected at most 256 printable characters of ASCII")
        return out

    def http_headers(self) -> Dict[str, str]:
        """Returns the options that are headers, and the types of request and answer."""
        out = {"Content-Type": f"{PACKED}; form=tensors", "Accept": PACKED}
        if self.priority:
            out["Stagemesh-Priority"] = str(self.priority)
        if self.durability:
            out["Stagemesh-Durability"] = self.durability
        if self.wait_for_capacity is not None:
            out["Stagemesh-Wait-For-Capacity"] = _text(self.wait_for_capacity)
        return out

    def query(self, **texts: str) -> str:
        """Returns the query of a path: these texts, and the parameters of single steps."""
        for step, parameters in self.steps.items():
            texts.update({f"steps.{step}.{name}": _text(value) for name, value in parameters.items()})
        return "?" + urlencode(texts) if texts else ""


def _text(value: Parameter) -> str:
    if isinstance(value, str) and re.match(r'["+.\d-]|(true|false)$', value):
        return json.dumps(value, ensure_ascii=False)  # quotes tell it from a number
    return str(value).lower() if isinstance(value, bool) else str(value)


class Plan(NamedTuple):
    """A request of HTTP: the path is escaped and has the query, the body is buffers."""

    method: str
    path: str
    headers: Mapping[str, str] = {}
    body: Sequence[Any] = ()
    stream: bool = False
    inference: bool = False  # the deadline is the request's, too


def escape(name: Any) -> str:
    """Returns a name as it stands in a path; raises InvalidArgument if there is none."""
    try:
        if isinstance(name, str) and name:
            return quote(name, safe="")
    except UnicodeEncodeError:  # half of a pair of surrogates
        pass
    raise InvalidArgument(f"{name!r} is no name", reason="INVALID_REQUEST")


def infer_plan(pipeline: str, verb: str, inputs: Mapping[str, Any], options: Options) -> Plan:
    """Returns the request for an inference; raises InvalidArgument."""
    path, headers = f"/v1/pipelines/{escape(pipeline)}:{verb}{options.query()}", options.http_headers()
    if verb == "stream":
        headers["Accept"] = "text/event-stream"
    body = encode_request(inputs, options.parameters, options.outputs)
    return Plan("POST", path, headers, body, stream=verb == "stream", inference=True)


def frozen_plan(pipeline: str, inputs: Mapping[str, Any], options: Options) -> Plan:
    """Returns infer_plan's request to be sent later: the caller may use its buffers for other data."""
    plan = infer_plan(pipeline, "infer", inputs, options)
    return plan._replace(body=[bytes(piece) for piece in plan.body])


def request_plan(request_id: str, pipeline: str, key: str, verb: str) -> Plan:
    """Returns what asks for the result of a request, or cancels it: by its ID, or by pipeline and key."""
    if bool(request_id) == bool(pipeline and key):
        raise InvalidArgument("name a request by its ID, or by pipeline and key", reason="INVALID_REQUEST")
    headers = {"Accept": PACKED, **({"Idempotency-Key": key} if key else {})}
    path = f"/v1/requests/{escape(request_id)}" if request_id else f"/v1/pipelines/{escape(pipeline)}:{verb}"
    if verb == "result":
        return Plan("GET", path + ("/result" if request_id else ""), headers)
    return Plan("DELETE" if request_id else "POST", path, headers)


# Pauses before retries, in seconds: the first, doubled after each, and the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0


def pause_before(failures: int, fault: Fault) -> float:
    """Returns how long to wait before the next try, in seconds: with jitter, and at least as long as asked for."""
    pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(failures - 1, 10)) * random.uniform(0.5, 1)
    return max(pause, (fault.retry_after or 0) * random.uniform(1, 1.1))


# --- events --------------------------------------------------------------------------

END = object()  # what a reader makes of the last event


class Events:
    """Reads server-sent events from the bytes of an answer.

    take makes a value of an event, None of one to pass over, and END of the last. ready are the
    values that have come; last_id is the ID of the last event.
    """

    def __init__(self, take: Callable[[str, Any], Any], max_bytes: int) -> None:
        self.ready: Deque[Any] = Deque()
        self.ended, self.last_id = False, ""
        self._take, self._max, self._rest = take, max_bytes, bytearray()
        self._failed: Optional[Fault] = None

    def begin(self) -> None:
        """Forgets an event that was cut off."""
        self._rest.clear()
        self.ended, self._failed = False, None

    def pull(self, source: Any) -> None:
        """Reads the next bytes; raises the Fault that ends the stream once the values before it are taken."""
        try:
            if self._failed is None:
                self.feed(source.read())
        except Fault as fault:
            self._failed = fault
        if self._failed is not None and not self.ready:
            raise self._failed

    def feed(self, piece: bytes) -> None:
        """Takes the next bytes, empty at the end; raises the Fault that ends the stream."""
        if not piece:
            raise Unavailable("the stream was cut off before its end", reason="STREAM_INTERRUPTED")
        searched = max(0, len(self._rest) - 1)
        self._rest += piece
        while not self.ended:
            end = self._rest.find(b"\n\n", searched)
            if end < 0:
                break
            event, searched = bytes(self._rest[:end]), 0
            del self._rest[: end + 2]
            self._read(event)
        if len(self._rest) > self._max:
            raise invalid_answer(f"an event has more than max_bytes, {self._max}")

    def _read(self, event: bytes) -> None:
        try:
            fields = dict(line.partition(": ")[::2] for line in event.decode().split("\n"))
            if "data" not in fields:  # a ping
                return
            kind, document = fields.get("event", ""), json.loads(fields["data"])
            value = self._take(kind, document) if kind != "error" else None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise invalid_answer(f"an event cannot be read: {error!r}") from error
        if kind == "error":
            raise fault_of(200, {}, fields["data"].encode())
        self.last_id = fields.get("id", self.last_id)
        self.ended = value is END
        if value is not None and value is not END:
            self.ready.append(value)


class Answers(Events):
    """The events of a streamed answer: Chunks, and ``answer`` at the end."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(self._chunk, max_bytes)
        self.answer: Optional[Answer] = None

    def _chunk(self, kind: str, document: Any) -> Any:
        if kind == "done":
            self.answer = Answer(document)
            return END
        return Chunk(document) if kind == "chunk" else None


# --- jobs ----------------------------------------------------------------------------

ENDS = ("succeeded", "failed", "expired", "cancelled")


class Job:
    """A job as it was when it was asked for; ``document`` has all that the gateway says of it."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = dict(document)
        self.id: str = document["id"]
        self.state: str = document["state"]
        self.attempts: int = document.get("attempts", 0)
        self.reason: str = document.get("reason", "")
        self.message: str = document.get("message", "")

    @property
    def ended(self) -> bool:
        """Reports whether the job has come to its end."""
        return self.state in ENDS

    def __repr__(self) -> str:
        why = f", {self.reason}: {self.message}" if self.reason else ""
        return f"Job {self.id}: {self.state}, {self.attempts} attempts{why}"


class JobEvent(NamedTuple):
    """An event of a job: ``kind`` is state (with job), chunk (with chunk), restart or gap (with details)."""

    kind: str
    job: Optional[Job] = None
    chunk: Optional[Chunk] = None
    details: Mapping[str, int] = {}


def read_job_event(kind: str, document: Any) -> JobEvent:
    """Returns an event of a job."""
    if kind == "state":
        return JobEvent(kind, job=Job(document))
    return JobEvent(kind, chunk=Chunk(document)) if kind == "chunk" else JobEvent(kind, details=document)


def job_path(job: Union[Job, str], rest: str = "") -> str:
    """Returns the path of a job, or of what is below it."""
    return f"/v1/jobs/{escape(job.id if isinstance(job, Job) else job)}{rest}"
