"""Errors of batches and of items, through the protocol in this process."""

from __future__ import annotations

import pickle
import sys
import unittest
from concurrent.futures import ThreadPoolExecutor
from typing import Any, List

import numpy as np

from stagemesh import InvalidInput, ItemError, ItemFailed, OutOfMemory, SchemaViolation, Tensor
from stagemesh.faults import GENERAL, fault_of
from stagemesh.frames import Violation
from stagemesh.testing import BatchFailed

from .workers import ROW, XY, RunTest, errors_that_raise


class Picky(InvalidInput):
    """An error that takes other things than its base."""

    def __init__(self, limit: int) -> None:
        super().__init__("x", f"is above {limit}")
        self.limit = limit


class FaultsTest(RunTest):
    def test_validation_error_of_pydantic_is_a_schema_violation(self) -> None:
        def errors(_: Any) -> List[Any]:
            return [{"loc": ("a", i), "msg": "is no integer"} for i in range(9)] + [{"loc": (), "msg": "too long"}]

        kind = type("ValidationError", (ValueError,), {"__module__": "pydantic_core._pydantic_core", "errors": errors})

        class Strict(XY):
            def predict_item(self, item: Any) -> Any:
                if item["x"][0, 0] < 0:
                    raise kind("secret")
                return {"y": item["x"]}

        class StrictOutputs(XY):
            def predict(self, batch: Any) -> Any:
                return {"y": batch["x"]}

            def postprocess(self, item: Any, outputs: Any) -> Any:
                raise kind("secret")

        bad, good = self.batch(Strict, {"x": -ROW}, {"x": ROW})
        self.assertIsInstance(bad.error, SchemaViolation)
        message = bad.error.message  # type: ignore[union-attr]
        self.assertTrue(message.startswith("a.0: is no integer; a.1: "), message)
        self.assertTrue(message.endswith("a.7: is no integer; and 2 more"), message)
        self.assertEqual(good["y"].tolist(), [[1, 2]])
        (own,) = self.batch(StrictOutputs, {"x": ROW})
        self.assertEqual(type(own.error), ItemFailed)

    def test_item_fails_alone(self) -> None:
        class Finite(XY):
            def predict(self, batch: Any) -> Any:
                for i, item in enumerate(batch.items):
                    if not np.isfinite(item["x"]).all():
                        batch.fail(i, InvalidInput("x", "is not finite"))
                return {"y": batch["x"]}

        good, bad, also_good = self.batch(Finite, {"x": ROW}, {"x": ROW * np.nan}, {"x": ROW})
        self.assertIsInstance(bad.error, InvalidInput)
        self.assertEqual((bad.error.field, bad.error.message), ("x", "is not finite"))  # type: ignore[union-attr]
        self.assertEqual([good["y"].tolist(), also_good["y"].tolist()], [[[1, 2]], [[1, 2]]])

    def test_first_error_of_an_item_counts(self) -> None:
        errors: List[Exception] = [
            InvalidInput("x", "a"), SchemaViolation("x", "b"), OutOfMemory("c"), ItemFailed("d"), ValueError("secret"), MemoryError(),  # noqa: E501
        ]  # fmt: skip

        class Fail(XY):
            def predict(self, batch: Any) -> Any:
                for item, error in zip(batch.items, errors):
                    batch.fail(item, error)
                    batch.fail(item, ItemFailed("later"))
                    assert batch.failed(item)
                return None  # no item has outputs

        outcomes = self.batch(Fail, *({"x": ROW} for _ in errors))
        kinds = [type(o.error) for o in outcomes]
        self.assertEqual(kinds, [InvalidInput, SchemaViolation, OutOfMemory, ItemFailed, ItemFailed, OutOfMemory])
        self.assertEqual(outcomes[3].error.message, "d")  # type: ignore[union-attr]
        self.assertNotIn("secret", str(outcomes[4].error), "what was not written for callers does not reach them")

    def test_threads_may_use_a_batch_first(self) -> None:
        class Threads(XY):
            def setup(self, ctx: Any) -> None:
                self.pool = ThreadPoolExecutor(8)

            def predict(self, batch: Any) -> Any:
                list(self.pool.map(lambda i: batch.fail(i, InvalidInput("x", "no")), range(8)))
                return {"y": batch["x"]}

            def teardown(self) -> None:
                self.pool.shutdown()

        self.addCleanup(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(1e-6)
        run = self.start(Threads)
        for _ in range(100):
            for _ in range(8):
                run.add({"x": ROW})
            self.assertTrue(all(outcome.error is not None for outcome in run.predict()))

    def test_fail_refuses_wrong_arguments(self) -> None:
        for index, error, want in (
            (5, ItemFailed("x"), "there is no item 5"),
            (-1, ItemFailed("x"), "no item -1"),
            (0, "no", "InvalidInput"),
        ):

            class Wrong(XY):
                def predict(self, batch: Any, index: int = index, error: Any = error) -> Any:
                    batch.fail(index, error)

            self.fails(Wrong, want)

    def test_exception_fails_the_batch_with_its_traceback(self) -> None:
        class Raise(XY):
            def predict(self, batch: Any) -> Any:
                raise KeyError("weights")

        error = self.fails(Raise, "KeyError")
        self.assertEqual((error.kind, error.error, error.message), ("exception", "KeyError", "'weights'"))
        self.assertIn('raise KeyError("weights")', error.traceback)

    def test_error_of_a_single_item_is_its_own(self) -> None:
        class Raise(XY):
            def predict(self, batch: Any) -> Any:
                raise InvalidInput("x", "is odd")

        with self.assertRaisesRegex(InvalidInput, "is odd"):
            self.start(Raise).predict({"x": ROW})
        self.fails(Raise, "x: is odd")

    def test_sys_exit_is_an_error(self) -> None:
        class Exit(XY):
            def predict(self, batch: Any) -> Any:
                raise SystemExit(0)

        self.fails(Exit, "SystemExit")

    def test_errors_without_a_text_are_reported(self) -> None:
        class Evil(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        class Raise(XY):
            def predict(self, batch: Any) -> Any:
                raise Evil

        self.fails(Raise, "Evil: its message raised RuntimeError")

    def test_errors_may_override_init(self) -> None:
        class Silent(InvalidInput):
            def __init__(self) -> None:
                pass

        class Long(ItemFailed):
            def __init__(self, length: int) -> None:
                self.length = length

            def __str__(self) -> str:
                return f"{self.length} is too long"

        class Mute(ItemFailed):
            def __init__(self) -> None:
                self.message = Evil()  # type: ignore[assignment]

        class Frozen(ItemFailed):
            def __init__(self) -> None: ...
            def __setattr__(self, name: str, value: Any) -> None:
                raise TypeError("frozen")

        class Evil(RuntimeError):
            def __str__(self) -> str:
                raise ValueError

        class Odd(ItemFailed):
            reason = 7  # type: ignore[assignment]

        errors: List[Any] = [Silent, lambda: Long(5), Mute, Frozen, Evil, lambda: Odd("odd")]
        wanted = ["Silent", "5 is too long", "its message raised ValueError", "Frozen", GENERAL, "odd"]

        class Raise(XY):
            def predict_item(self, item: Any) -> Any:
                raise errors[item.index]()

        class Fail(XY):
            def predict(self, batch: Any) -> Any:
                for i, error in enumerate(errors):
                    batch.fail(i, error())
                return {"y": batch["x"]}

        for kind in (Raise, Fail):
            for slots in (1, 2):
                kind.concurrency = slots
                outcomes = self.batch(kind, *[{"x": ROW}] * len(errors), slots=slots)
                self.assertEqual([o.error and o.error.message for o in outcomes], wanted)

        class Whole(XY):
            def predict(self, batch: Any) -> Any:
                raise errors[int(batch["x"][0, 0])]()

        for slots in (1, 2):
            Whole.concurrency = slots
            run = self.start(Whole, slots=slots)
            for i in range(len(errors)):
                with self.assertRaises((ItemError, BatchFailed)):
                    run.predict({"x": [i, 0]})
            run.ping()

    def test_errors_whose_attributes_raise_are_reported(self) -> None:
        for error in errors_that_raise():

            class Raise(XY):
                def predict(self, batch: Any, error: Exception = error) -> Any:
                    raise error

            class RaiseItem(XY):
                def predict_item(self, item: Any, error: Exception = error) -> Any:
                    if item.index == 0:
                        raise error
                    return {"y": item["x"]}

            with self.subTest(error.args[0]):
                self.fails(Raise, "")
                bad, good = self.batch(RaiseItem, {"x": ROW}, {"x": ROW})
                self.assertEqual((type(bad.error), good["y"].tolist()), (ItemFailed, [[1, 2]]))

    def test_failed_batch_frees_its_slot(self) -> None:
        class Slots(XY):
            concurrency = 2

            def predict(self, batch: Any) -> Any:
                raise Violation("as of a host")

        self.fails(Slots, "as of a host", slots=2)

    def test_errors_can_be_pickled(self) -> None:
        for error in (InvalidInput("x", "a"), SchemaViolation("x", "b"), OutOfMemory("c"), ItemFailed("d"), Picky(7)):
            again = pickle.loads(pickle.dumps(error))
            self.assertEqual((type(again), str(again), vars(again)), (type(error), str(error), vars(error)))
            self.assertEqual(fault_of(0, again), fault_of(0, error))

    def test_out_of_memory_is_known_by_name(self) -> None:
        torchs = type("OutOfMemoryError", (RuntimeError,), {"__module__": "torch.cuda"})
        for error in (
            MemoryError(),
            OutOfMemory("no"),
            torchs("CUDA out of memory"),
            RuntimeError("CUDA out of memory. Tried"),
        ):

            class Raise(XY):
                def predict(self, batch: Any, error: Any = error) -> Any:
                    raise error

            self.assertEqual(self.fails(Raise, "").kind, "out_of_memory")

    def test_wrong_outputs_are_named(self) -> None:
        def generator() -> Any:
            yield {}

        for value, want in (
            (None, r"predict returned None; return a dict of outputs by name: 'y'"),
            ([1], "predict returned a list"),
            (generator(), "predict returned a generator; return a dict of outputs by name: 'y', or write stream"),
            ({}, "returned no output 'y'; it has none"),
            ({"y": ROW, "z": ROW}, "output 'z', which is not declared; outputs are 'y'"),
            ({"y": None}, "returned no output 'y'"),
            ({"y": ROW}, r"output 'y': got shape \[1, 2\], expected \[2, 2\]: axis 0 has one for each row"),
            ({"y": np.zeros((2, 3), "float32")}, r"got shape \[2, 3\], expected \[2, 2\]"),
            ({"y": np.zeros((2, 2, 1), "float32")}, r"got shape \[2, 2, 1\], expected \[2, 2\]"),
            ({"y": np.zeros((2, 2))}, "got dtype float64, expected FP32"),
            ({"y": [ROW]}, "got a list of 1, expected 2: one value for each item"),
            ({"y": [ROW, None]}, "output 'y' of item 1"),
            ({"y": [[1, 2]]}, r"output 'y': got shape \[1, 2\], expected \[2, 2\]: axis 0 has one for each row"),
            ({"y": [ROW, ROW[0]]}, r"of item 1: got shape \[2\], expected \[1, 2\]: axis 0 is the item's rows"),
            ({"y": "text"}, "output 'y'"),
        ):

            class Wrong(XY):
                def predict(self, batch: Any, value: Any = value) -> Any:
                    return value

            with self.subTest(want):
                error = self.fails(Wrong, want)
                self.assertEqual((error.kind, error.error, error.traceback), ("exception", "BadOutput", ""))

    def test_outputs_beyond_the_limit_fail(self) -> None:
        class Big(XY):
            outputs = {"y": Tensor("FP32", [-1, -1])}

            def predict(self, batch: Any) -> Any:
                return {"y": np.zeros((batch.rows, 5000), "float32")}

        self.fails(Big, "take 40000 bytes, and the host takes 30000 in a frame", max_frame=30000)

    def test_headers_beyond_the_limit_fail(self) -> None:
        class Chatty(XY):
            def predict(self, batch: Any) -> Any:
                batch.items[0].respond("a", "x" * (1 << 20))
                return {"y": batch["x"]}

        self.fails(Chatty, "the result's header takes")

    def test_half_a_surrogate_pair_is_no_text(self) -> None:
        class Half(XY):
            def predict(self, batch: Any) -> Any:
                batch.items[0].respond("a", "\ud800")
                return {"y": batch["x"]}

        self.fails(Half, "surrogates not allowed")

    def test_messages_do_without_halves_of_surrogate_pairs(self) -> None:
        class Raise(XY):
            def predict(self, batch: Any) -> Any:
                raise ValueError("half \ud800 \U0001f600")

        self.fails(Raise, "half \\? \U0001f600")


if __name__ == "__main__":
    unittest.main()
