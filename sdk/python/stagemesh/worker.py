"""Worker, the base class of all workers: its Context, and the checks of a declaration."""

from __future__ import annotations

import inspect
import logging
import os
from typing import Any, AsyncIterator, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Type, Union

from .arrays import Arrays
from .batches import Batch, Item
from .models import Model, ModelLimits
from .parts import Layout
from .specs import Parameter, Spec, Tensor, check_parameters, check_specs
from .values import Encoder

MAX_ENGINE = 200

Outputs = Mapping[str, Any]
Examples = Union[Mapping[str, Mapping[str, Any]], Sequence[Mapping[str, Any]]]


class Context:
    """The argument of setup: what the host and the configuration set for this worker.

    options      the options of the stage's configuration
    devices      of the worker, as its configuration names them; device is the first, or None
    stage, index, incarnation    name of the stage, index of the worker in it from 0, how
                 often that worker has been started, from 1
    rank, local_rank, world_size    in a gang; 0, 0 and 1 for a worker of one process
    max_size     rows of the largest batch
    slots        how many batches may run at a time
    memory       bytes of host and devices that models may take, of a worker with several; 0: no bound
    log          a logger whose lines go to the host's log
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        devices: Sequence[str] = (),
        max_size: int = 1,
        slots: int = 1,
        environ: Optional[Mapping[str, str]] = None,
        progress: Optional[Callable[[str], None]] = None,
        memory: Optional[Mapping[str, int]] = None,
    ) -> None:
        environ = os.environ if environ is None else environ
        self.options: Dict[str, Any] = dict(options)
        self.devices: List[str] = list(devices)
        self.max_size = max_size
        self.slots = slots
        self.memory = (memory or {}).get("host", 0), (memory or {}).get("device", 0)
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
        """The first of the devices; None if the worker has none."""
        return self.devices[0] if self.devices else None

    def progress(self, message: str) -> None:
        """Reports what setup is doing, for a person who waits: ``loading shard 3 of 12``."""
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
        raise ValueError(f"environment: {name} is {text!r}, expected a whole number") from None


class Worker:
    """The base of all workers: declare inputs and outputs, and write predict, predict_item or stream.

    inputs, outputs    specs by name; without specs nothing is checked. setup may set them on self
    batch_axis         "rows": axis 0 of every tensor is rows, and items are joined on it;
                       "none": items are never joined, and batch[name] is a list
    parameters         what item.parameters may have: Parameter by name, {} for none; None, the
                       default, is anything. Callers get an error for other names
    prepared           specs of the values that preprocess returns, for tensors that should be
                       joined; without a spec batch[name] is a list of the returned values
    examples           inputs that the worker answers: a list, or by name. Warm-up and tools use them
    arrays             "numpy" or "buffer" (memoryviews); serve(arrays=...) overrides it
    concurrency        how many batches may run at a time, each in its own thread; how many
                       streams, where those of an ``async def stream`` share one event loop
    collect            of stream: whether the whole answer follows the chunks, for callers that
                       do not stream
    engine_name        names what runs the batches, for stagemesh status, as "torch 2.9, cuda:0", in
                       at most 200 bytes; hosts of a stage should agree on its first word
    models             ModelLimits of a worker that loads several models; it has load(self, model)
                       and may have unload(self, model) and size(self, model), see models.py

    All methods run in the main thread, except batches with concurrency above 1, streams, and
    load, unload and size, which have threads of their own.
    """

    inputs: Mapping[str, Spec] = {}
    outputs: Mapping[str, Spec] = {}
    parameters: Optional[Mapping[str, Parameter]] = None
    prepared: Mapping[str, Spec] = {}
    batch_axis: str = "rows"
    examples: Examples = ()
    arrays: str = "numpy"
    concurrency: int = 1
    collect: bool = True
    engine_name: str = ""
    models: Any = None

    def setup(self, ctx: Context) -> None:
        """Called once, before the first batch: load the model here."""

    def predict(self, batch: Batch) -> Outputs:
        """Returns the outputs of a batch by name.

        A tensor is one array, or nested lists, whose axis 0 is the batch's rows, or a list
        with one array for each item. Blobs are a list with one value for each item.
        """
        raise NotImplementedError

    def predict_item(self, item: Item) -> Outputs:
        """Returns the outputs of one item by name; for work that gains nothing from batches.

        An exception is the outcome of that item.
        """
        raise NotImplementedError

    def stream(self, item: Item) -> Union[Iterator[Any], AsyncIterator[Any]]:
        """Yields the answer to one item in chunks; a generator, by ``def`` or ``async def``.

        A chunk is a dict of some or all outputs by name; if only one output is declared,
        its value alone is enough. An exception is the outcome of that item. When the item
        is cancelled, an ``async def`` is cancelled at its await, as asyncio does; a ``def``
        is closed at its next yield.
        """
        raise NotImplementedError

    def preprocess(self, item: Item) -> Optional[Outputs]:
        """Returns new inputs for an item, which replace its inputs before predict; None: they stay.

        An exception is the outcome of that item, which predict then does not get.
        """
        raise NotImplementedError

    def postprocess(self, item: Item, outputs: Dict[str, Any]) -> Outputs:
        """Returns the outputs of one item, from its share of the values that predict returned.

        An exception is the outcome of that item.
        """
        raise NotImplementedError

    def teardown(self) -> None:
        """Called once, after the last batch of a worker that was asked to stop."""


def overrides(kind: Type[Worker], method: str) -> bool:
    """Reports whether a worker defines a method itself."""
    return getattr(kind, method) is not getattr(Worker, method)


def holds_models(kind: Type[Worker]) -> bool:
    """Reports whether a worker loads several models."""
    return isinstance(kind.models, ModelLimits)


def check_class(kind: Any) -> None:
    """Raises ValueError if a class cannot be served, with a text that tells what to write."""
    if not isinstance(kind, type) or not issubclass(kind, Worker) or kind is Worker:
        raise ValueError(f"serve: expected a subclass of stagemesh.Worker, got {kind!r}")
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
    plain = ["setup", "predict", "predict_item", "preprocess", "postprocess", "teardown"]
    if holds_models(kind):
        if not callable(getattr(kind, "load", None)):
            raise ValueError(f"{name}.models: the worker has no load(self, model)")
        plain += ["load", "unload", "size"]
    for method in plain:
        function = getattr(kind, method, None)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            do = "write it as a plain function"
            if method.startswith("predict"):
                do = "return the outputs, or name it stream(self, item) to answer in chunks"
            raise ValueError(f"{name}.{method}: it yields; {do}")
        if inspect.iscoroutinefunction(function):
            raise ValueError(f"{name}.{method}: it is async; write it as a plain function")
    if "stream" in have:
        stream = kind.stream
        if inspect.iscoroutinefunction(stream):
            raise ValueError(f"{name}.stream: it is async and does not yield; yield each chunk: yield {{...}}")
        if not inspect.isgeneratorfunction(stream) and not inspect.isasyncgenfunction(stream):
            raise ValueError(
                f"{name}.stream: it does not yield; yield each chunk, also those of another generator: yield from ..."
            )
        if type(kind.collect) is not bool:
            raise ValueError(f"{name}.collect: expected True or False, got {kind.collect!r}")
    if type(kind.concurrency) is not int or kind.concurrency < 1:
        raise ValueError(f"{name}.concurrency: expected a whole number from 1, got {kind.concurrency!r}")


def joins_rows(worker: Worker) -> bool:
    """Reports whether axis 0 of tensors is rows, and items are joined on it; streamed items never are."""
    return worker.batch_axis == "rows" and not overrides(type(worker), "stream")


def has_tensors(worker: Worker) -> bool:
    """Reports whether an input or output may be a tensor: one declares it, or nothing is declared."""
    declared = worker.inputs, worker.outputs, worker.prepared
    return not (worker.inputs and worker.outputs) or any(isinstance(s, Tensor) for d in declared for s in d.values())


def check_worker(worker: Worker) -> None:
    """Raises ValueError if what a worker declares is invalid; called after setup, which may declare it."""
    name = type(worker).__name__
    if worker.batch_axis not in ("rows", "none"):
        raise ValueError(f'{name}.batch_axis: {worker.batch_axis!r}; use "rows" or "none"')
    engine = worker.engine_name
    if not isinstance(engine, str) or len(engine.encode()) > MAX_ENGINE:
        raise ValueError(f"{name}.engine_name: expected text of at most {MAX_ENGINE} bytes, got {engine!r:.300}")
    joins = joins_rows(worker)
    check_specs(f"{name}.inputs", worker.inputs, joins)
    check_specs(f"{name}.outputs", worker.outputs, joins)
    check_specs(f"{name}.prepared", worker.prepared, joins)
    check_parameters(f"{name}.parameters", worker.parameters)


def wire_spec(worker: Worker, arrays: Arrays, layout: Layout) -> Dict[str, Any]:
    """Returns the spec that ready carries, and adds the bytes of the examples to the layout.

    Raises ValueError if an example is invalid.
    """
    spec = _wire_parts(worker, worker)
    encoder = Encoder(worker.inputs, arrays, joins_rows(worker))
    where = f"{type(worker).__name__}.examples"
    examples = []
    for name, inputs in _named_examples(where, worker.examples):
        if not isinstance(name, str) or not name:
            raise ValueError(f"{where}: {name!r} is not a name")
        if not isinstance(inputs, Mapping):
            raise ValueError(f"{where}: {name}: expected a dict of inputs, got {inputs!r}")
        first = len(layout.entries)
        for key, body in encoder.inputs(f"{where}: {name}", inputs).items():
            layout.add(key, None, body)
        examples.append({"name": name, "inputs": layout.take_entries(first)})
    if examples:
        spec["examples"] = examples
    return spec


def wire_model(worker: Worker, model: Model) -> Dict[str, Any]:
    """Returns the spec that loaded carries, for a model with specs of its own; raises ValueError."""
    name = f"{type(worker).__name__}.load: model {model.id}"
    if overrides(type(worker), "stream"):
        raise ValueError(f"{name}: inputs and outputs of a worker that streams are those of the worker")
    check_specs(f"{name}: inputs", model.inputs, joins_rows(worker))
    check_specs(f"{name}: outputs", model.outputs, joins_rows(worker))
    return _wire_parts(worker, model)


def _wire_parts(worker: Worker, declares: Union[Worker, Model]) -> Dict[str, Any]:
    """Returns a spec without examples."""
    spec: Dict[str, Any] = {
        "batch_axis": "rows" if joins_rows(worker) else "none",
        "inputs": [spec.wire(name) for name, spec in declares.inputs.items()],
        "outputs": [spec.wire(name) for name, spec in declares.outputs.items()],
    }
    if overrides(type(worker), "predict_item"):
        spec["one_by_one"] = True
    if worker.parameters is not None:
        spec["parameters"] = [parameter.wire(name) for name, parameter in worker.parameters.items()]
    if overrides(type(worker), "stream") and not worker.collect:
        for output in spec["outputs"]:
            output["optional"] = True  # the end of a stream has none
    return spec


def _named_examples(where: str, examples: Any) -> List[Tuple[Any, Any]]:
    if isinstance(examples, Mapping):
        return list(examples.items())
    if isinstance(examples, (list, tuple)):
        return [(f"example {i + 1}", inputs) for i, inputs in enumerate(examples)]
    raise ValueError(f"{where}: expected a list or a dict, got {type(examples).__name__}")
