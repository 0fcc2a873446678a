"""Measures the cost of the library: a Worker that does nothing, against a raw socket.

    python3 sdk/python/bench/echo.py [--rounds N] [--arrays numpy|buffer] [--cpus own|one|any] [--check]

Both are processes that get the same frames over a Unix socket and answer with the same
bytes. The raw one reads exactly the bytes that the prefix announces, and sends a fixed
header and the received body; it parses no JSON. They are measured in turns, in the same
run; each figure is the median of the rounds, and the ratio is the median of the rounds'
ratios. Batches are one tensor of all items, or a blob for each. --check exits with 1 if a goal is missed.

Where the two ends of a conversation run, and how deep a CPU sleeps between, changes
a round trip more than the library does: an idle CPU of a virtual machine takes tens of
microseconds to wake, and more the longer it slept. So both peers answer from one CPU,
and this process sends from another and waits without sleeping, as a host's CPU does not
sleep while it has work (--cpus own, if there are two). --cpus one is one CPU for all,
--cpus any leaves the choice to the system; with both, processes sleep while they wait.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, List, NamedTuple

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

from stagemesh import Bytes, Tensor, Worker, serve  # noqa: E402

PREFIX = struct.Struct("<4sIQ")


class Echo(Worker):
    """Returns its input."""

    inputs = {"x": Tensor("UINT8", [-1, -1])}
    outputs = {"y": Tensor("UINT8", [-1, -1])}

    def setup(self, ctx: Any) -> None:
        """Takes blobs if the option says so."""
        if ctx.options["blobs"]:
            self.inputs, self.outputs = {"x": Bytes()}, {"y": Bytes()}

    def predict(self, batch: Any) -> Dict[str, Any]:
        """Returns the received rows."""
        return {"y": batch["x"]}


class Case(NamedTuple):
    """A frame to send and the frame that comes back."""

    items: int
    row: int  # bytes
    blobs: bool  # a part for each item, instead of one tensor
    goal: float  # of raw's items/s
    sent: bytes
    answer_header: bytes


def case(items: int, row: int, blobs: bool, goal: float) -> Case:
    """Returns a batch of so many items of one row each."""
    size = items * row
    tensor = {"datatype": "UINT8", "shape": [items, row], "at": 0, "size": size}
    blob = {"content_type": "application/octet-stream"}
    parts = [{**blob, "item": i, "at": i * row, "size": row} for i in range(items)] if blobs else [tensor]
    header = {
        "type": "predict",
        "batch": 1,
        "items": [{"id": f"0192d7a0-5e0b-7c3e-9d7e-{i:012x}", "timeout": 5000} for i in range(items)],
        "parts": [{"name": "x", **part} for part in parts],
    }
    answer = {"type": "result", "batch": 1, "parts": [{"name": "y", **part} for part in parts]}
    text = json.dumps(header, separators=(",", ":")).encode()
    body = bytes(i % 251 for i in range(size))
    return Case(
        items,
        row,
        blobs,
        goal,
        PREFIX.pack(b"SMW1", len(text), size) + text + body,
        json.dumps(answer, separators=(",", ":")).encode(),
    )


CASES = {
    "batch 1": case(1, 1024, False, 1 / 1.5),
    "32 x 1 KiB": case(32, 1024, False, 0.7),
    "32 blobs of 1 KiB": case(32, 1024, True, 0.2),
}


def raw(path: str) -> None:
    """Serves as the raw socket: the other end of the comparison."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(path)
    heads = {
        len(c.sent): PREFIX.pack(b"SMW1", len(c.answer_header), c.items * c.row) + c.answer_header
        for c in CASES.values()
    }
    prefix = bytearray(PREFIX.size)
    while True:
        if not exactly(sock, memoryview(prefix)):
            return
        _, head, body = PREFIX.unpack(prefix)
        payload = memoryview(bytearray(head + body))
        exactly(sock, payload)
        send(sock, [heads[PREFIX.size + head + body], payload[head:]])


def exactly(sock: socket.socket, into: memoryview) -> bool:
    """Fills a buffer; False at the end."""
    have = 0
    while have < len(into):
        n = sock.recv_into(into[have:] if have else into)
        if n == 0:
            return False
        have += n
    return True


