"""Answers a chat word by word by rules, as a program called ELIZA did in 1966, in plain Python."""

import asyncio
import json
import random
import re

from stagemesh import InvalidInput, Json, Parameter, Text, Worker, serve

# What a message has, and what to answer; {0} is what the group matched, seen from the other side.
RULES = [
    (r"\bi need ([^.!?]+)", ["Why do you need {0}?", "What would it change if you had {0}?"]),
    (r"\bi(?: am|'m) ([^.!?]+)", ["How long have you been {0}?", "Do you like being {0}?"]),
    (r"\bi (?:feel|felt) ([^.!?]+)", ["When did you begin to feel {0}?", "Tell me more about feeling {0}."]),
    (r"\bmy (mother|father|sister|brother|family|friend)\b", ["Tell me more about your {0}.", "Who else is there?"]),
    (r"\b(?:you are|you're) ([^.!?]+)", ["What makes you think that I am {0}?", "Would you rather I were not {0}?"]),
    (r"\bbecause\b", ["Is that the only reason?", "What else could be the reason?"]),
    (r"\b(?:hello|hi|good morning)\b", ["Hello. What is on your mind?", "Good day. How are you today?"]),
    (r"\?\s*$", ["Why do you ask?", "What do you think yourself?"]),
    (r"", ["Please go on.", "How does that make you feel?", "Can you say that in other words?"]),
]
OTHER_SIDE = {
    "i": "you", "me": "you", "my": "your", "mine": "yours", "am": "are",
    "you": "I", "your": "my", "yours": "mine", "myself": "yourself",
}  # fmt: skip
WORD = re.compile(r"\s*\S+")
MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"type": "string"}, "content": {"type": "string"}},
    },
}


class Eliza(Worker):
    """The messages of a chat in; an answer to the last one of the user out, each word as a chunk."""

    arrays = "buffer"  # the standard library alone
    concurrency = 64  # chats at a time
    inputs = {"messages": Json(schema=MESSAGES, description="the chat, as the gateway passes it on")}
    outputs = {"text": Text(description="the answer; a chunk is a word with the space before it")}
    parameters = {
        "max_tokens": Parameter(int, "the most words"),
        "stop": Parameter(str, "texts before which the answer ends, a list in JSON"),
        "temperature": Parameter(float, "0 is the first answer of a rule, more is any"),
        "seed": Parameter(int, "the same seed, the same answer"),
    }
    examples = {"a greeting": {"messages": [{"role": "user", "content": "Hello"}]}}

    def setup(self, ctx):
        """Reads the option pause: the time before each word, in seconds."""
        self.pause = ctx.options.get("pause", 0.02)

    async def stream(self, item):
        """Yields word after word, and tells how many there were and why there are no more."""
        said = [m["content"] for m in item["messages"] if m["role"] == "user"]
        if not said:
            raise InvalidInput("messages", "has no message of the user")
        temperature, seed = item.parameters.get("temperature", 1), item.parameters.get("seed")
        words = WORD.findall(answer(said[-1], random.Random(seed) if temperature else None))
        most = item.parameters.get("max_tokens", len(words))
        counts = {"prompt": sum(len(m["content"].split()) for m in item["messages"]), "completion": 0}
        ends = Stops(stops_of(item.parameters.get("stop", "[]")))
        for word in words[:most]:
            await asyncio.sleep(self.pause)
            counts["completion"] += 1
            if text := ends.take(word):
                yield {"text": text}
            if ends.found:
                break
        if rest := ends.rest():
            yield {"text": rest}
        item.respond("finish_reason", "length" if most < len(words) and not ends.found else "stop")
        item.respond("prompt_tokens", str(counts["prompt"]))
        item.respond("completion_tokens", str(counts["completion"]))


def answer(said, chance):
    """Returns the answer of the first rule that fits; its first one if there is no chance."""
    for pattern, answers in RULES:
        if match := re.search(pattern, said, re.IGNORECASE):
            groups = [" ".join(OTHER_SIDE.get(w.lower(), w) for w in g.split()) for g in match.groups()]
            return (chance.choice(answers) if chance else answers[0]).format(*groups)
    raise AssertionError("the last rule fits any text")


def stops_of(text):
    """Returns the texts of a list in JSON."""
    try:
        stops = json.loads(text)
    except ValueError:
        stops = None
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise InvalidInput("parameters.stop", "is not a list of texts in JSON")
    return stops


class Stops:
    """Ends a text before the first of some stops, each of which may come in pieces.

    found is true once one has come.
    """

    def __init__(self, stops):
        self.stops, self.held, self.found = [s for s in stops if s], "", False

    def take(self, piece):
        """Takes the next piece; returns what is certain not to begin a stop."""
        self.held += piece
        places = [self.held.find(s) for s in self.stops if s in self.held]
        if places:
            self.found = True
            text, self.held = self.held[: min(places)], ""
            return text
        begun = [n for s in self.stops for n in range(1, len(s)) if self.held.endswith(s[:n])]
        sure = len(self.held) - max(begun, default=0)
        text, self.held = self.held[:sure], self.held[sure:]
        return text

    def rest(self):
        """Returns what was held back, at the end of the text."""
        text, self.held = self.held, ""
        return text


if __name__ == "__main__":
    serve(Eliza)
