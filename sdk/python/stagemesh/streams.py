"""Streams: one item's answer in chunks, and the event loop that runs async generators.

A ``Stream`` turns the values that a worker's generator yields into frames, and its end
into the frame that ends the batch; it has no socket, thread or clock. Plain generators
run in a thread each (``Stream.run``); those of ``async def`` share one event loop in a
thread (``StreamLoop``).

A chunk is sent by the thread that made it, which waits if the host does not read. The
event loop tries to send without waiting first. Frames that cannot be sent at once are
sent by another thread, in order, while the other streams continue.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Callable, Dict, Generator, Mapping, Optional, Sequence, Set, Tuple, Union

from .arrays import Arrays
from .batches import Batch
from .faults import ItemFailed, ModelGone, text_of
from .frames import Buffer, Connection, Ended, as_bytes
from .parts import Blob, Body, Layout, Raw
from .runs import Reply, Runs
from .specs import Bytes, Json, Spec, Tensor, is_packed
from .values import BadOutput, Encoder
from .worker import Worker

log = logging.getLogger("stagemesh.worker")

# The longest time that one stream may keep the event loop if it yields without waiting, in seconds.
_TURN_S = 0.001


class Stream:
    """The answer to the one item of a batch, for one thread at a time.

    max_frame bounds a chunk and the whole answer, in bytes. abandoned is true if the host
    gets no reply, because the connection or the process ends.
    """

    def __init__(self, worker: Worker, runs: Runs, arrays: Arrays, batch: Batch, max_frame: int) -> None:
        self.batch = batch
        self.abandoned = False
        self._runs = runs
        self._worker = worker
        self._outputs = Encoder(worker.outputs, arrays, joins=False)
        self._only = next(iter(worker.outputs)) if len(worker.outputs) == 1 else None
        self._max_frame = max_frame
        self._name = type(worker).__name__
        self._whole = Whole(worker.outputs, max_frame) if worker.collect and runs.answers else None
        self._view = batch
        self._chunks = 0

    @property
    def cancelled(self) -> bool:
        """Whether the generator should stop, since nobody gets the rest of the answer."""
        return self.abandoned or bool(self.batch._cancelled)

    # --- the generator -------------------------------------------------------

    def run(self, send: Callable[[bytes, Sequence[Buffer], int], None]) -> Reply:
        """Runs a plain generator and sends its chunks; returns the reply that ends the batch. Raises Ended."""
        try:
            if self._decode():
                generator: Any = self._worker.stream(self._view.items[0])
                with self.batch.span("stream"):
                    try:
                        for value in self._yields_of(generator):
                            if self.cancelled:
                                break
                            chunk = self._chunk(value)
                            if chunk is not None:
                                send(*chunk)
                    finally:
                        generator.close()
            return self._end()
        except BaseException as error:
            return self._failed(error)

    async def run_async(self, send: Callable[..., Any]) -> Reply:
        """Runs an async generator, as run does."""
        try:
            if self._decode():
                generator: Any = self._worker.stream(self._view.items[0])
                turn_ends = time.monotonic() + _TURN_S
                with self.batch.span("stream"):
                    try:
                        async for value in generator:
                            if self.cancelled:
                                break
                            chunk = self._chunk(value)
                            if chunk is not None:
                                await send(*chunk)
                            now = time.monotonic()
                            if now > turn_ends:  # let the other streams run, if this one never waits
                                await asyncio.sleep(0)
                                turn_ends = now + _TURN_S
                    finally:
                        await generator.aclose()
            return self._end()
        except BaseException as error:
            return self._failed(error)

    def _decode(self) -> bool:
        """Decodes the inputs; reports whether the generator should run. Raises ModelGone."""
        self._runs.find_model(self.batch)
        self._view = self._runs.decoded(self.batch)
        return bool(self._view._kept) and not self.cancelled

    def _yields_of(self, generator: Generator[Any, None, Any]) -> Generator[Any, None, None]:
        """Yields the values of a plain generator, and warns if it returns one."""
        returned = yield from generator
        if returned is not None:
            kind = type(returned).__name__
            log.warning("%s.stream returned a %s, which is ignored: yield it", self._name, kind)

    # --- frames ------------------------------------------------------------

    def _chunk(self, value: Any) -> Optional[Reply]:
        """Returns the frame of a yielded value; None if this rank's outputs are not sent. Raises BadOutput."""
        self._chunks += 1
        specs = self._outputs.specs
        layout = Layout()
        bodies: Dict[str, Body] = {}
        for name, one in self._by_name(value).items():
            if specs and name not in specs:
                names = ", ".join(map(repr, specs))
                raise BadOutput(f"chunk {self._chunks} has output {name!r}, which is not declared; outputs are {names}")
            if not self._outputs.lacks(name, one):
                bodies[name] = self._outputs.item(f"chunk {self._chunks}: output {name!r}", name, one)
                layout.add(name, None, bodies[name])
        if not bodies:
            raise BadOutput(f"chunk {self._chunks} has no outputs; a chunk has one of them or more")
        if layout.size > self._max_frame:
            raise BadOutput(
                f"chunk {self._chunks} takes {layout.size} bytes, and the host takes {self._max_frame} in a frame: "
                "yield smaller ones"
            )
        if self._whole is not None:
            for name, body in bodies.items():
                self._whole.add(name, body)
        if not self._runs.answers:
            return None
        header = f'{{"type":"chunk","batch":{self.batch.id},"item":0,"parts":[{",".join(layout.entries)}]}}'
        return header.encode("ascii"), layout.pieces, layout.size

    def _by_name(self, value: Any) -> Mapping[str, Any]:
        if type(value) is dict or isinstance(value, Mapping):
            return value
        if self._only is not None:
            return {self._only: value}
        names = ", ".join(map(repr, self._outputs.specs)) or "none is declared"
        raise BadOutput(f"chunk {self._chunks} is a {type(value).__name__}; yield a dict of outputs by name: {names}")

    def _end(self) -> Reply:
        """Returns the frame that ends the batch after the last chunk. Raises BadOutput."""
        layout = Layout()
        if not self.batch._faults:
            if self.cancelled:
                return self._end_cancelled()
            if self._whole is not None:
                for name, body in self._whole.outputs().items():
                    layout.add(name, 0, body)
        return self._runs.result(self.batch, layout)

    def _failed(self, error: BaseException) -> Reply:
        """Returns the frame that ends the batch after an error; raises it if it ends the connection or a child."""
        if isinstance(error, Ended) or self._runs.in_forked_child():
            raise error
        try:
            return self._end_failed(error)
        except BaseException as another:  # of a log handler, or metadata that are too long
            return self._runs.error(self.batch, another)

    def _end_failed(self, error: BaseException) -> Reply:
        if self.cancelled:
            if isinstance(error, Exception):  # CancelledError is expected, and no Exception
                request = self._view.items[0].id
                log.warning(
                    "request %s: %s.stream ended with %s: %s", request, self._name, type(error).__name__, text_of(error)
                )
            return self._end_cancelled()
        request = self._view.items[0].id
        if isinstance(error, (BadOutput, ModelGone)):
            return self._runs.error(self.batch, error)
        if isinstance(error, TooLong):
            log.error("request %s: stream: %s: set collect = False where callers take chunks only", request, error)
        self._view.fail(0, error)
        return self._runs.result(self.batch, Layout())

    def _end_cancelled(self) -> Reply:
        self.batch.fail(0, ItemFailed("the request was cancelled"))
        return self._runs.result(self.batch, Layout())


