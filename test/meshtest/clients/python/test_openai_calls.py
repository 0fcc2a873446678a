"""Calls the models of a mesh with openai: python -m unittest test_openai_calls.

MESH_HTTP is the address of the mesh of openai_test.go, whose token is "sesame".
"""

from __future__ import annotations

import asyncio
import base64
import os
import struct
import unittest
from typing import Any, Dict, List

import openai
from openai.types.chat import ChatCompletionMessageParam

BASE = f"http://{os.environ['MESH_HTTP']}/v1"
SAID: List[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "I am afraid "}, {"type": "text", "text": "of my dog."}]},
]
ANSWER = "How long have you been afraid of your dog?"


def client(**options: Any) -> openai.OpenAI:
    return openai.OpenAI(**{"base_url": BASE, "api_key": "sesame", "max_retries": 0, **options})


class CallsTest(unittest.TestCase):
    def setUp(self) -> None:
        self.client = client()
        self.addCleanup(self.client.close)

    def chat(self, model: str = "eliza-1966", **body: Any) -> Any:
        return self.client.chat.completions.create(model=model, messages=SAID, **body)

    def refused(self, kind: type, **body: Any) -> Any:
        with self.assertRaises(kind) as raised:
            self.chat(**body)
        return raised.exception


class ChatTest(CallsTest):
    def test_chat_is_answered(self) -> None:
        answer = self.chat(temperature=0, max_completion_tokens=100)
        choice = answer.choices[0]
        self.assertEqual(
            (ANSWER, "assistant", "stop"), (choice.message.content, choice.message.role, choice.finish_reason)
        )
        self.assertEqual(
            (9, 8, 17), (answer.usage.completion_tokens, answer.usage.prompt_tokens, answer.usage.total_tokens)
        )
        self.assertEqual(("chat.completion", "eliza-1966"), (answer.object, answer.model))
        self.assertEqual(f"chatcmpl-{answer._request_id}", answer.id)

    def test_chat_ends_at_a_length_and_a_stop(self) -> None:
        for body, text, reason in (
            ({"max_tokens": 3}, "How long have", "length"),
            ({"stop": "you"}, "How long have ", "stop"),
            ({"stop": ["dog", "afraid of"]}, "How long have you been ", "stop"),
        ):
            choice = self.chat(temperature=0, **body).choices[0]
            self.assertEqual((text, reason), (choice.message.content, choice.finish_reason))

    def test_chat_streams(self) -> None:
        chunks = list(self.chat(temperature=0, stream=True, stream_options={"include_usage": True}))
        deltas = [c.choices[0].delta for c in chunks[:-1]]
        self.assertEqual(ANSWER, "".join(d.content or "" for d in deltas))
        self.assertGreater(len(deltas), 5)
        self.assertEqual(["assistant"], [d.role for d in deltas if d.role])
        self.assertEqual([None] * (len(deltas) - 1) + ["stop"], [c.choices[0].finish_reason for c in chunks[:-1]])
        self.assertEqual(([], 17), (chunks[-1].choices, chunks[-1].usage.total_tokens))
        self.assertEqual({chunks[0].id}, {c.id for c in chunks})

    def test_stream_of_a_whole_answer_is_one_chunk(self) -> None:
        chunks = list(self.chat("whole", stream=True))
        self.assertEqual(["never in chunks", None], [c.choices[0].delta.content for c in chunks])
        self.assertIsNone(self.chat("whole").usage)

    def test_async_client_streams(self) -> None:
        async def ask() -> str:
            async with openai.AsyncOpenAI(base_url=BASE, api_key="sesame", max_retries=0) as asked:
                answers = await asked.chat.completions.create(
                    model="eliza-1966", messages=SAID, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in answers])

        self.assertEqual(ANSWER, asyncio.run(ask()))

    def test_left_stream_is_cancelled(self) -> None:
        with self.chat("endless", stream=True) as chunks:
            self.assertEqual("again ", next(iter(chunks)).choices[0].delta.content)

    def test_failure_within_a_stream_is_raised(self) -> None:
        text = ""
        with self.assertRaises(openai.APIError) as raised:
            for chunk in self.chat("breaks", stream=True):
                text += chunk.choices[0].delta.content or ""
        self.assertEqual("one ", text)
        self.assertEqual("runner_failed", raised.exception.code)

    def test_full_mesh_asks_for_a_pause(self) -> None:
        with self.chat("busy", stream=True) as chunks:
            next(iter(chunks))
            full = self.refused(openai.RateLimitError, model="busy")
        self.assertEqual((429, "overloaded"), (full.status_code, full.code))
        self.assertGreaterEqual(int(full.response.headers["retry-after"]), 1)

    def test_deadline_and_timeout_end_a_call(self) -> None:
        late = self.refused(openai.InternalServerError, model="slow", extra_headers={"Stagemesh-Timeout": "300ms"})
        self.assertEqual((504, "deadline_exceeded"), (late.status_code, late.code))
        self.assertTrue(late.request_id)
        self.refused(openai.APITimeoutError, model="slow", timeout=0.3)


