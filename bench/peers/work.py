"""The work of items 5 and 6 of the suite, for other servers: as wait.py and noop.py have it for a mesh."""

import os
import time

PORT = int(os.environ["PEER_PORT"])
PIPELINE = os.environ["PEER_PIPELINE"]
ROUTE = f"/v1/pipelines/{PIPELINE}:infer"  # of plain HTTP, so that all get equal requests
MAX_BATCH = 32
MAX_WAIT = {"batching": 0.010, "noop": 0.001}[PIPELINE]  # seconds


def work(items):
    """Returns the items of a batch, at most MAX_BATCH."""
    if PIPELINE == "batching":
        time.sleep(0.005 + 0.0002 * len(items))
    return items
