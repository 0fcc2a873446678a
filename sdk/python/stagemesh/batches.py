"""A batch, as a worker sees it: the inputs by name, and its items.

    batch["x"]                   # all rows of input x: one array [N, ...]
    batch.items[3].parameters    # of the fourth item
    batch.fail(3, InvalidInput("x", "is not finite"))

Arrays are views of the bytes that came; nothing is copied, and what nobody asks
for is not made. Threads of the author may use a batch too, until predict returns.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from .arrays import Arrays
from .faults import ItemError, text_of
from .frames import Header
from .parts import Blob, Column, Raw, join_rows, split_rows
from .specs import Spec, Tensor

__all__ = ["Batch", "Item"]

log = logging.getLogger("stagemesh.worker")


class Item:
    """One request of a batch.

    id          the request's, a string
    rows        its extent on axis 0
    parameters  of the request and the step: booleans, whole and other numbers, strings
    metadata    of the caller, strings by name
    deadline    when nobody waits for it any more, in seconds of time.monotonic(); None: never
    index       its place in batch.items
    """

    __slots__ = ("_of", "deadline", "id", "index", "metadata", "number", "parameters", "rows")

    def __init__(self, batch: Batch, index: int, number: int, header: Mapping[str, Any], received: float) -> None:
        self._of = weakref.ref(batch)  # a cycle would keep the batch's bytes
        self.index = index
        self.number = number  # its place in the message
        self.id: str = header["id"]
        self.rows: int = header.get("rows", 1)
        self.parameters: Mapping[str, Union[bool, int, float, str]] = header.get("parameters", _NOTHING)
        self.metadata: Mapping[str, str] = header.get("metadata", _NOTHING)
        timeout = header.get("timeout")
        self.deadline: Optional[float] = received + timeout / 1000 if timeout else None

    @property
    def _batch(self) -> Batch:
        batch = self._of()
        if batch is None:
            raise ReferenceError(f"request {self.id}: its batch is over, and its inputs with it")
        return batch

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for this item any more; asks the connection each time."""
        return self._batch._is_cancelled(self.number)

    @property
    def slice(self) -> slice:
        """Its rows in arrays of the whole batch: ``batch["x"][item.slice]``."""
        starts = self._batch._starts()
        return slice(starts[self.index], starts[self.index + 1])

    def __getitem__(self, name: str) -> Any:
        """Returns this item's own value of an input: an array [rows, ...], bytes, a str, a document."""
        value = self._batch._column(name).of(self.index)
        if value is ABSENT:
            raise KeyError(name)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """Returns this item's value of an input, or the default where it has none."""
        try:
            return self[name]
        except KeyError:
            return default

    def __contains__(self, name: str) -> bool:
        return self.get(name, ABSENT) is not ABSENT

    @property
    def state(self) -> Any:
        """Whatever preprocess left here for predict and postprocess; None before."""
        return self._batch._states.get(self.number)

    @state.setter
    def state(self, value: Any) -> None:
        self._batch._states[self.number] = value

    def content_type(self, name: str) -> str:
        """Returns the content type that a blob came with; empty where there is none."""
        column = self._batch._columns.get(name)
        part = column[self.number] if isinstance(column, list) else None
        return part.content_type if isinstance(part, Blob) else ""

    def respond(self, name: str, value: str) -> None:
        """Adds a string to the metadata that this item's caller gets beside the outputs."""
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"metadata are strings, got {name!r}: {value!r}")
        self._batch._metadata.setdefault(self.number, {})[name] = value

    def __repr__(self) -> str:
        return f"<Item {self.index} of request {self.id}>"


_NOTHING: Dict[str, Any] = {}


# What an item has of an input that it lacks; None may be a value, as JSON's null is.
ABSENT: Any = object()


