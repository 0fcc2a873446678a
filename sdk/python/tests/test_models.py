"""Several models in one worker: load, unload and size beside batches."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import unittest
from typing import Any, Dict, List

from stagemesh import InvalidModel, Model, ModelLimits, Tensor, Worker, below, testing
from stagemesh.faults import ModelGone
from stagemesh.frames import Headers
from stagemesh.models import Models
from stagemesh.runs import Runs, error_header
from stagemesh.testing import BatchFailed
from stagemesh.values import arrays_of
from stagemesh.worker import check_class, wire_model

from .support import Host, eventually


class BelowTest(unittest.TestCase):
    def test_sources_stay_below_their_folder(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = os.path.join(folder, "models")
            os.makedirs(os.path.join(root, "deep"))
            for path in ("models/a.json", "models/deep/b.json", "secret", "models-of-others"):
                with open(os.path.join(folder, path), "w"):
                    pass
            os.symlink(os.path.join(folder, "secret"), os.path.join(root, "link"))
            os.symlink("..", os.path.join(root, "up"))
            os.symlink("deep", os.path.join(root, "inner"))
            for source in ("a.json", "deep/b.json", "deep/../a.json", "inner/b.json", "deep"):
                self.assertTrue(os.path.exists(below(root, source)), source)
            for source in (
                "../secret",
                "deep/../../secret",
                "../models-of-others",
                os.path.join(root, "a.json"),
                "link",
                "up/secret",
                "missing.json",
            ):
                with self.assertRaises(InvalidModel, msg=source):
                    below(root, source)


class Adder(Worker):
    """What it does is in the options of the models."""

    models = ModelLimits(capacity=(1 << 20, 1 << 30), default_size=10, load_slots=2, load_timeout=1.5)

    def __init__(self) -> None:
        self.unloaded: List[str] = []

    def load(self, model: Model) -> Any:
        if "error" in model.options:
            raise {"memory": MemoryError, "invalid": InvalidModel, "exit": SystemExit}[model.options["error"]]("no")
        while "hold" in model.options and not model.cancelled:
            threading.Event().wait(0.001)
        if model.cancelled and model.options["hold"] == "raise":
            raise RuntimeError("cancelled")
        model.max_concurrency = json.loads(model.options.get("concurrency", "0"))
        model.size = (1, 2) if "size" not in model.options else json.loads(model.options["size"])
        return model.id.upper()

    def unload(self, model: Model) -> None:
        if "busy" in model.options:
            raise OSError("busy")
        self.unloaded.append(model.id)

    def predict(self, batch: Any) -> Any:
        return {}


class ModelsTest(unittest.TestCase):
    def setUp(self) -> None:
        self.sent: List[Dict[str, Any]] = []
        self.worker = Adder()
        self.models = Models(self.worker, lambda header: self.sent.append(json.loads(header)), error_header, wire_model)
        self.addCleanup(self.models.close, 30)

    def ask(self, kind: str, **fields: Any) -> None:
        self.models.begin({"type": kind, "load": 7, "model": "a", **fields})

    def answer(self, kind: str, **fields: Any) -> Dict[str, Any]:
        """Returns the answer to a request, which has its number."""
        count = len(self.sent)
        self.ask(kind, **fields)
        eventually(lambda: len(self.sent) > count, "an answer")
        self.assertTrue(self.models.close(30))
        self.assertEqual(self.sent[-1]["load"], 7)
        return self.sent[-1]

    def test_limits_are_sent(self) -> None:
        size = {"capacity": {"host": 1 << 20, "device": 1 << 30}, "default_size": {"host": 10, "device": 0}}
        self.assertEqual(Adder.models.wire(), {**size, "load_slots": 2, "load_timeout": 1500})
        for limits in (
            ModelLimits(capacity=-1),
            ModelLimits(default_size=(1, 2, 3)),  # type: ignore[arg-type]
            ModelLimits(load_slots=0),
            ModelLimits(capacity=True),
        ):
            with self.assertRaises(ValueError):
                limits.wire()

    def test_batches_get_the_value_of_their_model(self) -> None:
        for reference in (None, {}, {"id": "a"}, {"alias": "a"}):
            self.assertRaises(ModelGone, self.models.find, reference)
        answer = self.answer("load")
        self.assertEqual(answer, {"type": "loaded", "load": 7, "size": {"host": 1, "device": 2}})
        self.assertEqual(self.models.find({"id": "a"}), "A")
        self.assertEqual(self.answer("size")["size"], {"host": 1, "device": 2})
        self.assertEqual(self.answer("unload"), {"type": "unloaded", "load": 7})
        self.assertRaises(ModelGone, self.models.find, {"id": "a"})
        self.assertEqual(self.answer("size")["size"], {"host": 0, "device": 0})
        self.assertEqual(self.answer("unload"), {"type": "unloaded", "load": 7})
        self.assertEqual(self.worker.unloaded, ["a"])

    def test_failed_load_has_its_kind(self) -> None:
        for error, kind in (("memory", "out_of_memory"), ("invalid", "invalid_model"), ("exit", "exception")):
            self.assertEqual(self.answer("load", options={"error": error})["kind"], kind)
            self.assertRaises(ModelGone, self.models.find, {"id": "a"})

    def test_model_of_an_impossible_size_is_unloaded(self) -> None:
        for size in ("-1", "1.5", "[1, 2]", '"1"', str(1 << 53)):
            self.assertEqual(self.answer("load", options={"size": size, "concurrency": "4"})["kind"], "exception")
            self.assertRaises(ModelGone, self.models.find, {"id": "a"})
        self.assertEqual(self.worker.unloaded, ["a"] * 5)

    def test_model_of_an_impossible_concurrency_is_unloaded(self) -> None:
        for most in ("-1", "2.0", "5000", "true"):
            answer = self.answer("load", options={"concurrency": most})
            self.assertIn("max_concurrency: expected a whole number from 0 to 1024", answer["message"])
        self.assertEqual(self.worker.unloaded, ["a"] * 4)
        self.assertEqual(self.answer("load", options={"concurrency": "4"})["max_concurrency"], 4)

    def test_model_stays_when_its_unload_fails(self) -> None:
        self.answer("load", options={"busy": ""})
        self.assertEqual(self.answer("unload")["kind"], "exception")
        self.assertEqual(self.models.find({"id": "a"}), "A")

    def test_unload_cancels_a_load(self) -> None:
        for how in ("raise", "ignore"):
            self.sent.clear()
            self.ask("load", options={"hold": how})
            self.ask("unload", load=8)
            eventually(lambda: len(self.sent) == 2, "two answers")
            first = self.sent[0].get("kind", self.sent[0]["type"])
            self.assertEqual(first, {"raise": "cancelled", "ignore": "loaded"}[how])
            self.assertEqual(self.sent[1], {"type": "unloaded", "load": 8})
            self.assertRaises(ModelGone, self.models.find, {"id": "a"})


class OwnSpecs(Worker):
    """Its models have the specs that their sources name."""

    models = ModelLimits()

    def load(self, model: Model) -> Any:
        if model.source != "common":
            model.inputs = {
                "exact": {"x": Tensor("INT16", [-1, -1])},
                "padded": {"x": Tensor("INT16", [-1, -1], variable="pad", multiple=4)},
                "wrong": {"x": Tensor("INT16", [2])},
            }[model.source.partition(" ")[0]]
            model.outputs = {"y": Tensor("BF16" if "brain" in model.source else "UINT16", [-1, -1])}
        return model.id

    def predict(self, batch: Any) -> Any:
        return {"y": batch["x"].view("uint16")}


class OwnSpecsTest(unittest.TestCase):
    def test_batch_has_the_specs_of_its_model(self) -> None:
        worker = OwnSpecs()
        models = Models(worker, lambda header: None, error_header, wire_model)
        runs, headers = Runs(worker, arrays_of("numpy"), 1 << 20, lambda batch: None, True, models), Headers()
        for name, source in (("a", "exact"), ("b", "exact brain"), ("c", "padded"), ("d", "common")):
            models.begin({"type": "load", "load": 1, "model": name, "source": source})
            self.assertTrue(models.close(30))
        want = {"a": ("UINT16", [1, 2]), "b": ("BF16", [1, 2]), "c": ("UINT16", [1, 4]), "d": ("UINT16", [1, 2])}
        for name in "aabbccddcba":  # the second of a pair is decoded and encoded by what is known of the first
            part = {"name": "x", "datatype": "INT16", "shape": [1, 2], "at": 0, "size": 4}
            header = {"type": "predict", "batch": 1, "model": {"id": name}, "items": [{"id": "r"}], "parts": [part]}
            text = json.dumps(header, separators=(",", ":")).encode()
            reply = runs.run(runs.batch(headers.decode(memoryview(text)), memoryview(b"1234"), 0.0))[0]
            (output,) = json.loads(reply)["parts"]
            self.assertEqual((output["datatype"], output["shape"]), want[name], name)

    def test_spec_is_sent(self) -> None:
        with testing.run(OwnSpecs, models={"a": "padded brain"}, process=False) as w:
            self.assertEqual(
                w.spec,
                {
                    "batch_axis": "rows",
                    "inputs": [{"name": "x", "datatype": "INT16", "shape": [-1, -1], "variable": "pad", "multiple": 4}],
                    "outputs": [{"name": "y", "datatype": "BF16", "shape": [-1, -1]}],
                },
            )
            self.assertEqual(w.predict({"x": [1, 2]})["y"].shape, (1, 4))
            with self.assertRaisesRegex(BatchFailed, "load: model b: inputs.*axis 0 is rows"):
                w.load("b", "wrong")
            w.load("c", "common")
            self.assertEqual(w.spec["inputs"], [])

    def test_streams_have_the_specs_of_their_worker(self) -> None:
        class Streams(OwnSpecs):
            predict = Worker.predict

            def stream(self, item: Any) -> Any:
                yield {"y": item["x"]}

        with self.assertRaisesRegex(BatchFailed, "a worker that streams"):
            with testing.run(Streams, models={"a": "exact"}, process=False):
                pass


class HeadersTest(unittest.TestCase):
    def test_model_of_a_predict_is_read(self) -> None:
        headers = Headers()
        for model in ({"id": "a"}, {"id": "π"}, {"id": 'quoted "\\'}, {"alias": "a"}, {"id": "a", "version": "1"}):
            for ensure_ascii in (True, False):
                header = {"type": "predict", "batch": 1, "model": model, "items": [{"id": "r"}], "parts": []}
                text = json.dumps(header, separators=(",", ":"), ensure_ascii=ensure_ascii)
                for _ in range(2):  # the second is decoded by what is known of the first
                    self.assertEqual(headers.decode(memoryview(text.encode()))["model"], model)


WORKER = """
from stagemesh import InvalidModel, ModelLimits, Worker

