"""Answers with chunks, as many as the text asks for: each is the time in nanoseconds since 1970."""

import asyncio
import time

from stagemesh import Text, Worker, serve


class Clock(Worker):
    inputs = {"text": Text()}
    outputs = {"now": Text()}
    examples = [{"text": "1"}]
    collect = False
    concurrency = 64

    def setup(self, ctx):
        self.pause, self.folder = ctx.options["pause"], ctx.options["folder"]

    async def stream(self, item):
        try:
            for _ in range(int(item["text"])):
                await asyncio.sleep(self.pause)
                yield str(time.time_ns())
        finally:
            if item.cancelled:
                with open(f"{self.folder}/ended", "a") as ended:
                    ended.write(f"{time.time_ns()}\n")


serve(Clock, arrays="buffer")
