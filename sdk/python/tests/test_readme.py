"""The code of README.md runs."""

from __future__ import annotations

import os
import re
import tempfile
import unittest
from typing import Any, Dict, List

import numpy as np

import stagemesh
from stagemesh import InvalidInput, testing

from .support import ROOT


def blocks() -> List[str]:
    """Returns the blocks of Python in README.md."""
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        return re.findall(r"```python\n(.*?)```", file.read(), re.DOTALL)


def define(block: str, **names: Any) -> Dict[str, Any]:
    """Runs a block that defines a worker; returns its names."""
    space = {**{name: getattr(stagemesh, name) for name in stagemesh.__all__}, **names, "__name__": "readme"}
    exec(block, space)
    return space


MODEL = """
import asyncio

class Model:
    async def generate(self, prompt):
        for word in prompt.split():
            await asyncio.sleep(0)
            yield word + " "

"""


class ReadmeTest(unittest.TestCase):
    def test_first_worker_and_its_test_run(self) -> None:
        first, *_, test, _ = blocks()
        self.assertLessEqual(len(first.splitlines()), 20)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "classify.py")
            with open(path, "w") as file:
                file.write(first)
            weights = os.path.join(folder, "w.npy")
            np.save(weights, np.ones((64, 10), "float32"))
            test = test.replace('"classify.py"', repr(path)).replace('"w.npy"', repr(weights))
            good = np.ones((1, 64), "float32")
            space: Dict[str, Any] = {"good": good, "bad": good * np.nan}
            exec(test, space)
        self.assertEqual(space["first"]["p"].tolist(), [[64.0] * 10])

    def test_single_items_run(self) -> None:
        count = define(blocks()[1])["Count"]
        with testing.run(count, process=False, arrays="buffer") as w:
            self.assertEqual(w.predict({"text": "a b c"}), {"count": 3})

    def test_streams_run(self) -> None:
        *_, test = blocks()
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "chat.py")
            with open(path, "w") as file:
                file.write("from stagemesh import *\n" + MODEL + blocks()[2].replace("self.model", "Model()"))
            test = test.replace('"chat.py"', repr(path + ":Chat")).replace("Hello", "Hello there")
            space: Dict[str, Any] = {}
            exec(test, {"testing": testing}, space)
        self.assertEqual((space["words"], space["whole"]), (["Hello ", "there "], "Hello there "))

    def test_preprocess_and_postprocess_run(self) -> None:
        def pixels(image: bytes) -> Any:
            if not image:
                raise InvalidInput("image", "is empty")
            return np.full((1, 64), len(image), "float32")

        read = define(blocks()[3], pixels=pixels)["Read"]
        read.net = lambda self, x: np.eye(10)[(x[:, 0] % 10).astype(int)]
        with testing.run(read, process=False) as w:
            for image in (b"123", b"", b"1234"):
                w.add({"image": image})
            first, second, third = w.predict()
        self.assertEqual((first["digit"], third["digit"]), (3, 4))
        self.assertIsInstance(second.error, InvalidInput)


if __name__ == "__main__":
    unittest.main()
