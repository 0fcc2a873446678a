"""Reads handwritten digits by one of many linear softmax models, with Python's library alone."""

import json
import math
from pathlib import Path

from stagemesh import ModelLimits, Tensor, Worker, below, serve


class Reader(Worker):
    """A model is a file of 10 rows of weights and 10 biases, made by generate.go."""

    inputs = {"x": Tensor("FP32", [-1, 64], description="8x8 grey pixels, row by row, 0 is black and 1 white")}
    outputs = {"p": Tensor("FP32", [-1, 10], description="probabilities of the answers 0 to 9")}
    models = ModelLimits(default_size=32 << 10, load_slots=2)

    def setup(self, ctx):
        """Takes the folder of the models from the option root."""
        self.root = str(Path(ctx.options["root"]).resolve())

    def load(self, model):
        """Reads a model's file."""
        with open(below(self.root, model.source)) as file:
            content = json.load(file)
        # A float in a list takes 32 bytes.
        model.size = 32 * sum(len(row) + 1 for row in content["weights"])
        return content["weights"], content["bias"]

    def predict(self, batch):
        """Runs the rows of a batch one after the other."""
        weights, bias = batch.model
        return {"p": [softmax(weights, bias, x) for x in batch["x"].tolist()]}


def softmax(weights, bias, x):
    """Returns the probabilities of one row."""
    z = [b + sum(w * v for w, v in zip(row, x)) for row, b in zip(weights, bias)]
    e = [math.exp(v - max(z)) for v in z]
    return [v / sum(e) for v in e]


if __name__ == "__main__":
    serve(Reader, arrays="buffer")
