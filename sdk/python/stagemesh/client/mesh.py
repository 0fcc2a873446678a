"""Mesh: the calls of a mesh."""

from __future__ import annotations

import contextlib
import copy
import json
import ssl
import time
import uuid
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Callable, Deque, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Tuple, Union

from .calls import (
    ENDS,
    Answers,
    Events,
    Job,
    JobEvent,
    Options,
    Plan,
    escape,
    frozen_plan,
    infer_plan,
    job_path,
    pause_before,
    read_job_event,
    request_plan,
)
from .faults import (
    Cancelled,
    DeadlineExceeded,
    Disconnected,
    Fault,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unimplemented,
    fault_of,
    invalid_answer,
)
from .transport import Clock, Endpoint, Interrupt, Reply, Transport, all_in_use
from .values import PACKED, Answer, Chunk, blob_of, decode_answer, encode_request, merge, reading

# A wait at the gateway is asked for in pieces of so many seconds, and its answer comes within the slack.
_WAIT, _SLACK = 20.0, 30.0
_PAUSE = 0.5  # before a result that a gateway does not know is asked for again, in seconds


def new_key() -> str:
    """Returns a new idempotency key."""
    return str(uuid.uuid4())


class Outcome(NamedTuple):
    """What became of one item of infer_many, the numberth from 0: its answer, or its fault."""

    number: int
    answer: Optional[Answer]
    fault: Optional[Fault]

    def get(self) -> Answer:
        """Returns the answer, or raises the fault."""
        if self.answer is None:
            raise self.fault or AssertionError("an outcome without answer and fault")
        return self.answer


class Stream(Iterator[Chunk]):
    """The chunks of an answer as they arrive; ``answer`` is the whole one, after the last.

    Closing it early ends the request, unless that is durable or has a key.
    """

    def __init__(self, source: Any, events: Answers) -> None:
        self._source, self._events = source, events

    @property
    def answer(self) -> Optional[Answer]:
        """The whole answer; None before the end."""
        return self._events.answer

    def __next__(self) -> Chunk:
        try:
            while not self._events.ready:
                if self._events.ended:
                    raise StopIteration
                self._events.pull(self._source)
        except BaseException:
            self.close()
            raise
        chunk: Chunk = self._events.ready.popleft()
        return chunk

    def close(self) -> None:
        """Ends the stream."""
        self._events.ended = True
        self._source.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pending:
    """A request that runs in the background; ``key`` names it from the start, if it is durable or has one."""

    def __init__(self, pipeline: str, key: str, future: Future[Answer], cancel: Callable[[], None]) -> None:
        self.pipeline, self.key = pipeline, key
        self._future, self._cancel = future, cancel

    def done(self) -> bool:
        """Reports whether the request has an answer or a fault."""
        return self._future.done()

    def result(self) -> Answer:
        """Waits for the answer; raises the fault."""
        return self._future.result()

    def cancel(self) -> None:
        """Cancels the request; result then raises Cancelled, if it is not done."""
        self._cancel()

    def __repr__(self) -> str:
        return f"Pending({self.pipeline!r}, key={self.key!r}, {'done' if self.done() else 'running'})"


