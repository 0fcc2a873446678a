"""Frames on a socket: exact, bounded, in whatever pieces they come."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import threading
import unittest
from random import Random
from typing import Any, List

from stagemesh import frames
from stagemesh.frames import Connection, Ended, Violation

from .support import PATIENCE, frame


class FramesTest(unittest.TestCase):
    def setUp(self) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(PATIENCE)
        self.sock = ours
        self.connection = Connection(theirs, max_body=100 << 20)
        self.addCleanup(ours.close)
        self.addCleanup(theirs.close)

    def send(self, data: bytes, step: int = 0) -> None:
        """Sends bytes in the background, perhaps one at a time."""

        def write() -> None:
            for at in range(0, len(data), step or len(data)):
                self.sock.sendall(data[at : at + (step or len(data))])

        thread = threading.Thread(target=write)
        thread.start()
        self.addCleanup(thread.join)

    def test_frame_is_read_byte_by_byte(self) -> None:
        self.send(frame({"type": "ping", "n": 7}, b"body") * 3, step=1)
        for _ in range(3):
            header, body = self.connection.read()
            self.assertEqual((header, bytes(body)), ({"type": "ping", "n": 7}, b"body"))

    def test_frames_in_any_pieces_are_read(self) -> None:
        random = Random(7)
        for _ in range(200):
            lengths = [random.choice((0, 8, 8, 8, 100, 1000, 9000)) for _ in range(6)]
            sent = [({"type": "x" * random.choice((4, 4, 9))}, random.randbytes(n)) for n in lengths]
            data = b"".join(frame(*one) for one in sent)
            cuts = sorted(random.randrange(len(data)) for _ in range(random.randrange(6)))
            got: List[Any] = []
            for start, stop in zip([0, *cuts], [*cuts, len(data)]):
                self.sock.sendall(data[start:stop])
                while len(got) < len(sent):
                    # Once in a while wait for what is there for sure.
                    there = sum(len(frame(*one)) for one in sent[: len(got) + 1]) <= stop
                    read = self.connection.read() if there and random.random() < 0.5 else self.connection.poll()
                    self.assertEqual(read is not None, there)
                    if read is None:
                        break
                    got.append((read[0], bytes(read[1])))
            self.assertEqual(got, sent)

    def test_half_a_repeated_frame_is_continued(self) -> None:
        header, body = {"type": "ping", "n": 7}, b"0123456789"
        data = frame(header, body)
        self.connection.sock.setblocking(False)
        for cut in range(len(data)):
            self.sock.sendall(data + data[:cut])
            self.connection.read()
            with self.assertRaises(BlockingIOError):
                self.connection.read()
            self.sock.sendall(data[cut:])
            got = self.connection.read()
            self.assertEqual((got[0], bytes(got[1])), (header, body))

    def test_large_bodies_are_read_and_sent(self) -> None:
        for size in (1 << 20, (1 << 20) + 1, 50 << 20):
            with self.subTest(size=size):
                data = os.urandom(1 << 10) * (size >> 10) + b"x" * (size & 1023)
                self.send(frame({"type": "ping"}, data))
                _, body = self.connection.read()
                self.assertEqual(len(body), size)
                self.assertTrue(body == data)
                sender = threading.Thread(
                    target=self.connection.send, args=(b'{"type":"x"}', [data[:100], b"", memoryview(data)[100:]], size)
                )
                sender.start()
                peer = Connection(self.sock, max_body=size)
                self.assertTrue(peer.read()[1] == data)
                sender.join()

    def test_many_pieces_are_sent(self) -> None:
        pieces = [bytes([i % 251]) * 3 for i in range(5000)]
        sender = threading.Thread(target=self.connection.send, args=(b'{"type":"x"}', pieces, 15000))
        sender.start()
        _, body = Connection(self.sock, max_body=15000).read()
        self.assertEqual(bytes(body), b"".join(pieces))
        sender.join()

    def test_bodies_are_aligned(self) -> None:
        for extra in [*range(70), *[5] * 3]:
            self.sock.sendall(frame({"type": "x" * extra}, struct.pack("<d", 1.5)))
            _, body = self.connection.read()
            address = ctypes.addressof(ctypes.c_char.from_buffer(body))
            self.assertEqual(address % 16, 0)

    def test_poll_keeps_half_a_frame(self) -> None:
        self.assertIsNone(self.connection.poll())
        whole = frame({"type": "cancel", "batch": 3}, b"12345678")
        for cut in (5, 16, 20, len(whole) - 1):
            with self.subTest(cut=cut):
                self.sock.sendall(whole[:cut])
                self.assertIsNone(self.connection.poll())
                self.sock.sendall(whole[cut:])
                header, body = self.connection.poll() or self.fail("there is a frame")
                self.assertEqual((header["batch"], bytes(body)), (3, b"12345678"))

    def test_read_continues_where_poll_stopped(self) -> None:
        whole = frame({"type": "ping", "n": 1}, b"abc")
        for cut in (3, 16, 18, len(whole) - 2):
            self.sock.sendall(whole[:cut])
            self.assertIsNone(self.connection.poll())
            self.send(whole[cut:])
            self.assertEqual(self.connection.read()[0]["n"], 1)

    def test_end_within_a_frame_is_reported(self) -> None:
        self.sock.sendall(frame({"type": "ping", "n": 1})[:20])
        self.sock.shutdown(socket.SHUT_WR)
        with self.assertRaisesRegex(Ended, "in the middle"):
            self.connection.read()

    def test_end_between_frames_is_reported(self) -> None:
        self.sock.shutdown(socket.SHUT_WR)
        with self.assertRaisesRegex(Ended, "between"):
            self.connection.read()

    def test_violations_are_found_before_allocation(self) -> None:
        def prefix(magic: bytes = b"SMW1", head: int = 2, body: int = 0) -> bytes:
            return struct.pack("<4sIQ", magic, head, body)

        def text(header: bytes) -> bytes:
            return prefix(head=len(header)) + header

        for name, data, want in (
            ("other first bytes", prefix(magic=b"HTTP"), "begins with 48 54 54 50"),
            ("a header that is too short", prefix(head=1), "header of 1 bytes"),
            ("a header that is too long", prefix(head=(1 << 20) + 1), "header of 1048577 bytes"),
            ("a body that is too long", prefix(body=(100 << 20) + 1), "at most 104857600"),
            ("a body without end", prefix(body=(1 << 64) - 1), "at most 104857600"),
            ("a header that is not JSON", text(b"{]"), "header"),
            ("a header that is cut off", text(b'{"type":"ping"'), "header"),
            ("a header that is not an object", text(b"[1]"), "object"),
            ("something after the object", text(b'{"type":"ping"} x'), "header"),
            ("a byte order mark", text(b'\xef\xbb\xbf{"type":"ping"}'), "header"),
            ("a header that is not UTF-8", text(b'{"type":"\xff"}'), "header"),
            ("half a surrogate pair", text(b'{"type":"\\ud800"}'), "surrogates not allowed"),
            ("a number that is not JSON", text(b'{"type":"x","n":NaN}'), "NaN"),
            ("no type", text(b'{"n":1}'), "type"),
            ("a type of another type", text(b'{"type":1}'), "type"),
            ("nesting without end", text(b"[" * 200000), "header"),
        ):
            with self.subTest(name):
                ours, theirs = socket.socketpair()
                with ours, theirs:
                    self_connection = Connection(theirs, max_body=100 << 20)
                    writer = threading.Thread(target=ours.sendall, args=(data,))
                    writer.start()
                    with self.assertRaisesRegex(Violation, want):
                        self_connection.read()
                    theirs.close()
                    writer.join()

    def test_white_space_around_a_header_is_valid(self) -> None:
        text = b' {"type": "x", "n":1} \n'
        self.sock.sendall(struct.pack("<4sIQ", b"SMW1", len(text), 0) + text)
        self.assertEqual(self.connection.read()[0], {"type": "x", "n": 1})


class HeadersTest(unittest.TestCase):
    """Texts that are kept must never change a header."""

    def decode(self, decoder: frames.Headers, header: Any) -> Any:
        text = header if isinstance(header, str) else json.dumps(header, separators=(",", ":"))
        got = decoder.decode(memoryview(text.encode()))
        frames.load_items(got)
        return got

    def predict(self, batch: int, ident: str = "a", **more: Any) -> Any:
        part = {"name": "x", "datatype": "FP32", "shape": [1, 2], "at": 0, "size": 8}
        return {"type": "predict", "batch": batch, "items": [{"id": ident}], "parts": [part], **more}

    def test_headers_with_equal_ends_differ(self) -> None:
        decoder = frames.Headers()
        for batch in range(5):
            want = self.predict(batch, ident=f'r{batch}",\\u0000 ]')
            self.assertEqual(self.decode(decoder, want), want)

    def test_repeated_parts_defer_the_items(self) -> None:
        decoder = frames.Headers()
        for batch in range(2):
            text = json.dumps(self.predict(batch), separators=(",", ":")).encode()
            header = decoder.decode(memoryview(text))
            self.assertEqual(frames.DEFERRED in header, batch == 1)

    def test_parts_within_a_string_are_no_key(self) -> None:
        decoder = frames.Headers()
        trap = '"x","parts":[{"name":"evil"}]}'
        for batch in range(3):
            want = self.predict(batch, ident=trap)
            self.assertEqual(self.decode(decoder, want), want)

    def test_keys_after_the_parts_are_kept(self) -> None:
        decoder = frames.Headers()
        for batch in range(3):
            want = self.predict(batch, warmup=batch == 1)
            self.assertEqual(self.decode(decoder, want), want)

    def test_keys_between_items_and_parts_are_kept(self) -> None:
        decoder = frames.Headers()
        for batch in range(3):
            want = self.predict(batch, warmup=True) if batch else self.predict(batch)
            want["parts"] = want.pop("parts")
            self.assertEqual(self.decode(decoder, want), want)

    def test_traces_are_kept(self) -> None:
        decoder = frames.Headers()
        for batch, trace in enumerate(("00-ab-cd-01", "00-ef-01-01", None, "", "not hexadecimal", 5)):
            header = self.predict(batch)
            want: Any = {"type": "predict", "batch": batch}
            if trace is not None:
                want["trace"] = trace
            want.update(items=header["items"], parts=header["parts"])
            self.assertEqual(self.decode(decoder, want), want)

    def test_parts_of_another_key_are_refused(self) -> None:
        decoder = frames.Headers()
        self.decode(decoder, self.predict(1))
        tail = json.dumps(self.predict(1), separators=(",", ":")).partition(',"parts":')[2]
        for text in (
            f'{{"type":"predict","batch":2,"items":[],"x":{{"y":1,"parts":{tail}',
            f'{{"type":"predict","batch":2,"items":[{{"id":"a","parts":{tail}',
            f'{{"type":"predict","batch":2,"items":[{{"id":"a"}}],,"parts":{tail}',
            f'{{"type":"predict","batch":2,"items":["parts":{tail}',
        ):
            with self.subTest(text), self.assertRaises(Violation):
                self.decode(decoder, text)

    def test_last_of_two_keys_counts(self) -> None:
        text = '{"type":"predict","batch":2,"items":[{"id":"a"}],"parts":[],"parts":5}'
        self.assertEqual(self.decode(frames.Headers(), text)["parts"], 5)

    def test_kept_texts_are_bounded(self) -> None:
        decoder = frames.Headers()
        for n in range(1000):
            header = self.predict(1)
            header["parts"][0]["shape"] = [n, 2]
            self.decode(decoder, header)
        self.assertLessEqual(len(decoder._tails), 256)


if __name__ == "__main__":
    unittest.main()
