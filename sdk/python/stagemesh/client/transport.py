"""Transport: HTTP/1.1 by the standard library, with a bounded pool of connections.

Safe for threads. A connection carries one request at a time, and is closed rather than used again
after anything but a whole answer; a gateway then cancels a request that is neither durable nor has
a key.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import select
import socket
import ssl
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Deque, Iterator, List, Mapping, NamedTuple, Optional, Set, Union
from urllib.parse import urlsplit
from weakref import WeakSet

from .calls import Plan
from .faults import Cancelled, DeadlineExceeded, Disconnected, disconnected, invalid_answer

# The longest wait for a connection, and for the next bytes of a stream: a gateway sends some every 15 s.
CONNECT_TIMEOUT, IDLE_TIMEOUT = 10.0, 60.0
# The client waits this much longer than the deadline, for the gateway's own word, in seconds.
_GRACE = 0.5
_PIECE = 1 << 16
_LOOK = 0.1  # how often a call that waits for a connection looks whether it was cancelled, in seconds
_FAULT_BYTES = 1 << 20  # the longest body of a failure that is read


class Endpoint:
    """Where a gateway is, and how it is reached."""

    def __init__(
        self, url: str, token: str, ca: Union[str, ssl.SSLContext, None], connections: int, max_bytes: int
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
            shown = url.rpartition("@")[2].partition("?")[0]
            raise ValueError(f"url: expected http:// or https:// and a host, without a user or a query, got {shown!r}")
        if not token.isascii() or not token.isprintable():
            raise ValueError("token: it has characters that no token has; is there a line end in it?")
        if connections < 1 or max_bytes < 1:
            raise ValueError("connections and max_bytes: expected at least 1")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        # Without a port the library takes the end of an IPv6 address for one.
        self.host, self.port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self.prefix = parts.path.rstrip("/")
        self.connections, self.max_bytes = connections, max_bytes
        self.headers = {"User-Agent": "stagemesh-python"}
        if token:
            self.headers["Authorization"] = f"Bearer {token.strip()}"
        self.tls: Optional[ssl.SSLContext] = None
        if parts.scheme == "https":
            self.tls = ca if isinstance(ca, ssl.SSLContext) else ssl.create_default_context(cafile=ca)
        elif ca is not None:
            raise ValueError(f"ca: {self.url} has no TLS; use https://")


class Reply(NamedTuple):
    """An answer of HTTP, with the names of its headers in lower case; source has the body of a stream."""

    status: int
    headers: Mapping[str, str]
    body: bytearray
    source: Any = None


class Interrupt:
    """Ends exchanges from another thread: they raise Cancelled, and so do those that begin later."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._lock = threading.Lock()
        self._sockets: Set[socket.socket] = set()

    def set(self) -> None:
        """Ends all exchanges."""
        with self._lock:
            self.event.set()
            for one in self._sockets:
                with contextlib.suppress(OSError):  # not the method of ssl, which forgets the connection's state
                    socket.socket.shutdown(one, socket.SHUT_RDWR)

    def check(self) -> None:
        """Raises Cancelled once it is set."""
        if self.event.is_set():
            raise Cancelled("the caller has cancelled the call", reason="CANCELLED")

    def watch(self, connection: socket.socket) -> None:
        """Adds the connection of an exchange."""
        with self._lock:
            self._sockets.add(connection)
        self.check()

    @contextlib.contextmanager
    def watch_connect(self, connection: socket.socket) -> Iterator[socket.socket]:
        """Watches a connection while it is made, and closes it if that fails."""
        try:
            self.watch(connection)
            yield connection
        except BaseException:
            connection.close()
            raise
        finally:
            self.leave(connection)

    def leave(self, connection: socket.socket) -> None:
        """Removes the connection of an exchange that is over."""
        with self._lock:
            self._sockets.discard(connection)


class Clock:
    """The time that a call has left."""

    def __init__(self, seconds: Optional[float]) -> None:
        self._seconds = seconds
        self._end = float("inf") if seconds is None else time.monotonic() + seconds

    def until_deadline(self) -> float:
        """Returns the seconds until the deadline, infinite without one."""
        return self._end - time.monotonic()

    def until_answer(self, most: Optional[float] = None) -> Optional[float]:
        """Returns the seconds until the deadline and the grace, at most so many; raises DeadlineExceeded."""
        left = self.until_deadline() + _GRACE
        if left <= 0:
            raise DeadlineExceeded(f"no answer within {self._seconds:.3g} s", reason="DEADLINE_EXCEEDED")
        left = left if most is None else min(left, most)
        return None if left == float("inf") else left


def all_in_use(connections: int) -> DeadlineExceeded:
    """Returns the fault of a call that has got no connection in time."""
    return DeadlineExceeded(f"all {connections} connections are in use", reason="DEADLINE_EXCEEDED")


