"""A worker without any library, which keeps to the protocol until a text asks it not to."""

import json
import os
import signal
import socket
import struct
import sys

PREFIX = struct.Struct("<4sIQ")

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
sock = socket.socket(socket.AF_UNIX)
sock.connect(os.environ["STAGEMESH_SOCKET"])


def frame(header, body=b""):
    text = json.dumps(header).encode()
    return PREFIX.pack(b"SMW1", len(text), len(body)) + text + body


def exactly(n):
    data = b""
    while len(data) < n:
        piece = sock.recv(n - len(data))
        if not piece:
            sys.exit(0)
        data += piece
    return data


def read():
    _, head, body = PREFIX.unpack(exactly(PREFIX.size))
    return json.loads(exactly(head)), exactly(body)


def result(batch, parts, body, **more):
    return frame({"type": "result", "batch": batch, "parts": parts, **more}, body)


def answer(header, body):
    """Returns the inputs unchanged, or does what one of them asks for."""
    batch, parts = header["batch"], header["parts"]
    right = result(batch, parts, body)
    words = {body[p["at"] : p["at"] + p["size"]].decode() for p in parts}
    if "bytewise" in words:
        for i in range(len(right)):
            sock.sendall(right[i : i + 1])
    elif "garbage" in words:
        sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    elif "half" in words:
        sock.sendall(right[: len(right) // 2])
        print("silent", flush=True)
        signal.pause()
    elif "more items" in words:
        another = {"name": "text", "item": len(header["items"]), "content_type": "", "at": len(body), "size": 1}
        sock.sendall(result(batch, [*parts, another], body + b"?"))
    elif "fewer items" in words:
        sock.sendall(result(batch, parts[:-1], body))
    elif "unknown batch" in words:
        sock.sendall(result(batch + 1000, parts, body))
    elif "twice" in words:
        sock.sendall(right + right)
    else:
        sock.sendall(right)


sock.sendall(frame({"type": "hello", "protocols": [1], "name": "raw", "pid": os.getpid()}))
read()
text = {"name": "text"}
sock.sendall(frame({"type": "ready", "spec": {"batch_axis": "none", "inputs": [text], "outputs": [text]}}))
while True:
    header, body = read()
    if header["type"] == "predict":
        answer(header, body)
    elif header["type"] == "ping":
        sock.sendall(frame({"type": "pong", "n": header["n"]}))
    elif header["type"] == "shutdown":
        sys.exit(0)
