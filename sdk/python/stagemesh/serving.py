"""Serves a worker: connects, says hello, sets up, runs batches, leaves.

One thread serves one slot: it reads a frame, runs the batch and writes the result,
because handing a batch to another thread costs more than the round trip. With more
slots the same thread reads, and a pool of threads runs. Streams are run by what
``streams`` has, and the same thread reads.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import socket
import sys
import threading
import time
from typing import Any, Dict, Mapping, NoReturn, Optional, Tuple, Type, Union

from . import _version
from .arrays import arrays_of
from .batches import Batch
from .faults import is_of_author, text_of, traceback_of
from .frames import MAX_COUNT, MAX_NUMBER, MAX_SLOTS, Connection, Ended, Frame, Header, Violation, encode
from .life import EXIT_FAILED, EXIT_HOST_GONE, EXIT_USAGE, EXIT_VIOLATION, Asked, Life, say
from .parts import Layout, message
from .runs import Runs, error_header
from .streams import Streams, finish
from .worker import Context, Worker, check_class, check_worker, overrides, wire_spec

__all__ = ["serve"]

PROTOCOL = 1

# How long threads of a worker may go on after its last batch, in seconds.
_GRACE = 2.0
# How long a host may take to make room for the last message after a violation, in seconds.
_LAST_WORD = 0.5
# How long a host may take to make room for an answer to what it asked, in seconds.
_ROOM = 10.0
# How long a host waits after a signal, where it says nothing else, in seconds.
_SIGNAL_GRACE = 5.0
# The capability of a worker that answers in chunks.
_STREAM = "stream"

# What a file that is only being loaded said: see loading.py. None: serve serves.
_declared: Optional[Dict[Type[Worker], Optional[str]]] = None


def serve(worker: Type[Worker], *, arrays: Optional[str] = None) -> None:
    """Serves a worker to the host that started this process, and exits.

    arrays says how tensors look to it: ``"numpy"``, or ``"buffer"`` for memoryviews;
    by default what the class says. In a child that multiprocessing starts, which runs
    the file again, it does nothing.

    Exit codes: 0 for a stop that was asked for; 1 where setup or teardown failed, or
    the class cannot be served; 2 where the process was not started by a host; 3 where the host
    has gone; 4 where it does not keep to the protocol; 5 where it was asked to stop and had
    to leave streams unfinished.
    """
    if _declared is not None:
        _declared[worker] = arrays
        return
    if sys._getframe(1).f_globals.get("__name__") == "__mp_main__":
        return
    serve_and_exit(worker, arrays)


def serve_and_exit(worker: Type[Worker], arrays: Optional[str]) -> NoReturn:
    """Serves a worker and ends the process."""
    _line_buffered()
    try:
        faulthandler.enable()  # so that a crash of native code says where
    except (AttributeError, ValueError, OSError):  # standard error is no file
        pass
    life = Life()
    code = EXIT_FAILED
    try:
        code = _serve(worker, arrays, life)
    finally:
        life.end(code, _GRACE)
    sys.exit(code)


def _serve(worker: Type[Worker], arrays: Optional[str], life: Life) -> int:
    try:
        check_class(worker)
    except ValueError as error:
        return say(str(error), EXIT_FAILED)
    try:
        life.begin(os.environ)
        return _connect(worker, arrays, life)
    except ValueError as error:
        return say(str(error), EXIT_USAGE)
    except Asked:  # outside of the session, which says goodbye
        return 0
    finally:
        life.starting = False


def _connect(worker: Type[Worker], arrays: Optional[str], life: Life) -> int:
    path = os.environ.get("STAGEMESH_SOCKET", "")
    if not path:
        return say(
            "STAGEMESH_SOCKET is not set: a host starts this process. To try a worker by hand: "
            'python -m stagemesh.check FILE. To import one: serve(...) below if __name__ == "__main__":',
            EXIT_USAGE,
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except OSError as error:
        return say(f"the host's socket {path}: {error}", EXIT_HOST_GONE)
    life.connected(sock)
    return Session(Connection(sock), worker, arrays, life, os.environ).run()


def _line_buffered() -> None:
    """Makes what is printed reach the host's log line by line."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True, errors="backslashreplace")
    if not logging.getLogger().handlers:
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")


