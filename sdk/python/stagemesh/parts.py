"""Parts: tensors and blobs, and their places in the body of a frame."""

from __future__ import annotations

import json
import struct
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

from .datatypes import DATATYPES, MAX_RANK, elements
from .frames import Buffer, Header, Violation, encode

_LENGTH = struct.Struct("<I")
_ALIGNMENT = 64
_PADDING = bytes(_ALIGNMENT)


class Raw(NamedTuple):
    """A tensor as bytes: row-major and little-endian.

    data is a C-contiguous buffer of size bytes; of tensors that came it is a
    memoryview of bytes, and at is where they begin in the frame's body.
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
# The parts of one name: one of all items, or one for each item (None: it has none).
Column = Union[Raw, List[Optional[Body]]]


class Part(NamedTuple):
    """One part that came; item is None where it belongs to all of them."""

    name: str
    item: Optional[int]
    body: Body
    parameters: Dict[str, Any]


def bytes_elements(data: memoryview) -> Iterator[memoryview]:
    """Yields the elements of a BYTES tensor; raises ValueError where one is cut off."""
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


def pack_bytes(values: Sequence[bytes]) -> bytes:
    """Returns the bytes of a BYTES tensor."""
    return b"".join([piece for value in values for piece in (_LENGTH.pack(len(value)), value)])


def split_rows(raw: Raw, rows: Sequence[int]) -> List[Raw]:
    """Cuts a tensor along axis 0 into pieces of so many rows; they share its bytes."""
    total, rest = raw.shape[0], raw.shape[1:]
    data = memoryview(raw.data)
    if data.format != "B" or data.ndim != 1:
        data = data.cast("B") if raw.size else memoryview(b"")
    out = []
    at = 0
    if raw.datatype == "BYTES":
        each = elements(rest)
        sizes = [4 + len(element) for element in bytes_elements(data)]
        start = 0
        for n in rows:
            size = sum(sizes[start : start + n * each])
            out.append(Raw(raw.datatype, (n, *rest), data[at : at + size], size))
            start += n * each
            at += size
        return out
    stride = raw.size // total if total else 0
    for n in rows:
        size = n * stride
        out.append(Raw(raw.datatype, (n, *rest), data[at : at + size], size))
        at += size
    return out


def join_rows(raws: Sequence[Raw]) -> Raw:
    """Joins tensors of one datatype and trailing shape along axis 0, by a copy."""
    first = raws[0]
    data = b"".join([raw.data for raw in raws])
    return Raw(first.datatype, (sum(raw.shape[0] for raw in raws), *first.shape[1:]), memoryview(data), len(data))


# --- parts that came -------------------------------------------------------


def read_parts(entries: Any, body: memoryview, items: int) -> List[Part]:
    """Returns the parts of a message; raises Violation where they cannot be.

    items is how many items the message has: the bound of a part's item.
    """
    if type(entries) is not list:
        raise Violation("parts: a list is wanted")
    return [_read_part(i, entry, body, items) for i, entry in enumerate(entries)]


def _read_part(i: int, entry: Any, body: memoryview, items: int) -> Part:
    try:
        name, at, size = entry["name"], entry["at"], entry["size"]
        get = entry.get
    except (KeyError, TypeError, AttributeError):
        raise Violation(f"parts[{i}]: an object with name, at and size is wanted") from None
    item = get("item")
    if type(name) is not str or type(at) is not int or type(size) is not int:
        raise Violation(f"parts[{i}]: name is a string, at and size are whole numbers")
    if item is not None and (type(item) is not int or not 0 <= item < items):
        raise Violation(f"parts[{i}] {name!r}: item {item!r} is none of the {items}")
    if at < 0 or size < 0 or at + size > len(body):
        raise Violation(f"parts[{i}] {name!r}: bytes {at} to {at + size} of a body of {len(body)}")
    if get("place", "inline") != "inline":
        raise Violation(f"parts[{i}] {name!r}: place {get('place')!r} is not one of this version's")
    parameters = get("parameters", _NONE)
    if type(parameters) is not dict:
        raise Violation(f"parts[{i}] {name!r}: parameters are an object")
    data = body[at : at + size]
    datatype = get("datatype")
    if datatype is not None:
        return Part(name, item, _read_tensor(i, name, datatype, get("shape"), data, at), parameters)
    content_type = get("content_type", "")
    if type(content_type) is not str:
        raise Violation(f"parts[{i}] {name!r}: content_type is a string")
    return Part(name, item, Blob(content_type, data), parameters)


_NONE: Dict[str, Any] = {}


def _read_tensor(i: int, name: str, datatype: Any, shape: Any, data: memoryview, at: int) -> Raw:
    size = len(data)
    known = DATATYPES.get(datatype) if type(datatype) is str else None
    if known is None:
        raise Violation(f"parts[{i}] {name!r}: datatype {datatype!r} is none")
    if type(shape) is not list or len(shape) > MAX_RANK:
        raise Violation(f"parts[{i}] {name!r}: shape is a list of at most {MAX_RANK} extents")
    n = 1
    for extent in shape:
        if type(extent) is not int or extent < 0:
            raise Violation(f"parts[{i}] {name!r}: shape {shape!r} has an extent that is none")
        n *= extent
    if known.size:
        if n * known.size != size:
            raise Violation(f"parts[{i}] {name!r}: shape {shape} of {datatype} takes {n * known.size} bytes, got {size}")
    else:
        try:
            count = sum(1 for _ in bytes_elements(data))
        except ValueError as error:
            raise Violation(f"parts[{i}] {name!r}: {error}") from None
        if count != n:
            raise Violation(f"parts[{i}] {name!r}: shape {shape} takes {n} elements, got {count}")
    return Raw(datatype, tuple(shape), data, size, at)


def columns(parts: Sequence[Part], items: int) -> Dict[str, Column]:
    """Sorts parts by name; raises Violation where an item has two of one name."""
    out: Dict[str, Column] = {}
    for name, item, body, _ in parts:
        column = out.get(name)
        if item is None:
            if column is not None:
                raise Violation(f"part {name!r} of all items comes more than once")
            if not isinstance(body, Raw):
                raise Violation(f"part {name!r}: a blob belongs to one item")
            out[name] = body
            continue
        if column is None:
            column = out[name] = [None] * items
        if isinstance(column, Raw) or column[item] is not None:
            raise Violation(f"part {name!r} of item {item} comes more than once")
        column[item] = body
    return out


# --- parts to send ---------------------------------------------------------


class Layout:
    """Lays out the bytes of a message's parts; keeps what it is given, and copies nothing.

    entries are the parts as JSON, pieces and size the body.
    """

    # The beginnings of entries of tensors, by what they say.
    _heads: Dict[Tuple[str, str, Tuple[int, ...]], str] = {}

    def __init__(self) -> None:
        self.entries: List[str] = []
        self.pieces: List[Buffer] = []
        self.size = 0
        self._last: Optional[Tuple[str, str, Tuple[int, ...]]] = None

    def tensor(self, name: str, item: Optional[int], raw: Raw) -> None:
        """Adds a tensor of one item, or of all."""
        self._tensor(name, item, raw.datatype, raw.shape, raw.size)
        if raw.size:
            self.pieces.append(raw.data)

    def joined(self, name: str, raws: Sequence[Raw]) -> None:
        """Adds tensors of one datatype and trailing shape as one, joined on axis 0."""
        first = raws[0]
        shape = (sum([raw.shape[0] for raw in raws]), *first.shape[1:])
        self._tensor(name, None, first.datatype, shape, sum([raw.size for raw in raws]))
        self.pieces.extend([raw.data for raw in raws if raw.size])

    def _tensor(self, name: str, item: Optional[int], datatype: str, shape: Tuple[int, ...], size: int) -> None:
        key = (name, datatype, shape)
        head = self._heads.get(key)
        if head is None:
            head = self._head(key)
        if item is None or key != self._last:
            self._align()
        self._last = key
        owner = "" if item is None else f'"item":{item},'
        self.entries.append(f'{head}{owner}"at":{self.size},"size":{size}}}')
        self.size += size

    def blob(self, name: str, item: Optional[int], blob: Blob) -> None:
        """Adds a blob."""
        self._align()
        self._last = None
        entry: Dict[str, Any] = {"name": name, "content_type": blob.content_type}
        if item is not None:
            entry["item"] = item
        size = memoryview(blob.data).nbytes
        entry["at"], entry["size"] = self.size, size
        self.entries.append(encode(entry))
        if size:
            self.pieces.append(blob.data)
            self.size += size

    def add(self, name: str, item: Optional[int], body: Body) -> None:
        """Adds a tensor or a blob."""
        if isinstance(body, Raw):
            self.tensor(name, item, body)
        else:
            self.blob(name, item, body)

    def parsed(self, first: int) -> List[Dict[str, Any]]:
        """Returns the entries from one on, and takes them off the list."""
        taken, self.entries = self.entries[first:], self.entries[:first]
        return [json.loads(entry) for entry in taken]

    def _align(self) -> None:
        gap = -self.size % _ALIGNMENT
        if gap:
            self.pieces.append(_PADDING[:gap])
            self.size += gap

    @classmethod
    def _head(cls, key: Tuple[str, str, Tuple[int, ...]]) -> str:
        name, datatype, shape = key
        if len(cls._heads) >= 1024:  # shapes that vary without end
            cls._heads.clear()
        head = encode({"name": name, "datatype": datatype, "shape": list(shape)})[:-1] + ","
        cls._heads[key] = head
        return head


def message(kind: str, fields: Optional[Header] = None) -> bytes:
    """Returns the header of a message without parts."""
    return encode({"type": kind, **(fields or {})}).encode("ascii")
