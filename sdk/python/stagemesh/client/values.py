"""Values: what callers give as inputs and get as outputs.

Every request is one document in MessagePack in the form of the Open Inference Protocol, in which
a blob is a BYTES tensor with a content type. Answers have the form that docs/http.md describes.
"""

from __future__ import annotations

import array
import base64
import contextlib
import functools
import json
import math
import mimetypes
import os
import struct
from importlib.util import find_spec
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .faults import InvalidArgument, invalid_answer
from .packing import Binary, pack, unpack

PACKED = "application/msgpack"


class Blob(NamedTuple):
    """Bytes of a content type; without one they have the type that the stage declares."""

    data: Any
    content_type: str = ""


class Tensor:
    """A tensor, for inputs without numpy and, where numpy is not installed, as an output.

    data is nested lists of numbers, bytes or strings, or a buffer; a flat one takes the shape.
    """

    def __init__(self, data: Any, datatype: str, shape: Optional[Sequence[int]] = None) -> None:
        from ..arrays import BufferArrays
        from ..frames import as_bytes
        from ..specs import Tensor as Spec

        wanted = None if shape is None else tuple(shape)
        raw = BufferArrays().encode(data, Spec(datatype, wanted or []), wanted)
        self.datatype, self.shape = datatype, tuple(raw.shape if wanted is None else wanted)
        if math.prod(self.shape) != math.prod(raw.shape):
            raise ValueError(f"{math.prod(raw.shape)} elements do not make the shape {list(self.shape)}")
        self.data = as_bytes(raw.data)

    @classmethod
    def received(cls, name: str, datatype: Any, shape: Any, data: Any) -> Tensor:
        """Returns a tensor of an answer, which is checked: its data is a list, or a view of its bytes."""
        from ..frames import Violation
        from ..parts import read_tensor

        if isinstance(data, list):
            return cls(data, datatype, shape)
        try:
            raw = read_tensor(name, datatype, shape, data, len(data), 0)
        except Violation as error:
            raise ValueError(str(error)) from None
        out = cls.__new__(cls)
        out.datatype, out.shape, out.data = raw.datatype, raw.shape, memoryview(raw.data)
        return out

    @classmethod
    def of_array(cls, value: Any, datatype: str) -> Tensor:
        """Returns an array of numpy as a tensor of a datatype, or else what the constructor takes; raises ValueError.

        An array is not converted, except that uint16 may be the bits of BF16.
        """
        if not hasattr(value, "__array__"):
            return cls(value, datatype)
        from ..arrays_numpy import NumpyArrays
        from ..frames import as_bytes
        from ..specs import Tensor as Spec

        raw = NumpyArrays().encode(value, Spec(datatype, []), None)
        out = cls.__new__(cls)
        out.datatype, out.shape, out.data = raw.datatype, tuple(raw.shape), as_bytes(raw.data)
        return out

    def tolist(self) -> Any:
        """Returns nested lists of numbers, or of bytes."""
        from ..arrays import nest
        from ..parts import DATATYPES, bytes_elements

        if self.datatype == "BYTES":
            flat: List[Any] = [bytes(element) for element in bytes_elements(self.data)]
        elif self.datatype == "BF16":
            halves = struct.unpack(f"<{len(self.data) // 2}H", self.data)
            flat = list(struct.unpack(f"<{len(halves)}f", struct.pack(f"<{len(halves)}I", *(h << 16 for h in halves))))
        else:
            code = "e" if self.datatype == "FP16" else DATATYPES[self.datatype].code
            flat = list(struct.unpack(f"<{math.prod(self.shape)}{code}", self.data))
        return nest(flat, self.shape)

    def numpy(self) -> Any:
        """Returns an array of numpy over the same bytes; BF16 as its bits in uint16."""
        from ..arrays_numpy import NumpyArrays
        from ..parts import Raw

        return NumpyArrays().view(Raw(self.datatype, self.shape, self.data, len(self.data)))

    def __repr__(self) -> str:
        return f"{self.datatype}{list(self.shape)} {_shorten(repr(self.tolist()))}"


# --- requests ------------------------------------------------------------------------


