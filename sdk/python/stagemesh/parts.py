"""Parts: tensors and blobs, and their places in the body of a frame.

``read_parts`` checks the parts of a received message, ``Layout`` lays out the parts of
one to send. Nothing here copies tensor bytes, except ``join_rows``.
"""

from __future__ import annotations

import array
import itertools
import json
import struct
import sys
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

from .frames import MAX_NUMBER, Buffer, Violation, encode

# --- datatypes -----------------------------------------------------------------


class Datatype(NamedTuple):
    """An element type of the Open Inference Protocol. BYTES has size 0: its elements have any length."""

    name: str
    size: int  # bytes of an element
    code: str  # as struct, array and memoryview name it; H is the bits of FP16 and BF16


DATATYPES: Dict[str, Datatype] = {
    d.name: d
    for d in (
        Datatype("BOOL", 1, "?"),
        Datatype("UINT8", 1, "B"),
        Datatype("UINT16", 2, "H"),
        Datatype("UINT32", 4, "I"),
        Datatype("UINT64", 8, "Q"),
        Datatype("INT8", 1, "b"),
        Datatype("INT16", 2, "h"),
        Datatype("INT32", 4, "i"),
        Datatype("INT64", 8, "q"),
        Datatype("FP16", 2, "H"),
        Datatype("BF16", 2, "H"),
        Datatype("FP32", 4, "f"),
        Datatype("FP64", 8, "d"),
        Datatype("BYTES", 0, ""),
    )
}

MAX_RANK = 16  # axes of a tensor


class Mismatch(ValueError):
    """A value does not fit its declaration; the message names what came and what was wanted."""


def elements(shape: Tuple[int, ...]) -> int:
    """Returns the product of the extents."""
    n = 1
    for extent in shape:
        n *= extent
    return n


def pack(values: Sequence[Any], datatype: str) -> bytes:
    """Returns numbers as the bytes of a tensor, little-endian; raises Mismatch if one does not fit."""
    try:
        if datatype == "FP16":
            return struct.pack(f"<{len(values)}e", *values)
        if datatype == "BF16":
            return b"".join([_bfloat(value) for value in values])
        if datatype == "BOOL":
            return bytes([_truth(value) for value in values])
        out = array.array(DATATYPES[datatype].code, values)
        if sys.byteorder != "little":
            out.byteswap()
        return out.tobytes()
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        raise Mismatch(f"got elements that are no {datatype}: {error}") from None


def _truth(value: Any) -> int:
    if value not in (0, 1):
        raise ValueError(f"{value!r} is neither true nor false")
    return int(value)


