"""Parts: tensors and blobs, and their places in the body of a frame."""

from __future__ import annotations

import json
import struct
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

from .datatypes import DATATYPES, MAX_RANK, elements
from .frames import MAX_NUMBER, Buffer, Header, Violation, encode

_LENGTH = struct.Struct("<I")
_ALIGNED = 64 - 1  # parts begin at multiples of 64 bytes
_PADDING = bytes(64)


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
        data = data.cast("B") if raw.size else memoryview(bytearray())
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
    data = bytearray().join([raw.data for raw in raws])  # arrays over it may be changed in place
    return Raw(first.datatype, (sum(raw.shape[0] for raw in raws), *first.shape[1:]), memoryview(data), len(data))


# --- parts that came -------------------------------------------------------


def read_parts(entries: Any, body: memoryview, items: int) -> Dict[str, Column]:
    """Returns the parts of a message by name; raises Violation where they cannot be.

    items is how many items the message has: the bound of a part's item.
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
            _put(out, name, entry["item"], items, content)
        elif name in out:
            raise Violation(f"part {name!r} of all items comes more than once")
        elif type(content) is Raw:
            out[name] = content
        else:
            raise Violation(f"part {name!r}: a blob belongs to one item")
    _check_places(places)
    return out


def _check_places(places: List[Tuple[int, int]]) -> None:
    """Raises Violation where two places, as start and stop in bytes, overlap."""
    places.sort()
    for (_, stop), (start, _) in zip(places, places[1:]):
        if start < stop:
            raise Violation(f"parts: two places overlap at byte {start} of the body")


def _put(out: Dict[str, Column], name: str, item: Any, items: int, content: Body) -> None:
    """Adds the part of one item."""
    if type(item) is not int or not 0 <= item < items:
        raise Violation(f"part {name!r}: item {item!r} is none of the {items}")
    column = out.get(name)
    if column is None:
        column = out[name] = [None] * items
    if isinstance(column, Raw) or column[item] is not None:
        raise Violation(f"part {name!r} of item {item} comes more than once")
    column[item] = content


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
        _check_bytes(name, shape, n, data)
    elif n * width != size:
        raise Violation(f"part {name!r}: shape {shape} of {datatype} takes {n * width} bytes, got {size}")
    return Raw(datatype, tuple(shape), data, size, at)


_WIDTHS = {name: datatype.size for name, datatype in DATATYPES.items()}


def _check_bytes(name: str, shape: Any, n: int, data: memoryview) -> None:
    try:
        count = sum(1 for _ in bytes_elements(data))
    except ValueError as error:
        raise Violation(f"part {name!r}: {error}") from None
    if count != n:
        raise Violation(f"part {name!r}: shape {shape} takes {n} elements, got {count}")


# --- parts to send ---------------------------------------------------------


class Layout:
    """Lays out the bytes of a message's parts; keeps what it is given, and copies nothing.

    entries are the parts as JSON, pieces and size the body.
    """

    # The beginnings of entries, by what they say: name, datatype and shape of a tensor,
    # name and content type of a blob.
    _heads: Dict[Tuple[str, str, Optional[Tuple[int, ...]]], str] = {}

    def __init__(self) -> None:
        self.entries: List[str] = []
        self.pieces: List[Buffer] = []
        self.size = 0
        self._last: Optional[Tuple[str, str, Tuple[int, ...]]] = None

    def tensor(self, name: str, item: Optional[int], raw: Raw) -> None:
        """Adds a tensor of one item, or of all."""
        datatype, shape, data, size, _ = raw
        key = (name, datatype, shape)
        head = self._heads.get(key) or self._head(key)
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
        return self._heads.get(key) or self._head(key)

    def joined(self, name: str, raws: Sequence[Raw]) -> None:
        """Adds tensors of one datatype and trailing shape as one, joined on axis 0."""
        first = raws[0]
        shape = (sum([raw.shape[0] for raw in raws]), *first.shape[1:])
        size = sum([raw.size for raw in raws])
        self.tensor(name, None, Raw(first.datatype, shape, b"", size))
        if size:
            self.pieces[-1:] = [raw.data for raw in raws if raw.size]

    def blob(self, name: str, item: Optional[int], blob: Blob) -> None:
        """Adds a blob."""
        self._align()
        self._last = None
        key = (name, blob.content_type, None)
        head = self._heads.get(key) or self._head(key)
        owner = "" if item is None else f'"item":{item},'
        size = memoryview(blob.data).nbytes
        self.entries.append(f'{head}{owner}"at":{self.size},"size":{size}}}')
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

    def _align(self) -> int:
        """Fills up to where the next part begins, and returns that."""
        gap = -self.size & _ALIGNED
        if gap:
            self.pieces.append(_PADDING[:gap])
            self.size += gap
        return self.size

    @classmethod
    def _head(cls, key: Tuple[str, str, Optional[Tuple[int, ...]]]) -> str:
        name, kind, shape = key
        if len(cls._heads) >= 1024:  # shapes that vary without end
            cls._heads.clear()
        entry: Dict[str, Any] = {"name": name, "content_type": kind}
        if shape is not None:
            entry = {"name": name, "datatype": kind, "shape": list(shape)}
        head = encode(entry)[:-1] + ","
        cls._heads[key] = head
        return head


def message(kind: str, fields: Optional[Header] = None) -> bytes:
    """Returns the header of a message without parts."""
    return encode({"type": kind, **(fields or {})}).encode("ascii")
