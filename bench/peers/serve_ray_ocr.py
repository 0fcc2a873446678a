"""Ray Serve: two replicas that run rapidocr, each with one thread for each model."""

import os
import signal

import ray
from rapidocr import RapidOCR
from ray import serve
from serve_rapidocr import SETTINGS, read
from starlette.requests import Request
from starlette.responses import Response


@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 1}, logging_config={"enable_access_log": False})
class Read:
    """Takes a picture, and returns its texts as JSON."""

    def __init__(self):
        """Loads the models."""
        self.ocr = RapidOCR(params=SETTINGS)

    def run(self, picture: bytes) -> bytes:
        """Reads a picture."""
        return read(self.ocr, picture)

    async def __call__(self, request: Request) -> Response:
        """Answers a request."""
        return Response(self.run(await request.body()), media_type="application/json")


if __name__ == "__main__":
    ray.init(include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(os.environ["PEER_PORT"])})
    serve.run(Read.bind(), route_prefix="/")
    signal.sigwait({signal.SIGTERM})
    ray.shutdown()
