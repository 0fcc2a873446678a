"""One item's answer in chunks: encodes each, and puts the whole together.

There are no sockets, threads and clocks here: a Stream turns what the author's
generator yields into frames, and its end, or what it raised, into the frame that ends
the batch. What chunks are made of is bounded by the longest body that the host takes.
"""

from __future__ import annotations

import logging
from typing import Any, Dict, Generator, Mapping, Optional, Tuple, Union

from .arrays import Arrays
from .batches import Batch, Item
from .faults import ItemFailed, text_of
from .frames import as_bytes
from .outputs import BadOutput, check_names, item_body, lacks
from .packing import array_of, is_packed
from .parts import Blob, Body, Layout, Raw
from .runs import Reply, Runs
from .specs import Bytes, Json, Spec, Tensor
from .worker import Worker

log = logging.getLogger("stagemesh.worker")


class Stream:
    """The answer to the one item of a batch, for one thread at a time.

    unwanted says that no more of it is to be made, since nobody waits for it or the
    process has to end; left, that the host is not told what became of it.
    """

    def __init__(self, worker: Worker, runs: Runs, arrays: Arrays, batch: Batch, max_frame: int) -> None:
        self.batch = batch
        self.left = False
        self._runs = runs
        self._arrays = arrays
        self._outputs: Mapping[str, Spec] = worker.outputs
        self._only = next(iter(worker.outputs)) if len(worker.outputs) == 1 else None
        self._max_frame = max_frame
        self._name = type(worker).__name__
        self._whole = Whole(worker.outputs, max_frame) if worker.collect and runs.answers else None
        self._view = batch
        self._chunks = 0

    @property
    def unwanted(self) -> bool:
        """Whether no more of it is to be made."""
        return self.left or bool(self.batch._cancelled)

    @property
    def item(self) -> Item:
        """The request."""
        return self._view.items[0]

    def open(self) -> bool:
        """Decodes the inputs; reports whether the item is to be run."""
        self._view = self._runs.decoded(self.batch)
        return bool(self._view._kept) and not self.unwanted

    # --- chunks ------------------------------------------------------------

    def chunk(self, value: Any) -> Optional[Reply]:
        """Returns the frame of what was yielded; None where this rank says nothing. Raises BadOutput."""
        self._chunks += 1
        layout = Layout()
        bodies: Dict[str, Body] = {}
        for name, one in self._named(value).items():
            spec = self._outputs.get(name)
            if self._outputs and spec is None:
                names = ", ".join(map(repr, self._outputs))
                raise BadOutput(f"chunk {self._chunks} has output {name!r}, which is not declared; outputs are {names}")
            if lacks(one, spec):
                continue
            body = item_body(f"chunk {self._chunks}: output {name!r}", one, spec, self._arrays, None)
            layout.add(name, None, body)
            bodies[name] = body
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

    def _named(self, value: Any) -> Mapping[str, Any]:
        if type(value) is dict or isinstance(value, Mapping):
            return value
        if self._only is not None:
            return {self._only: value}
        names = ", ".join(map(repr, self._outputs)) or "none is declared"
        raise BadOutput(f"chunk {self._chunks} is a {type(value).__name__}; yield a dict of outputs by name: {names}")

    def values(self, generator: Generator[Any, None, Any]) -> Generator[Any, None, None]:
        """Yields what a plain generator yields, and says where it returns something."""
        returned = yield from generator
        if returned is not None:
            kind = type(returned).__name__
            log.warning("%s.stream returned a %s, which nobody gets: yield it", self._name, kind)

    # --- the end -----------------------------------------------------------

    def end(self) -> Reply:
        """Returns the frame that ends the batch, after the last chunk. Raises BadOutput."""
        layout = Layout()
        if self.batch._faults:
            return self._runs.result(self.batch, layout)
        if self.unwanted:
            return self._called_off()
        if self._whole is not None:
            for name, body in self._whole.outputs().items():
                layout.add(name, 0, body)
        return self._runs.result(self.batch, layout)

    def failed(self, error: BaseException) -> Reply:
        """Returns the frame that ends the batch after an error."""
        if self.unwanted:
            if isinstance(error, Exception):  # no CancelledError, which is what was asked for
                what = f"{type(error).__name__}: {text_of(error)}"
                log.warning("request %s: %s.stream ended with %s", self.item.id, self._name, what)
            return self._called_off()
        if isinstance(error, BadOutput):
            log.error("request %s: stream: %s", self.item.id, error)
            return self._runs.error(self.batch, error)
        if isinstance(error, TooLong):
            log.error("request %s: stream: %s: say collect = False where callers take chunks only", self.item.id, error)
        self._runs.fault(self._view, 0, "stream", error)
        try:
            return self._runs.result(self.batch, Layout())
        except BadOutput as another:  # of what it responded with
            return self._runs.error(self.batch, another)

    def _called_off(self) -> Reply:
        self.batch.fail(0, ItemFailed("the request was cancelled"))
        return self._runs.result(self.batch, Layout())


