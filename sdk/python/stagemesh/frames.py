"""Frames of the worker protocol on a stream socket: bounded, and read without copies.

A frame is 16 bytes (``SMW1``, length of the header, length of the body), a JSON
object and a body. ``Connection.read`` waits for the next frame, ``poll`` returns one
that has arrived in full; both continue a frame of which only a part has arrived.
Memory is allocated after both lengths are checked, or for a frame as long as the
last one; large bodies go to memory-mapped pages, which the system provides as the
bytes arrive.

One thread reads; any thread may send. Errors: Violation (the peer breaks the
protocol), Ended (the peer has closed the connection).
"""

from __future__ import annotations

import json
import math
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
MAX_NUMBER = (1 << 53) - 1  # of any number
MAX_COUNT = (1 << 31) - 1  # of counts and indices
MAX_ITEMS = 1 << 16  # of one batch
MAX_SLOTS = 1 << 10  # of one worker

# The longest time to wait for buffer space, in seconds.
_LONGEST_S = 24 * 3600.0
# Frames up to this many bytes are expected to be as long as the one before.
_EXPECTED = 1 << 17
# Bodies beyond this many bytes get memory-mapped pages of their own.
_PAGED = 1 << 20
_IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024) if hasattr(os, "sysconf") else 16

Header = Dict[str, Any]
Frame = Tuple[Header, memoryview]
# Anything that the socket accepts as it is: bytes, a memoryview, a C-contiguous array.
Buffer = Any


class Violation(Exception):
    """The peer breaks the protocol; nothing more can be read from it."""


class Ended(Exception):
    """The connection is closed."""


# --- headers -----------------------------------------------------------------


def _refuse_constant(constant: str) -> None:
    """Raises ValueError for NaN and Infinity, which are not JSON; a parse_constant of json."""
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    """Raises ValueError for a number that no double holds; a parse_float of json."""
    value = float(text)
    if value in (math.inf, -math.inf):
        raise ValueError(f"the number {text[:40]} is beyond FP64")
    return value


_decode = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite).decode
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
encode_unicode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode


def decode(text: str) -> Any:
    """Returns a document; raises ValueError, also for half a surrogate pair, which no text in UTF-8 has."""
    value = _decode(text)
    if "\\ud" in text or "\\uD" in text:
        encode_unicode(value).encode()
    return value


def encode(value: Any) -> str:
    """Returns a document in ASCII, with a question mark for half a surrogate pair."""
    text = _encode(value)
    if "\\ud" in text:
        text = _encode(_decode(encode_unicode(value).encode("utf-8", "replace").decode()))
    return text


def message(kind: str, /, **fields: Any) -> bytes:
    """Returns the header of a message without parts."""
    return encode({"type": kind, **fields}).encode("ascii")


def _parse(text: str) -> Any:
    try:
        return decode(text)
    except (ValueError, RecursionError) as error:
        raise Violation(f"header: {error}") from None


def _parse_header(text: str) -> Header:
    header = _parse(text)
    if type(header) is not dict:
        raise Violation(f"header: expected a JSON object, got {type(header).__name__}")
    if type(header.get("type")) is not str:
        raise Violation("header: it has no type")
    return header


class Parts(List[Any]):
    """The parts of a predict, the same object for every header that ends with the same text.

    plan and blobs are where runs.py and parts.py keep what they derived from them.
    """

    plan: Any = None
    blobs: Any = ()


# A header whose items are not parsed yet has their text under this key, which JSON cannot have.
DEFERRED: Any = 0


def load_items(header: Header) -> Any:
    """Returns the items of a predict, and parses them if that is deferred; raises Violation."""
    if DEFERRED in header:
        header["items"] = _parse(header.pop(DEFERRED))
    return header.get("items")


_PARTS = ',"parts":['
_predict_start = re.compile(
    r'\{"type":"predict","batch":(0|[1-9][0-9]{0,14}),(?:"trace":"([0-9a-f-]*)",)?'
    r'(?:"model":\{"id":"([^"\\\x00-\x1f]*)"\},)?"items":\['
).match


