"""stagemesh.client against a small gateway: faults, retries, streams, jobs, values."""

from __future__ import annotations

import array
import asyncio
import contextlib
import io
import json
import math
import os
import pickle
import re
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import warnings
from pathlib import Path
from typing import Any, Dict, List
from unittest import mock

import numpy as np

from stagemesh import client
from stagemesh.client import AsyncMesh, Blob, Fault, Mesh, Tensor, calls, faults, packing, values

from .gateway import (
    REQUEST_ID,
    Gateway,
    chunk,
    closed_port,
    document,
    done,
    echo,
    event,
    events,
    fault,
    outputs,
    packed,
    raw,
    reset,
    stall,
    text,
)
from .support import ROOT

INFER = "/v1/pipelines/p:infer"


def quick() -> Any:
    """Makes pauses before retries short; what Retry-After asks for stays."""
    return mock.patch.object(calls, "_FIRST_PAUSE", 0.001)


class ClientTest(unittest.TestCase):
    def setUp(self) -> None:
        self.stack = contextlib.ExitStack()
        self.addCleanup(self.stack.close)
        self.stack.enter_context(quick())

    def gateway(self, *scripts: Any, **settings: Any) -> Gateway:
        return self.stack.enter_context(Gateway(*scripts, **settings))

    def mesh(self, gateway: Any, **settings: Any) -> Mesh:
        return self.stack.enter_context(Mesh(getattr(gateway, "url", gateway), **settings))

    def fails(self, kind: Any, call: Any, *arguments: Any, **named: Any) -> Any:
        with self.assertRaises(kind) as raised:
            call(*arguments, **named)
        return raised.exception


class TableTest(unittest.TestCase):
    def test_reasons_are_those_of_the_documentation(self) -> None:
        with open(os.path.join(ROOT, "..", "..", "docs", "faults.md"), encoding="utf-8") as file:
            rows = re.findall(r"^\| ([A-Z_]+) \| ([A-Z_]+) \| (\d+) \| (yes|no) \|", file.read(), re.MULTILINE)
        self.assertGreater(len(rows), 40)
        own = {
            reason: kind.code
            for reason, kind in faults.REASONS.items()
            if reason not in ("DISCONNECTED", "INVALID_ANSWER")
        }
        self.assertEqual({reason: code for reason, code, _, _ in rows}, own)
        self.assertEqual(
            {reason for reason, _, _, retryable in rows if retryable == "yes"}, faults.RETRYABLE - {"DISCONNECTED"}
        )

    def test_import_needs_neither_numpy_nor_the_workers_code(self) -> None:
        script = (
            "import sys, stagemesh.client; print(*(m for m in sys.modules if m.startswith(('stagemesh', 'numpy'))))"
        )
        loaded = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True
        ).stdout
        self.assertEqual(
            {name for name in loaded.split() if not name.startswith("stagemesh.client")}, {"stagemesh"}, loaded
        )

    def test_faults_can_be_pickled(self) -> None:
        error = faults.fault_of(
            429,
            {},
            json.dumps(
                {"error": {"code": "RESOURCE_EXHAUSTED", "reason": "QUEUE_FULL", "message": "m", "retry_after_ms": 250}}
            ).encode(),
        )
        again = pickle.loads(pickle.dumps(error))
        self.assertEqual(
            (type(again), again.reason, again.retry_after, str(again)),
            (client.ResourceExhausted, "QUEUE_FULL", 0.25, str(error)),
        )


