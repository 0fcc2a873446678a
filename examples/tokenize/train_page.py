"""Writes page.json, the weights of page.py, from the pages of the documentation.

Its arguments are the pages: ../../docs/clients.md ../../docs/configuration.md and so on.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path

from tokenize_text import Tokenize

HERE = Path(__file__).resolve().parent
RARE = 8  # a token that occurs less often than this has less weight


def weights(pages: list[list[int]], words: list[bool]) -> list[list[float]]:
    """Returns log p(page | token) - log p(page), [pages][tokens]; 0 for tokens that are no word.

    All pages have equal weight, however long they are.
    """
    shares = [{token: n / len(page) for token, n in Counter(page).items()} for page in pages]
    seen = Counter(token for page in pages for token in page)
    out: list[list[float]] = [[] for _ in pages]
    for token, word in enumerate(words):
        total = sum(share.get(token, 0) for share in shares)
        for page, share in zip(out, shares):
            likely = share.get(token, 0) / total * len(pages) if total else 1
            smooth = (seen[token] * likely + RARE) / (seen[token] + RARE)
            page.append(round(math.log(smooth), 3) if word else 0.0)
    return out


if __name__ == "__main__":
    tokenizer = Tokenize()
    tokenizer.load("vocabulary.txt")
    texts = [Path(name).read_text("utf-8") for name in sys.argv[1:]]
    words = [len(token) > 1 and token.isidentifier() for token in tokenizer.ids]
    learnt = weights([tokenizer.tokens(text) for text in texts], words)
    model = {"labels": [Path(name).stem for name in sys.argv[1:]], "weights": learnt}
    (HERE / "page.json").write_text(json.dumps(model, separators=(",", ":")) + "\n", "utf-8")
    print(model["labels"])
