"""Answers in chunks, through the protocol in this process."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import unittest
from typing import Any, Dict, List, Mapping, Tuple, Type

import numpy as np

from stagemesh import Bytes, InvalidInput, ItemError, Json, OutOfMemory, Tensor, Text, Worker, testing
from stagemesh.faults import GENERAL
from stagemesh.specs import unpack
from stagemesh.testing import BatchFailed
from stagemesh.worker import check_class

from .support import PATIENCE, eventually
from .workers import errors_that_raise


class Words(Worker):
    """Gives the words of a text back, one by one."""

    arrays = "buffer"
    inputs: Mapping[str, Any] = {"text": Text()}
    outputs: Mapping[str, Any] = {"word": Text()}


class AsyncWords(Words):
    async def stream(self, item: Any) -> Any:
        for word in item["text"].split():
            yield {"word": word}
            await asyncio.sleep(0)
        item.respond("finish", "stop")


class PlainWords(Words):
    def stream(self, item: Any) -> Any:
        yield from item["text"].split()
        item.respond("finish", "stop")


def yields(*values: Any, **attributes: Any) -> List[Type[Worker]]:
    """Returns workers, async and plain, that yield the values to every item, or raise those that are errors."""

    class Async(Words):
        async def stream(self, item: Any) -> Any:
            for value in values:
                if isinstance(value, BaseException):
                    raise value
                yield value

    class Plain(Words):
        def stream(self, item: Any) -> Any:
            for value in values:
                if isinstance(value, BaseException):
                    raise value
                yield value

    for kind in (Async, Plain):
        for name, value in attributes.items():
            setattr(kind, name, value)
    return [Async, Plain]


class StreamsTest(unittest.TestCase):
    def start(self, kind: Type[Worker], **settings: Any) -> testing.Run:
        run = testing.run(kind, process=False, patience_s=PATIENCE, **settings).start()
        self.addCleanup(run.stop)
        return run

    def answers(self, kind: Type[Worker], **settings: Any) -> Tuple[List[Dict[str, Any]], testing.Outcome]:
        """Returns the chunks and the outcome of one request."""
        stream = self.start(kind, **settings).stream({"text": "a b"})
        return list(stream), stream.end()


class ChunksTest(StreamsTest):
    def test_chunks_precede_the_whole_answer(self) -> None:
        for kind in (AsyncWords, PlainWords):
            with self.subTest(kind.__name__):
                run = self.start(kind)
                self.assertEqual(run.hello["capabilities"], ["stream"])
                self.assertEqual(run.spec["batch_axis"], "none")
                text = " ".join(str(i) for i in range(500))
                stream = run.stream({"text": text})
                self.assertEqual([chunk["word"] for chunk in stream], text.split())
                self.assertEqual(stream.outcome["word"], text.replace(" ", ""))
                self.assertEqual(stream.outcome.metadata, {"finish": "stop"})

    def test_predict_returns_the_whole_answer(self) -> None:
        for kind in (AsyncWords, PlainWords):
            run = self.start(kind)
            self.assertEqual(run.predict({"text": "a b c"}), {"word": "abc"})
            run.add({"text": "d"})
            run.add({"text": "e f"})
            self.assertEqual([outcome["word"] for outcome in run.predict()], ["d", "ef"])

    def test_first_chunk_arrives_early(self) -> None:
        go_on = threading.Event()

        class Waits(Words):
            async def stream(self, item: Any) -> Any:
                yield "first"
                await asyncio.get_running_loop().run_in_executor(None, go_on.wait, PATIENCE)
                yield "second"

        chunks = iter(self.start(Waits).stream({"text": ""}))
        self.assertEqual(next(chunks), {"word": "first"})
        go_on.set()
        self.assertEqual(next(chunks), {"word": "second"})

    def test_chunks_are_joined_by_type(self) -> None:
        row = np.array([1, 2], "float32")
        for spec, values, want in (
            (Text(), ["a", "", "b"], "ab"),
            (Bytes("image/png"), [b"ab", bytearray(b"c")], b"abc"),
            (Json(), [{"a": 1}, None, [2]], [{"a": 1}, None, [2]]),
            (Tensor("FP32", [-1, 2]), [[row], [row, row * 2]], [[1, 2], [1, 2], [2, 4]]),
            (Tensor("INT64", [-1]), [[1, 2], [3]], [1, 2, 3]),
            (Tensor("BYTES", [-1]), [[b"a"], [b"bc", b""]], [b"a", b"bc", b""]),
            (Tensor("INT64", []), [1, 2, 3], 3),  # without axes: the last
            (Text(), [], ""),
            (Bytes(), [], b""),
            (Json(), [], []),
            (Json("application/msgpack"), [{"a": 1}, None, [b"x"]], [{"a": 1}, None, [b"x"]]),
            (Json("application/msgpack"), list(range(20)), list(range(20))),
            (Json("application/msgpack"), [], []),
        ):
            for kind in yields(*({"y": value} for value in values), outputs={"y": spec}):
                with self.subTest(f"{spec}, {kind.__name__}"):
                    chunks, outcome = self.answers(kind, arrays="numpy")
                    self.assertEqual(len(chunks), len(values))
                    got = outcome["y"]
                    self.assertEqual(got.tolist() if isinstance(spec, Tensor) else got, want)

    def test_messagepack_list_may_be_long(self) -> None:
        spec = Json("application/msgpack")
        for documents in (0, 15, 16, (1 << 16) - 1, 1 << 16):
            self.assertEqual(unpack(spec.join(documents, b"\x07" * documents, spec.content_type)), [7] * documents)

    def test_chunk_may_have_some_outputs(self) -> None:
        outputs = {"text": Text(), "usage": Json(), "note": Text(optional=True)}
        for kind in yields({"text": "a"}, {"text": "b", "note": None}, {"usage": {"tokens": 2}}, outputs=outputs):
            chunks, outcome = self.answers(kind)
            self.assertEqual(chunks, [{"text": "a"}, {"text": "b"}, {"usage": {"tokens": 2}}])
            self.assertEqual(outcome.outputs, {"text": "ab", "usage": [{"tokens": 2}]})

    def test_undeclared_outputs_are_not_checked(self) -> None:
        for kind in yields({"a": "x"}, {"a": "y", "b": b"z"}, outputs={}):
            chunks, outcome = self.answers(kind)
            self.assertEqual(chunks, [{"a": b"x"}, {"a": b"y", "b": b"z"}])
            self.assertEqual(outcome.outputs, {"a": b"xy", "b": b"z"})

    def test_without_collect_the_result_is_empty(self) -> None:
        for kind in yields("a", "b", collect=False):
            run = self.start(kind)
            self.assertEqual([spec["optional"] for spec in run.spec["outputs"]], [True])
            stream = run.stream({"text": ""})
            self.assertEqual((len(list(stream)), stream.end().outputs, stream.end().error), (2, {}, None))

    def test_other_ranks_send_no_chunks(self) -> None:
        for kind in yields("a", "b"):
            chunks, outcome = self.answers(kind, environ={"RANK": "1", "WORLD_SIZE": "2"})
            self.assertEqual((chunks, outcome.outputs, outcome.error), ([], {}, None))

    def test_streams_run_side_by_side(self) -> None:
        class Async(AsyncWords):
            concurrency = 3

            async def stream(self, item: Any) -> Any:
                self.there = getattr(self, "there", 0) + 1
                yield "in"
                while self.there < 3:
                    await asyncio.sleep(0.001)
                yield "out"

        class Plain(PlainWords):
            concurrency = 3

            def setup(self, ctx: Any) -> None:
                self.all = threading.Barrier(3, timeout=PATIENCE)

            def stream(self, item: Any) -> Any:
                yield "in"
                self.all.wait()
                yield "out"

        for kind in (Async, Plain):
            run = self.start(kind, slots=5)
            self.assertEqual(run.slots, 3)
            streams = [run.stream({"text": ""}) for _ in range(3)]
            for stream in reversed(streams):
                self.assertEqual([chunk["word"] for chunk in stream], ["in", "out"])

    def test_busy_stream_lets_others_run(self) -> None:
        class Greedy(AsyncWords):
            concurrency = 2

            async def stream(self, item: Any) -> Any:
                while item["text"] == "greedy":
                    yield "more"
                yield "modest"

        run = self.start(Greedy, slots=2)
        greedy = run.stream({"text": "greedy"})
        next(iter(greedy))
        self.assertEqual(run.predict({"text": ""}), {"word": "modest"})
        greedy.cancel()
        greedy.end()


class FaultsTest(StreamsTest):
    def test_errors_belong_to_their_item(self) -> None:
        for error, kind, words in (
            (InvalidInput("text", "is rude"), InvalidInput, "text: is rude"),
            (MemoryError(), OutOfMemory, "too large"),
            (RuntimeError("a secret"), Exception, GENERAL),
            (SystemExit(3), Exception, GENERAL),
            (asyncio.CancelledError(), Exception, GENERAL),
        ):
            for worker in yields("a", error):
                with self.subTest(f"{error!r}, {worker.__name__}"):
                    run = self.start(worker)
                    for _ in range(2):  # and the worker goes on
                        stream = run.stream({"text": ""})
                        self.assertEqual(list(stream), [{"word": "a"}])
                        with self.assertRaisesRegex(kind, words):
                            stream.outcome["word"]

    def test_errors_whose_attributes_raise_end_their_stream(self) -> None:
        for error in errors_that_raise():
            for kind in yields("a", error):
                with self.subTest(error.args[0]):
                    self.assertRaises(ItemError, self.start(kind).predict, {"text": "x"})

    def test_bad_text_never_reaches_the_worker(self) -> None:
        for kind in yields("a"):
            with self.assertRaisesRegex(InvalidInput, "is not UTF-8"):
                self.start(kind).predict({"text": b"\xff"})

    def test_invalid_chunks_name_the_output(self) -> None:
        two = {"a": Text(), "b": Text()}
        tensor = {"y": Tensor("FP32", [-1, -1])}
        for values, outputs, want in (
            ([{"y": "x", "z": "x"}], {"y": Text()}, "chunk 1 has output 'z', which is not declared; outputs are 'y'"),
            (["x", 7], {"y": Text()}, "chunk 2: output 'y': got int, expected str"),
            ([{}], {"y": Text()}, "chunk 1 has no outputs"),
            ([{"y": None}], {"y": Text()}, "chunk 1 has no outputs"),
            (["x"], two, "chunk 1 is a str; yield a dict of outputs by name: 'a', 'b'"),
            ([{"y": np.zeros(3, "float32")}], tensor, r"chunk 1: output 'y': got shape \[3\], expected \[-1, -1\]"),
            (
                [{"y": np.zeros((1, 2), "float32")}, {"y": np.zeros((1, 3), "float32")}],
                tensor,
                r"output 'y' is FP32 \[any, 3\], and was FP32 \[any, 2\] in a chunk before",
            ),
            ([], tensor, "stream returned no output 'y'; it has none"),
            (
                [{"y": np.zeros(2, "float32")}] * 2,
                {"y": Tensor("FP32", [2])},
                r"output 'y': its chunks have shape \[4\] together, expected \[2\]: declare -1 for axis 0",
            ),
            ([b"x" * 2048], {"y": Bytes()}, "chunk 1 takes 2048 bytes, and the host takes 1024 in a frame"),
        ):
            for kind in yields(*values, outputs=outputs):
                with self.subTest(want), self.assertRaisesRegex(BatchFailed, want):
                    self.answers(kind, arrays="numpy", max_frame=1024)

    def test_whole_answer_is_bounded(self) -> None:
        for kind in yields(*["x" * 100] * 11):
            stream = self.start(kind, max_frame=1000).stream({"text": ""})
            self.assertEqual(len(list(stream)), 10)
            with self.assertRaisesRegex(Exception, "takes more than the 1000 bytes that the host takes at once"):
                stream.outcome["word"]
        for kind in yields(*["x" * 100] * 11, collect=False):
            stream = self.start(kind, max_frame=1000).stream({"text": ""})
            self.assertEqual(len(list(stream)), 11)
            self.assertIsNone(stream.outcome.error)

    def test_returned_value_is_logged(self) -> None:
        class Returns(Words):
            def stream(self, item: Any) -> Any:
                yield "a"
                return "b"

        with self.assertLogs("stagemesh.worker", "WARNING") as logs:
            self.assertEqual(self.start(Returns).predict({"text": ""}), {"word": "a"})
        self.assertIn("Returns.stream returned a str, which is ignored: yield it", logs.output[0])

    def test_invalid_classes_are_refused(self) -> None:
        class Both(PlainWords):
            def predict_item(self, item: Any) -> Any: ...

        class All(Both):
            def predict(self, batch: Any) -> Any: ...

        class Prepares(PlainWords):
            def preprocess(self, item: Any) -> Any: ...

        class Coroutine(Words):
            async def stream(self, item: Any) -> Any:  # type: ignore[override]
                return {}

        class Function(Words):
            def stream(self, item: Any) -> Any:
                return iter([])

        class Collects(PlainWords):
            collect = 1  # type: ignore[assignment]

        class Yields(PlainWords):
            def setup(self, ctx: Any) -> Any:
                yield 1

        for kind, want in (
            (Both, "both predict_item and stream; keep one"),
            (All, "predict, predict_item and stream; keep one"),
            (Prepares, "preprocess goes with predict; do its work in stream"),
            (Coroutine, "it is async and does not yield; yield each chunk"),
            (Function, "it does not yield; yield each chunk, also those of another generator: yield from"),
            (Collects, "Collects.collect: expected True or False, got 1"),
            (Yields, "Yields.setup: it yields; write it as a plain function"),
            (Words, "neither predict.* nor stream"),
        ):
            with self.assertRaisesRegex(ValueError, want):
                check_class(kind)

    def test_stream_needs_a_streaming_worker(self) -> None:
        class Batches(Words):
            def predict_item(self, item: Any) -> Any:
                return {"word": item["text"]}

        run = self.start(Batches)
        with self.assertRaisesRegex(ValueError, r"it has no stream\(self, item\)"):
            run.stream({"text": ""})


class CancelTest(StreamsTest):
    def test_async_stream_is_cancelled_at_its_await(self) -> None:
        seen: List[str] = []

        class Waits(Words):
            concurrency = 2

            async def stream(self, item: Any) -> Any:
                try:
                    yield "a"
                    await asyncio.sleep(PATIENCE if item["text"] == "long" else 0)
                    yield "b"
                except asyncio.CancelledError:
                    seen.append(f"cancelled {item.cancelled}")
                    raise
                finally:
                    await asyncio.sleep(0)
                    seen.append("cleaned up")

        run = self.start(Waits, slots=2)
        stream, other = run.stream({"text": "long"}), run.stream({"text": "short"})
        next(iter(stream))
        began = time.monotonic()
        stream.cancel()
        self.assertIsNotNone(stream.end().error)
        self.assertLess(time.monotonic() - began, PATIENCE / 2)
        self.assertEqual(other.end()["word"], "ab")
        self.assertEqual([line for line in seen if "cancelled" in line], ["cancelled True"])
        self.assertEqual(run.predict({"text": "short"}), {"word": "ab"})

    def test_cleanup_is_not_interrupted(self) -> None:
        seen: List[str] = []

        class Tidies(Words):
            concurrency = 2

            async def stream(self, item: Any) -> Any:
                try:
                    yield "a"
                    await asyncio.sleep(PATIENCE)
                finally:
                    seen.append("begins")
                    await asyncio.sleep(0.1)
                    seen.append("cleaned up")

        run = self.start(Tidies, slots=2)
        streams = [run.stream({"text": ""}) for _ in range(2)]
        for stream in streams:
            next(iter(stream))
        run.tell("cancel", batch=streams[0].batch, items=[0])
        eventually(lambda: bool(seen), "it cleans up")
        run.tell("cancel", batch=streams[0].batch)
        self.assertIsNotNone(streams[0].end().error)
        self.assertEqual(seen, ["begins", "cleaned up"])
        run.tell("cancel", batch=streams[1].batch)
        eventually(lambda: len(seen) == 3, "the other cleans up")
        run.tell("shutdown", timeout=20)  # which leaves the cleanup its usual time
        eventually(lambda: len(seen) == 4, "the other has cleaned up")

    def test_busy_stream_ends_at_its_next_yield(self) -> None:
        closed = threading.Semaphore(0)

        class Async(Words):
            async def stream(self, item: Any) -> Any:
                try:
                    while True:
                        yield "more"
                finally:
                    closed.release()

        class Plain(Words):
            def stream(self, item: Any) -> Any:
                try:
                    while True:
                        yield "more"
                finally:
                    closed.release()

        for kind in (Async, Plain):
            run = self.start(kind)
            with run.stream({"text": ""}) as stream:
                next(iter(stream))
            self.assertIsNotNone(stream.outcome.error)
            self.assertTrue(closed.acquire(timeout=PATIENCE))
            run.ping()

    def test_work_between_yields_may_read_cancels(self) -> None:
        class Looks(Words):
            def stream(self, item: Any) -> Any:
                yield "a"
                while not item.cancelled:
                    time.sleep(0.001)

        with self.start(Looks).stream({"text": ""}) as stream:
            next(iter(stream))
        self.assertIsNotNone(stream.outcome.error)

    def test_stream_that_ignores_its_cancel_is_closed(self) -> None:
        class Stubborn(Words):
            async def stream(self, item: Any) -> Any:
                yield "a"
                try:
                    await asyncio.sleep(PATIENCE)
                except asyncio.CancelledError:
                    pass
                yield "b"
                raise AssertionError("it goes on")

        with self.start(Stubborn).stream({"text": ""}) as stream:
            next(iter(stream))
            stream.cancel()
            self.assertEqual(list(stream), [])
        self.assertRegex(str(stream.outcome.error), "was cancelled")

    def test_error_of_cleanup_is_logged(self) -> None:
        class Untidy(Words):
            async def stream(self, item: Any) -> Any:
                try:
                    yield "a"
                    await asyncio.sleep(PATIENCE)
                finally:
                    raise RuntimeError("the file is gone")

        run = self.start(Untidy)
        with self.assertLogs("stagemesh.worker", "WARNING") as logs, run.stream({"text": ""}) as stream:
            next(iter(stream))
        self.assertIn("Untidy.stream ended with RuntimeError: the file is gone", logs.output[0])
        run.ping()

    def test_stream_ends_though_a_log_handler_raises(self) -> None:
        class Broken(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                raise OSError("no space left for logs")

        handler = Broken()
        logging.getLogger("stagemesh.worker").addHandler(handler)
        self.addCleanup(logging.getLogger("stagemesh.worker").removeHandler, handler)

        class Untidy(Words):
            async def stream(self, item: Any) -> Any:
                try:
                    yield "a"
                    await asyncio.sleep(PATIENCE)
                finally:
                    raise RuntimeError("the file is gone")

        with self.assertRaisesRegex(BatchFailed, "no space left"), self.start(Untidy).stream({"text": ""}) as stream:
            next(iter(stream))

    def test_early_and_late_cancels_are_harmless(self) -> None:
        for kind in (AsyncWords, PlainWords):
            run = self.start(kind)
            for _ in range(50):
                stream = run.stream({"text": "a"})
                stream.cancel()
                stream.end()
                stream.cancel()
            self.assertEqual(run.predict({"text": "a b"}), {"word": "ab"})


if __name__ == "__main__":
    unittest.main()
