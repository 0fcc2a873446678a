"""Spans: timed by the library and by authors, only for batches with a trace."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import types
import unittest
from contextvars import ContextVar
from typing import Any, Dict, List, Optional
from unittest import mock

import numpy as np

from stagemesh import Bytes, Json, Tensor, Text, Worker, testing
from stagemesh.frames import MAX_HEADER, encode
from stagemesh.spans import MAX_SPANS, NO_SPAN, Spans

from .workers import ROW, XY, RunTest

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class TracedTest(RunTest):
    def end(self, run: testing.Run, inputs: Any, trace: Optional[str] = TRACE, items: int = 1) -> Dict[str, Any]:
        """Runs a batch of these inputs, and returns the header that ends it."""
        assert run.connection is not None
        send = run.connection.send
        began = time.time_ns() // 1000

        def send_traced(header: bytes, *body: Any) -> None:
            if trace is not None:
                header = header.replace(b',"items":', b',"trace":"%s","items":' % trace.encode(), 1)
            send(header.replace(b',"warmup":false', b""), *body)

        with mock.patch.object(run.connection, "send", send_traced):
            batch = run.send([testing.Request(inputs) for _ in range(items)])
        while batch not in run._ends:
            run._receive()
        header = run._ends.pop(batch)[0]
        for i, span in enumerate(header.get("spans", [])):
            outer = {"start": began, "end": time.time_ns() // 1000}
            if "parent" in span:
                self.assertLess(span["parent"], i)
                outer = header["spans"][span["parent"]]
            self.assertLessEqual(outer["start"], span["start"])
            self.assertLessEqual(span["start"], span["end"])
            self.assertLessEqual(span["end"], outer["end"])
        return header

    def tree(self, header: Dict[str, Any]) -> List[Any]:
        """Returns the spans as name, parent and what else they have."""
        more = ("attributes", "error")
        return [(s["name"], s.get("parent"), *(s[key] for key in more if key in s)) for s in header["spans"]]


class SpansTest(TracedTest):
    def test_attribute_that_fails_is_its_type(self) -> None:
        class Broken:
            def __str__(self) -> str:
                raise RuntimeError("no text")

        class Author(XY):
            def predict(self, batch: Any) -> Any:
                with batch.span("mine", broken=Broken()):
                    return {"y": batch["x"]}

        header = self.end(self.start(Author), {"x": ROW})
        self.assertEqual(header["type"], "result")
        self.assertEqual(self.tree(header), [("predict", None), ("mine", 0, {"broken": "<Broken>"})])

    def test_spans_of_author_nest_in_predict(self) -> None:
        class Spanned(XY):
            def predict(self, batch: Any) -> Any:
                with batch.span("tokenize", rows=np.int64(32), share=np.float32(0.5), cached=True) as span:
                    with batch.items[0].span("look up", name="a"):
                        pass
                    span.set(**{"gen_ai.usage.output_tokens": 7, "none": None, "nan": float("nan"), "big": 1 << 70})
                with batch.span("after"):
                    pass
                return {"y": batch["x"]}

        run = self.start(Spanned)
        for _ in range(3):  # the later ones are read as repeated headers
            header = self.end(run, {"x": ROW}, items=2)
            self.assertEqual(header["type"], "result")
            attributes = {
                "rows": 32,
                "share": 0.5,
                "cached": True,
                "gen_ai.usage.output_tokens": 7,
                "none": "None",
                "nan": "nan",
                "big": str(1 << 70),
            }
            self.assertEqual(
                self.tree(header),
                [("predict", None), ("tokenize", 0, attributes), ("look up", 1, {"name": "a"}), ("after", 0)],
            )
        self.assertNotIn("spans", self.end(run, {"x": ROW}, trace=None))

    def test_repeated_batches_return_spans(self) -> None:
        class Twice(XY):
            def predict(self, batch: Any) -> Any:
                return {"y": batch["x"] * np.float32(2)}

        run = self.start(Twice)
        for i in range(4):
            header = self.end(run, {"x": ROW}, trace=None if i == 2 else TRACE)
            self.assertEqual([part["name"] for part in header["parts"]], ["y"])
            self.assertEqual("spans" in header, i != 2)

    def test_all_steps_are_timed(self) -> None:
        class Steps(Worker):
            inputs = {"image": Bytes()}
            outputs = {"length": Json()}
            prepared = {"x": Tensor("FP32", [-1, 1])}

            def preprocess(self, item: Any) -> Any:
                with item.span("read"):
                    return {"x": np.full((1, 1), len(item["image"]), "float32")}

            def predict(self, batch: Any) -> Any:
                return {"p": batch["x"]}

            def postprocess(self, item: Any, outputs: Any) -> Any:
                return {"length": int(outputs["p"][0, 0])}

        header = self.end(self.start(Steps), {"image": b"123"})
        want = [("preprocess", None), ("read", 0), ("predict", None), ("postprocess", None)]
        self.assertEqual(self.tree(header), want)

    def test_single_items_are_timed_together(self) -> None:
        class Count(Worker):
            inputs = {"text": Text()}
            outputs = {"count": Json()}

            def predict_item(self, item: Any) -> Any:
                with item.span("split"):
                    return {"count": len(item["text"].split())}

        header = self.end(self.start(Count), {"text": "a b"}, items=2)
        self.assertEqual(self.tree(header), [("predict", None), ("split", 0), ("split", 0)])

    def test_streams_are_timed(self) -> None:
        class Chat(Worker):
            outputs = {"text": Text()}
            arrays = "buffer"

            def stream(self, item: Any) -> Any:
                for word in ("a", "b"):
                    with item.span("token"):
                        yield word

        class ChatAsync(Chat):
            async def stream(self, item: Any) -> Any:
                for word in ("a", "b"):
                    with item.span("token"):
                        await asyncio.sleep(0)
                        yield word

        for kind in (Chat, ChatAsync):
            with self.subTest(kind.__name__):
                header = self.end(self.start(kind), {"prompt": b"x"})
                self.assertEqual(self.tree(header), [("stream", None), ("token", 0), ("token", 0)])

    def test_errors_are_types_without_texts(self) -> None:
        class Fails(XY):
            def predict(self, batch: Any) -> Any:
                with batch.span("inner"):
                    raise KeyError("secret")

        header = self.end(self.start(Fails), {"x": ROW}, items=2)
        self.assertEqual(header["type"], "error")
        self.assertEqual(self.tree(header), [("predict", None, "KeyError"), ("inner", 0, "KeyError")])

    def test_threads_of_worker_have_spans(self) -> None:
        class Threaded(XY):
            def predict(self, batch: Any) -> Any:
                def work() -> None:
                    with batch.span("thread"), batch.span("inner"):
                        pass

                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
                return {"y": batch["x"]}

        header = self.end(self.start(Threaded), {"x": ROW})
        self.assertEqual(self.tree(header), [("predict", None), ("thread", None), ("inner", 1)])

    def test_only_rank_0_returns_spans(self) -> None:
        class Same(XY):
            def predict(self, batch: Any) -> Any:
                return {"y": batch["x"]}

        run = self.start(Same, environ={"RANK": "1", "WORLD_SIZE": "2"})
        self.assertEqual(self.end(run, {"x": ROW}), {"type": "result", "batch": 1})

    def test_spans_never_fail_their_batch(self) -> None:
        class Many(XY):
            def predict(self, batch: Any) -> Any:
                for _ in range(200):
                    with batch.span("n" * 1000, k="v" * 1000):
                        pass
                return {"y": batch["x"]}

        class Long(XY):
            def predict(self, batch: Any) -> Any:
                with batch.span("a", **{"k" * MAX_HEADER: 1}):
                    return {"y": batch["x"]}

        header = self.end(self.start(Many), {"x": ROW})
        self.assertEqual(len(header["spans"]), MAX_SPANS)
        self.assertEqual((header["spans"][1]["name"], header["spans"][1]["attributes"]["k"]), ("n" * 256, "v" * 256))
        header = self.end(self.start(Long), {"x": ROW})
        self.assertEqual((len(header["parts"]), "spans" in header), (1, False))

    def test_batch_without_trace_has_one_span_that_does_nothing(self) -> None:
        seen: List[Any] = []

        class Look(XY):
            def predict(self, batch: Any) -> Any:
                with batch.span("a", n=1) as span:
                    span.set(m=2)
                seen.extend((span, batch.items[0].span("b")))
                return {"y": batch["x"]}

        self.end(self.start(Look), {"x": ROW}, trace=None)
        self.assertEqual((seen, NO_SPAN._attributes), ([NO_SPAN, NO_SPAN], {}))

    def test_header_is_as_long_as_allowed_at_most(self) -> None:
        spans = Spans(TRACE)
        most = MAX_HEADER - len(',"spans":[]')
        for length, fits in ((most, True), (most + 1, False)):
            header = encode({"k": "x" * (length - len('{"k":""}'))}).encode()
            self.assertEqual(len(spans.added_to(header)) > length, fits)


class OpenTelemetryTest(TracedTest):
    """The modules of opentelemetry-api that the library uses, as far as it uses them."""

    def setUp(self) -> None:
        self.current: ContextVar[Any] = ContextVar("current", default=None)

        class Propagator:
            def extract(self, carrier: Dict[str, str]) -> Any:
                return ("context of", carrier["traceparent"])

        modules: Dict[str, Any] = {}
        for name in ("", ".context", ".trace", ".trace.propagation", ".trace.propagation.tracecontext"):
            modules["opentelemetry" + name] = types.ModuleType("opentelemetry" + name)
        modules["opentelemetry.context"].attach = self.current.set
        modules["opentelemetry.context"].detach = self.current.reset
        modules["opentelemetry.trace.propagation.tracecontext"].TraceContextTextMapPropagator = Propagator
        patch = mock.patch.dict(sys.modules, modules)
        patch.start()
        self.addCleanup(patch.stop)

    def test_context_is_that_of_the_batch(self) -> None:
        current, seen = self.current, []

        class Look(XY):
            def predict(self, batch: Any) -> Any:
                seen.append(current.get())
                with batch.span("a"):
                    token = current.set("the author's own")
                    with batch.span("b"):
                        seen.append(current.get())
                    current.reset(token)
                return {"y": batch["x"]}

        class Chat(Worker):
            outputs = {"text": Text()}
            arrays = "buffer"

            async def stream(self, item: Any) -> Any:
                await asyncio.sleep(0)
                seen.append(current.get())
                yield "a"

        run = self.start(Look)
        self.end(run, {"x": ROW})
        self.end(run, {"x": ROW}, trace=None)
        context = ("context of", TRACE)
        self.assertEqual(seen, [context, "the author's own", None, "the author's own"])
        self.end(self.start(Chat), {"prompt": b"x"})
        self.assertEqual(seen[4:], [context])


if __name__ == "__main__":
    unittest.main()
