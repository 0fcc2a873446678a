"""Tensors as memoryviews, with the standard library alone.

A tensor comes as a memoryview of its datatype and shape: ``x[2, 3]``, ``x.tolist()``,
``x.shape``. FP16 and BF16 come as their bits (format ``H``). BYTES come as nested
lists of bytes. Where an extent is 0 the view is flat, since memoryview has no such
shapes.

What goes out may be a memoryview, an array.array, bytes, or nested lists of
numbers; a flat buffer takes the shape of the spec.
"""

from __future__ import annotations

import array
import sys
from operator import attrgetter
from typing import Any, Callable, List, Optional, Sequence, Tuple

from .arrays import Arrays, Mismatch, padded_extents
from .datatypes import DATATYPES, elements, pack
from .parts import Raw, bytes_elements, pack_bytes
from .specs import Tensor

if sys.byteorder != "little":
    raise ImportError('arrays="buffer" needs a little-endian machine; use arrays="numpy"')

# The datatype of a buffer by kind and size of its format.
_KINDS = {"?": "?", **dict.fromkeys("bhilqn", "i"), **dict.fromkeys("BHILQN", "u"), **dict.fromkeys("fd", "f")}
_NAMES = {
    ("?", 1): "BOOL",
    **{("i", size): f"INT{size * 8}" for size in (1, 2, 4, 8)},
    **{("u", size): f"UINT{size * 8}" for size in (1, 2, 4, 8)},
    ("f", 4): "FP32",
    ("f", 8): "FP64",
}


class BufferArrays(Arrays):
    """Memoryviews."""

    name = "buffer"
    traits = staticmethod(attrgetter("shape", "format", "c_contiguous"))

    def view(self, raw: Raw) -> Any:
        """Returns a memoryview of the tensor's format and shape."""
        if raw.datatype == "BYTES":
            return _nest([bytes(element) for element in bytes_elements(raw.data)], raw.shape)
        flat: memoryview = raw.data
        code: Any = DATATYPES[raw.datatype].code
        if raw.size == 0:
            return flat.cast(code)
        if code == "B" and len(raw.shape) == 1:
            return flat
        return flat.cast(code, raw.shape)

    def viewer(self, raw: Raw) -> Callable[[memoryview], Any]:
        """Returns the function that views a tensor in a body."""
        datatype, shape, _, size, at = raw
        code: Any = DATATYPES[datatype].code
        end = at + size
        if size == 0:
            return lambda body: body[at:end].cast(code)
        return lambda body: body[at:end].cast(code, shape)

    def pad(self, raws: Sequence[Raw], spec: Tensor, stack: bool) -> Any:
        """Returns one memoryview of all, filled up."""
        extents = padded_extents(raws, spec, stack)
        blocks = [block for raw in raws for block in ([raw] if stack else _rows(raw))]
        fill = spec.fill
        out = memoryview(bytearray(fill * (len(blocks) * elements(tuple(extents)))))
        stride = elements(tuple(extents)) * len(fill)
        for i, block in enumerate(blocks):
            _copy(out[i * stride :], extents, block.data, list(block.shape if stack else block.shape[1:]), len(fill))
        return self.view(Raw(spec.datatype, (len(blocks), *extents), out, len(out)))

    def encode(self, value: Any, spec: Optional[Tensor], shape: Optional[Tuple[int, ...]]) -> Raw:
        """Returns a buffer, or nested lists of numbers, as a tensor."""
        wanted = spec.datatype if spec is not None else None
        if wanted == "BYTES":
            flat, found = _flatten(value)
            data = _pack_elements(flat)
            return Raw(wanted, found, data, len(data))
        if isinstance(value, (list, tuple, int, float)):
            if wanted is None:
                raise Mismatch(f"got {type(value).__name__} without a spec: declare the output, or give a memoryview")
            flat, found = _flatten(value)
            data = _pack(flat, wanted)
            return Raw(wanted, found, data, len(data))
        try:
            view = memoryview(value)
        except TypeError:
            raise Mismatch(f"got {type(value).__name__}, wanted a buffer or nested lists") from None
        data = value if view.c_contiguous else view.tobytes()
        name = _name(view, wanted, raw_bytes=isinstance(value, (bytes, bytearray)))
        count = view.nbytes // DATATYPES[name].size
        return Raw(name, _shape(view, count, shape), data, view.nbytes)


