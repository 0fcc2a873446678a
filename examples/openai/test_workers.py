"""Runs the workers in processes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any, List

from stagemesh import InvalidInput, testing

HERE = Path(__file__).resolve().parent
FAST = {"pause": 0}


def chat(worker: testing.Run, said: str, **parameters: Any) -> List[str]:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": said}]
    with worker.stream({"messages": messages}, parameters=parameters) as words:
        return [chunk["text"] for chunk in words]


class WorkersTest(unittest.TestCase):
    def test_the_check_finds_nothing_wrong(self) -> None:
        for name in ("eliza.py", "hashing.py"):
            command = [sys.executable, "-m", "stagemesh.check", "--options", '{"pause": 0}', str(HERE / name)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_answer_comes_word_by_word(self) -> None:
        with testing.run(str(HERE / "eliza.py"), options=FAST) as worker:
            words = chat(worker, "I am afraid of my dog.", temperature=0)
        self.assertEqual(words, ["How", " long", " have", " you", " been", " afraid", " of", " your", " dog?"])

    def test_answer_says_why_it_ended_and_counts(self) -> None:
        messages = [{"role": "user", "content": "I need sleep"}]
        with testing.run(str(HERE / "eliza.py"), options=FAST) as worker:
            for parameters, text, reason in (
                ({"max_tokens": 2}, "Why do", "length"),
                ({"stop": json.dumps(["u ne"])}, "Why do yo", "stop"),
                ({"stop": json.dumps(["never"])}, "Why do you need sleep?", "stop"),
            ):
                with worker.stream({"messages": messages}, parameters={"temperature": 0, **parameters}) as words:
                    self.assertEqual("".join(chunk["text"] for chunk in words), text)
                    self.assertEqual(words.outcome.metadata["finish_reason"], reason)
                    self.assertEqual(words.outcome.metadata["prompt_tokens"], "3")

    def test_seed_repeats_the_answer(self) -> None:
        with testing.run(str(HERE / "eliza.py"), options=FAST) as worker:
            self.assertEqual(chat(worker, "so", seed=3), chat(worker, "so", seed=3))
            with self.assertRaises(InvalidInput):
                worker.predict({"messages": [{"role": "assistant", "content": "so"}]})

    def test_equal_words_have_alike_vectors(self) -> None:
        with testing.run(str(HERE / "hashing.py")) as worker:
            one, other, third = (
                worker.predict({"input": text})["embedding"].tolist()[0]
                for text in ("the ferry left the shore", "The ferry left a shore", "nothing else")
            )
            with self.assertRaises(InvalidInput):
                worker.predict({"input": "..."})
        self.assertAlmostEqual(math.hypot(*one), 1, places=5)
        self.assertGreater(sum(map(float.__mul__, one, other)), 0.6)
        self.assertLess(abs(sum(map(float.__mul__, one, third))), 0.3)


if __name__ == "__main__":
    unittest.main()
