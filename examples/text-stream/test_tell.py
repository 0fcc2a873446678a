"""Runs the worker in a process."""

from __future__ import annotations

import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any, List

from stagemesh import InvalidInput, testing

HERE = Path(__file__).resolve().parent
FAST = {"pause": 0}


def tell(worker: testing.Run, prompt: str, **parameters: Any) -> List[str]:
    with worker.stream({"prompt": prompt}, parameters=parameters) as words:
        return [chunk["text"] for chunk in words]


class TellTest(unittest.TestCase):
    def test_the_check_finds_nothing_wrong(self) -> None:
        command = [sys.executable, "-m", "stagemesh.check", "--options", '{"pause": 0}', str(HERE / "tell.py")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_words_precede_the_whole_answer(self) -> None:
        with testing.run(str(HERE / "tell.py"), options=FAST) as worker:
            with worker.stream({"prompt": "The ferryman"}, parameters={"words": 12, "temperature": 0}) as words:
                chunks = [chunk["text"] for chunk in words]
            whole = worker.predict({"prompt": "The ferryman"}, parameters={"words": 12, "temperature": 0})["text"]
            self.assertEqual(len(chunks), 12)
            self.assertEqual("".join(chunks), words.outcome["text"])
            self.assertEqual(whole, words.outcome["text"])
        tale = set((HERE / "tale.txt").read_text("utf-8").lower().replace(".", " . ").replace(",", " , ").split())
        self.assertLessEqual({chunk.strip().lower() for chunk in chunks}, tale)

    def test_seed_repeats_the_story(self) -> None:
        with testing.run(str(HERE / "tell.py"), options=FAST) as worker:
            one = tell(worker, "The boy", seed=1)
            self.assertEqual(tell(worker, "The boy", seed=1), one)
            self.assertNotEqual(tell(worker, "The boy", seed=2), one)

    def test_sentences_begin_with_a_capital_letter(self) -> None:
        with testing.run(str(HERE / "tell.py"), options=FAST) as worker:
            self.assertTrue(tell(worker, "", temperature=0)[0].strip()[0].isupper())
            self.assertTrue(tell(worker, "It was so. ", temperature=0)[0].strip()[0].isupper())
            self.assertTrue(tell(worker, "The", temperature=0)[0].strip()[0].islower())

    def test_invalid_parameters_are_refused(self) -> None:
        with testing.run(str(HERE / "tell.py"), options=FAST) as worker:
            wrong = [("words", 0), ("words", 1.5), ("words", True), ("temperature", 3), ("temperature", "x")]
            for name, value in wrong:
                with self.assertRaises(InvalidInput) as refused:
                    worker.predict({"prompt": "The"}, parameters={name: value})
                self.assertEqual(refused.exception.field, f"parameters.{name}")


if __name__ == "__main__":
    unittest.main()