class Values:
    """An input that comes as one Python value for each item."""

    def __init__(self, values: List[Any]) -> None:
        self.values = values

    def whole(self) -> Any:
        """Returns what batch[name] is."""
        return [None if value is ABSENT else value for value in self.values]

    def of(self, index: int) -> Any:
        """Returns one item's value; ABSENT where it has none."""
        return self.values[index]

    def shapes(self) -> List[Tuple[int, ...]]:
        """Returns the shape of each item's value; () of what has none."""
        return [tuple(getattr(value, "shape", ())) for value in self.values]

    def keep(self, indices: Sequence[int]) -> Values:
        """Returns the input of some of the items."""
        return Values([self.values[i] for i in indices])

    def stacked(self) -> Any:
        """Raises TypeError: only tensors can be stacked."""
        raise TypeError("only tensors can be stacked")


class Rows(Values):
    """A tensor of all items, joined on axis 0."""

    def __init__(self, raw: Raw, rows: List[int], arrays: Arrays, spec: Optional[Tensor]) -> None:
        self.raw, self.rows, self.arrays, self.spec = raw, rows, arrays, spec
        self._split: Optional[List[Raw]] = None

    def raws(self) -> List[Raw]:
        """Returns the tensor of each item; they share the bytes."""
        if self._split is None:
            self._split = split_rows(self.raw, self.rows)
        return self._split

    def whole(self) -> Any:
        """Returns one array, or a list of arrays where the spec says so."""
        if self.spec is not None and self.spec.variable == "list":
            return [self.arrays.view(raw) for raw in self.raws()]
        if self.spec is not None and self.spec.variable == "pad" and self.spec.multiple > 1:
            return self.arrays.pad([self.raw], self.spec, stack=False)
        return self.arrays.view(self.raw)

    def of(self, index: int) -> Any:
        """Returns one item's rows."""
        return self.arrays.view(self.raws()[index])

    def shapes(self) -> List[Tuple[int, ...]]:
        """Returns the shape of each item's tensor."""
        return [(n, *self.raw.shape[1:]) for n in self.rows]

    def keep(self, indices: Sequence[int]) -> Values:
        """Returns the rows of some of the items, by a copy."""
        raws = self.raws()
        return Rows(join_rows([raws[i] for i in indices]), [self.rows[i] for i in indices], self.arrays, self.spec)


class Apart(Values):
    """Tensors that come one by one."""

    def __init__(
        self, raws: List[Optional[Raw]], body: memoryview, arrays: Arrays, spec: Optional[Tensor], joins: bool
    ) -> None:
        self.raws, self.body, self.arrays, self.spec, self.joins = raws, body, arrays, spec, joins

    def whole(self) -> Any:
        """Returns a list of arrays, or where the spec says so one padded array."""
        spec = self.spec
        if spec is not None and spec.variable == "pad":
            return self.arrays.pad(self._all("padded"), spec, stack=not self.joins)
        return [None if raw is None else self.arrays.view(raw) for raw in self.raws]

    def of(self, index: int) -> Any:
        """Returns one item's array."""
        raw = self.raws[index]
        return ABSENT if raw is None else self.arrays.view(raw)

    def shapes(self) -> List[Tuple[int, ...]]:
        """Returns the shape of each item's tensor."""
        return [() if raw is None else raw.shape for raw in self.raws]

    def keep(self, indices: Sequence[int]) -> Values:
        """Returns the tensors of some of the items."""
        return Apart([self.raws[i] for i in indices], self.body, self.arrays, self.spec, self.joins)

    def stacked(self) -> Any:
        """Returns one array [N, ...] of tensors of one shape; without a copy where they lie in a row."""
        raws = self._all("stacked")
        shape = raws[0].shape
        if any(raw.shape != shape for raw in raws):
            raise ValueError(f"tensors of the shapes {sorted({raw.shape for raw in raws})} cannot be stacked")
        at, size = raws[0].at, raws[0].size
        if at >= 0 and all(raw.at == at + i * size for i, raw in enumerate(raws)):
            data = self.body[at : at + size * len(raws)]
        else:
            data = memoryview(bytearray().join([raw.data for raw in raws]))
        return self.arrays.view(Raw(raws[0].datatype, (len(raws), *shape), data, len(data)))

    def _all(self, done: str) -> List[Raw]:
        raws = [raw for raw in self.raws if raw is not None]
        if len(raws) != len(self.raws):
            raise ValueError(f"an optional input that some items lack cannot be {done}: take item[name] one by one")
        return raws


