"""A batch as a worker gets it: the inputs by name, and its items.

    batch["x"]                   # all rows of input x: one array [N, ...]
    batch.items[3].parameters    # of the fourth item
    batch.fail(3, InvalidInput("x", "is not finite"))

Arrays are views of the received bytes: nothing is copied, and nothing is made before
somebody asks for it. Threads of the worker may use a batch too, until predict returns.
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

log = logging.getLogger("stagemesh.worker")

# --- inputs ------------------------------------------------------------------------

# The value of an item that lacks an input; None may be a value, as null is in JSON.
ABSENT: Any = object()


class Values:
    """One input of a batch: a Python value for each item, ABSENT if the item has none."""

    def __init__(self, values: List[Any]) -> None:
        self._values = values

    def whole(self) -> Any:
        """Returns what batch[name] is."""
        return [None if value is ABSENT else value for value in self._values]

    def of(self, index: int) -> Any:
        """Returns the value of one item."""
        return self._values[index]

    def shapes(self) -> List[Tuple[int, ...]]:
        """Returns the shape of each item's value; () if it has none."""
        return [tuple(getattr(value, "shape", ())) for value in self._values]

    def keep(self, indices: Sequence[int]) -> Values:
        """Returns the input of some of the items."""
        return Values([self._values[i] for i in indices])

    def stacked(self) -> Any:
        """Returns one array [N, ...] of tensors of one shape that come one by one; raises TypeError for others."""
        raise TypeError("only tensors can be stacked")


class Tensors(Values):
    """One input of a batch that is a tensor: of all items joined on axis 0, or one for each item.

    joined is the tensor of all, and rows are those of each item; otherwise raws[i] is the
    tensor of item i, None if the item has none, in a frame with that body. joins means
    that axis 0 of tensors is rows.
    """

    def __init__(
        self,
        arrays: Arrays,
        spec: Optional[Spec],
        joins: bool,
        raws: Optional[List[Optional[Raw]]] = None,
        body: memoryview = memoryview(b""),  # noqa: B008  # immutable
        *,
        joined: Optional[Raw] = None,
        rows: Sequence[int] = (),
    ) -> None:
        self._arrays, self._joins, self._body, self._joined, self._rows = arrays, joins, body, joined, rows
        self._spec = spec if isinstance(spec, Tensor) else None
        self._own = raws

    @property
    def _raws(self) -> List[Optional[Raw]]:
        if self._own is None:
            assert self._joined is not None
            self._own = list(split_rows(self._joined, self._rows))
        return self._own

    def whole(self) -> Any:
        """Returns one array, or a list of arrays as the spec says."""
        spec, joined = self._spec, self._joined
        if spec is not None and spec.variable == "pad" and (joined is None or spec.multiple > 1):
            raws = self._all_raws("padded") if joined is None else [joined]
            return self._arrays.pad(raws, spec, stack=not self._joins)
        if joined is not None and (spec is None or spec.variable != "list"):
            return self._arrays.view(joined)
        return [None if raw is None else self._arrays.view(raw) for raw in self._raws]

    def of(self, index: int) -> Any:
        """Returns the array of one item; ABSENT if it has none."""
        raw = self._raws[index]
        return ABSENT if raw is None else self._arrays.view(raw)

    def shapes(self) -> List[Tuple[int, ...]]:
        """Returns the shape of each item's tensor; () if it has none."""
        return [() if raw is None else raw.shape for raw in self._raws]

    def keep(self, indices: Sequence[int]) -> Values:
        """Returns the tensors of some of the items; joined tensors are copied."""
        raws = [self._raws[i] for i in indices]
        if self._joined is None:
            return Tensors(self._arrays, self._spec, self._joins, raws, self._body)
        joined = join_rows([raw for raw in raws if raw is not None])
        return Tensors(self._arrays, self._spec, self._joins, joined=joined, rows=[self._rows[i] for i in indices])

    def stacked(self) -> Any:
        """Returns one array [N, ...] of tensors of one shape; without a copy if they follow each other in the body."""
        if self._joined is not None:
            return super().stacked()
        raws = self._all_raws("stacked")
        shape = raws[0].shape
        if any(raw.shape != shape for raw in raws):
            raise ValueError(f"tensors of the shapes {sorted({raw.shape for raw in raws})} cannot be stacked")
        at, size = raws[0].at, raws[0].size
        if at >= 0 and all(raw.at == at + i * size for i, raw in enumerate(raws)):
            data = self._body[at : at + size * len(raws)]
        else:
            data = memoryview(bytearray().join([raw.data for raw in raws]))
        return self._arrays.view(Raw(raws[0].datatype, (len(raws), *shape), data, len(data)))

    def _all_raws(self, done: str) -> List[Raw]:
        raws = [raw for raw in self._raws if raw is not None]
        if len(raws) != len(self._raws):
            raise ValueError(f"an optional input that some items lack cannot be {done}: take item[name] one by one")
        return raws