class Session:
    """One connection of a worker with its host, from hello to the end."""

    def __init__(
        self,
        connection: Connection,
        worker: Type[Worker],
        arrays: Optional[str],
        life: Life,
        environ: Mapping[str, str],
    ) -> None:
        self._connection = connection
        self._class = worker
        self._arrays_name = arrays if arrays is not None else worker.arrays
        self._streams = overrides(worker, "stream")
        self._life = life
        self._environ = environ
        self._slots = 1
        self._welcomed = False
        self._ready = False
        self._stopping = False  # takes no more batches
        self._grace_s = _SIGNAL_GRACE  # how long it may take to finish, in seconds
        self._said_shutdown = False
        self._polling = threading.Lock()  # who holds it reads from the connection during a batch
        self._over: Optional[BaseException] = None  # what ended the connection during a batch
        self._current: Optional[Batch] = None  # with one slot
        self._running: Dict[int, Batch] = {}  # with more
        self._worker: Optional[Worker] = None
        self._pool: Optional[Union[_Pool, Streams]] = None

    # --- the whole ---------------------------------------------------------

    def run(self) -> int:
        """Serves until the end; returns the exit code."""
        try:
            code = self._run()
        except Asked:
            code = self._leave()
        except Ended as error:
            code = (
                0
                if self._stopping or self._life.asked
                else say(f"the connection to the host ended: {error}", EXIT_HOST_GONE)
            )
        except Violation as error:
            code = say(f"the host does not keep to the worker protocol: {error}", EXIT_VIOLATION)
            self._say_violation(error)
        self._life.starting = False
        try:
            # Not while a batch runs that the host has left.
            if code == 0 and self._worker is not None and (self._pool is None or self._pool.over(_GRACE)):
                self._worker.teardown()
        except Exception as error:
            code = say(f"{self._class.__name__}.teardown:\n{traceback_of(error)}", EXIT_FAILED)
        finally:
            self._connection.hang_up()  # also for threads that wait for room
            self._connection.close()
        return code

    def _run(self) -> int:
        welcome = self._hello()
        if welcome is None:
            return EXIT_VIOLATION
        try:
            arrays = arrays_of(self._arrays_name)
            worker, context = self._set_up(welcome)
            layout = Layout()
            spec = wire_spec(worker, arrays, layout)
            if layout.size > self._connection.max_body:
                raise ValueError(
                    f"the examples take {layout.size} bytes, the host takes {self._connection.max_body} in a frame"
                )
            runs = Runs(
                worker,
                arrays,
                self._connection.max_body,
                self._poll if self._slots == 1 and not self._streams else _no_poll,
                answers=context.rank == 0,
            )
            ready = encode({"type": "ready", "slots": self._slots, "spec": spec}).encode("ascii")
        except (Asked, Ended, Violation):
            raise
        except BaseException as error:
            return self._failed(error)
        self._worker = worker
        self._life.starting = False
        self._ready = True
        self._connection.send(ready, layout.pieces, layout.size)
        if self._streams:
            self._pool = Streams(self, self._connection, worker, runs, arrays, self._slots)
            return self._pool.run()
        if self._slots > 1:
            self._pool = _Pool(self, runs, self._slots)
            return self._pool.run()
        return self._run_batches(runs)

    def _say_violation(self, error: Violation) -> None:
        """Tells the host why the connection is closed, for its log, where it still reads."""
        fields = {"kind": "protocol", "error": "Violation", "message": str(error)[:4096]}
        try:
            self._connection.send_within(_LAST_WORD, message("error", fields))
        except Ended:
            pass

    # --- starting ------------------------------------------------------------

    def _hello(self) -> Optional[Header]:
        """Says hello; returns the host's welcome, or None where there is none."""
        hello: Dict[str, Any] = {
            "protocols": [PROTOCOL],
            "name": self._class.__name__,
            "sdk": f"stagemesh-python {_version.VERSION} ({self._arrays_name})",
            "pid": os.getpid(),
        }
        if self._streams:
            hello["capabilities"] = [_STREAM]
        self._connection.send(message("hello", hello))
        header, _ = self._connection.read()
        if header["type"] == "error":
            say(
                f"the host refuses this worker: {header.get('message', '')} (it speaks protocol {PROTOCOL})",
                EXIT_VIOLATION,
            )
            return None
        if header["type"] == "shutdown":
            raise Asked
        if header["type"] != "welcome":
            raise Violation(f"a {header['type']!r:.40} where welcome is wanted")
        check_welcome(header)
        self._connection.max_body = header["max_frame"]
        return header

    def _set_up(self, welcome: Header) -> Tuple[Worker, Context]:
        if self._streams and _STREAM not in welcome.get("capabilities", ()):
            name = self._class.__name__
            raise ValueError(f"{name}.stream: this host takes no chunks; write predict_item(self, item)")
        self._slots = max(1, min(self._class.concurrency, welcome.get("slots", 1)))
        context = Context(
            welcome["options"],
            devices=welcome.get("devices", ()),
            max_size=welcome.get("max_size", 1),
            slots=self._slots,
            environ=self._environ,
            progress=self._progress,
        )
        context.log = logging.getLogger(f"stagemesh.worker.{self._class.__name__}")
        worker = self._class()
        worker.setup(context)
        check_worker(worker)
        return worker, context

    def _progress(self, text: str) -> None:
        if self._ready:
            logging.getLogger("stagemesh.worker").info("%s", text)
        else:
            self._connection.send(message("state", {"state": "STARTUP", "message": str(text)[:4096]}))

    def _failed(self, error: BaseException) -> int:
        """Says that the start failed, and why."""
        self._life.starting = False
        text = f"{type(error).__name__}: {text_of(error)}"
        # What is declared wrongly has no traceback: no line of the author's raised it.
        trace = traceback_of(error) if is_of_author(error) or not isinstance(error, (ValueError, ImportError)) else ""
        # A host shows the last that was written: where it was raised, and what.
        say(f"{self._class.__name__} cannot start: {trace or text}", EXIT_FAILED)
        try:
            self._connection.send(message("state", {"state": "ERROR", "message": text[:4096]}))
            self._connection.send(error_header(error, trace=trace))
        except Ended:
            pass
        return EXIT_FAILED

    # --- one slot --------------------------------------------------------------

    def _run_batches(self, runs: Runs) -> int:
        life, read, send, now = self._life, self._connection.read, self._connection.send, time.monotonic
        while True:
            life.waiting = True
            try:
                frame = self._connection.poll() if life.asked else read()
            except BlockingIOError:
                frame = None
            life.waiting = False
            if frame is None:  # a signal came, and nothing else
                return self._leave()
            header, body = frame
            if header["type"] == "predict":
                self._current = batch = runs.batch(header, body, now())
                del header, body, frame  # the batch alone keeps its bytes
                reply = runs.run(batch)
                self._current = None
                if self._polling.locked():  # by a thread of the worker that goes on; no other reads from here on
                    with self._polling:
                        pass
                if life.asked or self._stopping or self._over is not None:
                    self._before_last()
                send(*reply)
                del batch, reply
            else:
                self._other(header)
            if self._stopping:
                return self._leave()

    def _before_last(self) -> None:
        """Says, ahead of a result, that no further batch is taken; raises what ended the connection meanwhile."""
        if self._over is not None:
            raise self._over
        if not self._said_shutdown:
            self._say_shutdown(self._grace_s)

    def _poll(self, batch: Batch) -> None:
        """Takes the frames that came while a batch runs; any thread of the worker may ask."""
        if not self._polling.acquire(False):
            return  # another looks
        try:
            self._take_frames(batch)
        finally:
            self._polling.release()

    def _take_frames(self, batch: Batch) -> None:
        current = self._current
        if current is None or current.id != batch.id:
            return  # it is over, and the main thread reads
        try:
            while self._over is None:
                frame = self._connection.poll()
                if frame is None:
                    return
                if frame[0]["type"] == "predict":
                    raise Violation("a predict beyond the slots of the worker")
                self._other(frame[0])
        except (Ended, Violation) as error:
            if isinstance(error, Ended) and self._stopping:
                return
            self._over = error
        batch._cancel(None)  # nobody waits at the other end

    def _other(self, header: Header) -> None:
        """Takes a message that is no batch."""
        kind = header["type"]
        if kind == "cancel":
            name = number(header, "batch")
            current = self._current
            batch = current if current is not None and current.id == name else self._running.get(name)
            items = header.get("items")
            if "items" in header and not _are_indices(items):
                raise Violation("cancel: items is a list of indices, at least one")
            if batch is not None:
                batch._cancel(items)
                if self._pool is not None:
                    self._pool.called_off(batch)
        elif kind == "ping":
            self._connection.send_within(_ROOM, b'{"type":"pong","n":%d}' % number(header, "n"))
        elif kind == "shutdown":
            self._grace_s = number(header, "timeout") / 1000
            self._stopping = True
        elif kind in ("load", "unload"):
            text = f"{kind}: this worker serves one model"
            fields = {"kind": "unsupported", "error": "Unsupported", "message": text}
            self._connection.send_within(_ROOM, message("error", fields))
        elif kind == "error":
            raise Ended(f"the host says {header.get('error', '')}: {header.get('message', '')}")
        else:
            raise Violation(f"a {kind!r:.40} that does not fit the moment")

    # --- leaving -----------------------------------------------------------------

    def _say_shutdown(self, within_s: float) -> None:
        self._said_shutdown = True
        self._connection.send_within(within_s, b'{"type":"state","state":"SHUTDOWN"}')

    def _leave(self, within_s: Optional[float] = None) -> int:
        """Says goodbye after the last batch, where the host makes room within the time there is."""
        self._stopping = True
        self._life.starting = False
        try:
            if not self._said_shutdown:
                self._say_shutdown(self._grace_s if within_s is None else within_s)
        except Ended:
            pass
        return 0


