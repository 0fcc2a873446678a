"""Runs batches: from a predict message to the result or error that ends it.

There are no sockets, threads and clocks here, except for the poll between single items.
``Runs.batch`` raises Violation for a message that breaks the protocol. ``Runs.run``
turns every other failure into a reply: a fault of an item, or an error of the batch.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from .arrays import Arrays
from .batches import Batch, Item, Plan, Source, check_predict
from .faults import (
    MAX_MESSAGE,
    InvalidInput,
    ItemError,
    ItemFailed,
    ModelGone,
    exception_of,
    fault_of,
    is_out_of_memory,
    of_validation,
)
from .frames import DEFERRED, MAX_HEADER, MAX_NUMBER, Buffer, Header, Parts, Violation, as_bytes, encode, message
from .models import Model, Models
from .parts import Body, Layout, Place, Raw, Received, entry_head, join_rows, read_parts, split_rows
from .specs import Json, Tensor, Text
from .values import ABSENT, BadOutput, Encoder, Tensors, Values, values_of
from .worker import Worker, joins_rows, overrides

# How often the loop over single items reads cancels, in seconds.
_POLL_S = 0.001

# A message to send: its header, and the pieces of its body with their size in bytes.
Reply = Tuple[bytes, Sequence[Buffer], int]


class Runs:
    """Runs the batches of one worker.

    max_frame bounds the body of a reply, in bytes. poll handles the messages that arrive
    while a batch runs. answers is False for the ranks of a gang whose outputs are not sent.
    models are those of a worker with several. declares has the inputs and outputs: the worker,
    or a model with its own.
    """

    def __init__(
        self,
        worker: Worker,
        arrays: Arrays,
        max_frame: int,
        poll: Callable[[Batch], None],
        answers: bool = True,
        models: Optional[Models] = None,
        declares: Union[Worker, Model, None] = None,
    ) -> None:
        declares = declares or worker
        self._worker = worker
        self._models = models
        self._arrays = arrays
        self._max_frame = max_frame
        self.answers = answers
        self._joins = joins_rows(worker)
        kind = type(worker)
        self._has_predict_item = overrides(kind, "predict_item")
        self._has_preprocess = overrides(kind, "preprocess")
        self._has_postprocess = overrides(kind, "postprocess")
        self._inputs = declares.inputs
        self._outputs = Encoder(declares.outputs, arrays, self._joins)
        self._prepared = Encoder(worker.prepared, arrays, self._joins)
        self._documents = {n: s for n, s in declares.inputs.items() if isinstance(s, (Text, Json))}

        # Whether predict gets the message's inputs as they are, and its outputs are sent as they are.
        self._plain = (
            self._joins
            and answers
            and not (self._has_predict_item or self._has_preprocess or self._has_postprocess or self._documents)
        )
        # Whether a message may be viewed by a plan, which models with equal parts share.
        self._plans = all(not isinstance(s, Tensor) or s.variable == "exact" for s in self._inputs.values())
        self._source = Source(self._read, poll, threading.Lock())
        self._predict = worker.predict
        self._count = len(declares.outputs)
        self._traits = arrays.traits
        self._process = os.getpid()
        # Outputs of earlier batches, by name, type and traits: the entry of such a part at
        # offset 0, the start of its entry elsewhere, its size in bytes, and its rows.
        self._known: Dict[Tuple[str, type, Any], Tuple[str, str, int, int]] = {}

    def in_forked_child(self) -> bool:
        """Reports whether this process is a child that the worker forked."""
        return os.getpid() != self._process

    # --- from the message ------------------------------------------------

    def batch(self, header: Header, body: memoryview, received: float) -> Batch:
        """Returns the batch of a message that arrived at this time.monotonic(), in seconds.

        Raises Violation. Items whose parsing is deferred are checked when they are used.
        """
        own = self._of_model(header)
        if own is not self:
            return own.batch(header, body, received)
        if self._plans and DEFERRED in header:
            plan = header["parts"].plan
            if plan is not None and plan.end <= len(body):
                return Batch(header, body, received, plan, self._source)
        number = header.get("batch")
        if type(number) is not int or not 0 <= number <= MAX_NUMBER:
            raise Violation("predict: batch is a whole number")
        batch = Batch(header, body, received, None, self._source)
        batch._complete()
        return batch

    def _of_model(self, header: Header) -> Runs:
        """Returns what runs a batch: this, or that of its model where the model has specs of its own."""
        model = self._models.get(header.get("model")) if self._models is not None else None
        if model is None or not (model.inputs or model.outputs):
            return self
        if model._runs is None:
            poll = self._source.poll
            model._runs = Runs(self._worker, self._arrays, self._max_frame, poll, self.answers, declares=model)
        own: Runs = model._runs
        return own

    def _read(self, header: Header, body: memoryview) -> Tuple[Dict[str, Values], Dict[str, Received], List[int]]:
        """Parses and checks a message in full; see Source.read."""
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
        if self._plain and self._plans and type(header["parts"]) is Parts:
            header["parts"].plan = self._make_plan(columns, total)
        return inputs, columns, rows

    def _make_plan(self, columns: Mapping[str, Received], rows: int) -> Optional[Plan]:
        """Returns the plan for messages with the same parts; None if they have to be checked each time."""
        if not columns:
            return None  # parts tell the rows
        views = {}
        end = 0
        for name, raw in columns.items():
            if not isinstance(raw, Raw) or raw.datatype == "BYTES":
                return None
            views[name] = self._arrays.viewer(raw)
            end = max(end, raw.at + raw.size)
        return Plan(rows, views, end)

    # --- to the reply ----------------------------------------------------

    def run(self, batch: Batch) -> Reply:
        """Runs a batch and returns the reply that ends it; raises Violation if deferred parsing fails."""
        try:
            self.find_model(batch)
            own = self._of_model(batch._header)
            if own is not self:
                return own.run(batch)
            if not self._plain:
                return self._run(batch)
            if batch._spans is None:
                outputs = self._predict(batch)
            else:
                with batch.span("predict"):
                    outputs = self._predict(batch)
            plan = batch._plan
            if plan is not None and type(outputs) is dict and len(outputs) == self._count:
                reply = self._known_result(batch.id, plan.rows, outputs)
                if reply is not None:
                    return reply if batch._spans is None else (batch._spans.added_to(reply[0]), *reply[1:])
            return self._batch_result(batch, batch, outputs)
        except BaseException as error:  # sys.exit in predict must not end the process
            if isinstance(error, Violation) or self.in_forked_child():
                raise
            return self.error(batch, error)

    def find_model(self, batch: Batch) -> None:
        """Gives a batch its model; raises ModelGone."""
        if self._models is not None:
            batch._model = self._models.find(batch._header.get("model"))

    def _known_result(self, batch: int, rows: int, outputs: Mapping[str, Any]) -> Optional[Reply]:
        """Returns the result of outputs that are all like those of earlier batches; None if one is new."""
        entries, pieces, at = "", [], 0
        for name, value in outputs.items():
            try:
                known = self._known.get((name, type(value), self._traits(value)))
            except AttributeError:
                return None
            if known is None:
                return None
            first, head, size, known_rows = known
            if known_rows != rows:
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

    def _remember(self, name: str, value: Any, raw: Raw) -> None:
        """Keeps how an array is encoded, for _known_result, if it was encoded without a copy."""
        if raw.data is not value or not hasattr(value, "shape"):  # as array.array and bytes have none
            return
        if len(self._known) >= 1024:  # a bound for shapes that never repeat
            self._known.clear()
        head = entry_head(name, raw.datatype, raw.shape)
        key = (name, type(value), self._traits(value))
        self._known[key] = (f'{head}"at":0,"size":{raw.size}}}', head, raw.size, raw.shape[0])

    def _run(self, batch: Batch) -> Reply:
        view = self.decoded(batch)
        if self._has_predict_item:
            with batch.span("predict"):
                outcomes = self._run_items(view)
            return self._items_result(batch, outcomes)
        if self._has_preprocess:
            with batch.span("preprocess"):
                view = self._preprocess(view)
        if not view._kept:
            return self.result(batch, Layout())
        with batch.span("predict"):
            outputs = self._worker.predict(view)
        return self._batch_result(batch, view, outputs)

    def _batch_result(self, batch: Batch, view: Batch, outputs: Any) -> Reply:
        """Returns the result of the outputs that predict returned for the items of view, some or all of the batch."""
        layout = Layout()
        faults = batch._faults
        if not self.answers or len(faults) == len(batch._headers):
            return self.result(batch, layout)
        outputs = self._outputs.by_name("predict", outputs)
        if self._has_postprocess:
            with batch.span("postprocess"):
                outcomes = self._postprocess(view, outputs)
            return self._items_result(batch, outcomes)
        self._outputs.check_names("predict", outputs, of_item=False)
        rows = view._rows
        has_fault = [number in faults for number in view._kept]
        for name, value in outputs.items():
            if value is None:
                continue
            column = self._outputs.column(name, value, rows, has_fault)
            if type(column) is Raw and view is batch:
                layout.add(name, None, column)
                self._remember(name, value, column)
                continue
            bodies: Sequence[Optional[Body]] = split_rows(column, rows) if isinstance(column, Raw) else column
            if faults:
                bodies = [None if failed else body for failed, body in zip(has_fault, bodies)]
            layout.add_items(name, view._kept, bodies, join=self._joins and view is batch and not faults)
        return self.result(batch, layout)

    def _items_result(self, batch: Batch, outcomes: Mapping[int, Mapping[str, Body]]) -> Reply:
        """Returns the result of outputs by the item's number and by name."""
        layout = Layout()
        if self.answers:
            join = self._joins and len(outcomes) == len(batch._headers)
            for name in dict.fromkeys(name for outputs in outcomes.values() for name in outputs):
                layout.add_items(name, list(outcomes), [outputs.get(name) for outputs in outcomes.values()], join)
        return self.result(batch, layout)

    # --- single items ----------------------------------------------------

    def _run_items(self, view: Batch) -> Dict[int, Dict[str, Body]]:
        """Calls predict_item for each item; returns the outputs by the item's number."""
        outcomes: Dict[int, Dict[str, Body]] = {}
        polled = time.monotonic()
        for item in view.items:
            if time.monotonic() - polled > _POLL_S:
                view._source.poll(view)
                polled = time.monotonic()
            if item.number in view._cancelled:
                view.fail(item, ItemFailed("the request was cancelled"))
                continue
            try:
                returned = self._worker.predict_item(item)
                if self.answers:
                    outcomes[item.number] = self._outputs.item_outputs("predict_item", returned, item.rows)
            except Exception as error:
                view.fail(item, error)
        return {number: bodies for number, bodies in outcomes.items() if number not in view._faults}

    # --- before predict --------------------------------------------------

    def decoded(self, batch: Batch) -> Batch:
        """Decodes text and JSON; returns the batch of the items whose inputs are valid."""
        if not self._documents:
            return batch
        inputs = dict(batch._inputs)
        for name, spec in self._documents.items():
            column = batch._columns.get(name)
            if not isinstance(column, list):
                continue
            values: List[Any] = []
            for i, part in enumerate(column):
                value = inputs[name].of(i)
                if isinstance(part, Place):
                    try:
                        value = spec.decode(value, part.content_type)
                    except ValueError as error:
                        batch.fail(i, InvalidInput(name, f"input {name!r} {error}"))
                values.append(value)
            inputs[name] = Values(values)
        return batch._keep(range(len(batch)), inputs)._without_faults()

    def _preprocess(self, view: Batch) -> Batch:
        """Calls preprocess for each item; returns the batch of the inputs that it returned."""
        returned: List[Optional[Mapping[str, Any]]] = []
        for item in view.items:
            prepared: Optional[Mapping[str, Any]] = None
            try:
                value = self._worker.preprocess(item)
                if value is not None:
                    prepared = self._prepared.by_name("preprocess", value)
            except Exception as error:
                view.fail(item, error)
            returned.append(prepared)
        if all(prepared is None for prepared in returned):
            return view._without_faults()
        own = [
            {name: item[name] for name in view if name in item} if prepared is None else prepared
            for item, prepared in zip(view.items, returned)
        ]
        columns = {
            name: [self._prepared_value(view, item, name, inputs) for item, inputs in zip(view.items, own)]
            for name in dict.fromkeys(name for inputs in own for name in inputs)
        }
        good = [i for i in range(len(view)) if not view.failed(i)]
        rows = [view.items[i].rows for i in good]
        joined = {name: self._join(name, [values[i] for i in good], rows) for name, values in columns.items()}
        return view._keep(good, joined if good else {})

    def _prepared_value(self, view: Batch, item: Item, name: str, inputs: Mapping[str, Any]) -> Any:
        """Returns one input of one item, encoded if its spec is a tensor; ABSENT if there is none."""
        value = inputs.get(name, ABSENT)
        spec = self._prepared.specs.get(name)
        if spec is not None and spec.lacks(value):
            value = ABSENT
        if not isinstance(spec, Tensor) or view.failed(item) or (value is ABSENT and spec.optional):
            return value
        try:
            if value is ABSENT:
                raise BadOutput(f"it returned no {name!r}")
            return self._prepared.item(repr(name), name, value, item.rows)
        except BadOutput as error:
            view.fail(item, error)
            return ABSENT

    def _join(self, name: str, values: List[Any], rows: List[int]) -> Values:
        """Returns one input of all items, joined if its spec is a tensor and all items have one."""
        spec = self._prepared.specs.get(name)
        if not isinstance(spec, Tensor):
            return Values(values)
        own = [None if v is ABSENT else Raw(v.datatype, v.shape, _writable(v), v.size) for v in values]
        raws = [raw for raw in own if raw is not None]
        if not raws or not self._joins or spec.variable != "exact" or len(raws) < len(own):
            return Tensors(self._arrays, spec, self._joins, own)
        if any(raw.shape[1:] != raws[0].shape[1:] for raw in raws):
            shapes = sorted({str(list(raw.shape[1:])) for raw in raws})
            raise BadOutput(
                f"preprocess returned {name!r} with rows of different shapes ({', '.join(shapes)}), "
                'which make no one array: set variable="pad" or "list" in prepared'
            )
        return Tensors(self._arrays, spec, self._joins, joined=join_rows(raws), rows=rows)

    # --- after predict ---------------------------------------------------

    def _postprocess(self, view: Batch, outputs: Mapping[str, Any]) -> Dict[int, Dict[str, Body]]:
        """Calls postprocess for each item with its share; returns the outputs by the item's number."""
        for name, value in outputs.items():
            listed = isinstance(value, (list, tuple))
            wanted = view.rows if self._joins and not listed else len(view)
            if not hasattr(value, "__len__") or isinstance(value, (str, dict)) or len(value) != wanted:
                length = len(value) if hasattr(value, "__len__") else "none"
                each = "one value for each item" if listed else "one for each row of the batch"
                raise BadOutput(
                    f"predict returned {name!r}, a {type(value).__name__} of length {length}, expected {wanted}: {each}"
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
                outcomes[item.number] = self._outputs.item_outputs("postprocess", returned, item.rows)
            except Exception as error:
                view._fail(item, error)  # what does not validate here is no input
        return outcomes

    # --- replies ---------------------------------------------------------

    def result(self, batch: Batch, layout: Layout) -> Reply:
        """Returns the result that ends a batch: these parts, its faults and metadata. Raises BadOutput."""
        text = f'{{"type":"result","batch":{batch.id}'
        if layout.entries:
            text += f',"parts":[{",".join(layout.entries)}]'
        if self.answers and batch._faults:
            faults: List[Dict[str, Any]] = [fault_of(number, error) for number, error in sorted(batch._faults.items())]
            for fault in faults:
                fault["message"] = str(fault["message"])[:MAX_MESSAGE]
                if fault["item"] in batch._raised:
                    fault["exception"] = batch._raised[fault["item"]]
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
        return self._with_spans(batch, header), layout.pieces, layout.size

    def error(self, batch: Batch, error: BaseException) -> Reply:
        """Returns the reply to a batch that failed as a whole."""
        if len(batch._headers) == 1:
            error = of_validation(error)
        if len(batch._headers) == 1 and isinstance(error, ItemError) and not is_out_of_memory(error):
            BaseException.with_traceback(error, None)
            batch._faults = {0: error}
            try:
                return self.result(batch, Layout())
            except BadOutput:
                pass
        return self._with_spans(batch, error_header(error, batch.id)), (), 0

    def _with_spans(self, batch: Batch, header: bytes) -> bytes:
        return batch._spans.added_to(header) if batch._spans is not None and self.answers else header


def error_header(
    error: BaseException,
    batch: Optional[int] = None,
    trace: Optional[str] = None,
    load: Optional[int] = None,
    kind: str = "",
) -> bytes:
    """Returns the header of an error message: of a batch, of a request about a model, or of the worker.

    trace is the text of the traceback; None: that of the error. kind is the protocol's; empty:
    the one that fits.
    """
    fields: Dict[str, Any] = {"batch": batch} if batch is not None else {} if load is None else {"load": load}
    if not kind and isinstance(error, ModelGone):
        kind = "invalid_model"
    fields["kind"] = kind or ("out_of_memory" if is_out_of_memory(error) else "exception")
    return message("error", **fields, **exception_of(error, trace))


def _writable(raw: Raw) -> memoryview:
    """Returns the bytes of an encoded tensor as a writable buffer."""
    data = as_bytes(raw.data)
    return memoryview(bytearray(data)) if data.readonly else data