def values_of(
    column: Column, body: memoryview, rows: List[int], arrays: Arrays, spec: Optional[Spec], joins: bool
) -> Values:
    """Returns the input that the parts of one name are. Blobs are not decoded: their values are bytes."""
    if isinstance(column, Raw):
        return Tensors(arrays, spec, joins, joined=column, rows=rows)
    if any(isinstance(part, Blob) for part in column):
        return Values([bytes(part.data) if isinstance(part, Blob) else ABSENT for part in column])
    return Tensors(arrays, spec, joins, [part if isinstance(part, Raw) else None for part in column], body)


# --- items and batches ---------------------------------------------------------------


class Item:
    """One request of a batch.

    id          of the request, a string
    rows        its extent on axis 0
    parameters  of the request and the step: booleans, whole and other numbers, strings
    metadata    of the caller, strings by name
    deadline    when its caller stops waiting, in seconds of time.monotonic(); None: never
    index       its place in batch.items
    """

    __slots__ = ("_batch_ref", "deadline", "id", "index", "metadata", "number", "parameters", "rows")

    def __init__(self, batch: Batch, index: int, number: int, header: Mapping[str, Any], received: float) -> None:
        self._batch_ref = weakref.ref(batch)  # a cycle would keep the batch's bytes
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
        batch = self._batch_ref()
        if batch is None:
            raise ReferenceError(f"request {self.id}: its batch is over, and its inputs with it")
        return batch

    @property
    def cancelled(self) -> bool:
        """Whether this item is cancelled; reads the connection each time."""
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
        """Returns this item's value of an input, or the default if it has none."""
        try:
            return self[name]
        except KeyError:
            return default

    def __contains__(self, name: str) -> bool:
        return self.get(name, ABSENT) is not ABSENT

    @property
    def state(self) -> Any:
        """Anything that preprocess keeps here for predict and postprocess; None before."""
        return self._batch._states.get(self.number)

    @state.setter
    def state(self, value: Any) -> None:
        self._batch._states[self.number] = value

    def content_type(self, name: str) -> str:
        """Returns the content type of a received blob; empty if there is none."""
        column = self._batch._columns.get(name)
        part = column[self.number] if isinstance(column, list) else None
        return part.content_type if isinstance(part, Blob) else ""

    def respond(self, name: str, value: str) -> None:
        """Adds a string to the metadata that this item's caller gets with the outputs."""
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"metadata are strings, got {name!r}: {value!r}")
        self._batch._metadata.setdefault(self.number, {})[name] = value

    def __repr__(self) -> str:
        return f"<Item {self.index} of request {self.id}>"


_NOTHING: Dict[str, Any] = {}


class Plan(NamedTuple):
    """How to view the parts of a message without checking them again.

    It is made for parts that are one tensor of all items each. rows is the sum of the
    items' rows, views are by name, and end is the least length of the body in bytes.
    """

    rows: int
    views: Mapping[str, Callable[[memoryview], Any]]
    end: int


class Source(NamedTuple):
    """What batches get from the object that makes them.

    read parses the rest of a message, and raises Violation; it is called with lock held.
    poll handles the messages that arrive while a batch runs.
    """

    read: Callable[[Header, memoryview], Tuple[Mapping[str, Values], Mapping[str, Column]]]
    poll: Callable[[Batch], None]
    lock: threading.Lock


