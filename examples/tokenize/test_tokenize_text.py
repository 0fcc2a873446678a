"""Runs the tokenizer in a process."""

from __future__ import annotations

import subprocess
import sys
import unittest
from pathlib import Path

from stagemesh import InvalidInput, testing

HERE = Path(__file__).resolve().parent
TOKENS = (HERE / "vocabulary.txt").read_text("utf-8").split("\n")


class TokenizeTest(unittest.TestCase):
    def test_the_check_finds_nothing_wrong(self) -> None:
        command = [sys.executable, "-m", "stagemesh.check", str(HERE / "tokenize_text.py")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_texts_are_tokenized_and_bad_ones_refused(self) -> None:
        texts = ["A stage is a mesh", "zzyzx, mesh!", "", "日本 mesh", b"\xff", "a " * 600]
        with testing.run(str(HERE / "tokenize_text.py")) as worker:
            for text in texts:
                worker.add({"text": text})
            got = worker.predict()
        words = [[TOKENS[i] for i in outcome["ids"].tolist()[0]] for outcome in got if outcome.error is None]
        self.assertEqual(words[0], ["[CLS]", "a", "stage", "is", "a", "mesh", "[SEP]"])
        self.assertEqual(words[1], ["[CLS]", "z", "##z", "##y", "##z", "##x", ",", "mesh", "!", "[SEP]"])
        self.assertEqual(words[2], ["[CLS]", "[UNK]", "mesh", "[SEP]"])
        self.assertEqual(got[0]["mask"].tolist(), [[1] * 7])
        self.assertEqual(got[0].metadata, {"tokens": "7"})
        errors = [outcome.error for outcome in got if outcome.error is not None]
        self.assertTrue(all(isinstance(error, InvalidInput) and error.field == "text" for error in errors))
        self.assertEqual(
            [error.message for error in errors],
            ["has no words", "input 'text' is not UTF-8: byte 0", "has 602 tokens, at most 512 are allowed"],
        )


if __name__ == "__main__":
    unittest.main()