class TooLong(ItemFailed):
    """The whole answer is longer than what the host takes."""


# Of a blob its content type; of a tensor its datatype and a row's shape, None of one without axes.
Kind = Union[str, Tuple[str, Optional[Tuple[int, ...]]]]


def _kind(body: Body) -> Kind:
    if isinstance(body, Blob):
        return body.content_type
    return body.datatype, body.shape[1:] if body.shape else None


def _words(kind: Kind) -> str:
    if isinstance(kind, str):
        return f"a blob of {kind}"
    datatype, row = kind
    return f"{datatype} without axes" if row is None else f"{datatype} {['any', *row]}".replace("'", "")


def _list(content_type: str, documents: int, joined: bytearray) -> Union[bytes, bytearray]:
    """Returns the list of documents that were joined, in JSON by commas."""
    return array_of(documents, joined) if is_packed(content_type) else b"[" + joined + b"]"


class Whole:
    """A whole answer, put together from chunks: limit is what it may take, in bytes.

    Text and bytes are joined, tensors on axis 0 where they have one, and documents
    become a list of them, in JSON or MessagePack as they are. Of tensors without axes the last is taken.
    """

    def __init__(self, specs: Mapping[str, Spec], limit: int) -> None:
        self._specs = specs
        self._limit = limit
        self._size = 0
        self._data: Dict[str, bytearray] = {}
        self._kinds: Dict[str, Kind] = {}  # what all chunks of an output have in common
        self._rows: Dict[str, int] = {}  # of tensors; of documents how many

    def add(self, name: str, body: Body) -> None:
        """Adds an output of a chunk; raises BadOutput, or ItemFailed where there is too much of it."""
        kind = _kind(body)
        known = self._kinds.setdefault(name, kind)
        if kind != known:
            raise BadOutput(
                f"output {name!r} is {_words(kind)}, and was {_words(known)} in a chunk before, so they cannot be "
                "joined: yield chunks that can, or say collect = False"
            )
        data = self._data.get(name)
        if data is None:
            data = self._data[name] = bytearray()
            self._rows[name] = 0
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
        """Returns the outputs by name. Raises BadOutput where one is missing."""
        out: Dict[str, Body] = {}
        for name, data in self._data.items():
            kind = self._kinds[name]
            if isinstance(kind, str):
                document = isinstance(self._specs.get(name), Json)
                out[name] = Blob(kind, _list(kind, self._rows[name], data) if document else data)
                continue
            datatype, row = kind
            shape = () if row is None else (self._rows[name], *row)
            spec = self._specs.get(name)
            if isinstance(spec, Tensor) and not spec.fits(shape):
                raise BadOutput(
                    f"output {name!r}: its chunks have shape {list(shape)} together, wanted {list(spec.shape)}: "
                    "declare -1 for axis 0, or say collect = False"
                )
            out[name] = Raw(datatype, shape, data, len(data))
        for name, want in self._specs.items():
            if name not in out and isinstance(want, Bytes) and not want.optional:
                empty = _list(want.content_type, 0, bytearray()) if isinstance(want, Json) else b""
                out[name] = Blob(want.content_type, empty)
        check_names("stream", out, self._specs, of_item=True)
        return out
