"""What becomes of batches and their items, through the protocol in this process."""

from __future__ import annotations

import array
import pickle
import struct
import sys
import threading
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, List, Mapping, Optional, Type

import numpy as np

from stagemesh import (
    Bytes,
    InvalidInput,
    ItemError,
    ItemFailed,
    Json,
    OutOfMemory,
    SchemaViolation,
    Tensor,
    Text,
    Worker,
    testing,
)
from stagemesh.faults import GENERAL, fault_of
from stagemesh.frames import Violation
from stagemesh.testing import BatchFailed, Outcome, WorkerEnded

ROW = np.array([[1, 2]], "float32")


class XY(Worker):
    """x, FP32 [-1, 2] in; y the same out."""

    inputs: Mapping[str, Any] = {"x": Tensor("FP32", [-1, 2])}
    outputs: Mapping[str, Any] = {"y": Tensor("FP32", [-1, 2])}


class RunsTest(unittest.TestCase):
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


class BatchTest(RunsTest):
    def test_items_are_joined_and_cut_again(self) -> None:
        class Twice(XY):
            def predict(self, batch: Any) -> Any:
                assert batch["x"].shape == (6, 2) and batch.rows == 6 and len(batch) == 3
                assert [item.rows for item in batch.items] == [1, 3, 2]
                assert (batch.items[1]["x"] == batch["x"][batch.items[1].slice]).all()
                return {"y": batch["x"] * 2}

        xs = [np.arange(2 * n, dtype="float32").reshape(n, 2) for n in (1, 3, 2)]
        for outcome, x in zip(self.batch(Twice, *({"x": x} for x in xs)), xs):
            self.assertEqual(outcome["y"].tolist(), (x * 2).tolist())

    def test_the_same_shapes_again_and_others_between(self) -> None:
        class Twice(XY):
            def predict(self, batch: Any) -> Any:
                return {"y": batch["x"] * np.float32(2)}

        for arrays in ("numpy", "buffer"):
            run = self.start(Twice if arrays == "numpy" else Lists, arrays=arrays)
            for rows in (1, 2, 1, 1, 2, 3, 2, 1):
                x = np.arange(2 * rows, dtype="float32").reshape(rows, 2)
                got = run.predict({"x": x if arrays == "numpy" else x.tolist()})["y"]
                self.assertEqual(got.tolist(), (x * 2).tolist())

    def test_a_list_may_have_rows_or_items(self) -> None:
        forms: Dict[str, Callable[[Any], Any]] = {
            "rows of numbers": lambda x: x,
            "rows that are arrays": lambda x: [array.array("f", row) for row in x],
            "rows that are buffers": lambda x: [memoryview(array.array("f", row)) for row in x],
            "items": lambda x: [x[:1], x[1:4], x[4:]],
        }
        xs = [np.arange(2 * n, dtype="float32").reshape(n, 2) for n in (1, 3, 2)]
        for arrays in ("numpy", "buffer"):
            for name, form in forms.items():

                class Listed(XY):
                    def predict(self, batch: Any, form: Any = form) -> Any:
                        return {"y": form(batch["x"].tolist())}

                with self.subTest(f"{arrays}, {name}"):
                    got = self.batch(Listed, *({"x": x.tolist()} for x in xs), arrays=arrays)
                    self.assertEqual([outcome["y"].tolist() for outcome in got], [x.tolist() for x in xs])

    def test_what_items_say(self) -> None:
        seen: List[Any] = []

        class Look(XY):
            def predict(self, batch: Any) -> Any:
                for item in batch.items:
                    seen.append((item.id, dict(item.parameters), dict(item.metadata), item.deadline))
                    item.respond("seen", item.id)
                return {"y": batch["x"]}

        run = self.start(Look)
        run.add(
            {"x": ROW}, id="a", parameters={"top": 3, "p": 0.5, "on": True, "s": "t"}, metadata={"m": "1"}, timeout=5000
        )
        run.add({"x": ROW}, id="b")
        first, second = run.predict()
        self.assertEqual(seen[0][:3], ("a", {"top": 3, "p": 0.5, "on": True, "s": "t"}, {"m": "1"}))
        self.assertEqual(type(seen[0][1]["top"]), int)
        self.assertAlmostEqual(seen[0][3], time.monotonic() + 5, delta=4)
        self.assertEqual(seen[1], ("b", {}, {}, None))
        self.assertEqual((first.metadata, second.metadata), ({"seen": "a"}, {"seen": "b"}))

    def test_items_are_not_to_be_kept(self) -> None:
        kept: List[Any] = []

        class Keep(XY):
            def predict(self, batch: Any) -> Any:
                kept.append(batch.items[0])
                return {"y": batch["x"]}

        run = self.start(Keep)
        run.predict({"x": ROW})
        run.ping()
        self.assertTrue(kept[0].id)
        with self.assertRaisesRegex(ReferenceError, "its batch is over"):
            kept[0]["x"]

    def test_the_batch_is_freed_when_it_is_over(self) -> None:
        import gc
        import weakref

        refs: List[Any] = []

        class Watch(XY):
            def predict(self, batch: Any) -> Any:
                refs.append(weakref.ref(batch))
                batch.items[0]["x"]
                batch.fail(0, InvalidInput("x", "no"))
                try:
                    raise ValueError
                except ValueError as error:
                    batch.fail(1, error)
                return {"y": batch["x"]}

        gc.disable()
        self.addCleanup(gc.enable)
        run = self.start(Watch)
        run.add({"x": ROW})
        run.add({"x": ROW})
        run.predict()
        run.ping()
        self.assertIsNone(refs[0](), "a cycle keeps the bytes of the batch")

    def test_unknown_inputs_are_named(self) -> None:
        class Typo(XY):
            def predict(self, batch: Any) -> Any:
                return {"y": batch["z"]}

        self.fails(Typo, "'z': the batch has 'x'")

    def test_anything_goes_where_nothing_is_declared(self) -> None:
        class Free(Worker):
            def predict(self, batch: Any) -> Any:
                return {name: batch[name] for name in batch}

        class FreeBuffer(Free):
            arrays = "buffer"

        got = self.batch(Free, {"a": np.arange(3), "b": b"blob"})[0].outputs
        self.assertEqual((got["a"].tolist(), got["b"]), ([0, 1, 2], b"blob"))
        got = self.batch(FreeBuffer, {"a": memoryview(struct.pack("<2i", 1, 2)).cast("i")})[0].outputs
        self.assertEqual(got["a"].tolist(), [1, 2])

    def test_optional_inputs_and_outputs(self) -> None:
        class Option(Worker):
            inputs = {"x": Tensor("FP32", [-1, 2]), "note": Text(optional=True)}
            outputs = {"y": Tensor("FP32", [-1, 2]), "echo": Text(optional=True)}

            def predict(self, batch: Any) -> Any:
                return {"y": batch["x"], "echo": batch.get("note")}

        without, with_note = self.batch(Option, {"x": ROW}, {"x": ROW, "note": "hi"})
        self.assertEqual((sorted(without.outputs), with_note["echo"]), (["y"], "hi"))
        self.assertEqual(sorted(self.batch(Option, {"x": ROW})[0].outputs), ["y"])


