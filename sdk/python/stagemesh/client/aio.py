"""AsyncMesh: the calls of a mesh for asyncio, by threads of a Mesh.

Cancelling a task ends its call: the connection closes, and with it a request that is neither
durable nor has a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import (
    Any,
    AsyncIterator,
    Callable,
    Deque,
    Generic,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Tuple,
    TypeVar,
    Union,
)

from .calls import Job, JobEvent
from .mesh import Mesh, Outcome
from .transport import Interrupt, all_in_use
from .values import Answer, Chunk

T = TypeVar("T")
_END: Any = object()


class _Places:
    """The places of calls, one for each thread, so that no call waits for a thread that waits for a call."""

    def __init__(self, count: int) -> None:
        self._count = self._free = count
        self._waiting: Deque[asyncio.Future[None]] = deque()

    async def take(self, timeout: Optional[float]) -> None:
        """Waits for a place; raises DeadlineExceeded."""
        if self._free > 0:
            self._free -= 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await asyncio.wait([place], timeout=timeout)
        except BaseException:
            if not self._leave(place):
                self.give()
            raise
        if self._leave(place):
            raise all_in_use(self._count)

    def _leave(self, place: asyncio.Future[None]) -> bool:
        """Waits no more, and reports whether the place is still missing."""
        missing = place.cancel()
        if missing:
            self._waiting.remove(place)
        return missing

    def give(self) -> None:
        """Gives a place back."""
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self._free += 1


class AsyncMesh:
    """A mesh behind the URL of a gateway, for one event loop; Mesh describes the arguments and the methods."""

    def __init__(self, url: str, **settings: Any) -> None:
        self._mesh = Mesh(url, **settings)
        connections = settings.get("connections", 64)
        self._threads = ThreadPoolExecutor(connections, "stagemesh-async")
        self._places = _Places(connections)

    def with_options(self, **options: Any) -> AsyncMesh:
        """Returns the same mesh with other options of calls."""
        out = copy.copy(self)
        out._mesh = self._mesh.with_options(**options)
        return out

    @property
    def jobs(self) -> AsyncJobs:
        """The jobs of the mesh."""
        return AsyncJobs(self)

    async def close(self) -> None:
        """Closes the connections, once nothing uses them."""
        await asyncio.get_running_loop().run_in_executor(None, self._threads.shutdown)
        self._mesh.close()

    async def __aenter__(self) -> AsyncMesh:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"Async{self._mesh!r}"

    async def call(self, function: Callable[[Mesh], T]) -> T:
        """Calls a function with the mesh in a thread."""
        interrupt = Interrupt()
        spent = await self.enter()
        try:
            mesh = self._mesh.bind(interrupt, spent)
            return await self.run(interrupt, lambda: function(mesh))
        finally:
            self.leave()

    async def enter(self) -> float:
        """Waits for the place of a call, and returns how long, in seconds; raises DeadlineExceeded."""
        begun = time.monotonic()
        await self._places.take(self._mesh.options.timeout)
        return time.monotonic() - begun

    def leave(self) -> None:
        """Gives the place of a call back."""
        self._places.give()

    async def run(self, interrupt: Interrupt, function: Callable[[], T]) -> T:
        """Runs a function in a thread, which the interrupt ends."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, function)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            interrupt.set()
            await asyncio.wait([future])
            if not future.cancelled():
                future.exception()  # nobody else asks for it
            raise

    def iterate(self, begin: Callable[[Mesh], Iterator[T]]) -> AsyncIteration[T]:
        """Returns the iterator of a call, for asyncio."""
        return AsyncIteration(self, begin)

    async def infer(self, pipeline: str, inputs: Optional[Mapping[str, Any]] = None, /, **named: Any) -> Answer:
        """Runs a request and returns its answer."""
        return await self.call(lambda mesh: mesh.infer(pipeline, inputs, **named))

    def stream(self, pipeline: str, inputs: Optional[Mapping[str, Any]] = None, /, **named: Any) -> AsyncStream:
        """Runs a request whose answer comes in chunks; it begins with the first."""
        return AsyncStream(self, lambda mesh: mesh.stream(pipeline, inputs, **named))

    def infer_many(
        self, pipeline: str, items: Iterable[Mapping[str, Any]], in_flight: int = 64, ordered: bool = True
    ) -> AsyncIteration[Outcome]:
        """Runs a request for each item, and yields their outcomes."""
        timeout = self._mesh.options.timeout  # of each item: a wait for the thread that begins them counts for none
        return self.iterate(
            lambda mesh: mesh.with_options(timeout=timeout).infer_many(pipeline, items, in_flight, ordered)
        )

    async def result(self, request_id: str = "", *, pipeline: str = "", key: str = "", wait: float = 0) -> Answer:
        """Returns the stored answer of a durable request, or of one with a key."""
        return await self.call(lambda mesh: mesh.result(request_id, pipeline=pipeline, key=key, wait=wait))

    async def cancel(self, request_id: str = "", *, pipeline: str = "", key: str = "") -> None:
        """Cancels a request."""
        await self.call(lambda mesh: mesh.cancel(request_id, pipeline=pipeline, key=key))


