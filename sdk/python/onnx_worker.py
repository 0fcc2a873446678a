"""The worker of the runner ``onnx``: an ONNX model, run by the onnxruntime of this Python.

The host's program has this file beside the SDK and runs it by its path. Its options are
OnnxSettings of services/runners.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import mmap
import os
import re
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Set, Tuple

import numpy as np
import onnxruntime as ort

from stagemesh import Batch, Context, InvalidInput, OutOfMemory, Parameter, Tensor, Worker, serve

# Datatypes and dtypes by the element types of ONNX. BF16 has its bits in uint16.
_TYPES = {"float": ("FP32", "f4"), "double": ("FP64", "f8"), "float16": ("FP16", "f2"), "bfloat16": ("BF16", "u2")}
_TYPES.update({"bool": ("BOOL", "?"), "string": ("BYTES", "O")})
_TYPES.update({f"{k}{8 * n}": (f"{k}{8 * n}".upper(), f"{k[0]}{n}") for k in ("int", "uint") for n in (1, 2, 4, 8)})
_TYPES = {f"tensor({name})": pair for name, pair in _TYPES.items()}

_NO_ONNX = "it is no ONNX file, or cut; export or copy it again"
_BF16 = 16  # in onnx.proto3
_EXTENTS = (1, 32, 64, 224, 512)  # of dynamic axes, until the model runs: convolutions need more than 1
_KEPT = 4  # optimised models of a stage, because machines that share the folder may differ
_NO_MEMORY = "out of memory|allocate memory|bad.?alloc"
_MOST_CACHED = 1 << 30  # bytes; a file of ONNX has at most 2 GiB


class Refused(Exception):
    """The model, or an option, cannot be used here."""

    explained = True  # its text tells all, and a traceback nothing


class Runtime:
    """How a stage's models run with the onnxruntime of this process; raises Refused."""

    def __init__(self, ctx: Context) -> None:
        options = ctx.options
        self.log, self.stage, self.cache = ctx.log, ctx.stage, options["Cache"]
        self.axis = int(options["BatchAxis"]) if options["BatchAxis"].isdigit() else 0
        self.joins = int(options["BatchAxis"] != "none")
        self.max_rows: int = options["MaxRows"]
        self.axes: Dict[str, int] = options["Axes"] or {}
        self.outputs: List[str] = options["Outputs"] or []
        self.level: str = options["GraphOptimization"] or "all"
        self.batch_axis = "rows" if self.joins else "none"
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.threads = options["Threads"] or cpus
        if not 0 < self.threads <= cpus:
            raise Refused(f"threads: {self.threads}, and the worker may use {cpus} CPUs")
        available = ort.get_available_providers()
        wanted = options["Providers"] or (["CUDA"] if "CUDAExecutionProvider" in available else []) + ["CPU"]
        self.providers = self.choose(wanted, available)

    def name(self, providers: Sequence[str]) -> str:
        """Returns the engine's name for status."""
        used = ", ".join(map(_short, providers))
        return f"onnxruntime {ort.__version__}, {used}, {self.threads} thread{'s' * (self.threads > 1)}"

    def choose(self, wanted: Sequence[str], available: Sequence[str]) -> List[str]:
        """Returns the full names of the providers that there are; the last one wanted must be there."""
        full = {_short(name).lower(): name for name in available}
        for name in wanted:
            if _short(name).lower() not in full:
                if name == wanted[-1]:
                    raise Refused(f"providers: there is no {name} here, but {', '.join(map(_short, available))}")
                self.log.warning("providers: there is no %s here, so the next one is used", name)
        return [full[_short(name).lower()] for name in wanted if _short(name).lower() in full]

    def open(self, path: str, files: Sequence[str], kept: int, arena: bool) -> Any:
        """Returns a session of the model in the files; raises Refused. kept bounds the stage's cache."""
        cached = new = ""
        try:
            is_small = sum(map(os.path.getsize, files)) < _MOST_CACHED
            if self.cache and is_small and self.providers == ["CPUExecutionProvider"]:
                folder = os.path.join(self.cache, self.stage)
                os.makedirs(folder, exist_ok=True)
                cached = os.path.join(folder, _digest(files, f"{self.level} {sorted(self.axes.items())}") + ".onnx")
                new = f"{cached}.{os.urandom(8).hex()}"  # containers that share the folder have equal pids
        except OSError as error:
            raise Refused(f"{error.filename}: {error.strerror}") from None

        def start(path: str, level: str, save: str) -> Any:
            settings = ort.SessionOptions()
            settings.intra_op_num_threads = self.threads
            name = "DISABLE_ALL" if level == "disable" else f"ENABLE_{level.upper()}"
            settings.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{name}")
            settings.log_severity_level = 4  # its errors are exceptions too
            settings.optimized_model_filepath = save
            settings.enable_cpu_mem_arena = arena
            for axis, extent in self.axes.items():
                settings.add_free_dimension_override_by_name(axis, extent)
            return ort.InferenceSession(path, settings, providers=self.providers, enable_fallback=0)

        if os.path.exists(cached):
            try:
                return start(cached, "disable", "")
            except Exception as error:  # what the disk has of it is not what was written
                self.log.warning("%s cannot be loaded and is made again: %s", cached, _text(error))
        try:
            try:
                session = start(path, self.level, new)
            except Exception as error:
                if not new:
                    raise
                with contextlib.suppress(OSError):
                    os.remove(new)
                new = ""
                session = start(path, self.level, "")
                self.log.warning("%s is not kept in the cache: %s", path, _text(error))
        except Exception as error:
            if re.search(_NO_MEMORY, str(error), re.IGNORECASE):
                raise OutOfMemory(f"{path}: {_text(error)}") from None
            raise Refused(f"{path}: onnxruntime {ort.__version__} cannot load it: {_advise(error)}") from None
        if new:
            with contextlib.suppress(FileNotFoundError):  # another worker of the stage removes files too
                os.replace(new, cached)
                for old in sorted(os.scandir(folder), key=lambda entry: -entry.stat().st_mtime)[kept:]:
                    os.remove(old)
        self.choose(self.providers, session.get_providers())  # one that is installed may lack its device
        return session