def merge(inputs: Optional[Mapping[str, Any]], named: Mapping[str, Any]) -> Dict[str, Any]:
    """Returns the inputs of a call, of a mapping and by keyword; raises InvalidArgument."""
    if inputs is not None and not isinstance(inputs, Mapping):
        what = f"inputs are given by name, such as image=..., or as one mapping, got {type(inputs).__name__}"
        raise InvalidArgument(what, reason="INVALID_REQUEST")
    return {**(inputs or {}), **named}


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Makes InvalidArgument of the errors of an input that cannot be sent."""
    try:
        yield
    except (TypeError, ValueError, OSError, ImportError, RecursionError) as error:
        raise InvalidArgument(
            f"input {name!r}: {error}", reason="INVALID_INPUT", violations=[(f"inputs.{name}", str(error))]
        ) from error


def encode_request(inputs: Mapping[str, Any], parameters: Mapping[str, Any], outputs: Sequence[str]) -> List[Any]:
    """Returns the body of a request, in pieces; raises InvalidArgument."""
    document: Dict[str, Any] = {"inputs": []}
    for name, value in inputs.items():
        with reading(name):
            document["inputs"].append(_input(name, value))
    if not inputs:
        raise InvalidArgument("there are no inputs; give them by name", reason="INVALID_REQUEST")
    if parameters:
        document["parameters"] = dict(parameters)
    if outputs:
        document["outputs"] = [{"name": name} for name in outputs]
    try:
        return pack(document)
    except ValueError as error:
        raise InvalidArgument(f"the request cannot be sent: {error}", reason="INVALID_REQUEST") from error


def blob_of(value: Any) -> Optional[Blob]:
    """Returns a value as a blob: bytes, text, a file, a document; None if it is a tensor or unknown."""
    if isinstance(value, Blob):
        return value if isinstance(value.data, (bytes, bytearray)) else Blob(bytes(value.data), value.content_type)
    if isinstance(value, (bytes, bytearray)):
        return Blob(value)
    if isinstance(value, memoryview) and (value.format, value.ndim) == ("B", 1):
        return Blob(bytes(value))
    if isinstance(value, str):
        return Blob(value.encode(), "text/plain")
    if isinstance(value, os.PathLike):
        with open(value, "rb") as file:
            return blob_of(file)
    if hasattr(value, "read"):
        data, name = value.read(), getattr(value, "name", "")
        guessed, packing = mimetypes.guess_type(name) if isinstance(name, str) else (None, None)
        guessed = None if packing else guessed  # of rows.json.gz it is what gzip has packed
        text = isinstance(data, str)
        return Blob(data.encode() if text else bytes(data), guessed or ("text/plain" if text else ""))
    is_plain = value is None or isinstance(value, (dict, list, tuple, bool, int, float))
    if is_plain and not hasattr(value, "__array__"):  # numbers of numpy are tensors
        return Blob(json.dumps(value, allow_nan=False, ensure_ascii=False).encode(), "application/json")
    return None


def _input(name: str, value: Any) -> Dict[str, Any]:
    blob = blob_of(value)
    if blob is not None:
        data = Binary((struct.pack("<I", len(blob.data)), blob.data))
        kind = {"content_type": blob.content_type}
        return {"name": name, "datatype": "BYTES", "shape": [1], "parameters": kind, "data": data}
    if isinstance(value, Tensor):
        return {"name": name, "datatype": value.datatype, "shape": list(value.shape), "data": Binary((value.data,))}
    if hasattr(value, "__array__"):
        from ..arrays_numpy import NumpyArrays as Arrays
    elif isinstance(value, (memoryview, array.array)):
        from ..arrays import BufferArrays as Arrays  # type: ignore[assignment]
    else:
        raise TypeError(
            f"got {type(value).__name__}; give bytes, str, a file, an array, a document of JSON, a Blob or a Tensor"
        )
    from ..frames import as_bytes

    raw = Arrays().encode(value, None, None)
    return {"name": name, "datatype": raw.datatype, "shape": list(raw.shape), "data": Binary((as_bytes(raw.data),))}


# --- answers -------------------------------------------------------------------------

Value = Any  # an array of numpy or a Tensor, text, bytes, or a document


class Step(NamedTuple):
    """Where the time of one step went, in milliseconds."""

    step: str = ""
    stage: str = ""
    host: str = ""
    attempt: int = 0
    queue_wait_ms: float = 0
    batch_wait_ms: float = 0
    model_wait_ms: float = 0
    run_ms: float = 0
    batch_size: int = 0
    batch_rows: int = 0
    rows: int = 0
    dispatch_reason: str = ""
    local: bool = False
    path: str = ""


class Timeline(NamedTuple):
    """Where the time of a request went."""

    total_ms: float = 0
    steps: Tuple[Step, ...] = ()

    def __str__(self) -> str:
        rows: List[Tuple[str, ...]] = [("step", "queue", "batch", "run", "batch of")]
        for s in self.steps:
            times = (f"{ms:.1f} ms" for ms in (s.queue_wait_ms, s.batch_wait_ms, s.run_ms))
            rows.append((s.step, *times, f"{s.batch_size}, {s.dispatch_reason}"))
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


class Outputs(Mapping[str, Value]):
    """Outputs by name: arrays, text, bytes and documents. ``content_types`` has those of the blobs."""

    def __init__(self, parts: Sequence[Mapping[str, Any]]) -> None:
        self.content_types: Dict[str, str] = {p["name"]: p["content_type"] for p in parts if "content_type" in p}
        self._values: Dict[str, Value] = {part["name"]: _value(part) for part in parts}

    def __getitem__(self, name: str) -> Value:
        try:
            return self._values[name]
        except KeyError:
            raise KeyError(f"no output {name!r}; there are {', '.join(map(repr, self._values)) or 'none'}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def value(self) -> Value:
        """The only output."""
        if len(self._values) != 1:
            raise KeyError(f"there are {len(self._values)} outputs: {', '.join(map(repr, self._values))}")
        return next(iter(self._values.values()))

    def _rows(self) -> List[str]:
        width = max(map(len, self._values), default=0)
        return [f"{name.ljust(width)}  {_brief(value)}" for name, value in self._values.items()]

    def __repr__(self) -> str:
        return "\n  ".join([type(self).__name__, *self._rows()])


class Answer(Outputs):
    """The answer to a request: its outputs, ``request_id``, ``pipeline``, ``metadata`` and ``timeline``."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        super().__init__(document["outputs"])
        self.request_id: str = document.get("request_id", "")
        self.pipeline: str = document.get("model_name", "")
        self.metadata: Dict[str, str] = document.get("metadata", {})
        timeline = document.get("timeline", {})
        known = [{k: v for k, v in step.items() if k in Step._fields} for step in timeline.get("steps", ())]
        self.timeline = Timeline(timeline.get("total_ms", 0), tuple(Step(**step) for step in known))

    def __repr__(self) -> str:
        head = f"{self.pipeline}: {self.timeline.total_ms:.1f} ms, request {self.request_id}"
        times = str(self.timeline).splitlines() if self.timeline.steps else []
        return "\n  ".join([head, *self._rows(), *times])


