"""Answers in chunks, from real worker processes."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import unittest
from typing import Any, Dict

from stagemesh import Text, Worker, testing
from stagemesh.frames import Connection, Ended
from stagemesh.session import EXIT_UNFINISHED, EXIT_VIOLATION
from stagemesh.testing import WorkerEnded

from .support import PATIENCE, Host, eventually


class SpaceTest(unittest.TestCase):
    """Sending while the host does not read."""

    def test_frames_stay_whole_and_in_order(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            connection, reader = Connection(ours), Connection(theirs, max_body=1 << 20)
            header, body = b'{"type":"chunk"}', b"x" * 50_000
            rest = connection.send_now(header, [body], len(body))
            assert rest is not None
            behind = connection.send_now(b'{"type":"result"}')  # it may not come between
            assert behind is not None
            threads = [threading.Thread(target=call) for call in (behind, rest)]
            for thread in threads:
                thread.start()
            self.assertEqual([len(reader.read()[1]), reader.read()[0]["type"]], [50_000, "result"])
            for thread in threads:
                thread.join()
            self.assertIsNone(connection.send_now(header))
            theirs.close()
            with self.assertRaises(Ended):
                connection.send_now(header)

    def test_wait_for_space_is_bounded(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            connection, reader = Connection(ours), Connection(theirs, max_body=1 << 20)
            connection.send_within(0, b'{"type":"pong"}')
            self.assertEqual(reader.read()[0], {"type": "pong"})
            rest = connection.send_now(b'{"type":"chunk"}', [b"x" * 50_000], 50_000)
            assert rest is not None
            with self.assertRaisesRegex(Ended, "buffer is full"):
                connection.send_within(0.01, b'{"type":"pong"}')  # of half a frame the rest has to follow
            thread = threading.Thread(target=rest)
            thread.start()
            self.assertEqual(len(reader.read()[1]), 50_000)
            thread.join()
            with self.assertRaisesRegex(Ended, "buffer is full"):
                for _ in range(1000):
                    connection.send_within(0.01, b'{"type":"state","message":"%s"}' % (b"x" * 1000))
            with self.assertRaises(Ended):
                connection.send_within(PATIENCE, b'{"type":"pong"}')

    def test_worker_ends_if_the_host_reads_nothing(self) -> None:
        for kind in KINDS:
            for message, code in (
                ({"type": "shutdown", "timeout": 400}, EXIT_UNFINISHED),
                ({"type": "nonsense"}, EXIT_VIOLATION),
            ):
                with self.subTest(f"{kind}, {message}"), flooded(kind) as host:
                    began = time.monotonic()
                    host.send(message)
                    self.assertEqual(host.exit_code(), code)
                    self.assertLess(time.monotonic() - began, PATIENCE / 2)

    def test_unread_stream_does_not_delay_others(self) -> None:
        source = """
            import asyncio
            from stagemesh import Bytes, Text, Worker
            class Floods(Worker):
                arrays = "buffer"
                concurrency = 2
                collect = False
                inputs, outputs = {"text": Text()}, {"y": Bytes()}
                beats = 0
                async def beat(self):
                    while True:
                        self.beats += 1
                        await asyncio.sleep(0.001)
                async def stream(self, item):
                    if item["text"] == "beat":
                        task = asyncio.ensure_future(self.beat())
                        with open(item.metadata["file"], "w") as file:
                            while True:
                                await asyncio.sleep(0.002)
                                print(self.beats, file=file, flush=True)
                    for i in range(400):
                        yield i.to_bytes(2, "little") * 5000
        """
        with Host(source, welcome={"capabilities": ["stream"], "slots": 2}) as host:
            host.ready()
            predict(host, 1, "beat", metadata={"file": host.path("beats")})
            predict(host, 2, "flood")
            eventually(lambda: len(host.lines(host.path("beats"))) > 20, "the loop goes on")
            host.send({"type": "cancel", "batch": 1})
            for i in range(400):
                header, body = host.receive()
                while header["batch"] == 1:
                    header, body = host.receive()
                self.assertEqual((header["type"], body), ("chunk", i.to_bytes(2, "little") * 5000))
            ends = [host.expect("result")[0]["batch"]] if header["batch"] == 2 else []
            self.assertIn(ends, ([1], [2]))


# Workers that make more chunks than the socket holds.
FLOODS = """
from stagemesh import Bytes, Text, Worker
class Base(Worker):
    arrays = "buffer"
    concurrency = 2
    collect = False
    inputs, outputs = {"text": Text()}, {"y": Bytes()}
