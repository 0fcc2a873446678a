"""Tensors as a worker gets them: the interface, and memoryviews.

The worker's declaration alone decides between memoryviews and the numpy arrays of
``arrays_numpy``. numpy is imported only if it is declared.
"""

from __future__ import annotations

import array
import math
from abc import ABC, abstractmethod
from operator import attrgetter
from typing import Any, Callable, List, Optional, Sequence, Tuple

from .parts import DATATYPES, Mismatch, Raw, bytes_elements, pack, pack_bytes, split_rows
from .specs import Tensor


class Arrays(ABC):
    """Turns tensors into arrays and back."""

    name: str

    # Returns the traits of an array that decide how it is encoded: shape, datatype and
    # whether it is C-contiguous. Raises AttributeError for a value that is not an array.
    traits: Callable[[Any], Any]

    @abstractmethod
    def view(self, raw: Raw) -> Any:
        """Returns the tensor as an array over the same bytes."""

    @abstractmethod
    def viewer(self, raw: Raw) -> Callable[[memoryview], Any]:
        """Returns a function from a frame's body to the tensor that is at the place of this one."""

    @abstractmethod
    def pad(self, raws: Sequence[Raw], spec: Tensor, stack: bool) -> Any:
        """Returns one array of all tensors, padded to the longest extents.

        They are stacked on a new axis 0, or without stack joined on axis 0.
        """

    @abstractmethod
    def encode(self, value: Any, spec: Optional[Tensor], shape: Optional[Tuple[int, ...]]) -> Raw:
        """Returns a value as a tensor of the spec's datatype; raises Mismatch.

        shape is the wanted one, -1 for any extent. It is not checked here; it gives a
        flat value its axes.
        """


# An array of more bytes than this, and than so many times its tensors, is not padded.
_MAX_PADDED, _MAX_PADDING = 64 << 20, 16


