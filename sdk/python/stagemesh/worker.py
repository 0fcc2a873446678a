"""What an author writes: a subclass of Worker. And what it is told: a Context."""

from __future__ import annotations

import inspect
import logging
import os
from typing import Any, AsyncIterator, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Type, Union

from .arrays import Arrays
from .batches import Batch, Item
from .outputs import encode_input
from .parts import Layout
from .specs import Spec, check_specs

__all__ = ["Context", "Worker"]

Outputs = Mapping[str, Any]
Examples = Union[Mapping[str, Mapping[str, Any]], Sequence[Mapping[str, Any]]]


class Context:
    """What a worker is told before its first batch.

    options      the object that the stage's configuration hands to the worker
    devices      that it has, as its configuration names them; device is the first, or None
    stage, index, incarnation    name of the stage, number of the worker in it from 0, how
                 often that worker has been started, from 1
    rank, local_rank, world_size    of a gang; 0, 0 and 1 for a worker of one process
    max_size     rows of the largest batch
    slots        how many batches may run at a time
    log          a logger; its lines go to the host's log
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        devices: Sequence[str] = (),
        max_size: int = 1,
        slots: int = 1,
        environ: Optional[Mapping[str, str]] = None,
        progress: Optional[Callable[[str], None]] = None,
    ) -> None:
        environ = os.environ if environ is None else environ
        self.options: Dict[str, Any] = dict(options)
        self.devices: List[str] = list(devices)
        self.max_size = max_size
        self.slots = slots
        self.stage = environ.get("STAGEMESH_STAGE", "")
        self.index = _number(environ, "STAGEMESH_WORKER", 0)
        self.incarnation = _number(environ, "STAGEMESH_INCARNATION", 1)
        self.rank = _number(environ, "RANK", 0)
        self.local_rank = _number(environ, "LOCAL_RANK", 0)
        self.world_size = _number(environ, "WORLD_SIZE", 1)
        self.log = logging.getLogger("stagemesh.worker")
        self._progress = progress

    @property
    def device(self) -> Optional[str]:
        """The first of the devices; None where the worker has none."""
        return self.devices[0] if self.devices else None

    def progress(self, message: str) -> None:
        """Says what setup is doing, for a person who waits: ``loading shard 3 of 12``."""
        if self._progress is None:
            self.log.info("%s", message)
        else:
            self._progress(message)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment: {name} is {text!r}, a whole number is wanted") from None


class Worker:
    """The base of all workers: declare inputs and outputs, and write predict, predict_item or stream.

    inputs, outputs    specs by name; none: anything is taken, nothing is checked. They may be
                       set in setup too, on self
    batch_axis         "rows": axis 0 of every tensor is rows, and items are joined on it;
                       "none": items are never joined, and batch[name] is a list
    prepared           specs of what preprocess returns, where it returns tensors that are to be
                       joined; without a spec batch[name] is a list of what it returned
    examples           inputs that the worker answers: a list, or by name. Warm-up and tools use them
    arrays             "numpy" or "buffer" (memoryviews); serve(arrays=...) comes before it
    concurrency        how many batches may run at a time, each in a thread of its own; how many
                       streams, of which those of an ``async def stream`` share one event loop
    collect            of stream: whether the whole answer follows the chunks, for callers that
                       do not stream

    All methods run in one thread, but with concurrency above 1, and but for stream, which
    runs in another one than setup and teardown.
    """

    inputs: Mapping[str, Spec] = {}
    outputs: Mapping[str, Spec] = {}
    prepared: Mapping[str, Spec] = {}
    batch_axis: str = "rows"
    examples: Examples = ()
    arrays: str = "numpy"
    concurrency: int = 1
    collect: bool = True

    def setup(self, ctx: Context) -> None:
        """Called once, before the first batch: load the model here."""

    def predict(self, batch: Batch) -> Outputs:
        """Returns the outputs of a batch by name.

        A tensor is one array, or nested lists, whose axis 0 is the batch's rows, or a
        list with one array for each item; blobs are a list with one value for each
        item.
        """
        raise NotImplementedError

    def predict_item(self, item: Item) -> Outputs:
        """Returns the outputs of one item by name; for work that gains nothing from batches.

        What it raises is the outcome of that item.
        """
        raise NotImplementedError

    def stream(self, item: Item) -> Union[Iterator[Any], AsyncIterator[Any]]:
        """Yields the answer to one item in chunks; a generator, by ``def`` or ``async def``.

        A chunk is a dict of outputs by name, of which it may have some; where one output
        is declared, its value alone will do. What it raises is the outcome of that item.
        When nobody waits for the item any more an ``async def`` is cancelled at its
        await, as asyncio does; a ``def`` is closed at its next yield.
        """
        raise NotImplementedError

    def preprocess(self, item: Item) -> Optional[Outputs]:
        """Returns what takes the place of an item's inputs before predict; None: they stay.

        What it raises is the outcome of that item, which predict then does not see.
        """
        raise NotImplementedError

    def postprocess(self, item: Item, outputs: Dict[str, Any]) -> Outputs:
        """Returns the outputs of one item, made of its share of what predict returned.

        What it raises is the outcome of that item.
        """
        raise NotImplementedError

    def teardown(self) -> None:
        """Called once, after the last batch of a worker that was asked to stop."""


def overrides(kind: Type[Worker], method: str) -> bool:
    """Reports whether a worker has a method of its own."""
    return getattr(kind, method) is not getattr(Worker, method)


def check_class(kind: Any) -> None:
    """Raises ValueError where a class cannot be served, and says what to write."""
    if not isinstance(kind, type) or not issubclass(kind, Worker) or kind is Worker:
        raise ValueError(f"serve: a subclass of stagemesh.Worker is wanted, got {kind!r}")
    name = kind.__name__
    have = [method for method in ("predict", "predict_item", "stream") if overrides(kind, method)]
    if not have:
        raise ValueError(
            f"{name}: it has neither predict(self, batch) nor predict_item(self, item) nor stream(self, item)"
        )
    if len(have) > 1:
        listed = ", ".join(have[:-1]) + " and " + have[-1]
        raise ValueError(f"{name}: it has {'both ' if len(have) == 2 else ''}{listed}; keep one")
    for step in ("preprocess", "postprocess"):
        if have != ["predict"] and overrides(kind, step):
            raise ValueError(f"{name}: {step} goes with predict; do its work in {have[0]}")
    for method in ("setup", "predict", "predict_item", "preprocess", "postprocess", "teardown"):
        function = getattr(kind, method)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            do = "write it as a plain function"
            if method.startswith("predict"):
                do = "return the outputs, or name it stream(self, item) to answer in chunks"
            raise ValueError(f"{name}.{method}: it yields; {do}")
        if inspect.iscoroutinefunction(function):
            raise ValueError(f"{name}.{method}: it is async; write it as a plain function")
    if "stream" in have:
        _check_stream(kind)
    if type(kind.concurrency) is not int or kind.concurrency < 1:
        raise ValueError(f"{name}.concurrency: a whole number from 1 is wanted, got {kind.concurrency!r}")


def _check_stream(kind: Type[Worker]) -> None:
    """Raises ValueError where a worker's stream is no generator."""
    name, function = kind.__name__, kind.stream
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{name}.stream: it is async and does not yield; yield each chunk: yield {{...}}")
    if not inspect.isgeneratorfunction(function) and not inspect.isasyncgenfunction(function):
        raise ValueError(
            f"{name}.stream: it does not yield; yield each chunk, also those of another generator: yield from ..."
        )
    if type(kind.collect) is not bool:
        raise ValueError(f"{name}.collect: True or False is wanted, got {kind.collect!r}")


