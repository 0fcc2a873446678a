"""A worker that takes as long as an accelerator, and uses no processor."""

import time

from stagemesh import Bytes, Tensor, Worker, serve

BASE = 0.005  # seconds for a batch
PER_ITEM = 0.0002  # and for each of its items


class Wait(Worker):
    """Waits once per batch, and returns its input."""

    inputs = {"x": Tensor("UINT8", [-1, 1024])}
    outputs = {"y": Tensor("UINT8", [-1, 1024])}

    def setup(self, ctx):
        """Takes bytes, as over plain HTTP, if the option says so."""
        if ctx.options.get("bytes"):
            self.inputs, self.outputs = {"x": Bytes()}, {"y": Bytes()}

    def predict(self, batch):
        """Returns the input rows."""
        time.sleep(BASE + PER_ITEM * len(batch.items))
        return {"y": batch["x"]}


if __name__ == "__main__":
    serve(Wait, arrays="buffer")
