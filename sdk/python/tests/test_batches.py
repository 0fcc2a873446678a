"""Batches: their inputs and outputs, slots and gangs, through the protocol in this process."""

from __future__ import annotations

import array
import struct
import threading
import time
import unittest
from typing import Any, Callable, Dict, List, Mapping

import numpy as np

from stagemesh import Bytes, InvalidInput, ItemFailed, Json, Tensor, Text, Worker, testing
from stagemesh.frames import Parts, Violation
from stagemesh.parts import Blob, Layout, Raw, read_parts
from stagemesh.testing import BatchFailed, WorkerEnded

from .workers import ROW, XY, RunTest


class BatchTest(RunTest):
    def test_items_are_joined_and_split(self) -> None:
        class Twice(XY):
            def predict(self, batch: Any) -> Any:
                assert batch["x"].shape == (6, 2) and batch.rows == 6 and len(batch) == 3
                assert [item.rows for item in batch.items] == [1, 3, 2]
                assert (batch.items[1]["x"] == batch["x"][batch.items[1].slice]).all()
                return {"y": batch["x"] * 2}

        xs = [np.arange(2 * n, dtype="float32").reshape(n, 2) for n in (1, 3, 2)]
        for outcome, x in zip(self.batch(Twice, *({"x": x} for x in xs)), xs):
            self.assertEqual(outcome["y"].tolist(), (x * 2).tolist())

    def test_repeated_and_new_shapes_may_alternate(self) -> None:
        class Twice(XY):
            def predict(self, batch: Any) -> Any:
                return {"y": batch["x"] * np.float32(2)}

        for arrays in ("numpy", "buffer"):
            run = self.start(Twice if arrays == "numpy" else Lists, arrays=arrays)
            for rows in (1, 2, 1, 1, 2, 3, 2, 1):
                x = np.arange(2 * rows, dtype="float32").reshape(rows, 2)
                got = run.predict({"x": x if arrays == "numpy" else x.tolist()})["y"]
                self.assertEqual(got.tolist(), (x * 2).tolist())

    def test_output_may_be_any_flat_buffer(self) -> None:
        forms: List[Callable[[Any], Any]] = [array.array.tobytes, bytearray, memoryview, lambda rows: rows]

        class Flat(XY):
            arrays = "buffer"

            def predict(self, batch: Any) -> Any:
                return {"y": forms[0](array.array("f", [1, 2] * batch.rows))}

        run = self.start(Flat)
        while forms:
            for _ in range(2):
                self.assertEqual(run.predict({"x": [[0, 0]]})["y"].tolist(), [[1, 2]])
            forms.pop(0)

    def test_list_may_have_rows_or_items(self) -> None:
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

    def test_items_carry_parameters_metadata_and_deadline(self) -> None:
        seen: List[Any] = []
        of_inputs: List[Any] = []

        class Look(XY):
            def predict(self, batch: Any) -> Any:
                for item in batch.items:
                    seen.append((item.id, dict(item.parameters), dict(item.metadata), item.deadline))
                    of_inputs.append(dict(item.input_parameters))
                    item.respond("seen", item.id)
                return {"y": batch["x"]}

        run = self.start(Look)
        run.add(
            {"x": ROW}, id="a", parameters={"top": 3, "p": 0.5, "on": True, "s": "t"}, metadata={"m": "1"}, timeout=5000
        )
        run.add({"x": ROW}, id="b", input_parameters={"x": {"size": 8}})
        first, second = run.predict()
        self.assertEqual(of_inputs, [{}, {"x": {"size": 8}}])
        self.assertEqual(seen[0][:3], ("a", {"top": 3, "p": 0.5, "on": True, "s": "t"}, {"m": "1"}))
        self.assertEqual(type(seen[0][1]["top"]), int)
        self.assertAlmostEqual(seen[0][3], time.monotonic() + 5, delta=4)
        self.assertEqual(seen[1], ("b", {}, {}, None))
        self.assertEqual((first.metadata, second.metadata), ({"seen": "a"}, {"seen": "b"}))

    def test_kept_items_lose_their_inputs(self) -> None:
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

    def test_ended_batch_is_freed(self) -> None:
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

    def test_undeclared_inputs_are_not_checked(self) -> None:
        class Free(Worker):
            def predict(self, batch: Any) -> Any:
                return {name: batch[name] for name in batch}

        class FreeBuffer(Free):
            arrays = "buffer"

        got = self.batch(Free, {"a": np.arange(3), "b": b"blob"})[0].outputs
        self.assertEqual((got["a"].tolist(), got["b"]), ([0, 1, 2], b"blob"))
        got = self.batch(FreeBuffer, {"a": memoryview(struct.pack("<2i", 1, 2)).cast("i")})[0].outputs
        self.assertEqual(got["a"].tolist(), [1, 2])

    def test_inputs_and_outputs_may_be_optional(self) -> None:
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


