"""A small gateway that answers as a test says, over real sockets: faults, resets, stalls."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
import threading
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional

from stagemesh.client.packing import Binary, pack, unpack

REQUEST_ID = "0199aaaa-bbbb-7ccc-8ddd-eeeeffff0000"
TIMELINE = {"total_ms": 3.2, "steps": [{"step": "s", "stage": "st", "run_ms": 1.5, "batch_size": 4, "new": 1}]}


class Asked(NamedTuple):
    """A request as it came."""

    method: str
    path: str
    headers: Message
    body: bytes
    connection: int  # a number of its own for each

    def document(self) -> Any:
        return unpack(memoryview(self.body))


Script = Callable[["Handler", Asked], None]


class Gateway:
    """Answers the n-th request by the n-th script, and all later ones by the last."""

    def __init__(self, *scripts: Script, tls: Optional[ssl.SSLContext] = None) -> None:
        self.scripts = list(scripts)
        self.asked: List[Asked] = []
        self.ended = threading.Event()  # is set as the test ends
        self.gone = threading.Event()  # is set as a client has left
        self._lock = threading.Lock()
        gateway = self

        class Own(Handler):
            def setup(self) -> None:
                self.gateway = gateway
                super().setup()

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Own)
        self.server.daemon_threads = True
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.server.server_address[1]}"

    def take(self, asked: Asked) -> Script:
        with self._lock:
            self.asked.append(asked)
            return self.scripts[min(len(self.asked), len(self.scripts)) - 1]

    def __enter__(self) -> Gateway:
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    gateway: Gateway

    def log_message(self, *_: Any) -> None: ...

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        asked = Asked(self.command, self.path, self.headers, body, id(self.connection))
        with contextlib.suppress(OSError):
            self.gateway.take(asked)(self, asked)

    do_GET = do_POST = do_DELETE = handle_any  # noqa: N815

    def answer(self, status: int, body: bytes, headers: Dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def reset(self) -> None:
        """Ends the connection by a reset."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.connection, socket.SHUT_RD)
        self.connection.close()

    def wait_until_gone(self) -> None:
        """Waits until the client has left, or the test ends."""
        self.close_connection = True
        self.connection.settimeout(0.05)
        while not self.gateway.ended.is_set():
            with contextlib.suppress(socket.timeout):
                try:
                    if self.connection.recv(1) == b"":
                        break
                except ConnectionError:
                    break
        self.gateway.gone.set()


def packed(document: Any) -> bytes:
    return b"".join(bytes(piece) for piece in pack(document))


def outputs(*parts: Dict[str, Any], **headers: str) -> Script:
    """Answers with outputs."""
    document = {"request_id": REQUEST_ID, "model_name": "p", "outputs": list(parts), "timeline": TIMELINE}
    kind = {"Content-Type": "application/msgpack", "Stagemesh-Request-Id": REQUEST_ID, **headers}
    return lambda handler, _: handler.answer(200, packed(document), kind)


def text(value: str) -> Script:
    return outputs({"name": "out", "content_type": "text/plain", "text": value})


def echo(handler: Handler, asked: Asked) -> None:
    """Answers with the inputs, which are told as the gateway would have got them."""
    parts = []
    for part in asked.document()["inputs"]:
        data = part["data"]
        kind = part.get("parameters", {}).get("content_type")
        if kind is None:
            parts.append({**part, "data": Binary((data,))})
        elif kind.startswith("text/"):
            parts.append({"name": part["name"], "content_type": kind, "text": str(data[4:], "utf-8")})
        elif kind == "application/json":
            parts.append({"name": part["name"], "content_type": kind, "json": json.loads(bytes(data[4:]))})
        else:
            parts.append({"name": part["name"], "content_type": kind, "data": Binary((data[4:],))})
    outputs(*parts)(handler, asked)


def fault(reason: str, code: str = "UNAVAILABLE", status: int = 503, **more: Any) -> Script:
    error = {"code": code, "reason": reason, "message": "what went wrong", **more}
    return document({"error": error}, status)


def document(value: Any, status: int = 200, **headers: Any) -> Script:
    kind = {"Content-Type": "application/json", **headers}
    return lambda handler, _: handler.answer(status, json.dumps(value).encode(), kind)


def raw(data: bytes, then: str = "close") -> Script:
    """Sends bytes, and then resets, closes, or waits until the client leaves."""

    def script(handler: Handler, _: Asked) -> None:
        handler.wfile.write(data)
        handler.close_connection = True
        if then == "wait":
            handler.wait_until_gone()
        elif then == "reset":
            handler.reset()

    return script


def reset(handler: Handler, _: Asked) -> None:
    handler.reset()


def stall(handler: Handler, _: Asked) -> None:
    handler.wait_until_gone()


def event(kind: str, value: Any, number: Any = 1) -> bytes:
    return f"id: {number}\nevent: {kind}\ndata: {json.dumps(value)}\n\n".encode()


def chunk(word: str, seq: int) -> bytes:
    parts = [{"name": "text", "content_type": "text/plain", "text": word}]
    return event("chunk", {"request_id": REQUEST_ID, "seq": seq, "outputs": parts}, seq)


def done(whole: str) -> bytes:
    parts = [{"name": "text", "content_type": "text/plain", "text": whole}]
    return event("done", {"request_id": REQUEST_ID, "model_name": "p", "outputs": parts, "timeline": TIMELINE}, 9)


def events(*pieces: bytes, then: str = "close") -> Script:
    """Answers with events, and then closes, resets or waits."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    return raw(head + b"".join(pieces), then)


@contextlib.contextmanager
def closed_port() -> Iterator[str]:
    """Has the URL of a port on which nothing listens."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{holder.getsockname()[1]}"
