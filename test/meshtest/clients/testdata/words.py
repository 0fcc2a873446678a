"""A model that answers a text word by word; some words mean something to it."""

import asyncio

from stagemesh import InvalidInput, Text, Worker, serve


class Words(Worker):
    """Gives back each word of a text as a chunk of its own.

    meet:N      goes on when N texts have come to such a word
    fail        is a fault of the text
    forever     comes again and again until nobody waits
    cancelled?  how many texts were given up that nobody waited for any more
    """

    inputs = {"text": Text()}
    outputs = {"word": Text()}
    examples = [{"text": "one two"}]
    concurrency = 16

    def setup(self, _):
        """Nobody has met or left so far."""
        self.cancelled, self.waiting = 0, []

    async def stream(self, item):
        """Yields the words, each with a space behind it."""
        try:
            for word in item["text"].split():
                if word.startswith("meet:"):
                    await self.meet(int(word[len("meet:") :]))
                while word == "forever":
                    yield {"word": "forever "}
                    await asyncio.sleep(0.005)
                if word == "fail":
                    raise InvalidInput("text", "says fail")
                yield {"word": f"{self.cancelled if word == 'cancelled?' else word} "}
        except (asyncio.CancelledError, GeneratorExit):  # as it waits, or as it yields
            self.cancelled += 1
            raise

    async def meet(self, many):
        """Waits until so many are here, all of them on the one event loop."""
        here = asyncio.get_running_loop().create_future()
        self.waiting.append(here)
        if len(self.waiting) == many:
            waiting, self.waiting = self.waiting, []
            for other in waiting:
                if not other.done():
                    other.set_result(None)
        await here


if __name__ == "__main__":
    serve(Words, arrays="buffer")
