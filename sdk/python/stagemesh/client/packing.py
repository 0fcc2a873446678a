"""MessagePack, as far as requests and answers of a gateway have it.

Binary strings are not copied: large ones to send stay pieces of their own, received ones are
views of the answer.
"""

from __future__ import annotations

import struct
from typing import Any, Dict, List, Tuple

# Binary strings up to this many bytes are copied into their surroundings.
_SMALL = 1 << 14
_MAX_DEPTH = 128
_MAX_SIZE = (1 << 32) - 1  # of any string


class Binary(Tuple[Any, ...]):
    """A binary string to send, in pieces: buffers of bytes."""


def pack(document: Any) -> List[Any]:
    """Returns a document as pieces; raises ValueError for what MessagePack cannot express."""
    pieces: List[Any] = [bytearray()]
    _pack(document, pieces)
    return [piece for piece in pieces if len(piece)]


def _pack(value: Any, pieces: List[Any]) -> None:
    out: bytearray = pieces[-1]
    if value is None or value is True or value is False:
        out += b"\xc0" if value is None else b"\xc3" if value else b"\xc2"
    elif isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise ValueError(f"{value} has more than 64 bits")
        out += struct.pack(">BQ" if value >= 0 else ">Bq", 0xCF if value >= 0 else 0xD3, value)
    elif isinstance(value, float):
        out += struct.pack(">Bd", 0xCB, value)
    elif isinstance(value, str):
        data = value.encode()
        out += _head(0xDB, len(data)) + data
    elif isinstance(value, Binary):
        size = sum(map(len, value))
        out += _head(0xC6, size)
        if size > _SMALL:
            pieces += [*value, bytearray()]
        else:
            out += b"".join(value)
    elif isinstance(value, dict):
        out += _head(0xDF, len(value))
        for name, member in value.items():
            _pack(name, pieces)
            _pack(member, pieces)
    elif isinstance(value, (list, tuple)):
        out += _head(0xDD, len(value))
        for element in value:
            _pack(element, pieces)
    else:
        raise ValueError(f"got {type(value).__name__}, expected a boolean, a number or a string")


def _head(kind: int, size: int) -> bytes:
    if size > _MAX_SIZE:
        raise ValueError(f"{size} bytes are more than one part may have")
    return struct.pack(">BI", kind, size)


def unpack(data: memoryview) -> Any:
    """Returns a document; binary strings are views of the data. Raises ValueError."""
    try:
        value, at = _unpack(data, 0, 0)
    except (struct.error, IndexError, TypeError) as error:
        raise ValueError(f"MessagePack ends early, or is none: {error}") from None
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes follow the document")
    return value


_NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
_NUMBERS.update({0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"})
# What begins with a length: binary strings, strings, lists and maps.
_SIZED = {0xC4: ("b", ">B"), 0xC5: ("b", ">H"), 0xC6: ("b", ">I"), 0xD9: ("s", ">B"), 0xDA: ("s", ">H")}
_SIZED.update({0xDB: ("s", ">I"), 0xDC: ("l", ">H"), 0xDD: ("l", ">I"), 0xDE: ("m", ">H"), 0xDF: ("m", ">I")})
_WORDS: Dict[int, Any] = {0xC0: None, 0xC2: False, 0xC3: True}


def _unpack(data: memoryview, at: int, depth: int) -> Tuple[Any, int]:
    first = data[at]
    at += 1
    if first < 0x80 or first >= 0xE0:
        return (first if first < 0x80 else first - 0x100), at
    if first in _WORDS:
        return _WORDS[first], at
    if first in _NUMBERS:
        form = _NUMBERS[first]
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    if first in _SIZED:
        kind, form = _SIZED[first]
        (size,) = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
    elif first < 0xC0:
        kind, size = ("m", first & 15) if first < 0x90 else ("l", first & 15) if first < 0xA0 else ("s", first & 31)
    else:
        raise ValueError(f"byte {first:#x} at {at - 1} begins nothing that an answer has")
    if kind in "bs":
        if size > len(data) - at:
            raise ValueError(f"a string of {size} bytes at {at} ends early")
        view = data[at : at + size]
        return (view if kind == "b" else str(view, "utf-8")), at + size
    if depth == _MAX_DEPTH:
        raise ValueError(f"nested deeper than {_MAX_DEPTH}")
    elements = []
    for _ in range(size * 2 if kind == "m" else size):
        value, at = _unpack(data, at, depth + 1)
        elements.append(value)
    return (dict(zip(elements[::2], elements[1::2])) if kind == "m" else elements), at
