"""Answers each row with the rows of its batch's array, and the parameter k of its input."""

from stagemesh import Tensor, Worker, serve


class Joined(Worker):
    inputs = {"x": Tensor("INT64", [-1, 1])}
    outputs = {"y": Tensor("INT64", [-1, 2])}

    def predict(self, batch):
        rows = batch["x"].shape[0]
        return {"y": [[rows, item.input_parameters.get("x", {}).get("k", 0)] for item in batch.items]}


serve(Joined, arrays="buffer")
