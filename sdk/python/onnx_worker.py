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
_MOST_CACHED = 1 << 30  # bytes; a file of ONNX has at most 2 GiB


class Refused(Exception):
    """The model, or an option, cannot be used here."""

    explained = True  # its text tells all, and a traceback nothing


class Onnx(Worker):
    """Runs the model."""

    parameters: Mapping[str, Parameter] = {}
    concurrency = 1024  # onnxruntime runs as many batches side by side as the host sends

    def setup(self, ctx: Context) -> None:
        """Loads the model, and declares its inputs and outputs."""
        options = ctx.options
        self.path: str = options["Model"]
        self.joins = int(options["BatchAxis"] != "none")
        self.max_rows: int = options["MaxRows"]
        self.axes: Dict[str, int] = options["Axes"] or {}
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = options["Threads"] or cpus
        if not 0 < threads <= cpus:
            raise Refused(f"threads: {threads}, and the worker may use {cpus} CPUs")
        self.batch_axis = "rows" if self.joins else "none"
        ctx.progress(f"loading {self.path}")
        self.session = self._open(ctx, threads)
        given, outputs = self.session.get_inputs(), {node.name: node for node in self.session.get_outputs()}
        if not given:
            raise Refused(f"{self.path}: the model has no inputs")
        for name in self.axes.keys() - {axis for node in given for axis in node.shape[self.joins :]}:
            raise Refused(f"axes: no dynamic axis of an input is named {name!r}" + " beside the rows" * self.joins)
        self.names: List[str] = options["Outputs"] or list(outputs)
        for name in self.names:
            if name not in outputs:
                raise Refused(f"outputs: the model has no output {name!r}; it has {', '.join(outputs)}")
        self.types = {node.name: node.type for node in [*given, *outputs.values()]}
        specs = {node.name: self._spec("input", node) for node in given}
        example, values = self._try_out(specs)
        self.inputs = specs
        self.outputs = {name: self._spec("output", outputs[name], getattr(values[name], "ndim", 0)) for name in values}
        if any(-1 in spec.shape[self.joins :] for spec in specs.values()):
            self.examples = [example]
        used = ", ".join(map(_short, self.session.get_providers()))
        self.engine_name = f"onnxruntime {ort.__version__}, {used}, {threads} thread{'s' * (threads > 1)}"
        ctx.log.info("%s: %s", self.path, self.engine_name)

    def predict(self, batch: Batch) -> Mapping[str, Any]:
        """Runs the rows of all items at once, or item by item where there is no batch axis."""
        feeds = {n: _texts(batch, n) if self.types[n] == "tensor(string)" else batch[n] for n in self.inputs}
        size, step = (batch.rows, self.max_rows or batch.rows) if self.joins else (len(batch), 1)
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
        """Returns the outputs by name; raises OutOfMemory, and onnxruntime's exceptions."""
        try:
            if "tensor(bfloat16)" not in self.types.values():
                return dict(zip(self.names, self.session.run(self.names, feeds)))
            make, brain = ort.OrtValue, ort.OrtValue.ortvalue_from_numpy_with_onnx_type
            is_brain = {name: kind == "tensor(bfloat16)" for name, kind in self.types.items()}
            values = {
                name: brain(np.ascontiguousarray(array), _BF16) if is_brain[name] else make.ortvalue_from_numpy(array)
                for name, array in feeds.items()
            }
            got = zip(self.names, self.session.run_with_ort_values(self.names, values))
            return {name: _bits(value) if is_brain[name] else value.numpy() for name, value in got}
        except Exception as error:  # onnxruntime's have no common base
            if re.search("out of memory|allocate memory|bad alloc", str(error), re.IGNORECASE):
                raise OutOfMemory(_text(error)) from None
            raise

    def _spec(self, what: str, node: Any, rank: int = 0) -> Tensor:
        """Returns the spec of an input or output; rank is of an output that has run, whose shape may be unknown."""
        if node.type not in _TYPES:
            do = "export the model without it" if what == "input" else "leave it out by the key outputs"
            raise Refused(f"{self.path}: {what} {node.name!r} is {node.type}, which no datatype stands for; {do}")
        shape = node.shape or [None] * rank
        if self.joins and (not shape or isinstance(shape[0], int)):
            raise Refused(
                f"{self.path}: {what} {node.name!r} has the shape {shape}, whose axis 0 would be the rows of a batch "
                "and must be dynamic; export the model with a dynamic batch axis, or set batch_axis: none"
            )
        extents = [extent if isinstance(extent, int) else self.axes.get(extent, -1) for extent in shape]
        return Tensor(_TYPES[node.type][0], [-1] * self.joins + extents[self.joins :])

    def _try_out(self, specs: Mapping[str, Tensor]) -> Tuple[Dict[str, Any], Dict[str, Any]]:
        """Runs a row of zeros; returns inputs that the model takes, and all that it returns."""
        failed = ""
        for extent in _EXTENTS:
            example, texts = {}, {}
            for name, spec in specs.items():
                extents = [extent if wanted < 0 else wanted for wanted in spec.shape[self.joins :]]
                example[name] = np.zeros([1] * self.joins + extents, _TYPES[self.types[name]][1])
                if spec.datatype == "BYTES":
                    example[name][...], texts[name] = b"", np.full(example[name].shape, "", "O")
            try:
                return example, self._run({**example, **texts})
            except Exception as error:
                failed = _text(error)
        raise Refused(f"{self.path}: it does not run on zeros: {failed}; the key axes gives dynamic axes an extent")

    def _open(self, ctx: Context, threads: int) -> Any:
        """Returns a session; raises Refused."""
        options, available = ctx.options, ort.get_available_providers()
        level = options["GraphOptimization"] or "all"
        wanted = options["Providers"] or (["CUDA"] if "CUDAExecutionProvider" in available else []) + ["CPU"]
        providers = _choose(wanted, available, ctx)
        cached = new = ""
        try:
            files = [self.path, *_external_files(self.path)]
            is_small = sum(map(os.path.getsize, files)) < _MOST_CACHED
            if options["Cache"] and is_small and providers == ["CPUExecutionProvider"]:
                folder = os.path.join(options["Cache"], ctx.stage)
                os.makedirs(folder, exist_ok=True)
                cached = os.path.join(folder, _digest(files, level) + ".onnx")
                new = f"{cached}.{os.getpid()}"
        except OSError as error:
            raise Refused(f"{error.filename}: {error.strerror}") from None

        def start(path: str, level: str, save: str) -> Any:
            settings = ort.SessionOptions()
            settings.intra_op_num_threads = threads
            name = "DISABLE_ALL" if level == "disable" else f"ENABLE_{level.upper()}"
            settings.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{name}")
            settings.log_severity_level = 4  # its errors are exceptions too
            settings.optimized_model_filepath = save
            return ort.InferenceSession(path, settings, providers=providers, enable_fallback=0)

        if os.path.exists(cached):
            try:
                return start(cached, "disable", "")
            except Exception as error:  # what the disk has of it is not what was written
                ctx.log.warning("%s cannot be loaded and is made again: %s", cached, _text(error))
        try:
            session = start(self.path, level, new)
        except Exception as error:
            raise Refused(f"{self.path}: onnxruntime {ort.__version__} cannot load it: {_advise(error)}") from None
        if new:
            with contextlib.suppress(FileNotFoundError):  # another worker of the stage removes files too
                os.replace(new, cached)
                for old in sorted(os.scandir(folder), key=lambda entry: -entry.stat().st_mtime)[_KEPT:]:
                    os.remove(old)
        _choose(providers, session.get_providers(), ctx)  # one that is installed may lack its device
        return session


