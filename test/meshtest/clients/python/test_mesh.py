"""The promises of stagemesh.client, with a real gateway: python -m unittest test_mesh.

MESH is the URL of a mesh with the pipelines echo, slow, words and picture, with the token
MESH_TOKEN and a certificate that MESH_CA has issued. It restarts after a line "restart", and then
sends a line. MESH_FAULTS is the URL of a gateway whose pipelines fail with the reason of their
names, MESH_REASONS. STRICT is the URL of one that wants a client certificate, with files for both ends.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
import tempfile
import threading
import unittest
from typing import Any

from stagemesh import client
from stagemesh.client import AsyncMesh, Mesh, Tensor, faults, new_key

PATIENCE = 60.0


def mesh(**settings: Any) -> Mesh:
    return Mesh(os.environ["MESH"], **{"token": os.environ["MESH_TOKEN"], "ca": os.environ["MESH_CA"], **settings})


class PromisesTest(unittest.TestCase):
    def setUp(self) -> None:
        self.mesh = mesh()
        self.addCleanup(self.mesh.close)

    def fails(self, kind: Any, call: Any, *arguments: Any, **named: Any) -> Any:
        with self.assertRaises(kind) as raised:
            call(*arguments, **named)
        return raised.exception

    def test_every_reason_is_its_class(self) -> None:
        with Mesh(os.environ["MESH_FAULTS"]) as failing:
            failing = failing.with_options(retries=0)
            for reason in os.environ["MESH_REASONS"].split():
                error = self.fails(faults.REASONS[reason], failing.infer, reason, x=b"1")
                self.assertEqual((error.reason, error.retryable), (reason, reason in faults.RETRYABLE))
                self.assertEqual((error.stage, error.step, error.host), ("resnet", "classify", "host-1"))
                self.assertEqual((error.retry_after, error.message), (1.5, f"what went wrong: {reason}"))
                self.assertEqual(error.violations, (("inputs.pixels.shape", "rank 3, not 4"),))
                self.assertRegex(error.request_id, "^0199aaaa-")

    def test_inputs_come_back(self) -> None:
        inputs = {
            "tensor": Tensor([[1, 2], [3, 4]], "INT16"),
            "half": Tensor([0.5, float("inf")], "FP16"),
            "words": Tensor(["a", b"\xff"], "BYTES"),
            "text": "\u00e9",
            "document": {"a": [1, None]},
            "raw": b"\x00\x01",
        }
        answer = self.mesh.infer("echo", inputs)
        for name in ("tensor", "half", "words"):
            self.assertEqual(answer[name].tolist(), inputs[name].tolist())
        for name in ("text", "document", "raw"):
            self.assertEqual(answer[name], inputs[name])
        self.assertEqual((answer.pipeline, [step.stage for step in answer.timeline.steps]), ("echo", ["echo"]))
        self.assertGreater(answer.timeline.total_ms, 0)
        self.assertEqual(list(self.mesh.with_options(outputs=["raw"]).infer("echo", inputs)), ["raw"])

    def test_file_takes_the_type_of_the_spec(self) -> None:
        self.assertEqual(self.mesh.infer("stage:picture", image=b"\x89PNG").value, "image/png")
        with tempfile.NamedTemporaryFile(suffix=".jpeg") as file:
            error = self.fails(client.InvalidArgument, self.mesh.infer, "stage:picture", image=file)
        self.assertEqual((error.reason, error.stage), ("UNSUPPORTED_MEDIA_TYPE", "picture"))

    def test_large_inputs_come_back(self) -> None:
        large = os.urandom(3 << 20)
        self.assertEqual(self.mesh.infer("echo", x=large).value, large)
        error = self.fails(client.InvalidArgument, self.mesh.infer, "echo", x=bytes(6 << 20))
        self.assertEqual(error.reason, "PAYLOAD_TOO_LARGE")
        # Of a body that is refused unread, the system may lose the answer with the connection.
        error = self.fails(client.Fault, self.mesh.with_options(retries=0).infer, "echo", x=bytes(200 << 20))
        self.assertIn(error.reason, ("PAYLOAD_TOO_LARGE", "DISCONNECTED"))

    def test_wrong_token_and_unknown_authority(self) -> None:
        for token in ("", "wrong"):
            with mesh(token=token) as stranger:
                self.assertEqual(self.fails(client.Unauthenticated, stranger.infer, "echo", x=b"1").status, 401)
        with mesh(ca=None) as stranger:
            self.assertIn(
                "CERTIFICATE_VERIFY_FAILED", str(self.fails(client.Disconnected, stranger.infer, "echo", x=b"1"))
            )

    def test_client_certificate_is_asked_for_at_once(self) -> None:
        trusting = ssl.create_default_context(cafile=os.environ["STRICT_CA"])
        with Mesh(os.environ["STRICT"], ca=trusting) as stranger:
            # The refusal comes after the handshake: while the request is sent, or when the answer is read.
            for data in (b"1", bytes(4 << 20)):
                error = self.fails(client.Disconnected, stranger.infer, "echo", x=data)
                self.assertIn("a valid client certificate: pass ca= an ssl.SSLContext that has one", str(error))
                self.assertEqual((error.retryable, error.sent), (False, False))
        trusting.load_cert_chain(os.environ["STRICT_CERT"], os.environ["STRICT_KEY"])
        with Mesh(os.environ["STRICT"], ca=trusting) as known:
            self.assertEqual(known.infer("echo", x="1").value, "1")

    def test_deadline_is_the_gateways(self) -> None:
        error = self.fails(client.DeadlineExceeded, self.mesh.with_options(timeout=0.3).infer, "slow", x=b"1")
        self.assertEqual((error.reason, error.status, error.stage), ("DEADLINE_EXCEEDED", 504, "slow"))

    def test_cancelled_request_is_cancelled(self) -> None:
        pending = self.mesh.with_options(idempotency_key=new_key()).start("slow", x=b"1")
        deadline = threading.Event()
        for _ in range(1000):  # until the gateway has it
            try:
                self.mesh.result(pipeline="slow", key=pending.key)
            except client.NotFound as fault:
                if "no request" not in fault.message:
                    break
            deadline.wait(0.01)
        self.mesh.cancel(pipeline="slow", key=pending.key)
        self.assertEqual(self.fails(client.Cancelled, pending.result).status, 499)

    def test_durable_result_is_fetched_by_its_key(self) -> None:
        pending = self.mesh.with_options(durability="file").start("echo", x="kept")
        answer = pending.result()
        for again in (
            self.mesh.result(pipeline="echo", key=pending.key, wait=PATIENCE),
            self.mesh.result(answer.request_id, wait=PATIENCE),
        ):
            self.assertEqual((again.value, again.request_id), ("kept", answer.request_id))
        self.fails(client.NotFound, self.mesh.result, pipeline="echo", key=new_key())

    def test_same_key_runs_once(self) -> None:
        keyed = self.mesh.with_options(idempotency_key=new_key())
        first, second = keyed.infer("echo", x="a"), keyed.infer("echo", x="a")
        self.assertEqual(first.request_id, second.request_id)
        self.assertEqual(self.fails(client.AlreadyExists, keyed.infer, "echo", x="b").reason, "IDEMPOTENCY_MISMATCH")

    def test_stream_and_early_close(self) -> None:
        with self.mesh.stream("words", text="one two") as stream:
            self.assertEqual([chunk["word"] for chunk in stream], ["one ", "two "])
        assert stream.answer is not None
        self.assertEqual(stream.answer.value, "one two ")
        before = int(self.mesh.infer("words", text="cancelled?").value)
        with self.mesh.stream("words", text="forever") as stream:
            self.assertEqual(next(stream).value, "forever ")
        for _ in range(6000):
            if int(self.mesh.infer("words", text="cancelled?").value) > before:
                break
        else:
            self.fail("the stream was not cancelled")

    def test_stream_fails_after_its_chunks(self) -> None:
        stream = self.mesh.stream("words", text="one fail")
        self.assertEqual(next(stream).value, "one ")
        self.assertEqual(self.fails(client.Fault, next, stream).reason, "INVALID_INPUT")

    def test_many_requests(self) -> None:
        items = ({"x": n} if n % 10 else {} for n in range(200))
        outcomes = list(self.mesh.infer_many("echo", items, in_flight=16))
        self.assertEqual(
            [o.answer.value if o.answer else o.fault.reason for o in outcomes if o.answer or o.fault],
            [n if n % 10 else "INVALID_REQUEST" for n in range(200)],
        )

    def test_jobs(self) -> None:
        jobs = self.mesh.jobs
        job = jobs.submit("nightly", x="later", pipeline="echo", ttl="1h", attributes={"team": "a"})
        kinds = [event.kind for event in jobs.watch(job)]
        self.assertEqual(
            (set(kinds), jobs.wait(job, PATIENCE).state, jobs.result(job).value), ({"state"}, "succeeded", "later")
        )
        ended, _ = jobs.list("nightly", ended=True)
        self.assertIn(job.id, [one.id for one in ended])
        self.assertEqual(
            self.fails(client.NotFound, jobs.submit, "none", x="a", pipeline="echo").reason, "UNKNOWN_QUEUE"
        )

    def test_async_twin(self) -> None:
        async def use() -> Any:
            async with AsyncMesh(os.environ["MESH"], token=os.environ["MESH_TOKEN"], ca=os.environ["MESH_CA"]) as twin:
                answers = await asyncio.gather(*(twin.infer("echo", x=n) for n in range(20)))
                async with twin.stream("words", text="one two") as stream:
                    words = [chunk.value async for chunk in stream]
                with self.assertRaises(asyncio.TimeoutError):
                    await asyncio.wait_for(twin.infer("slow", x=1), 0.2)
                return [answer.value for answer in answers], words

        self.assertEqual(asyncio.run(use()), (list(range(20)), ["one ", "two "]))

    def test_restart_of_the_gateway_costs_no_answer(self) -> None:
        patient, restarted = self.mesh.with_options(retries=100), threading.Event()
        print("restart", flush=True)
        threading.Thread(target=lambda: sys.stdin.readline() and restarted.set(), daemon=True).start()
        asked = 0
        while not restarted.is_set():
            self.assertEqual(patient.infer("echo", x=asked).value, asked)
            asked += 1
        self.assertEqual(patient.infer("echo", x="after").value, "after")


if __name__ == "__main__":
    unittest.main()