class _Pool:
    """Runs the batches of a session in as many threads as it has slots."""

    def __init__(self, session: Session, runs: Runs, slots: int) -> None:
        self._session = session
        self._runs = runs
        self._slots = slots
        self._batches: queue.SimpleQueue[Optional[Batch]] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"stagemesh-slot-{i}", daemon=True) for i in range(slots)
        ]

    def run(self) -> int:
        """Reads frames until the end; the batches in hand are finished."""
        session = self._session
        for thread in self._threads:
            thread.start()
        try:
            while not session._stopping:
                frame = self._next()
                if frame is None:
                    break
                self._take(*frame)
        except (Ended, Violation):
            for batch in list(session._running.values()):
                batch._cancel(None)  # nobody waits at the other end
            raise
        code = session._leave()
        self.over(None)
        return code

    def called_off(self, batch: Batch) -> None:
        """Does nothing: who runs a batch asks whether somebody waits for it."""

    def over(self, timeout_s: Optional[float]) -> bool:
        """Waits for the batches in hand, and reports whether they are over."""
        return finish(self._threads, self._batches, timeout_s)

    def _next(self) -> Optional[Frame]:
        """Waits for a frame; None where a signal asks to stop, and none has come."""
        life = self._session._life
        life.waiting = True
        try:
            return self._session._connection.poll() if life.asked else self._session._connection.read()
        except BlockingIOError:
            return None
        finally:
            life.waiting = False

    def _take(self, header: Header, body: memoryview) -> None:
        session = self._session
        if header["type"] != "predict":
            session._other(header)
            return
        if len(session._running) >= self._slots:
            raise Violation("a predict beyond the slots of the worker")
        batch = self._runs.batch(header, body, time.monotonic())
        batch._complete()  # here, since both threads may ask
        session._running[batch.id] = batch
        self._batches.put(batch)

    def _work(self) -> None:
        while True:
            batch = self._batches.get()
            if batch is None:
                return
            try:
                reply = self._runs.run(batch)
            except BaseException as error:  # a slot is not lost, whatever it is
                if self._runs.forked():
                    raise
                reply = error_header(error, batch.id), (), 0
            # Its slot is free before the host can know.
            del self._session._running[batch.id], batch
            try:
                self._session._connection.send(*reply)
            except Ended:
                return  # the thread that reads sees it too
            del reply


