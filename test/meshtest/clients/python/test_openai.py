"""Asks a mesh for files and batches with openai: python -m unittest test_openai.

MESH_HTTP is the address of a mesh whose batches run in the pipeline "echo".
"""

from __future__ import annotations

import json
import os
import time
import unittest
from typing import Any

import openai
from openai.types import Batch

PATIENCE = 60.0
ENDS = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, **body: Any) -> bytes:
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/embeddings", "body": body}
    return json.dumps(request).encode() + b"\n"


class OpenAITest(unittest.TestCase):
    def setUp(self) -> None:
        self.client = openai.OpenAI(base_url=f"http://{os.environ['MESH_HTTP']}/v1", api_key="none")
        self.addCleanup(self.client.close)

    def begin(self, content: bytes) -> Batch:
        file = self.client.files.create(file=("in.jsonl", content), purpose="batch")
        return self.client.batches.create(
            input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h", metadata={"night": "1"}
        )

    def wait(self, batch: Batch) -> Batch:
        deadline = time.monotonic() + PATIENCE
        while batch.status not in ENDS and time.monotonic() < deadline:
            batch = self.client.batches.retrieve(batch.id)
        return batch

    def test_batch_has_an_output_and_an_error_file(self) -> None:
        batch = self.begin(line("a", model="echo", input="x") + line("b", model="none"))
        self.assertEqual("validating", batch.status)
        batch = self.wait(batch)
        self.assertEqual("completed", batch.status)
        self.assertEqual({"night": "1"}, batch.metadata)
        assert batch.request_counts and batch.output_file_id and batch.error_file_id and batch.completed_at
        counts = batch.request_counts
        self.assertEqual((2, 1, 1), (counts.total, counts.completed, counts.failed))
        output = json.loads(self.client.files.content(batch.output_file_id).text)
        self.assertEqual("a", output["custom_id"])
        self.assertEqual(200, output["response"]["status_code"])
        self.assertEqual({"model": "echo", "input": "x"}, output["response"]["body"])
        self.assertIsNone(output["error"])
        failure = json.loads(self.client.files.content(batch.error_file_id).text)
        self.assertEqual(("b", "UNKNOWN_PIPELINE"), (failure["custom_id"], failure["error"]["code"]))
        self.assertIn(batch.output_file_id, [f.id for f in self.client.files.list(purpose="batch_output")])

    def test_bad_file_fails_its_batch(self) -> None:
        batch = self.wait(self.begin(line("a", model="echo") + b"{\n"))
        assert batch.status == "failed" and batch.errors and batch.errors.data
        self.assertEqual([("invalid_json_line", 2)], [(e.code, e.line) for e in batch.errors.data])
        with self.assertRaises(openai.BadRequestError):
            self.client.batches.cancel(batch.id)

    def test_files_expire_and_are_deleted(self) -> None:
        file = self.client.files.create(
            file=("in.jsonl", b"x" * 1000), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        self.assertEqual((1000, "in.jsonl"), (file.bytes, file.filename))
        self.assertEqual(3600, (file.expires_at or 0) - file.created_at)
        self.assertEqual(b"x" * 1000, self.client.files.content(file.id).content)
        self.assertTrue(self.client.files.delete(file.id).deleted)
        with self.assertRaises(openai.NotFoundError) as raised:
            self.client.files.retrieve(file.id)
        self.assertEqual("not_found", raised.exception.code)

    def test_batches_are_listed_by_pages(self) -> None:
        begun = [self.begin(line("a", model="echo")).id for _ in range(5)]
        listed = [b.id for b in self.client.batches.list(limit=2) if b.id in begun]
        self.assertEqual(begun[::-1], listed)

    def test_cancelled_batch_ends(self) -> None:
        batch = self.begin(b"".join(line(str(i), model="echo") for i in range(5000)))
        self.assertEqual("cancelling", self.client.batches.cancel(batch.id).status)
        batch = self.wait(batch)
        assert batch.status == "cancelled" and batch.request_counts
        self.assertEqual(batch.request_counts.total, batch.request_counts.completed + batch.request_counts.failed)


if __name__ == "__main__":
    unittest.main()