class Network:
    """A model in a session. Its inputs and outputs are specs, example has inputs that it takes."""

    def __init__(self, runtime: Runtime, path: str, kept: int = _KEPT, arena: bool = True) -> None:
        self.runtime, self.path, self.joins = runtime, path, runtime.joins
        self.files, axes = files_and_axes(path)
        for name in runtime.axes.keys() - {name for axis, name in axes if not self.joins or axis != runtime.axis}:
            raise Refused(f"axes: no dynamic axis of an input is named {name!r}" + " beside the rows" * self.joins)
        self.session = runtime.open(path, self.files, kept, arena)
        given, outputs = self.session.get_inputs(), {node.name: node for node in self.session.get_outputs()}
        if not given:
            raise Refused(f"{path}: the model has no inputs")
        self.names: List[str] = runtime.outputs or list(outputs)
        for name in self.names:
            if name not in outputs:
                raise Refused(f"outputs: the model has no output {name!r}; it has {', '.join(outputs)}")
        self.types = {node.name: node.type for node in [*given, *outputs.values()]}
        self.inputs = {node.name: self._spec("input", node) for node in given}
        self.example, values = self._try_out()
        self.outputs = {name: self._spec("output", outputs[name], getattr(values[name], "ndim", 0)) for name in values}

    def predict(self, batch: Batch) -> Mapping[str, Any]:
        """Runs the rows of all items at once, or item by item where there is no batch axis."""
        feeds = {n: _texts(batch, n) if self.types[n] == "tensor(string)" else batch[n] for n in self.inputs}
        size, step = (batch.rows, self.runtime.max_rows or batch.rows) if self.joins else (len(batch), 1)
        parts = []
        try:
            for at in range(0, size, step):
                parts.append(self._run({n: f[at : at + step] if self.joins else f[at] for n, f in feeds.items()}))
        except OutOfMemory as error:
            if len(batch) > 1:
                raise  # the host tries less of it
            batch.fail(0, error)  # so its caller learns how much is missing
            return {}
        if len(parts) == 1 and self.joins:
            return parts[0]
        columns = {name: [part[name] for part in parts] for name in self.names}
        return {name: np.concatenate(column) for name, column in columns.items()} if self.joins else columns

    def _run(self, feeds: Mapping[str, Any]) -> Dict[str, Any]:
        """Returns the outputs by name; raises OutOfMemory, and onnxruntime's exceptions. Rows are axis 0 of all."""
        axis = self.runtime.axis
        if axis:
            feeds = {name: np.ascontiguousarray(np.moveaxis(array, 0, axis)) for name, array in feeds.items()}
        try:
            if "tensor(bfloat16)" not in self.types.values():
                out = dict(zip(self.names, self.session.run(self.names, feeds)))
            else:
                out = self._run_brain(feeds)
        except Exception as error:  # onnxruntime's have no common base
            if re.search(_NO_MEMORY, str(error), re.IGNORECASE):
                raise OutOfMemory(_text(error)) from None
            raise
        return {name: np.moveaxis(array, axis, 0) for name, array in out.items()} if axis else out

    def _run_brain(self, feeds: Mapping[str, Any]) -> Dict[str, Any]:
        make, brain = ort.OrtValue, ort.OrtValue.ortvalue_from_numpy_with_onnx_type
        is_brain = {name: kind == "tensor(bfloat16)" for name, kind in self.types.items()}
        values = {
            name: brain(np.ascontiguousarray(array), _BF16) if is_brain[name] else make.ortvalue_from_numpy(array)
            for name, array in feeds.items()
        }
        got = zip(self.names, self.session.run_with_ort_values(self.names, values))
        return {name: _bits(value) if is_brain[name] else value.numpy() for name, value in got}

    def _spec(self, what: str, node: Any, rank: int = 0) -> Tensor:
        """Returns the spec of an input or output; rank is of an output that has run, whose shape may be unknown."""
        if node.type not in _TYPES:
            do = "export the model without it" if what == "input" else "leave it out by the key outputs"
            raise Refused(f"{self.path}: {what} {node.name!r} is {node.type}, which no datatype stands for; {do}")
        shape, axis = node.shape or [None] * rank, self.runtime.axis
        if self.joins and (len(shape) <= axis or isinstance(shape[axis], int)):
            raise Refused(
                f"{self.path}: {what} {node.name!r} has the shape {shape}, whose axis {axis} would be the rows of a "
                "batch and must be dynamic; export the model with a dynamic batch axis, or set batch_axis: none"
            )
        extents = [extent if isinstance(extent, int) else -1 for extent in shape]  # axes has fixed some
        if self.joins:
            extents = [-1, *extents[:axis], *extents[axis + 1 :]]
        return Tensor(_TYPES[node.type][0], extents)

    def _try_out(self) -> Tuple[Dict[str, Any], Dict[str, Any]]:
        """Runs a row of zeros; returns inputs that the model takes, and all that it returns."""
        failed = ""
        for extent in _EXTENTS:
            example, texts = {}, {}
            for name, spec in self.inputs.items():
                extents = [extent if wanted < 0 else wanted for wanted in spec.shape[self.joins :]]
                example[name] = np.zeros([1] * self.joins + extents, _TYPES[self.types[name]][1])
                if spec.datatype == "BYTES":
                    example[name][...], texts[name] = b"", np.full(example[name].shape, "", "O")
            try:
                return example, self._run({**example, **texts})
            except Exception as error:
                failed = _text(error)
        raise Refused(f"{self.path}: it does not run on zeros: {failed}; the key axes gives dynamic axes an extent")