class AsyncIteration(AsyncIterator[T], Generic[T]):
    """The values of a call as they come; it begins with the first."""

    def __init__(self, mesh: AsyncMesh, begin: Callable[[Mesh], Iterator[T]]) -> None:
        self._mesh, self._begin, self._interrupt, self._spent = mesh, begin, Interrupt(), 0.0
        self._iterator: Any = None
        self._loop: Optional[asyncio.AbstractEventLoop] = None  # while it has a place

    async def __anext__(self) -> T:
        if self._iterator is None and self._loop is None:
            self._spent = await self._mesh.enter()
            self._loop = asyncio.get_running_loop()
        try:
            value = await self._mesh.run(self._interrupt, self._next)
        except (Exception, asyncio.CancelledError):  # in others, such as GeneratorExit, nothing may be awaited
            await self.close()
            raise
        if value is _END:
            self._leave()
            raise StopAsyncIteration
        return value

    def _leave(self) -> None:
        if self._loop is not None:
            self._loop = None
            self._mesh.leave()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # such as that of a loop that is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._mesh.leave)

    def _next(self) -> T:
        if self._iterator is None:
            self._iterator = self._begin(self._mesh._mesh.bind(self._interrupt, self._spent))
        value: T = next(self._iterator, _END)
        return value

    async def close(self) -> None:
        """Ends the call, if it has not ended."""
        try:
            if self._iterator is not None:
                await self._mesh.run(self._interrupt, self._iterator.close)
        finally:
            self._leave()

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncStream(AsyncIteration[Chunk]):
    """The chunks of an answer as they arrive; ``answer`` is the whole one, after the last."""

    @property
    def answer(self) -> Optional[Answer]:
        """The whole answer; None before the end."""
        answer: Optional[Answer] = getattr(self._iterator, "answer", None)
        return answer


class AsyncJobs:
    """The jobs of a mesh; Jobs describes the methods."""

    def __init__(self, mesh: AsyncMesh) -> None:
        self._mesh = mesh

    async def submit(self, queue: str, inputs: Optional[Mapping[str, Any]] = None, /, **named: Any) -> Job:
        """Submits a job."""
        return await self._mesh.call(lambda mesh: mesh.jobs.submit(queue, inputs, **named))

    async def get(self, job: Union[Job, str]) -> Job:
        """Returns a job as it is now."""
        return await self._mesh.call(lambda mesh: mesh.jobs.get(job))

    async def cancel(self, job: Union[Job, str]) -> Job:
        """Cancels a job."""
        return await self._mesh.call(lambda mesh: mesh.jobs.cancel(job))

    async def explain(self, job: Union[Job, str]) -> Mapping[str, Any]:
        """Returns what holds a job."""
        return await self._mesh.call(lambda mesh: mesh.jobs.explain(job))

    async def wait(self, job: Union[Job, str], timeout: Optional[float] = None) -> Job:
        """Returns a job once it has ended."""
        return await self._mesh.call(lambda mesh: mesh.jobs.wait(job, timeout))

    async def result(self, job: Union[Job, str], timeout: Optional[float] = None) -> Answer:
        """Returns the answer of a job."""
        return await self._mesh.call(lambda mesh: mesh.jobs.result(job, timeout))

    async def list(self, queue: str, **page: Any) -> Tuple[List[Job], int]:
        """Returns jobs of a queue, and the number after which the next page begins."""
        return await self._mesh.call(lambda mesh: mesh.jobs.list(queue, **page))

    def watch(self, job: Union[Job, str]) -> AsyncIteration[JobEvent]:
        """Yields the events of a job until its end."""
        return self._mesh.iterate(lambda mesh: mesh.jobs.watch(job))
