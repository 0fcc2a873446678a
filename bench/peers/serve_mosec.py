"""MOSEC: the bytes of a body, in batches with a greatest size and a longest wait."""

from mosec import Server, Worker
from work import MAX_BATCH, MAX_WAIT, ROUTE, work


class Work(Worker):
    """Takes and returns bytes, not JSON."""

    resp_mime_type = "application/octet-stream"

    def deserialize(self, data):
        """Returns the body."""
        return data

    def serialize(self, data):
        """Returns the body of the answer."""
        return data

    def forward(self, data):
        """Runs a batch."""
        return work(data)


if __name__ == "__main__":
    server = Server()
    server.append_worker(Work, max_batch_size=MAX_BATCH, max_wait_time=round(MAX_WAIT * 1000), route=ROUTE)
    server.run()