class Async(Base):
    async def stream(self, item):
        while True:
            yield bytes(1_000_000)
class Plain(Base):
    def stream(self, item):
        while True:
            yield bytes(1_000_000)
"""


def flooded(kind: str) -> Host:
    """Returns a host of such a worker, which has read one chunk."""
    source = f"{FLOODS}\nfrom stagemesh import serve\nif __name__ == '__main__':\n    serve({kind})\n"
    host = Host(source, welcome={"capabilities": ["stream"], "slots": 2})
    host.ready()
    for batch in (1, 2):
        predict(host, batch, "")
    host.expect("chunk")
    return host


def predict(host: Host, batch: int, text: str, items: int = 1, **item: Any) -> None:
    """Sends a batch whose input is a text."""
    data = text.encode()
    part = {"name": "text", "item": 0, "content_type": "text/plain", "at": 0, "size": len(data)}
    host.send(
        {"type": "predict", "batch": batch, "items": [{"id": f"r{i}", **item} for i in range(items)], "parts": [part]},
        data,
    )


# A worker that yields once and then waits, and writes how it ends.
WAITS = """
import asyncio, os, time
from stagemesh import Text, Worker

class Base(Worker):
    arrays = "buffer"
    concurrency = 2
    inputs, outputs = {"text": Text()}, {"y": Text()}
    def teardown(self):
        print("torn down", flush=True)

def note(text):
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "notes"), "a") as file:
        print(text, file=file)

class Async(Base):
    async def stream(self, item):
        try:
            yield "first"
            await asyncio.sleep(float(item["text"]))
            yield "last"
        finally:
            note("closed")

class Plain(Base):
    def stream(self, item):
        try:
            yield "first"
            end = time.monotonic() + float(item["text"])
            while time.monotonic() < end:
                time.sleep(0.001)
                yield ""
            yield "last"
        finally:
            note("closed")
