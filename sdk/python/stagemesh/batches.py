"""A batch as a worker gets it: the inputs by name, and its items.

    batch["x"]                   # all rows of input x: one array [N, ...]
    batch.items[3].parameters    # of the fourth item
    batch.fail(3, InvalidInput("x", "is not finite"))

Arrays are views of the received bytes: nothing is copied, and nothing is made before
somebody asks for it. Threads of the worker may use a batch too, until predict returns.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from .faults import ItemError, Raised, of_validation
from .frames import MAX_COUNT, MAX_ITEMS, MAX_NUMBER, Header, Violation, load_items
from .parts import Place, Received
from .spans import NO_SPAN, Span, Spans
from .values import ABSENT, Values

# --- items and batches ---------------------------------------------------------------

Parameters = Mapping[str, Union[bool, int, float, str]]


class Item:
    """One request of a batch.

    id          of the request, a string
    rows        its extent on axis 0
    parameters  of the request and the step: booleans, whole and other numbers, strings
    input_parameters  those that the caller gave single inputs, by the input's name
    metadata    of the caller, strings by name
    deadline    when its caller stops waiting, in seconds of time.monotonic(); None: never
    index       its place in batch.items
    """

    __slots__ = ("_ref", "deadline", "id", "index", "input_parameters", "metadata", "number", "parameters", "rows")

    def __init__(
        self, batch: weakref.ref[Batch], index: int, number: int, header: Mapping[str, Any], received: float
    ) -> None:
        self._ref = batch  # a cycle would keep the batch's bytes
        self.index = index
        self.number = number  # its place in the message
        get = header.get
        self.id: str = header["id"]
        self.rows: int = get("rows", 1)
        self.parameters: Parameters = get("parameters", _NOTHING)
        self.input_parameters: Mapping[str, Parameters] = get("input_parameters", _NOTHING)
        self.metadata: Mapping[str, str] = get("metadata", _NOTHING)
        timeout = get("timeout")
        self.deadline: Optional[float] = received + timeout / 1000 if timeout else None

    @property
    def _batch(self) -> Batch:
        batch = self._ref()
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

    @property
    def model(self) -> Any:
        """What load returned for the model of the item; see Batch.model."""
        return self._batch.model

    def content_type(self, name: str) -> str:
        """Returns the content type of a received blob; empty if there is none."""
        column = self._batch._columns.get(name)
        part = column[self.number] if isinstance(column, list) else None
        return part.content_type if isinstance(part, Place) else ""

    def respond(self, name: str, value: str) -> None:
        """Adds a string to the metadata that this item's caller gets with the outputs."""
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"metadata are strings, got {name!r}: {value!r}")
        (name + value).encode()  # half a surrogate pair is a ValueError
        self._batch._metadata.setdefault(self.number, {})[name] = value

    def span(self, name: str, /, **attributes: Any) -> Span:
        """Batch.span, for methods that have only an item."""
        return self._batch.span(name, **attributes)

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

    read parses the rest of a message, and raises Violation; it is called with lock held. It
    returns the inputs, the parts, and the rows of each item.
    poll handles the messages that arrive while a batch runs.
    """

    read: Callable[[Header, memoryview], Tuple[Mapping[str, Values], Mapping[str, Received], List[int]]]
    poll: Callable[[Batch], None]
    lock: threading.Lock


_READ_LATER = frozenset(("_cache", "_cancelled", "_columns", "_headers", "_inputs", "_kept", "_rows", "_states"))


class Batch:
    """The argument of predict.

    items    the requests, in the order of the rows
    id       the batch's number on this connection, for logs
    """

    # Outcomes of the items, by their number in the message. Until the message is parsed in
    # full these stay empty, and are shared by all batches.
    _faults: Dict[int, BaseException] = {}
    _raised: Raised = Raised()
    _metadata: Dict[int, Dict[str, str]] = {}
    _items: Optional[List[Item]] = None
    _offsets: Optional[List[int]] = None
    _made_of: Optional[Batch] = None
    _spans: Optional[Spans] = None  # of a traced batch
    _model: Any = None  # of a worker with several models

    def __init__(self, header: Header, body: memoryview, received: float, plan: Optional[Plan], source: Source) -> None:
        self.id: int = header["batch"]
        self._header = header
        self._body = body
        self._received = received
        self._plan = plan
        self._source = source
        if "trace" in header:
            self._spans = Spans(header["trace"])

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
            inputs, columns, rows = self._source.read(self._header, self._body)
            self._plan = None
            self._inputs: Mapping[str, Values] = inputs
            self._columns: Mapping[str, Received] = columns
            self._rows: List[int] = rows
            self._headers: List[Mapping[str, Any]] = self._header["items"]
            self._kept: Sequence[int] = range(len(self._headers))
            self._cache: Dict[str, Any] = {}
            self._faults, self._metadata, self._raised = {}, {}, Raised()
            self._cancelled: Dict[int, bool] = {}
            self._states: Dict[int, Any] = {}

    @property
    def warmup(self) -> bool:
        """Whether this is a warm-up, whose outputs nobody gets."""
        return bool(self._header.get("warmup", False))

    @property
    def model(self) -> Any:
        """What load returned for the batch's model; if nothing did: id or alias, and version, or None."""
        return self._header.get("model") if self._model is None else self._model

    def span(self, name: str, /, **attributes: Any) -> Span:
        """Times a part of the run, for the trace of the requests: ``with batch.span("tokenize", rows=32):``.

        Attributes are booleans, numbers and strings, and nothing of the inputs. A batch that
        is not traced has spans that do nothing.
        """
        return NO_SPAN if self._spans is None else Span(self._spans, name, attributes)

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
            batch, headers, received = weakref.ref(self), self._headers, self._received
            self._items = [
                Item(batch, index, number, headers[number], received) for index, number in enumerate(self._kept)
            ]
        return self._items

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def rows(self) -> int:
        """The rows of all items: N."""
        plan = self._plan
        return plan.rows if plan is not None else sum(self._rows)

    def _starts(self) -> List[int]:
        if self._offsets is None:
            self._offsets = list(itertools.accumulate(self._rows, initial=0))
        return self._offsets

    # --- outcomes --------------------------------------------------------

    def fail(self, item: Union[int, Item], error: BaseException) -> None:
        """Makes an error the outcome of one item alone; its rows of the outputs are ignored.

        The first error of an item counts. InvalidInput, SchemaViolation, OutOfMemory
        and ItemFailed reach its caller, and pydantic's ValidationError as a
        SchemaViolation; any other goes to the host's log.
        """
        self._fail(item, of_validation(error))

    def _fail(self, item: Union[int, Item], error: BaseException) -> None:
        if not isinstance(error, BaseException):
            raise TypeError(f"fail: expected an error such as InvalidInput(field, message), got {error!r}")
        index = item.index if isinstance(item, Item) else item
        if not 0 <= index < len(self._kept):
            raise IndexError(f"fail: there is no item {index}, the batch has {len(self._kept)}")
        number = self._kept[index]
        if not isinstance(error, ItemError):
            self._raised.add(number, error)
        BaseException.with_traceback(error, None)  # its frames hold arrays, and this batch
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
        out._kept, out._rows, out._inputs = [self._kept[i] for i in indices], [self._rows[i] for i in indices], inputs
        out._items, out._offsets, out._cache = None, None, {}
        return out

    def _without_faults(self) -> Batch:
        """Returns the batch of the items that have no error."""
        good = [i for i, number in enumerate(self._kept) if number not in self._faults]
        return self if len(good) == len(self) else self._keep(good)

    def __repr__(self) -> str:
        return f"<Batch {self.id} of {len(self)} items, inputs {', '.join(self._inputs)}>"