class Headers:
    """Decodes the headers of one connection.

    The predicts of a connection differ in the batch's number and in their items. So the
    text from ``,"parts":[`` on is kept, and where it occurs again the items before it are
    not parsed until somebody asks for them. In valid JSON those ten bytes always start a
    key, since a quote within a string is escaped; and if the text between ``"items":`` and
    them is a single list, the key belongs to the header itself.
    """

    _MOST = 256  # texts that are kept
    _LONGEST = 4096  # characters

    def __init__(self) -> None:
        self._tails: Dict[str, Parts] = {}

    def decode(self, data: memoryview) -> Header:
        """Returns the JSON object, possibly with DEFERRED items. Raises Violation."""
        try:
            text = str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise Violation(f"header: {error}") from None
        match = _predict_start(text)
        if match is None:
            return _parse_header(text)
        at = text.rfind(_PARTS)
        if text[at - 1] != "]":  # another key is between items and parts
            return _parse_header(text)
        parts = self._tails.get(text[at:])
        items = text[match.end() - 1 : at]
        header: Header = {"type": "predict", "batch": int(match[1]), DEFERRED: items, "parts": parts}
        if match[2] is not None:
            header["trace"] = match[2]
        if match[3] is not None:
            header["model"] = {"id": match[3]}
        return header if parts is not None else self._decode_first(text, header, at)

    def _decode_first(self, text: str, header: Header, at: int) -> Header:
        """Returns a header with a new tail; keeps the tail if it is nothing but the parts, and not too long."""
        try:
            items, tail = decode(header.pop(DEFERRED)), decode("{" + text[at + 1 :])
        except (ValueError, RecursionError):
            return _parse_header(text)
        if len(tail) > 1 or type(tail["parts"]) is not list:
            return _parse_header(text)
        parts = Parts(tail["parts"])
        if len(text) - at <= self._LONGEST:
            if len(self._tails) >= self._MOST:
                self._tails.clear()
            self._tails[text[at:]] = parts
        header.update(items=items, parts=parts)
        return header


def check_prefix(prefix: Union[bytes, bytearray], max_body: int) -> Tuple[int, int]:
    """Returns the lengths of header and body in bytes; raises Violation if they are out of range."""
    magic, header, body = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise Violation(f"a frame begins with {magic.hex(' ')}, not {MAGIC.hex(' ')}")
    if not 2 <= header <= MAX_HEADER:
        raise Violation(f"a header of {header} bytes; 2 to {MAX_HEADER} are allowed")
    if body > max_body:
        raise Violation(f"a body of {body} bytes; at most {max_body} are allowed")
    return header, body


def _buffers(header: bytes, pieces: Sequence[Buffer], size: int) -> List[Buffer]:
    """Returns a frame as the buffers to send, prefix and header as one."""
    if len(header) > MAX_HEADER:
        raise ValueError(f"a header of {len(header)} bytes; at most {MAX_HEADER} are allowed")
    return [_pack(MAGIC, len(header), size) + header, *pieces]


# --- the connection ------------------------------------------------------------

_NO_SIGPIPE: int = getattr(socket, "MSG_NOSIGNAL", 0)  # whatever the worker does about SIGPIPE
_NO_SPACE = "the host does not read, and the buffer is full"