class Onnx(Worker):
    """Runs the model."""

    parameters: Mapping[str, Parameter] = {}
    concurrency = 1024  # onnxruntime runs as many batches side by side as the host sends

    def setup(self, ctx: Context) -> None:
        """Loads the model, and declares its inputs and outputs."""
        runtime, path = Runtime(ctx), ctx.options["Model"]
        ctx.progress(f"loading {path}")
        self.network = network = Network(runtime, path)
        self.batch_axis, self.inputs, self.outputs = runtime.batch_axis, network.inputs, network.outputs
        if any(-1 in spec.shape[network.joins :] for spec in network.inputs.values()):
            self.examples = [network.example]
        self.engine_name = runtime.name(network.session.get_providers())
        ctx.log.info("%s: %s", path, self.engine_name)

    def predict(self, batch: Batch) -> Mapping[str, Any]:
        """Runs the model."""
        return self.network.predict(batch)


def _short(provider: str) -> str:
    return provider.replace("ExecutionProvider", "")


def _texts(batch: Batch, name: str) -> Any:
    """Returns an input as str, as batch[name] has it; an item with bytes that are no text fails."""
    out = []
    for item in batch.items:
        array = np.full(item[name].shape, "", "O")
        try:
            array[...] = np.array([str(element, "utf-8") for element in item[name].flat], "O").reshape(array.shape)
        except UnicodeDecodeError:
            batch.fail(item, InvalidInput(name, "is not UTF-8; ONNX has text only"))
        out.append(array)
    return out if isinstance(batch[name], list) else np.concatenate(out)


