"""The datatypes of the Open Inference Protocol, how memoryview names them, and numbers as their bytes."""

from __future__ import annotations

import array
import struct
import sys
from typing import Any, Dict, NamedTuple, Sequence, Tuple


class Datatype(NamedTuple):
    """One element type. BYTES has size 0: its elements are of any length."""

    name: str
    size: int  # bytes of an element
    code: str  # of struct, array and memoryview; H is the bits of FP16 and BF16


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

# The most axes that a tensor may have.
MAX_RANK = 16


def elements(shape: Tuple[int, ...]) -> int:
    """Returns the product of the extents."""
    n = 1
    for extent in shape:
        n *= extent
    return n


def pack(values: Sequence[Any], datatype: str) -> bytes:
    """Returns numbers as the bytes of a tensor, little-endian; raises ValueError for what is no such number."""
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
        raise ValueError(f"got elements that are no {datatype}: {error}") from None


def _truth(value: Any) -> int:
    if value not in (0, 1):
        raise ValueError(f"{value!r} is neither true nor false")
    return int(value)


def _bfloat(value: float) -> bytes:
    """Returns the upper half of a 32-bit float, rounded to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    if value != value:
        return struct.pack("<H", (bits >> 16) | 0x40)
    return struct.pack("<H", ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF)
