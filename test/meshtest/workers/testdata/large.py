"""Answers a number with as many bytes, which count up in eights."""

import array

from stagemesh import Bytes, Json, Worker, serve


class Large(Worker):
    inputs = {"size": Json()}
    outputs = {"data": Bytes()}
    examples = [{"size": 8}]

    def predict_item(self, item):
        return {"data": array.array("Q", range(item["size"] // 8)).tobytes()}


serve(Large, arrays="buffer")
