"""Raises where the text says."""

import os

from stagemesh import Text, Worker, serve


class Raising(Worker):
    inputs = {"text": Text()}
    outputs = {"text": Text()}

    def preprocess(self, item):
        if item["text"] == "preprocess":
            raise KeyError("k" * 5000)

    def predict(self, batch):
        if "predict" in batch["text"]:
            raise ValueError("cannot read '/models/a/weights.bin' of (/models/a/list.txt)")
        if "exit" in batch["text"]:
            os._exit(7)
        return {} if "output" in batch["text"] else {"text": batch["text"]}


serve(Raising)
