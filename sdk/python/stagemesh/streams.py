"""Serves a worker that streams: many items at a time, each with a generator of its own.

The main thread reads on while streams run, so a cancel is heard at once. Generators
by ``async def`` share one event loop in a thread; others run in a thread each.

A chunk is written by whoever made it, which waits where the host makes no room. In
the event loop that is tried without waiting first; what does not go at once is
written by another thread, in order, while the other streams go on.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import select
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence, Set, Union

from .arrays import Arrays
from .chunks import Stream
from .faults import text_of
from .frames import Buffer, Connection, Ended, Frame, Header, Violation
from .life import EXIT_FAILED, EXIT_UNFINISHED, say
from .runs import Reply, Runs
from .worker import Worker

if TYPE_CHECKING:
    from .batches import Batch
    from .serving import Session

# How long streams that were told to end may take, in seconds.
_PARTING = 0.5
# How often a worker that leaves looks whether streams are left, in milliseconds.
_LOOK_MS = 20
# How long one stream may keep the event loop by yielding alone, in seconds.
_TURN = 0.001


class Streams:
    """Runs the streams of a session, as many at a time as it has slots."""

    def __init__(
        self, session: Session, connection: Connection, worker: Worker, runs: Runs, arrays: Arrays, slots: int
    ) -> None:
        self._session = session
        self._connection = connection
        self._worker = worker
        self._runs = runs
        self._arrays = arrays
        self._slots = slots
        self._streams: Dict[int, Stream] = {}  # by batch
        self._broken: Optional[BaseException] = None  # of what runs them
        kind = _Loop if inspect.isasyncgenfunction(type(worker).stream) else _Threads
        self._pump: Union[_Loop, _Threads] = kind(self, connection, worker, slots)

    # --- the main thread -----------------------------------------------------

    def run(self) -> int:
        """Reads frames until the end; returns the exit code."""
        session = self._session
        self._pump.start()
        try:
            while not session._stopping:
                frame = self._next()
                if frame is None:
                    break
                self._take(*frame)
            return self._drain()
        except (Ended, Violation):
            self._abandon()  # nobody waits at the other end
            if self._broken is not None:
                what = f"{type(self._broken).__name__}: {text_of(self._broken)}"
                return say(f"the event loop ended: {what}", EXIT_FAILED)
            raise

    def over(self, timeout_s: Optional[float]) -> bool:
        """Waits for the streams in hand, and reports whether they are over."""
        return self._pump.close(timeout_s)

    def called_off(self, batch: Batch) -> None:
        """Ends the stream of a batch that nobody waits for any more."""
        stream = self._streams.get(batch.id)
        if stream is not None and stream.unwanted:
            self._pump.cancel(stream)

    def _next(self) -> Optional[Frame]:
        """Waits for a frame; None where a signal asks to stop, and none has come."""
        life = self._session._life
        life.waiting = True
        try:
            return self._connection.poll() if life.asked else self._connection.read()
        except BlockingIOError:
            return None
        finally:
            life.waiting = False

    def _take(self, header: Header, body: memoryview) -> None:
        if header["type"] != "predict":
            self._session._other(header)
            return
        if len(self._streams) >= self._slots:
            raise Violation("a predict beyond the slots of the worker")
        batch = self._runs.batch(header, body, time.monotonic())
        batch._complete()  # here, since both threads may ask
        if len(batch) != 1:
            raise Violation(f"a predict of {len(batch)} items for a worker that streams")
        if batch.id in self._streams:
            raise Violation(f"batch {batch.id} is there twice")
        stream = Stream(self._worker, self._runs, self._arrays, batch, self._connection.max_body)
        self._session._running[batch.id] = batch
        self._streams[batch.id] = stream
        self._pump.begin(stream)

    def _drain(self) -> int:
        """Says goodbye, and finishes the streams in hand within the time there is; returns the exit code."""
        session = self._session
        began = time.monotonic()
        code = session._leave(_usable(session._grace_s))
        poll = select.poll()
        poll.register(self._connection.sock, select.POLLIN)
        try:
            # The time may come later: a host asks by a signal too.
            while self._streams and time.monotonic() - began < _usable(session._grace_s):
                frame = self._connection.poll()
                if frame is None:
                    poll.poll(_LOOK_MS)
                elif frame[0]["type"] != "predict":  # one that was on its way is left
                    session._other(frame[0])
        except (Ended, Violation):
            pass  # nobody waits at the other end
        if not self._streams:
            return code
        ids = ", ".join(str(number) for number in list(self._streams))
        self._connection.hang_up()  # which ends the wait for room
        self._abandon()
        return say(f"asked to leave, it left batch {ids} unfinished", EXIT_UNFINISHED)

    def _abandon(self) -> None:
        """Ends all streams without a word to the host, and waits a moment for them."""
        for stream in list(self._streams.values()):
            stream.left = True
            self._pump.cancel(stream)
        self._pump.close(_PARTING)

    # --- what runs them --------------------------------------------------------

    def ended(self, stream: Stream) -> None:
        """Frees the slot of a stream: before the host can know that it is free."""
        self._session._running.pop(stream.batch.id, None)
        self._streams.pop(stream.batch.id, None)

    def forked(self) -> bool:
        """Reports whether this is a child that the worker forked."""
        return self._runs.forked()

    def broke(self, error: BaseException) -> None:
        """Ends the worker: what runs its streams does so no more."""
        self._broken = error
        self._connection.hang_up()  # which wakes who reads


def _usable(grace_s: float) -> float:
    """Returns how much of a time to finish in is for the streams, and not for what comes after them."""
    return grace_s - min(_PARTING, grace_s / 4)


def finish(threads: List[threading.Thread], work: queue.SimpleQueue[Any], timeout_s: Optional[float]) -> bool:
    """Tells threads that there is no more work, waits for them, and reports whether they are over."""
    for _ in threads:
        work.put(None)
    end = None if timeout_s is None else time.monotonic() + timeout_s
    for thread in threads:
        thread.join(None if end is None else max(0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


class _Threads:
    """Runs plain generators, each in a thread."""

    def __init__(self, streams: Streams, connection: Connection, worker: Worker, slots: int) -> None:
        self._streams = streams
        self._send = connection.send
        self._worker = worker
        self._waiting: queue.SimpleQueue[Optional[Stream]] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"stagemesh-stream-{i}", daemon=True) for i in range(slots)
        ]

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def begin(self, stream: Stream) -> None:
        """Hands a stream to the next thread that is idle."""
        self._waiting.put(stream)

    def cancel(self, stream: Stream) -> None:
        """Does nothing: the stream is unwanted, which is seen at its next yield."""

    def close(self, timeout_s: Optional[float]) -> bool:
        """Waits for the streams in hand, and reports whether they are over."""
        return finish(self._threads, self._waiting, timeout_s)

    def _work(self) -> None:
        while True:
            stream = self._waiting.get()
            if stream is None:
                return
            try:
                reply = self._run(stream)
                left = stream.left
                self._streams.ended(stream)
                if not left:
                    self._send(*reply)
            except Ended:
                self._streams.ended(stream)  # the thread that reads sees it too

    def _run(self, stream: Stream) -> Reply:
        try:
            if stream.open():
                self._chunks(stream)
            return stream.end()
        except Ended:
            raise
        except BaseException as error:  # a slot is not lost, whatever it is
            if self._streams.forked():
                raise
            return stream.failed(error)

    def _chunks(self, stream: Stream) -> None:
        generator: Any = self._worker.stream(stream.item)
        try:
            for value in stream.values(generator):
                if stream.unwanted:
                    return
                chunk = stream.chunk(value)
                if chunk is not None:
                    self._send(*chunk)
        finally:
            generator.close()


class _Loop:
    """Runs async generators, as tasks of one event loop in a thread."""

    def __init__(self, streams: Streams, connection: Connection, worker: Worker, slots: int) -> None:
        self._streams = streams
        self._connection = connection
        self._worker = worker
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="stagemesh-streams", daemon=True)
        self._writer = ThreadPoolExecutor(1, "stagemesh-writer")
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._closed: Optional[asyncio.Event] = None
        # The loop's own.
        self._tasks: Dict[Stream, asyncio.Task[None]] = {}
        self._running: Set[Stream] = set()  # whose generators run, and were not cancelled
        self._writes = 0  # that the writer has not done

    def start(self) -> None:
        """Starts the thread, and waits until the loop runs."""
        self._thread.start()
        self._up.wait()

    def begin(self, stream: Stream) -> None:
        """Starts a stream."""
        self._call(self._begin, stream)

    def cancel(self, stream: Stream) -> None:
        """Cancels the task of a stream that is unwanted: once, since again would interrupt how it cleans up."""
        self._call(self._cancel, stream)

    def close(self, timeout_s: Optional[float]) -> bool:
        """Waits for the streams in hand, and reports whether they are over."""
        if self._closed is not None:
            self._call(self._closed.set)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            pass  # it has ended: see broke

    def _serve(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            if self._streams.forked():
                raise
            self._streams.broke(error)
        finally:
            self._up.set()
            self._writer.shutdown(wait=False)  # not before: a frame may be left half sent to it

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closed = asyncio.Event()
        self._up.set()
        await self._closed.wait()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    # --- in the loop -----------------------------------------------------------

    def _begin(self, stream: Stream) -> None:
        self._tasks[stream] = asyncio.ensure_future(self._stream(stream))

    def _cancel(self, stream: Stream) -> None:
        if stream in self._running:
            self._running.remove(stream)
            self._tasks[stream].cancel()

    async def _stream(self, stream: Stream) -> None:
        try:
            self._running.add(stream)
            try:
                reply = await self._run(stream)
            finally:
                self._running.discard(stream)
            left = stream.left
            self._streams.ended(stream)
            if not left:
                await self._send(*reply)
        except Ended:
            pass  # the thread that reads sees it too
        finally:
            self._streams.ended(stream)
            del self._tasks[stream]

    async def _run(self, stream: Stream) -> Reply:
        try:
            if stream.open():
                await self._chunks(stream)
            return stream.end()
        except Ended:
            raise
        except BaseException as error:  # sys.exit in stream is no reason to leave
            if self._streams.forked():
                raise
            return stream.failed(error)

    async def _chunks(self, stream: Stream) -> None:
        generator: Any = self._worker.stream(stream.item)
        turn = time.monotonic() + _TURN
        try:
            async for value in generator:
                if stream.unwanted:
                    return
                chunk = stream.chunk(value)
                if chunk is not None:
                    await self._send(*chunk)
                now = time.monotonic()
                if now > turn:  # one that never waits itself
                    await asyncio.sleep(0)
                    turn = now + _TURN
        finally:
            await generator.aclose()

    async def _send(self, header: bytes, pieces: Sequence[Buffer], size: int) -> None:
        """Sends a frame; what does not go at once goes by the writer, as does all that comes after it."""
        rest: Optional[Callable[[], None]] = partial(self._connection.send, header, pieces, size)
        if self._writes == 0:
            rest = self._connection.send_now(header, pieces, size)
        if rest is None:
            return
        self._writes += 1
        written = asyncio.get_running_loop().run_in_executor(self._writer, rest)
        written.add_done_callback(self._written)
        await asyncio.shield(written)  # of half a frame the rest has to follow

    def _written(self, written: asyncio.Future[None]) -> None:
        self._writes -= 1
        if not written.cancelled():
            written.exception()  # who waits for it hears of it
