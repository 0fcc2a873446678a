"""Runs batches: from a predict message to the result or error that ends it.

There are no sockets, threads and clocks here. ``Runs.batch`` raises Violation for
a message that cannot be; ``Runs.run`` raises nothing, since whatever goes wrong is
an outcome: a fault of an item, or an error of the batch.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from operator import itemgetter
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from .arrays import Arrays
from .batches import ABSENT, Apart, Batch, Item, Plan, Rows, Source, Values, values_of
from .faults import InvalidInput, ItemError, ItemFailed, fault_of, is_out_of_memory, text_of, traceback_of
from .frames import (
    DEFERRED,
    MAX_COUNT,
    MAX_HEADER,
    MAX_ITEMS,
    MAX_NUMBER,
    Buffer,
    Header,
    Parts,
    Violation,
    encode,
    load_items,
)
from .outputs import (
    BadOutput,
    as_outputs,
    batch_column,
    check_names,
    item_body,
    joinable,
    lacks,
    lists_rows,
    shares,
    whole_column,
)
from .packing import is_packed, unpack
from .parts import Body, Column, Layout, Raw, join_rows, read_parts
from .specs import Bytes, Json, Spec, Tensor, Text
from .worker import Worker, axis_of, overrides

log = logging.getLogger("stagemesh.worker")

# The longest texts that go into a header, in characters.
_MESSAGE, _TRACEBACK = 4096, 65536

# How often predict_item's loop asks for cancels, in seconds.
_ASK = 0.001


# A message that ends a batch: its header, and its body in pieces of so many bytes together.
Reply = Tuple[bytes, Sequence[Buffer], int]


class Runs:
    """Runs the batches of one worker.

    max_frame bounds the body of a reply, in bytes. poll takes the messages that came
    while a batch runs. answers is False for ranks of a gang that say nothing but that
    they are done.
    """

    def __init__(
        self, worker: Worker, arrays: Arrays, max_frame: int, poll: Callable[[Batch], None], answers: bool = True
    ) -> None:
        self._worker = worker
        self._arrays = arrays
        self._max_frame = max_frame
        self.answers = answers
        self._joins = axis_of(worker) == "rows"
        kind = type(worker)
        self._single = overrides(kind, "predict_item")
        self._pre = overrides(kind, "preprocess")
        self._post = overrides(kind, "postprocess")
        self._inputs = worker.inputs
        self._outputs = worker.outputs
        self._documents = {n: s for n, s in worker.inputs.items() if isinstance(s, (Text, Json))}

        self._plain = self._joins and answers and not (self._single or self._pre or self._post or self._documents)
        self._source = Source(self._read, poll, threading.Lock())
        self._predict = worker.predict
        self._count = len(self._outputs)
        self._traits = arrays.traits
        self._process = os.getpid()
        # Outputs like those of other batches, by name, type and traits: the part where it
        # is the first, how it begins elsewhere, its bytes and its rows.
        self._known: Dict[Tuple[str, type, Any], Tuple[str, str, int, int]] = {}

    def forked(self) -> bool:
        """Reports whether this is a child that the worker forked: its end is its own."""
        return os.getpid() != self._process

    # --- from the message ------------------------------------------------

    def batch(self, header: Header, body: memoryview, received: float) -> Batch:
        """Returns the batch of a message; received is when it came, in time.monotonic() seconds.

        Raises Violation. What is deferred of it is checked when somebody asks for it.
        """
        if DEFERRED in header:
            plan = header["parts"].plan
            if plan is not None and plan.end <= len(body):
                return Batch(header, body, received, plan, self._source)
        number = header.get("batch")
        if type(number) is not int or not 0 <= number <= MAX_NUMBER:
            raise Violation("predict: batch is a whole number")
        batch = Batch(header, body, received, None, self._source)
        batch._complete()
        return batch

    def _read(self, header: Header, body: memoryview) -> Tuple[Dict[str, Values], Dict[str, Column]]:
        """Reads a message to its end."""
        items = check_predict(header)
        rows = [item.get("rows", 1) for item in items]
        total = sum(rows)
        columns = read_parts(header["parts"], body, len(items))
        inputs: Dict[str, Values] = {}
        for name, column in columns.items():
            if type(column) is Raw:
                if not self._joins:
                    raise Violation(f'part {name!r}: batch_axis is "none", and it is of all items')
                if not column.shape or column.shape[0] != total:
                    raise Violation(f"part {name!r}: shape {list(column.shape)}, the items have {total} rows")
            inputs[name] = values_of(column, body, rows, self._arrays, self._inputs.get(name), self._joins)
        if self._plain and type(header["parts"]) is Parts:
            header["parts"].plan = self._plan(columns, total)
        return inputs, columns

    def _plan(self, columns: Mapping[str, Column], rows: int) -> Optional[Plan]:
        """Returns the plan of parts that can be taken as they are the next time."""
        views = {}
        end = 0
        for name, raw in columns.items():
            spec = self._inputs.get(name)
            if not isinstance(raw, Raw) or raw.datatype == "BYTES":
                return None
            if isinstance(spec, Tensor) and spec.variable != "exact":
                return None
            views[name] = self._arrays.viewer(raw)
            end = max(end, raw.at + raw.size)
        return Plan(rows, views, end)

    # --- to the reply ----------------------------------------------------

    def run(self, batch: Batch) -> Reply:
        """Runs a batch; the reply ends it. Raises Violation where its message cannot be."""
        try:
            if not self._plain:
                return self._run(batch)
            outputs = self._predict(batch)
            plan = batch._plan
            if plan is not None and type(outputs) is dict and len(outputs) == self._count:
                reply = self._usual(batch.id, plan.rows, outputs)
                if reply is not None:
                    return reply
            return self._of_batch(batch, batch, outputs)
        except BaseException as error:  # sys.exit in predict is no reason to leave
            if isinstance(error, Violation) or self.forked():
                raise
            return self.error(batch, error)

    def _usual(self, batch: int, rows: int, outputs: Mapping[str, Any]) -> Optional[Reply]:
        """Returns the result of outputs like those of another batch; None where one is new."""
        entries, pieces, at = "", [], 0
        for name, value in outputs.items():
            try:
                known = self._known.get((name, type(value), self._traits(value)))
            except AttributeError:
                return None
            if known is None:
                return None
            first, head, size, of = known
            if of != rows:
                return None
            if not entries:
                entries, pieces, at = first, [value], size
                continue
            if at & 63:
                pieces.append(bytes(-at & 63))
                at += -at & 63
            entries += f',{head}"at":{at},"size":{size}}}'
            pieces.append(value)
            at += size
        if at > self._max_frame:
            return None
        return f'{{"type":"result","batch":{batch},"parts":[{entries}]}}'.encode(), pieces, at

    def _run(self, batch: Batch) -> Reply:
        view = self.decoded(batch)
        if self._single:
            return self._of_items(batch, self._run_items(view))
        if self._pre:
            view = self._preprocess(view)
        if not view._kept:
            return self.result(batch, Layout())
        return self._of_batch(batch, view, self._worker.predict(view))

    def _of_batch(self, batch: Batch, view: Batch, outputs: Any) -> Reply:
        """Returns the result of what predict returned for the items of view."""
        layout = Layout()
        if not self.answers or len(batch._faults) == len(batch._headers):
            return self.result(batch, layout)
        outputs = as_outputs("predict", outputs, list(self._outputs))
        if self._post:
            return self._of_items(batch, self._postprocess(view, outputs))
        check_names("predict", outputs, self._outputs, of_item=False)
        for name, value in outputs.items():
            if value is not None:
                self._lay_out(layout, name, value, view, view is batch)
        return self.result(batch, layout)

    def _lay_out(self, layout: Layout, name: str, value: Any, view: Batch, whole: bool) -> None:
        """Adds one output of a batch to the layout."""
        spec, faults = self._outputs.get(name), view._faults
        listed = type(value) is list or type(value) is tuple
        of_items = isinstance(spec, Bytes) or (listed and not (self._joins and lists_rows(value, spec)))
        if not of_items:
            column: Column = whole_column(
                name, value, spec, self._arrays, view.rows if self._joins else len(view), self._joins
            )
            if type(column) is Raw and whole:
                layout.tensor(name, None, column)
                self._remember(name, value, column, layout)
                return
            column = shares(column, view._rows_of())
        else:
            has_fault = [number in faults for number in view._kept]
            column = batch_column(name, value, spec, self._arrays, view._rows_of(), has_fault, self._joins)
        joined = joinable(column) if whole and self._joins and not faults else None
        if joined:
            layout.joined(name, joined)
            return
        for number, body in zip(view._kept, column):
            if body is not None and number not in faults:
                layout.add(name, number, body)

    def _remember(self, name: str, value: Any, raw: Raw, layout: Layout) -> None:
        """Notes how an array was encoded, where the next one like it can be sent as it is."""
        if raw.data is not value:
            return
        if len(self._known) >= 1024:  # shapes that vary without end
            self._known.clear()
        key = (name, type(value), self._traits(value))
        head = layout.head(name, raw)
        self._known[key] = (f'{head}"at":0,"size":{raw.size}}}', head, raw.size, raw.shape[0])

    def _of_items(self, batch: Batch, outcomes: Mapping[int, Mapping[str, Body]]) -> Reply:
        """Returns the result of outputs by item and name."""
        layout = Layout()
        if not self.answers:
            return self.result(batch, layout)
        names = {name: None for outputs in outcomes.values() for name in outputs}
        for name in names:
            bodies = [outputs.get(name) for outputs in outcomes.values()]
            joined = joinable(bodies) if self._joins and len(bodies) == len(batch._headers) else None
            if joined:
                layout.joined(name, joined)
                continue
            for number, body in zip(outcomes, bodies):
                if body is not None:
                    layout.add(name, number, body)
        return self.result(batch, layout)

    # --- single items ----------------------------------------------------

    def _run_items(self, view: Batch) -> Dict[int, Dict[str, Body]]:
        """Calls predict_item for each; returns the outputs by the items' numbers."""
        outcomes: Dict[int, Dict[str, Body]] = {}
        asked = time.monotonic()
        for item in view.items:
            if time.monotonic() - asked > _ASK:
                view._source.poll(view)
                asked = time.monotonic()
            if item.number in view._cancelled:
                view.fail(item, ItemFailed("the request was cancelled"))
                continue
            try:
                returned = self._worker.predict_item(item)
                if self.answers:
                    outcomes[item.number] = self._item_outputs("predict_item", item.rows, returned)
            except Exception as error:
                self.fault(view, item.index, "predict_item", error)
        return {number: bodies for number, bodies in outcomes.items() if number not in view._faults}

    def _item_outputs(self, where: str, rows: int, returned: Any) -> Dict[str, Body]:
        outputs = as_outputs(where, returned, list(self._outputs))
        check_names(where, outputs, self._outputs, of_item=True)
        return {
            name: item_body(
                f"output {name!r}", value, self._outputs.get(name), self._arrays, rows if self._joins else None
            )
            for name, value in outputs.items()
            if not lacks(value, self._outputs.get(name))
        }

    def fault(self, view: Batch, index: int, where: str, error: BaseException) -> None:
        """Makes an error the outcome of one item; what is not for its caller goes to the log."""
        view._faults.setdefault(view._kept[index], error)
        if isinstance(error, BadOutput):
            log.error("request %s: %s: %s", view.items[index].id, where, error)
        elif not isinstance(error, ItemError):
            name, text = type(error).__name__, traceback_of(error)
            log.error("request %s: %s raised %s\n%s", view.items[index].id, where, name, text)
        error.with_traceback(None)  # its frames hold arrays

    def _without_faults(self, view: Batch) -> Batch:
        """Returns the batch of the items that have no fault."""
        good = [i for i, number in enumerate(view._kept) if number not in view._faults]
        if len(good) == len(view):
            return view
        inputs = {name: values.keep(good) for name, values in view._inputs.items()} if good else {}
        return view._keep([view._kept[i] for i in good], inputs)

    # --- before predict --------------------------------------------------

    def decoded(self, batch: Batch) -> Batch:
        """Decodes text and JSON; what cannot be is its item's fault."""
        if not self._documents:
            return batch
        inputs = dict(batch._inputs)
        for name, spec in self._documents.items():
            if name not in inputs:
                continue
            values: List[Any] = []
            for i in range(len(batch)):
                data = inputs[name].of(i)
                value = ABSENT
                try:
                    value = data if data is ABSENT else _document(batch.items[i], name, data, spec)
                except InvalidInput as error:
                    batch.fail(i, error)
                values.append(value)
            inputs[name] = Values(values)
        return self._without_faults(batch._keep(batch._kept, inputs)) if inputs else batch

    def _preprocess(self, view: Batch) -> Batch:
        """Calls preprocess for each item; returns the batch of what it returned."""
        returned: List[Optional[Mapping[str, Any]]] = []
        for item in view.items:
            prepared: Optional[Mapping[str, Any]] = None
            try:
                prepared = self._worker.preprocess(item)
                if prepared is not None:
                    as_outputs("preprocess", prepared, list(self._worker.prepared))
            except Exception as error:
                self.fault(view, item.index, "preprocess", error)
            returned.append(prepared)
        if all(prepared is None for prepared in returned):
            return self._without_faults(view)
        for item, prepared in zip(view.items, returned):
            if prepared is None:
                returned[item.index] = {name: item[name] for name in view if name in item}
        return self._prepared(view, [prepared or {} for prepared in returned])

    def _prepared(self, view: Batch, returned: List[Mapping[str, Any]]) -> Batch:
        names = list({name: None for prepared in returned for name in prepared})
        specs = self._worker.prepared
        encoded: Dict[str, List[Any]] = {name: [] for name in names}
        for item, prepared in zip(view.items, returned):
            for name in names:
                value = prepared.get(name, ABSENT)
                spec = specs.get(name)
                if spec is not None and spec.lacks(value):
                    value = ABSENT
                if isinstance(spec, Tensor) and not view.failed(item) and not (value is ABSENT and spec.optional):
                    try:
                        if value is ABSENT:
                            raise BadOutput(f"it returned no {name!r}")
                        rows = item.rows if self._joins else None
                        value = item_body(repr(name), value, spec, self._arrays, rows)
                    except BadOutput as error:
                        self.fault(view, item.index, "preprocess", error)
                encoded[name].append(value)
        good = [i for i in range(len(view)) if not view.failed(i)]
        kept = [view._kept[i] for i in good]
        if not good:
            return view._keep(kept, {})
        inputs = {
            name: self._join(name, [values[i] for i in good], specs.get(name), view, good)
            for name, values in encoded.items()
        }
        return view._keep(kept, inputs)

    def _join(self, name: str, values: List[Any], spec: Optional[Spec], view: Batch, good: List[int]) -> Values:
        """Returns the input that the values of the items are."""
        if not isinstance(spec, Tensor):
            return Values(values)
        own = [None if v is ABSENT else Raw(v.datatype, v.shape, _bytes(v), v.size) for v in values]
        raws = [raw for raw in own if raw is not None]
        if not self._joins or spec.variable != "exact" or len(raws) < len(own):
            return Apart(own, memoryview(b""), self._arrays, spec, self._joins)
        if any(raw.shape[1:] != raws[0].shape[1:] for raw in raws):
            shapes = sorted({str(list(raw.shape[1:])) for raw in raws})
            raise BadOutput(
                f"preprocess returned {name!r} with rows of different shapes ({', '.join(shapes)}), "
                'which make no one array: say variable="pad" or "list" in prepared'
            )
        return Rows(join_rows(raws), [view.items[i].rows for i in good], self._arrays, spec)

    # --- after predict ---------------------------------------------------

    def _postprocess(self, view: Batch, outputs: Mapping[str, Any]) -> Dict[int, Dict[str, Body]]:
        """Calls postprocess for each item with its share; returns the outputs by the items' numbers."""
        for name, value in outputs.items():
            axis = view.rows if self._joins else len(view)
            wanted = len(view) if isinstance(value, (list, tuple)) else axis
            if not hasattr(value, "__len__") or isinstance(value, (str, dict)) or len(value) != wanted:
                length = len(value) if hasattr(value, "__len__") else "none"
                raise BadOutput(
                    f"predict returned {name!r}, a {type(value).__name__} of length {length}, wanted {wanted}: "
                    + (
                        "one value for each item"
                        if isinstance(value, (list, tuple))
                        else "one for each row of the batch"
                    )
                )
        outcomes: Dict[int, Dict[str, Body]] = {}
        for item in view.items:
            if view.failed(item):
                continue
            share = {
                name: value[item.index] if isinstance(value, (list, tuple)) or not self._joins else value[item.slice]
                for name, value in outputs.items()
            }
            try:
                returned = self._worker.postprocess(item, share)
                outcomes[item.number] = self._item_outputs("postprocess", item.rows, returned)
            except Exception as error:
                self.fault(view, item.index, "postprocess", error)
        return outcomes

    # --- replies ---------------------------------------------------------

    def result(self, batch: Batch, layout: Layout) -> Reply:
        """Returns the result that ends a batch: the parts laid out, faults and metadata. Raises BadOutput."""
        text = f'{{"type":"result","batch":{batch.id}'
        if layout.entries:
            text += f',"parts":[{",".join(layout.entries)}]'
        if self.answers and batch._faults:
            faults = [fault_of(number, error) for number, error in sorted(batch._faults.items())]
            for fault in faults:
                fault["message"] = str(fault["message"])[:_MESSAGE]
            text += f',"faults":{encode(faults)}'
        if self.answers and batch._metadata:
            metadata = [{"item": number, "values": values} for number, values in sorted(batch._metadata.items())]
            text += f',"metadata":{encode(metadata)}'
        if layout.size > self._max_frame:
            raise BadOutput(
                f"the outputs take {layout.size} bytes, and the host takes {self._max_frame} in a frame: "
                "lower the stage's batch size, or raise its limit"
            )
        header = (text + "}").encode("ascii")
        if len(header) > MAX_HEADER:
            raise BadOutput(
                f"the result's header takes {len(header)} bytes, and may take {MAX_HEADER}: "
                "return outputs joined, fewer metadata, shorter messages"
            )
        return header, layout.pieces, layout.size

    def error(self, batch: Batch, error: BaseException) -> Reply:
        """Returns the reply to a batch that failed as a whole."""
        alone = len(batch._headers) == 1
        if alone and isinstance(error, ItemError) and not is_out_of_memory(error):
            error.with_traceback(None)
            batch._faults = {0: error}
            try:
                return self.result(batch, Layout())
            except BadOutput:
                pass
        return error_header(error, batch.id), (), 0