# --- the whole answer --------------------------------------------------------------


class TooLong(ItemFailed):
    """The whole answer is longer than the host accepts."""


# The content type of a blob; the datatype of a tensor and the shape of a row, None without axes.
Kind = Union[str, Tuple[str, Optional[Tuple[int, ...]]]]


def _kind_text(kind: Kind) -> str:
    if isinstance(kind, str):
        return f"a blob of {kind}"
    datatype, row = kind
    return f"{datatype} without axes" if row is None else f"{datatype} {['any', *row]}".replace("'", "")


class Whole:
    """The whole answer, put together from its chunks; limit bounds its bytes.

    Text and bytes are concatenated, tensors joined on axis 0, and documents become a list
    of documents. Of tensors without axes the last one counts.
    """

    def __init__(self, specs: Mapping[str, Spec], limit: int) -> None:
        self._specs = specs
        self._limit = limit
        self._size = 0
        self._data: Dict[str, bytearray] = {}
        self._kinds: Dict[str, Kind] = {}
        self._rows: Dict[str, int] = {}  # of tensors; of documents their number

    def add(self, name: str, body: Body) -> None:
        """Adds an output of a chunk; raises BadOutput if it cannot be joined, TooLong beyond the limit."""
        kind: Kind
        if isinstance(body, Blob):
            kind = body.content_type
        else:
            kind = body.datatype, body.shape[1:] if body.shape else None
        known = self._kinds.setdefault(name, kind)
        if kind != known:
            raise BadOutput(
                f"output {name!r} is {_kind_text(kind)}, and was {_kind_text(known)} in a chunk before, so they "
                "cannot be joined: yield chunks that can, or set collect = False"
            )
        data = self._data.setdefault(name, bytearray())
        self._rows.setdefault(name, 0)
        before = len(data)
        if isinstance(body, Raw):
            self._rows[name] += body.shape[0] if body.shape else 0
            if not body.shape:
                data.clear()
            if body.size:
                data += as_bytes(body.data)
        else:
            if isinstance(self._specs.get(name), Json):
                self._rows[name] += 1
                if before and not is_packed(body.content_type):
                    data += b","
            data += body.data
        self._size += len(data) - before
        if self._size > self._limit:
            raise TooLong(f"the whole answer takes more than the {self._limit} bytes that the host takes at once")

    def outputs(self) -> Dict[str, Body]:
        """Returns the outputs by name. Raises BadOutput if one is missing or does not fit its spec."""
        out: Dict[str, Body] = {}
        for name, data in self._data.items():
            kind = self._kinds[name]
            spec = self._specs.get(name)
            if isinstance(kind, str):
                out[name] = Blob(kind, spec.join(self._rows[name], data, kind) if isinstance(spec, Json) else data)
                continue
            datatype, row = kind
            shape = () if row is None else (self._rows[name], *row)
            if isinstance(spec, Tensor) and not spec.fits(shape):
                raise BadOutput(
                    f"output {name!r}: its chunks have shape {list(shape)} together, expected {list(spec.shape)}: "
                    "declare -1 for axis 0, or set collect = False"
                )
            out[name] = Raw(datatype, shape, data, len(data))
        for name, spec in self._specs.items():
            if name in out or spec.optional:
                continue
            if not isinstance(spec, Bytes):
                there = ", ".join(map(repr, out)) or "none"
                raise BadOutput(f"stream returned no output {name!r}; it has {there}")
            empty = spec.join(0, b"", spec.content_type) if isinstance(spec, Json) else b""
            out[name] = Blob(spec.content_type, empty)
        return out


