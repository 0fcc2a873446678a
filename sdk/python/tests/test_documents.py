"""Documents: JSON Schemas in declarations, and MessagePack by content type."""

import json
import sys
import unittest
from importlib import import_module
from typing import Any, Dict
from unittest import mock

from stagemesh import Json, Text, Worker, testing
from stagemesh.parts import Blob
from stagemesh.specs import is_packed, spec_of
from stagemesh.values import Encoder, arrays_of

msgpack: Any = import_module("msgpack")
ORDER: Dict[str, Any] = {"type": "object", "properties": {"price": {"type": "number", "minimum": 0}}}


class SchemaTest(unittest.TestCase):
    def test_schema_is_sent_to_the_host(self) -> None:
        spec = Json(schema=ORDER, description="an order")
        self.assertEqual(
            spec.wire("order"),
            {"name": "order", "description": "an order", "content_types": ["application/json"], "schema": ORDER},
        )
        self.assertNotIn("schema", Json().wire("x"))
        self.assertEqual(Json(schema={}).wire("x")["schema"], {})

    def test_later_changes_of_a_schema_are_ignored(self) -> None:
        schema: Dict[str, Any] = {"enum": [1]}
        spec = Json(schema=schema)
        schema["enum"].append(2)
        self.assertEqual(spec.schema, {"enum": [1]})

    def test_invalid_schema_is_refused_at_its_declaration(self) -> None:
        circle: Dict[str, Any] = {}
        circle["not"] = circle
        bads: Any = ("order.json", [], True, {"const": {1}}, {"const": float("nan")}, circle)
        for schema in bads:
            with self.assertRaisesRegex(ValueError, "^Json: schema"):
                Json(schema=schema)

    def test_run_knows_the_schema(self) -> None:
        class Shop(Worker):
            arrays = "buffer"
            inputs = {"order": Json(schema=ORDER)}
            outputs = {"total": Json(schema={"type": "number"})}

            def predict(self, batch: Any) -> Any:
                return {"total": [order["price"] for order in batch["order"]]}

        with testing.run(Shop, process=False) as run:
            self.assertEqual(run.spec["inputs"][0]["schema"], ORDER)
            self.assertEqual(run.spec["outputs"][0]["schema"], {"type": "number"})
            run.add({"order": {"price": 2.5}})
            [outcome] = run.predict()
            self.assertEqual(outcome["total"], 2.5)
        spec = spec_of(Json("application/json", schema=ORDER).wire("order"))
        self.assertEqual(getattr(spec, "schema", None), ORDER)


class PackedTest(unittest.TestCase):
    class Echo(Worker):
        arrays = "buffer"
        inputs = {"d": Json("application/json", "application/x-msgpack"), "t": Text("text/plain", optional=True)}
        outputs = {"d": Json("application/msgpack"), "j": Json()}

        def predict(self, batch: Any) -> Any:
            return {"d": batch["d"], "j": [type(d).__name__ for d in batch["d"]]}

    def ask(self, *blobs: Blob) -> Any:
        """Returns the outcomes of documents that are sent as they are."""
        with testing.run(self.Echo, process=False) as run:
            with mock.patch.object(Encoder, "_input", side_effect=lambda *args: args[2]):
                for blob in blobs:
                    run.add({"d": blob})
                return run.predict()

    def test_documents_follow_their_content_type(self) -> None:
        document = {"image": b"\xff", "n": [1, 2.5, None, "ü"]}
        packed = Blob("application/msgpack", msgpack.packb(document))
        other = Blob("Application/X-MsgPack; v=1", msgpack.packb([1]))
        got = self.ask(packed, Blob("application/json", b'{"a":1}'), other, Blob("", b"[2]"))
        self.assertEqual([o.error or o["d"] for o in got], [document, {"a": 1}, [1], [2]])
        self.assertEqual([o["j"] for o in got], ["dict", "dict", "list", "list"])

    def test_invalid_messagepack_is_its_items_fault(self) -> None:
        good = msgpack.packb(1)
        bads = [b"", b"\x92\x01", b"\xc1", good + good, b"\x81\x01\x01", b"\xa1\xff", b"\x91" * 100000]
        bads.append(b"\xdd\xff\xff\xff\xff")  # a list that lies about its length
        got = self.ask(*[Blob("application/msgpack", data) for data in [good, *bads, good]])
        self.assertEqual([o.error is None for o in got], [True, *[False] * len(bads), True])
        for outcome in got[1:-1]:
            self.assertEqual(outcome.error.field, "d")
            self.assertRegex(str(outcome.error), "input 'd' is not MessagePack: .")

    def test_values_that_cannot_be_packed_are_named(self) -> None:
        class Bad(self.Echo):  # type: ignore[name-defined,misc]
            def predict(self, batch: Any) -> Any:
                return {"d": [1 << 70], "j": [1]}

        with testing.run(Bad, process=False) as run:
            run.add({"d": 1})
            with self.assertRaisesRegex(testing.BatchFailed, "got int, which is not MessagePack"):
                run.predict()

    def test_messagepack_needs_its_package(self) -> None:
        with mock.patch.dict(sys.modules, {"msgpack": None}):
            with self.assertRaisesRegex(ValueError, "^Json: application/vnd.msgpack needs the package msgpack"):
                Json("application/json", "application/vnd.msgpack")
            Json("application/json")

    def test_all_messagepack_content_types_are_known(self) -> None:
        for name in ("application/msgpack", "Application/X-msgpack ; a=b", "application/vnd.msgpack"):
            self.assertTrue(is_packed(name), name)
        for name in ("", "application/json", "application/msgpacks"):
            self.assertFalse(is_packed(name), name)


class JsonTest(unittest.TestCase):
    def test_inputs_are_encoded_as_the_first_content_type(self) -> None:
        for spec, decode in ((Json(), json.loads), (Json("application/msgpack"), msgpack.unpackb)):
            blob = Encoder({"d": spec}, arrays_of("buffer"), joins=False).inputs("x", {"d": {"a": [1]}})["d"]
            assert isinstance(blob, Blob)
            self.assertEqual(decode(bytes(blob.data)), {"a": [1]})


if __name__ == "__main__":
    unittest.main()