def error_header(error: BaseException, batch: Optional[int] = None, trace: Optional[str] = None) -> bytes:
    """Returns the header of an error message: of a batch, or of the worker itself; trace is its traceback's text."""
    fields: Dict[str, Any] = {"type": "error"}
    if batch is not None:
        fields["batch"] = batch
    fields["kind"] = "out_of_memory" if is_out_of_memory(error) else "exception"
    fields["error"] = type(error).__name__
    fields["message"] = text_of(error)[:_MESSAGE]
    if trace is None:
        trace = "" if isinstance(error, BadOutput) else traceback_of(error)
    if trace:
        fields["traceback"] = trace[-_TRACEBACK:]
    return encode(fields).encode("ascii")


def _document(item: Item, name: str, data: bytes, spec: Bytes) -> Any:
    if isinstance(spec, Json) and is_packed(item.content_type(name)):
        try:
            return unpack(data)
        except ValueError as error:
            raise InvalidInput(name, f"input {name!r} is not MessagePack: {error}") from None
    try:
        text = str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(name, f"input {name!r} is not UTF-8: byte {error.start}") from None
    if not isinstance(spec, Json):
        return text
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise InvalidInput(name, f"input {name!r} is nested too deeply") from None
    except ValueError as error:
        raise InvalidInput(name, f"input {name!r} is not JSON: {error}") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _bytes(raw: Raw) -> memoryview:
    """Returns the bytes of a tensor that was encoded, which may be changed."""
    data = memoryview(raw.data).cast("B") if raw.size else memoryview(bytearray())
    return memoryview(bytearray(data)) if data.readonly else data


