"""Runs a worker without a mesh.

    from stagemesh import testing

    with testing.run(Classify, options={"model": "m.npz"}) as w:
        p = w.predict({"x": numpy.zeros((1, 64), "float32")})["p"]     # one request

        w.add({"x": good})                                             # three in one batch
        w.add({"x": bad})
        w.add({"x": good}, parameters={"top": 3})
        first, second, third = w.predict()
        assert isinstance(second.error, InvalidInput)

A worker that streams answers one item at a time, in full by ``predict`` or in chunks:

    with testing.run(Chat) as w, w.stream({"prompt": "Hello"}) as words:
        for chunk in words:
            print(chunk["text"])
        print(words.outcome["text"])                                    # the whole answer

The worker runs in its own process and gets the messages that a host sends. With
process=False it runs in a thread of this process, for debuggers, coverage and classes that
are defined in a test. Arrays are those that the worker declares: numpy's, or memoryviews.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from typing import (
    IO,
    Any,
    Deque,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Type,
    Union,
    overload,
)

from .arrays import Arrays
from .batches import check_predict
from .faults import ItemError, ItemFailed, error_of
from .frames import Connection, Ended, Frame, Header, Violation, decode, encode, message
from .lifecycle import target_of
from .parts import Body, Layout, Raw, read_parts
from .session import Session, Signals
from .specs import Bytes, spec_of
from .values import ABSENT, Encoder, arrays_of, values_of
from .worker import Worker, check_class

__all__ = ["BatchFailed", "Outcome", "Request", "Run", "Stream", "WorkerEnded", "WorkerSilent", "run"]

_SIGNALS = {int(s): s.name for s in signal.Signals}


class BatchFailed(Exception):
    """The batch failed as a whole; the message has what a host would log.

    It is the __cause__ of an item's error whose text does not say what the worker raised.
    """

    def __init__(self, header: Header) -> None:
        self.kind: str = header.get("kind", "")
        self.error: str = header.get("error", "")
        self.message: str = header.get("message", "")
        self.traceback: str = header.get("traceback", "")
        super().__init__(": ".join(filter(None, (self.kind, self.error, f"{self.message}\n{self.traceback}".rstrip()))))


class WorkerEnded(Exception):
    """The worker has ended; said and traceback are its own report about that, or empty."""

    def __init__(self, message: str, traceback: str = "", said: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback
        self.said = said


class WorkerSilent(WorkerEnded):
    """The worker did not answer in time, and was ended; its standard error has the tracebacks of its threads."""


class Request(NamedTuple):
    """One request of a batch; timeout in milliseconds, 0 for none."""

    inputs: Mapping[str, Any]
    parameters: Mapping[str, Any] = {}
    metadata: Mapping[str, str] = {}
    timeout: int = 0
    id: str = ""
    input_parameters: Mapping[str, Mapping[str, Any]] = {}


class Outcome:
    """The outcome of one request: outputs by name, or an error; and metadata for the caller."""

    def __init__(self) -> None:
        self.outputs: Dict[str, Any] = {}
        self.error: Optional[ItemError] = None
        self.metadata: Dict[str, str] = {}

    def __getitem__(self, name: str) -> Any:
        """Returns an output; raises the item's error if there is one."""
        if self.error is not None:
            raise self.error
        return self.outputs[name]

    def __repr__(self) -> str:
        return f"<Outcome {self.error!r}>" if self.error is not None else f"<Outcome {self.outputs!r}>"


def run(worker: Union[Type[Worker], str], options: Optional[Mapping[str, Any]] = None, **settings: Any) -> Run:
    """Returns a Run of a worker, which starts when it is entered as a context, or by start().

    worker is the class, or a target such as ``"worker.py:Classify"``. The settings
    are those of Run.
    """
    return Run(worker, options, **settings)


