"""predict_item, preprocess and postprocess, through the protocol in this process."""

from __future__ import annotations

import unittest
from typing import Any, Dict

import numpy as np

from stagemesh import InvalidInput, ItemFailed, Json, OutOfMemory, Tensor, Text, Worker, testing

from .workers import ROW, XY, RunTest


class ItemsTest(RunTest):
    def test_predict_item_isolates_each_item(self) -> None:
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

        outcomes = self.batch(One, *({"x": np.full((1, 2), n, "float32")} for n in range(6)))
        self.assertEqual(outcomes[0]["y"].tolist(), [[1, 1]])
        self.assertEqual(outcomes[5]["y"].tolist(), [[6, 6]])
        self.assertEqual([type(o.error) for o in outcomes[1:5]], [InvalidInput, ItemFailed, ItemFailed, OutOfMemory])
        self.assertNotIn("secret", str(outcomes[2].error))
        raised = [str(o.error.__cause__) for o in outcomes[2:4] if o.error is not None]
        self.assertRegex(raised[0], r"(?s)^ZeroDivisionError: secret\nTraceback .*in predict_item")
        self.assertRegex(raised[1], "^BadOutput: predict_item returned None")
        self.assertNotIn("Traceback", raised[1])

    def test_exceptions_of_a_large_batch_fit_into_its_result(self) -> None:
        class Deep(XY):
            def predict_item(self, item: Any) -> Any:
                raise KeyError("x" * 3000)

        outcomes = self.batch(Deep, *({"x": ROW} for _ in range(500)))
        self.assertTrue(all(isinstance(o.error, ItemFailed) for o in outcomes))
        traced = ["Traceback" in str(o.error.__cause__) for o in outcomes if o.error is not None]
        self.assertTrue(traced[0] and not traced[-1])

    def test_outputs_of_items_are_joined(self) -> None:
        class One(XY):
            def predict_item(self, item: Any) -> Any:
                return {"y": item["x"]}

        run = self.start(One)
        run.send([testing.Request({"x": ROW}) for _ in range(3)])
        header, body = run._read("result")
        self.assertEqual([(p.get("item"), p["shape"]) for p in header["parts"]], [(None, [3, 2])])
        self.assertEqual(bytes(body), ROW.tobytes() * 3)

    def test_preprocess_and_postprocess_surround_predict(self) -> None:
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

        got = self.batch(Around, *({"text": t} for t in ("abc", "bad", "bug", "late", "post", "z")))
        self.assertEqual((got[0]["n"], got[5]["n"]), ({"text": "abc", "sum": 4.0}, {"text": "z", "sum": 2.0}))
        messages = [o.error.message for o in got[1:5] if o.error is not None]
        self.assertEqual(messages, ["is bad", "the worker could not run this item", "late", "post"])
        causes = [o.error.__cause__ for o in got[1:5] if o.error is not None]
        self.assertRegex(str(causes[1]), r"(?s)^KeyError: 'bug'\nTraceback .*in preprocess")
        self.assertEqual([causes[0], causes[2], causes[3]], [None] * 3)

    def test_failed_items_are_removed_before_predict(self) -> None:
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

    def test_preprocess_may_keep_inputs(self) -> None:
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

    def test_wrong_value_of_preprocess_fails_its_item(self) -> None:
        class Wrong(XY):
            def preprocess(self, item: Any) -> Any:
                return [1] if item["x"][0, 0] == 0 else {"x": item["x"]}

            prepared = {"x": Tensor("FP32", [-1, 2])}

            def predict(self, batch: Any) -> Any:
                return {"y": batch["x"]}

        bad, good = self.batch(Wrong, {"x": ROW * 0}, {"x": ROW})
        self.assertIsInstance(bad.error, ItemFailed)
        self.assertEqual(good["y"].tolist(), ROW.tolist())
        assert bad.error is not None
        self.assertIn("preprocess returned a list", str(bad.error.__cause__))

    def test_predict_is_skipped_without_items(self) -> None:
        class Nobody(XY):
            def preprocess(self, item: Any) -> Any:
                raise InvalidInput("x", "no")

            def predict(self, batch: Any) -> Any:
                raise AssertionError

        self.assertTrue(all(isinstance(o.error, InvalidInput) for o in self.batch(Nobody, {"x": ROW}, {"x": ROW})))

    def test_all_arrays_are_writable(self) -> None:
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

    def test_kept_item_lives_as_long_as_its_batch(self) -> None:
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

    def test_prepared_values_must_fit_together(self) -> None:
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

    def test_share_of_wrong_length_fails(self) -> None:
        class Short(XY):
            def predict(self, batch: Any) -> Any:
                return {"y": batch["x"][:1]}

            def postprocess(self, item: Any, outputs: Dict[str, Any]) -> Any:
                return outputs

        self.fails(Short, "of length 1, expected 2")


if __name__ == "__main__":
    unittest.main()
