"""Runs the model on questions, behind the tokenizer."""

from __future__ import annotations

import json
import unittest
from pathlib import Path

from stagemesh import InvalidInput, testing

HERE = Path(__file__).resolve().parent
LABELS = json.loads((HERE / "page.json").read_text("utf-8"))["labels"]
QUESTIONS = {
    "How does a client in Go use Connect?": "clients",
    "What is the default of max_wait and max_size?": "configuration",
    "What does RESOURCE_EXHAUSTED mean, and may I retry?": "faults",
    "Which metrics tell that a queue is full, and how do I drain a gateway?": "operations",
    "How do I write a function that gets a whole batch of tensors in Go?": "runners",
}


class PageTest(unittest.TestCase):
    def test_questions_find_their_pages(self) -> None:
        with testing.run(str(HERE / "tokenize_text.py")) as tokenizer:
            for question in QUESTIONS:
                tokenizer.add({"text": question})
            tokens = tokenizer.predict()
        with testing.run(str(HERE / "page.py")) as model:
            for outcome in tokens:
                model.add({"ids": outcome["ids"], "mask": outcome["mask"]})
            model.add({"ids": [[1 << 40]], "mask": [[1]]})
            *answers, bad = model.predict()
        best = [max(zip(answer["scores"].tolist()[0], LABELS))[1] for answer in answers]
        self.assertEqual(best, list(QUESTIONS.values()))
        self.assertIsInstance(bad.error, InvalidInput)


if __name__ == "__main__":
    unittest.main()
