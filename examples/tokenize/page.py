"""Finds the page of the documentation that a question is about: a model behind the tokenizer.

A naive Bayes classifier over token ids, in plain Python. It takes the outputs of
tokenize_text.py, texts of any number of tokens, as one padded array.
"""

import json
import math
from pathlib import Path

from stagemesh import InvalidInput, Tensor, Worker, serve

HERE = Path(__file__).resolve().parent


class Page(Worker):
    """Token ids [N, tokens] and their mask in; a score for each page [N, 5] out."""

    arrays = "buffer"  # the standard library alone
    inputs = {
        "ids": Tensor("INT64", [-1, -1], variable="pad", description="token ids"),
        "mask": Tensor("INT64", [-1, -1], variable="pad", description="1 for each token, 0 for padding"),
    }
    outputs = {"scores": Tensor("FP32", [-1, 5], description="probabilities of the pages")}
    examples = {"two tokens": {"ids": [[2, 3]], "mask": [[1, 1]]}}

    def setup(self, ctx):
        """Loads the weights that train_page.py wrote."""
        self.weights = json.loads((HERE / "page.json").read_text("utf-8"))["weights"]

    def preprocess(self, item):
        """Refuses numbers that are not tokens; only the item with such a number fails."""
        known = range(len(self.weights[0]))
        if not all(token in known for row in item["ids"].tolist() for token in row):
            raise InvalidInput("ids", f"has a number that is not a token; there are 0 to {len(known) - 1}")

    def predict(self, batch):
        """Returns the probabilities of the pages for each text."""
        ids, mask = batch["ids"].tolist(), batch["mask"].tolist()
        return {"scores": [self.probabilities(*row) for row in zip(ids, mask)]}

    def probabilities(self, ids, mask):
        """Returns the probabilities of the pages, given a text's tokens."""
        tokens = [token for token, wanted in zip(ids, mask) if wanted]
        logits = [sum(of_page[token] for token in tokens) for of_page in self.weights]
        powers = [math.exp(logit - max(logits)) for logit in logits]
        return [power / sum(powers) for power in powers]


if __name__ == "__main__":
    serve(Page)
