"""Writes page.json, the weights of page.py, from the pages themselves.

    python3 train_page.py ../../docs/{clients,configuration,faults,operations,runners}.md
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path

from tokenize_text import Tokenize

HERE = Path(__file__).resolve().parent
COMMON = 20  # tokens as frequent as this many are not to decide anything by chance


def weights(pages: list[list[int]], tokens: int) -> list[list[float]]:
    """Returns log p(token | page) - log p(token), [pages][tokens]."""
    everywhere = Counter(token for page in pages for token in page)
    total = sum(everywhere.values())
    out = []
    for page in pages:
        here = Counter(page)
        likely = [everywhere[token] / total for token in range(tokens)]
        smooth = [(here[token] + COMMON * likely[token]) / (len(page) + COMMON) for token in range(tokens)]
        out.append([round(math.log(p / q), 3) if q else 0.0 for p, q in zip(smooth, likely)])
    return out


if __name__ == "__main__":
    tokenizer = Tokenize()
    tokenizer.load("vocabulary.txt")
    texts = [Path(name).read_text("utf-8") for name in sys.argv[1:]]
    learnt = weights([tokenizer.tokens(text) for text in texts], len(tokenizer.ids))
    labels = [Path(name).stem for name in sys.argv[1:]]
    (HERE / "page.json").write_text(json.dumps({"labels": labels, "weights": learnt}, separators=(",", ":")) + "\n", "utf-8")
    print(labels)
