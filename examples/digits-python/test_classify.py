"""Classifies the fifty images of ../digits with the worker, in a process."""

from __future__ import annotations

import struct
import subprocess
import sys
import unittest
import zlib
from pathlib import Path

import numpy as np

from stagemesh import InvalidInput, testing

HERE = Path(__file__).resolve().parent
WORKER = str(HERE / "classify.py")


def pixels(path: Path) -> np.ndarray:
    """Returns an image of ../digits as the worker takes it: FP32 [64]."""
    data, at, packed = path.read_bytes(), 8, b""
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + size]
        at += 12 + size
    rows = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(32, 33)
    assert not rows[:, 0].any(), "a PNG with filters"
    grey = rows[:, 1:].reshape(8, 4, 8, 4).mean(axis=(1, 3))
    return (grey / 255).astype(np.float32).ravel()


class ClassifyTest(unittest.TestCase):
    def test_all_images_are_classified(self) -> None:
        paths = sorted((HERE.parent / "digits" / "images").glob("*.png"))
        self.assertEqual(len(paths), 50)
        images = np.stack([pixels(path) for path in paths])
        wanted = [int(path.stem.split("-")[1]) for path in paths]
        with testing.run(WORKER, max_size=50) as worker:
            for start, stop in ((0, 1), (1, 20), (20, 50)):
                worker.add({"x": images[start:stop]})
            got = [int(digit) for outcome in worker.predict() for digit in outcome["p"].argmax(axis=1)]
        self.assertEqual(got, wanted)

    def test_the_check_finds_nothing_wrong(self) -> None:
        command = [sys.executable, "-m", "stagemesh.check", WORKER]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_bad_pixel_fails_its_item_alone(self) -> None:
        with testing.run(WORKER) as worker:
            worker.add({"x": np.zeros((2, 64), "float32")})
            worker.add({"x": np.full((1, 64), np.nan, "float32")})
            worker.add({"x": np.zeros((1, 64), "float32")})
            first, second, third = worker.predict()
        self.assertIsInstance(second.error, InvalidInput)
        np.testing.assert_array_equal(first["p"][0], third["p"][0])
        np.testing.assert_allclose(first["p"].sum(axis=1), 1, rtol=1e-6)


if __name__ == "__main__":
    unittest.main()
