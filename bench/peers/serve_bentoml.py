"""BentoML: adaptive batching. It has no longest wait of a batch; its limit on latency stays at the default."""

import bentoml
from work import MAX_BATCH, ROUTE, work


@bentoml.service(workers=1, logging={"access": {"enabled": False}})
class Work:
    """A batchable API takes a list; each request has one of one string."""

    @bentoml.api(route=ROUTE, batchable=True, max_batch_size=MAX_BATCH)
    def run(self, items: list[str], /) -> list[str]:
        """Runs a batch."""
        return work(items)