# --- checks of a predict message --------------------------------------------


def check_predict(header: Header) -> List[Dict[str, Any]]:
    """Returns the items; raises Violation where a key is missing or of another type."""
    items = load_items(header)
    if type(items) is not list or not items:
        raise Violation("predict: items is a list of at least one")
    if len(items) > MAX_ITEMS:
        raise Violation(f"predict: {len(items)} items, at most {MAX_ITEMS} are taken")
    if len(header) > 4:
        if type(header.get("warmup", False)) is not bool:
            raise Violation("predict: warmup is a boolean")
        if type(header.get("model", _NO_MODEL)) is not dict:
            raise Violation("predict: model is an object")
    if "parts" not in header:
        raise Violation("predict: it has no parts")
    if not _plain(items):
        for i, item in enumerate(items):
            _check_item(i, item)
    return items


_NO_MODEL: Dict[str, Any] = {}
_STRINGS, _NUMBERS = {str}, {int}
_id, _timeout = itemgetter("id"), itemgetter("timeout")


def _plain(items: List[Any]) -> bool:
    """Reports whether all items have an id, perhaps all a timeout, and nothing else: the usual, checked fast."""
    try:
        if set(map(type, map(_id, items))) != _STRINGS:
            return False
        keys = sum(map(len, items))
        if keys == len(items):
            return True
        if keys != 2 * len(items):
            return False
        timeouts = list(map(_timeout, items))
        return set(map(type, timeouts)) == _NUMBERS and min(timeouts) >= 1 and max(timeouts) <= MAX_NUMBER
    except (KeyError, TypeError):
        return False