class Chunk(Outputs):
    """A piece of a streamed answer; ``seq`` counts from 1."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        super().__init__(document["outputs"])
        self.request_id: str = document.get("request_id", "")
        self.seq: int = document.get("seq", 0)


def decode_answer(headers: Mapping[str, str], body: Any) -> Answer:
    """Returns the answer in a body; of a type that is none of a mesh, one output without a name."""
    kind = headers.get("content-type", "")
    try:
        if kind == PACKED:
            return Answer(unpack(memoryview(body)))
        if "stagemesh-job-state" in headers:  # what the HTTP target of a job answered
            data = json.loads(body) if kind.partition(";")[0] == "application/json" else bytes(body)
            out = Answer({"outputs": []})
            out.content_types[""], out._values[""] = kind, data
            return out
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise invalid_answer(f"the answer cannot be read: {error!r}") from error
    raise invalid_answer(f"the answer is {kind or 'of no type'}, expected {PACKED}; is the URL a gateway's?")


@functools.cache
def _has_numpy() -> bool:
    return find_spec("numpy") is not None


def _value(part: Mapping[str, Any]) -> Value:
    if "datatype" in part:
        tensor = Tensor.received(part["name"], part["datatype"], part["shape"], part["data"])
        return tensor.numpy() if _has_numpy() else tensor
    for member in ("json", "text"):
        if member in part:
            return part[member]
    return base64.b64decode(part["data_base64"]) if "data_base64" in part else bytes(part["data"])


_WIDTH = 72


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."


def _brief(value: Value) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if hasattr(value, "dtype"):
        few = value.ravel()[:16].tolist()
        return f"{value.dtype}{list(value.shape)} " + _shorten(repr(few)[:-1] + (", ...]" if value.size > 16 else "]"))
    return _shorten(repr(value))