class Run:
    """A running worker, and the host's end of its connection. For one thread.

    process      False: in a thread of this process
    arrays       "numpy" or "buffer"; by default what the worker declares
    devices, max_size, slots, max_frame    the settings of the host; max_frame in bytes
    environ      further variables, such as RANK
    models       of a worker with several: their sources by ID. They are loaded at the start,
                 and model is the one that requests are for: the last
    patience_s   how long to wait for each message of the worker, in seconds
    stdout, stderr    as of subprocess.Popen; by default this process's
    """

    def __init__(
        self,
        worker: Union[Type[Worker], str],
        options: Optional[Mapping[str, Any]] = None,
        *,
        process: bool = True,
        arrays: Optional[str] = None,
        devices: Sequence[str] = (),
        max_size: int = 32,
        slots: int = 1,
        max_frame: int = 1 << 30,
        environ: Optional[Mapping[str, str]] = None,
        patience_s: float = 60,
        command: Optional[Sequence[str]] = None,
        stdout: Union[int, IO[Any], None] = None,
        stderr: Union[int, IO[Any], None] = None,
        models: Optional[Mapping[str, str]] = None,
    ) -> None:
        self._target = worker
        self._as_process = process
        self._arrays_name = arrays
        self._welcome: Header = {
            "protocol": 1,
            "options": dict(options or {}),
            "devices": list(devices),
            "slots": slots,
            "max_size": max_size,
            "max_frame": max_frame,
            "capabilities": ["stream", "models"] if models else ["stream"],
        }
        self.models = dict(models or {})
        self.model = ""
        self._environ = dict(environ or {})
        self._patience = patience_s
        self._command = command
        self._output: Dict[str, Any] = {"stdout": stdout, "stderr": stderr}
        self._batches = 0
        self._rows: Dict[int, List[int]] = {}  # of each item, by the batches that were sent
        self._ends: Dict[int, Frame] = {}  # of batches, received and not yet returned
        self._chunks: Dict[int, Deque[Frame]] = {}  # of streams, received and not yet returned
        self._added: List[Request] = []
        self._folder: Optional[str] = None
        self._lifeline = -1
        self._thread: Optional[threading.Thread] = None
        self._thread_code: Optional[int] = None
        self.process: Optional[subprocess.Popen[Any]] = None
        self.connection: Optional[Connection] = None
        self.hello: Header = {}
        self.slots = 1  # how many batches the worker takes at a time
        self.spec: Header = {}  # of the model that was loaded last, where it has one
        self._common: Header = {}
        self.states: List[Header] = []  # the messages of the worker about itself
        self._arrays: Arrays = arrays_of("buffer")
        self._inputs = self._outputs = Encoder({}, self._arrays, False)
        self.streams = False  # whether the worker answers in chunks; then each of its batches has one item
        self.examples: List[Dict[str, Any]] = []  # the inputs of the worker's own examples

    # --- starting ----------------------------------------------------------

    def __enter__(self) -> Run:
        self.start()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.stop()

    def start(self) -> Run:
        """Starts the worker and returns when it is ready; raises WorkerEnded if it does not get ready."""
        try:
            self.connection = Connection(self._spawn() if self._as_process else self._in_thread())
            self.connection.sock.settimeout(self._patience)
            self.hello = self._read("hello")[0]
            self.connection.max_body = self._welcome["max_frame"]
            self.connection.send(message("welcome", **self._welcome))
            ready, body = self._read("ready")
            self._arrays = arrays_of(self._arrays_name or self._worker_arrays())
            self._common = ready["spec"]
            self._declare(self._common)
            for model, source in self.models.items():
                self.load(model, source)
        except BaseException:
            self._kill()
            raise
        self.streams = "stream" in self.hello.get("capabilities", ())
        self.slots = ready.get("slots", 1)
        self.examples = [
            self._item_values(example["inputs"], body, self._inputs) for example in self.spec.get("examples", [])
        ]
        return self

    def _declare(self, spec: Header) -> None:
        """Takes the inputs and outputs of a spec."""
        self.spec = spec
        joins = spec.get("batch_axis", "rows") == "rows"
        self._inputs, self._outputs = (
            Encoder({entry["name"]: spec_of(entry) for entry in spec.get(key, [])}, self._arrays, joins)
            for key in ("inputs", "outputs")
        )

    def _worker_arrays(self) -> str:
        """Returns the arrays that a worker in Python has, if this Python has them too."""
        sdk: str = self.hello.get("sdk", "")
        try:
            return arrays_of("buffer" if sdk.endswith("(buffer)") else "numpy").name
        except ImportError:  # the worker runs in another Python
            return "buffer"

    def _in_thread(self) -> socket.socket:
        if not isinstance(self._target, type):
            raise TypeError("process=False needs the class itself")
        check_class(self._target)
        ours, theirs = socket.socketpair()
        theirs.settimeout(None)
        kind, environ = self._target, {**os.environ, **self._environ}

        def serve() -> None:
            session = Session(Connection(theirs), kind, self._arrays_name, Signals(), environ)
            self._thread_code = session.run()

        self._thread = threading.Thread(target=serve, name="stagemesh-worker", daemon=True)
        self._thread.start()
        return ours

    def _spawn(self) -> socket.socket:
        command = self._command
        if command is None:
            target = self._target if isinstance(self._target, str) else target_of(self._target)
            command = [sys.executable, "-m", "stagemesh", target]
            if self._arrays_name:
                command.append(f"--arrays={self._arrays_name}")
        # A socket's address holds about 100 bytes.
        self._folder = tempfile.mkdtemp(prefix="stagemesh-", dir=None if len(tempfile.gettempdir()) < 70 else "/tmp")
        path = os.path.join(self._folder, "worker")
        lifeline, self._lifeline = os.pipe()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(1)
            environ = {
                **os.environ,
                "PYTHONFAULTHANDLER": "1",
                "PYTHONPATH": os.pathsep.join([_ROOT, *(p or os.getcwd() for p in sys.path)]),
                **self._environ,
                "STAGEMESH_SOCKET": path,
                "STAGEMESH_LIFELINE": str(lifeline),
            }
            self.process = subprocess.Popen(
                command,
                env=environ,
                pass_fds=[lifeline],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                **self._output,
            )
            os.close(lifeline)
            return self._accept(listener)

    def _accept(self, listener: socket.socket) -> socket.socket:
        listener.settimeout(0.05)
        for _ in range(int(self._patience / 0.05) + 1):
            try:
                return listener.accept()[0]
            except socket.timeout:
                if self.process is not None and self.process.poll() is not None:
                    raise WorkerEnded(f"the worker ended before it connected: {self._how()}") from None
        raise WorkerEnded(f"the worker did not connect within {self._patience} s")

    # --- requests ----------------------------------------------------------

    def add(
        self,
        inputs: Mapping[str, Any],
        *,
        parameters: Optional[Mapping[str, Any]] = None,
        metadata: Optional[Mapping[str, str]] = None,
        timeout: int = 0,
        id: str = "",
        input_parameters: Optional[Mapping[str, Mapping[str, Any]]] = None,
    ) -> int:
        """Adds a request to the next batch; returns its index in it. timeout is in milliseconds."""
        self._added.append(Request(inputs, parameters or {}, metadata or {}, timeout, id, input_parameters or {}))
        return len(self._added) - 1

    @overload
    def predict(self, inputs: Mapping[str, Any], **request: Any) -> Dict[str, Any]: ...
    @overload
    def predict(self) -> List[Outcome]: ...
    def predict(self, inputs: Optional[Mapping[str, Any]] = None, **request: Any) -> Any:
        """Runs one request and returns its outputs; or runs the requests that were added, and returns their outcomes.

        Raises the error of the one request, and BatchFailed.
        """
        if inputs is not None:
            outcome = self.result(self.send([Request(inputs, **request)]))[0]
            if outcome.error is not None:
                raise outcome.error
            return outcome.outputs
        requests, self._added = self._added, []
        if not requests:
            raise ValueError("predict: add requests first, or give one's inputs")
        if not self.streams:
            return self.result(self.send(requests))
        return [self.result(self.send([request]))[0] for request in requests]

    def stream(self, inputs: Mapping[str, Any], **request: Any) -> Stream:
        """Sends one request, and returns a stream of its chunks.

        Several may run at a time, as many as the worker has slots.
        """
        if not self.streams:
            raise ValueError("stream: the worker answers by predict; it has no stream(self, item)")
        batch = self.send([Request(inputs, **request)])
        self._chunks[batch] = deque()
        return Stream(self, batch)

    def _chunk(self, batch: int) -> Optional[Frame]:
        """Waits for the next chunk of a batch; None if it has ended."""
        chunks = self._chunks[batch]
        while not chunks and batch not in self._ends:
            self._receive()
        return chunks.popleft() if chunks else None

    def _receive(self) -> None:
        """Waits for the next chunk or end of any batch, and keeps it."""
        header, body = self._read("result", "error", "chunk")
        number = header.get("batch", -1)
        if number not in self._rows or number in self._ends:
            raise WorkerEnded(f"the worker answered batch {number}, which it does not have")
        if header["type"] != "chunk":
            self._ends[number] = header, body
        elif not self.streams:
            raise WorkerEnded("the worker sent a chunk, but its hello has no capability stream")
        elif number in self._chunks:
            self._chunks[number].append((header, body))

    def send(self, requests: Sequence[Request], warmup: bool = False) -> int:
        """Sends a batch and returns its number, without waiting for the result."""
        self._open()
        self._batches += 1
        pairs = [self._encode_item(i, request) for i, request in enumerate(requests)]
        items = [item for item, _ in pairs]
        layout = Layout()
        for name in dict.fromkeys(name for _, parts in pairs for name in parts):
            layout.add_items(name, range(len(pairs)), [parts.get(name) for _, parts in pairs], self._inputs.joins)
        header = {"type": "predict", "batch": self._batches, "items": items, "warmup": warmup}
        header["parts"] = layout.take_entries(0)
        if self.model:
            header["model"] = {"id": self.model}
        text = encode(header)
        try:
            check_predict(decode(text))
        except Violation as error:
            raise ValueError(str(error)) from None
        self._send(text.encode(), layout.pieces, layout.size)
        self._rows[self._batches] = [item["rows"] for item in items]
        return self._batches

    def _encode_item(self, i: int, request: Request) -> Tuple[Header, Dict[str, Body]]:
        """Returns the header of an item, and its parts by name; raises ValueError if an input does not fit."""
        encoder = self._inputs
        given = {name: value for name, value in request.inputs.items() if not encoder.lacks(name, value)}
        parts = encoder.inputs(f"request {i}", given)
        rows = set()
        for name, body in parts.items():
            if encoder.joins and isinstance(body, Raw):
                if not body.shape:
                    raise ValueError(f"request {i}: input {name!r}: got one number, and axis 0 of a tensor is rows")
                rows.add(body.shape[0])
        if len(rows) > 1:
            raise ValueError(f"request {i}: its tensors have different rows: {sorted(rows)}")
        item: Header = {"id": request.id or f"test-{self._batches}-{i}", "rows": rows.pop() if rows else 1}
        if request.parameters:
            item["parameters"] = dict(request.parameters)
        if request.input_parameters:
            item["input_parameters"] = dict(request.input_parameters)
        if request.metadata:
            item["metadata"] = dict(request.metadata)
        if request.timeout:
            item["timeout"] = request.timeout
        return item, parts

    def load(self, model: str, source: str = "", **options: str) -> None:
        """Loads a model of a worker with several, which requests are for from now on; raises BatchFailed."""
        loaded = self._ask("load", model, source=source, options=options)
        self.model = model
        self._declare(loaded.get("spec", self._common))

    def unload(self, model: str) -> None:
        """Unloads a model; raises BatchFailed."""
        self._ask("unload", model)

    def _ask(self, kind: str, model: str, **fields: Any) -> Header:
        self.tell(kind, load=1, model=model, **fields)
        header, _ = self._read(f"{kind}ed", "error")
        if header["type"] == "error":
            raise BatchFailed(header)
        return header

    def tell(self, kind: str, **fields: Any) -> None:
        """Sends a message without parts, such as ``tell("cancel", batch=1)``."""
        self._send(message(kind, **fields))

    def _send(self, header: bytes, pieces: Sequence[Any] = (), size: int = 0) -> None:
        try:
            self._open().send(header, pieces, size)
        except socket.timeout:
            self._abort()
            text = f"the worker read nothing for {self._patience:g} s: take the results of earlier batches first"
            raise WorkerSilent(text) from None
        except Ended:
            raise WorkerEnded(f"the worker has ended: {self._how()}") from None

    def _open(self) -> Connection:
        """Returns the connection; raises WorkerEnded if there is none."""
        if self.connection is not None:
            return self.connection
        raise WorkerEnded(f"the worker has ended: {self._how()}" if self.hello else "the worker was not started")

    def result(self, batch: int) -> List[Outcome]:
        """Waits for the end of a batch that was sent, and returns the outcomes; raises BatchFailed."""
        if batch not in self._rows:
            raise ValueError(f"result: batch {batch} was not sent, or its result was taken")
        while batch not in self._ends:
            self._receive()
        header, body = self._ends.pop(batch)
        rows = self._rows.pop(batch)
        self._chunks.pop(batch, None)
        if header["type"] == "error":
            raise BatchFailed(header)
        outcomes = [Outcome() for _ in rows]
        for outcome, outputs in zip(outcomes, self._values(header.get("parts", []), body, rows, self._outputs)):
            outcome.outputs = outputs
        for fault in header.get("faults", []):
            outcome = outcomes[fault["item"]]
            outcome.error = error_of(fault["reason"], fault["message"], fault.get("field", ""))
            if "exception" in fault:
                outcome.error.__cause__ = BatchFailed(fault["exception"])
            outcome.outputs = {}
        for entry in header.get("metadata", []):
            outcomes[entry["item"]].metadata = entry["values"]
        return outcomes

    def _values(
        self, parts: List[Header], body: memoryview, rows: List[int], declared: Encoder
    ) -> List[Dict[str, Any]]:
        """Returns the values that the parts of a message are, by name for each item."""
        out: List[Dict[str, Any]] = [{} for _ in rows]
        for name, column in read_parts(parts, body, len(rows)).items():
            spec = declared.specs.get(name)
            values = values_of(column, body, rows, self._arrays, spec, declared.joins)
            for i, own in enumerate(out):
                value = values.of(i)
                if isinstance(value, bytes) and isinstance(spec, Bytes) and isinstance(column, list):
                    value = spec.decode(value, getattr(column[i], "content_type", ""))
                if value is not ABSENT:
                    own[name] = value
        return out

    def _item_values(self, parts: List[Header], body: memoryview, declared: Encoder) -> Dict[str, Any]:
        """Returns the values of a message about one item, whose parts may leave the item out."""
        return self._values([{**part, "item": 0} for part in parts], body, [1], declared)[0]

    def ping(self) -> None:
        """Sends a ping to an idle worker, and waits for the pong."""
        self.tell("ping", n=self._batches)
        header, _ = self._read("pong")
        if header["n"] != self._batches:
            raise WorkerEnded(f"the pong has n = {header['n']}, the ping had {self._batches}")

    def _read(self, *kinds: str) -> Frame:
        """Waits for a message of one of the kinds; keeps the messages of the worker about itself."""
        connection = self._open()
        while True:
            try:
                header, body = connection.read()
            except socket.timeout:
                self._abort()
                text = f"the worker sent nothing for {self._patience:g} s, a {kinds[0]} was awaited"
                raise WorkerSilent(text) from None
            except Ended as error:
                raise self._ended(error) from None
            except Violation as error:
                raise WorkerEnded(f"the worker does not keep to the protocol: {error}") from None
            if header["type"] in kinds:
                return header, body
            self.states.append(header)
            if header["type"] != "state" and not (header["type"] == "error" and "batch" not in header):
                raise WorkerEnded(f"the worker sent a {header['type']}, a {kinds[0]} was awaited")

    def _ended(self, error: Ended) -> WorkerEnded:
        """Returns the end of the connection as an error, with the last report of the worker about itself."""
        said = next((s for s in reversed(self.states) if s.get("message")), {})
        last = said.get("message", "")
        if said.get("type") == "error":
            last = f"{said.get('error', '')}: {last}"
        where = " in the middle of a frame" if "middle" in str(error) else ""
        text = f"the worker ended{where}: {self._how()}{last and ': ' + last}"
        return WorkerEnded(text, said.get("traceback", ""), last)

    def _abort(self) -> None:
        """Ends a process that does not answer by SIGABRT; faulthandler then prints the tracebacks of its threads."""
        if self.process is not None:
            self.process.send_signal(signal.SIGABRT)
            self._await_exit(2)

    def _await_exit(self, timeout_s: float) -> Optional[int]:
        """Waits for the end of the process; returns its exit code, or None if it still runs."""
        try:
            return None if self.process is None else self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    # --- stopping ----------------------------------------------------------

    def stop(self, timeout_s: float = 5) -> Optional[int]:
        """Asks the worker to stop and returns its exit code; kills it after the time."""
        if self.connection is None:
            return self._code()
        try:
            self.connection.send(message("shutdown", timeout=int(timeout_s * 1000)))
            self.connection.sock.settimeout(timeout_s)
            while True:
                self.states.append(self.connection.read()[0])
        except (Ended, Violation, OSError):
            pass
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 5) -> Optional[int]:
        """Waits for the worker's end and returns its exit code; kills it after the time."""
        self._await_exit(timeout_s)
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._kill()
        return self._code()

    def _code(self) -> Optional[int]:
        return self.process.returncode if self.process is not None else self._thread_code

    def _how(self) -> str:
        """Returns how the worker ended, in words."""
        if self.process is None:
            return "it ran in a thread"
        code = self._await_exit(2)
        if code is None:
            return "its process is still there"
        return f"its process {f'exited with {code}' if code >= 0 else f'was ended by {_SIGNALS.get(-code, -code)}'}"

    def _kill(self) -> None:
        if self.process is not None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
            self.process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