class BlobsTest(RunTest):
    class Blobs(Worker):
        arrays = "buffer"
        inputs: Mapping[str, Any] = {"b": Bytes("image/png"), "t": Text(), "j": Json()}
        outputs: Mapping[str, Any] = {"b": Bytes("image/png"), "t": Text(), "j": Json()}

        def predict(self, batch: Any) -> Any:
            assert type(batch["b"][0]) is bytes and batch.items[0].content_type("b") == "image/png"
            return {name: batch[name] for name in ("b", "t", "j")}

    def test_bytes_text_and_json_round_trip(self) -> None:
        inputs = {"b": b"\x89PNG\xff", "t": "täxt", "j": {"a": [1, 2.5, None, "ü"]}}
        for outcome in self.batch(self.Blobs, inputs, inputs):
            self.assertEqual(outcome.outputs, inputs)

    def test_repeated_parts_have_new_bytes(self) -> None:
        class Echo(Worker):
            arrays = "buffer"
            inputs = {"b": Bytes(optional=True)}
            outputs = {"b": Bytes(optional=True)}

            def predict(self, batch: Any) -> Any:
                return {"b": batch["b"]}

        run = self.start(Echo)
        for n in range(4):
            sent = [{"b": b"%d" % i} for i in range(n, n + 3)]
            if n == 3:
                sent.append({})  # the same parts for more items
            for inputs in sent:
                run.add(inputs)
            self.assertEqual([outcome.outputs for outcome in run.predict()], sent)

    def test_repeated_parts_are_checked_against_each_body(self) -> None:
        entries = Parts([{"name": "b", "content_type": "", "item": 1, "at": 0, "size": 8}])
        for _ in range(2):
            read_parts(entries, memoryview(bytes(8)), 2)
            with self.assertRaisesRegex(Violation, "body of 7"):
                read_parts(entries, memoryview(bytes(7)), 2)
            with self.assertRaisesRegex(Violation, "expected 0 to 0"):
                read_parts(entries, memoryview(bytes(8)), 1)

    def test_parts_begin_at_multiples_of_64(self) -> None:
        row = Raw("FP32", (1,), b"1234", 4)
        layout = Layout()
        layout.add_items("y", range(6), [Blob("a", b"1"), row, row, Blob("a", b"2"), None, row], join=False)
        found = [(entry["item"], entry["at"], "shape" in entry) for entry in layout.take_entries(0)]
        self.assertEqual(found, [(0, 0, False), (1, 64, True), (2, 68, True), (3, 128, False), (5, 192, True)])
        self.assertEqual(len(b"".join(layout.pieces)), layout.size)

    def test_json_is_sent_as_unicode(self) -> None:
        documents = {"ü": "日本"}, "smile \U0001f600"

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

    def test_null_is_a_json_document(self) -> None:
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

    def test_missing_outputs_are_named(self) -> None:
        class Some(Worker):
            outputs = {"a": Text(), "b": Text(), "c": Json()}

            def predict(self, batch: Any) -> Any:
                return {"a": None, "b": ["b"] * len(batch), "c": None}

        self.fails(Some, "predict returned no output 'a'; it has 'b'$", inputs={"t": b"t"})

    def test_undecodable_input_is_its_items_fault(self) -> None:
        good = {"b": b"x", "t": "t", "j": 1}
        documents = (b"{", b"NaN", b"[-1e400]", b"[" * 100000)
        bads = [{**good, "t": b"\xff"}, *({**good, "j": document} for document in documents)]
        got = self.batch(self.Blobs, good, *bads, good)
        self.assertEqual([o.error is None for o in got], [True, *[False] * 5, True])
        self.assertEqual([o.error.field for o in got[1:6]], ["t", "j", "j", "j", "j"])  # type: ignore[union-attr]
        self.assertEqual((got[0].outputs, got[6].outputs), (good, good))

    def test_blobs_of_wrong_type_fail(self) -> None:
        for name, value, want in (
            ("t", [b"x", b"x"], "got bytes, expected str"),
            ("j", [{1, 2}, 1], "which is not JSON"),
            ("j", [float("nan"), 1], "which is not JSON"),
            ("j", ["half \ud800", 1], "which is not JSON"),
            ("b", ["x", "x"], "got str, expected bytes"),
            ("b", b"xy", "expected a list of 2, one bytes for each item"),
            ("t", ["\ud800", "x"], "not Unicode text"),
        ):

            class Wrong(self.Blobs):  # type: ignore[name-defined,misc]
                def predict(self, batch: Any, name: str = name, value: Any = value) -> Any:
                    return {"b": batch["b"], "t": batch["t"], "j": batch["j"], name: value}

            with self.subTest(want):
                self.fails(Wrong, want, inputs={"b": b"x", "t": "t", "j": 1})


