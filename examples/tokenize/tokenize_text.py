"""Turns text into token ids: the stage before a language model, in plain Python.

Words are looked up in vocabulary.txt, one token a line, whose line number is the
id. A word that is missing there is split into the longest pieces that exist, as in
WordPiece; ``##`` marks a piece that continues a word. Unknown characters become [UNK].
"""

import re
from pathlib import Path

from stagemesh import InvalidInput, Tensor, Text, Worker, serve

HERE = Path(__file__).resolve().parent
WORD = re.compile(r"\w+|[^\w\s]")


class Tokenize(Worker):
    """One text in; its ids and a mask of ones out, each INT64 [1, tokens]."""

    arrays = "buffer"  # the standard library alone
    inputs = {"text": Text()}
    outputs = {
        "ids": Tensor("INT64", [-1, -1], variable="list", description="token ids, [CLS] first and [SEP] last"),
        "mask": Tensor("INT64", [-1, -1], variable="list", description="1 for each token, for stages that pad"),
    }
    examples = {"a sentence": {"text": "A stage is a named function of the mesh."}}

    def setup(self, ctx):
        """Loads the vocabulary; option max_tokens bounds a text, default 512."""
        self.load(ctx.options.get("vocabulary", "vocabulary.txt"))
        self.max_tokens = ctx.options.get("max_tokens", 512)

    def load(self, vocabulary):
        """Reads the vocabulary: the number of a line is the id of its token."""
        lines = (HERE / vocabulary).read_text("utf-8").split("\n")
        self.ids = {token: i for i, token in enumerate(lines) if token}
        self.longest = max(map(len, self.ids))

    def predict_item(self, item):
        """Tokenizes one text."""
        ids = self.tokens(item["text"])
        if len(ids) == 2:
            raise InvalidInput("text", "has no words")
        if len(ids) > self.max_tokens:
            raise InvalidInput("text", f"has {len(ids)} tokens, at most {self.max_tokens} are allowed")
        item.respond("tokens", str(len(ids)))
        return {"ids": [ids], "mask": [[1] * len(ids)]}

    def tokens(self, text):
        """Returns the ids of a text's tokens, [CLS] first and [SEP] last."""
        pieces = [piece for word in WORD.findall(text.lower()) for piece in self.pieces(word)]
        return [self.ids[piece] for piece in ["[CLS]", *pieces, "[SEP]"]]

    def pieces(self, word):
        """Returns the tokens of a word: the longest first."""
        out, at = [], 0
        while at < len(word):
            start = "##" if at else ""
            for end in range(min(len(word), at + self.longest), at, -1):
                if start + word[at:end] in self.ids:
                    out.append(start + word[at:end])
                    at = end
                    break
            else:
                return ["[UNK]"]
        return out


if __name__ == "__main__":
    serve(Tokenize)
