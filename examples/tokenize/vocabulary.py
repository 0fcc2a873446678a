"""Writes vocabulary.txt from texts of this repository.

    python3 vocabulary.py ../../README.md ../../docs/*.md

The special tokens come first, then every character alone and as a piece that
continues a word, then the words that occur at least twice, the most frequent first.
"""

from __future__ import annotations

import string
import sys
from collections import Counter
from pathlib import Path

from tokenize_text import WORD

HERE = Path(__file__).resolve().parent
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def vocabulary(text: str) -> list[str]:
    """Returns the tokens of a text."""
    characters = sorted(set(string.ascii_lowercase + string.digits))
    marks = sorted(set(string.punctuation) - {"_"})
    words = Counter(word for word in WORD.findall(text.lower()) if len(word) > 1 and word.isascii())
    frequent = [word for word, n in sorted(words.items(), key=lambda pair: (-pair[1], pair[0])) if n > 1]
    pieces = [f"##{character}" for character in [*characters, "_"]]
    return list(dict.fromkeys([*SPECIAL, *characters, *marks, "_", *pieces, *frequent]))


if __name__ == "__main__":
    tokens = vocabulary("\n".join(Path(name).read_text("utf-8") for name in sys.argv[1:]))
    (HERE / "vocabulary.txt").write_text("\n".join(tokens) + "\n", "utf-8")
    print(len(tokens), "tokens")