class ValuesTest(ClientTest):
    def ask(self, **inputs: Any) -> client.Answer:
        return self.mesh(self.gateway(echo)).infer("p", inputs)

    def test_inputs_come_back(self) -> None:
        for value in (b"\x00raw", "text \u00e9", {"a": [1, None, "b"]}, [1, 2], True, None, 1.5, 7):
            with self.subTest(value):
                self.assertEqual(self.ask(x=value)["x"], value)

    def test_arrays_come_back(self) -> None:
        for value in (
            np.arange(6, dtype="float32").reshape(2, 3),
            np.asfortranarray(np.arange(6, dtype="int64").reshape(2, 3)),
            np.array([math.nan, math.inf], "float16"),
            np.array(3.5),
            np.zeros((0, 4), "uint8"),
            np.array([True, False]),
        ):
            with self.subTest(value.dtype):
                got = self.ask(x=value)["x"]
                np.testing.assert_array_equal(got, value)
                self.assertEqual((got.dtype, got.shape), (value.dtype, value.shape))
        self.ask(x=np.zeros(2))["x"][0] = 1  # it may be changed

    def test_large_inputs_are_not_copied_into_one(self) -> None:
        value = np.arange(1 << 20, dtype="float64")
        pieces = values.encode_request({"x": value, "y": b"y"}, {}, ())
        self.assertTrue(any(np.shares_memory(value, np.frombuffer(piece, "u1")) for piece in pieces))
        np.testing.assert_array_equal(self.ask(x=value)["x"], value)

    def test_tensors_without_numpy(self) -> None:
        rows: List[Any] = [
            (Tensor([[1, 2], [3, 4]], "INT16"), [[1, 2], [3, 4]]),
            (Tensor([1, 2, 3, 4], "FP32", [2, 2]), [[1, 2], [3, 4]]),
            (Tensor([0.5, -2], "FP16"), [0.5, -2]),
            (Tensor([1.0, -2.5], "BF16"), [1.0, -2.5]),
            (Tensor(["a", b"\xff"], "BYTES"), [b"a", b"\xff"]),
            (Tensor([True, False], "BOOL"), [True, False]),
            (Tensor(b"\x01\x00\x02\x00", "UINT16"), [1, 2]),
            (array.array("d", [1, 2]), [1, 2]),
            (memoryview(array.array("i", [1, 2])), [1, 2]),
        ]
        with mock.patch.object(values, "_has_numpy", lambda: False):
            for value, want in rows:
                got = self.ask(x=value)["x"]
                self.assertIsInstance(got, Tensor)
                self.assertEqual(got.tolist(), want)
        self.assertEqual(repr(Tensor([[1, 2]], "INT8")), "INT8[1, 2] [[1, 2]]")
        self.assertEqual(Tensor([[1.5]], "FP32").numpy().tolist(), [[1.5]])

    def test_types_of_files_follow_their_names(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name, kind in {"7.png": "image/png", "7.unknown": "", "seven": "", "7.json.gz": ""}.items():
                path = Path(folder, name)
                path.write_bytes(b"\x89PNG")
                with open(path, "rb") as file:
                    for value in (file, path):
                        answer = self.ask(x=value)
                        self.assertEqual((answer.value, answer.content_types), (b"\x89PNG", {"x": kind}))
        self.assertEqual(self.ask(x=io.StringIO("text")).content_types, {"x": "text/plain"})
        self.assertEqual(self.ask(x=Blob(b"1", "a/b")).content_types, {"x": "a/b"})

    def test_bad_inputs_fail_before_anything_is_sent(self) -> None:
        gateway = self.gateway(echo)
        mesh = self.mesh(gateway)
        for value, says in (
            (object(), "got object; give bytes"),
            ([1, object()], "not JSON serializable"),
            (math.nan, "Out of range float"),
            ("\ud800", "surrogates"),
            (Path("no such file"), "No such file"),
            (np.array([1 + 2j]), "got dtype complex128"),
        ):
            error = self.fails(client.InvalidArgument, mesh.infer, "p", x=value)
            self.assertEqual((error.reason, error.violations[0][0]), ("INVALID_INPUT", "inputs.x"))
            self.assertIn(says, str(error))
        for call in (
            lambda: mesh.infer("p"),
            lambda: mesh.infer("", x=b""),
            lambda: mesh.with_options(parameters={"a": object()}).infer("p", x=b""),
            lambda: mesh.result(),
            lambda: mesh.result("id", pipeline="p", key="k"),
        ):
            self.assertEqual(self.fails(client.InvalidArgument, call).reason, "INVALID_REQUEST")
        for bad in (
            lambda: Tensor([[1], [2, 3]], "INT8"),
            lambda: Tensor([1], "INT3"),
            lambda: Tensor([1, 2], "INT8", [3]),
        ):
            self.fails(ValueError, bad)
        self.assertEqual(gateway.asked, [])

    def test_packing_is_that_of_the_library(self) -> None:
        import msgpack  # type: ignore[import-untyped]

        value: Dict[str, Any] = {
            "a": [None, True, False, 0, 127, 128, -1, -33, 1 << 63, -(1 << 63), 1.5, "x" * 300, b"y" * 70000],
            "\u00e9": {},
        }
        self.assertEqual(msgpack.unpackb(packed({**value, "a": value["a"][:-1]})), {**value, "a": value["a"][:-1]})
        data = bytearray(msgpack.packb(value))
        self.assertEqual(packing.unpack(memoryview(data)), value)
        for end in range(400):
            self.fails(ValueError, packing.unpack, memoryview(data)[:end])
        for broken in (b"\xc1", b"\xd4\x00\x00", b"\xa1\xff", b"\x00\x00", b"\x91" * 200 + b"\x00", b"\x81\x90\x00"):
            self.fails(ValueError, packing.unpack, memoryview(bytearray(broken)))

    def test_answers_read_well(self) -> None:
        answer = self.ask(labels=Tensor(["9"], "BYTES"), p=np.arange(40.0), note="a  long\ntext " * 20, image=b"123")
        self.assertEqual(
            repr(answer).splitlines()[:3],
            [
                f"p: 3.2 ms, request {REQUEST_ID}",
                "  labels  object[1] [b'9']",
                "  p       float64[40] [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, ...",
            ],
        )
        self.assertIn(
            "  image   3 bytes\n  step  queue   batch   run     batch of\n  s     0.0 ms  0.0 ms  1.5 ms  4,",
            repr(answer),
        )
        self.assertEqual((answer.request_id, answer.pipeline, answer.timeline.steps[0].stage), (REQUEST_ID, "p", "st"))
        self.assertEqual(list(answer), ["labels", "p", "note", "image"])
        self.assertIn("no output 'x'; there are 'labels'", str(self.fails(KeyError, lambda: answer["x"])))
        self.assertIn("there are 4 outputs", str(self.fails(KeyError, lambda: answer.value)))


class OptionsTest(ClientTest):
    def test_options_are_sent(self) -> None:
        gateway = self.gateway(text("a"))
        mesh = self.mesh(gateway, token="secret").with_options(
            timeout=5,
            parameters={"k": 3, "s": "3"},
            steps={"top": {"k": 2, "on": True, "id": "007", "mode": "fast"}},
            outputs=["a", "b"],
            priority=-1,
            durability="file",
            wait_for_capacity=True,
            idempotency_key="key 1",
            headers={"traceparent": "00-1-2-01"},
        )
        mesh.infer("stage:a/b", x=b"1")
        (asked,) = gateway.asked
        self.assertEqual(
            (asked.method, asked.path),
            (
                "POST",
                "/v1/pipelines/stage%3Aa%2Fb:infer"
                "?steps.top.k=2&steps.top.on=true&steps.top.id=%22007%22&steps.top.mode=fast",
            ),
        )
        for name, want in {
            "Authorization": "Bearer secret",
            "Stagemesh-Priority": "-1",
            "Stagemesh-Durability": "file",
            "traceparent": "00-1-2-01",
            "Stagemesh-Wait-For-Capacity": "true",
            "Idempotency-Key": "key 1",
            "Accept": "application/msgpack",
        }.items():
            self.assertEqual(asked.headers[name], want)
        self.assertTrue(4000 < int(asked.headers["Stagemesh-Timeout"]) <= 5000)
        body = asked.document()
        self.assertEqual((body["parameters"], body["outputs"]), ({"k": 3, "s": "3"}, [{"name": "a"}, {"name": "b"}]))
        self.assertNotIn("secret", repr(mesh) + repr(vars(mesh)))

    def test_bad_options_are_refused(self) -> None:
        mesh = self.mesh("http://127.0.0.1:1")
        self.assertIn("unknown option time; there are timeout", str(self.fails(TypeError, mesh.with_options, time=3)))
        for options in (
            {"timeout": 0},
            {"timeout": math.nan},
            {"timeout": "3"},
            {"idempotency_key": "\u00e9"},
            {"idempotency_key": "a\n"},
        ):
            self.fails(ValueError, mesh.with_options, **options)
        for url in ("127.0.0.1:8080", "ftp://host", "http://", "http://user:pass@host", "http://host?x=1"):
            error = self.fails(ValueError, Mesh, url)
            self.assertIn("expected http:// or https://", str(error))
            self.assertNotIn("pass", str(error))
        for inputs in (b"1", "text", [b"1"]):
            for call in (mesh.infer, mesh.stream, mesh.jobs.submit):
                error = self.fails(client.InvalidArgument, call, "p", inputs)
                self.assertIn(
                    f"given by name, such as image=..., or as one mapping, got {type(inputs).__name__}", str(error)
                )
        for settings in ({"token": "a\nb"}, {"ca": "/no/such/file"}, {"connections": 0}):
            self.fails((ValueError, OSError), Mesh, "http://host", **settings)


class RetryTest(ClientTest):
    def test_retryable_faults_are_tried_again(self) -> None:
        for reason in sorted(faults.RETRYABLE - {"DISCONNECTED"}):
            gateway = self.gateway(fault(reason), fault(reason), text("ok"))
            self.assertEqual(self.mesh(gateway).infer("p", x=b"1").value, "ok", reason)
            self.assertEqual([a.headers["Idempotency-Key"] for a in gateway.asked], [None] * 3)

    def test_other_faults_are_raised_at_once(self) -> None:
        for reason in [*sorted(faults.REASONS.keys() - faults.RETRYABLE - {"INVALID_ANSWER"}), "A_NEW_REASON"]:
            code = faults.REASONS.get(reason, faults.Internal).code
            gateway = self.gateway(fault(reason, code, 400, stage="st", step="s", host="h", request_id="id"))
            error = self.fails(faults.REASONS.get(reason, faults.Internal), self.mesh(gateway).infer, "p", x=b"1")
            self.assertEqual(
                (error.reason, error.message, error.stage, error.step, error.host, error.request_id, error.status),
                (reason, "what went wrong", "st", "s", "h", "id", 400),
            )
            self.assertEqual(len(gateway.asked), 1)

    def test_final_faults_are_not_tried_again(self) -> None:
        gateway = self.gateway(fault("RUNNER_OUT_OF_MEMORY", "RESOURCE_EXHAUSTED", 429, metadata={"final": "true"}))
        self.assertFalse(self.fails(client.ResourceExhausted, self.mesh(gateway).infer, "p", x=b"1").retryable)
        self.assertEqual(len(gateway.asked), 1)

    def test_tries_are_bounded(self) -> None:
        gateway = self.gateway(fault("QUEUE_FULL"))
        mesh = self.mesh(gateway)
        self.fails(Fault, mesh.infer, "p", x=b"1")
        self.assertEqual(len(gateway.asked), 6)
        self.fails(Fault, mesh.with_options(retries=0).infer, "p", x=b"1")
        self.assertEqual(len(gateway.asked), 7)

    def test_pause_is_the_one_that_is_asked_for(self) -> None:
        gateway = self.gateway(fault("QUEUE_FULL", retry_after_ms=300), text("ok"))
        begin = time.monotonic()
        self.mesh(gateway).infer("p", x=b"1")
        self.assertGreaterEqual(time.monotonic() - begin, 0.3)

    def test_pause_beyond_the_deadline_is_not_waited_for(self) -> None:
        gateway = self.gateway(
            document(
                {"error": {"code": "RESOURCE_EXHAUSTED", "reason": "OVERLOADED", "message": "m"}},
                429,
                **{"Retry-After": "3600"},
            )
        )
        error = self.fails(client.ResourceExhausted, self.mesh(gateway).infer, "p", x=b"1")
        self.assertEqual((error.retry_after, len(gateway.asked)), (3600, 1))

    def test_pauses_grow_and_differ(self) -> None:
        failed = Fault("m")
        with mock.patch.object(calls, "_FIRST_PAUSE", 0.2):
            pauses = [[calls.pause_before(n, failed) for _ in range(50)] for n in range(1, 20)]
        for n, some in enumerate(pauses):
            longest = min(5, 0.2 * 2**n)
            self.assertTrue(all(longest / 2 <= pause <= longest for pause in some))
            self.assertGreater(len(set(some)), 40)
        self.assertLessEqual(calls.pause_before(5000, failed), 5)

    def test_broken_connection_is_tried_again_with_one_key(self) -> None:
        gateway = self.gateway(
            reset,
            raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"),
            raw(b""),
            raw(b"no HTTP\r\n\r\n"),
            text("ok"),
        )
        self.assertEqual(self.mesh(gateway).infer("p", x=b"1").value, "ok")
        first, *others = [asked.headers["Idempotency-Key"] for asked in gateway.asked]
        self.assertEqual((first, len(others), len(set(others))), (None, 4, 1))
        self.assertRegex(others[0], r"^[0-9a-f-]{36}$")

    def test_mesh_without_keys_gets_none(self) -> None:
        gateway = self.gateway(reset, fault("NOT_SUPPORTED", "UNIMPLEMENTED", 501), text("ok"))
        self.assertEqual(self.mesh(gateway).infer("p", x=b"1").value, "ok")
        keys = [asked.headers["Idempotency-Key"] for asked in gateway.asked]
        self.assertEqual([key is None for key in keys], [True, False, True])

    def test_durable_request_has_its_key_from_the_start(self) -> None:
        gateway = self.gateway(reset, fault("NO_CAPACITY"))
        error = self.fails(client.Unavailable, self.mesh(gateway).with_options(durability="file").infer, "p", x=b"1")
        keys = {asked.headers["Idempotency-Key"] for asked in gateway.asked}
        self.assertEqual(keys, {error.key})
        self.assertEqual(len(gateway.asked), 6)

    def test_unreachable_gateway_is_disconnected(self) -> None:
        with closed_port() as url:
            error = self.fails(client.Disconnected, self.mesh(url).infer, "p", x=b"1")
        self.assertEqual((error.reason, error.sent, error.retryable), ("DISCONNECTED", False, True))
        self.assertIn(f"cannot connect to {url}", str(error))

    def test_answers_of_others_are_not_taken_for_faults(self) -> None:
        for status, kind, tries in (
            (502, client.Disconnected, 6),
            (404, client.InvalidAnswer, 1),
            (500, client.InvalidAnswer, 1),
        ):
            gateway = self.gateway(lambda handler, _, status=status: handler.answer(status, b"<html>a proxy", {}))
            error = self.fails(kind, self.mesh(gateway).infer, "p", x=b"1")
            self.assertEqual((error.status, len(gateway.asked)), (status, tries))
            self.assertIn("<html>a proxy", str(error))
        gateway = self.gateway(lambda handler, _: handler.answer(200, b"<html>", {"Content-Type": "text/html"}))
        self.assertIn(
            "is the URL a gateway's?", str(self.fails(client.InvalidAnswer, self.mesh(gateway).infer, "p", x=b"1"))
        )
        for body in (
            b"",
            b"\xc1",
            packed({"outputs": 3}),
            packed([]),
            packed({"outputs": [{"name": "x", "datatype": "FP32", "shape": [9], "data": []}]}),
        ):
            gateway = self.gateway(
                lambda handler, _, body=body: handler.answer(200, body, {"Content-Type": "application/msgpack"})
            )
            self.fails(client.InvalidAnswer, self.mesh(gateway).infer, "p", x=b"1")

    def test_redirects_are_not_followed(self) -> None:
        other = self.gateway(text("stolen"))
        gateway = self.gateway(lambda handler, _: handler.answer(307, b"", {"Location": other.url + INFER}))
        error = self.fails(client.InvalidAnswer, self.mesh(gateway, token="secret").infer, "p", x=b"1")
        self.assertIn("redirects are not followed", str(error))
        self.assertEqual(other.asked, [])

    def test_answers_are_bounded(self) -> None:
        large = text("x" * 2000)
        self.assertIn(
            "more than max_bytes, 1000",
            str(self.fails(client.InvalidAnswer, self.mesh(self.gateway(large), max_bytes=1000).infer, "p", x=b"1")),
        )
        endless = raw(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"400\r\n" + b"y" * 1024 + b"\r\n", then="wait"
        )
        self.fails(client.InvalidAnswer, self.mesh(self.gateway(endless), max_bytes=1000).infer, "p", x=b"1")
        stream = self.mesh(self.gateway(events(b"data: " + b"z" * 2000, then="wait")), max_bytes=1000).stream(
            "p", x=b"1"
        )
        self.assertIn("more than max_bytes", str(self.fails(client.InvalidAnswer, list, stream)))

    def test_refusal_before_the_body_is_read_is_its_fault(self) -> None:
        refusal = json.dumps(
            {"error": {"code": "UNAUTHENTICATED", "reason": "UNAUTHENTICATED", "message": "m"}}
        ).encode()
        gateway = self.gateway(text(""))

        def refuse(handler: Any) -> None:
            handler.close_connection = True
            handler.answer(401, refusal, {"Connection": "close"})

        with mock.patch.object(gateway.server.RequestHandlerClass, "do_POST", refuse):
            error = self.fails(
                (client.Unauthenticated, client.Disconnected),
                self.mesh(gateway).with_options(retries=0).infer,
                "p",
                x=bytes(8 << 20),
            )
        self.assertIn(error.reason, ("UNAUTHENTICATED", "DISCONNECTED"))  # the system may drop the answer at the reset


class DeadlineTest(ClientTest):
    def test_silent_gateway_is_a_passed_deadline(self) -> None:
        for script in (stall, raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab", then="wait")):
            gateway = self.gateway(script)
            begin = time.monotonic()
            error = self.fails(client.DeadlineExceeded, self.mesh(gateway).with_options(timeout=0.1).infer, "p", x=b"1")
            self.assertEqual((error.reason, len(gateway.asked)), ("DEADLINE_EXCEEDED", 1))
            self.assertLess(time.monotonic() - begin, 10)
            self.assertTrue(gateway.gone.wait(10))

    def test_deadline_of_later_tries_is_what_is_left(self) -> None:
        gateway = self.gateway(fault("QUEUE_FULL", retry_after_ms=200), text("ok"))
        self.mesh(gateway, timeout=5).infer("p", x=b"1")
        first, second = (int(asked.headers["Stagemesh-Timeout"]) for asked in gateway.asked)
        self.assertGreaterEqual(first - second, 200)

    def test_deadline_is_what_waiting_has_left(self) -> None:
        async def infer(mesh: AsyncMesh) -> None:
            async with mesh:
                first = asyncio.ensure_future(mesh.infer("p", x=b"1"))
                while not gateway.asked:
                    await asyncio.sleep(0.001)
                await asyncio.gather(first, mesh.infer("p", x=b"1"))

        def second(use: str) -> None:
            if use == "async":
                asyncio.run(infer(AsyncMesh(gateway.url, connections=1).with_options(timeout=5)))
                return
            mesh = self.mesh(gateway, connections=1, timeout=5)
            first = mesh.start("p", x=b"1")
            while not gateway.asked:
                time.sleep(0.001)
            if use == "start":
                mesh.start("p", x=b"1").result()
            else:
                mesh.infer("p", x=b"1")
            first.result()

        def slow(handler: Any, asked: Any) -> None:
            gateway.ended.wait(0.2)
            text("ok")(handler, asked)

        for use in ("infer", "start", "async"):
            with self.subTest(use):
                gateway = self.gateway(slow, text("ok"))
                second(use)
                self.assertLessEqual(int(gateway.asked[1].headers["Stagemesh-Timeout"]), 4900)

    def test_without_a_timeout_none_is_sent(self) -> None:
        gateway = self.gateway(text("ok"))
        self.mesh(gateway, timeout=None).infer("p", x=b"1")
        self.assertIsNone(gateway.asked[0].headers["Stagemesh-Timeout"])

    def test_waiting_for_a_connection_counts(self) -> None:
        gateway = self.gateway(events(chunk("a", 1), then="wait"))
        mesh = self.mesh(gateway, connections=1, timeout=0.1)
        with mesh.stream("p", x=b"1"):
            self.assertIn(
                "all 1 connections are in use", str(self.fails(client.DeadlineExceeded, mesh.infer, "p", x=b"1"))
            )


class ConnectionTest(ClientTest):
    def test_connections_are_used_again(self) -> None:
        gateway = self.gateway(text("a"), fault("INVALID_INPUT", "INVALID_ARGUMENT", 400), text("b"))
        mesh = self.mesh(gateway)
        for _ in range(3):
            with contextlib.suppress(client.InvalidArgument):
                mesh.infer("p", x=b"1")
        self.assertEqual(len({asked.connection for asked in gateway.asked}), 1)

    def test_closed_connection_is_replaced_without_a_retry(self) -> None:
        closing = outputs({"name": "o", "content_type": "text/plain", "text": "a"})

        def close_later(handler: Any, asked: Any) -> None:
            closing(handler, asked)
            handler.close_connection = True  # without saying so

        gateway = self.gateway(close_later)
        mesh = self.mesh(gateway).with_options(retries=0)
        for _ in range(3):
            mesh.infer("p", x=b"1")
            (idle,) = mesh._transport._idle
            while not client.transport._is_readable(idle.sock):
                time.sleep(0.001)

    def test_threads_share_a_mesh(self) -> None:
        gateway = self.gateway(echo)
        mesh = self.mesh(gateway, connections=3)
        got: Dict[int, Any] = {}

        def ask(n: int) -> None:
            for i in range(10):
                got[n * 10 + i] = mesh.infer("p", x={"n": n * 10 + i}).value

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(got, {n: {"n": n} for n in range(80)})
        self.assertLessEqual(len({asked.connection for asked in gateway.asked}), 3)

    def test_forked_process_has_connections_and_threads_of_its_own(self) -> None:
        gateway = self.gateway(echo)
        mesh = self.mesh(gateway, connections=1)
        mesh.start("p", x={"n": 1}).result()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are threads
            child = os.fork()
        if child == 0:
            got: Any = None
            with contextlib.suppress(BaseException):
                got = [mesh.infer("p", x={"n": 2}).value, mesh.start("p", x={"n": 3}).result().value]
            os._exit(0 if got == [{"n": 2}, {"n": 3}] else 1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertEqual(mesh.infer("p", x={"n": 4}).value, {"n": 4})
        first, second, third, last = (asked.connection for asked in gateway.asked)
        self.assertEqual((second, first), (third, last))
        self.assertNotEqual(first, second)

    def test_address_of_ipv6_may_have_no_port(self) -> None:
        for url, port in (("http://[2001:db8::1]", 80), ("https://[::1]/at", 443), ("http://[::1]:81", 81)):
            mesh = self.mesh(url)
            self.assertEqual(mesh._endpoint.port, port)

    def test_closed_mesh_refuses(self) -> None:
        mesh = self.mesh(self.gateway(text("a")))
        mesh.close()
        self.fails(RuntimeError, mesh.infer, "p", x=b"1")

    def test_tls_needs_a_trusted_certificate(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            cert, key = os.path.join(folder, "cert.pem"), os.path.join(folder, "key.pem")
            names = ["-subj", "/CN=gateway", "-addext", "subjectAltName=IP:127.0.0.1"]
            make = [
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
                "-keyout",
                key,
                "-out",
                cert,
                *names,
            ]
            subprocess.run(make, check=True, stderr=subprocess.DEVNULL)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(cert, key)
            gateway = self.gateway(echo, tls=context)
            value = np.arange(1 << 18)
            np.testing.assert_array_equal(self.mesh(gateway, ca=cert).infer("p", x=value).value, value)
            error = self.fails(client.Disconnected, self.mesh(gateway).infer, "p", x=b"1")
            self.assertIn("CERTIFICATE_VERIFY_FAILED", str(error))
            self.assertIn("the certificate is not trusted: pass the file of its CA as ca=", str(error))
            self.assertFalse(error.retryable)
            self.assertEqual(len(gateway.asked), 1)

    def test_port_without_tls_is_named(self) -> None:
        url = self.gateway(echo).url.replace("http:", "https:")
        error = self.fails(client.Disconnected, client.Mesh(url).infer, "p", x=b"1")
        self.assertIn("the port does not speak TLS: use http://", str(error))
        self.assertFalse(error.retryable)

    def test_handshake_that_breaks_off_is_tried_again(self) -> None:
        came = []
        with socket.create_server(("127.0.0.1", 0)) as server:

            def hang_up() -> None:
                for _ in range(2):
                    connection, _ = server.accept()
                    came.append(connection.recv(1))
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):
                        pass
                    connection.close()

            thread = threading.Thread(target=hang_up)
            thread.start()
            mesh = client.Mesh(f"https://127.0.0.1:{server.getsockname()[1]}").with_options(retries=1)
            error = self.fails(client.Disconnected, mesh.infer, "p", x=b"1")
            thread.join()
        self.assertTrue(error.retryable)
        self.assertEqual(len(came), 2)


class StreamTest(ClientTest):
    def test_chunks_and_the_answer(self) -> None:
        gateway = self.gateway(events(chunk(" said", 1), b": ping\n\n", chunk(",", 2), done(" said,")))
        with self.mesh(gateway).stream("p", text="The ferryman") as stream:
            self.assertEqual([(c.seq, c["text"]) for c in stream], [(1, " said"), (2, ",")])
        assert stream.answer is not None
        self.assertEqual((stream.answer.value, stream.answer.timeline.total_ms), (" said,", 3.2))
        self.assertEqual(next(stream, None), None)
        self.assertEqual(
            (gateway.asked[0].path, gateway.asked[0].headers["Accept"]), ("/v1/pipelines/p:stream", "text/event-stream")
        )

    def test_events_may_be_cut_anywhere(self) -> None:
        whole = chunk("\u00e9", 1) + chunk("b", 2) + done("\u00e9b")
        for size in (1, 2, 3, 50):
            reader = calls.Answers(1 << 20)
            for at in range(0, len(whole), size):
                if not reader.ended:
                    reader.feed(whole[at : at + size])
            self.assertEqual([c.value for c in reader.ready], ["\u00e9", "b"])
            assert reader.answer is not None

    def test_failures_before_the_first_event_are_tried_again(self) -> None:
        gateway = self.gateway(fault("QUEUE_FULL"), reset, events(done("ok")))
        stream = self.mesh(gateway).stream("p", x=b"1")
        self.assertEqual((list(stream), stream.answer and stream.answer.value), ([], "ok"))

    def test_failures_after_it_are_raised(self) -> None:
        error = {"error": {"code": "UNAVAILABLE", "reason": "NO_CAPACITY", "message": "m"}}
        for pieces, then, kind, reason in (
            ((event("error", error),), "close", client.Unavailable, "NO_CAPACITY"),
            ((), "close", client.Unavailable, "STREAM_INTERRUPTED"),
            ((b"id: 2\nevent: chu",), "close", client.Unavailable, "STREAM_INTERRUPTED"),
            ((), "reset", client.Disconnected, "DISCONNECTED"),
            ((b"event: chunk\ndata: {\n\n",), "close", client.InvalidAnswer, "INVALID_ANSWER"),
            ((b"event: chunk\ndata: {}\n\n",), "close", client.InvalidAnswer, "INVALID_ANSWER"),
        ):
            gateway = self.gateway(events(chunk("a", 1), *pieces, then=then))
            stream = self.mesh(gateway).stream("p", x=b"1")
            if then != "reset":  # which may overtake the chunk
                self.assertEqual(next(stream)["text"], "a")
            failed = self.fails(kind, list, stream)
            self.assertEqual((failed.reason, len(gateway.asked)), (reason, 1))
            self.assertEqual(list(stream), [])

    def test_early_close_ends_the_request(self) -> None:
        gateway = self.gateway(events(chunk("a", 1), then="wait"))
        with self.mesh(gateway).stream("p", x=b"1") as stream:
            next(stream)
        self.assertTrue(gateway.gone.wait(10))


class BackgroundTest(ClientTest):
    def test_key_is_there_before_the_answer(self) -> None:
        gateway = self.gateway(echo)
        pending = self.mesh(gateway).with_options(durability="file").start("p", x="a")
        self.assertRegex(pending.key, "^[0-9a-f-]{36}$")
        self.assertEqual(pending.result().value, "a")
        self.assertEqual(gateway.asked[0].headers["Idempotency-Key"], pending.key)
        self.assertIn("done", repr(pending))

    def test_cancel_ends_the_connection_and_the_request(self) -> None:
        gateway = self.gateway(stall, lambda handler, _: handler.answer(204, b"", {}))
        pending = self.mesh(gateway).with_options(durability="file").start("p", x="a")
        while not gateway.asked:
            time.sleep(0.001)
        pending.cancel()
        self.fails(client.Cancelled, pending.result)
        self.assertTrue(gateway.gone.wait(10))
        asked = gateway.asked[1]
        self.assertEqual(
            (asked.method, asked.path, asked.headers["Idempotency-Key"]),
            ("POST", "/v1/pipelines/p:cancel", pending.key),
        )

    def test_request_has_the_inputs_of_its_start(self) -> None:
        def slow(handler: Any, asked: Any) -> None:
            gateway.ended.wait(0.1)
            echo(handler, asked)

        gateway = self.gateway(slow, echo)
        mesh, frame = self.mesh(gateway, connections=1), bytearray(1 << 15)
        first, second = mesh.start("p", x=frame), mesh.start("p", x=frame)
        frame[:] = b"1" * len(frame)
        self.assertEqual((first.result().value, second.result().value), (bytes(1 << 15), bytes(1 << 15)))

    def test_cancel_takes_what_was_not_sent_or_has_ended(self) -> None:
        gateway = self.gateway(fault("NOT_FOUND", "NOT_FOUND", 404))
        pending = self.mesh(gateway).with_options(durability="file").start("p", x="a")
        self.fails(client.NotFound, pending.result)
        pending.cancel()
        self.assertEqual(len(gateway.asked), 1)
        gateway = self.gateway(stall, fault("NOT_FOUND", "NOT_FOUND", 404))
        mesh = self.mesh(gateway, connections=2).with_options(durability="file")
        first, second = mesh.start("p", x="a"), mesh.start("p", x="a")
        while not gateway.asked:
            time.sleep(0.001)
        second.cancel()
        first.cancel()

    def test_cancel_ends_a_handshake(self) -> None:
        with (
            mock.patch.object(client.transport, "CONNECT_TIMEOUT", None),
            socket.create_server(("127.0.0.1", 0)) as server,
        ):
            pending = client.Mesh(f"https://127.0.0.1:{server.getsockname()[1]}").start("p", x="a")
            connection, _ = server.accept()
            with connection:
                connection.recv(1)
                pending.cancel()
                self.fails(client.Cancelled, pending.result)

    def test_cancel_ends_a_pause(self) -> None:
        gateway = self.gateway(fault("QUEUE_FULL", retry_after_ms=50_000))
        pending = self.mesh(gateway).start("p", x="a")
        while not gateway.asked:
            time.sleep(0.001)
        pending.cancel()
        self.fails(client.Cancelled, pending.result)

    def test_results_and_cancels_by_id_and_key(self) -> None:
        missing = fault("NOT_FOUND", "NOT_FOUND", 404)
        gateway = self.gateway(
            text("a"),
            *(missing, text("b"), missing, missing, text("c")),
            lambda handler, _: handler.answer(204, b"", {}),
        )
        mesh = self.mesh(gateway)
        with mock.patch.object(client.mesh, "_WAIT", 0.01):
            self.assertEqual(mesh.result("id/1", wait=0).value, "a")
            self.assertEqual(mesh.result(pipeline="p", key="k", wait=50).value, "b")
        with mock.patch.object(client.mesh, "_PAUSE", 0.01):  # a key that the gateway does not know is not waited for
            self.assertEqual(mesh.result(pipeline="p", key="k", wait=5).value, "c")
        mesh.cancel("id/1")
        self.assertEqual(
            [(a.method, a.path.partition("?")[0], a.headers["Idempotency-Key"]) for a in gateway.asked],
            [
                ("GET", "/v1/requests/id%2F1/result", None),
                *[("GET", "/v1/pipelines/p:result", "k")] * 5,
                ("DELETE", "/v1/requests/id%2F1", None),
            ],
        )
        self.assertEqual([a.path.partition("?")[2] for a in gateway.asked[:2]], ["wait=0", "wait=10"])


class ManyTest(ClientTest):
    def test_outcomes_are_in_order_and_items_fail_alone(self) -> None:
        mesh = self.mesh(self.gateway(echo))
        items = ({"x": object() if n % 10 == 3 else n} for n in range(100))
        got = list(mesh.infer_many("p", items, in_flight=7))
        self.assertEqual([outcome.number for outcome in got], list(range(100)))
        for n, outcome in enumerate(got):
            if n % 10 == 3:
                self.assertEqual(self.fails(client.InvalidArgument, outcome.get).reason, "INVALID_INPUT")
            else:
                self.assertEqual(outcome.get().value, n)
        unordered = sorted(
            outcome.number for outcome in mesh.infer_many("p", ({"x": n} for n in range(50)), ordered=False)
        )
        self.assertEqual(unordered, list(range(50)))

    def test_items_may_use_one_buffer(self) -> None:
        def items() -> Any:
            buffer = bytearray(1 << 15)
            for n in range(8):
                buffer[:] = bytes([n]) * len(buffer)
                yield {"x": buffer}

        outcomes = list(self.mesh(self.gateway(echo), connections=1).infer_many("p", items()))
        self.assertEqual([o.get().value[0] for o in outcomes], list(range(8)))

    def test_items_are_read_no_further_than_in_flight(self) -> None:
        read: List[int] = []

        def items() -> Any:
            for n in range(100):
                read.append(n)
                yield {"x": n}

        many = self.mesh(self.gateway(echo)).infer_many("p", items(), in_flight=5)
        for taken in range(1, 20):
            next(many)
            self.assertLessEqual(len(read), taken + 5)

    def test_outcomes_come_while_the_items_still_do(self) -> None:
        def items(taken: List[Any], read: List[int]) -> Any:
            while not taken:
                read.append(1)
                yield {"x": 1}

        mesh = self.mesh(self.gateway(echo))
        for ordered in (True, False):
            taken: List[Any] = []
            read: List[int] = []
            for outcome in mesh.infer_many("p", items(taken, read), in_flight=20_000, ordered=ordered):
                taken.append(outcome)
            self.assertLess(len(read), 20_000)

    def test_early_end_cancels_what_runs(self) -> None:
        gateway = self.gateway(text("a"), stall)
        many = self.mesh(gateway).infer_many("p", ({"x": n} for n in range(100)), in_flight=4, ordered=False)
        next(many)
        many.close()  # type: ignore[attr-defined]
        self.assertLessEqual(len(gateway.asked), 5)

    def test_failing_items_end_it(self) -> None:
        def items() -> Any:
            yield {"x": 1}
            raise LookupError("no more")

        self.fails(LookupError, list, self.mesh(self.gateway(echo)).infer_many("p", items()))


def job(state: str, **more: Any) -> Dict[str, Any]:
    return {"id": "nightly.1", "state": state, "attempts": 1, **more}


class JobsTest(ClientTest):
    def test_submit_is_sent_again_with_its_key(self) -> None:
        gateway = self.gateway(reset, document(job("queued"), 202))
        submitted = self.mesh(gateway).jobs.submit("nightly", x="a", pipeline="p", ttl="6h", attributes={"team": "a"})
        self.assertEqual((submitted.id, submitted.state, submitted.ended), ("nightly.1", "queued", False))
        first, second = gateway.asked
        self.assertEqual(first.path, "/v1/queues/nightly/jobs?pipeline=p&ttl=6h&attributes.team=a")
        self.assertEqual(first.headers["Idempotency-Key"], second.headers["Idempotency-Key"])
        self.assertIsNone(first.headers["Stagemesh-Timeout"])

    def test_body_for_a_target_is_sent_as_it_is(self) -> None:
        gateway = self.gateway(document(job("queued"), 202))
        jobs = self.mesh(gateway).jobs
        jobs.submit("llm", body={"model": "m"}, path="/v1/chat/completions")
        self.assertEqual(
            (gateway.asked[0].body, gateway.asked[0].headers["Content-Type"]), (b'{"model": "m"}', "application/json")
        )
        for inputs in ({"x": np.zeros(1)}, {"x": {"a": float("nan")}}, {"x": Path("none")}, {"x": b"1", "y": b"2"}):
            self.fails(client.InvalidArgument, jobs.submit, "llm", inputs, path="/v1")
        self.fails(client.InvalidArgument, jobs.submit, "\ud800", x=1)

    def test_result_is_waited_for(self) -> None:
        running = document(job("running"), 202, **{"Stagemesh-Job-State": "running"})
        ended = outputs(
            {"name": "o", "content_type": "text/plain", "text": "a"}, **{"Stagemesh-Job-State": "succeeded"}
        )
        gateway = self.gateway(running, running, ended)
        self.assertEqual(self.mesh(gateway).jobs.result("nightly.1").value, "a")
        self.assertEqual({asked.path for asked in gateway.asked}, {"/v1/jobs/nightly.1/result?wait=20000"})
        error = self.fails(client.DeadlineExceeded, self.mesh(self.gateway(running)).jobs.result, "nightly.1", 0)
        self.assertIn("the job is running after 0 s", str(error))

    def test_failed_job_raises_its_fault_and_waits_do_not(self) -> None:
        failed = document(
            {"error": {"code": "INTERNAL", "reason": "RUNNER_CRASHED", "message": "m"}},
            500,
            **{"Stagemesh-Job-State": "failed"},
        )
        self.assertEqual(
            self.fails(client.Internal, self.mesh(self.gateway(failed)).jobs.result, "nightly.1").reason,
            "RUNNER_CRASHED",
        )
        jobs = self.mesh(self.gateway(failed, document(job("failed", reason="RUNNER_CRASHED", message="m")))).jobs
        self.assertIn("failed, 1 attempts, RUNNER_CRASHED: m", repr(jobs.wait("nightly.1")))

    def test_answers_of_http_targets(self) -> None:
        state = {"Stagemesh-Job-State": "succeeded"}
        self.assertEqual(
            self.mesh(self.gateway(document({"choices": []}, 200, **state))).jobs.result("llm.1").value, {"choices": []}
        )
        error = self.fails(
            client.Unavailable,
            self.mesh(self.gateway(document({"detail": "no"}, 422, **{"Stagemesh-Job-State": "failed"}))).jobs.result,
            "llm.1",
        )
        self.assertEqual((error.reason, error.status), ("TARGET_FAILED", 422))

    def test_watch_goes_on_where_it_broke(self) -> None:
        gateway = self.gateway(
            events(event("state", job("running"), "0.0.1"), chunk("a", "1.1")),  # type: ignore[arg-type]
            fault("SHUTTING_DOWN"),
            events(event("restart", {"attempt": 2}, "2.0"), event("state", job("succeeded"), "2.0.3")),
        )
        got = list(self.mesh(gateway).jobs.watch("nightly.1"))
        self.assertEqual([e.kind for e in got], ["state", "chunk", "restart", "state"])
        self.assertEqual([asked.headers["Last-Event-ID"] for asked in gateway.asked], [None, "1.1", "1.1"])
        assert got[-1].job is not None and got[1].chunk is not None
        self.assertEqual((got[-1].job.state, got[1].chunk["text"], got[2].details), ("succeeded", "a", {"attempt": 2}))
        self.assertEqual(
            list(self.mesh(self.gateway(lambda handler, _: handler.answer(204, b"", {}))).jobs.watch("j.1")), []
        )
        self.fails(
            client.NotFound, list, self.mesh(self.gateway(fault("NOT_FOUND", "NOT_FOUND", 404))).jobs.watch("j.1")
        )

    def test_other_calls(self) -> None:
        gateway = self.gateway(
            document(job("cancelled")),
            document({"held_by": "gate"}),
            document({"jobs": [job("queued")], "next": 7}),
            document({"jobs": []}),
        )
        jobs = self.mesh(gateway).jobs
        self.assertTrue(jobs.cancel("nightly.1").ended)
        self.assertEqual(jobs.explain("nightly.1"), {"held_by": "gate"})
        (listed,), following = jobs.list("nightly")
        self.assertEqual(
            (listed.id, following, jobs.list("nightly", ended=True, after=7, wait=1)), ("nightly.1", 7, ([], 0))
        )
        self.assertEqual(
            [f"{a.method} {a.path}" for a in gateway.asked],
            [
                "DELETE /v1/jobs/nightly.1",
                "GET /v1/jobs/nightly.1/explain",
                "GET /v1/queues/nightly/jobs?after=0&limit=50",
                "GET /v1/queues/nightly/results?after=7&limit=50&wait=1000",
            ],
        )


class PlacesTest(ClientTest):
    def test_streams_that_were_left_give_their_places_back(self) -> None:
        mesh = self.mesh(self.gateway(events(chunk("a", 1), then="wait")), connections=1, timeout=10)
        for _ in range(3):
            for _ in mesh.stream("p", x=1):
                break

    def test_request_that_waits_for_a_connection_is_cancelled(self) -> None:
        mesh = self.mesh(self.gateway(events(chunk("a", 1), then="wait")), connections=1)
        with mesh.stream("p", x=1):
            pending = mesh.start("p", x=1)
            pending.cancel()
            self.fails(client.Cancelled, pending.result)
            fault = self.fails(client.DeadlineExceeded, mesh.with_options(timeout=0.05).infer, "p", x=1)
            self.assertIn("all 1 connections are in use", str(fault))


class AsyncTest(ClientTest):
    def run_async(self, gateway: Gateway, use: Any, **settings: Any) -> Any:
        async def whole() -> Any:
            async with AsyncMesh(gateway.url, **settings) as mesh:
                return await use(mesh)

        return asyncio.run(whole())

    def test_calls_are_those_of_a_mesh(self) -> None:
        async def use(mesh: AsyncMesh) -> Any:
            answers = await asyncio.gather(*(mesh.infer("p", x=n) for n in range(20)))
            many = [outcome.get().value async for outcome in mesh.infer_many("p", ({"x": n} for n in range(20)))]
            short = await mesh.with_options(outputs=["x"]).infer("p", x=1)
            return [answer.value for answer in answers], many, short.value

        self.assertEqual(self.run_async(self.gateway(echo), use), (list(range(20)), list(range(20)), 1))

    def test_faults_are_raised(self) -> None:
        async def use(mesh: AsyncMesh) -> Any:
            await mesh.infer("p", x=1)

        self.fails(client.NotFound, self.run_async, self.gateway(fault("UNKNOWN_PIPELINE", "NOT_FOUND", 404)), use)

    def test_streams(self) -> None:
        async def use(mesh: AsyncMesh) -> Any:
            async with mesh.stream("p", x=b"1") as stream:
                words = [c["text"] async for c in stream]
            return words, stream.answer.value

        self.assertEqual(
            self.run_async(self.gateway(events(chunk("a", 1), chunk("b", 2), done("ab"))), use), (["a", "b"], "ab")
        )

    def test_more_streams_than_connections_take_turns(self) -> None:
        async def use(mesh: AsyncMesh) -> Any:
            async def words() -> List[str]:
                async with mesh.stream("p", x=1) as stream:
                    return [c["text"] async for c in stream]

            return await asyncio.gather(*(words() for _ in range(8)))

        gateway = self.gateway(events(chunk("a", 1), chunk("b", 2), done("ab")))
        self.assertEqual(self.run_async(gateway, use, connections=2, timeout=10), [["a", "b"]] * 8)

    def test_call_that_waits_for_a_connection_is_cancelled(self) -> None:
        gateway = self.gateway(events(chunk("a", 1), then="wait"))

        async def use(mesh: AsyncMesh) -> None:
            async with mesh.stream("p", x=1) as stream:
                await stream.__anext__()
                with self.assertRaises(asyncio.TimeoutError):
                    await asyncio.wait_for(mesh.infer("p", x=1), 0.05)
                with self.assertRaisesRegex(client.DeadlineExceeded, "all 1 connections are in use"):
                    await mesh.with_options(timeout=0.05).infer("p", x=1)

        self.run_async(gateway, use, connections=1)
        self.assertEqual(len(gateway.asked), 1)

    def test_streams_that_were_left_give_their_places_back(self) -> None:
        async def use(mesh: AsyncMesh) -> None:
            for _ in range(3):
                async for _ in mesh.stream("p", x=1):
                    break

        self.run_async(self.gateway(events(chunk("a", 1), then="wait")), use, connections=1, timeout=10)

    def test_cancelled_task_ends_its_request(self) -> None:
        gateway = self.gateway(stall)

        async def use(mesh: AsyncMesh) -> Any:
            task = asyncio.ensure_future(mesh.infer("p", x=1))
            while not gateway.asked:
                await asyncio.sleep(0.001)
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            return await asyncio.get_running_loop().run_in_executor(None, gateway.gone.wait, 10)

        self.assertTrue(self.run_async(gateway, use))

    def test_cancelled_stream_ends_its_request(self) -> None:
        gateway = self.gateway(events(chunk("a", 1), then="wait"))

        async def use(mesh: AsyncMesh) -> Any:
            stream = mesh.stream("p", x=1)
            await stream.__anext__()
            with self.assertRaises(asyncio.TimeoutError):
                await asyncio.wait_for(stream.__anext__(), 0.05)
            return await asyncio.get_running_loop().run_in_executor(None, gateway.gone.wait, 10)

        self.assertTrue(self.run_async(gateway, use))

    def test_jobs(self) -> None:
        ended = {"Stagemesh-Job-State": "succeeded"}
        gateway = self.gateway(
            document(job("queued"), 202),
            outputs({"name": "o", "content_type": "text/plain", "text": "a"}, **ended),
            events(event("state", job("succeeded"))),
            document(job("succeeded")),
            document(job("succeeded")),
        )

        async def use(mesh: AsyncMesh) -> Any:
            submitted = await mesh.jobs.submit("nightly", x=1)
            answer = await mesh.jobs.result(submitted)
            kinds = [e.kind async for e in mesh.jobs.watch(submitted)]
            return (
                answer.value,
                kinds,
                (await mesh.jobs.get(submitted)).ended,
                (await mesh.jobs.cancel(submitted)).ended,
            )

        self.assertEqual(self.run_async(gateway, use), ("a", ["state"], True, True))


if __name__ == "__main__":
    unittest.main()
