"""Tensors as numpy arrays.

BF16, which numpy does not have, comes as its bits in uint16. BYTES come as an
array of objects, each a bytes.
"""

from __future__ import annotations

import math
import sys
from operator import attrgetter
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import numpy as np

from .arrays import Arrays, padded_extents
from .parts import Mismatch, Raw, bytes_elements, pack, pack_bytes
from .specs import Tensor

_DTYPES: Dict[str, np.dtype[Any]] = {
    name: np.dtype(code)
    for name, code in {
        "BOOL": "?",
        "UINT8": "u1",
        "UINT16": "<u2",
        "UINT32": "<u4",
        "UINT64": "<u8",
        "INT8": "i1",
        "INT16": "<i2",
        "INT32": "<i4",
        "INT64": "<i8",
        "FP16": "<f2",
        "BF16": "<u2",
        "FP32": "<f4",
        "FP64": "<f8",
    }.items()
}
# The datatype of an array, by numpy's number of its type; 64 bits have two.
_NAMES: Dict[int, str] = {}
for _name, _dtype in _DTYPES.items():
    if _name != "BF16":
        _NAMES[_dtype.num] = _name
for _code in "lqLQip":
    _dtype = np.dtype(_code)
    _NAMES.setdefault(_dtype.num, f"{'U' if _dtype.kind == 'u' else ''}INT{_dtype.itemsize * 8}")

_LITTLE = sys.byteorder == "little"


class NumpyArrays(Arrays):
    """Arrays of numpy."""

    name = "numpy"
    traits = staticmethod(attrgetter("shape", "dtype", "flags.c_contiguous"))

    def view(self, raw: Raw) -> Any:
        """Returns an array over the tensor's bytes."""
        dtype = _DTYPES.get(raw.datatype)
        if dtype is None:
            return _objects(raw)
        return np.ndarray(raw.shape, dtype, raw.data)

    def viewer(self, raw: Raw) -> Callable[[memoryview], Any]:
        """Returns a function from a frame's body to the tensor that is at the place of this one."""
        shape, dtype, at = raw.shape, _DTYPES[raw.datatype], raw.at
        return lambda body: np.ndarray(shape, dtype, body, at)

    def pad(self, raws: Sequence[Raw], spec: Tensor, stack: bool) -> Any:
        """Returns one array of all tensors, padded to the longest extents."""
        extents = padded_extents(raws, spec, stack)
        n = len(raws) if stack else sum(raw.shape[0] for raw in raws)
        dtype = _DTYPES[spec.datatype]
        out = np.full((n, *extents), np.frombuffer(spec.fill, dtype)[0], dtype)
        at = 0
        for raw in raws:
            rows: Any = at if stack else slice(at, at + raw.shape[0])
            corner = (rows, *map(slice, raw.shape if stack else raw.shape[1:]))
            out[corner] = self.view(raw)
            at += 1 if stack else raw.shape[0]
        return out

    def encode(self, value: Any, spec: Optional[Tensor], shape: Optional[Tuple[int, ...]]) -> Raw:
        """Returns an array as a tensor; without a copy where it is C-contiguous."""
        array = value if type(value) is np.ndarray else _array(value, spec)
        dtype = array.dtype
        name = _NAMES.get(dtype.num)
        if spec is not None:
            wanted = spec.datatype
            if wanted != name and not (wanted == "BF16" and name == "UINT16"):
                if wanted == "BYTES" and dtype.kind in "SUO":
                    return _pack(array)
                raise Mismatch(f"got dtype {dtype}, expected {wanted}{_hint(wanted)}")
            name = wanted
        elif name is None:
            if dtype.kind in "SUO":
                return _pack(array)
            raise Mismatch(f"got dtype {dtype}, which no datatype stands for")
        if not array.flags.c_contiguous or not (dtype.isnative if _LITTLE else dtype == _DTYPES[name]):
            # ascontiguousarray would make a row of a scalar, which is contiguous.
            array = np.ascontiguousarray(array, dtype.newbyteorder("<")) if array.ndim else array.astype(_DTYPES[name])
        return Raw(name, array.shape, array, array.nbytes)


def _hint(datatype: str) -> str:
    if datatype not in _DTYPES:
        return " (an array of bytes or str)"
    if datatype == "BF16":
        return " (its bits as uint16)"
    return f": use .astype(numpy.{_DTYPES[datatype].name})"


def _array(value: Any, spec: Optional[Tensor]) -> Any:
    """Returns an array of another library's tensor, of nested lists or of a number; raises Mismatch."""
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    if spec is None or hasattr(value, "__array__") or spec.datatype == "BYTES":
        try:
            # As objects: numpy's own strings are ASCII, and end before zeros.
            strings = spec is not None and spec.datatype == "BYTES" and isinstance(value, (list, tuple, bytes, str))
            return np.asarray(value, object if strings else None)
        except Exception as error:
            raise Mismatch(f"got {type(value).__name__}, which numpy cannot read: {error}") from None
    if isinstance(value, (dict, set, str, type(None))):
        raise Mismatch(f"got {type(value).__name__}, expected an array of {spec.datatype}")
    try:
        return _numbers(np.asarray(value), value, spec.datatype)
    except (ValueError, TypeError, OverflowError) as error:
        if isinstance(error, Mismatch):
            raise
        raise Mismatch(f"got {type(value).__name__}, expected an array of {spec.datatype}: {error}") from None


def _numbers(found: np.ndarray[Any, Any], value: Any, datatype: str) -> Any:
    """Returns nested lists, or a number, as an array of the datatype; found is what numpy makes of them.

    Numbers of Python have no width: 0.5 may be FP32, but not INT64.
    """
    wanted = _DTYPES[datatype]
    if datatype == "BF16" and found.dtype.kind in "buif":
        return np.frombuffer(pack(found.astype(float).ravel().tolist(), datatype), wanted).reshape(found.shape)
    if wanted.kind in "iub" and found.size and found.dtype.kind in "iufO":
        if found.dtype.kind in "fO":  # numpy's choice for whole numbers that no integer type holds
            exact = np.asarray(value, object)
            if not all(isinstance(one, (int, np.integer)) for one in exact.flat):
                raise Mismatch(f"got {_kind(found, value)}, expected {datatype}")
            found = exact
        least, most = (0, 1) if wanted.kind == "b" else (np.iinfo(wanted).min, np.iinfo(wanted).max)
        for one in (int(found.min()), int(found.max())):
            if not least <= one <= most:
                raise Mismatch(f"got {one}, which is not {datatype}")
        return found.astype(wanted)
    if found.size and not np.can_cast(found.dtype, wanted, "same_kind"):
        raise Mismatch(f"got {_kind(found, value)}, expected {datatype}")
    return np.asarray(value, wanted)


def _kind(found: np.ndarray[Any, Any], value: Any) -> str:
    """Returns the name of a value's type for errors; numpy makes objects of values that it does not know."""
    return type(value).__name__ if found.dtype.kind == "O" else str(found.dtype)


def _objects(raw: Raw) -> Any:
    out: Any = np.empty(math.prod(raw.shape), object)
    for i, element in enumerate(bytes_elements(raw.data)):
        out[i] = bytes(element)
    return out.reshape(raw.shape)


def _pack(array: Any) -> Raw:
    data = pack_bytes(array.ravel().tolist())
    return Raw("BYTES", array.shape, data, len(data))
