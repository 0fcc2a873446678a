"""The datatypes of the Open Inference Protocol, and how memoryview names them."""

from __future__ import annotations

from typing import Dict, NamedTuple, Tuple


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
