"""Parts: tensors and blobs, and their places in the body of a frame.

``read_parts`` checks the parts of a received message, ``Layout`` lays out the parts of
one to send. Nothing here copies tensor bytes, except ``join_rows``.
"""

from __future__ import annotations

import array
import functools
import itertools
import json
import math
import struct
import sys
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

from .frames import MAX_NUMBER, Buffer, Parts, Violation, as_bytes, encode

# --- datatypes -----------------------------------------------------------------


class Datatype(NamedTuple):
    """An element type of the Open Inference Protocol."""

    size: int  # bytes of an element; 0 for BYTES, whose elements have any length
    code: str  # as struct, array and memoryview name it; H is the bits of FP16 and BF16


DATATYPES: Dict[str, Datatype] = {
    "BOOL": Datatype(1, "?"),
    "UINT8": Datatype(1, "B"),
    "UINT16": Datatype(2, "H"),
    "UINT32": Datatype(4, "I"),
    "UINT64": Datatype(8, "Q"),
    "INT8": Datatype(1, "b"),
    "INT16": Datatype(2, "h"),
    "INT32": Datatype(4, "i"),
    "INT64": Datatype(8, "q"),
    "FP16": Datatype(2, "H"),
    "BF16": Datatype(2, "H"),
    "FP32": Datatype(4, "f"),
    "FP64": Datatype(8, "d"),
    "BYTES": Datatype(0, ""),
}

MAX_RANK = 16  # axes of a tensor


class Mismatch(ValueError):
    """A value does not fit its declaration; the message names what came and what was wanted."""


def pack(values: Sequence[Any], datatype: str) -> bytes:
    """Returns numbers as the bytes of a tensor, little-endian; raises Mismatch if one does not fit."""
    try:
        if datatype == "FP16":
            return struct.pack(f"<{len(values)}e", *values)
        if datatype == "BF16":
            return b"".join([_bfloat(value) for value in values])
        if datatype == "BOOL":
            for value in values:
                if value not in (0, 1):
                    raise ValueError(f"{value!r} is neither true nor false")
            return bytes(map(int, values))
        out = array.array(DATATYPES[datatype].code, values)
        if sys.byteorder != "little":
            out.byteswap()
        return out.tobytes()
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        raise Mismatch(f"got elements that are not {datatype}: {error}") from None


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


class Place(NamedTuple):
    """A received blob: its bytes are body[at:stop] of the frame."""

    content_type: str
    at: int
    stop: int


Body = Union[Raw, Blob]
# The parts of one name: one tensor of all items, or one part for each item (None: the item has none).
Column = Union[Raw, List[Optional[Body]]]
# The same of a received message.
Received = Union[Raw, List[Union[Raw, Place, None]]]


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
            try:
                value = value.encode()
            except ValueError as error:
                raise Mismatch(f"got a str that is not Unicode text: {error}") from None
        elif not isinstance(value, (bytes, bytearray, memoryview)):
            raise Mismatch(f"got an element of type {type(value).__name__}, expected bytes or str")
        out += (_LENGTH.pack(len(value)), value)
    return b"".join(out)


