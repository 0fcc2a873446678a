"""Makes one vector of a text from those of its tokens: the stage after the model."""

import numpy as np

from stagemesh import Tensor, Worker, serve


class Pool(Worker):
    """Vectors of tokens and their mask in; the mean of the tokens out, with a length of 1."""

    inputs = {
        "last_hidden_state": Tensor("FP32", [-1, -1, 384], variable="pad"),
        "attention_mask": Tensor("INT64", [-1, -1], variable="pad"),
    }
    outputs = {"embedding": Tensor("FP32", [-1, 384])}

    def predict(self, batch):
        """Pools all texts of a batch at once."""
        mask = batch["attention_mask"][:, :, None].astype("float32")
        mean = (batch["last_hidden_state"] * mask).sum(axis=1) / mask.sum(axis=1)
        return {"embedding": mean / np.linalg.norm(mean, axis=1, keepdims=True)}


if __name__ == "__main__":
    serve(Pool)