class Plan(NamedTuple):
    """Parts that are one tensor of all items each, checked: rows of all, and how to view them.

    end is how long the body is at least.
    """

    rows: int
    views: Mapping[str, Callable[[memoryview], Any]]  # of the body
    end: int


class Source(NamedTuple):
    """Where batches come from.

    inputs reads a message to its end, and raises Violation; poll takes the messages
    that came while a batch runs. Who holds lock reads a message to its end.
    """

    inputs: Callable[[Header, memoryview], Tuple[Mapping[str, Values], Mapping[str, Column]]]
    poll: Callable[[Batch], None]
    lock: threading.Lock


_LATER = frozenset(("_cache", "_cancelled", "_columns", "_headers", "_inputs", "_kept", "_states"))


class Batch:
    """What predict gets.

    items    the requests, in the order of the rows
    id       the batch's number on this connection, for logs
    """

    # What becomes of the items, by their number in the message. Until somebody asks
    # for the items these stay empty, and are the same object for all batches.
    _faults: Dict[int, BaseException] = {}
    _metadata: Dict[int, Dict[str, str]] = {}
    _items: Optional[List[Item]] = None
    _offsets: Optional[List[int]] = None
    _made_of: Optional[Batch] = None

    def __init__(self, header: Header, body: memoryview, received: float, plan: Optional[Plan], source: Source) -> None:
        self.id: int = header["batch"]
        self._header = header
        self._body = body
        self._received = received
        self._plan = plan
        self._source = source

    def __getattr__(self, name: str) -> Any:
        """Reads the message to its end when something is asked for that is not there yet."""
        if name not in _LATER:
            raise AttributeError(f"a batch has no {name!r}")
        self._complete()
        return self.__dict__[name]

    def _complete(self) -> None:
        """Reads the message to its end; raises Violation where it cannot be."""
        with self._source.lock:
            if "_states" not in self.__dict__:  # which comes last
                self._read()

    def _read(self) -> None:
        inputs, columns = self._source.inputs(self._header, self._body)
        self._plan = None
        self._inputs: Mapping[str, Values] = inputs
        self._columns: Mapping[str, Column] = columns
        self._headers: List[Mapping[str, Any]] = self._header["items"]
        self._kept: Sequence[int] = range(len(self._headers))
        self._cache: Dict[str, Any] = {}
        self._faults, self._metadata = {}, {}
        self._cancelled: Dict[int, bool] = {}
        self._states: Dict[int, Any] = {}

    @property
    def warmup(self) -> bool:
        """Whether nobody waits for the answer."""
        return bool(self._header.get("warmup", False))

    @property
    def model(self) -> Optional[Mapping[str, str]]:
        """Of a stage that serves several models: id or alias, and version; else None."""
        return self._header.get("model")

    # --- inputs ----------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        """Returns an input of all items.

        A tensor is one array [N, ...] of all rows; a list, one array for each item,
        where its spec says variable="list" or the worker batch_axis="none". Blobs
        are a list with one value for each item. Of an optional input, None stands
        for the items that lack it. Raises KeyError where no item has it.
        """
        plan = self._plan  # another thread may take it away
        if plan is not None:
            view = plan.views.get(name)
            if view is not None:
                return view(self._body)
        value = self._cache.get(name)
        if value is None:
            value = self._cache[name] = self._column(name).whole()
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """Returns an input of all items, or the default where none has it."""
        return self[name] if name in self._inputs else default

    def __contains__(self, name: str) -> bool:
        return name in self._inputs

    def __iter__(self) -> Iterator[str]:
        return iter(self._inputs)

    def keys(self) -> Sequence[str]:
        """Returns the names of the inputs."""
        return list(self._inputs)

    def shapes(self, name: str) -> List[Tuple[int, ...]]:
        """Returns the shape that each item sent of an input: what is not padding."""
        return self._column(name).shapes()

    def stack(self, name: str) -> Any:
        """Returns one array [N, ...] of tensors that come one by one and have one shape."""
        return self._column(name).stacked()

    def _column(self, name: str) -> Values:
        try:
            return self._inputs[name]
        except KeyError:
            raise KeyError(f"{name!r}: the batch has {', '.join(map(repr, self._inputs)) or 'no inputs'}") from None

    # --- items -----------------------------------------------------------

    @property
    def items(self) -> List[Item]:
        """The requests of the batch."""
        if self._items is None:
            self._items = [
                Item(self, index, number, self._headers[number], self._received)
                for index, number in enumerate(self._kept)
            ]
        return self._items

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def rows(self) -> int:
        """The rows of all items: N."""
        plan = self._plan
        return plan.rows if plan is not None else sum(self._rows_of())

    def _starts(self) -> List[int]:
        if self._offsets is None:
            self._offsets = list(itertools.accumulate(self._rows_of(), initial=0))
        return self._offsets

    def _rows_of(self) -> List[int]:
        return [self._headers[number].get("rows", 1) for number in self._kept]

    # --- outcomes --------------------------------------------------------

    def fail(self, item: Union[int, Item], error: BaseException) -> None:
        """Makes an error the outcome of one item alone; its rows of the outputs are ignored.

        The first error of an item counts. InvalidInput, SchemaViolation, OutOfMemory
        and ItemFailed reach its caller; the text of any other goes to the log.
        """
        if not isinstance(error, BaseException):
            raise TypeError(f"fail: an error such as InvalidInput(field, message) is wanted, got {error!r}")
        index = item.index if isinstance(item, Item) else item
        if not 0 <= index < len(self._kept):
            raise IndexError(f"fail: there is no item {index}, the batch has {len(self._kept)}")
        number = self._kept[index]
        if not isinstance(error, ItemError):
            log.error("request %s: %s: %s", self._headers[number]["id"], type(error).__name__, text_of(error))
        error.with_traceback(None)  # its frames hold arrays, and this batch
        self._faults.setdefault(number, error)

    def failed(self, item: Union[int, Item]) -> bool:
        """Reports whether an item has an error."""
        index = item.index if isinstance(item, Item) else item
        return self._kept[index] in self._faults

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for any of the items any more; asks the connection each time."""
        self._source.poll(self)
        return len(self._cancelled) == len(self._headers)

    def _is_cancelled(self, number: int) -> bool:
        self._source.poll(self)
        return number in self._cancelled

    def _cancel(self, numbers: Optional[Sequence[int]]) -> None:
        """Notes that nobody waits for items any more; None: for none of them."""
        for number in range(len(self._headers)) if numbers is None else numbers:
            if number < len(self._headers):
                self._cancelled[number] = True

    def _keep(self, kept: Sequence[int], inputs: Mapping[str, Values]) -> Batch:
        """Returns a batch of some of the items, which shares what becomes of them."""
        out = Batch.__new__(Batch)
        out.__dict__.update(self.__dict__)
        out._made_of = self  # whose items preprocess may have kept
        out._kept, out._inputs = kept, inputs
        out._items, out._offsets, out._cache = None, None, {}
        return out

    def __repr__(self) -> str:
        return f"<Batch {self.id} of {len(self)} items, inputs {', '.join(self._inputs)}>"


def values_of(
    column: Column,
    body: memoryview,
    rows: List[int],
    arrays: Arrays,
    spec: Optional[Spec],
    joins: bool,
) -> Values:
    """Returns the input that the parts of one name are. Blobs come as they are, as bytes.

    joins says that axis 0 of tensors is rows.
    """
    tensor = spec if isinstance(spec, Tensor) else None
    if isinstance(column, Raw):
        return Rows(column, rows, arrays, tensor)
    if any(isinstance(part, Blob) for part in column):
        return Values([bytes(part.data) if isinstance(part, Blob) else ABSENT for part in column])
    return Apart([part if isinstance(part, Raw) else None for part in column], body, arrays, tensor, joins)
