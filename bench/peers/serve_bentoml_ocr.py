"""BentoML: two processes that run rapidocr, each with one thread for each model."""

import os
from typing import Annotated

import bentoml
from bentoml.validators import ContentType
from rapidocr import RapidOCR
from serve_rapidocr import SETTINGS, read


@bentoml.service(workers=2, logging={"access": {"enabled": False}})
class Read:
    """Takes a picture, and returns its texts as JSON."""

    def __init__(self):
        """Loads the models."""
        self.ocr = RapidOCR(params=SETTINGS)

    @bentoml.api(route=f"/v1/pipelines/{os.environ['PEER_PIPELINE']}:infer")
    def run(self, picture: Annotated[bytes, ContentType("image/*")], /) -> str:
        """Reads a picture."""
        return read(self.ocr, picture).decode()
