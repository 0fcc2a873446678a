"""Frames of the worker protocol on a stream socket: exact, bounded, without copies.

A frame is 16 bytes (``SMW1``, length of the header, length of the body), a JSON
object and a body. ``Connection.read`` returns the next one and makes room for it
only after both lengths were checked, or for as much as the last one took; large
bodies go to pages that the system hands out as the bytes come. ``poll`` does the
same without waiting, and goes on with a frame of which only a part is there.

One thread reads; any may send. Errors: Violation (the peer does not keep to the
protocol), Ended (it has gone).
"""

from __future__ import annotations

import json
import mmap
import os
import re
import select
import socket
import struct
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

MAGIC = b"SMW1"
PREFIX = struct.Struct("<4sIQ")
_pack, _unpack_from = PREFIX.pack, PREFIX.unpack_from
MAX_HEADER = 1 << 20
# The largest numbers: where nothing else is said, of what counts or numbers things,
# of the items of a batch, and of the slots of a worker.
MAX_NUMBER = (1 << 53) - 1
MAX_COUNT = (1 << 31) - 1
MAX_ITEMS = 1 << 16
MAX_SLOTS = 1 << 10

# The longest that a message is waited with for room, in seconds.
_LONGEST_S = 24 * 3600.0

# Frames up to this are expected to be as long as the one before.
_EXPECTED = 1 << 17
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
_scan: Callable[[str, int], Tuple[Any, int]] = _decoder.scan_once  # type: ignore[attr-defined]  # json.decoder calls it
encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def decode_header(text: Union[bytes, bytearray, memoryview]) -> Header:
    """Returns the JSON object; raises Violation where it is none."""
    try:
        return _checked(_parse(str(text, "utf-8")))
    except UnicodeDecodeError as error:
        raise Violation(f"header: {error}") from None


def _parse(text: str) -> Any:
    try:
        try:
            value, end = _scan(text, 0)
            if end == len(text):
                return value
        except StopIteration:
            pass
        return _decoder.decode(text)  # white space around it is JSON too
    except (ValueError, RecursionError) as error:
        raise Violation(f"header: {error}") from None


def _checked(header: Any) -> Header:
    if type(header) is not dict:
        raise Violation(f"header: a JSON object is wanted, got {type(header).__name__}")
    if type(header.get("type")) is not str:
        raise Violation("header: it has no type")
    return header


class Parts(List[Any]):
    """The parts of a header that came before: the same object as then; plan is what they mean."""

    plan: Any = None


# The key under which a header has the text of items that were not parsed yet; JSON
# has no such keys.
DEFERRED: Any = 0


def load_items(header: Header) -> Any:
    """Returns the items of a predict, parsed; raises Violation."""
    if DEFERRED in header:
        header["items"] = _parse(header.pop(DEFERRED))
    return header.get("items")


_PARTS = ',"parts":['
_usual = re.compile(r'\{"type":"predict","batch":(0|[1-9][0-9]{0,14}),"items":\[').match