"""
KINDS = ("Async", "Plain")


class ProcessTest(unittest.TestCase):
    def waits(self, kind: str, **settings: Any) -> Host:
        host = Host(
            f"{WAITS}\nfrom stagemesh import serve\nif __name__ == '__main__':\n    serve({kind})\n", **settings
        )
        return host

    def started(self, kind: str, seconds: str) -> Host:
        """Returns a host whose worker has begun a stream that takes so long."""
        host = self.waits(kind, welcome={"capabilities": ["stream"], "slots": 2})
        host.ready()
        predict(host, 1, seconds)
        self.assertEqual(host.expect("chunk")[1], b"first")
        return host

    def ended(self, host: Host) -> Dict[str, Any]:
        """Returns the next message that is not a chunk."""
        while True:
            header, _ = host.receive()
            if header["type"] != "chunk":
                return header

    def test_chunks_follow_the_protocol(self) -> None:
        for kind in KINDS:
            with self.waits(kind, welcome={"capabilities": ["stream"], "slots": 2}) as host:
                self.assertEqual(host.hello()["capabilities"], ["stream"])
                self.assertEqual(host.expect("ready")[0]["slots"], 2)
                predict(host, 7, "0")
                header, body = host.expect("chunk")
                self.assertEqual((header["batch"], header["item"], body), (7, 0, b"first"))
                self.assertEqual(header["parts"], [{"name": "y", "content_type": "text/plain", "at": 0, "size": 5}])
                self.assertEqual(host.expect("chunk")[1], b"last")
                header, body = host.expect("result")
                self.assertEqual((header["batch"], header["parts"][0]["item"], body), (7, 0, b"firstlast"))

    def test_cancel_ends_a_running_stream(self) -> None:
        for kind in KINDS:
            with self.started(kind, "60") as host:
                began = time.monotonic()
                host.send({"type": "cancel", "batch": 1, "items": [0]})
                header = self.ended(host)
                took = time.monotonic() - began
                self.assertEqual((header["type"], header["batch"]), ("result", 1))
                self.assertEqual(header["faults"][0]["item"], 0)
                self.assertLess(took, 5)
                self.assertEqual(host.lines(host.path("notes")), ["closed"])

    def test_shutdown_lets_streams_finish(self) -> None:
        for kind in KINDS:
            with self.started(kind, "0.3") as host:
                host.send({"type": "shutdown", "timeout": 20_000})
                self.assertEqual(self.ended(host)["state"], "SHUTDOWN")
                predict(host, 2, "0")  # one that was on its way is left
                self.assertEqual(self.ended(host)["batch"], 1)
                self.assertTrue(host.ended())
                self.assertEqual(host.exit_code(), 0)
                assert host.process.stdout is not None
                self.assertEqual(host.process.stdout.read(), b"torn down\n")

    def test_streams_end_after_the_shutdown_time(self) -> None:
        for kind in KINDS:
            with self.started(kind, "60") as host:
                host.process.send_signal(signal.SIGTERM)
                host.send({"type": "shutdown", "timeout": 400})
                self.assertEqual(self.ended(host)["state"], "SHUTDOWN")
                self.assertTrue(host.ended())  # without a reply to the batch, which the host keeps
                self.assertEqual(host.exit_code(), 5)
                self.assertEqual(host.lines(host.path("notes")), ["closed"])
                self.assertIn("it left batch 1 unfinished", host.stderr())

    def test_cancel_works_during_shutdown(self) -> None:
        for kind in KINDS:
            with self.started(kind, "60") as host:
                host.process.send_signal(signal.SIGTERM)
                self.assertEqual(self.ended(host)["state"], "SHUTDOWN")
                host.send({"type": "cancel", "batch": 1})
                self.assertEqual(self.ended(host)["type"], "result")
                self.assertTrue(host.ended())
                self.assertEqual(host.exit_code(), 0)

    def test_streams_end_with_the_connection(self) -> None:
        for kind in KINDS:
            with self.started(kind, "60") as host:
                host.sock.shutdown(socket.SHUT_RDWR)
                self.assertEqual(host.exit_code(), 3)
                self.assertEqual(host.lines(host.path("notes")), ["closed"])

    def test_invalid_predict_is_a_violation(self) -> None:
        for what, batches, items in (
            ("2 items for a worker that streams", [2], 2),
            ("beyond the slots", [2, 3], 1),
            ("batch 1 is there twice", [1], 1),
        ):
            with self.started("Async", "60") as host:
                for batch in batches:
                    predict(host, batch, "60", items=items)
                header = self.ended(host)
                self.assertEqual((header["type"], header["kind"]), ("error", "protocol"))
                self.assertIn(what, header["message"])
                self.assertEqual(host.exit_code(), 4)

    def test_host_without_chunks_is_refused(self) -> None:
        with self.waits("Async") as host:
            host.hello()
            header = host.expect("state")[0]
            self.assertEqual(header["state"], "ERROR")
            self.assertIn("Async.stream: this host does not accept chunks; write predict_item", header["message"])
            self.assertEqual(host.exit_code(), 1)

    def test_end_of_the_event_loop_ends_the_worker(self) -> None:
        source = """
            import asyncio
            from stagemesh import Text, Worker
            class Exits(Worker):
                arrays = "buffer"
                inputs, outputs = {"text": Text()}, {"y": Text()}
                async def stream(self, item):
                    async def leave():
                        raise SystemExit(9)
                    task = asyncio.ensure_future(leave())
                    yield "a"
                    await asyncio.sleep(60)
        """
        with Host(source, welcome={"capabilities": ["stream"]}) as host:
            host.ready()
            predict(host, 1, "")
            self.assertTrue(host.ended())
            self.assertEqual(host.exit_code(), 1)
            self.assertIn("the event loop ended: SystemExit: 9", host.stderr())

    def test_run_reports_a_crash_during_a_stream(self) -> None:
        with testing.run(Dies, patience_s=PATIENCE) as w:
            stream = w.stream({"text": ""})
            with self.assertRaisesRegex(WorkerEnded, "its process exited with 7"):
                list(stream)


class Dies(Worker):
    """Ends its process after a chunk."""

    arrays = "buffer"
    inputs = {"text": Text()}
    outputs = {"word": Text()}

    async def stream(self, item: Any) -> Any:
        yield "a"
        os._exit(7)


if __name__ == "__main__":
    unittest.main()