class Names(Worker):
    arrays = "buffer"
    models = ModelLimits(load_slots=2)

    def setup(self, ctx):
        ctx.progress(f"memory {ctx.memory}")

    def load(self, model):
        return model.source

    def predict_item(self, item):
        return {"y": item.model}
"""


class ProcessTest(unittest.TestCase):
    def test_worker_loads_models(self) -> None:
        with Host(WORKER, welcome={"capabilities": ["models"], "memory": {"host": 5}}) as host:
            self.assertEqual(host.hello()["capabilities"], ["prefetch", "models"])
            self.assertEqual(host.expect("state")[0]["message"], "memory (5, 0)")
            ready, _ = host.expect("ready")
            self.assertEqual(ready["models"]["load_slots"], 2)
            host.send({"type": "load", "load": 1, "model": "a", "source": "first"})
            self.assertEqual(host.expect("loaded")[0]["load"], 1)
            host.send({"type": "predict", "batch": 1, "model": {"id": "a"}, "items": [{"id": "r"}], "parts": []})
            self.assertEqual(host.expect("result")[1], b"first")
            host.send({"type": "predict", "batch": 2, "model": {"id": "b"}, "items": [{"id": "r"}], "parts": []})
            error, _ = host.expect("error")
            self.assertEqual((error["batch"], error["kind"]), (2, "invalid_model"))
            host.send({"type": "shutdown", "timeout": 5000})
            self.assertEqual(host.expect("state")[0]["state"], "SHUTDOWN")
            self.assertTrue(host.ended())
            self.assertEqual((host.exit_code(), host.stderr()), (0, ""))

    def test_host_without_models_is_refused(self) -> None:
        with Host(WORKER) as host:
            host.hello()
            self.assertIn("give it a section models", host.expect("state")[0]["message"])

    def test_request_that_breaks_the_protocol_ends_the_worker(self) -> None:
        with Host(WORKER, welcome={"capabilities": ["models"]}) as host:
            host.ready()
            host.send({"type": "load", "load": 1, "model": ""})
            self.assertEqual(host.expect("error")[0]["kind"], "protocol")
            self.assertEqual(host.exit_code(), 4)


class ClassTest(unittest.TestCase):
    def test_async_load_is_refused(self) -> None:
        class Wrong(Adder):
            async def load(self, model: Model) -> Any:
                return None

        with self.assertRaisesRegex(ValueError, "load: it is async"):
            check_class(Wrong)

    def test_models_need_load(self) -> None:
        class Wrong(Worker):
            models = ModelLimits()

            def predict(self, batch: Any) -> Any:
                return {}

        with self.assertRaisesRegex(ValueError, "has no load"):
            check_class(Wrong)

    def test_load_of_a_worker_with_one_model_is_its_own(self) -> None:
        class Own(Worker):
            def load(self, path: str, more: int) -> Any:
                yield path

            def predict(self, batch: Any) -> Any:
                return {}

        check_class(Own)


if __name__ == "__main__":
    unittest.main()