# --- checks of a predict message -----------------------------------------------------


def check_predict(header: Header) -> List[Dict[str, Any]]:
    """Returns the items; raises Violation if a key is missing or has a wrong type."""
    items = load_items(header)
    if type(items) is not list or not items:
        raise Violation("predict: items is a list of at least one")
    if len(items) > MAX_ITEMS:
        raise Violation(f"predict: {len(items)} items, at most {MAX_ITEMS} are allowed")
    if len(header) > 4:
        if type(header.get("warmup", False)) is not bool:
            raise Violation("predict: warmup is a boolean")
        if type(header.get("model", _NOTHING)) is not dict:
            raise Violation("predict: model is an object")
        if type(header.get("trace", "")) is not str:
            raise Violation("predict: trace is a string")
    if "parts" not in header:
        raise Violation("predict: it has no parts")
    for i, item in enumerate(items):
        if type(item) is not dict or type(item.get("id")) is not str:
            raise Violation(f"predict: items[{i}]: expected an object with an id")
        timeout = item.get("timeout", 1)
        if type(timeout) is not int or not 1 <= timeout <= MAX_NUMBER:
            raise Violation(f"predict: items[{i}]: timeout is whole milliseconds, at least 1")
        if len(item) > 1 + ("timeout" in item):  # other keys than these two
            _check_optional(i, item)
    return items


def _check_optional(i: int, item: Mapping[str, Any]) -> None:
    rows = item.get("rows", 1)
    if type(rows) is not int or not 1 <= rows <= MAX_COUNT:
        raise Violation(f"predict: items[{i}]: rows is a whole number from 1")
    parameters, metadata = item.get("parameters", _NOTHING), item.get("metadata", _NOTHING)
    if not _are_parameters(parameters):
        raise Violation(f"predict: items[{i}]: parameters are booleans, numbers and strings by name")
    of_inputs = item.get("input_parameters", _NOTHING)
    if type(of_inputs) is not dict or not all(map(_are_parameters, of_inputs.values())):
        raise Violation(f"predict: items[{i}]: input_parameters are parameters by the names of inputs")
    if type(metadata) is not dict or any(type(v) is not str for v in metadata.values()):
        raise Violation(f"predict: items[{i}]: metadata are strings by name")


def _are_parameters(value: Any) -> bool:
    return type(value) is dict and all(map(_is_parameter, value.values()))


def _is_parameter(value: Any) -> bool:
    """Reports whether a value is a boolean, a string, a number of 64 bits or a finite double."""
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 64
    if type(value) is float:
        return math.isfinite(value)
    return type(value) in (bool, str)