def _no_poll(batch: Batch) -> None:
    """Another thread reads."""


# --- checks of messages ------------------------------------------------------------


def number(header: Header, key: str) -> int:
    """Returns a whole number of a message; raises Violation where it is none."""
    value: Any = header.get(key)
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise Violation(f"{header['type']}: {key} is a whole number")
    return value


def _are_indices(items: Any) -> bool:
    """Reports whether a cancel's items are indices, at least one."""
    return type(items) is list and bool(items) and all(type(i) is int and 0 <= i <= MAX_COUNT for i in items)


def check_welcome(header: Header) -> None:
    """Raises Violation where a welcome cannot be."""
    if number(header, "protocol") != PROTOCOL:
        raise Violation(f"welcome: protocol {header['protocol']}, this worker said {PROTOCOL}")
    number(header, "max_frame")
    if type(header.get("options")) is not dict:
        raise Violation("welcome: options is an object")
    for key, most in (("slots", MAX_SLOTS), ("max_size", MAX_COUNT)):
        if key in header and not 1 <= number(header, key) <= most:
            raise Violation(f"welcome: {key} is a whole number from 1 to {most}")
    for key in ("devices", "capabilities"):
        strings = header.get(key, [])
        if type(strings) is not list or any(type(one) is not str for one in strings):
            raise Violation(f"welcome: {key} is a list of strings")
