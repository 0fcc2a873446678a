"""Classifies handwritten digits with numpy: a stage of the mesh in ../digits, in Python."""

from pathlib import Path

import numpy as np

from stagemesh import InvalidInput, Tensor, Worker, serve

HERE = Path(__file__).resolve().parent


class Classify(Worker):
    """The network of ../digits/digits.onnx: 64-128-64-10, ReLU, softmax."""

    inputs = {"x": Tensor("FP32", [-1, 64], description="8x8 grey pixels, row by row, 0 is black and 1 white")}
    outputs = {"p": Tensor("FP32", [-1, 10], description="probabilities of the digits 0 to 9")}
    examples = {"a blank image": {"x": [0.0] * 64}}

    def setup(self, ctx):
        """Loads the weights; the option weights names another file than this folder's."""
        with np.load(HERE / ctx.options.get("weights", "weights.npz")) as file:
            self.layers = [(file[f"w{i}"].T.copy(), file[f"b{i}"]) for i in (1, 2, 3)]
        ctx.log.info("%d layers", len(self.layers))

    def predict(self, batch):
        """Runs all rows of a batch at once."""
        x = batch["x"]
        finite = np.isfinite(x).all(axis=1)
        if not finite.all():
            for i, item in enumerate(batch.items):
                if not finite[item.slice].all():
                    batch.fail(i, InvalidInput("x", "has a pixel that is not finite"))
            x = np.where(finite[:, None], x, 0)  # the other rows are still needed
        return {"p": self.network(x)}

    def network(self, x):
        """Returns the probabilities [N, 10] of pixels [N, 64]."""
        *hidden, (weights, bias) = self.layers
        for w, b in hidden:
            x = np.maximum(x @ w + b, 0)
        z = x @ weights + bias
        e = np.exp(z - z.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)


if __name__ == "__main__":
    serve(Classify, arrays="numpy")
