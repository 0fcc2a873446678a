"""Workers that run in a thread of the test process."""

from __future__ import annotations

import unittest
from typing import Any, List, Mapping, Optional, Type

import numpy as np

from stagemesh import ItemError, Tensor, Worker, testing
from stagemesh.testing import BatchFailed, Outcome

ROW = np.array([[1, 2]], "float32")


class XY(Worker):
    """x, FP32 [-1, 2] in; y the same out."""

    inputs: Mapping[str, Any] = {"x": Tensor("FP32", [-1, 2])}
    outputs: Mapping[str, Any] = {"y": Tensor("FP32", [-1, 2])}


class RunTest(unittest.TestCase):
    def start(self, kind: Type[Worker], **settings: Any) -> testing.Run:
        run = testing.run(kind, process=False, patience_s=30, **settings).start()
        self.addCleanup(run.stop)
        return run

    def batch(self, kind: Type[Worker], *inputs: Mapping[str, Any], **settings: Any) -> List[Outcome]:
        run = self.start(kind, **settings)
        for one in inputs:
            run.add(one)
        return run.predict()

    def fails(
        self, kind: Type[Worker], want: str, inputs: Optional[Mapping[str, Any]] = None, **settings: Any
    ) -> BatchFailed:
        """Checks that a batch of two fails as a whole, and that the worker goes on."""
        run = self.start(kind, **settings)
        for _ in range(2):
            with self.assertRaisesRegex(BatchFailed, want) as caught:
                for _ in range(2):
                    run.add({"x": ROW} if inputs is None else inputs)
                run.predict()
        run.ping()
        return caught.exception


def errors_that_raise() -> List[Exception]:
    """Returns errors with attributes that raise."""

    class Wrapper(Exception):
        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)  # RecursionError, as _inner is missing after pickling

    class Text(str):
        def __getitem__(self, key: Any) -> Any:
            raise RuntimeError("of the text")

    class OwnText(Exception):
        def __str__(self) -> str:
            return Text("text")

    class Named(type):
        @property
        def __name__(cls) -> Any:  # type: ignore[override]
            raise RuntimeError("of the class")

    class NoName(Exception, metaclass=Named): ...

    class NoTraceback(Exception):
        def with_traceback(self, trace: Any) -> Any:
            raise RuntimeError("of the traceback")

    class NoFields(ItemError):
        @property
        def reason(self) -> Any:  # type: ignore[override]
            raise RuntimeError("of the reason")

        @property
        def message(self) -> Any:  # type: ignore[override]
            raise RuntimeError("of the message")

        field = message

        def __init__(self, *args: Any) -> None: ...

    return [kind(f"error {i}") for i, kind in enumerate((Wrapper, OwnText, NoName, NoTraceback, NoFields))]
