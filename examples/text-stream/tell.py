"""Continues a prompt word by word: a stage that streams, in plain Python."""

import asyncio
from pathlib import Path

from language import Language

from stagemesh import InvalidInput, Parameter, Text, Worker, serve

HERE = Path(__file__).resolve().parent


class Tell(Worker):
    """A prompt in; the words that follow it out, each as a chunk."""

    arrays = "buffer"  # the standard library alone
    concurrency = 32  # stories at a time
    inputs = {"prompt": Text(description="the beginning of the story")}
    outputs = {"text": Text(description="its continuation; a chunk is a word with the space before it")}
    parameters = {
        "words": Parameter(int, "the most words, from 1 to 1000"),
        "max_tokens": Parameter(int, "the same, by the name that clients of OpenAI give it"),
        "temperature": Parameter(float, "0 is the likeliest word each time; up to 2"),
        "seed": Parameter(int, "the same seed, the same story"),
    }
    examples = {"a beginning": {"prompt": "The ferryman"}}

    def setup(self, ctx):
        """Learns the text; the option pause is the time before each word, in seconds."""
        self.language = Language((HERE / ctx.options.get("text", "tale.txt")).read_text("utf-8"))
        self.pause = ctx.options.get("pause", 0.05)

    async def stream(self, item):
        """Yields word after word; the pause stands for the time that a larger model takes."""
        most = number(item, "max_tokens", number(item, "words", 60, 1, 1000), 1, 1000)
        temperature = number(item, "temperature", 0.7, 0, 2)
        seed = item.parameters.get("seed")
        for word in self.language.generate(item["prompt"], most, temperature, seed):
            await asyncio.sleep(self.pause)
            yield {"text": word}


def number(item, name, default, least, most):
    """Returns a parameter that is a number of the default's type; raises InvalidInput."""
    value = item.parameters.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, type(default))) or not least <= value <= most:
        kind = "a whole number" if isinstance(default, int) else "a number"
        raise InvalidInput(f"parameters.{name}", f"{name} is {value!r}, expected {kind} from {least} to {most}")
    return value


if __name__ == "__main__":
    serve(Tell)