class Mesh:
    """A mesh behind the URL of a gateway; safe for threads.

        mesh = Mesh("http://127.0.0.1:8080")
        answer = mesh.infer("digits", image=open("7.png", "rb"))

    token        of the gateway's token file
    ca           a file with the certificates to trust, or an SSLContext; the system's without
    timeout      seconds for a call with its retries; None leaves it to the pipeline
    connections  how many requests may be on their way at a time; others wait
    max_bytes    the largest answer that is read

    Inputs are given by name, or as one mapping: bytes, text, an open file or a path, a document of
    JSON, an array of numpy, a Tensor, or a Blob with a content type. All failures are Faults.
    """

    def __init__(
        self,
        url: str,
        token: str = "",
        ca: Union[str, ssl.SSLContext, None] = None,
        timeout: Optional[float] = 60.0,
        connections: int = 64,
        max_bytes: int = 256 << 20,
    ) -> None:
        self._endpoint = Endpoint(url, token, ca, connections, max_bytes)
        self._transport = Transport(self._endpoint)
        self._interrupt: Optional[Interrupt] = None  # of all calls
        self.options = Options().changed(timeout=timeout)

    def with_options(self, **options: Any) -> Mesh:
        """Returns the same mesh with other options of calls, over the same connections.

        timeout            seconds for the whole call with its retries; the mesh gets it as the deadline
        parameters         for all steps: booleans, numbers and strings by name
        steps              for single steps: parameters by the step's name
        outputs            names of the only outputs to return
        priority           above 0 is served first, below 0 yields
        durability         "memory" or "file"
        wait_for_capacity  whether to wait at the gateway for an overloaded stage
        idempotency_key    by which the request runs once, however often it is sent
        retries            how many tries may follow the first; 0 for none
        headers            further headers, such as traceparent
        """
        out = copy.copy(self)
        out.options = self.options.changed(**options)
        return out

    def bind(self, interrupt: Interrupt, spent: float = 0) -> Mesh:
        """Returns the same mesh whose calls end with the interrupt.

        So many seconds of their timeout are spent: waiting for a thread; raises DeadlineExceeded.
        """
        out, timeout = copy.copy(self), self.options.timeout
        out._interrupt = interrupt
        if timeout is not None and spent >= timeout:
            raise all_in_use(self._endpoint.connections)
        out.options = out.options._replace(timeout=timeout and timeout - spent)
        return out

    @property
    def jobs(self) -> Jobs:
        """The jobs of the mesh."""
        return Jobs(self)

    def close(self) -> None:
        """Waits for the requests in the background, and closes the connections."""
        self._transport.threads.shutdown()
        self._transport.close()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Mesh({self._endpoint.url!r})"

    def exchange(
        self, plan: Plan, key: str = "", is_answer: Callable[[Reply], bool] = lambda reply: reply.status < 300
    ) -> Reply:
        """Makes a request, again after faults that a retry may mend, until the deadline.

        key is the idempotency key of the first try. Without one, tries of an inference after a
        connection that broke have a new key, as the mesh may have the request by then.
        """
        options, interrupt = self.options, self._interrupt or Interrupt()
        clock, failures, made = Clock(options.timeout), 0, ""
        while True:
            headers = {**plan.headers, **options.headers}
            if key or made:
                headers["Idempotency-Key"] = key or made
            try:
                reply = self._transport.send(plan._replace(headers=headers), clock, interrupt)
                if is_answer(reply):
                    return reply
                raise fault_of(reply.status, reply.headers, reply.body)
            except Fault as fault:
                fault.key, failures = key or made, failures + 1
                pause = pause_before(failures, fault)
                needs_no_key = bool(made) and isinstance(fault, Unimplemented)  # a mesh without a broker has no keys
                if (
                    failures > options.retries
                    or not (fault.retryable or needs_no_key)
                    or pause >= clock.until_deadline()
                ):
                    raise
                may_have_it = isinstance(fault, Disconnected) and fault.sent and plan.inference
                may_have_it = may_have_it and not key and not plan.stream  # a stream with a key outlives its reader
                made = (made or new_key()) if may_have_it else "" if needs_no_key else made
            if interrupt.event.wait(pause):
                raise Cancelled("the caller has cancelled the call", reason="CANCELLED")

    def _key(self) -> str:
        """Returns the idempotency key of a first try: the caller's own, or a new one of a durable request."""
        return self.options.idempotency_key or (new_key() if self.options.durability == "file" else "")

    def infer(self, pipeline: str, inputs: Optional[Mapping[str, Any]] = None, /, **named: Any) -> Answer:
        """Runs a request and returns its answer; a pipeline may also be ``stage:NAME`` or ``model:NAME``."""
        return self._infer(infer_plan(pipeline, "infer", merge(inputs, named), self.options), self._key())

    def _infer(self, plan: Plan, key: str) -> Answer:
        reply = self.exchange(plan, key)
        return decode_answer(reply.headers, reply.body)

    def stream(self, pipeline: str, inputs: Optional[Mapping[str, Any]] = None, /, **named: Any) -> Stream:
        """Runs a request whose answer comes in chunks."""
        plan = infer_plan(pipeline, "stream", merge(inputs, named), self.options)
        return Stream(self.exchange(plan, self._key()).source, Answers(self._endpoint.max_bytes))

    def start(self, pipeline: str, inputs: Optional[Mapping[str, Any]] = None, /, **named: Any) -> Pending:
        """Runs a request in the background, on the inputs as they are now."""
        plan = frozen_plan(pipeline, merge(inputs, named), self.options)
        key, interrupt, begun = self._key(), Interrupt(), time.monotonic()
        future = self._transport.threads.submit(
            lambda: self.bind(interrupt, spent=time.monotonic() - begun)._infer(plan, key)
        )

        def cancel() -> None:
            if future.done():
                return
            interrupt.set()
            if key:
                with contextlib.suppress(NotFound):  # it was not sent yet
                    self.cancel(pipeline=pipeline, key=key)

        return Pending(pipeline, key, future, cancel)

    def infer_many(
        self, pipeline: str, items: Iterable[Mapping[str, Any]], in_flight: int = 64, ordered: bool = True
    ) -> Iterator[Outcome]:
        """Runs a request for each item, and yields their outcomes: in their order, or as they are ready.

        At most in_flight items are read ahead of the outcomes that were taken. While the next item is read,
        outcomes wait. An item may use the buffers of the one before.
        """
        interrupt = self._interrupt or Interrupt()
        mesh, running = self.bind(interrupt).with_options(idempotency_key=""), deque()  # type: ignore[var-annotated]

        def plan_of(inputs: Mapping[str, Any]) -> Union[Plan, Fault]:
            try:
                return frozen_plan(pipeline, merge(inputs, {}), mesh.options)
            except Fault as fault:
                return fault

        def one(index: int, plan: Union[Plan, Fault]) -> Outcome:
            if isinstance(plan, Fault):
                return Outcome(index, None, plan)
            try:
                return Outcome(index, mesh._infer(plan, mesh._key()), None)
            except Fault as fault:
                return Outcome(index, None, fault)

        threads = ThreadPoolExecutor(min(in_flight, self._endpoint.connections), "stagemesh-many")
        try:
            for index, inputs in enumerate(items):
                running.append(threads.submit(one, index, plan_of(inputs)))
                while running and (len(running) >= in_flight or _has_next(running, ordered)):
                    yield _next(running, ordered)
            while running:
                yield _next(running, ordered)
        finally:
            for future in running:
                future.cancel()
            if running:
                interrupt.set()
            threads.shutdown()

    def result(self, request_id: str = "", *, pipeline: str = "", key: str = "", wait: float = 0) -> Answer:
        """Returns the stored answer of a durable request, or of one with a key; waits so many seconds for it."""
        plan, end = request_plan(request_id, pipeline, key, "result"), time.monotonic() + wait
        interrupt = self._interrupt or Interrupt()
        while True:
            asked = time.monotonic()
            piece = min(max(0.0, end - asked), _WAIT)
            try:
                asking = plan._replace(path=f"{plan.path}?wait={int(piece * 1000)}")
                return self.with_options(timeout=piece + _SLACK)._infer(asking, "")
            except NotFound as fault:
                left, waited = end - time.monotonic(), time.monotonic() - asked
                if left <= 0 or fault.reason != "NOT_FOUND":
                    raise
                # A gateway that does not know the key yet does not wait.
                if waited < piece / 2 and interrupt.event.wait(min(left, _PAUSE)):
                    raise Cancelled("the caller has cancelled the call", reason="CANCELLED") from None

    def cancel(self, request_id: str = "", *, pipeline: str = "", key: str = "") -> None:
        """Cancels a request."""
        self.exchange(request_plan(request_id, pipeline, key, "cancel"))