def padded_extents(raws: Sequence[Raw], spec: Tensor, stack: bool) -> List[int]:
    """Returns the extents of one padded tensor; without stack, without axis 0.

    Raises MemoryError if the array would be mostly padding and large: the host then halves
    the batch. It bounds declared inputs itself, and knows nothing of prepared ones.
    """
    wanted = spec.shape if stack else spec.shape[1:]
    shapes = [raw.shape if stack else raw.shape[1:] for raw in raws]
    out = []
    for axis, want in enumerate(wanted):
        longest = max(shape[axis] for shape in shapes)
        out.append(-(-longest // spec.multiple) * spec.multiple if want == -1 else longest)
    rows = len(raws) if stack else sum(raw.shape[0] for raw in raws)
    size, given = rows * math.prod(out) * len(spec.fill), sum(raw.size for raw in raws)
    if size > max(_MAX_PADDED, _MAX_PADDING * given):
        raise MemoryError(f"{given} bytes padded to {[rows, *out]} take {size} bytes")
    return out


# --- memoryviews -------------------------------------------------------------------

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
    """Memoryviews, with the standard library alone.

    A tensor is a memoryview of its datatype and shape: ``x[2, 3]``, ``x.tolist()``. FP16 and
    BF16 come as their bits (format ``H``), BYTES as nested lists of bytes. If an extent is 0
    the view is flat, since memoryview has no such shapes. An output may be a memoryview, an
    array.array, bytes, or nested lists of numbers; a flat buffer takes the shape of the spec.
    """

    name = "buffer"
    traits = staticmethod(attrgetter("shape", "format", "c_contiguous"))

    def view(self, raw: Raw) -> Any:
        """Returns a memoryview of the tensor's format and shape."""
        if raw.datatype == "BYTES":
            return nest([bytes(element) for element in bytes_elements(raw.data)], raw.shape)
        flat: memoryview = raw.data
        code: Any = DATATYPES[raw.datatype].code
        if raw.size == 0:
            return flat.cast(code)
        if code == "B" and len(raw.shape) == 1:
            return flat
        return flat.cast(code, raw.shape)

    def viewer(self, raw: Raw) -> Callable[[memoryview], Any]:
        """Returns a function from a frame's body to the tensor that is at the place of this one."""
        datatype, shape, _, size, at = raw
        code: Any = DATATYPES[datatype].code
        end = at + size
        if size == 0:
            return lambda body: body[at:end].cast(code)
        return lambda body: body[at:end].cast(code, shape)

    def pad(self, raws: Sequence[Raw], spec: Tensor, stack: bool) -> Any:
        """Returns one memoryview of all tensors, padded to the longest extents."""
        extents = padded_extents(raws, spec, stack)
        blocks = [(raw.shape, raw.data) for raw in raws]
        if not stack:
            rows = [row for raw in raws for row in split_rows(raw, [1] * raw.shape[0])]
            blocks = [(row.shape[1:], row.data) for row in rows]
        stride = math.prod(extents) * len(spec.fill)
        out = memoryview(bytearray(spec.fill * (len(blocks) * math.prod(extents))))
        for i, (shape, data) in enumerate(blocks):
            _copy(out[i * stride :], extents, data, shape, len(spec.fill))
        return self.view(Raw(spec.datatype, (len(blocks), *extents), out, len(out)))

    def encode(self, value: Any, spec: Optional[Tensor], shape: Optional[Tuple[int, ...]]) -> Raw:
        """Returns a buffer, or nested lists of numbers, as a tensor."""
        wanted = spec.datatype if spec is not None else None
        if wanted == "BYTES" or isinstance(value, (list, tuple, int, float)):
            if wanted is None:
                raise Mismatch(f"got {type(value).__name__} without a spec: declare the output, or give a memoryview")
            flat, found = _flatten(value)
            packed = pack_bytes(flat) if wanted == "BYTES" else pack(flat, wanted)
            return Raw(wanted, found, packed, len(packed))
        try:
            view = memoryview(value)
        except TypeError:
            raise Mismatch(f"got {type(value).__name__}, expected a buffer or nested lists") from None
        data = value if view.c_contiguous else view.tobytes()
        name = _name(view, wanted, raw_bytes=isinstance(value, (bytes, bytearray)))
        count = view.nbytes // DATATYPES[name].size
        return Raw(name, _shape(view, count, shape), data, view.nbytes)


def _name(view: memoryview, wanted: Optional[str], raw_bytes: bool) -> str:
    """Returns the datatype of a buffer; raises Mismatch if it is not the wanted one."""
    code = view.format.lstrip("@<=")
    found = _NAMES.get((_KINDS.get(code, code), view.itemsize))
    if wanted is None:
        if found is None:
            raise Mismatch(f"got a buffer of format {view.format!r}, which no datatype stands for")
        return found
    if raw_bytes:
        if view.nbytes % DATATYPES[wanted].size:
            raise Mismatch(f"got {view.nbytes} bytes, which are not whole elements of {wanted}")
        return wanted
    if found != wanted and not (wanted in ("FP16", "BF16") and (found == "UINT16" or code == "e")):
        raise Mismatch(f"got a buffer of format {view.format!r}, expected {wanted} (format {DATATYPES[wanted].code!r})")
    return wanted


def _shape(view: memoryview, count: int, wanted: Optional[Tuple[int, ...]]) -> Tuple[int, ...]:
    """Returns a buffer's own shape, or for a flat one the wanted shape, of which one extent may be -1."""
    if view.ndim != 1:
        return tuple(view.shape or ())
    if wanted is None or len(wanted) == 1:
        return (count,)
    known = math.prod(extent for extent in wanted if extent != -1)
    open_axes = [axis for axis, extent in enumerate(wanted) if extent == -1]
    if not open_axes and known == count:
        return wanted
    if len(open_axes) == 1 and known and count % known == 0:
        return tuple(count // known if extent == -1 else extent for extent in wanted)
    raise Mismatch(
        f"got {count} elements in a flat buffer, which do not make the shape {list(wanted)}; cast it to its shape"
    )


def _copy(to: memoryview, to_shape: Sequence[int], source: memoryview, shape: Sequence[int], size: int) -> None:
    """Copies a block into the corner of a larger one; extents in elements of size bytes."""
    if tuple(shape[1:]) == tuple(to_shape[1:]):
        n = math.prod(shape) * size
        to[:n] = source[:n]
        return
    to_stride, stride = math.prod(to_shape[1:]) * size, math.prod(shape[1:]) * size
    for i in range(shape[0]):
        _copy(to[i * to_stride :], to_shape[1:], source[i * stride : (i + 1) * stride], shape[1:], size)


def nest(values: List[Any], shape: Tuple[int, ...]) -> Any:
    """Returns elements as nested lists of a shape."""
    if not shape:
        return values[0]
    for axis in range(len(shape) - 1, 0, -1):
        n = shape[axis]
        values = [values[i * n : (i + 1) * n] for i in range(math.prod(shape[:axis]))]
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