_READ_LATER = frozenset(("_cache", "_cancelled", "_columns", "_headers", "_inputs", "_kept", "_states"))


class Batch:
    """The argument of predict.

    items    the requests, in the order of the rows
    id       the batch's number on this connection, for logs
    """

    # Outcomes of the items, by their number in the message. Until the message is parsed in
    # full these stay empty, and are shared by all batches.
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
        """Parses the rest of the message when an attribute is used that depends on it."""
        if name not in _READ_LATER:
            raise AttributeError(f"a batch has no {name!r}")
        self._complete()
        return self.__dict__[name]

    def _complete(self) -> None:
        """Parses the rest of the message; raises Violation."""
        with self._source.lock:
            if "_states" in self.__dict__:  # which is set last
                return
            inputs, columns = self._source.read(self._header, self._body)
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
        """Whether this is a warm-up, whose outputs nobody gets."""
        return bool(self._header.get("warmup", False))

    @property
    def model(self) -> Optional[Mapping[str, str]]:
        """Of a stage that serves several models: id or alias, and version; else None."""
        return self._header.get("model")

    # --- inputs ----------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        """Returns an input of all items.

        A tensor is one array [N, ...] of all rows. It is a list with one array for each
        item if its spec has variable="list" or the worker batch_axis="none". Blobs are a
        list with one value for each item. Items that lack an optional input have None.
        Raises KeyError if no item has the input.
        """
        plan = self._plan  # another thread may clear it
        if plan is not None:
            view = plan.views.get(name)
            if view is not None:
                return view(self._body)
        value = self._cache.get(name)
        if value is None:
            value = self._cache[name] = self._column(name).whole()
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """Returns an input of all items, or the default if none has it."""
        return self[name] if name in self._inputs else default

    def __contains__(self, name: str) -> bool:
        return name in self._inputs

    def __iter__(self) -> Iterator[str]:
        return iter(self._inputs)

    def keys(self) -> Sequence[str]:
        """Returns the names of the inputs."""
        return list(self._inputs)

    def shapes(self, name: str) -> List[Tuple[int, ...]]:
        """Returns the shape that each item sent of an input: without padding."""
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
        return plan.rows if plan is not None else sum(self._item_rows())

    def _item_rows(self) -> List[int]:
        return [self._headers[number].get("rows", 1) for number in self._kept]

    def _starts(self) -> List[int]:
        if self._offsets is None:
            self._offsets = list(itertools.accumulate(self._item_rows(), initial=0))
        return self._offsets

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
        """Whether all items are cancelled; reads the connection each time."""
        self._source.poll(self)
        return len(self._cancelled) == len(self._headers)

    def _is_cancelled(self, number: int) -> bool:
        self._source.poll(self)
        return number in self._cancelled

    def _cancel(self, numbers: Optional[Sequence[int]]) -> None:
        """Marks items as cancelled; None: all of them."""
        for number in range(len(self._headers)) if numbers is None else numbers:
            if number < len(self._headers):
                self._cancelled[number] = True

    def _keep(self, indices: Sequence[int], inputs: Optional[Mapping[str, Values]] = None) -> Batch:
        """Returns a batch of some of the items, with these inputs or its own; it shares the outcomes."""
        if inputs is None:
            inputs = {name: values.keep(indices) for name, values in self._inputs.items()} if indices else {}
        out = Batch.__new__(Batch)
        out.__dict__.update(self.__dict__)
        out._made_of = self  # preprocess may have kept its items, which refer to it weakly
        out._kept, out._inputs = [self._kept[i] for i in indices], inputs
        out._items, out._offsets, out._cache = None, None, {}
        return out

    def _without_faults(self) -> Batch:
        """Returns the batch of the items that have no error."""
        good = [i for i, number in enumerate(self._kept) if number not in self._faults]
        return self if len(good) == len(self) else self._keep(good)

    def __repr__(self) -> str:
        return f"<Batch {self.id} of {len(self)} items, inputs {', '.join(self._inputs)}>"