class VariableTest(RunTest):
    def test_items_are_padded(self) -> None:
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

    def test_joined_items_are_padded_too(self) -> None:
        class Pad(Worker):
            inputs = {"ids": Tensor("INT64", [-1, -1], variable="pad", multiple=4)}
            outputs = {"n": Tensor("INT64", [-1, -1])}

            def predict(self, batch: Any) -> Any:
                assert batch["ids"].shape == (2, 4) and batch.shapes("ids") == [(1, 3), (1, 3)]
                return {"n": batch["ids"]}

        self.batch(Pad, {"ids": [[1, 2, 3]]}, {"ids": [[1, 2, 3]]})[0]["n"]

    def test_items_of_any_extent_come_as_a_list(self) -> None:
        class Listed(Worker):
            inputs = {"ids": Tensor("INT64", [-1, -1], variable="list")}
            outputs = {"ids": Tensor("INT64", [-1, -1], variable="list")}

            def predict(self, batch: Any) -> Any:
                assert type(batch["ids"]) is list
                return {"ids": [ids + 1 for ids in batch["ids"]]}

        for other in ([[3, 4, 5]], [[3, 4]]):
            got = self.batch(Listed, {"ids": [[1, 2]]}, {"ids": other})
            self.assertEqual([o["ids"].tolist() for o in got], [[[2, 3]], [[n + 1 for n in other[0]]]])

    def test_batch_axis_none_joins_nothing(self) -> None:
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


class SlotsTest(RunTest):
    def test_slots_run_at_a_time(self) -> None:
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

    def test_threads_see_cancels(self) -> None:
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

    def test_batch_beyond_the_slots_is_a_violation(self) -> None:
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


class GangTest(RunTest):
    def test_other_ranks_send_no_outputs(self) -> None:
        ran: List[int] = []

        class Rank(XY):
            def predict(self, batch: Any) -> Any:
                ran.append(batch["x"].shape[0])
                batch.fail(0, ItemFailed("of rank 1"))

        run = self.start(Rank, environ={"RANK": "1", "WORLD_SIZE": "2"})
        run.send([testing.Request({"x": ROW})] * 2)
        header, body = run._read("result")
        self.assertEqual((header, bytes(body), ran), ({"type": "result", "batch": 1}, b"", [2]))

    def test_error_of_another_rank_is_reported(self) -> None:
        class Rank(XY):
            def predict(self, batch: Any) -> Any:
                raise MemoryError

        run = self.start(Rank, environ={"RANK": "1", "WORLD_SIZE": "2"})
        with self.assertRaises(BatchFailed) as caught:
            run.add({"x": ROW})
            run.predict()
        self.assertEqual(caught.exception.kind, "out_of_memory")


if __name__ == "__main__":
    unittest.main()