class CompletionsTest(CallsTest):
    def test_prompt_is_continued(self) -> None:
        body: Dict[str, Any] = {"model": "tale", "prompt": "The ferryman", "max_tokens": 2, "temperature": 0}
        whole = self.client.completions.create(**body)
        self.assertEqual((" said,", "stop"), (whole.choices[0].text, whole.choices[0].finish_reason))
        self.assertEqual("text_completion", whole.object)
        self.assertIsNone(whole.usage)
        chunks = list(self.client.completions.create(**body, stream=True))
        self.assertEqual([" said", ",", ""], [c.choices[0].text for c in chunks])


class EmbeddingsTest(CallsTest):
    def test_both_forms_are_equal(self) -> None:
        as_floats = self.client.embeddings.create(model="hashing-256", input="a ferry", encoding_format="float")
        default = self.client.embeddings.create(model="hashing-256", input=["a ferry", "a boat"])
        self.assertEqual([0, 1], [one.index for one in default.data])
        self.assertEqual(256, len(as_floats.data[0].embedding))
        for one, other in zip(as_floats.data[0].embedding, default.data[0].embedding):
            self.assertAlmostEqual(one, other, places=6)
        self.assertEqual((4, 4), (default.usage.prompt_tokens, default.usage.total_tokens))
        raw: Any = self.client.embeddings.create(model="hashing-256", input="a ferry", encoding_format="base64")
        packed = base64.b64decode(raw.data[0].embedding)
        self.assertEqual(struct.unpack("<256f", packed), tuple(default.data[0].embedding))

    def test_texts_of_a_list_share_a_batch(self) -> None:
        found = self.client.embeddings.create(model="sizes", input=[str(i) for i in range(64)], encoding_format="float")
        self.assertEqual([[float(i), 64.0] for i in range(64)], [one.embedding for one in found.data])

    def test_dimensions_are_those_of_the_model(self) -> None:
        self.assertEqual(
            2, len(self.client.embeddings.create(model="sizes", input="1", dimensions=2).data[0].embedding)
        )
        for model, dimensions in (("sizes", 3), ("hashing-256", 64)):
            with self.assertRaises(openai.BadRequestError) as raised:
                self.client.embeddings.create(model=model, input="1", dimensions=dimensions)
            self.assertIn("dimensions", str(raised.exception))

    def test_bad_text_is_named(self) -> None:
        with self.assertRaises(openai.BadRequestError) as raised:
            self.client.embeddings.create(model="hashing-256", input=["good", "..."])
        self.assertIn("input[1]: ", str(raised.exception))
        self.assertEqual("invalid_input", raised.exception.code)
        tokens: Any = [[1, 2], [3]]
        with self.assertRaises(openai.BadRequestError):
            self.client.embeddings.create(model="hashing-256", input=tokens)


class ErrorsTest(CallsTest):
    def test_models_are_listed(self) -> None:
        names = {one.id for one in self.client.models.list()}
        self.assertLessEqual({"eliza-1966", "tale", "hashing-256", "org/a:b"}, names)
        self.assertEqual("org/a:b", self.client.models.retrieve("org/a:b").id)
        with self.assertRaises(openai.NotFoundError) as raised:
            self.client.models.retrieve("none")
        self.assertEqual("model_not_found", raised.exception.code)

    def test_unknown_model_is_not_found(self) -> None:
        for name in ("none", "hashing-256"):
            unknown = self.refused(openai.NotFoundError, model=name)
            self.assertEqual(("model_not_found", "model"), (unknown.code, unknown.param))

    def test_what_is_not_done_is_refused_by_name(self) -> None:
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        for name, value in {
            "n": 2, "tools": [tool], "tool_choice": "required", "logprobs": True, "top_logprobs": 3,
            "logit_bias": {"1": 2},
            "response_format": {"type": "json_object"}, "audio": {"voice": "x", "format": "wav"}, "store": True,
            "modalities": ["text", "audio"], "top_p": 0.5, "user": "u",
        }.items():  # fmt: skip
            with self.subTest(name):
                refused = self.refused(openai.BadRequestError, **{name: value})
                self.assertIn(name, str(refused))
        self.chat(n=1, tools=[], response_format={"type": "text"}, logprobs=False, store=False)

    def test_picture_in_a_message_is_refused(self) -> None:
        picture: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
        with self.assertRaises(openai.BadRequestError) as raised:
            self.client.chat.completions.create(model="eliza-1966", messages=picture)
        self.assertEqual("messages[0].content", raised.exception.param)

    def test_wrong_token_is_refused(self) -> None:
        with client(api_key="wrong") as stranger, self.assertRaises(openai.AuthenticationError) as raised:
            stranger.models.list()
        self.assertEqual("unauthenticated", raised.exception.code)


if __name__ == "__main__":
    unittest.main()
