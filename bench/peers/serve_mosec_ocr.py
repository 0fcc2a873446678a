"""MOSEC: two processes that run rapidocr, each with one thread for each model."""

import os

from mosec import Server, Worker
from rapidocr import RapidOCR
from serve_rapidocr import SETTINGS, read


class Read(Worker):
    """Takes a picture, and returns its texts as JSON."""

    def __init__(self):
        """Loads the models."""
        super().__init__()
        self.ocr = RapidOCR(params=SETTINGS)

    def deserialize(self, data):
        """Returns the body."""
        return data

    def serialize(self, data):
        """Returns the body of the answer."""
        return data

    def forward(self, data):
        """Reads a picture."""
        return read(self.ocr, data)


if __name__ == "__main__":
    server = Server()
    server.append_worker(Read, num=2, timeout=60, route=f"/v1/pipelines/{os.environ['PEER_PIPELINE']}:infer")
    server.run()