def _short(provider: str) -> str:
    return provider.replace("ExecutionProvider", "")


def _choose(wanted: Sequence[str], available: Sequence[str], ctx: Context) -> List[str]:
    """Returns the full names of the providers that there are; the last one wanted must be there."""
    full = {_short(name).lower(): name for name in available}
    for name in wanted:
        if _short(name).lower() not in full:
            if name == wanted[-1]:
                raise Refused(f"providers: there is no {name} here, but {', '.join(map(_short, available))}")
            ctx.log.warning("providers: there is no %s here, so the next one is used", name)
    return [full[_short(name).lower()] for name in wanted if _short(name).lower() in full]


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


# The fields of onnx.proto3 that lead to places of weights, by message: their numbers, and the messages there.
_FIELDS: Dict[str, Dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
    "entry": {1: "text", 2: "text"},
}


def _external_files(path: str) -> Set[str]:
    """Returns the files that have weights of the model; raises Refused for one that is not in its folder."""
    if os.path.getsize(path) == 0:
        return set()  # which mmap refuses
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            places = set(_places(data))
        except IndexError:
            raise Refused(f"{path}: {_NO_ONNX}") from None
    folder = os.path.realpath(os.path.dirname(path))
    found = {place: os.path.realpath(os.path.join(folder, place)) for place in places}
    for place, file_path in found.items():
        if os.path.commonpath([folder, file_path]) != folder:
            raise Refused(f"{path}: it has weights in {place}, outside its folder; export it with them beside it")
        if not os.path.isfile(file_path):
            raise Refused(f"{path}: it has weights in {place}, which is not there; copy that file beside it")
    return set(found.values())


def _places(data: Any) -> Iterator[str]:
    """Yields the locations of external data; raises IndexError where the bytes are cut."""
    todo = [("model", 0, len(data))]
    while todo:
        message, at, end = todo.pop()
        texts = {}
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
                    todo.append((inner, at, min(at + size, end)))
            at += size
        if texts.get(1) == "location":
            yield texts.get(2, "")


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