class Connection:
    """One end of a connection between worker and host.

    max_body bounds received bodies, in bytes; it is 0 until the welcome.
    """

    def __init__(self, sock: socket.socket, max_body: int = 0) -> None:
        self.sock = sock
        self.max_body = max_body
        self._recv_into = sock.recv_into
        self._sendmsg = sock.sendmsg
        self._lock = threading.Lock()  # held while a frame is sent
        self._prefix = bytearray(PREFIX.size)
        self._prefix_view = memoryview(self._prefix)
        self._have = 0  # bytes received of the payload, or of the prefix while there is no payload
        self._payload: Optional[memoryview] = None
        self._body_at = 0  # where the body begins in the payload
        # Of the last frame: length of its header, and of all of it if the next may be alike.
        self._head = self._size = 0
        self._ahead = memoryview(b"")  # received beyond a frame that was shorter than the last one
        self._decode = Headers().decode

    # --- reading ---------------------------------------------------------

    @property
    def has_part(self) -> bool:
        """Whether a part of the next frame has been received."""
        return bool(self._have or self._ahead or self._payload is not None)

    def read(self) -> Frame:
        """Waits for the next frame.

        Raises BlockingIOError if the socket has become non-blocking, which is how a
        signal ends the wait, and no complete frame is there.
        """
        head, size = self._head, self._size
        if size == 0 or self._have or self._ahead or self._payload is not None:
            return self._advance(0)
        # The usual case: a frame as long as the last one, received by one call.
        gap = -head & 15
        buffer = memoryview(bytearray(gap + size))[gap:]
        try:
            n = self._recv_into(buffer)
        except (BlockingIOError, socket.timeout):
            raise
        except OSError as error:
            raise Ended(str(error)) from None
        if n == 0:
            raise Ended("between two frames")
        if n >= 16:
            magic, now, body = _unpack_from(buffer)
            at = 16 + now
            if magic == MAGIC and now == head and at + body == size and body <= self.max_body:
                if n == size:
                    return self._decode(buffer[16:at]), buffer[at:]
                # The rest is on its way, and fits into the same buffer.
                self._payload, self._body_at, self._have = buffer[16:], head, n - 16
                return self._advance(0)
        self._ahead = buffer[:n]
        return self._advance(0)

    def poll(self) -> Optional[Frame]:
        """Returns the next frame if all of it has arrived, else None."""
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
                self._payload = payload = self._allocate(head, body)
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

    def _receive(self, into: memoryview, flags: int, within_frame: bool) -> int:
        """Receives some bytes, first those that were read ahead; returns how many."""
        if self._ahead:
            n = min(len(into), len(self._ahead))
            into[:n] = self._ahead[:n]
            self._ahead = self._ahead[n:]
            return n
        n = self._recv_into(into, 0, flags)
        if n == 0:
            raise Ended("in the middle of a frame" if within_frame else "between two frames")
        return n

    def _allocate(self, head: int, body: int) -> memoryview:
        """Returns a buffer for both; the body begins at an address that suits every datatype."""
        self._body_at = head
        gap = -head % 64
        if body > _PAGED:
            return memoryview(mmap.mmap(-1, gap + head + body, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[gap:]
        return memoryview(bytearray(gap + head + body))[gap:]

    # --- writing ---------------------------------------------------------

    def send(self, header: bytes, pieces: Sequence[Buffer] = (), size: int = 0) -> None:
        """Sends a frame whose body is the pieces, size bytes in all.

        After the socket's timeout it closes the connection, and raises socket.timeout.
        """
        buffers = _buffers(header, pieces, size)
        with self._lock:
            try:
                sent = self._send_some(buffers, 0)
                if sent != 16 + len(header) + size:
                    self._send_rest(buffers, sent)
            except socket.timeout:
                self.hang_up()
                raise

    def send_now(self, header: bytes, pieces: Sequence[Buffer] = (), size: int = 0) -> Optional[Callable[[], None]]:
        """Sends a frame, as send does, as far as that is possible without waiting.

        Returns None if all of it is sent. Otherwise it returns a function that sends the
        rest and waits for buffer space. Call it exactly once, from any thread: until then
        nobody else can send.
        """
        if len(header) > MAX_HEADER or not self._lock.acquire(False):
            return lambda: self.send(header, pieces, size)
        buffers = _buffers(header, pieces, size)
        try:
            sent = self._send_some(buffers, socket.MSG_DONTWAIT)
        except Ended:
            self._lock.release()
            raise
        if sent == 16 + len(header) + size:
            self._lock.release()
            return None

        def send_rest() -> None:
            try:
                self._send_rest(buffers, sent)
            finally:
                self._lock.release()

        return send_rest

    def send_within(self, timeout_s: float, header: bytes) -> None:
        """Sends a frame without a body; raises Ended if there is no buffer space within that time.

        If a part of the frame is sent by then, the connection is closed too.
        """
        timeout_s = min(max(timeout_s, 0.0), _LONGEST_S)
        end = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise Ended(_NO_SPACE)
        try:
            self._send_rest(_buffers(header, (), 0), 0, end)
        finally:
            self._lock.release()

    def _send_some(self, buffers: List[Buffer], flags: int) -> int:
        """Sends the buffers as far as one call does; returns how many bytes that are."""
        try:
            return self._sendmsg(buffers, (), flags | _NO_SIGPIPE) if len(buffers) <= _IOV_MAX else 0
        except BlockingIOError:
            return 0
        except socket.timeout:
            raise
        except OSError as error:
            raise Ended(str(error)) from None

    def _send_rest(self, pieces: List[Buffer], sent: int, end: Optional[float] = None) -> None:
        """Sends the pieces without their first bytes, which are sent already; end is a limit of time.monotonic()."""
        rest: List[memoryview] = []
        for piece in pieces:
            view = as_bytes(piece)
            if sent < len(view):
                rest.append(view[sent:])
            sent = max(0, sent - len(view))
        space = select.poll()
        space.register(self.sock, select.POLLOUT)
        at = 0
        while at < len(rest):
            n = self._send_some(rest[at : at + _IOV_MAX], socket.MSG_DONTWAIT)
            if n == 0 and not space.poll(None if end is None else max(0.0, end - time.monotonic()) * 1000):
                self.hang_up()
                raise Ended(_NO_SPACE)
            while at < len(rest) and n >= len(rest[at]):
                n -= len(rest[at])
                at += 1
            if n:
                rest[at] = rest[at][n:]

    def hang_up(self) -> None:
        """Ends the connection for readers and writers in all threads."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended

    def close(self) -> None:
        """Closes the socket."""
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