def _bits(value: Any) -> Any:
    raw = ctypes.string_at(value.data_ptr(), 2 * math.prod(value.shape()))
    return np.frombuffer(raw, "u2").reshape(value.shape())


def _text(error: BaseException) -> str:
    """Returns an error of onnxruntime without its code and the place in its source."""
    places = r"^\[ONNXRuntimeError\] : \d+ : \w+ : |Load model from .*? failed:|/onnxruntime_src/.*\) ?"
    return re.sub(places, "", str(error)).strip() or type(error).__name__


def _advise(error: BaseException) -> str:
    text = _text(error)
    for pattern, advice in (
        ("Protobuf parsing failed|does not have a graph", _NO_ONNX),
        ("IR version|opset", "upgrade onnxruntime, or export the model for an older version of ONNX"),
        ("External initializer", "its file of weights is cut; copy it again"),
        ("not a registered|No Op registered", "operators of others are not supported; export the model without them"),
    ):
        if re.search(pattern, text):
            return f"{text}; {advice}"
    return text


def _digest(files: Sequence[str], level: str) -> str:
    """Returns a name for what onnxruntime makes of the files here: it depends on the processor too."""
    out = hashlib.blake2b(f"{ort.__version__} {level}".encode(), digest_size=16)
    with contextlib.suppress(FileNotFoundError), open("/proc/cpuinfo") as file:
        out.update("".join(sorted({line for line in file if line.startswith(("flags", "Features"))})).encode())
    for path in files:
        with open(path, "rb") as data:
            while block := data.read(1 << 20):
                out.update(block)
    return out.hexdigest()


# The fields of onnx.proto3 that lead to places of weights and to names of axes, by message: their numbers, and
# the messages there.
_FIELDS: Dict[str, Dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 11: "input", 15: "sparse"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
    "entry": {1: "text", 2: "text"},
    "input": {2: "type"},
    "type": {1: "tensor type"},
    "tensor type": {2: "shape"},
    "shape": {1: "axis"},
    "axis": {2: "text"},
}


def files_and_axes(path: str) -> Tuple[List[str], Set[Tuple[int, str]]]:
    """Returns the files that have the model and its weights, and the numbers and names of its inputs' axes.

    Raises Refused for a file with weights that is not in the model's folder.
    """
    places, axes = set(), set()
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for message, index, texts in _texts_of(data):
                if message == "axis":
                    axes.add((index, texts.get(2, "")))
                elif texts.get(1) == "location":
                    places.add(texts.get(2, ""))
        folder = os.path.realpath(os.path.dirname(path))
        found = {place: os.path.realpath(os.path.join(folder, place)) for place in places}
    except (IndexError, ValueError):  # mmap refuses an empty file, and realpath zeros in a name
        raise Refused(f"{path}: {_NO_ONNX}") from None
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from None
    for place, file_path in found.items():
        if os.path.commonpath([folder, file_path]) != folder:
            raise Refused(f"{path}: it has weights in {place}, outside its folder; export it with them beside it")
        if not os.path.isfile(file_path):
            raise Refused(f"{path}: it has weights in {place}, which is not there; copy that file beside it")
    return [path, *found.values()], axes


def _texts_of(data: Any) -> Iterator[Tuple[str, int, Dict[int, str]]]:
    """Yields each message with its number among its parent's, and its texts; raises IndexError if bytes are missing."""
    todo = [("model", 0, 0, len(data))]
    while todo:
        message, index, at, end = todo.pop()
        texts, count = {}, 0
        while at < end:
            tag, at = _varint(data, at)
            size = {1: 8, 5: 4}.get(tag & 7, 0)
            if tag & 7 == 0:
                _, at = _varint(data, at)
            elif tag & 7 == 2:
                size, at = _varint(data, at)
                inner = _FIELDS[message].get(tag >> 3)
                if inner == "text":
                    texts[tag >> 3] = os.fsdecode(data[at : at + size])
                elif inner:
                    todo.append((inner, count, at, min(at + size, end)))
                    count += 1
            at += size
        yield message, index, texts


def _varint(data: Any, at: int) -> Tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise IndexError("no number has more bytes")


if __name__ == "__main__":
    serve(Onnx)
