"""Runs a worker without a mesh.

    from stagemesh import testing

    with testing.run(Classify, options={"model": "m.npz"}) as w:
        p = w.predict({"x": numpy.zeros((1, 64), "float32")})["p"]     # one request

        w.add({"x": good})                                             # three in one batch
        w.add({"x": bad})
        w.add({"x": good}, parameters={"top": 3})
        first, second, third = w.predict()
        assert isinstance(second.error, InvalidInput)

A worker that streams is asked for one item at a time, whole by ``predict`` or in chunks:

    with testing.run(Chat) as w, w.stream({"prompt": "Hello"}) as words:
        for chunk in words:
            print(chunk["text"])
        print(words.outcome["text"])                                    # the whole answer

The worker runs in a process of its own and is spoken to as a host does, or, with
process=False, in a thread of this one, for debuggers, coverage and classes that
are defined in a test. Arrays are as the worker has them: numpy's, or memoryviews.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from typing import IO, Any, Deque, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Type, Union, overload

from .arrays import Arrays, arrays_of
from .faults import ItemError, ItemFailed, error_of
from .frames import Connection, Ended, Frame, Header, Violation, encode
from .life import Life
from .loading import target_of
from .outputs import encode_input, lacks
from .packing import is_packed, unpack
from .parts import Blob, Body, Layout, Raw, message, read_parts, split_rows
from .serving import Session
from .specs import Bytes, Json, Spec, Tensor, Text
from .worker import Worker

__all__ = ["BatchFailed", "Outcome", "Request", "Run", "Stream", "WorkerEnded", "WorkerSilent", "run"]

_SIGNALS = {int(s): s.name for s in signal.Signals}


class BatchFailed(Exception):
    """The batch failed as a whole: what its host would put into its log."""

    def __init__(self, header: Header) -> None:
        self.kind: str = header.get("kind", "")
        self.error: str = header.get("error", "")
        self.message: str = header.get("message", "")
        self.traceback: str = header.get("traceback", "")
        super().__init__(f"{self.kind}: {self.error}: {self.message}\n{self.traceback}".rstrip())


class WorkerEnded(Exception):
    """The worker has ended; said and traceback are what it said about that, or empty."""

    def __init__(self, message: str, traceback: str = "", said: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback
        self.said = said


class WorkerSilent(WorkerEnded):
    """The worker said nothing in time, and was ended; what its threads were at is in its standard error."""


class Request(NamedTuple):
    """One request of a batch; timeout in milliseconds, 0 for none."""

    inputs: Mapping[str, Any]
    parameters: Mapping[str, Any] = {}
    metadata: Mapping[str, str] = {}
    timeout: int = 0
    id: str = ""


class Outcome:
    """What became of one request: outputs by name, or an error. And metadata for the caller."""

    def __init__(self) -> None:
        self.outputs: Dict[str, Any] = {}
        self.error: Optional[ItemError] = None
        self.metadata: Dict[str, str] = {}

    def __getitem__(self, name: str) -> Any:
        """Returns an output; raises the item's error where there is one."""
        if self.error is not None:
            raise self.error
        return self.outputs[name]

    def __repr__(self) -> str:
        return f"<Outcome {self.error!r}>" if self.error is not None else f"<Outcome {self.outputs!r}>"


def run(worker: Union[Type[Worker], str], options: Optional[Mapping[str, Any]] = None, **settings: Any) -> Run:
    """Returns a Run of a worker, which starts as a context or with start().

    worker is the class, or a target such as ``"worker.py:Classify"``. The settings
    are those of Run.
    """
    return Run(worker, options, **settings)


