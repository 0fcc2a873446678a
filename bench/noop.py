"""A worker that does nothing: what is measured is all that is around it."""

from stagemesh import Tensor, Worker, serve


class Noop(Worker):
    """Gives back what it got."""

    inputs = {"x": Tensor("UINT8", [-1, 1024])}
    outputs = {"y": Tensor("UINT8", [-1, 1024])}

    def predict(self, batch):
        """Returns the rows that came."""
        return {"y": batch["x"]}


if __name__ == "__main__":
    serve(Noop, arrays="buffer")