class Stream:
    """The answer to one request: an iterator over its chunks, which are dicts of outputs by name.

    As a context it is cancelled at the end if it has not ended.
    """

    def __init__(self, run: Run, batch: int) -> None:
        self._run = run
        self.batch = batch  # its number
        self._outcome: Optional[Outcome] = None

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._outcome is None and self._run.connection is not None and not isinstance(error, WorkerEnded):
            self.cancel()
            self.end()

    def __iter__(self) -> Iterator[Dict[str, Any]]:
        """Yields the chunks as they arrive."""
        while self._outcome is None:
            frame = self._run._chunk(self.batch)
            if frame is None:
                return
            header, body = frame
            yield self._run._item_values(header.get("parts", []), body, self._run._outputs)

    def cancel(self) -> None:
        """Cancels the request. The outcome is still received, and does not matter."""
        self._run.tell("cancel", batch=self.batch)

    def end(self) -> Outcome:
        """Waits for the end and returns the outcome; chunks that were not read are dropped. Raises BatchFailed."""
        if self._outcome is None:
            try:
                self._outcome = self._run.result(self.batch)[0]
            except BatchFailed as error:
                self._outcome = Outcome()
                self._outcome.error = ItemFailed(str(error))
                raise
        return self._outcome

    @property
    def outcome(self) -> Outcome:
        """The outcome of the request: the whole answer, if the worker collects it, or an error."""
        return self.end()


_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