def _name(view: memoryview, wanted: Optional[str], raw_bytes: bool) -> str:
    """Returns the datatype of a buffer; raises Mismatch where it is not the wanted one."""
    code = view.format.lstrip("@<=")
    found = _NAMES.get((_KINDS.get(code, code), view.itemsize))
    if wanted is None:
        if found is None:
            raise Mismatch(f"got a buffer of format {view.format!r}, which no datatype stands for")
        return found
    if raw_bytes:
        if view.nbytes % DATATYPES[wanted].size:
            raise Mismatch(f"got {view.nbytes} bytes, which are no whole elements of {wanted}")
        return wanted
    if found != wanted and not (wanted in ("FP16", "BF16") and (found == "UINT16" or code == "e")):
        raise Mismatch(f"got a buffer of format {view.format!r}, wanted {wanted} (format {DATATYPES[wanted].code!r})")
    return wanted


def _shape(view: memoryview, count: int, wanted: Optional[Tuple[int, ...]]) -> Tuple[int, ...]:
    """Returns a buffer's own shape, or for a flat one the wanted shape, where one extent may be open."""
    if view.ndim != 1:
        return tuple(view.shape or ())
    if wanted is None or len(wanted) == 1:
        return (count,)
    known = elements(tuple(extent for extent in wanted if extent != -1))
    open_axes = [axis for axis, extent in enumerate(wanted) if extent == -1]
    if not open_axes and known == count:
        return wanted
    if len(open_axes) == 1 and known and count % known == 0:
        return tuple(count // known if extent == -1 else extent for extent in wanted)
    raise Mismatch(
        f"got {count} elements in a flat buffer, which do not make the shape {list(wanted)}; cast it to its shape"
    )


def _rows(raw: Raw) -> List[Raw]:
    stride = raw.size // raw.shape[0] if raw.shape[0] else 0
    shape = (1, *raw.shape[1:])
    return [Raw(raw.datatype, shape, raw.data[i * stride : (i + 1) * stride], stride) for i in range(raw.shape[0])]


def _copy(to: memoryview, to_shape: List[int], source: memoryview, shape: List[int], size: int) -> None:
    """Copies a block into the corner of a larger one; extents in elements of size bytes."""
    if not shape:
        to[:size] = source[:size]
        return
    if shape[1:] == to_shape[1:]:
        n = elements(tuple(shape)) * size
        to[:n] = source[:n]
        return
    to_stride, stride = elements(tuple(to_shape[1:])) * size, elements(tuple(shape[1:])) * size
    for i in range(shape[0]):
        _copy(to[i * to_stride :], to_shape[1:], source[i * stride : (i + 1) * stride], shape[1:], size)


def _nest(values: List[Any], shape: Tuple[int, ...]) -> Any:
    if not shape:
        return values[0]
    for axis in range(len(shape) - 1, 0, -1):
        n = shape[axis]
        rows = elements(shape[:axis])
        values = [values[i * n : (i + 1) * n] for i in range(rows)]
    return values


def _flatten(value: Any) -> Tuple[List[Any], Tuple[int, ...]]:
    """Returns the elements of nested lists, and their shape."""
    shape: List[int] = []
    level = [value]
    while level and isinstance(level[0], (list, tuple, memoryview, array.array)):
        n = len(level[0])
        shape.append(n)
        following: List[Any] = []
        for one in level:
            if isinstance(one, (memoryview, array.array)):
                one = one.tolist()
            if not isinstance(one, (list, tuple)) or len(one) != n:
                raise Mismatch(f"got nested lists whose lengths differ at axis {len(shape) - 1}")
            following.extend(one)
        level = following
    return level, tuple(shape)


def _pack(values: Sequence[Any], datatype: str) -> bytes:
    try:
        return pack(values, datatype)
    except ValueError as error:
        raise Mismatch(str(error)) from None


def _pack_elements(values: Sequence[Any]) -> bytes:
    out = []
    for value in values:
        if isinstance(value, str):
            value = value.encode()
        if not isinstance(value, (bytes, bytearray, memoryview)):
            raise Mismatch(f"got an element of type {type(value).__name__}, wanted bytes or str")
        out.append(bytes(value))
    return pack_bytes(out)
