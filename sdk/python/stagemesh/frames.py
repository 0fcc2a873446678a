"""Frames of the worker protocol on a stream socket: exact, bounded, without copies.

A frame is 16 bytes (``SMW1``, length of the header, length of the body), a JSON
object and a body. ``Connection.read`` returns the next one and makes room for it
only after both lengths were checked; large bodies go to pages that the system
hands out as the bytes come. ``poll`` does the same without waiting, and goes on
with a frame of which only a part is there.

One thread reads; any may send. Errors: Violation (the peer does not keep to the
protocol), Ended (it has gone).
"""

from __future__ import annotations

import json
import mmap
import os
import select
import socket
import struct
import threading
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

MAGIC = b"SMW1"
PREFIX = struct.Struct("<4sIQ")
MAX_HEADER = 1 << 20

# Bodies beyond this come into pages of their own, made as they are touched.
_PAGED = 1 << 20
_IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024) if hasattr(os, "sysconf") else 16

Header = Dict[str, Any]
Frame = Tuple[Header, memoryview]
# Something that the socket takes as it is: bytes, a memoryview, a C-contiguous array.
Buffer = Any


class Violation(Exception):
    """The peer does not keep to the protocol; nothing more can be read of it."""


class Ended(Exception):
    """The connection is over."""


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse)
_scan = _decoder.scan_once
encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def decode_header(text: Union[bytes, bytearray, memoryview]) -> Header:
    """Returns the JSON object; raises Violation where it is none."""
    try:
        decoded = str(text, "utf-8")
        header, end = _scan(decoded, 0)
        if end != len(decoded):
            header = _decoder.decode(decoded)
    except StopIteration:
        raise Violation("header: it is not JSON") from None
    except (ValueError, RecursionError) as error:
        raise Violation(f"header: {error}") from None
    if type(header) is not dict:
        raise Violation(f"header: a JSON object is wanted, got {type(header).__name__}")
    if type(header.get("type")) is not str:
        raise Violation("header: it has no type")
    return header


def check_prefix(prefix: Union[bytes, bytearray], max_body: int) -> Tuple[int, int]:
    """Returns the lengths of header and body; raises Violation where they may not be."""
    magic, header, body = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise Violation(f"a frame begins with {magic.hex(' ')}, not {MAGIC.hex(' ')}")
    if not 2 <= header <= MAX_HEADER:
        raise Violation(f"a header of {header} bytes; 2 to {MAX_HEADER} are allowed")
    if body > max_body:
        raise Violation(f"a body of {body} bytes; at most {max_body} are allowed")
    return header, body


def pack(header: bytes, body: int) -> bytes:
    """Returns a frame up to its body of so many bytes."""
    if len(header) > MAX_HEADER:
        raise ValueError(f"a header of {len(header)} bytes; at most {MAX_HEADER} are allowed")
    return PREFIX.pack(MAGIC, len(header), body) + header


class Connection:
    """One end of a connection of worker and host.

    max_body bounds the bodies that come, in bytes; it is 0 until the welcome.
    """

    def __init__(self, sock: socket.socket, max_body: int = 0) -> None:
        self.sock = sock
        self.max_body = max_body
        self._recv_into = sock.recv_into
        self._sendmsg = sock.sendmsg
        self._lock = threading.Lock()
        self._prefix = bytearray(PREFIX.size)
        self._prefix_view = memoryview(self._prefix)
        self._have = 0  # bytes of the prefix, or of the payload where there is one
        self._payload: Optional[memoryview] = None
        self._body_at = 0  # in the payload: the header's length

    # --- reading ---------------------------------------------------------

    def read(self) -> Frame:
        """Waits for the next frame.

        Raises BlockingIOError where the socket has become non-blocking, which is
        how a signal ends the wait, and nothing more is there.
        """
        return self._advance(0)

    def poll(self) -> Optional[Frame]:
        """Returns the next frame where all of it is there, else None."""
        try:
            return self._advance(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None

    def _advance(self, flags: int) -> Frame:
        receive = self._recv_into
        payload = self._payload
        have = self._have
        try:
            if payload is None:
                while have < 16:
                    n = receive(self._prefix_view[have:] if have else self._prefix_view, 0, flags)
                    if n == 0:
                        raise Ended("in the middle of a frame" if have else "between two frames")
                    self._have = have = have + n
                head, body = check_prefix(self._prefix, self.max_body)
                self._payload = payload = self._room(head, body)
                self._have = have = 0
            size = len(payload)
            while have < size:
                n = receive(payload[have:] if have else payload, 0, flags)
                if n == 0:
                    raise Ended("in the middle of a frame")
                self._have = have = have + n
        except (BlockingIOError, socket.timeout):
            raise
        except OSError as error:
            raise Ended(str(error)) from None
        self._payload, self._have = None, 0
        at = self._body_at
        return decode_header(payload[:at]), payload[at:]

    def _room(self, head: int, body: int) -> memoryview:
        """Returns room for both; the body begins at an address that suits every datatype."""
        self._body_at = head
        gap = -head % 64
        if body > _PAGED:
            return memoryview(mmap.mmap(-1, gap + head + body, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[gap:]
        return memoryview(bytearray(gap + head + body))[gap:]

    # --- writing ---------------------------------------------------------

    def send(self, header: bytes, pieces: Sequence[Buffer] = (), size: int = 0) -> None:
        """Sends a frame whose body is the pieces, which take size bytes together."""
        head = pack(header, size)
        with self._lock:
            try:
                if len(pieces) < _IOV_MAX:
                    sent = self._sendmsg([head, *pieces])
                    if sent == len(head) + size:
                        return
                else:
                    sent = 0
                self._send_rest([head, *pieces], sent)
            except BlockingIOError:
                self._send_rest([head, *pieces], 0)
            except OSError as error:
                raise Ended(str(error)) from None

    def _send_rest(self, pieces: List[Buffer], sent: int) -> None:
        """Sends what is left of the pieces after so many bytes."""
        rest: List[memoryview] = []
        for piece in pieces:
            view = as_bytes(piece)
            if sent >= len(view):
                sent -= len(view)
            else:
                rest.append(view[sent:] if sent else view)
                sent = 0
        at = 0
        while at < len(rest):
            try:
                n = self._sendmsg(rest[at : at + _IOV_MAX])
            except BlockingIOError:
                self._wait_for_room()
                continue
            except OSError as error:
                raise Ended(str(error)) from None
            while at < len(rest) and n >= len(rest[at]):
                n -= len(rest[at])
                at += 1
            if n:
                rest[at] = rest[at][n:]

    def _wait_for_room(self) -> None:
        poll = select.poll()
        poll.register(self.sock, select.POLLOUT)
        poll.poll()

    def close(self) -> None:
        """Ends the connection."""
        self.sock.close()


def as_bytes(piece: Buffer) -> memoryview:
    """Returns a C-contiguous buffer as bytes, without a copy where its format allows."""
    view = memoryview(piece)
    if view.ndim == 1 and view.format == "B":
        return view
    try:
        return view.cast("B")
    except TypeError:  # a format that memoryview does not know, or an extent of 0
        return memoryview(view.tobytes())