# --- async generators --------------------------------------------------------------


class StreamLoop:
    """Runs async generators, as tasks of one event loop in a thread.

    release is called with each stream that has ended, before its reply is sent; broken is
    called with the error that ends the event loop.
    """

    def __init__(
        self, connection: Connection, release: Callable[[Batch], None], broken: Callable[[BaseException], None]
    ) -> None:
        self._connection = connection
        self._release = release
        self._broken = broken
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="stagemesh-streams", daemon=True)
        self._writer = ThreadPoolExecutor(1, "stagemesh-writer")
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._closing: Optional[asyncio.Event] = None
        # Used by the loop's thread alone.
        self._tasks: Dict[Stream, asyncio.Task[None]] = {}
        self._cancellable: Set[Stream] = set()  # whose generators run and were not cancelled
        self._writes = 0  # frames that the writer has not sent yet

    def start(self) -> None:
        """Starts the thread, and waits until the loop runs."""
        self._thread.start()
        self._started.wait()

    def begin(self, stream: Stream) -> None:
        """Starts a stream."""
        self._call(self._begin, stream)

    def cancel(self, stream: Stream) -> None:
        """Cancels a stream's task: only once, since a second time would interrupt its cleanup."""
        self._call(self._cancel, stream)

    def close(self, timeout_s: Optional[float]) -> bool:
        """Waits for the running streams, and reports whether they have ended."""
        if self._closing is not None:
            self._call(self._closing.set)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            pass  # the loop has ended, and broken was called

    def _serve(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._broken(error)
        finally:
            self._started.set()
            self._writer.shutdown(wait=False)  # not earlier: it may have to finish a frame

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        self._started.set()
        await self._closing.wait()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    # --- in the loop -----------------------------------------------------------

    def _begin(self, stream: Stream) -> None:
        self._tasks[stream] = asyncio.ensure_future(self._run(stream))

    def _cancel(self, stream: Stream) -> None:
        if stream in self._cancellable:
            self._cancellable.remove(stream)
            self._tasks[stream].cancel()

    async def _run(self, stream: Stream) -> None:
        try:
            self._cancellable.add(stream)
            try:
                reply = await stream.run_async(self._send)
            finally:
                self._cancellable.discard(stream)
            abandoned = stream.abandoned
            self._release(stream.batch)
            if not abandoned:
                await self._send(*reply)
        except Ended:
            pass  # the thread that reads gets this error too
        finally:
            self._release(stream.batch)
            del self._tasks[stream]

    async def _send(self, header: bytes, pieces: Sequence[Buffer], size: int) -> None:
        """Sends a frame; if that would wait, the writer sends the rest, and all frames after it."""
        rest: Optional[Callable[[], None]] = partial(self._connection.send, header, pieces, size)
        if self._writes == 0:
            rest = self._connection.send_now(header, pieces, size)
        if rest is None:
            return
        self._writes += 1
        written = asyncio.get_running_loop().run_in_executor(self._writer, rest)
        written.add_done_callback(self._count_written)
        await asyncio.shield(written)  # a frame that is begun has to be finished

    def _count_written(self, written: asyncio.Future[None]) -> None:
        self._writes -= 1
        if not written.cancelled():
            written.exception()  # the task that waits for it handles it
