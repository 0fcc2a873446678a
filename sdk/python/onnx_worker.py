"""The worker of the runner ``onnx``: one ONNX model, run by the onnxruntime of this Python.

The host's program has this file beside the SDK and runs it by its path. Its options:

    model        path of the file; files with its weights lie in its folder, or below
    providers    names as onnxruntime has them, without ExecutionProvider, in order; empty: CUDA, CPU
    threads      of a run; 0: as many as this process may use CPUs
    level        of the optimisation of the graph: disable, basic, extended or all
    cache        folder for optimised models; empty: they are not kept
    axes         extents of dynamic axes by their names
    outputs      those that are computed; empty: all
    batch_axis   "rows": axis 0 of every input and output; "none": items run one by one
    max_rows     of a run; 0: any
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import mmap
import os
import re
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple

import numpy as np
import onnxruntime as ort

from stagemesh import Batch, Context, InvalidInput, OutOfMemory, Parameter, Tensor, Worker, serve

_DATATYPES = {f"tensor({kind}{bits})": f"{kind}{bits}".upper() for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
_DATATYPES.update({"tensor(bool)": "BOOL", "tensor(string)": "BYTES", "tensor(float16)": "FP16"})
_DATATYPES.update({"tensor(bfloat16)": "BF16", "tensor(float)": "FP32", "tensor(double)": "FP64"})
_DTYPES = {"BYTES": "O", "BF16": "u2", "BOOL": "?"}  # the others by kind and size, such as f4

_LEVELS = {
    "disable": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
_SUFFIX = "ExecutionProvider"
# Extents that dynamic axes get, in turn, until the model runs: convolutions need more than 1.
_EXTENTS = (1, 32, 64, 224, 512)
# Optimised models of a stage that are kept, because machines that share the folder may differ.
_KEPT = 4
_MOST_CACHED = 1 << 30  # a file of ONNX has at most 2 GiB


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
        self.path: str = options["model"]
        self.batch_axis = options["batch_axis"]
        self.max_rows: int = options["max_rows"]
        self.axes: Dict[str, int] = options["axes"] or {}
        ctx.progress(f"loading {self.path}")
        threads = _threads(options["threads"])
        self.session = self._open(ctx, threads)
        given = self.session.get_inputs()
        outputs = {node.name: node for node in self.session.get_outputs()}
        if not given:
            raise Refused(f"{self.path}: the model has no inputs")
        first = int(self.batch_axis == "rows")
        for name in self.axes.keys() - {extent for node in given for extent in node.shape[first:]}:
            raise Refused(f"axes: no dynamic axis of an input is named {name!r}" + " beside the rows" * first)
        self.names: List[str] = options["outputs"] or list(outputs)
        for name in self.names:
            if name not in outputs:
                raise Refused(f"outputs: the model has no output {name!r}; it has {', '.join(outputs)}")
        self.specs = {node.name: self._spec("input", node) for node in given}
        example, values = self._try_out()
        ranks = {name: getattr(value, "ndim", 0) for name, value in values.items()}
        self.outputs = {name: self._spec("output", outputs[name], ranks[name]) for name in self.names}
        self.inputs = self.specs
        if any(-1 in spec.shape[first:] for spec in self.specs.values()):
            self.examples = [example]
        used = ", ".join(name.replace(_SUFFIX, "") for name in self.session.get_providers())
        ctx.log.info("%s: onnxruntime %s, provider %s, %d threads", self.path, ort.__version__, used, threads)

    def predict(self, batch: Batch) -> Mapping[str, Any]:
        """Runs the rows of all items at once, or item by item where there is no batch axis."""
        try:
            return self._predict(batch)
        except OutOfMemory as error:
            if len(batch) > 1:
                raise  # the host tries less of it
            batch.fail(0, error)  # so its caller learns how much is missing
            return {}

    def _predict(self, batch: Batch) -> Mapping[str, Any]:
        feeds = {name: batch[name] for name in self.inputs}
        for name, spec in self.specs.items():
            if spec.datatype == "BYTES":
                feeds[name] = _texts(batch, name, self.batch_axis == "rows")
        if self.batch_axis == "none":
            each = [self._run({name: feeds[name][i] for name in feeds}) for i in range(len(batch))]
            return {name: [one[name] for one in each] for name in self.names}
        step = self.max_rows or batch.rows
        parts = [self._run({n: a[at : at + step] for n, a in feeds.items()}) for at in range(0, batch.rows, step)]
        return parts[0] if len(parts) == 1 else {name: np.concatenate([p[name] for p in parts]) for name in self.names}

    def _run(self, feeds: Mapping[str, Any]) -> Dict[str, Any]:
        """Returns the outputs by name; raises OutOfMemory, and onnxruntime's exceptions."""
        try:
            if not self.has_bf16:
                return dict(zip(self.names, self.session.run(self.names, feeds)))
            values = self.session.run_with_ort_values(
                self.names, {name: _value(array, self.specs[name].datatype) for name, array in feeds.items()}
            )
            return {name: _array(value) for name, value in zip(self.names, values)}
        except Exception as error:  # onnxruntime's have no common base
            if re.search("out of memory|allocate memory|bad alloc", str(error), re.IGNORECASE):
                raise OutOfMemory(_text(error)) from None
            raise

    def _spec(self, what: str, node: Any, rank: int = 0) -> Tensor:
        """Returns the spec of an input or output; rank is of an output that has run, whose shape may be unknown."""
        if node.type not in _DATATYPES:
            do = "export the model without it" if what == "input" else "leave it out by the key outputs"
            raise Refused(f"{self.path}: {what} {node.name!r} is {node.type}, which no datatype stands for; {do}")
        shape = node.shape or [None] * rank
        if self.batch_axis == "rows" and (not shape or isinstance(shape[0], int)):
            raise Refused(
                f"{self.path}: {what} {node.name!r} has the shape {shape}, whose axis 0 would be the rows of a batch "
                "and must be dynamic; export the model with a dynamic batch axis, or set batch_axis: none"
            )
        extents = [extent if isinstance(extent, int) else self.axes.get(extent, -1) for extent in shape]
        if self.batch_axis == "rows":
            extents[0] = -1
        return Tensor(_DATATYPES[node.type], extents)

    def _try_out(self) -> Tuple[Dict[str, Any], Dict[str, Any]]:
        """Runs a row of zeros; returns inputs that the model takes, and all that it returns."""
        self.has_bf16 = any("bfloat16" in n.type for n in self.session.get_inputs() + self.session.get_outputs())
        failed = ""
        for extent in _EXTENTS:
            example = {}
            for name, spec in self.specs.items():
                shape = [extent if wanted < 0 else wanted for wanted in spec.shape]
                if self.batch_axis == "rows":
                    shape[0] = 1
                kind = spec.datatype.replace("UINT", "u").replace("INT", "i").replace("FP", "f")
                dtype = _DTYPES.get(spec.datatype) or f"{kind[0]}{int(kind[1:]) // 8}"
                example[name] = np.full(shape, b"" if dtype == "O" else 0, dtype)
            try:
                texts = {name: a.astype("U").astype("O") for name, a in example.items() if a.dtype == "O"}
                return example, self._run({**example, **texts})
            except Exception as error:
                failed = _text(error)
        raise Refused(f"{self.path}: it does not run on zeros: {failed}; the key axes gives dynamic axes an extent")

    def _open(self, ctx: Context, threads: int) -> Any:
        """Returns a session; raises Refused."""
        options, available = ctx.options, ort.get_available_providers()
        wanted = options["providers"] or [name for name in ("CUDA", "CPU") if name + _SUFFIX in available]
        providers = _choose(wanted, available, ctx)
        try:
            files = [self.path, *_external_files(self.path)]
            cached = new = ""
            is_small = sum(map(os.path.getsize, files)) < _MOST_CACHED
            if options["cache"] and is_small and providers == ["CPU" + _SUFFIX]:
                folder = os.path.join(options["cache"], ctx.stage)
                os.makedirs(folder, exist_ok=True)
                cached = os.path.join(folder, _digest(files, options["level"]) + ".onnx")
                new = f"{cached}.{os.getpid()}"
        except OSError as error:
            raise Refused(f"{error.filename}: {error.strerror}") from None

        def start(path: str, level: str, save: str) -> Any:
            settings = ort.SessionOptions()
            settings.intra_op_num_threads = threads
            settings.graph_optimization_level = _LEVELS[level]
            settings.log_severity_level = 4  # its errors are exceptions too
            settings.optimized_model_filepath = save
            return ort.InferenceSession(path, settings, providers=providers, enable_fallback=0)

        if cached and os.path.exists(cached):
            try:
                return start(cached, "disable", "")
            except Exception as error:  # what the disk has of it is not what was written
                ctx.log.warning("%s cannot be loaded and is made again: %s", cached, _text(error))
        try:
            session = start(self.path, options["level"], new)
        except Exception as error:
            raise Refused(f"{self.path}: onnxruntime {ort.__version__} cannot load it: {_advise(error)}") from None
        if new:
            with contextlib.suppress(FileNotFoundError):  # another worker of the stage removes files too
                os.replace(new, cached)
                for old in sorted(os.scandir(folder), key=lambda entry: -entry.stat().st_mtime)[_KEPT:]:
                    os.remove(old)
        _choose(providers, session.get_providers(), ctx)  # one that is installed may lack its device
        return session


