"""The model that the protocol's sample clients ask: sums and differences of sixteen numbers."""

from stagemesh import Tensor, Worker, serve


class Simple(Worker):
    """Adds and subtracts row by row; what is too large wraps around, as in C."""

    inputs = {"INPUT0": Tensor("INT32", [-1, 16]), "INPUT1": Tensor("INT32", [-1, 16])}
    outputs = {"OUTPUT0": Tensor("INT32", [-1, 16]), "OUTPUT1": Tensor("INT32", [-1, 16])}

    def predict(self, batch):
        """Runs all rows of a batch at once."""
        a, b = batch["INPUT0"], batch["INPUT1"]
        return {"OUTPUT0": a + b, "OUTPUT1": a - b}


if __name__ == "__main__":
    serve(Simple, arrays="numpy")
