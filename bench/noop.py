"""A worker that does nothing, to measure everything around it."""

from stagemesh import Tensor, Worker, serve


class Noop(Worker):
    """Returns its input."""

    inputs = {"x": Tensor("UINT8", [-1, 1024])}
    outputs = {"y": Tensor("UINT8", [-1, 1024])}

    def predict(self, batch):
        """Returns the input rows."""
        return {"y": batch["x"]}


if __name__ == "__main__":
    serve(Noop, arrays="buffer")
