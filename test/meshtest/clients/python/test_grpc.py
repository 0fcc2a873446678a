"""Calls a mesh with the generated code of proto/gen/python: python -m unittest test_grpc.

MESH is the address of the mesh of mesh_test.go, host:port.
"""

from __future__ import annotations

import os
import unittest
from typing import Any

import grpc
from stagemesh_grpc.inference.v1 import inference_pb2 as pb
from stagemesh_grpc.inference.v1 import inference_pb2_grpc, payload_pb2

PATIENCE = 60.0


def text(words: str) -> pb.InferRequest:
    part = payload_pb2.Part(name="text", blob=payload_pb2.Blob(content_type="text/plain", data=words.encode()))
    return pb.InferRequest(pipeline="words", inputs=[part])


class StubsTest(unittest.TestCase):
    def setUp(self) -> None:
        channel = grpc.insecure_channel(os.environ["MESH"])
        self.addCleanup(channel.close)
        self.mesh = inference_pb2_grpc.InferenceServiceStub(channel)

    def test_request_is_answered(self) -> None:
        tensor = payload_pb2.Tensor(datatype="INT16", shape=[2], raw=b"\1\0\2\0")
        request = pb.InferRequest(pipeline="echo", inputs=[payload_pb2.Part(name="x", tensor=tensor)])
        answer = self.mesh.Infer(request, timeout=PATIENCE)
        self.assertEqual(tensor, answer.outputs[0].tensor)
        self.assertEqual(["echo"], [step.step for step in answer.timeline.steps])

    def test_stream_comes_in_chunks(self) -> None:
        messages = list(self.mesh.InferStream(text("one two three"), timeout=PATIENCE))
        said = [m.chunk.outputs[0].blob.data for m in messages if m.WhichOneof("message") == "chunk"]
        self.assertEqual([b"one ", b"two ", b"three "], said)
        self.assertEqual("final", messages[-1].WhichOneof("message"))

    def test_many_requests_share_a_stream(self) -> None:
        requests = (pb.InferManyRequest(request=text(word), id=word) for word in ("one", "fail", "two"))
        answers = {a.id: a for a in self.mesh.InferMany(requests, timeout=PATIENCE)}
        self.assertEqual({"one": "response", "fail": "failure", "two": "response"}, kinds(answers))
        self.assertEqual("INVALID_INPUT", answers["fail"].failure.reason)

    def test_fault_has_the_code_of_its_reason(self) -> None:
        for request, code in ((text("fail"), "INVALID_ARGUMENT"), (pb.InferRequest(pipeline="none"), "NOT_FOUND")):
            with self.assertRaises(grpc.RpcError) as raised:
                self.mesh.Infer(request, timeout=PATIENCE)
            self.assertEqual(code, raised.exception.code().name)  # type: ignore[attr-defined]


def kinds(answers: Any) -> Any:
    return {name: answer.WhichOneof("outcome") for name, answer in answers.items()}