def _has_next(running: Deque[Future[Outcome]], ordered: bool) -> bool:
    return running[0].done() if ordered else any(future.done() for future in running)


def _next(running: Deque[Future[Outcome]], ordered: bool) -> Outcome:
    if not ordered:
        done = wait(running, return_when=FIRST_COMPLETED).done
        running.rotate(-next(i for i, future in enumerate(running) if future in done))
    return running.popleft().result()


class Jobs:
    """The jobs of a mesh: ``mesh.jobs``. A job is given as a Job or by its ID."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def submit(
        self,
        queue: str,
        inputs: Optional[Mapping[str, Any]] = None,
        /,
        *,
        pipeline: str = "",
        path: str = "",
        ttl: str = "",
        deadline: str = "",
        webhook: str = "",
        attributes: Optional[Mapping[str, str]] = None,
        **named: Any,
    ) -> Job:
        """Submits a job, once even if it is sent again: to a pipeline, or to the path of an HTTP target."""
        inputs, options = merge(inputs, named), self._mesh.options
        texts = {"pipeline": pipeline, "path": path, "ttl": ttl, "deadline": deadline, "webhook": webhook}
        texts.update({f"attributes.{name}": value for name, value in (attributes or {}).items()})
        headers = options.http_headers()
        if path:
            blob = None
            for name, value in inputs.items():
                with reading(name):
                    blob = blob_of(value)
            if blob is None or len(inputs) != 1:
                raise InvalidArgument("a call of an HTTP target has one input, no tensor", reason="INVALID_REQUEST")
            headers["Content-Type"] = blob.content_type or "application/octet-stream"
            body: List[Any] = [blob.data]
        else:
            body = encode_request(inputs, options.parameters, options.outputs)
        query = options.query(**{name: text for name, text in texts.items() if text})
        plan = Plan("POST", f"/v1/queues/{escape(queue)}/jobs{query}", headers, body)
        return self._job(plan, options.idempotency_key or new_key())

    def _document(self, plan: Plan, key: str = "") -> Any:
        reply = self._mesh.exchange(plan, key)
        try:
            return json.loads(reply.body)
        except (ValueError, RecursionError) as error:
            raise invalid_answer(f"the answer is not JSON: {error}") from error

    def _job(self, plan: Plan, key: str = "") -> Job:
        return _read_job(self._document(plan, key))

    def get(self, job: Union[Job, str]) -> Job:
        """Returns a job as it is now."""
        return self._job(Plan("GET", job_path(job)))

    def cancel(self, job: Union[Job, str]) -> Job:
        """Cancels a job."""
        return self._job(Plan("DELETE", job_path(job)))

    def explain(self, job: Union[Job, str]) -> Mapping[str, Any]:
        """Returns what holds a job, its position, and when it may start."""
        document: Mapping[str, Any] = self._document(Plan("GET", job_path(job, "/explain")))
        return document

    def wait(self, job: Union[Job, str], timeout: Optional[float] = None) -> Job:
        """Returns a job once it has ended, however it did; raises DeadlineExceeded."""
        self._await(job, timeout)
        return self.get(job)

    def result(self, job: Union[Job, str], timeout: Optional[float] = None) -> Answer:
        """Returns the answer of a job, for whose end it waits; raises the fault that it ended with.

        The answer of an HTTP target is one output without a name.
        """
        reply = self._await(job, timeout)
        if reply.status >= 300:
            fault = fault_of(reply.status, reply.headers, reply.body)
            if isinstance(fault, Disconnected) or fault.reason == "INVALID_ANSWER":  # the target's own words
                fault = Unavailable(fault.message, reason="TARGET_FAILED", status=reply.status)
            raise fault
        return decode_answer(reply.headers, reply.body)

    def _await(self, job: Union[Job, str], timeout: Optional[float]) -> Reply:
        """Returns the answer to the question for a job's result, once it has ended."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _WAIT if end is None else max(0.0, min(_WAIT, end - time.monotonic()))
            plan = Plan("GET", job_path(job, f"/result?wait={int(left * 1000)}"), {"Accept": PACKED})
            mesh = self._mesh.with_options(timeout=left + _SLACK)
            reply = mesh.exchange(plan, is_answer=lambda reply: "stagemesh-job-state" in reply.headers)
            state = reply.headers["stagemesh-job-state"]
            if state in ENDS:
                return reply
            if end is not None and time.monotonic() >= end:
                raise DeadlineExceeded(f"the job is {state} after {timeout:g} s", reason="DEADLINE_EXCEEDED")

    def list(
        self, queue: str, *, ended: bool = False, after: int = 0, limit: int = 50, wait: float = 0
    ) -> Tuple[List[Job], int]:
        """Returns jobs that have not ended, or that have, and the number after which the next page begins.

        wait is how many seconds to wait for the first new end.
        """
        path = f"/v1/queues/{escape(queue)}/{'results' if ended else 'jobs'}?after={after}&limit={limit}"
        mesh = self._mesh
        if wait:
            path, mesh = f"{path}&wait={int(wait * 1000)}", mesh.with_options(timeout=wait + _SLACK)
        document = Jobs(mesh)._document(Plan("GET", path))
        return [_read_job(one) for one in document.get("jobs", ())], document.get("next", 0)

    def watch(self, job: Union[Job, str]) -> Iterator[JobEvent]:
        """Yields the events of a job until its end; a connection that breaks is made again."""
        events, failures = Events(read_job_event, self._mesh._endpoint.max_bytes), 0
        mesh, interrupt = self._mesh.with_options(timeout=None, retries=0), self._mesh._interrupt or Interrupt()
        while True:
            source = None
            try:
                headers = {"Last-Event-ID": events.last_id} if events.last_id else {}
                source = mesh.exchange(Plan("GET", job_path(job, "/events"), headers, stream=True)).source
                while source is not None:
                    events.pull(source)
                    while events.ready:
                        failures, event = 0, events.ready.popleft()
                        yield event
                        if event.job is not None and event.job.ended:
                            return
                return
            except Fault as fault:
                failures += 1
                may_mend = fault.retryable or fault.reason == "STREAM_INTERRUPTED"
                if failures > self._mesh.options.retries or not may_mend:
                    raise
                if interrupt.event.wait(pause_before(failures, fault)):
                    raise
                events.begin()
            finally:
                if source is not None:
                    source.close()


def _read_job(document: Any) -> Job:
    try:
        return Job(document)
    except (KeyError, TypeError, ValueError) as error:
        raise invalid_answer(f"the answer is no job: {error!r}") from error
