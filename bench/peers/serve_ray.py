"""Ray Serve: one replica that joins requests by serve.batch, and more requests at a time than a batch has."""

import signal

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response
from work import MAX_BATCH, MAX_WAIT, PORT, work


@serve.deployment(max_ongoing_requests=256, logging_config={"enable_access_log": False})
class Work:
    """Takes and returns bytes."""

    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=MAX_WAIT)
    async def run(self, items: list[bytes]) -> list[bytes]:
        """Runs a batch."""
        return work(items)

    async def __call__(self, request: Request) -> Response:
        """Answers a request."""
        return Response(await self.run(await request.body()))


if __name__ == "__main__":
    ray.init(include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(Work.bind())
    signal.sigwait({signal.SIGTERM})
    ray.shutdown()