def _check_item(i: int, item: Any) -> None:
    if type(item) is not dict or type(item.get("id")) is not str:
        raise Violation(f"predict: items[{i}]: an object with an id is wanted")
    rows = item.get("rows", 1)
    if type(rows) is not int or not 1 <= rows <= MAX_COUNT:
        raise Violation(f"predict: items[{i}]: rows is a whole number from 1")
    parameters, metadata, timeout = item.get("parameters"), item.get("metadata"), item.get("timeout", 1)
    if "parameters" in item:
        if type(parameters) is not dict or not all(map(_is_parameter, parameters.values())):
            raise Violation(f"predict: items[{i}]: parameters are booleans, numbers and strings by name")
    if "metadata" in item:
        if type(metadata) is not dict or any(type(v) is not str for v in metadata.values()):
            raise Violation(f"predict: items[{i}]: metadata are strings by name")
    if type(timeout) is not int or not 1 <= timeout <= MAX_NUMBER:
        raise Violation(f"predict: items[{i}]: timeout is whole milliseconds, at least 1")


def _is_parameter(value: Any) -> bool:
    """Reports whether a value is a boolean, a string, a number of 64 bits or a finite double."""
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 64
    if type(value) is float:
        return math.isfinite(value)
    return type(value) in (bool, str)