def split_rows(raw: Raw, rows: Sequence[int]) -> List[Raw]:
    """Splits a tensor along axis 0 into pieces with these numbers of rows; they share its bytes."""
    total, rest = raw.shape[0], raw.shape[1:]
    data = as_bytes(raw.data)
    if raw.datatype == "BYTES":
        lengths = [4 + len(element) for element in bytes_elements(data)]
        ends = list(itertools.accumulate((n * math.prod(rest) for n in rows), initial=0))
        sizes = [sum(lengths[start:end]) for start, end in zip(ends, ends[1:])]
    else:
        sizes = [n * (raw.size // total) if total else 0 for n in rows]
    starts = itertools.accumulate(sizes, initial=0)
    return [Raw(raw.datatype, (n, *rest), data[at : at + size], size) for n, size, at in zip(rows, sizes, starts)]


def join_rows(raws: Sequence[Raw]) -> Raw:
    """Joins tensors of one datatype and trailing shape along axis 0, by a copy."""
    first = raws[0]
    data = bytearray().join([raw.data for raw in raws])  # a bytearray, so arrays over it are writable
    return Raw(first.datatype, (sum(raw.shape[0] for raw in raws), *first.shape[1:]), memoryview(data), len(data))


# --- received parts ----------------------------------------------------------------


def read_parts(entries: Any, body: memoryview, items: int) -> Dict[str, Received]:
    """Returns the parts of a message by name; raises Violation if they break the protocol.

    items is the number of items in the message, which bounds a part's item. Entries that
    are blobs alone, and come again for as many items and bytes, are not checked again.
    """
    if not isinstance(entries, list):
        raise Violation("parts: expected a list")
    out: Dict[str, Received] = {}
    end = len(body)
    if type(entries) is Parts and entries.blobs[:2] == (items, end):
        out = entries.blobs[2]
        return out
    blobs_only = True
    before, ascending = 0, True  # the end of the last place, and whether each place begins after the one before
    for entry in entries:
        try:
            name, at, size = entry["name"], entry["at"], entry["size"]
        except (KeyError, TypeError):
            raise Violation("parts: expected an object with name, at and size") from None
        if type(name) is not str or type(at) is not int or type(size) is not int:
            raise Violation("parts: name is a string, at and size are whole numbers")
        stop = at + size
        if at < 0 or size < 0 or stop > end:
            raise Violation(f"part {name!r}: bytes {at} to {stop} of a body of {end}")
        if size:
            ascending = ascending and before <= at
            before = stop
        content: Union[Raw, Place]
        kind = entry.get("content_type")
        if "datatype" in entry and "content_type" not in entry:
            blobs_only = False
            content = read_tensor(name, entry["datatype"], entry.get("shape"), body[at:stop], size, at)
        elif type(kind) is str and "datatype" not in entry:
            content = Place(kind, at, stop)
        else:
            raise Violation(f"part {name!r}: a tensor has datatype and shape, a blob has a content_type, a string")
        if "place" in entry and entry["place"] != "inline":
            raise Violation(f"part {name!r}: unknown place {entry['place']!r}")
        if "parameters" in entry and type(entry["parameters"]) is not dict:
            raise Violation(f"part {name!r}: parameters are an object")
        if "item" in entry:
            item = entry["item"]
            if type(item) is not int or not 0 <= item < items:
                raise Violation(f"part {name!r}: item {item!r}, expected 0 to {items - 1}")
            column = out.get(name)
            if column is None:
                column = out[name] = [None] * items
            if isinstance(column, Raw) or column[item] is not None:
                raise Violation(f"part {name!r} of item {item} comes more than once")
            column[item] = content
        elif name in out:
            raise Violation(f"part {name!r} of all items comes more than once")
        elif type(content) is Raw:
            out[name] = content
        else:
            raise Violation(f"part {name!r}: a blob belongs to one item")
    if not ascending:
        places = sorted((entry["at"], entry["size"]) for entry in entries if entry["size"])
        for (at, size), (after, _) in zip(places, places[1:]):
            if after < at + size:
                raise Violation(f"parts: two places overlap at byte {after} of the body")
    if type(entries) is Parts and blobs_only:
        entries.blobs = items, end, out
    return out


def read_tensor(name: str, datatype: Any, shape: Any, data: memoryview, size: int, at: int) -> Raw:
    """Returns a received tensor; raises Violation if its shape and its bytes do not fit."""
    if type(datatype) is not str or datatype not in DATATYPES:
        raise Violation(f"part {name!r}: unknown datatype {datatype!r}")
    if type(shape) is not list or len(shape) > MAX_RANK:
        raise Violation(f"part {name!r}: shape is a list of at most {MAX_RANK} extents")
    if any(type(extent) is not int or not 0 <= extent <= MAX_NUMBER for extent in shape):
        raise Violation(f"part {name!r}: shape {shape!r} has an extent that is not valid")
    n, width = math.prod(shape), DATATYPES[datatype].size
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


@functools.lru_cache(maxsize=1024)
def entry_head(name: str, kind: str, shape: Optional[Tuple[int, ...]]) -> str:
    """Returns how the entry of a part begins: all but its item and its place.

    kind is the datatype of a tensor, or the content type of a blob, whose shape is None.
    """
    entry: Dict[str, Any] = {"name": name, "content_type": kind}
    if shape is not None:
        entry = {"name": name, "datatype": kind, "shape": list(shape)}
    return encode(entry)[:-1] + ","


class Layout:
    """Lays out the bytes of a message's parts. It keeps references and copies nothing.

    entries are the parts as JSON; pieces are the buffers of the body, size bytes in all.
    """

    def __init__(self) -> None:
        self.entries: List[str] = []
        self.pieces: List[Buffer] = []
        self.size = 0
        self._last = ""  # the head of the last part if that is a tensor

    def add(self, name: str, item: Optional[int], body: Body) -> None:
        """Adds a tensor or a blob of one item, or a tensor of all if item is None."""
        self.add_items(name, (item,), (body,), join=False)

    def add_items(
        self, name: str, numbers: Sequence[Optional[int]], bodies: Sequence[Optional[Body]], join: bool
    ) -> None:
        """Adds the parts that single items have: bodies[i] is that of item numbers[i], None if it has none.

        If join is true and all of them are tensors that differ only in axis 0, they are
        added as one tensor of all items. Each part begins at a multiple of 64 bytes, unless
        it follows another item's tensor of the same name, datatype and shape.
        """
        raws = [body for body in bodies if isinstance(body, Raw) and body.shape] if join else []
        if raws and len(raws) == len(bodies) and len({(raw.datatype, raw.shape[1:]) for raw in raws}) == 1:
            shape = (sum(raw.shape[0] for raw in raws), *raws[0].shape[1:])
            first, *others = [raw.data for raw in raws if raw.size] or [b""]
            self.add(name, None, Raw(raws[0].datatype, shape, first, sum(raw.size for raw in raws)))
            self.pieces += others
            return
        at, entries, pieces = self.size, self.entries, self.pieces
        head, kind = "", None  # kind is the content type if head is of a blob
        for number, body in zip(numbers, bodies):
            if body is None:
                continue
            if isinstance(body, Raw):
                head, data, size = entry_head(name, body.datatype, body.shape), body.data, body.size
                follows = number is not None and head == self._last
                self._last, kind = head, None
            else:
                if body.content_type is not kind:
                    kind = body.content_type
                    head = entry_head(name, kind, None)
                data, size, follows = body.data, len(body.data), False
                self._last = ""
            if at & 63 and not follows:
                pieces.append(bytes(-at & 63))
                at += -at & 63
            owner = "" if number is None else f'"item":{number},'
            entries.append(f'{head}{owner}"at":{at},"size":{size}}}')
            if size:
                pieces.append(data)
                at += size
        self.size = at

    def take_entries(self, first: int) -> List[Dict[str, Any]]:
        """Removes the entries from index first on, and returns them parsed."""
        taken, self.entries = self.entries[first:], self.entries[:first]
        return [json.loads(entry) for entry in taken]
