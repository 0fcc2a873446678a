"""Answers each item after a while with its place in its batch, on four threads."""

import time

from stagemesh import Tensor, Worker, serve


class OneAtATime(Worker):
    inputs = {"x": Tensor("INT64", [-1, 1])}
    outputs = {"y": Tensor("INT64", [-1, 2])}
    concurrency = 4

    def predict_item(self, item):
        time.sleep(0.05)
        return {"y": [[item.index, 0]]}


serve(OneAtATime, arrays="buffer")