class Headers:
    """Decodes the headers of one connection.

    The predicts of a connection differ in the batch's number and in their items, so
    what begins with ``,"parts":[`` is kept, and where it comes again the items before
    it are not parsed until somebody asks for them. In valid JSON those ten bytes are
    always a key, since a quote within a string has a backslash before it; and if what
    stands between ``"items":`` and there is one list, the key is the header's own.
    """

    _MOST = 256  # that are kept
    _LONGEST = 4096  # characters

    def __init__(self) -> None:
        self._tails: Dict[str, Parts] = {}

    def decode(self, data: memoryview) -> Header:
        """Returns the JSON object, perhaps with DEFERRED items. Raises Violation."""
        try:
            text = str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise Violation(f"header: {error}") from None
        match = _usual(text)
        if match is None:
            return _checked(_parse(text))
        at = text.rfind(_PARTS)
        parts = self._tails.get(text[at:])
        if parts is None:
            return self._first(text, at)
        return {"type": "predict", "batch": int(match[1]), DEFERRED: text[match.end() - 1 : at], "parts": parts}

    def _first(self, text: str, at: int) -> Header:
        """Returns a header whose tail is new, and keeps the tail where it is nothing but the parts."""
        header = _checked(_parse(text))
        if at > 0 and len(text) - at <= self._LONGEST and header.keys() == {"type", "batch", "items", "parts"}:
            tail = _parse("{" + text[at + 1 :])
            if tail.keys() == {"parts"} and tail["parts"] == header["parts"]:
                if len(self._tails) >= self._MOST:
                    self._tails.clear()
                self._tails[text[at:]] = header["parts"] = Parts(tail["parts"])
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
        # The last frame: its header's length, and its own where the next may be alike.
        self._head = self._size = 0
        self._ahead = memoryview(b"")  # read beyond a frame that was shorter than the last one
        self._decode = Headers().decode

    # --- reading ---------------------------------------------------------

    def read(self) -> Frame:
        """Waits for the next frame.

        Raises BlockingIOError where the socket has become non-blocking, which is
        how a signal ends the wait, and nothing more is there.
        """
        head, size = self._head, self._size
        if size == 0 or self._have or self._ahead or self._payload is not None:
            return self._advance(0)
        # The usual: a frame as long as the last one, all of it at once.
        gap = -head & 15
        room = memoryview(bytearray(gap + size))[gap:]
        try:
            n = self._recv_into(room)
        except (BlockingIOError, socket.timeout):
            raise
        except OSError as error:
            raise Ended(str(error)) from None
        if n == 0:
            raise Ended("between two frames")
        if n >= 16:
            magic, now, body = _unpack_from(room)
            at = 16 + now
            if magic == MAGIC and now == head and at + body == size and body <= self.max_body:
                if n == size:
                    return self._decode(room[16:at]), room[at:]
                # It is on its way, and room for it is there.
                self._payload, self._body_at, self._have = room[16:], head, n - 16
                return self._advance(0)
        self._ahead = room[:n]
        return self._advance(0)

    def poll(self) -> Optional[Frame]:
        """Returns the next frame where all of it is there, else None."""
        try:
            return self._advance(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None

    def _advance(self, flags: int) -> Frame:
        payload = self._payload
        have = self._have
        try:
            if payload is None:
                while have < 16:
                    have += self._receive(self._prefix_view[have:], flags, have > 0)
                    self._have = have
                head, body = check_prefix(self._prefix, self.max_body)
                self._payload = payload = self._room(head, body)
                self._have = have = 0
            size = len(payload)
            while have < size:
                have += self._receive(payload[have:], flags, True)
                self._have = have
        except (BlockingIOError, socket.timeout):
            raise
        except OSError as error:
            raise Ended(str(error)) from None
        self._payload, self._have = None, 0
        self._head = at = self._body_at
        self._size = 16 + size if size <= _EXPECTED else 0
        return self._decode(payload[:at]), payload[at:]

    def _receive(self, into: memoryview, flags: int, within: bool) -> int:
        """Receives some bytes, first those that were read ahead."""
        if self._ahead:
            n = min(len(into), len(self._ahead))
            into[:n] = self._ahead[:n]
            self._ahead = self._ahead[n:]
            return n
        n = self._recv_into(into, 0, flags)
        if n == 0:
            raise Ended("in the middle of a frame" if within else "between two frames")
        return n

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
        if len(header) > MAX_HEADER:
            raise ValueError(f"a header of {len(header)} bytes; at most {MAX_HEADER} are allowed")
        buffers = [_pack(MAGIC, len(header), size) + header, *pieces]
        with self._lock:
            sent = 0
            try:
                if len(buffers) <= _IOV_MAX:
                    sent = self._sendmsg(buffers)
            except BlockingIOError:
                pass
            except OSError as error:
                raise Ended(str(error)) from None
            if sent != 16 + len(header) + size:
                self._send_rest(buffers, sent)

    def send_now(self, header: bytes, pieces: Sequence[Buffer] = (), size: int = 0) -> Optional[Callable[[], None]]:
        """Sends a frame, as send does, as far as that goes without waiting.

        Returns None where all of it is sent. Else it returns what sends the rest, and
        waits for room: that has to be called once, by any thread, since until then
        nobody else can send.
        """
        if len(header) > MAX_HEADER or not self._lock.acquire(False):
            return lambda: self.send(header, pieces, size)
        buffers = [_pack(MAGIC, len(header), size) + header, *pieces]
        sent = 0
        try:
            if len(buffers) <= _IOV_MAX:
                sent = self._sendmsg(buffers, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        except OSError as error:
            self._lock.release()
            raise Ended(str(error)) from None
        if sent == 16 + len(header) + size:
            self._lock.release()
            return None

        def rest() -> None:
            try:
                self._send_rest(buffers, sent)
            finally:
                self._lock.release()

        return rest

    def send_within(self, timeout_s: float, header: bytes) -> None:
        """Sends a frame without a body; raises Ended where there is no room for it within that time.

        Where a part of it has gone by then the connection ends too.
        """
        timeout_s = min(max(timeout_s, 0.0), _LONGEST_S)
        end = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise Ended("the host makes no room for a message")
        try:
            self._send_by(end, memoryview(_pack(MAGIC, len(header), 0) + header))
        finally:
            self._lock.release()

    def _send_by(self, end: float, rest: memoryview) -> None:
        while rest:
            try:
                rest = rest[self._sendmsg([rest], (), socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                if not self._wait_for_room(max(0.0, end - time.monotonic())):
                    self.hang_up()
                    raise Ended("the host makes no room for a message") from None
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

    def _wait_for_room(self, timeout_s: Optional[float] = None) -> bool:
        poll = select.poll()
        poll.register(self.sock, select.POLLOUT)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def hang_up(self) -> None:
        """Ends the connection for whoever reads or writes, in any thread."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended

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
