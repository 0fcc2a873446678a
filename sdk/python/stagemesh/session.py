"""A worker's conversation with its host: hello, setup, batches, leaving.

With one slot the main thread reads a frame, runs the batch and writes the result,
because passing a batch to another thread costs more than the round trip. With more
slots, and for streams, the main thread reads, and other threads run.
"""

from __future__ import annotations

import inspect
import logging
import os
import queue
import re
import select
import threading
import time
from typing import Any, Callable, Dict, Mapping, Optional, Type, Union

from . import __version__
from .arrays import Arrays
from .batches import Batch
from .faults import MAX_MESSAGE, is_from_user_code, text_of, traceback_of
from .frames import MAX_COUNT, MAX_NUMBER, MAX_SLOTS, Connection, Ended, Frame, Header, Violation, message
from .models import Models
from .parts import Layout
from .runs import Runs, error_header
from .streams import Stream, StreamLoop
from .values import arrays_of
from .worker import Context, Worker, check_worker, has_tensors, holds_models, overrides, wire_model, wire_spec

PROTOCOL = 1

# Times, in seconds. Of the worker's threads, to finish after its last batch:
THREADS_S = 2.0
# Of streams, to finish after they are cancelled because the process ends:
_CANCELLED_S = 0.5
# Between two checks for streams that still run while the process leaves:
_CHECK_S = 0.02
# Of the host, to accept the last message after a violation, and a reply to other requests than batches:
_LAST_MESSAGE_S, _REPLY_S = 0.5, 10.0
# Of the worker, to finish after a signal, if the host does not send another time:
_SIGNAL_S = 5.0

# Exit codes. 0 means that the process was asked to stop, and nothing else.
EXIT_FAILED = 1  # setup or teardown failed, or the worker's declaration is invalid
EXIT_USAGE = 2  # started wrongly
EXIT_HOST_GONE = 3  # the connection or the lifeline ended
EXIT_VIOLATION = 4  # the host breaks the protocol, or uses another version
EXIT_UNFINISHED = 5  # asked to stop, and streams were unfinished when the time was over

# The capabilities of a worker that answers in chunks, of one that takes a batch before it has
# ended the one that runs, and of one that loads several models.
_STREAM, _PREFETCH, _MODELS = "stream", "prefetch", "models"
# How long a batch of a worker with models runs until another thread reads, in seconds.
_WATCH_S = 0.005


def report(text: str, code: int) -> int:
    """Writes the reason of the process's end to the log, and returns the code."""
    try:
        os.write(2, f"stagemesh: {text}\n".encode(errors="backslashreplace"))  # sys.stderr may be anything
    except OSError:
        pass
    return code


class StopRequested(BaseException):
    """The process was asked to stop while it starts."""


class Signals:
    """Whether a signal has asked the process to stop, and what a signal interrupts."""

    stop_requested = False
    starting = True  # a signal raises StopRequested
    waiting = False  # the main thread waits for a frame