_TRANSPORTS: WeakSet[Transport] = WeakSet()


def _after_fork() -> None:
    for transport in list(_TRANSPORTS):
        transport.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Transport:
    """Exchanges requests for answers."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._idle: List[http.client.HTTPConnection] = []
        self._closed = False
        self._begin()
        _TRANSPORTS.add(self)

    def _begin(self) -> None:
        self._room = threading.Semaphore(self.endpoint.connections)
        self._lock = threading.Lock()
        self.dropped: Deque[_Exchange] = deque()  # whose readers have gone, and whose places are still taken
        self.threads = ThreadPoolExecutor(self.endpoint.connections, "stagemesh")  # of requests in the background

    def after_fork(self) -> None:
        """Begins anew in a child process: the connections, and the threads, are the parent's."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        self._begin()

    def close(self) -> None:
        """Closes idle connections; those in use close after their exchange."""
        self._end_dropped()
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for connection in idle:
            connection.close()

    def send(self, plan: Plan, clock: Clock, interrupt: Interrupt) -> Reply:
        """Makes an exchange; raises Disconnected, DeadlineExceeded, InvalidAnswer or Cancelled."""
        self._enter(clock, interrupt)
        exchange = _Exchange(self, interrupt, clock)
        try:
            reply = exchange.begin(plan)
            if plan.stream and reply.status == 200:
                return reply._replace(source=exchange)
            exchange.read_all(reply)
            exchange.end(whole=True)
            return reply
        except BaseException:
            exchange.end(whole=False)
            raise

    def _enter(self, clock: Clock, interrupt: Interrupt) -> None:
        """Waits for the place of an exchange."""
        entered = False
        while not entered:
            interrupt.check()
            self._end_dropped()
            rest = clock.until_deadline()
            if rest <= 0:
                raise all_in_use(self.endpoint.connections)
            entered = self._room.acquire(timeout=min(rest, _LOOK))

    def _end_dropped(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self.dropped.popleft().end(whole=False)

    def take(self, clock: Clock, interrupt: Interrupt) -> http.client.HTTPConnection:
        """Returns a connection on which nothing has come, or a new one."""
        while True:
            with self._lock:
                if self._closed:
                    raise RuntimeError("the mesh was closed")
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                break
            if connection.sock is not None and not _is_readable(connection.sock):
                return connection
            connection.close()  # the gateway has closed it
        e = self.endpoint
        if e.tls is None:
            connection = http.client.HTTPConnection(e.host, e.port)
        else:
            connection = http.client.HTTPSConnection(e.host, e.port, context=e.tls)
        try:
            connection.sock = _connect(e, clock, interrupt)
        except (OSError, UnicodeError) as error:
            interrupt.check()
            raise _no_connection(e.url, error) from error
        return connection

    def give(self, connection: http.client.HTTPConnection, again: bool) -> None:
        """Takes a connection back."""
        with self._lock:
            again = again and not self._closed
            if again:
                self._idle.append(connection)
        if not again:
            connection.close()

    def leave(self) -> None:
        """Ends an exchange."""
        self._room.release()


def _connect(e: Endpoint, clock: Clock, interrupt: Interrupt) -> socket.socket:
    """Connects to the first address that accepts; other than the library's own, an Interrupt ends it."""
    failed = OSError("the host has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(e.host, e.port, 0, socket.SOCK_STREAM):
        try:
            with interrupt.watch_connect(socket.socket(family, kind, protocol)) as connection:
                connection.settimeout(clock.until_answer(CONNECT_TIMEOUT))
                connection.connect(address)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            failed = error
            continue
        if e.tls is None:
            return connection
        secure = e.tls.wrap_socket(connection, server_hostname=e.host, do_handshake_on_connect=False)
        with interrupt.watch_connect(secure):
            secure.do_handshake()
        return secure
    raise failed


# TLS errors by their text, with advice; the first match wins.
_HANDSHAKE = (
    ("certificate has expired|not yet valid", "renew the certificate, or set the clock of this machine"),
    ("mismatch", "the certificate is for other names: use one of them in the URL"),
    ("CERTIFICATE_VERIFY_FAILED", "the certificate is not trusted: pass the file of its CA as ca="),
    ("WRONG_VERSION_NUMBER|PACKET_LENGTH|RECORD_LAYER", "the port does not speak TLS: use http://, or another port"),
    ("PROTOCOL", "there is no common version of TLS: a gateway takes 1.2 and 1.3"),
    (
        "CERTIFICATE|UNKNOWN_CA|ACCESS_DENIED|HANDSHAKE_FAILURE",
        "the port requires a valid client certificate: pass ca= an ssl.SSLContext that has one",
    ),
)
# How a server refuses a client's certificate: with TLS 1.3 after the handshake, while the request is sent or read.
_REFUSED = "ALERT_.*(CERTIFICATE|UNKNOWN_CA|ACCESS_DENIED)"


def _no_connection(url: str, error: Exception) -> Disconnected:
    """Returns the fault of a connection that was not made."""
    # A gateway that stops may close the connection during the handshake, so that is retried.
    final = isinstance(error, (ssl.SSLError, UnicodeError)) and not isinstance(error, ssl.SSLEOFError)
    advice = [todo for part, todo in _HANDSHAKE if isinstance(error, ssl.SSLError) and re.search(part, str(error))]
    return disconnected("; ".join([f"cannot connect to {url}: {error}", *advice[:1]]), sent=False, final=final)


def _is_readable(connection: socket.socket) -> bool:
    if not hasattr(select, "poll"):
        return bool(select.select([connection], [], [], 0)[0])
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


class _Exchange:
    """One request and its answer; of a stream the source of its bytes."""

    def __init__(self, transport: Transport, interrupt: Interrupt, clock: Clock) -> None:
        self._transport, self._interrupt, self._clock = transport, interrupt, clock
        self._connection: Optional[http.client.HTTPConnection] = None
        self._socket: Any = None
        self._response: Any = None
        self._ended = False

    @contextlib.contextmanager
    def _translate(self) -> Iterator[None]:
        """Makes faults of the errors of a connection."""
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            self._interrupt.check()
            if isinstance(error, socket.timeout):  # TimeoutError since Python 3.10
                self._clock.until_answer()
            if isinstance(error, ssl.SSLError) and re.search(_REFUSED, str(error)):
                raise _no_connection(self._transport.endpoint.url, error) from error
            what = f"the connection to {self._transport.endpoint.url} broke: {str(error) or type(error).__name__}"
            raise disconnected(what, sent=True) from error

    def begin(self, plan: Plan) -> Reply:
        """Sends the request, and returns the head of the answer."""
        transport, clock = self._transport, self._clock
        connection = self._connection = transport.take(clock, self._interrupt)
        self._socket = connection.sock
        self._interrupt.watch(self._socket)
        headers = {**transport.endpoint.headers, **plan.headers}
        if plan.inference and clock.until_deadline() < float("inf"):
            headers["Stagemesh-Timeout"] = str(max(1, int(clock.until_deadline() * 1000)))
        if plan.body or plan.method == "POST":
            headers["Content-Length"] = str(sum(map(len, plan.body)))
        with self._translate():
            self._socket.settimeout(clock.until_answer())
            connection.putrequest(plan.method, transport.endpoint.prefix + plan.path, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name, value)
            # A gateway may refuse a request before it has all of it; its answer says why.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError, ssl.SSLEOFError, ssl.SSLZeroReturnError):
                connection.endheaders(list(plan.body) or None)
            self._socket.settimeout(clock.until_answer(IDLE_TIMEOUT if plan.stream else None))
            response = self._response = connection.getresponse()
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, bytearray())

    def read_all(self, reply: Reply) -> None:
        """Reads the whole body."""
        response, most = self._response, self._transport.endpoint.max_bytes
        if reply.status >= 300:
            most = min(most, _FAULT_BYTES)
        while len(reply.body) + (response.length or 0) <= most:
            with self._translate():
                self._socket.settimeout(self._clock.until_answer())
                piece = response.read1(_PIECE)
                if not piece and response.length:
                    raise http.client.IncompleteRead(b"", response.length)
            if not piece:
                return
            reply.body.extend(piece)
        raise invalid_answer(f"the answer has more than max_bytes, {most}", reply.status)

    def read(self) -> bytes:
        """Returns the next bytes of a stream, empty at its end."""
        with self._translate():
            self._interrupt.check()
            self._socket.settimeout(self._clock.until_answer(IDLE_TIMEOUT))
            piece: bytes = self._response.read1(_PIECE)
        return piece

    def __del__(self) -> None:
        """Ends the request of a stream whose reader has gone.

        The garbage collector may run while this thread holds a lock of the transport, so the next
        exchange gives the place back.
        """
        with contextlib.suppress(Exception):
            if not self._ended:
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
                self._transport.dropped.append(self)

    def close(self) -> None:
        """Ends a stream, and its request with it, if that is not over."""
        self.end(whole=False)

    def end(self, whole: bool) -> None:
        """Gives the connection back, for other requests if nothing more of this one comes."""
        if self._ended:
            return
        self._ended = True
        if self._response is not None:
            whole = whole and not self._response.will_close
            self._response.close()
        if self._connection is not None:
            self._interrupt.leave(self._socket)
            self._transport.give(self._connection, again=whole)
        self._transport.leave()