class Lists(XY):
    arrays = "buffer"

    def predict(self, batch: Any) -> Any:
        doubled: Any = np.array(batch["x"].tolist(), "float32") * np.float32(2)
        return {"y": memoryview(doubled)}


class Picky(InvalidInput):
    """An error that takes other things than its base."""

    def __init__(self, limit: int) -> None:
        super().__init__("x", f"is above {limit}")
        self.limit = limit


class FaultsTest(RunsTest):
    def test_an_item_fails_alone(self) -> None:
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

    def test_each_reason_keeps_its_class_and_the_first_error_counts(self) -> None:
        errors: List[Exception] = [
            InvalidInput("x", "a"), SchemaViolation("x", "b"), OutOfMemory("c"), ItemFailed("d"), ValueError("secret"), MemoryError(),  # noqa: E501
        ]  # fmt: skip

        class Fail(XY):
            def predict(self, batch: Any) -> Any:
                for item, error in zip(batch.items, errors):
                    batch.fail(item, error)
                    batch.fail(item, ItemFailed("later"))
                    assert batch.failed(item)
                return None  # nobody has outputs

        outcomes = self.batch(Fail, *({"x": ROW} for _ in errors))
        kinds = [type(o.error) for o in outcomes]
        self.assertEqual(kinds, [InvalidInput, SchemaViolation, OutOfMemory, ItemFailed, ItemFailed, OutOfMemory])
        self.assertEqual(outcomes[3].error.message, "d")  # type: ignore[union-attr]
        self.assertNotIn("secret", str(outcomes[4].error), "what was not written for callers does not reach them")

    def test_threads_may_be_the_first_to_look_at_a_batch(self) -> None:
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

    def test_fail_refuses_what_is_no_item_and_no_error(self) -> None:
        for index, error, want in (
            (5, ItemFailed("x"), "there is no item 5"),
            (-1, ItemFailed("x"), "no item -1"),
            (0, "no", "InvalidInput"),
        ):

            class Wrong(XY):
                def predict(self, batch: Any, index: int = index, error: Any = error) -> Any:
                    batch.fail(index, error)

            self.fails(Wrong, want)

    def test_an_exception_fails_the_batch_with_its_traceback(self) -> None:
        class Raise(XY):
            def predict(self, batch: Any) -> Any:
                raise KeyError("weights")

        error = self.fails(Raise, "KeyError")
        self.assertEqual((error.kind, error.error, error.message), ("exception", "KeyError", "'weights'"))
        self.assertIn('raise KeyError("weights")', error.traceback)

    def test_a_declared_error_of_a_batch_of_one_is_its_items(self) -> None:
        class Raise(XY):
            def predict(self, batch: Any) -> Any:
                raise InvalidInput("x", "is odd")

        with self.assertRaisesRegex(InvalidInput, "is odd"):
            self.start(Raise).predict({"x": ROW})
        self.fails(Raise, "x: is odd")

    def test_exits_of_the_interpreter_are_errors_too(self) -> None:
        class Exit(XY):
            def predict(self, batch: Any) -> Any:
                raise SystemExit(0)

        self.fails(Exit, "SystemExit")

    def test_errors_that_cannot_be_printed(self) -> None:
        class Evil(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        class Raise(XY):
            def predict(self, batch: Any) -> Any:
                raise Evil

        self.fails(Raise, "Evil: its message raised RuntimeError")

    def test_errors_whose_init_is_their_own(self) -> None:
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
                with self.assertLogs("stagemesh.worker", "ERROR"):
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

    def test_whatever_goes_wrong_in_a_slot_it_is_given_back(self) -> None:
        class Slots(XY):
            concurrency = 2

            def predict(self, batch: Any) -> Any:
                raise Violation("as of a host")

        self.fails(Slots, "as of a host", slots=2)

    def test_errors_come_back_from_a_pool_of_processes(self) -> None:
        for error in (InvalidInput("x", "a"), SchemaViolation("x", "b"), OutOfMemory("c"), ItemFailed("d"), Picky(7)):
            again = pickle.loads(pickle.dumps(error))
            self.assertEqual((type(again), str(again), vars(again)), (type(error), str(error), vars(error)))
            self.assertEqual(fault_of(0, again), fault_of(0, error))

    def test_out_of_memory_by_class_and_by_name(self) -> None:
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

    def test_what_is_returned_instead_of_outputs(self) -> None:
        def generator() -> Any:
            yield {}

        for value, want in (
            (None, r"predict returned None; return a dict of outputs by name: 'y'"),
            ([1], "predict returned a list"),
            (generator(), "predict returned a generator; return a dict of outputs by name: 'y', or write stream"),
            ({}, "returned no output 'y'; it has none"),
            ({"y": ROW, "z": ROW}, "output 'z', which is not declared; outputs are 'y'"),
            ({"y": None}, "returned no output 'y'"),
            ({"y": ROW}, r"output 'y': got shape \[1, 2\], wanted \[2, 2\]: axis 0 has one for each row"),
            ({"y": np.zeros((2, 3), "float32")}, r"got shape \[2, 3\], wanted \[2, 2\]"),
            ({"y": np.zeros((2, 2, 1), "float32")}, r"got shape \[2, 2, 1\], wanted \[2, 2\]"),
            ({"y": np.zeros((2, 2))}, "got dtype float64, wanted FP32"),
            ({"y": [ROW]}, "got a list of 1, wanted 2: one value for each item"),
            ({"y": [ROW, None]}, "output 'y' of item 1"),
            ({"y": [[1, 2]]}, r"output 'y': got shape \[1, 2\], wanted \[2, 2\]: axis 0 has one for each row"),
            ({"y": [ROW, ROW[0]]}, r"of item 1: got shape \[2\], wanted \[1, 2\]: axis 0 is the item's rows"),
            ({"y": "text"}, "output 'y'"),
        ):

            class Wrong(XY):
                def predict(self, batch: Any, value: Any = value) -> Any:
                    return value

            with self.subTest(want):
                error = self.fails(Wrong, want)
                self.assertEqual((error.kind, error.error, error.traceback), ("exception", "BadOutput", ""))

    def test_outputs_beyond_the_frame_are_an_error(self) -> None:
        class Big(XY):
            outputs = {"y": Tensor("FP32", [-1, -1])}

            def predict(self, batch: Any) -> Any:
                return {"y": np.zeros((batch.rows, 5000), "float32")}

        self.fails(Big, "take 40000 bytes, and the host takes 30000 in a frame", max_frame=30000)

    def test_headers_beyond_the_frame_are_an_error(self) -> None:
        class Chatty(XY):
            def predict(self, batch: Any) -> Any:
                batch.items[0].respond("a", "x" * (1 << 20))
                return {"y": batch["x"]}

        self.fails(Chatty, "the result's header takes")


class ItemsTest(RunsTest):
    def test_predict_item_isolates_each(self) -> None:
        class One(XY):
            def predict_item(self, item: Any) -> Any:
                x = item["x"]
                if x[0, 0] == 1:
                    raise InvalidInput("x", "is one")
                if x[0, 0] == 2:
                    raise ZeroDivisionError("secret")
                if x[0, 0] == 3:
                    return None
                if x[0, 0] == 4:
                    raise MemoryError
                return {"y": x + 1}

        with self.assertLogs("stagemesh.worker", "ERROR") as logs:
            outcomes = self.batch(One, *({"x": np.full((1, 2), n, "float32")} for n in range(6)))
        self.assertEqual(outcomes[0]["y"].tolist(), [[1, 1]])
        self.assertEqual(outcomes[5]["y"].tolist(), [[6, 6]])
        self.assertEqual([type(o.error) for o in outcomes[1:5]], [InvalidInput, ItemFailed, ItemFailed, OutOfMemory])
        self.assertNotIn("secret", str(outcomes[2].error))
        self.assertIn("ZeroDivisionError", logs.output[0])
        self.assertIn("predict_item returned None", logs.output[1])

    def test_outputs_of_items_are_sent_as_one(self) -> None:
        class One(XY):
            def predict_item(self, item: Any) -> Any:
                return {"y": item["x"]}

        run = self.start(One)
        run.send([testing.Request({"x": ROW}) for _ in range(3)])
        header, body = run._read("result")
        self.assertEqual([(p.get("item"), p["shape"]) for p in header["parts"]], [(None, [3, 2])])
        self.assertEqual(bytes(body), ROW.tobytes() * 3)

    def test_preprocess_and_postprocess_stand_around_predict(self) -> None:
        class Around(Worker):
            inputs = {"text": Text()}
            outputs = {"n": Json()}
            prepared = {"x": Tensor("FP32", [-1, 2])}

            def preprocess(self, item: Any) -> Any:
                if item["text"] == "bad":
                    raise InvalidInput("text", "is bad")
                if item["text"] == "bug":
                    raise KeyError("bug")
                item.state = item["text"]
                return {"x": np.array([[len(item["text"]), 1]], "float32")}

            def predict(self, batch: Any) -> Any:
                assert batch["x"].shape == (len(batch), 2)
                assert all(item.state for item in batch.items)
                for i, item in enumerate(batch.items):
                    if item.state == "late":
                        batch.fail(i, ItemFailed("late"))
                return {"sum": batch["x"].sum(axis=1)}

            def postprocess(self, item: Any, outputs: Dict[str, Any]) -> Any:
                if item.state == "post":
                    raise InvalidInput("text", "post")
                return {"n": {"text": item.state, "sum": float(outputs["sum"][0])}}

        with self.assertLogs("stagemesh.worker", "ERROR"):
            got = self.batch(Around, *({"text": t} for t in ("abc", "bad", "bug", "late", "post", "z")))
        self.assertEqual((got[0]["n"], got[5]["n"]), ({"text": "abc", "sum": 4.0}, {"text": "z", "sum": 2.0}))
        said = [o.error.message for o in got[1:5] if o.error is not None]
        self.assertEqual(said, ["is bad", "the worker could not run this item", "late", "post"])

    def test_joined_outputs_of_the_items_that_are_left(self) -> None:
        class Some(XY):
            def preprocess(self, item: Any) -> Any:
                if item["x"][0, 0] == 0:
                    raise InvalidInput("x", "zero")

            def predict(self, batch: Any) -> Any:
                assert batch["x"].shape == (batch.rows, 2)
                return {"y": batch["x"]}

        xs = [np.full((n, 2), n % 2, "float32") for n in (1, 2, 3)]
        got = self.batch(Some, *({"x": x} for x in xs))
        self.assertEqual([o.error is None for o in got], [True, False, True])
        self.assertEqual([got[0]["y"].shape, got[2]["y"].shape], [(1, 2), (3, 2)])

    def test_preprocess_may_leave_the_inputs_of_some(self) -> None:
        class Some(XY):
            prepared = {"x": Tensor("FP32", [-1, 2])}

            def preprocess(self, item: Any) -> Any:
                return {"x": -item["x"]} if item.parameters.get("negate") else None

            def predict(self, batch: Any) -> Any:
                return {"y": batch["x"]}

        run = self.start(Some)
        for negate in (True, False, True):
            run.add({"x": ROW}, parameters={"negate": negate})
        got = [outcome["y"].tolist() for outcome in run.predict()]
        self.assertEqual(got, [[[-1, -2]], [[1, 2]], [[-1, -2]]])

    def test_predict_is_not_called_for_nobody(self) -> None:
        class Nobody(XY):
            def preprocess(self, item: Any) -> Any:
                raise InvalidInput("x", "no")

            def predict(self, batch: Any) -> Any:
                raise AssertionError

        self.assertTrue(all(isinstance(o.error, InvalidInput) for o in self.batch(Nobody, {"x": ROW}, {"x": ROW})))

    def test_arrays_may_be_changed_in_place_wherever_they_come_from(self) -> None:
        class Change(XY):
            def predict(self, batch: Any) -> Any:
                for name in batch:
                    for one in batch[name] if isinstance(batch[name], list) else [batch[name]]:
                        one[...] = 3
                if "x" in batch:
                    return {"y": batch["x"]}
                return {"y": np.full((batch.rows, 2), 3, "float32")}

        class Left(Change):
            def preprocess(self, item: Any) -> Any:
                if item["x"][0, 0] == 0:
                    raise InvalidInput("x", "is zero")

        class Prepared(Change):
            prepared: Any = {"p": Tensor("FP32", [-1, 2])}

            def preprocess(self, item: Any) -> Any:
                return {"p": b"12345678" if self.arrays == "buffer" else np.frombuffer(b"12345678", "float32")[None]}

        class Apart(Prepared):
            prepared = {"p": Tensor("FP32", [-1, -1], variable="list")}

        class Stack(Change):
            batch_axis = "none"
            inputs = outputs = {"x": Tensor("FP32", [-1]), "y": Tensor("FP32", [2], optional=True)}

            def predict(self, batch: Any) -> Any:
                out = batch.stack("x")
                out[...] = 3
                return {"x": out}

        zero = np.zeros((1, 2), "float32")
        for kind in (Left, Prepared, Apart):
            outcomes = self.batch(kind, {"x": ROW}, {"x": zero}, {"x": ROW})
            self.assertEqual(outcomes[2]["y"].tolist(), [[3, 3]])
        row = np.ones(2, "float32")
        outcomes = self.batch(Stack, {"x": row}, {"x": row})
        self.assertEqual(outcomes[1]["x"].tolist(), [3, 3])

    def test_an_item_that_preprocess_kept_lives_as_long_as_its_batch(self) -> None:
        class Keep(Worker):
            arrays = "buffer"
            inputs = outputs = {"t": Text()}

            def preprocess(self, item: Any) -> Any:
                item.state = item
                return {"other": 1} if item.index else None

            def predict(self, batch: Any) -> Any:
                return {"t": [item.state["t"] for item in batch.items]}

            def postprocess(self, item: Any, outputs: Dict[str, Any]) -> Any:
                return {"t": item.state["t"] + outputs["t"]}

        good, bad, other = self.batch(Keep, {"t": "a"}, {"t": b"\xff"}, {"t": "b"})
        self.assertEqual((good["t"], other["t"]), ("aa", "bb"))
        self.assertEqual(str(bad.error), "t: input 't' is not UTF-8: byte 0")

    def test_prepared_tensors_may_be_optional(self) -> None:
        class Some(XY):
            prepared = {"x": Tensor("FP32", [-1, 2]), "k": Tensor("FP32", [-1, 1], optional=True)}

            def preprocess(self, item: Any) -> Any:
                return {"x": item["x"], "k": [[7]] if item.index == 1 else None}

            def predict(self, batch: Any) -> Any:
                has = ["k" in item for item in batch.items]
                assert has == [False, True, False] and [k is not None for k in batch["k"]] == has
                return {"y": batch["x"]}

        for outcome in self.batch(Some, *[{"x": ROW}] * 3):
            self.assertEqual(outcome["y"].tolist(), [[1, 2]])

    def test_prepared_values_that_do_not_fit(self) -> None:
        class Uneven(XY):
            prepared = {"x": Tensor("FP32", [-1, -1])}

            def preprocess(self, item: Any) -> Any:
                return {"x": np.ones((1, 1 + item.index), "float32")}

            def predict(self, batch: Any) -> Any:
                return {"y": batch["x"]}

        self.fails(Uneven, "rows of different shapes")

        class Padded(Uneven):
            prepared = {"x": Tensor("FP32", [-1, -1], variable="pad")}

            def predict(self, batch: Any) -> Any:
                assert batch["x"].tolist() == [[1, 0], [1, 1]] and batch.shapes("x") == [(1, 1), (1, 2)]
                return {"y": np.zeros((2, 2), "float32")}

        self.batch(Padded, {"x": ROW}, {"x": ROW})[0]["y"]

    def test_a_share_of_the_wrong_length(self) -> None:
        class Short(XY):
            def predict(self, batch: Any) -> Any:
                return {"y": batch["x"][:1]}

            def postprocess(self, item: Any, outputs: Dict[str, Any]) -> Any:
                return outputs

        self.fails(Short, "of length 1, wanted 2")


class BlobsTest(RunsTest):
    class Blobs(Worker):
        arrays = "buffer"
        inputs: Mapping[str, Any] = {"b": Bytes("image/png"), "t": Text(), "j": Json()}
        outputs: Mapping[str, Any] = {"b": Bytes("image/png"), "t": Text(), "j": Json()}

        def predict(self, batch: Any) -> Any:
            assert type(batch["b"][0]) is bytes and batch.items[0].content_type("b") == "image/png"
            return {name: batch[name] for name in ("b", "t", "j")}

    def test_bytes_text_and_documents(self) -> None:
        inputs = {"b": b"\x89PNG\xff", "t": "täxt", "j": {"a": [1, 2.5, None, "ü"]}}
        for outcome in self.batch(self.Blobs, inputs, inputs):
            self.assertEqual(outcome.outputs, inputs)

    def test_documents_are_sent_as_text_and_not_as_escapes(self) -> None:
        documents = {"ü": "日本"}, "half \ud800"

        class Say(self.Blobs):  # type: ignore[name-defined,misc]
            outputs = {"j": Json()}

            def predict(self, batch: Any) -> Any:
                return {"j": list(documents)}

        run = self.start(Say)
        good = testing.Request({"b": b"", "t": "", "j": 0})
        batch = run.send([good, good])
        header, body = run._read("result")
        self.assertTrue(bytes(body).startswith('{"ü":"日本"}'.encode()))
        run._ends[batch] = header, body
        self.assertEqual([outcome["j"] for outcome in run.result(batch)], list(documents))

    def test_null_is_a_document(self) -> None:
        class Null(Worker):
            arrays = "buffer"
            inputs = {"j": Json(), "k": Json(optional=True)}
            outputs = {"j": Json(), "k": Json(optional=True)}

            def predict_item(self, item: Any) -> Any:
                assert "j" in item and item.get("j", 1) is None and "k" not in item and item.get("k", 1) == 1
                return {"j": item["j"], "k": None}

        class Batched(Null):
            predict_item = Worker.predict_item

            def predict(self, batch: Any) -> Any:
                assert batch["j"] == [None, None] and "k" not in batch
                assert all("j" in item and item["j"] is None for item in batch.items)
                return {"j": batch["j"], "k": [None, None]}

        class Around(Batched):
            def preprocess(self, item: Any) -> Any:
                return None if item.index else {"j": item["j"]}

            def postprocess(self, item: Any, outputs: Dict[str, Any]) -> Any:
                return outputs

        for kind in (Null, Batched, Around):
            for outcome in self.batch(kind, {"j": None}, {"j": b"null"}):
                self.assertEqual(outcome.error or outcome.outputs, {"j": None})

    def test_outputs_that_are_missing_are_named_beside_those_that_are_there(self) -> None:
        class Some(Worker):
            outputs = {"a": Text(), "b": Text(), "c": Json()}

            def predict(self, batch: Any) -> Any:
                return {"a": None, "b": ["b"] * len(batch), "c": None}

        self.fails(Some, "predict returned no output 'a'; it has 'b'$", inputs={"t": b"t"})

    def test_what_cannot_be_decoded_is_its_items_fault(self) -> None:
        good = {"b": b"x", "t": "t", "j": 1}
        bads = [{**good, "t": b"\xff"}, {**good, "j": b"{"}, {**good, "j": b"NaN"}, {**good, "j": b"[" * 100000}]
        got = self.batch(self.Blobs, good, *bads, good)
        self.assertEqual([o.error is None for o in got], [True, False, False, False, False, True])
        self.assertEqual([o.error.field for o in got[1:5]], ["t", "j", "j", "j"])  # type: ignore[union-attr]
        self.assertEqual((got[0].outputs, got[5].outputs), (good, good))

    def test_blobs_of_the_wrong_type(self) -> None:
        for name, value, want in (
            ("t", [b"x", b"x"], "got bytes, wanted str"),
            ("j", [{1, 2}, 1], "which is not JSON"),
            ("j", [float("nan"), 1], "which is not JSON"),
            ("b", ["x", "x"], "got str, wanted bytes"),
            ("b", b"xy", "wanted a list of 2, one bytes for each item"),
            ("t", ["\ud800", "x"], "not Unicode text"),
        ):

            class Wrong(self.Blobs):  # type: ignore[name-defined,misc]
                def predict(self, batch: Any, name: str = name, value: Any = value) -> Any:
                    return {"b": batch["b"], "t": batch["t"], "j": batch["j"], name: value}

            with self.subTest(want):
                self.fails(Wrong, want, inputs={"b": b"x", "t": "t", "j": 1})


class VariableTest(RunsTest):
    def test_padded_items(self) -> None:
        for arrays in ("numpy", "buffer"):

            class Pad(Worker):
                inputs = {"ids": Tensor("INT64", [-1, -1], variable="pad", pad=-1, multiple=4)}
                outputs = {"n": Tensor("INT64", [-1])}

                def predict(self, batch: Any) -> Any:
                    assert batch["ids"].tolist() == [[1, 2, -1, -1], [3, 4, 5, -1]], batch["ids"].tolist()
                    shapes = batch.shapes("ids")
                    return {"n": [[s[1]] for s in shapes]}

            with self.subTest(arrays):
                got = self.batch(Pad, {"ids": [[1, 2]]}, {"ids": [[3, 4, 5]]}, arrays=arrays)
                self.assertEqual([o["n"].tolist() for o in got], [[2], [3]])

    def test_equal_extents_come_joined_and_are_padded_all_the_same(self) -> None:
        class Pad(Worker):
            inputs = {"ids": Tensor("INT64", [-1, -1], variable="pad", multiple=4)}
            outputs = {"n": Tensor("INT64", [-1, -1])}

            def predict(self, batch: Any) -> Any:
                assert batch["ids"].shape == (2, 4) and batch.shapes("ids") == [(1, 3), (1, 3)]
                return {"n": batch["ids"]}

        self.batch(Pad, {"ids": [[1, 2, 3]]}, {"ids": [[1, 2, 3]]})[0]["n"]

    def test_lists(self) -> None:
        class Listed(Worker):
            inputs = {"ids": Tensor("INT64", [-1, -1], variable="list")}
            outputs = {"ids": Tensor("INT64", [-1, -1], variable="list")}

            def predict(self, batch: Any) -> Any:
                assert type(batch["ids"]) is list
                return {"ids": [ids + 1 for ids in batch["ids"]]}

        for other in ([[3, 4, 5]], [[3, 4]]):
            got = self.batch(Listed, {"ids": [[1, 2]]}, {"ids": other})
            self.assertEqual([o["ids"].tolist() for o in got], [[[2, 3]], [[n + 1 for n in other[0]]]])

    def test_items_that_are_never_joined(self) -> None:
        class Apart(Worker):
            batch_axis = "none"
            inputs = {"x": Tensor("FP32", [-1])}
            outputs = {"n": Tensor("INT64", []), "x": Tensor("FP32", [-1])}

            def predict(self, batch: Any) -> Any:
                assert type(batch["x"]) is list
                if len({x.shape for x in batch["x"]}) == 1:
                    stacked = batch.stack("x")
                    assert stacked.shape == (len(batch), 3) and stacked.base is not None
                return {"n": np.array([x.size for x in batch["x"]]), "x": batch["x"]}

        for sizes in ((3, 3, 3), (1, 2, 3)):
            xs = [np.arange(n, dtype="float32") for n in sizes]
            got = self.batch(Apart, *({"x": x} for x in xs))
            self.assertEqual([(int(o["n"]), o["x"].tolist()) for o in got], [(x.size, x.tolist()) for x in xs])


class DeclarationsTest(RunsTest):
    def refused(self, kind: Any, want: str) -> None:
        from stagemesh.worker import check_class

        with self.assertRaisesRegex(ValueError, want):
            check_class(kind)

    def test_classes_that_cannot_be_served(self) -> None:
        class Neither(Worker):
            pass

        class Both(XY):
            def predict(self, batch: Any) -> Any: ...
            def predict_item(self, item: Any) -> Any: ...

        class Yields(XY):
            def predict(self, batch: Any) -> Any:
                yield {}

        class Async(XY):
            async def predict(self, batch: Any) -> Any:  # type: ignore[override]
                return {}

        class Mixed(XY):
            def predict_item(self, item: Any) -> Any: ...
            def preprocess(self, item: Any) -> Any: ...

        class Slots(XY):
            concurrency = 0

            def predict(self, batch: Any) -> Any: ...

        for kind, want in (
            (Neither, "neither predict"),
            (Both, "both predict and predict_item"),
            (Yields, "it yields; return the outputs, or name it stream"),
            (Async, "it is async"),
            (Mixed, "preprocess goes with predict"),
            (Slots, "concurrency"),
            (Worker, "subclass"),
            (7, "subclass"),
        ):
            self.refused(kind, want)

    def test_declarations_that_cannot_be(self) -> None:
        for wrong, want in (
            (
                {"inputs": {"x": Tensor("FP32", [64])}},
                r"Wrong\.inputs\['x'\]: axis 0 is rows, so the shape begins with -1",
            ),
            ({"inputs": [Tensor("FP32", [-1])]}, "a dict of names and specs"),
            ({"outputs": {"y": "FP32"}}, r"outputs\['y'\]: Tensor, Bytes, Text or Json is wanted"),
            ({"batch_axis": "cols"}, 'use "rows" or "none"'),
            (
                {"examples": [{"x": [[1, 2, 3]]}]},
                r"examples: example 1: input 'x': got shape \[1, 3\], wanted \[-1, 2\]",
            ),
            ({"examples": {"one": 3}}, "examples: one: a dict of inputs"),
            ({"examples": {1: {"x": [1, 2]}}}, "examples: 1 is no name"),
            ({"examples": [{1: [1, 2]}]}, "examples: example 1: 1 is no name of an input"),
            ({"examples": [{"zz": [1, 2]}]}, "examples: example 1: input 'zz' is not declared; inputs are 'x'"),
            ({"arrays": "torch"}, "arrays: 'torch'"),
        ):
            kind = type("Wrong", (XY,), {"predict": lambda self, batch: {}, **wrong})
            with self.subTest(want):
                run = testing.run(kind, process=False, patience_s=10)
                with self.assertRaises(WorkerEnded), self.captured() as text:
                    run.start()
                error = next(s for s in run.states if s["type"] == "error")
                self.assertRegex(error["message"], want)
                self.assertEqual(error["kind"], "exception")
                self.assertIn("cannot start", text())

    def captured(self) -> Any:
        import contextlib
        import io

        @contextlib.contextmanager
        def capture() -> Any:
            out = io.StringIO()
            with contextlib.redirect_stderr(out):
                yield out.getvalue

        return capture()

    def test_wrong_specs(self) -> None:
        for arguments, named, want in (
            (("FP8", [-1]), {}, "datatype 'FP8' is none of"),
            (("FP32", [-2]), {}, "extents are whole numbers"),
            (("FP32", [-1] * 17), {}, "17 axes"),
            (("FP32", [-1, 2]), {"variable": "pad"}, "needs an axis after the first"),
            (("FP32", [-1, -1]), {"variable": "ragged"}, '"exact", "list" or "pad"'),
            (("BYTES", [-1, -1]), {"variable": "pad"}, "BYTES cannot be padded"),
            (("FP32", [-1, -1]), {"variable": "pad", "multiple": 0}, "multiple"),
            (("FP32", 2), {}, "shape 2: a list of extents"),
            (("FP32", "12"), {}, "shape '12': a list of extents"),
            ((["FP32"], [-1]), {}, "is none of"),
            (("INT64", [-1]), {"pad": 1.5}, "pad 1.5: got elements that are no INT64"),
            (("INT64", [-1]), {"pad": float("nan")}, "pad nan"),
            (("BOOL", [-1]), {"pad": 2}, "pad 2"),
            (("FP32", [-1]), {"pad": None}, "pad None"),
            (("UINT8", [-1]), {"pad": -1}, "pad -1"),
            (("FP32", [-1]), {"description": 5}, "Tensor: description 5: a string"),
            (("FP32", [-1]), {"optional": "no"}, "Tensor: optional 'no': use True or False"),
        ):
            with self.subTest(want), self.assertRaisesRegex(ValueError, want):
                Tensor(*arguments, **named)
        types: Any = ["image/png"]
        for kind in (Bytes, Text, Json):
            with self.assertRaisesRegex(ValueError, rf"{kind.__name__}: content type \['image/png'\]: strings"):
                kind(types)

    def test_specs_and_examples_of_setup_are_told(self) -> None:
        class Late(Worker):
            def setup(self, ctx: Any) -> None:
                n = ctx.options["n"]
                self.inputs = {"x": Tensor("FP32", [-1, n], description="pixels")}
                self.outputs = {"y": Tensor("FP32", [-1, n])}
                self.examples = {"ones": {"x": [1] * n}}

            def predict(self, batch: Any) -> Any:
                return {"y": batch["x"]}

        run = self.start(Late, options={"n": 3})
        self.assertEqual(
            run.spec["inputs"], [{"name": "x", "description": "pixels", "datatype": "FP32", "shape": [-1, 3]}]
        )
        self.assertEqual(run.spec["examples"][0]["name"], "ones")
        self.assertEqual(run.examples[0]["x"].tolist(), [[1, 1, 1]])

    def test_what_the_context_says(self) -> None:
        seen: List[Any] = []

        class Look(XY):
            concurrency = 3

            def setup(self, ctx: Any) -> None:
                seen.append(ctx)
                ctx.progress("half of it")

            def predict(self, batch: Any) -> Any:
                return {"y": batch["x"]}

            def teardown(self) -> None:
                seen.append("teardown")

        environ = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "STAGEMESH_STAGE": "s",
            "STAGEMESH_WORKER": "4",
            "STAGEMESH_INCARNATION": "2",
        }
        run = self.start(Look, options={"a": 1}, devices=["0", "1"], max_size=7, slots=2, environ=environ)
        ctx = seen[0]
        self.assertEqual(
            (ctx.options, ctx.devices, ctx.device, ctx.max_size, ctx.slots), ({"a": 1}, ["0", "1"], "0", 7, 2)
        )
        self.assertEqual(
            (ctx.rank, ctx.local_rank, ctx.world_size, ctx.stage, ctx.index, ctx.incarnation), (0, 0, 2, "s", 4, 2)
        )
        self.assertEqual(run.states[0], {"type": "state", "state": "STARTUP", "message": "half of it"})
        self.assertEqual(run.stop(), 0)
        self.assertEqual(seen[1], "teardown")