class Session:
    """One connection of a worker with its host, from hello to the end."""

    def __init__(
        self,
        connection: Connection,
        worker: Type[Worker],
        arrays: Optional[str],
        signals: Signals,
        environ: Mapping[str, str],
    ) -> None:
        self._connection = connection
        self._class = worker
        self._arrays_name = arrays if arrays is not None else worker.arrays
        self._streaming = overrides(worker, "stream")
        self._models: Optional[Models] = None  # of a worker that loads several
        self._has_batch = threading.Event()  # set when a batch begins, for _watch
        self._over = False
        self._signals = signals
        self._environ = environ
        self._slots = 1
        self._ready = False
        self._stopping = False  # takes no more batches
        self._grace_s = _SIGNAL_S  # how long it may take to finish, in seconds
        self._sent_shutdown = False
        self._polling = threading.Lock()  # held by the thread that reads the connection during a batch
        self._ended: Optional[BaseException] = None  # the error that ended the connection during a batch
        self._running: Dict[int, Batch] = {}  # the running batches
        self._next: Optional[Frame] = None  # a predict that came while a batch ran
        self._streams: Dict[int, Stream] = {}  # the running streams, by their batch
        self._pool: Optional[Union[_Threads, StreamLoop]] = None
        self._pool_error: Optional[BaseException] = None  # the error that ended the event loop
        self._worker: Worker
        self._runs: Runs
        self._arrays: Arrays

    def run(self) -> int:
        """Serves until the end; returns the exit code."""
        try:
            code = self._run()
        except StopRequested:
            code = self._leave(self._grace_s)
        except Ended as error:
            code = 0
            if not (self._stopping or self._signals.stop_requested):
                code = report(f"the connection to the host ended: {error}", EXIT_HOST_GONE)
        except Violation as error:
            code = report(f"the host does not keep to the worker protocol: {error}", EXIT_VIOLATION)
            fields = {"kind": "protocol", "error": "Violation", "message": str(error)[:MAX_MESSAGE]}
            try:
                self._connection.send_within(_LAST_MESSAGE_S, message("error", **fields))
            except Ended:
                pass
        self._signals.starting = False
        try:
            # Not while a batch of a host that is gone still runs.
            ended = self._models is None or self._models.close(THREADS_S)
            if code == 0 and self._ready and ended and (self._pool is None or self._pool.close(THREADS_S)):
                self._worker.teardown()
        except Exception as error:
            code = report(f"{self._class.__name__}.teardown:\n{traceback_of(error)}", EXIT_FAILED)
        finally:
            self._over = True
            self._has_batch.set()
            self._connection.hang_up()  # also for threads that wait until they can send
            self._connection.close()
        return code

    def _run(self) -> int:
        welcome = self._hello()
        if welcome is None:
            return EXIT_VIOLATION
        try:
            layout = Layout()
            ready = self._set_up(welcome, layout)
        except (StopRequested, Ended, Violation):
            raise
        except BaseException as error:
            return self._report_failed_start(error)
        self._ready = True
        self._signals.starting = False
        self._connection.send(ready, layout.pieces, layout.size)
        if inspect.isasyncgenfunction(self._class.stream):
            self._pool = StreamLoop(self._connection, self._release, self._on_pool_error)
        elif self._streaming or self._slots > 1:
            self._pool = _Threads(self._run_job, self._slots)
        if self._pool is None:
            if self._models is not None:
                threading.Thread(target=self._watch, name="stagemesh-watch", daemon=True).start()
            self._read_frames(self._run_batch)
            return self._leave(self._grace_s)
        return self._run_pool(self._pool)

    def _read_frames(self, run: Callable[[Header, memoryview], None]) -> None:
        """Reads frames until the worker is asked to stop, and passes each predict to run."""
        signals, connection = self._signals, self._connection
        while self._next is not None or not self._stopping:
            frame, self._next = self._next, None
            if frame is None:
                signals.waiting = True
                try:
                    frame = connection.poll() if signals.stop_requested else connection.read()
                except BlockingIOError:
                    pass
                signals.waiting = False
                if frame is None and connection.has_part:  # of a batch that the host still writes
                    connection.sock.setblocking(True)
                    frame = connection.read()
            if frame is None:  # a signal asks to stop
                return
            header, body = frame
            if header["type"] == "predict":
                run(header, body)
            else:
                self._handle(header)
            del header, body, frame  # so that nothing keeps their bytes while the next frame is read

    # --- starting ------------------------------------------------------------

    def _hello(self) -> Optional[Header]:
        """Sends hello; returns the host's welcome, or None if the host refuses the worker."""
        hello: Dict[str, Any] = {
            "protocols": [PROTOCOL],
            "name": self._class.__name__,
            "sdk": f"stagemesh-python {__version__} ({self._arrays_name})",
            "pid": os.getpid(),
        }
        hello["capabilities"] = [_STREAM if self._streaming else _PREFETCH]
        if holds_models(self._class):
            hello["capabilities"].append(_MODELS)
        self._connection.send(message("hello", **hello))
        header, _ = self._connection.read()
        if header["type"] == "error":
            text = header.get("message", "")
            report(f"the host refuses this worker: {text} (it supports protocol {PROTOCOL})", EXIT_VIOLATION)
            return None
        if header["type"] == "shutdown":
            raise StopRequested
        if header["type"] != "welcome":
            raise Violation(f"a {header['type']!r:.40} where welcome is expected")
        check_welcome(header)
        self._connection.max_body = header["max_frame"]
        return header

    def _set_up(self, welcome: Header, layout: Layout) -> bytes:
        """Sets the worker up; returns the header of ready, and adds the bytes of the examples to the layout."""
        if self._streaming and _STREAM not in welcome.get("capabilities", ()):
            name = self._class.__name__
            raise ValueError(f"{name}.stream: this host does not accept chunks; write predict_item(self, item)")
        if holds_models(self._class) and _MODELS not in welcome.get("capabilities", ()):
            name = self._class.__name__
            do = "give it a section models, or stagemesh up FILE and check --model ID=SOURCE"
            raise ValueError(f"{name}.models: the stage has one model; {do}")
        self._slots = max(1, min(self._class.concurrency, welcome.get("slots", 1)))
        context = Context(
            welcome["options"],
            devices=welcome.get("devices", ()),
            max_size=welcome.get("max_size", 1),
            slots=self._slots,
            environ=self._environ,
            progress=self._progress,
            memory=welcome.get("memory"),
        )
        context.log = logging.getLogger(f"stagemesh.worker.{self._class.__name__}")
        self._worker = worker = self._class()
        worker.setup(context)
        check_worker(worker)
        self._arrays = arrays_of(self._arrays_name if has_tensors(worker) else "buffer")
        spec = wire_spec(worker, self._arrays, layout)
        most = self._connection.max_body
        if layout.size > most:
            raise ValueError(f"the examples take {layout.size} bytes, the host takes {most} in a frame")
        ready: Dict[str, Any] = {"slots": self._slots, "spec": spec}
        if worker.engine_name:
            ready["engine"] = worker.engine_name
        if holds_models(self._class):
            self._models = Models(worker, self._connection.send, error_header, wire_model)
            ready["models"] = worker.models.wire()
        self._runs = Runs(worker, self._arrays, most, self._poll, context.rank == 0, self._models)
        return message("ready", **ready)

    def _progress(self, text: str) -> None:
        if self._ready:
            logging.getLogger("stagemesh.worker").info("%s", text)
        else:
            self._connection.send(message("state", state="STARTUP", message=str(text)[:MAX_MESSAGE]))

    def _report_failed_start(self, error: BaseException) -> int:
        """Reports to the host, which logs it, why the worker cannot start; returns the exit code."""
        self._signals.starting = False
        text = f"{type(error).__name__}: {text_of(error)}"
        # Invalid declarations have no traceback: no line of the worker's own code raised the error.
        declared = isinstance(error, (ValueError, ImportError)) and not is_from_user_code(error)
        trace = "" if declared or getattr(error, "explained", False) else traceback_of(error)
        try:
            self._connection.send(message("state", state="ERROR", message=text[:MAX_MESSAGE]))
            self._connection.send(error_header(error, trace=trace))
        except Ended:
            report(f"{self._class.__name__} cannot start: {trace or text}", EXIT_FAILED)
        return EXIT_FAILED

    # --- one slot --------------------------------------------------------------

    def _run_batch(self, header: Header, body: memoryview) -> None:
        """Runs a batch in this thread, and sends the reply."""
        batch = self._runs.batch(header, body, time.monotonic())
        self._running[batch.id] = batch
        if self._models is not None:
            self._has_batch.set()
        reply = self._runs.run(batch)
        del self._running[batch.id]
        if self._polling.locked():  # by a thread of the worker; wait until it has read
            with self._polling:
                pass
        if self._ended is not None:
            raise self._ended
        if self._signals.stop_requested or self._stopping:
            self._send_shutdown(self._grace_s)  # before the result, so that the host sends no more
        self._connection.send(*reply)

    def _watch(self) -> None:
        """Reads for the main thread while that runs a long batch, so that models load meanwhile."""
        seen = None  # the number of a batch: the batch itself would keep its bytes
        while self._has_batch.wait() and not self._over:
            self._has_batch.clear()
            while self._running and not self._over:
                number = next(iter(list(self._running)), None)
                batch = self._running.get(number) if number is not None and number == seen else None
                if batch is not None:
                    self._poll(batch)
                del batch
                seen = number
                time.sleep(_WATCH_S)

    def _poll(self, batch: Batch) -> None:
        """Handles the frames that arrived while a batch runs; any thread of the worker may call it."""
        if self._pool is not None or not self._polling.acquire(False):
            return  # the main thread reads while batches run, or another one does
        try:
            if batch.id not in self._running:
                return  # the batch has ended, and the main thread reads
            try:
                while self._ended is None:
                    frame = self._connection.poll()
                    if frame is None:
                        return
                    if frame[0]["type"] != "predict":
                        self._handle(frame[0])
                    elif self._next is None:
                        self._next = frame
                    else:
                        raise Violation("a predict beyond the slots of the worker")
            except (Ended, Violation) as error:
                if isinstance(error, Ended) and self._stopping:
                    return
                self._ended = error
            batch._cancel(None)  # nobody gets the result
        finally:
            self._polling.release()

    # --- several slots, and streams ----------------------------------------------

    def _run_pool(self, pool: Union[_Threads, StreamLoop]) -> int:
        """Reads frames until the end, and lets the pool run batches or streams; returns the exit code."""
        pool.start()
        try:
            self._read_frames(self._begin)
            if self._streaming:
                return self._finish_streams(pool)
            code = self._leave(self._grace_s)
            pool.close(None)
            return code
        except (Ended, Violation):
            self._abandon(pool)
            if self._pool_error is not None:
                text = f"{type(self._pool_error).__name__}: {text_of(self._pool_error)}"
                return report(f"the event loop ended: {text}", EXIT_FAILED)
            raise

    def _begin(self, header: Header, body: memoryview) -> None:
        """Passes a batch, or its stream, to the pool."""
        if len(self._running) >= self._slots:
            raise Violation("a predict beyond the slots of the worker")
        batch = self._runs.batch(header, body, time.monotonic())
        batch._complete()  # here, since violations end the session
        job: Any = batch
        if self._streaming:
            if len(batch) != 1:
                raise Violation(f"a predict of {len(batch)} items for a worker that streams")
            if batch.id in self._running:
                raise Violation(f"batch {batch.id} is there twice")
            job = Stream(self._worker, self._runs, self._arrays, batch, self._connection.max_body)
            self._streams[batch.id] = job
        self._running[batch.id] = batch
        assert self._pool is not None
        self._pool.begin(job)

    def _run_job(self, job: Union[Batch, Stream]) -> None:
        """Runs a batch, or the stream of a plain generator, in a thread of the pool, and sends the reply."""
        batch = job.batch if isinstance(job, Stream) else job
        try:
            try:
                reply = job.run(self._connection.send) if isinstance(job, Stream) else self._runs.run(batch)
            finally:
                self._release(batch)
        except Ended:
            return  # the main thread gets this error too
        except BaseException as error:  # the slot must not be lost
            if isinstance(job, Stream) or self._runs.in_forked_child():
                raise
            reply = error_header(error, batch.id), (), 0
        if isinstance(job, Stream) and job.abandoned:
            return
        try:
            self._connection.send(*reply)
        except Ended:
            pass

    def _release(self, batch: Batch) -> None:
        """Frees the slot of a batch: before its reply, after which the host may send the next one."""
        self._running.pop(batch.id, None)
        self._streams.pop(batch.id, None)

    def _on_pool_error(self, error: BaseException) -> None:
        """Ends the session, since the event loop has ended."""
        if self._runs.in_forked_child():
            raise error
        self._pool_error = error
        self._connection.hang_up()  # which ends the main thread's read

    def _abandon(self, pool: Union[_Threads, StreamLoop]) -> None:
        """Cancels all batches and streams without a reply to the host; waits for streams for a moment."""
        streams = list(self._streams.values())
        for stream in streams:
            stream.abandoned = True  # before the cancellation, after which a stream may end and reply at once
        for batch in list(self._running.values()):
            batch._cancel(None)
        for stream in streams:
            pool.cancel(stream)
        if self._streaming:
            pool.close(_CANCELLED_S)

    def _finish_streams(self, pool: Union[_Threads, StreamLoop]) -> int:
        """Announces the shutdown, and finishes the running streams in the time there is; returns the exit code."""
        began = time.monotonic()
        code = self._leave(_time_for_streams(self._grace_s))
        poll = select.poll()
        poll.register(self._connection.sock, select.POLLIN)
        try:
            # The time may change meanwhile: a host sends it after the signal.
            while self._streams and time.monotonic() - began < _time_for_streams(self._grace_s):
                frame = self._connection.poll()
                if frame is None:
                    poll.poll(_CHECK_S * 1000)
                elif frame[0]["type"] != "predict":  # a batch that was on its way is not run
                    self._handle(frame[0])
        except (Ended, Violation):
            pass  # nobody gets the results
        if not self._streams:
            return code
        ids = ", ".join(str(number) for number in list(self._streams))
        self._connection.hang_up()  # which ends all waiting sends
        self._abandon(pool)
        return report(f"asked to stop, it left batch {ids} unfinished", EXIT_UNFINISHED)

    # --- other messages ------------------------------------------------------------

    def _handle(self, header: Header) -> None:
        """Handles a message other than predict."""
        kind = header["type"]
        if kind == "cancel":
            self._cancel(header)
        elif kind == "ping":
            self._connection.send_within(_REPLY_S, b'{"type":"pong","n":%d}' % number_of(header, "n"))
        elif kind == "shutdown":
            self._grace_s = number_of(header, "timeout") / 1000
            self._stopping = True
        elif kind in ("load", "unload", "size"):
            check_request(header)
            if self._models is not None:
                if not self._stopping:
                    self._models.begin(header)
                return
            text = f"{kind}: this worker serves one model"
            self._connection.send_within(
                _REPLY_S, message("error", kind="unsupported", error="Unsupported", message=text)
            )
        elif kind == "error":
            raise Ended(f"the host reports {header.get('error', '')}: {header.get('message', '')}")
        else:
            raise Violation(f"a {kind!r:.40} that does not fit the moment")

    def _cancel(self, header: Header) -> None:
        """Cancels items of a batch, or all of them; a batch that has ended is ignored."""
        number = number_of(header, "batch")
        items = header.get("items")
        if "items" in header and not (
            type(items) is list and items and all(type(i) is int and 0 <= i <= MAX_COUNT for i in items)
        ):
            raise Violation("cancel: items is a list of indices, at least one")
        batch = self._running.get(number)
        if batch is not None:
            batch._cancel(items)
        stream = self._streams.get(number)
        if stream is not None and stream.cancelled and self._pool is not None:
            self._pool.cancel(stream)

    # --- leaving -----------------------------------------------------------------

    def _send_shutdown(self, within_s: float) -> None:
        if not self._sent_shutdown:
            self._sent_shutdown = True
            self._connection.send_within(within_s, b'{"type":"state","state":"SHUTDOWN"}')

    def _leave(self, within_s: float) -> int:
        """Announces the shutdown, if the host accepts the message within that time; returns the exit code."""
        self._stopping = True
        self._signals.starting = False
        try:
            self._send_shutdown(within_s)
        except Ended:
            pass
        return 0


