"""Makes a vector of a text by hashing its words: no model, and no meaning beyond equal words."""

import math
import re
from hashlib import blake2b

from stagemesh import InvalidInput, Tensor, Text, Worker, serve

WORD = re.compile(r"\w+")
SIZE = 256


class Hashing(Worker):
    """Texts in; a vector for each out, of length 1. Texts that share words have vectors that are alike."""

    arrays = "buffer"  # the standard library alone
    inputs = {"input": Text(description="the text")}
    outputs = {"embedding": Tensor("FP32", [-1, SIZE], description="a vector of length 1")}
    parameters = {}
    examples = {"a sentence": {"input": "A stage is a named function of the mesh."}}

    def predict(self, batch):
        """Makes the vectors of a batch."""
        out = []
        for i, text in enumerate(batch["input"]):
            words = WORD.findall(text.lower())
            if not words:
                batch.fail(i, InvalidInput("input", "has no words"))
            batch.items[i].respond("prompt_tokens", str(len(words)))
            out.append(vector(words))
        return {"embedding": out}


def vector(words):
    """Returns the sum of the words, each of which is 1 or -1 at a place of its own, with length 1."""
    out = [0.0] * SIZE
    for word in words:
        digest = int.from_bytes(blake2b(word.encode(), digest_size=4).digest(), "little")
        out[digest % SIZE] += 1 if digest >> 31 else -1
    length = math.sqrt(sum(x * x for x in out)) or 1.0
    return [x / length for x in out]


if __name__ == "__main__":
    serve(Hashing)
