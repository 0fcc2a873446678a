"""What the clients stand on that ``stagemesh client python`` makes: types of values, and checks before a call."""

from __future__ import annotations

import os
from typing import (
    Any,
    AsyncIterator,
    BinaryIO,
    Callable,
    Dict,
    Generic,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    TextIO,
    Tuple,
    TypeVar,
    Union,
)

from .aio import AsyncStream
from .faults import InvalidArgument
from .mesh import Stream
from .values import Answer, Blob, Chunk, Tensor

# The bytes of a blob; without a content type they have the only one that the stage declares.
Bytes = Union[bytes, bytearray, memoryview, BinaryIO, "os.PathLike[str]", Blob]
# A text; a str is sent as text/plain.
Text = Union[str, TextIO, Bytes]
# A document of JSON; no str, which would be sent as text.
Document = Union[Dict[str, Any], List[Any], Tuple[Any, ...], bool, int, float, None, Bytes]

C = TypeVar("C")
A = TypeVar("A")


class Part(NamedTuple):
    """An input of a pipeline: a tensor if it has a datatype. With rows, one row may come without axis 0."""

    name: str
    datatype: str = ""
    shape: Sequence[int] = ()
    rows: bool = False
    optional: bool = False


def inputs(parts: Sequence[Part], *values: Any) -> Dict[str, Any]:
    """Returns the inputs of a call by their names; raises InvalidArgument for a tensor that does not fit.

    An optional input that is None is left out.
    """
    out: Dict[str, Any] = {}
    for part, value in zip(parts, values):
        if value is not None or not part.optional:
            out[part.name] = _tensor(part, value) if part.datatype else value
    return out


def _tensor(part: Part, value: Any) -> Tensor:
    try:
        out = value if isinstance(value, Tensor) else Tensor.of_array(value, part.datatype)
    except (TypeError, ValueError) as error:
        raise _misfit(part, str(error)) from error
    shapes = [part.shape, part.shape[1:]] if part.rows and part.shape else [part.shape]
    if out.datatype != part.datatype or not any(_fits(out.shape, shape) for shape in shapes):
        axes = ", ".join("any" if extent < 0 else str(extent) for extent in part.shape)
        raise _misfit(part, f"got {out.datatype}{list(out.shape)}, expected {part.datatype}[{axes}]")
    return out


def _fits(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    return len(shape) == len(wanted) and all(want in (-1, extent) for extent, want in zip(shape, wanted))


def _misfit(part: Part, what: str) -> InvalidArgument:
    violations = [(f"inputs.{part.name}", what)]
    return InvalidArgument(f"input {part.name!r}: {what}", reason="INVALID_INPUT", violations=violations)


class TypedStream(Iterator[C], Generic[C, A]):
    """A Stream whose chunks and answer have types."""

    def __init__(self, stream: Stream, chunk: Callable[[Chunk], C], answer: Callable[[Answer], A]) -> None:
        self._stream, self._chunk, self._answer = stream, chunk, answer

    @property
    def answer(self) -> Optional[A]:
        """The whole answer; None before the end."""
        whole = self._stream.answer
        return None if whole is None else self._answer(whole)

    def __next__(self) -> C:
        return self._chunk(next(self._stream))

    def close(self) -> None:
        """Ends the stream."""
        self._stream.close()

    def __enter__(self) -> TypedStream[C, A]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TypedAsyncStream(AsyncIterator[C], Generic[C, A]):
    """An AsyncStream whose chunks and answer have types."""

    def __init__(self, stream: AsyncStream, chunk: Callable[[Chunk], C], answer: Callable[[Answer], A]) -> None:
        self._stream, self._chunk, self._answer = stream, chunk, answer

    @property
    def answer(self) -> Optional[A]:
        """The whole answer; None before the end."""
        whole = self._stream.answer
        return None if whole is None else self._answer(whole)

    async def __anext__(self) -> C:
        return self._chunk(await self._stream.__anext__())

    async def close(self) -> None:
        """Ends the stream, if it has not ended."""
        await self._stream.close()

    async def __aenter__(self) -> TypedAsyncStream[C, A]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