class GangTest(RunsTest):
    def test_other_ranks_run_and_say_nothing(self) -> None:
        ran: List[int] = []

        class Rank(XY):
            def predict(self, batch: Any) -> Any:
                ran.append(batch["x"].shape[0])
                batch.fail(0, ItemFailed("of rank 1"))

        run = self.start(Rank, environ={"RANK": "1", "WORLD_SIZE": "2"})
        run.send([testing.Request({"x": ROW})] * 2)
        header, body = run._read("result")
        self.assertEqual((header, bytes(body), ran), ({"type": "result", "batch": 1}, b"", [2]))

    def test_an_error_of_another_rank_is_said(self) -> None:
        class Rank(XY):
            def predict(self, batch: Any) -> Any:
                raise MemoryError

        run = self.start(Rank, environ={"RANK": "1", "WORLD_SIZE": "2"})
        with self.assertRaises(BatchFailed) as caught:
            run.add({"x": ROW})
            run.predict()
        self.assertEqual(caught.exception.kind, "out_of_memory")


class SlotsTest(RunsTest):
    def test_batches_of_several_slots_run_at_a_time_and_end_in_any_order(self) -> None:
        both = threading.Barrier(2, timeout=30)
        first_may_end = threading.Event()

        class Slow(XY):
            concurrency = 2

            def predict(self, batch: Any) -> Any:
                both.wait()
                if batch.items[0].id == "first":
                    first_may_end.wait(30)
                return {"y": batch["x"]}

        run = self.start(Slow, slots=5)
        for ident in ("first", "second"):
            run.send([testing.Request({"x": ROW}, id=ident)])
        self.assertEqual(run._read("result")[0]["batch"], 2)
        first_may_end.set()
        self.assertEqual(run._read("result")[0]["batch"], 1)
        self.assertEqual(run.stop(), 0)

    def test_cancels_are_seen_by_the_threads(self) -> None:
        entered = threading.Event()

        class Wait(XY):
            concurrency = 2

            def predict(self, batch: Any) -> Any:
                entered.set()
                while not batch.cancelled:
                    threading.Event().wait(0.001)
                return {"y": batch["x"]}

        run = self.start(Wait, slots=2)
        batch = run.send([testing.Request({"x": ROW})] * 2)
        self.assertTrue(entered.wait(30))
        run.tell("cancel", batch=batch)
        run.result(batch)

    def test_a_batch_beyond_the_slots_is_a_violation(self) -> None:
        release = threading.Event()
        self.addCleanup(release.set)

        class Wait(XY):
            concurrency = 2

            def predict(self, batch: Any) -> Any:
                release.wait(30)
                return {"y": batch["x"]}

        run = self.start(Wait, slots=2)
        for _ in range(3):
            run.send([testing.Request({"x": ROW})])
        with self.assertRaises(WorkerEnded):
            run._read("result")
        self.assertEqual(run.wait(10), 4)


if __name__ == "__main__":
    unittest.main()
