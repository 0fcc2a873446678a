"""The worker in Python of runnertest.TestModels: each model adds a number to every row."""

import os
import threading
import time

from stagemesh import InvalidModel, ModelLimits, OutOfMemory, Tensor, Worker, serve

BAD, CRASH, HOLD = -1, -2, -3
loads = 0
lock = threading.Lock()


class Adder(Worker):
    arrays = "buffer"
    inputs = {"x": Tensor("INT64", [-1])}
    outputs = {"y": Tensor("INT64", [-1])}
    models = ModelLimits(capacity=1 << 20, default_size=1 << 10, load_slots=2, load_timeout=60)

    def load(self, model):
        global loads
        with lock:
            loads += 1
        try:
            return self.add_of(model)
        finally:
            with lock:
                loads -= 1

    def add_of(self, model):
        if model.source == "invalid":
            raise InvalidModel("this source is invalid")
        if model.source == "too large":
            raise OutOfMemory("this source is too large")
        if model.source == "bad":
            raise ValueError("this source is bad")
        if model.source == "crash":
            os._exit(3)
        while model.source == "hold":
            time.sleep(0.001)
            if model.cancelled:
                raise RuntimeError("nobody wants the model")
        model.size, model.max_concurrency = int(model.options["size"]), 3
        return int(model.options["add"])

    def size(self, model):
        return loads if model.source == "loads" else int(model.options.get("size", 0))

    def predict(self, batch):
        # It does not ask for batch.cancelled, which reads the connection: the SDK has to.
        while HOLD in batch["x"] and len(batch._cancelled) < len(batch):
            time.sleep(0.001)
        if any(row in (BAD, CRASH, HOLD) for row in batch["x"]):
            raise ValueError("this row is bad")
        return {"y": [row + batch.model for row in batch["x"]]}


if __name__ == "__main__":
    serve(Adder)
