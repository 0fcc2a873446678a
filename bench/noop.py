"""A worker that does nothing, to measure everything around it."""

from stagemesh import Bytes, Tensor, Worker, serve


class Noop(Worker):
    """Returns its input."""

    inputs = {"x": Tensor("UINT8", [-1, 1024])}
    outputs = {"y": Tensor("UINT8", [-1, 1024])}

    def setup(self, ctx):
        """Takes bytes, as over plain HTTP, if the option says so."""
        if ctx.options.get("bytes"):
            self.inputs, self.outputs = {"x": Bytes()}, {"y": Bytes()}

    def predict(self, batch):
        """Returns the input rows."""
        return {"y": batch["x"]}


if __name__ == "__main__":
    serve(Noop, arrays="buffer")