def _threads(wanted: int) -> int:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if wanted > cpus:
        raise Refused(f"threads: {wanted} are more than the {cpus} CPUs that the worker may use")
    return wanted or cpus


def _choose(wanted: Sequence[str], available: Sequence[str], ctx: Context) -> List[str]:
    """Returns the full names of the providers that there are; the last one wanted must be there."""
    full = {name.replace(_SUFFIX, "").lower(): name for name in available}
    for name in wanted:
        if name.replace(_SUFFIX, "").lower() in full:
            continue
        if name == wanted[-1]:
            raise Refused(f"providers: there is no {name} here, but {', '.join(full.values())}")
        ctx.log.warning("providers: there is no %s here, so the next one is used", name)
    return [full[key] for key in (name.replace(_SUFFIX, "").lower() for name in wanted) if key in full]


def _texts(batch: Batch, name: str, joins: bool) -> Any:
    """Returns an input as str, joined or item by item; an item with bytes that are no text fails."""
    out = []
    for item in batch.items:
        array = np.full(item[name].shape, "", "O")
        try:
            array[...] = np.array([str(element, "utf-8") for element in item[name].flat], "O").reshape(array.shape)
        except UnicodeDecodeError:
            batch.fail(item, InvalidInput(name, "is not UTF-8; ONNX has text only"))
        out.append(array)
    return np.concatenate(out) if joins else out