def axis_of(worker: Worker) -> str:
    """Returns the batch axis: items that are streamed are never joined."""
    return "none" if overrides(type(worker), "stream") else worker.batch_axis


def check_worker(worker: Worker) -> None:
    """Raises ValueError where what a worker declares cannot be; called after setup."""
    name = type(worker).__name__
    if worker.batch_axis not in ("rows", "none"):
        raise ValueError(f'{name}.batch_axis: {worker.batch_axis!r}; use "rows" or "none"')
    rows = axis_of(worker) == "rows"
    check_specs(f"{name}.inputs", worker.inputs, rows)
    check_specs(f"{name}.outputs", worker.outputs, rows)
    check_specs(f"{name}.prepared", worker.prepared, rows)


def examples_of(worker: Worker) -> List[Tuple[str, Mapping[str, Any]]]:
    """Returns the worker's examples as pairs of name and inputs."""
    examples = worker.examples
    if isinstance(examples, Mapping):
        pairs = list(examples.items())
    elif isinstance(examples, (list, tuple)):
        pairs = [(f"example {i + 1}", inputs) for i, inputs in enumerate(examples)]
    else:
        raise ValueError(f"{type(worker).__name__}.examples: a list or a dict is wanted, got {type(examples).__name__}")
    where = f"{type(worker).__name__}.examples"
    for name, inputs in pairs:
        if not isinstance(name, str) or not name:
            raise ValueError(f"{where}: {name!r} is no name")
        if not isinstance(inputs, Mapping):
            raise ValueError(f"{where}: {name}: a dict of inputs is wanted, got {inputs!r}")
        for key in inputs:
            if not isinstance(key, str) or not key:
                raise ValueError(f"{where}: {name}: {key!r} is no name of an input")
            if worker.inputs and key not in worker.inputs:
                raise ValueError(
                    f"{where}: {name}: input {key!r} is not declared; inputs are {', '.join(map(repr, worker.inputs))}"
                )
    return pairs


def wire_spec(worker: Worker, arrays: Arrays, layout: Layout) -> Dict[str, Any]:
    """Returns the spec that goes with ready; the examples' bytes are added to the layout."""
    spec: Dict[str, Any] = {
        "batch_axis": axis_of(worker),
        "inputs": [spec.wire(name) for name, spec in worker.inputs.items()],
        "outputs": [spec.wire(name) for name, spec in worker.outputs.items()],
    }
    if overrides(type(worker), "stream") and not worker.collect:
        for output in spec["outputs"]:
            output["optional"] = True  # at the end of a stream there is none
    examples = []
    for name, inputs in examples_of(worker):
        first = len(layout.entries)
        for key, value in inputs.items():
            where = f"{type(worker).__name__}.examples: {name}"
            body = encode_input(where, key, value, worker.inputs.get(key), arrays, axis_of(worker) == "rows")
            layout.add(key, None, body)
        examples.append({"name": name, "inputs": layout.parsed(first)})
    if examples:
        spec["examples"] = examples
    return spec