class Run:
    """A worker that runs, and this end of its connection. For one thread.

    process      False: in a thread of this process
    arrays       "numpy" or "buffer"; by default what the worker says
    devices, max_size, slots, max_frame    what the host would say; max_frame in bytes
    environ      further variables, such as RANK
    patience_s   how long to wait for the worker to answer
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
            "capabilities": ["stream"],
        }
        self._environ = dict(environ or {})
        self._patience = patience_s
        self._command = command
        self._streams: Dict[str, Any] = {"stdout": stdout, "stderr": stderr}
        self._max_frame = max_frame
        self._batches = 0
        self._rows: Dict[int, List[int]] = {}  # of the items of batches that are on their way
        self._came: Dict[int, Frame] = {}  # ends of batches that nobody has asked for
        self._chunks: Dict[int, Deque[Frame]] = {}  # chunks that nobody has asked for, of batches whose are wanted
        self._added: List[Request] = []
        self._folder: Optional[str] = None
        self._lifeline = -1
        self._thread: Optional[threading.Thread] = None
        self._thread_code: Optional[int] = None
        self.process: Optional[subprocess.Popen[Any]] = None
        self.connection: Optional[Connection] = None
        self.hello: Header = {}
        self.slots = 1  # how many batches the worker takes at a time
        self.spec: Header = {}
        self.states: List[Header] = []  # what the worker said about itself
        self._arrays: Arrays = arrays_of("buffer")
        self._examples: List[Dict[str, Any]] = []

    # --- starting ----------------------------------------------------------

    def __enter__(self) -> Run:
        self.start()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.stop()

    def start(self) -> Run:
        """Starts the worker and returns when it is ready; raises WorkerEnded where it does not become so."""
        try:
            self.connection = Connection(self._spawn() if self._as_process else self._in_thread())
            self.connection.sock.settimeout(self._patience)
            self.hello = self._read("hello")[0]
            self.connection.max_body = self._max_frame
            self.connection.send(message("welcome", self._welcome))
            ready, body = self._read("ready")
        except BaseException:
            self._kill()
            raise
        self.slots = ready.get("slots", 1)
        self.spec = ready["spec"]
        self._arrays = arrays_of(self._arrays_name or self._worker_arrays())
        self._read_examples(body)
        return self

    def _worker_arrays(self) -> str:
        """Returns the arrays that a worker in Python says it has, where this Python has them too."""
        sdk: str = self.hello.get("sdk", "")
        try:
            return arrays_of("buffer" if sdk.endswith("(buffer)") else "numpy").name
        except ImportError:  # the worker's Python is another
            return "buffer"

    def _in_thread(self) -> socket.socket:
        if not isinstance(self._target, type):
            raise TypeError("process=False needs the class itself")
        ours, theirs = socket.socketpair()
        kind, environ = self._target, {**os.environ, **self._environ}

        def serve() -> None:
            session = Session(Connection(theirs), kind, self._arrays_name, Life(), environ)
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
        self._folder = tempfile.mkdtemp(prefix="stagemesh-")
        path = os.path.join(self._folder, "worker")
        if len(path) > 100:  # more than a socket's address holds
            shutil.rmtree(self._folder)
            self._folder = tempfile.mkdtemp(prefix="stagemesh-", dir="/tmp")
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
                **self._streams,
            )
            os.close(lifeline)
            return self._accept(listener)

    def _accept(self, listener: socket.socket) -> socket.socket:
        listener.settimeout(0.05)
        waited = 0.0
        while True:
            try:
                return listener.accept()[0]
            except socket.timeout:
                waited += 0.05
            if self.process is not None and self.process.poll() is not None:
                raise WorkerEnded(f"the worker ended before it connected: {self._how()}")
            if waited > self._patience:
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
    ) -> int:
        """Adds a request to the next batch; returns its index in it. timeout is in milliseconds."""
        self._added.append(Request(inputs, parameters or {}, metadata or {}, timeout, id))
        return len(self._added) - 1

    @overload
    def predict(self, inputs: Mapping[str, Any], **request: Any) -> Dict[str, Any]: ...
    @overload
    def predict(self) -> List[Outcome]: ...
    def predict(self, inputs: Optional[Mapping[str, Any]] = None, **request: Any) -> Any:
        """Runs one request and returns its outputs, or the batch that was added and returns the outcomes.

        Raises the error of the one request, and BatchFailed.
        """
        if inputs is not None:
            added, self._added = self._added, []
            try:
                self.add(inputs, **request)
                outcome = self.predict()[0]
            finally:
                self._added = added
            if outcome.error is not None:
                raise outcome.error
            return outcome.outputs
        requests, self._added = self._added, []
        if not requests:
            raise ValueError("predict: add requests first, or give one's inputs")
        if not self.streams:
            return self.result(self.send(requests))
        return [self.result(self.send([request]))[0] for request in requests]

    @property
    def streams(self) -> bool:
        """Whether the worker answers in chunks; its batches are of one item then."""
        return "stream" in self.hello.get("capabilities", ())

    def stream(self, inputs: Mapping[str, Any], **request: Any) -> Stream:
        """Sends one request, whose chunks and outcome the stream has.

        Several may be on their way, as many as the worker has slots.
        """
        if not self.streams:
            raise ValueError("stream: the worker answers by predict; it has no stream(self, item)")
        batch = self.send([Request(inputs, **request)])
        self._chunks[batch] = deque()
        return Stream(self, batch)

    def _chunk(self, batch: int) -> Optional[Frame]:
        """Waits for the next chunk of a batch; None where it has ended."""
        chunks = self._chunks[batch]
        while not chunks and batch not in self._came:
            self._more()
        return chunks.popleft() if chunks else None

    def _more(self) -> None:
        """Waits for the next chunk or end of any batch, and keeps it for who asks."""
        header, body = self._read("result", "error", "chunk")
        number = header.get("batch", -1)
        if number not in self._rows or number in self._came:
            raise WorkerEnded(f"the worker answered batch {number}, which it does not have")
        if header["type"] != "chunk":
            self._came[number] = header, body
        elif not self.streams:
            raise WorkerEnded("the worker sent a chunk, and did not say that it streams")
        elif number in self._chunks:
            self._chunks[number].append((header, body))

    def send(self, requests: Sequence[Request], warmup: bool = False) -> int:
        """Sends a batch and returns its number, without waiting for the result."""
        self._open()
        header, layout = self.encode(requests)
        header["warmup"] = warmup
        self.send_frame(header, layout)
        self._rows[self._batches] = [item["rows"] for item in header["items"]]
        return self._batches

    def encode(self, requests: Sequence[Request]) -> Any:
        """Returns a batch's header, without its parts, and their layout."""
        self._batches += 1
        layout = Layout()
        specs = {entry["name"]: spec_of(entry) for entry in self.spec.get("inputs", [])}
        joins = self.spec.get("batch_axis", "rows") == "rows"
        bodies = [
            {
                name: self._input(i, name, value, specs.get(name), joins)
                for name, value in r.inputs.items()
                if not lacks(value, specs.get(name))
            }
            for i, r in enumerate(requests)
        ]
        items = []
        for i, (request, own) in enumerate(zip(requests, bodies)):
            tensors = {name: body for name, body in own.items() if isinstance(body, Raw)} if joins else {}
            for name, body in tensors.items():
                if not body.shape:
                    raise ValueError(f"request {i}: input {name!r}: got one number, and axis 0 of a tensor is rows")
            rows = {body.shape[0] for body in tensors.values()}
            if len(rows) > 1:
                raise ValueError(f"request {i}: its tensors have different rows: {sorted(rows)}")
            item: Header = {"id": request.id or f"test-{self._batches}-{i}", "rows": rows.pop() if rows else 1}
            if request.parameters:
                item["parameters"] = dict(request.parameters)
            if request.metadata:
                item["metadata"] = dict(request.metadata)
            if request.timeout:
                item["timeout"] = request.timeout
            items.append(item)
        for name in dict.fromkeys(name for own in bodies for name in own):
            _lay_out(layout, name, [own.get(name) for own in bodies], joins)
        return {"type": "predict", "batch": self._batches, "items": items}, layout

    def _input(self, i: int, name: str, value: Any, spec: Optional[Spec], joins: bool) -> Body:
        declared = [entry["name"] for entry in self.spec.get("inputs", [])]
        if declared and spec is None:
            names = ", ".join(map(repr, declared))
            raise ValueError(f"request {i}: input {name!r} is not declared; inputs are {names}")
        return encode_input(f"request {i}", name, value, spec, self._arrays, joins)

    def send_frame(self, header: Header, layout: Layout) -> None:
        """Sends a message with the parts of a layout."""
        header["parts"] = [json.loads(entry) for entry in layout.entries]
        self._send(encode(header).encode(), layout.pieces, layout.size)

    def tell(self, kind: str, **fields: Any) -> None:
        """Sends a message without parts, such as ``tell("cancel", batch=1)``."""
        self._send(message(kind, fields), ())

    def _send(self, header: bytes, pieces: Sequence[Any], size: int = 0) -> None:
        try:
            self._open().send(header, pieces, size)
        except Ended:
            raise WorkerEnded(f"the worker has ended: {self._how()}") from None

    def _open(self) -> Connection:
        """Returns the connection, where there is one."""
        if self.connection is not None:
            return self.connection
        raise WorkerEnded(f"the worker has ended: {self._how()}" if self.hello else "the worker was not started")

    def result(self, batch: int) -> List[Outcome]:
        """Waits for the end of a batch that was sent, while others may be on their way; raises BatchFailed."""
        while batch not in self._came:
            self._more()
        header, body = self._came.pop(batch)
        rows = self._rows.pop(batch)
        self._chunks.pop(batch, None)
        if header["type"] == "error":
            raise BatchFailed(header)
        outcomes = [Outcome() for _ in rows]
        specs = self._output_specs()
        for name, column in read_parts(header.get("parts", []), body, len(rows)).items():
            spec = specs.get(name)
            own = split_rows(column, rows) if isinstance(column, Raw) else column
            for outcome, part in zip(outcomes, own):
                if part is not None:
                    outcome.outputs[name] = self._value(part, spec)
        for fault in header.get("faults", []):
            outcome = outcomes[fault["item"]]
            outcome.error = error_of(fault["reason"], fault["message"], fault.get("field", ""))
            outcome.outputs = {}
        for entry in header.get("metadata", []):
            outcomes[entry["item"]].metadata = entry["values"]
        return outcomes

    def _output_specs(self) -> Dict[str, Spec]:
        return {entry["name"]: spec_of(entry) for entry in self.spec.get("outputs", [])}

    def _values(self, header: Header, body: memoryview) -> Dict[str, Any]:
        """Returns the outputs of a chunk by name."""
        specs = self._output_specs()
        parts = [{**part, "item": 0} for part in header.get("parts", [])]  # which they may leave out
        return {
            name: self._value(column[0], specs.get(name))
            for name, column in read_parts(parts, body, 1).items()
            if isinstance(column, list) and column[0] is not None
        }

    def _value(self, body: Body, spec: Optional[Spec]) -> Any:
        if isinstance(body, Raw):
            return self._arrays.view(body)
        data = bytes(body.data)
        if isinstance(spec, Json):
            return unpack(data) if is_packed(body.content_type) else json.loads(data)
        return data.decode() if isinstance(spec, Text) else data

    def _read_examples(self, body: memoryview) -> None:
        specs = {entry["name"]: spec_of(entry) for entry in self.spec.get("inputs", [])}
        for example in self.spec.get("examples", []):
            # Their parts have no item, blobs neither: say that they are of the only one.
            found = read_parts([{**part, "item": 0} for part in example["inputs"]], body, 1)
            self._examples.append(
                {
                    name: self._value(column[0], specs.get(name))
                    for name, column in found.items()
                    if isinstance(column, list) and column[0] is not None
                }
            )

    @property
    def examples(self) -> List[Dict[str, Any]]:
        """The inputs of the worker's own examples."""
        return self._examples

    def ping(self) -> None:
        """Asks an idle worker whether it is there, and waits for its answer."""
        self.tell("ping", n=self._batches)
        header, _ = self._read("pong")
        if header["n"] != self._batches:
            raise WorkerEnded(f"the pong says {header['n']}, the ping said {self._batches}")

    def _read(self, *kinds: str) -> Frame:
        """Waits for a message of one of the kinds; notes what the worker says about itself."""
        connection = self._open()
        while True:
            try:
                header, body = connection.read()
            except socket.timeout:
                self._abort()
                text = f"the worker said nothing for {self._patience:g} s, a {kinds[0]} was awaited"
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
        """Returns the end of the connection as an error, with the last that the worker said."""
        said = next((s for s in reversed(self.states) if s.get("message")), {})
        last = said.get("message", "")
        if said.get("type") == "error":
            last = f"{said.get('error', '')}: {last}"
        where = " in the middle of a frame" if "middle" in str(error) else ""
        text = f"the worker ended{where}: {self._how()}{last and ': ' + last}"
        return WorkerEnded(text, said.get("traceback", ""), last)

    def _abort(self) -> None:
        """Ends a process that says nothing by SIGABRT, at which faulthandler tells what its threads are at."""
        if self.process is None:
            return
        try:
            self.process.send_signal(signal.SIGABRT)
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            pass

    # --- stopping ----------------------------------------------------------

    def stop(self, timeout_s: float = 5) -> Optional[int]:
        """Asks the worker to leave and returns its exit code; after the time it is killed."""
        if self.connection is None:
            return self._code()
        try:
            self.connection.send(message("shutdown", {"timeout": int(timeout_s * 1000)}))
            self.connection.sock.settimeout(timeout_s)
            while True:
                self.states.append(self.connection.read()[0])
        except (Ended, Violation, OSError):
            pass
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 5) -> Optional[int]:
        """Waits for the worker's end and returns its exit code; after the time it is killed."""
        if self.process is not None:
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                pass
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
        try:
            code = self.process.wait(2)
        except subprocess.TimeoutExpired:
            return "its process is still there"
        if code < 0:
            return f"its process was ended by {_SIGNALS.get(-code, -code)}"
        return f"its process exited with {code}"

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
    """One request's answer on its way: iterates over its chunks, which are dicts of outputs by name.

    As a context it is cancelled at the end, where it is not over.
    """

    def __init__(self, run: Run, batch: int) -> None:
        self._run = run
        self.batch = batch  # its number
        self._outcome: Optional[Outcome] = None

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._outcome is None and self._run.connection is not None:
            self.cancel()
            self.end()

    def __iter__(self) -> Iterator[Dict[str, Any]]:
        """Yields the chunks as they come."""
        while self._outcome is None:
            frame = self._run._chunk(self.batch)
            if frame is None:
                return
            yield self._run._values(*frame)

    def cancel(self) -> None:
        """Says that nobody waits for it any more. The outcome comes still, and does not matter."""
        self._run.tell("cancel", batch=self.batch)

    def end(self) -> Outcome:
        """Waits for the end and returns the outcome; chunks that were not taken are dropped. Raises BatchFailed."""
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
        """What became of the request: the whole answer, where the worker collects it, or an error."""
        return self.end()


_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def spec_of(entry: Mapping[str, Any]) -> Spec:
    """Returns the spec that a worker's ready has of one input or output."""
    optional, description = entry.get("optional", False), entry.get("description", "")
    if "datatype" in entry:
        variable = entry.get("variable", "exact")
        return Tensor(entry["datatype"], entry["shape"], variable=variable, optional=optional, description=description)
    types = tuple(entry.get("content_types", ()))
    kind = Bytes
    if types and all(t.startswith("text/") for t in types):
        kind = Text
    elif types and all(t == "application/json" or t.endswith("+json") or is_packed(t) for t in types):
        return Json(*types, schema=entry.get("schema"), optional=optional, description=description)
    return kind(*types, optional=optional, description=description)


def _lay_out(layout: Layout, name: str, bodies: List[Optional[Body]], joins: bool) -> None:
    """Adds one input of all items: joined where it can be."""
    raws = [body for body in bodies if isinstance(body, Raw)]
    same = len({(raw.datatype, raw.shape[1:]) for raw in raws}) == 1
    if joins and len(raws) == len(bodies) and same:
        layout.joined(name, raws)
        return
    for i, body in enumerate(bodies):
        if isinstance(body, (Raw, Blob)):
            layout.add(name, i, body)
