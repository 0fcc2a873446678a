"""A host that follows sdk/PROTOCOL.md, for real worker processes.

It shares no code with the library, so that a mistake in one shows in the other.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PATIENCE = 30.0  # the longest wait for anything on a busy machine, in seconds

Message = Tuple[Dict[str, Any], bytes]


def frame(header: Dict[str, Any], body: bytes = b"") -> bytes:
    """Returns a frame, whose header is as compact as a host's."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<4sIQ", b"SMW1", len(text), len(body)) + text + body


def floats(*values: float) -> bytes:
    """Returns the bytes of FP32 elements."""
    return struct.pack(f"<{len(values)}f", *values)


def eventually(condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    """Waits until a condition holds."""
    end = time.monotonic() + patience
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {patience} s: {what}")
        time.sleep(0.005)


def alive(pid: int) -> bool:
    """Reports whether a process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Host:
    """A host of one worker process.

    source is the text of a file; it is served by ``python -m stagemesh file`` unless a
    command is given.
    """

    def __init__(
        self,
        source: str,
        command: Optional[Sequence[str]] = None,
        environ: Optional[Dict[str, str]] = None,
        welcome: Optional[Dict[str, Any]] = None,
    ) -> None:
        self.folder = tempfile.mkdtemp(prefix="smtest-", dir="/tmp")
        self.file = os.path.join(self.folder, "worker_file.py")
        with open(self.file, "w") as file:
            file.write(textwrap.dedent(source))
        path = os.path.join(self.folder, "s")
        self.errors = os.path.join(self.folder, "stderr")
        read, self.lifeline = os.pipe()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, open(self.errors, "wb") as errors:
            listener.bind(path)
            listener.listen(1)
            listener.settimeout(PATIENCE)
            self.process = subprocess.Popen(
                list(command or [sys.executable, "-m", "stagemesh", self.file]),
                env={
                    **os.environ,
                    "PYTHONPATH": ROOT,
                    "STAGEMESH_SOCKET": path,
                    "STAGEMESH_LIFELINE": str(read),
                    **(environ or {}),
                },
                pass_fds=[read],
                start_new_session=True,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
            os.close(read)
            self.sock, _ = listener.accept()
        self.sock.settimeout(PATIENCE)
        self._welcome = {
            "type": "welcome",
            "protocol": 1,
            "options": {},
            "max_size": 32,
            "max_frame": 1 << 30,
            **(welcome or {}),
        }

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.process.stdout.close()  # type: ignore[union-attr]
        self.sock.close()
        if self.lifeline >= 0:
            os.close(self.lifeline)
        shutil.rmtree(self.folder, ignore_errors=True)

    def path(self, name: str) -> str:
        """Returns a path in the test's folder."""
        return os.path.join(self.folder, name)

    # --- frames --------------------------------------------------------------

    def send(self, header: Dict[str, Any], body: bytes = b"") -> None:
        """Sends a message."""
        self.sock.sendall(frame(header, body))

    def exactly(self, n: int) -> bytes:
        """Returns the next n bytes; raises EOFError at the end."""
        out = bytearray()
        while len(out) < n:
            piece = self.sock.recv(min(n - len(out), 1 << 20))
            if not piece:
                raise EOFError(self.stderr())
            out += piece
        return bytes(out)

    def receive(self) -> Message:
        """Returns the next message."""
        magic, head, body = struct.unpack("<4sIQ", self.exactly(16))
        assert magic == b"SMW1", magic
        return json.loads(self.exactly(head)), self.exactly(body)

    def expect(self, kind: str) -> Message:
        """Returns the next message, which is of a kind."""
        header, body = self.receive()
        assert header["type"] == kind, header
        return header, body

    def hello(self) -> Dict[str, Any]:
        """Receives the hello and sends the welcome."""
        header, _ = self.expect("hello")
        self.send(self._welcome)
        return header

    def ready(self) -> Dict[str, Any]:
        """Waits until the worker is ready; returns that message."""
        self.hello()
        while True:
            header, _ = self.receive()
            if header["type"] == "ready":
                return header
            assert header["type"] == "state", header

    def predict(self, batch: int, rows: int = 1, value: float = 1.0, **item: Any) -> None:
        """Sends a batch of single rows of input x, FP32 [rows, 2]."""
        body = floats(*[value] * (2 * rows))
        parts = [{"name": "x", "datatype": "FP32", "shape": [rows, 2], "at": 0, "size": len(body)}]
        items = [{"id": f"r{batch}-{i}", **item} for i in range(rows)]
        self.send({"type": "predict", "batch": batch, "items": items, "parts": parts}, body)

    def ended(self) -> bool:
        """Reads all remaining messages; reports whether the connection has ended."""
        try:
            while True:
                self.receive()
        except (EOFError, ConnectionResetError):
            return True

    # --- the process -----------------------------------------------------------

    def exit_code(self, patience: float = PATIENCE) -> int:
        """Waits for the end of the process."""
        return self.process.wait(patience)

    def stderr(self) -> str:
        """Returns what the worker has written to standard error."""
        with open(self.errors, errors="replace") as file:
            return file.read()

    def lines(self, path: str) -> List[str]:
        """Returns the lines of a file that the worker writes."""
        try:
            with open(path) as file:
                return file.read().splitlines()
        except FileNotFoundError:
            return []


# A worker that doubles its input, and writes to files what it does.
DOUBLE = """
import os, signal, subprocess, sys, time
from stagemesh import InvalidInput, Tensor, Worker

HERE = os.path.dirname(os.path.abspath(__file__))

def note(name, text=""):
    with open(os.path.join(HERE, name), "a") as file:
        file.write(str(text) + "\\n")

def wait_for(name):
    while not os.path.exists(os.path.join(HERE, name)):
        time.sleep(0.002)

class Double(Worker):
    arrays = "buffer"
    inputs = {"x": Tensor("FP32", [-1, 2])}
    outputs = {"y": Tensor("FP32", [-1, 2])}

    def predict(self, batch):
        return {"y": [[[2 * v for v in row] for row in item["x"].tolist()] for item in batch.items]}
"""