def _value(array: Any, datatype: str) -> Any:
    if datatype == "BF16":  # 16 in onnx.proto3
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(array), 16)
    return ort.OrtValue.ortvalue_from_numpy(array)


def _array(value: Any) -> Any:
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()
    raw = ctypes.string_at(value.data_ptr(), 2 * math.prod(value.shape()))
    return np.frombuffer(raw, "u2").reshape(value.shape())


def _text(error: BaseException) -> str:
    """Returns an error of onnxruntime without its code and the place in its source."""
    places = r"^\[ONNXRuntimeError\] : \d+ : \w+ : |Load model from .*? failed:|/onnxruntime_src/.*\) ?"
    text = re.sub(places, "", str(error))
    return text.strip() or type(error).__name__


def _advise(error: BaseException) -> str:
    text = _text(error)
    for pattern, advice in (
        ("Protobuf parsing failed|does not have a graph", "it is no ONNX file, or cut; export or copy it again"),
        ("IR version|opset", "upgrade onnxruntime, or export the model for an older version of ONNX"),
        ("not a registered|No Op registered", "operators of others are not supported; export the model without them"),
    ):
        if re.search(pattern, text):
            return f"{text}; {advice}"
    return text


def _digest(files: Sequence[str], level: str) -> str:
    """Returns a name for what onnxruntime makes of the files here: it depends on the processor too."""
    out = hashlib.blake2b(f"{ort.__version__} {level}".encode(), digest_size=16)
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            out.update("".join(sorted({line for line in file if line.startswith(("flags", "Features"))})).encode())
    for path in files:
        with open(path, "rb") as file:
            while data := file.read(1 << 20):
                out.update(data)
    return out.hexdigest()


# The fields of onnx.proto3 that lead to places of weights: by message, the field's number and its message.
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


def _external_files(path: str) -> List[str]:
    """Returns the files that have weights of the model; raises Refused for one that is not in its folder."""
    if os.path.getsize(path) == 0:
        return []  # which mmap refuses
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            places = sorted(set(_places(data)))
        except (IndexError, UnicodeDecodeError):
            return []  # no ONNX file; onnxruntime reports it
    folder = os.path.realpath(os.path.dirname(path))
    out = []
    for place in places:
        found = os.path.realpath(os.path.join(folder, place))
        if os.path.commonpath([folder, found]) != folder:
            raise Refused(f"{path}: it has weights in {place}, outside its folder; copy them beside it, and export it")
        if not os.path.isfile(found):
            raise Refused(f"{path}: it has weights in {place}, which is not there; copy that file beside it")
        out.append(found)
    return out


def _places(data: Any) -> Iterator[str]:
    """Yields the locations of external data; raises IndexError where the bytes are cut."""
    todo = [("model", 0, len(data))]
    while todo:
        message, at, end = todo.pop()
        texts = {}
        while at < end:
            tag, at = _varint(data, at)
            number, kind = tag >> 3, tag & 7
            size = {1: 8, 5: 4}.get(kind, 0)
            if kind in (0, 2):
                size, at = _varint(data, at)
            if kind == 0:
                continue
            inner = _FIELDS[message].get(number)
            if inner == "text":
                texts[number] = str(data[at : at + size], "utf-8")
            elif inner and kind == 2:
                todo.append((inner, at, min(at + size, end)))
            at += size
        if texts.get(1) == "location":
            yield texts.get(2, "")


def _varint(data: Any, at: int) -> Tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise IndexError("no number is longer")


if __name__ == "__main__":
    serve(Onnx)
