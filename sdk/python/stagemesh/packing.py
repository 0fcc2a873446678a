"""MessagePack, through the package msgpack where that is installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Union

_TYPES = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")


def is_packed(content_type: str) -> bool:
    """Reports whether a content type is MessagePack's."""
    return content_type.partition(";")[0].strip().lower() in _TYPES


def require(where: str, content_type: str) -> None:
    """Raises ValueError where MessagePack cannot be read or written."""
    try:
        import_module("msgpack")
    except ImportError:
        raise ValueError(
            f"{where}: {content_type} needs the package msgpack, which is not installed here. Install it, or leave the"
            " type out: what callers send as MessagePack comes as JSON to a worker that takes that"
        ) from None


def unpack(data: bytes) -> Any:
    """Returns a document; raises ValueError where the bytes are none."""
    msgpack = import_module("msgpack")
    try:
        return msgpack.unpackb(data, raw=False)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except msgpack.UnpackException as error:  # some of these are no ValueError, or say nothing
        raise ValueError(str(error) or "it is malformed") from None


def array_of(documents: int, packed: Union[bytes, bytearray]) -> bytes:
    """Returns documents that follow each other as one array of them."""
    if documents < 1 << 4:
        return bytes([0x90 | documents]) + packed
    if documents < 1 << 16:
        return b"\xdc" + documents.to_bytes(2, "big") + packed
    return b"\xdd" + documents.to_bytes(4, "big") + packed


def pack(value: Any) -> bytes:
    """Returns a document as bytes; raises TypeError, ValueError or OverflowError where it is none."""
    packed = import_module("msgpack").packb(value, use_bin_type=True)
    assert isinstance(packed, bytes)
    return packed