def spinning(sock: socket.socket, into: memoryview) -> None:
    """Fills a buffer, and tries again at once while there is nothing to read."""
    have = 0
    while have < len(into):
        try:
            n = sock.recv_into(into[have:], 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            continue
        assert n, "the other end has gone"
        have += n


def send(sock: socket.socket, pieces: List[Any]) -> None:
    """Sends all of the pieces."""
    total = sum(len(piece) for piece in pieces)
    sent = sock.sendmsg(pieces)
    if sent < total:
        sock.sendall(b"".join(pieces)[sent:])


class Peer:
    """A process at the other end of a socket."""

    def __init__(self, listener: socket.socket, path: str, arguments: List[str]) -> None:
        environ = {**os.environ, "STAGEMESH_SOCKET": path}
        self.process = subprocess.Popen([sys.executable, __file__, *arguments], env=environ)
        self.sock = listener.accept()[0]
        self.spins = False  # whether this process waits for replies without sleeping

    def begin(self, blobs: bool) -> None:
        """Sends the welcome to a worker, and waits until it is ready."""
        self.frame()
        options = {"blobs": blobs}
        text = json.dumps({"type": "welcome", "protocol": 1, "options": options, "max_frame": 1 << 30}).encode()
        self.sock.sendall(PREFIX.pack(b"SMW1", len(text), 0) + text)
        assert b'"ready"' in self.frame()

    def frame(self) -> bytes:
        """Returns the next frame."""
        prefix = bytearray(PREFIX.size)
        assert exactly(self.sock, memoryview(prefix)), "the worker has ended"
        _, head, body = PREFIX.unpack(prefix)
        payload = bytearray(head + body)
        exactly(self.sock, memoryview(payload))
        return bytes(prefix + payload)

    def measure(self, case: Case, seconds: float) -> float:
        """Returns the median seconds of a round trip."""
        sock, sent, receive = self.sock, case.sent, spinning if self.spins else exactly
        reply = memoryview(bytearray(PREFIX.size + len(case.answer_header) + case.items * case.row))
        times = []
        end = time.perf_counter() + seconds
        while True:
            start = time.perf_counter()
            sock.sendall(sent)
            receive(sock, reply)
            now = time.perf_counter()
            times.append(now - start)
            if now > end:
                return statistics.median(times)

    def check(self, case: Case) -> None:
        """Checks that the answer is the same bytes as the raw socket's."""
        self.sock.sendall(case.sent)
        text = case.answer_header
        body = case.sent[-case.items * case.row :]
        got = self.frame()
        assert got == PREFIX.pack(b"SMW1", len(text), len(body)) + text + body, got[:300]


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=0.1, help="of each measurement")
    parser.add_argument("--arrays", choices=("numpy", "buffer"), default="buffer")
    parser.add_argument("--cpus", choices=("own", "one", "any"), default="own", help="which CPUs the processes use")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    parser.add_argument("--serve", choices=("raw", "worker"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve == "raw":
        raw(os.environ["STAGEMESH_SOCKET"])
        return 0
    if given.serve == "worker":
        serve(Echo, arrays=given.arrays)

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "socket")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen(1)
        baseline = Peer(listener, path, ["--serve=raw"])
        workers = []
        for blobs in (False, True):
            workers.append(Peer(listener, path, ["--serve=worker", f"--arrays={given.arrays}"]))
            workers[-1].begin(blobs)
        place(given.cpus, [baseline, *workers])
        passed = compare(given.rounds, given.seconds, baseline, workers)
        for peer in (baseline, *workers):
            peer.sock.close()
            peer.process.wait()
    return 0 if passed or not given.check else 1


def place(cpus: str, peers: List[Peer]) -> None:
    """Puts this process on a CPU, and the peers on another one or on the same."""
    if cpus == "any" or not hasattr(os, "sched_setaffinity"):
        return
    first, *others = sorted(os.sched_getaffinity(0))
    apart = cpus == "own" and bool(others)
    if cpus == "own" and not apart:
        print("there is only one CPU, which all processes share", file=sys.stderr)
    os.sched_setaffinity(0, {first})
    for peer in peers:
        os.sched_setaffinity(peer.process.pid, {others[0] if apart else first})
        peer.spins = apart


def compare(rounds: int, seconds: float, baseline: Peer, workers: List[Peer]) -> bool:
    """Prints the figures of both; reports whether the goals are reached."""
    passed = True
    for name, one in CASES.items():
        worker = workers[one.blobs]
        worker.check(one)
        baseline.check(one)
        pairs = []
        for _ in range(rounds):
            pairs.append((baseline.measure(one, seconds), worker.measure(one, seconds)))
        low, high = (statistics.median(column) for column in zip(*pairs))
        ratio = statistics.median(w / b for b, w in pairs)
        if one.items == 1:
            goal = f"goal: at most {1 / one.goal:.1f}x"
            print(f"round trip at {name}: raw {low * 1e6:.1f} us, worker {high * 1e6:.1f} us: {ratio:.2f}x ({goal})")
        else:
            goal = f"goal: at least {one.goal}x"
            print(
                f"items/s at {name}: raw {one.items / low:,.0f}, worker {one.items / high:,.0f}: "
                f"{1 / ratio:.2f}x ({goal})"
            )
        passed = passed and 1 / ratio >= one.goal
    return passed


if __name__ == "__main__":
    sys.exit(main())
