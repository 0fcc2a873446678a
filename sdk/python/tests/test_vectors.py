"""The frames of sdk/vectors, with which the host is tested too."""

from __future__ import annotations

import glob
import json
import os
import socket
import unittest
from typing import Any, Dict

from stagemesh import Tensor, Worker
from stagemesh.batches import check_predict
from stagemesh.frames import Connection, Ended, Violation, load_items
from stagemesh.parts import Raw, read_parts
from stagemesh.runs import Runs
from stagemesh.session import Session, Signals, check_welcome
from stagemesh.values import arrays_of

from .support import ROOT

VECTORS = sorted(glob.glob(os.path.join(os.path.dirname(ROOT), "vectors", "*.json")))


class Anything(Worker):
    arrays = "buffer"

    def predict(self, batch: Any) -> Any:
        return {name: batch[name] for name in batch}


def read(data: bytes) -> Any:
    """Returns header and body of a frame, read off a socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, len(data) + 4096)
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        return Connection(theirs, max_body=1 << 20).read()


def take(header: Dict[str, Any], body: memoryview) -> None:
    """Handles a host's message as a ready worker does; raises Violation."""
    kind = header["type"]
    if kind == "welcome":
        check_welcome(header)
    elif kind == "predict":
        Runs(Anything(), arrays_of("buffer"), 1 << 20, lambda batch: None).batch(header, body, 0.0)
    else:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            session = Session(Connection(theirs), Anything, None, Signals(), {})
            try:
                session._handle(header)
            except Ended:
                pass  # an error of the host ends the connection


class VectorsTest(unittest.TestCase):
    def test_vectors_exist(self) -> None:
        self.assertTrue(VECTORS)

    def test_every_vector_is_read_or_refused(self) -> None:
        for path in VECTORS:
            with open(path, encoding="utf-8") as file:
                vector = json.load(file)
            with self.subTest(os.path.basename(path)):
                self.vector(vector)

    def vector(self, vector: Dict[str, Any]) -> None:
        data = bytes.fromhex(vector["frame"])
        if vector["valid"]:
            header, body = read(data)
            load_items(header)
            if vector.get("header") is not None:
                self.assertEqual(header, vector["header"])
            if vector["direction"] == "host":
                take(header, body)
            self.parts(vector, header, body)
            return
        if vector["direction"] == "worker":
            return  # a worker's mistake, which only the host can find
        with self.assertRaises((Violation, Ended), msg=vector.get("why")):
            header, body = read(data)
            load_items(header)
            take(header, body)

    def parts(self, vector: Dict[str, Any], header: Dict[str, Any], body: memoryview) -> None:
        """Checks that the bytes of the parts are at the place that the header names."""
        entries = list(header.get("parts", []))
        for example in header.get("spec", {}).get("examples", []):
            entries += example["inputs"]
        wanted = vector.get("parts") or []
        self.assertEqual(len(entries), len(wanted))
        for entry, want in zip(entries, wanted):
            found = read_parts([{**entry, "item": 0}], body, 1)[want["name"]]
            assert isinstance(found, list)
            part = found[0]
            assert part is not None
            data = part.data if isinstance(part, Raw) else body[part.at : part.stop]
            self.assertEqual(bytes(data).hex(), want["data"])
            self.assertEqual(entry.get("item"), want.get("item"))
            if isinstance(part, Raw):
                self.assertEqual((part.datatype, list(part.shape)), (want["datatype"], want["shape"]))
            else:
                self.assertEqual(part.content_type, want.get("content_type") or "")

    def test_hello_has_the_keys_of_the_vectors(self) -> None:
        """The hello of the vectors has the keys of this library's."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            session = Session(Connection(theirs), Anything, None, Signals(), {})
            ours.shutdown(socket.SHUT_WR)
            with self.assertRaises(Ended):
                session._hello()
            theirs.shutdown(socket.SHUT_WR)
            hello, _ = Connection(ours).read()
        with open(os.path.join(os.path.dirname(ROOT), "vectors", "hello.json"), encoding="utf-8") as file:
            self.assertLessEqual(hello.keys(), json.load(file)["header"].keys() | {"sdk", "capabilities"})


class MessagesTest(unittest.TestCase):
    def test_parameters_keep_whole_numbers_whole(self) -> None:
        header = {"type": "predict", "batch": 0, "items": [{"id": "a", "parameters": {"n": 1, "x": 1.0}}], "parts": []}
        items = check_predict(json.loads(json.dumps(header)))
        self.assertEqual([type(v) for v in items[0]["parameters"].values()], [int, float])

    def test_specs_are_sent_without_defaults(self) -> None:
        self.assertEqual(Tensor("FP32", [-1, 2]).wire("x"), {"name": "x", "datatype": "FP32", "shape": [-1, 2]})


if __name__ == "__main__":
    unittest.main()