def _bfloat(value: float) -> bytes:
    """Returns the upper half of a 32-bit float, rounded to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    if value != value:  # NaN
        return struct.pack("<H", (bits >> 16) | 0x40)
    return struct.pack("<H", ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF)


# --- tensors and blobs -----------------------------------------------------------

_LENGTH = struct.Struct("<I")  # of an element of BYTES


class Raw(NamedTuple):
    """A tensor as bytes: row-major and little-endian.

    data is a C-contiguous buffer of size bytes. Of a received tensor it is a memoryview of
    bytes, and at is the offset of the bytes in the frame's body.
    """

    datatype: str
    shape: Tuple[int, ...]
    data: Buffer
    size: int
    at: int = -1


class Blob(NamedTuple):
    """Bytes with a content type."""

    content_type: str
    data: Buffer


Body = Union[Raw, Blob]
# The parts of one name: one tensor of all items, or one part for each item (None: the item has none).
Column = Union[Raw, List[Optional[Body]]]


def bytes_elements(data: memoryview) -> Iterator[memoryview]:
    """Yields the elements of a BYTES tensor; raises ValueError if one is cut off."""
    at, end = 0, len(data)
    while at < end:
        if end - at < 4:
            raise ValueError(f"{end - at} bytes after the last element")
        (size,) = _LENGTH.unpack_from(data, at)
        at += 4
        if size > end - at:
            raise ValueError(f"an element claims {size} bytes, {end - at} are left")
        yield data[at : at + size]
        at += size


def pack_bytes(values: Sequence[Any]) -> bytes:
    """Returns bytes and strings as the bytes of a BYTES tensor; raises Mismatch for anything else."""
    out: List[bytes] = []
    for value in values:
        if isinstance(value, str):
            value = value.encode()
        elif not isinstance(value, (bytes, bytearray, memoryview)):
            raise Mismatch(f"got an element of type {type(value).__name__}, wanted bytes or str")
        out += (_LENGTH.pack(len(value)), value)
    return b"".join(out)


def split_rows(raw: Raw, rows: Sequence[int]) -> List[Raw]:
    """Splits a tensor along axis 0 into pieces with these numbers of rows; they share its bytes."""
    total, rest = raw.shape[0], raw.shape[1:]
    data = memoryview(raw.data)
    if data.format != "B" or data.ndim != 1:
        data = data.cast("B") if raw.size else memoryview(bytearray())
    if raw.datatype == "BYTES":
        lengths = [4 + len(element) for element in bytes_elements(data)]
        ends = list(itertools.accumulate((n * elements(rest) for n in rows), initial=0))
        sizes = [sum(lengths[start:end]) for start, end in zip(ends, ends[1:])]
    else:
        sizes = [n * (raw.size // total) if total else 0 for n in rows]
    out = []
    at = 0
    for n, size in zip(rows, sizes):
        out.append(Raw(raw.datatype, (n, *rest), data[at : at + size], size))
        at += size
    return out


def join_rows(raws: Sequence[Raw]) -> Raw:
    """Joins tensors of one datatype and trailing shape along axis 0, by a copy."""
    first = raws[0]
    data = bytearray().join([raw.data for raw in raws])  # a bytearray, so arrays over it are writable
    return Raw(first.datatype, (sum(raw.shape[0] for raw in raws), *first.shape[1:]), memoryview(data), len(data))


# --- received parts ----------------------------------------------------------------


def read_parts(entries: Any, body: memoryview, items: int) -> Dict[str, Column]:
    """Returns the parts of a message by name; raises Violation if they break the protocol.

    items is the number of items in the message, which bounds a part's item.
    """
    if not isinstance(entries, list):
        raise Violation("parts: a list is wanted")
    out: Dict[str, Column] = {}
    end = len(body)
    places: List[Tuple[int, int]] = []
    for entry in entries:
        try:
            name, at, size = entry["name"], entry["at"], entry["size"]
            get = entry.get
        except (KeyError, TypeError, AttributeError):
            raise Violation("parts: an object with name, at and size is wanted") from None
        if type(name) is not str or type(at) is not int or type(size) is not int:
            raise Violation("parts: name is a string, at and size are whole numbers")
        if at < 0 or size < 0 or at + size > end:
            raise Violation(f"part {name!r}: bytes {at} to {at + size} of a body of {end}")
        if size:
            places.append((at, at + size))
        content: Body
        if ("datatype" in entry) == ("content_type" in entry):
            raise Violation(f"part {name!r}: a tensor has datatype and shape, a blob content_type")
        if "datatype" in entry:
            content = _read_tensor(name, entry["datatype"], get("shape"), body[at : at + size], size, at)
        elif type(entry["content_type"]) is not str:
            raise Violation(f"part {name!r}: content_type is a string")
        else:
            content = Blob(entry["content_type"], body[at : at + size])
        if "place" in entry and entry["place"] != "inline":
            raise Violation(f"part {name!r}: place {entry['place']!r} is not one of this version's")
        if "parameters" in entry and type(entry["parameters"]) is not dict:
            raise Violation(f"part {name!r}: parameters are an object")
        if "item" in entry:
            _add_to_item(out, name, entry["item"], items, content)
        elif name in out:
            raise Violation(f"part {name!r} of all items comes more than once")
        elif type(content) is Raw:
            out[name] = content
        else:
            raise Violation(f"part {name!r}: a blob belongs to one item")
    places.sort()
    for (_, stop), (start, _) in zip(places, places[1:]):
        if start < stop:
            raise Violation(f"parts: two places overlap at byte {start} of the body")
    return out


def _add_to_item(out: Dict[str, Column], name: str, item: Any, items: int, content: Body) -> None:
    if type(item) is not int or not 0 <= item < items:
        raise Violation(f"part {name!r}: item {item!r} is none of the {items}")
    column = out.get(name)
    if column is None:
        column = out[name] = [None] * items
    if isinstance(column, Raw) or column[item] is not None:
        raise Violation(f"part {name!r} of item {item} comes more than once")
    column[item] = content


_WIDTHS = {name: datatype.size for name, datatype in DATATYPES.items()}


def _read_tensor(name: str, datatype: Any, shape: Any, data: memoryview, size: int, at: int) -> Raw:
    width = _WIDTHS.get(datatype) if type(datatype) is str else None
    if width is None:
        raise Violation(f"part {name!r}: datatype {datatype!r} is none")
    if type(shape) is not list or len(shape) > MAX_RANK:
        raise Violation(f"part {name!r}: shape is a list of at most {MAX_RANK} extents")
    n = 1
    for extent in shape:
        if type(extent) is not int or not 0 <= extent <= MAX_NUMBER:
            raise Violation(f"part {name!r}: shape {shape!r} has an extent that is none")
        n *= extent
    if width == 0:
        try:
            count = sum(1 for _ in bytes_elements(data))
        except ValueError as error:
            raise Violation(f"part {name!r}: {error}") from None
        if count != n:
            raise Violation(f"part {name!r}: shape {shape} takes {n} elements, got {count}")
    elif n * width != size:
        raise Violation(f"part {name!r}: shape {shape} of {datatype} takes {n * width} bytes, got {size}")
    return Raw(datatype, tuple(shape), data, size, at)


# --- parts to send -----------------------------------------------------------------

_ALIGNED = 64 - 1  # parts begin at multiples of 64 bytes
_PADDING = bytes(64)


class Layout:
    """Lays out the bytes of a message's parts. It keeps references and copies nothing.

    entries are the parts as JSON; pieces are the buffers of the body, size bytes in all.
    """

    # The beginnings of entries: of a tensor by name, datatype and shape, of a blob by name
    # and content type. Shared by all layouts, since batches repeat them.
    _heads: Dict[Tuple[str, str, Optional[Tuple[int, ...]]], str] = {}

    def __init__(self) -> None:
        self.entries: List[str] = []
        self.pieces: List[Buffer] = []
        self.size = 0
        self._last: Optional[Tuple[str, str, Tuple[int, ...]]] = None

    def tensor(self, name: str, item: Optional[int], raw: Raw) -> None:
        """Adds a tensor of one item, or of all if item is None."""
        datatype, shape, data, size, _ = raw
        key = (name, datatype, shape)
        head = self._heads.get(key) or self._make_head(key)
        at = self.size
        if at & _ALIGNED and (item is None or key != self._last):
            at = self._align()
        self._last = key
        owner = "" if item is None else f'"item":{item},'
        self.entries.append(f'{head}{owner}"at":{at},"size":{size}}}')
        if size:
            self.pieces.append(data)
            self.size = at + size

    def head(self, name: str, raw: Raw) -> str:
        """Returns how the entry of a tensor begins: all but its item and its place."""
        key = (name, raw.datatype, raw.shape)
        return self._heads.get(key) or self._make_head(key)

    def joined(self, name: str, raws: Sequence[Raw]) -> None:
        """Adds tensors of one datatype and trailing shape as one, joined on axis 0."""
        first = raws[0]
        shape = (sum([raw.shape[0] for raw in raws]), *first.shape[1:])
        size = sum([raw.size for raw in raws])
        self.tensor(name, None, Raw(first.datatype, shape, b"", size))
        if size:
            self.pieces[-1:] = [raw.data for raw in raws if raw.size]

    def add(self, name: str, item: Optional[int], body: Body) -> None:
        """Adds a tensor or a blob of one item, or a tensor of all if item is None."""
        if isinstance(body, Raw):
            self.tensor(name, item, body)
            return
        at = self._align()
        self._last = None
        key = (name, body.content_type, None)
        head = self._heads.get(key) or self._make_head(key)
        owner = "" if item is None else f'"item":{item},'
        size = memoryview(body.data).nbytes
        self.entries.append(f'{head}{owner}"at":{at},"size":{size}}}')
        if size:
            self.pieces.append(body.data)
            self.size = at + size

    def add_items(self, name: str, numbers: Sequence[int], bodies: Sequence[Optional[Body]], join: bool) -> None:
        """Adds the parts that single items have: bodies[i] is that of item numbers[i], None if it has none.

        If join is true and all of them are tensors that differ only in axis 0, they are
        added as one tensor of all items.
        """
        if join and bodies:
            raws = [body for body in bodies if isinstance(body, Raw) and body.shape]
            if len(raws) == len(bodies) and len({(raw.datatype, raw.shape[1:]) for raw in raws}) == 1:
                self.joined(name, raws)
                return
        for number, body in zip(numbers, bodies):
            if body is not None:
                self.add(name, number, body)

    def take_entries(self, first: int) -> List[Dict[str, Any]]:
        """Removes the entries from index first on, and returns them parsed."""
        taken, self.entries = self.entries[first:], self.entries[:first]
        return [json.loads(entry) for entry in taken]

    def _align(self) -> int:
        """Pads the body to where the next part begins, and returns that offset."""
        gap = -self.size & _ALIGNED
        if gap:
            self.pieces.append(_PADDING[:gap])
            self.size += gap
        return self.size

    @classmethod
    def _make_head(cls, key: Tuple[str, str, Optional[Tuple[int, ...]]]) -> str:
        name, kind, shape = key
        if len(cls._heads) >= 1024:  # a bound for shapes that never repeat
            cls._heads.clear()
        entry: Dict[str, Any] = {"name": name, "content_type": kind}
        if shape is not None:
            entry = {"name": name, "datatype": kind, "shape": list(shape)}
        head = encode(entry)[:-1] + ","
        cls._heads[key] = head
        return head
