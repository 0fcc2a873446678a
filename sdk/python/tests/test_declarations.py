"""Declarations of workers, and the context of setup."""

from __future__ import annotations

import unittest
from typing import Any, List

from stagemesh import Bytes, Json, Parameter, Tensor, Text, Worker, testing
from stagemesh.testing import WorkerEnded

from .workers import XY, RunTest


class DeclarationsTest(RunTest):
    def refused(self, kind: Any, want: str) -> None:
        from stagemesh.worker import check_class

        with self.assertRaisesRegex(ValueError, want):
            check_class(kind)

    def test_invalid_classes_are_refused(self) -> None:
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

    def test_invalid_declarations_are_refused(self) -> None:
        for wrong, want in (
            (
                {"inputs": {"x": Tensor("FP32", [64])}},
                r"Wrong\.inputs\['x'\]: axis 0 is rows, so the shape begins with -1",
            ),
            ({"inputs": [Tensor("FP32", [-1])]}, "a dict of names and specs"),
            ({"outputs": {"y": "FP32"}}, r"outputs\['y'\]: expected Tensor, Bytes, Text or Json"),
            ({"parameters": {"p": int}}, r"parameters\['p'\]: expected Parameter"),
            ({"parameters": ["p"]}, "parameters: expected a dict of names"),
            ({"batch_axis": "cols"}, 'use "rows" or "none"'),
            ({"engine_name": object()}, "expected text of at most 200 bytes"),
            ({"engine_name": "x" * 201}, "expected text of at most 200 bytes"),
            (
                {"examples": [{"x": [[1, 2, 3]]}]},
                r"examples: example 1: input 'x': got shape \[1, 3\], expected \[-1, 2\]",
            ),
            ({"examples": {"one": 3}}, "examples: one: expected a dict of inputs"),
            ({"examples": {1: {"x": [1, 2]}}}, "examples: 1 is not a name"),
            ({"examples": [{1: [1, 2]}]}, "examples: example 1: 1 is not a name of an input"),
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
                self.assertEqual(text(), "")  # the host logs the error

    def captured(self) -> Any:
        import contextlib
        import io

        @contextlib.contextmanager
        def capture() -> Any:
            out = io.StringIO()
            with contextlib.redirect_stderr(out):
                yield out.getvalue

        return capture()

    def test_invalid_specs_are_refused(self) -> None:
        for arguments, named, want in (
            (("FP8", [-1]), {}, "unknown datatype 'FP8', expected one of"),
            (("FP32", [-2]), {}, "extents are whole numbers"),
            (("FP32", [-1] * 17), {}, "17 axes"),
            (("FP32", [-1, 2]), {"variable": "pad"}, "needs an axis after the first"),
            (("FP32", [-1, -1]), {"variable": "ragged"}, '"exact", "list" or "pad"'),
            (("BYTES", [-1, -1]), {"variable": "pad"}, "BYTES cannot be padded"),
            (("FP32", [-1, -1]), {"variable": "pad", "multiple": 0}, "multiple"),
            (("FP32", 2), {}, "shape 2: expected a list of extents"),
            (("FP32", "12"), {}, "shape '12': expected a list of extents"),
            ((["FP32"], [-1]), {}, "unknown datatype"),
            (("INT64", [-1]), {"pad": 1.5}, "pad 1.5: got elements that are not INT64"),
            (("INT64", [-1]), {"pad": float("nan")}, "pad nan"),
            (("BOOL", [-1]), {"pad": 2}, "pad 2"),
            (("FP32", [-1]), {"pad": None}, "pad None"),
            (("UINT8", [-1]), {"pad": -1}, "pad -1"),
            (("FP32", [-1]), {"description": 5}, "Tensor: description 5: expected a string"),
            (("FP32", [-1]), {"optional": "no"}, "Tensor: optional 'no': use True or False"),
        ):
            with self.subTest(want), self.assertRaisesRegex(ValueError, want):
                Tensor(*arguments, **named)
        types: Any = ["image/png"]
        for kind in (Bytes, Text, Json):
            want = rf"{kind.__name__}: content type \['image/png'\]: expected strings"
            with self.assertRaisesRegex(ValueError, want):
                kind(types)

    def test_setup_may_set_specs_and_examples(self) -> None:
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

    def test_parameters_are_declared(self) -> None:
        declared = {"words": Parameter(int, "how many"), "style": Parameter(str)}
        for parameters, want in (
            (
                declared,
                [{"name": "words", "type": "int", "description": "how many"}, {"name": "style", "type": "string"}],
            ),
            ({}, []),
            (None, None),
        ):
            kind = type("Declares", (XY,), {"predict": lambda self, batch: {}, "parameters": parameters})
            with self.subTest(want):
                self.assertEqual(self.start(kind).spec.get("parameters"), want)
        with self.assertRaisesRegex(ValueError, "use bool, int, float or str"):
            Parameter(list)

    def test_context_has_the_hosts_settings(self) -> None:
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


if __name__ == "__main__":
    unittest.main()