class _Threads:
    """A pool of threads that run jobs: batches, or the streams of plain generators."""

    def __init__(self, run: Callable[[Union[Batch, Stream]], None], count: int) -> None:
        self._run = run
        self._jobs: queue.SimpleQueue[Optional[Union[Batch, Stream]]] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"stagemesh-slot-{i}", daemon=True) for i in range(count)
        ]

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def begin(self, job: Union[Batch, Stream]) -> None:
        """Passes a job to the next idle thread."""
        self._jobs.put(job)

    def cancel(self, stream: Stream) -> None:
        """Does nothing: a plain generator is closed at its next yield."""

    def close(self, timeout_s: Optional[float]) -> bool:
        """Waits for the running jobs, and reports whether they have ended."""
        for _ in self._threads:
            self._jobs.put(None)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if end is None else max(0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            self._run(job)
            del job  # so that an idle thread keeps no batch


def _time_for_streams(grace_s: float) -> float:
    """Returns how much of the time to finish is for streams; the rest is for their cancellation."""
    return grace_s - min(_CANCELLED_S, grace_s / 4)


# --- checks of messages --------------------------------------------------------------


def number_of(header: Header, key: str) -> int:
    """Returns a whole number of a message; raises Violation if it is missing or out of range."""
    value: Any = header.get(key)
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise Violation(f"{header['type']}: {key} is a whole number")
    return value


_control = re.compile("[\x00-\x1f\x7f-\x9f]").search


def check_request(header: Header) -> None:
    """Raises Violation if a load, unload or size breaks the protocol."""
    kind = header["type"]
    number_of(header, "load")
    name = header.get("model")
    if type(name) is not str or not 1 <= len(name.encode()) <= 255 or _control(name):
        raise Violation(f"{kind}: model has 1 to 255 bytes, and no control characters")
    if any(type(header.get(key, "")) is not str for key in ("model_type", "source")):
        raise Violation(f"{kind}: model_type and source are strings")
    options = header.get("options", {})
    if type(options) is not dict or any(type(value) is not str for value in options.values()):
        raise Violation(f"{kind}: options are strings by name")
    if "timeout" in header and number_of(header, "timeout") < 1:
        raise Violation(f"{kind}: timeout is at least 1")


def check_welcome(header: Header) -> None:
    """Raises Violation if a welcome breaks the protocol."""
    if number_of(header, "protocol") != PROTOCOL:
        raise Violation(f"welcome: protocol {header['protocol']}, this worker supports {PROTOCOL}")
    number_of(header, "max_frame")
    if type(header.get("options")) is not dict:
        raise Violation("welcome: options is an object")
    for key, most in (("slots", MAX_SLOTS), ("max_size", MAX_COUNT)):
        if key in header and not 1 <= number_of(header, key) <= most:
            raise Violation(f"welcome: {key} is a whole number from 1 to {most}")
    memory = header.get("memory", {})
    if type(memory) is not dict or any(
        type(n) is not int or not 0 <= n <= MAX_NUMBER for n in (memory.get(key, 0) for key in ("host", "device"))
    ):
        raise Violation("welcome: memory is whole bytes of host and device")
    for key in ("devices", "capabilities"):
        strings = header.get(key, [])
        if type(strings) is not list or any(type(one) is not str for one in strings):
            raise Violation(f"welcome: {key} is a list of strings")
