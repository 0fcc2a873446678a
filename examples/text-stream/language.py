"""A language model of words: how often each word follows the two before it, in a text.

It is made from the text at start, which takes some milliseconds, and knows nothing
else.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter, defaultdict

WORD = re.compile(r"[\w'-]+|[.,;:!?]")
STOPS = frozenset(".!?")


def words_of(text):
    """Returns the words and punctuation of a text in lower case, in order."""
    return [word.lower() for word in WORD.findall(text)]


class Language:
    """Counts of the words that follow the last two words of a text, the last one, or any."""

    def __init__(self, text):
        self.after = defaultdict(Counter)
        words = [".", *words_of(text)]
        if len(words) < 2:
            raise ValueError("there are no words to learn from")
        for at, word in enumerate(words[1:], 1):
            for length in range(min(2, at) + 1):
                self.after[tuple(words[at - length : at])][word] += 1

    def next(self, words, temperature, chance):
        """Returns a word that may follow: the most likely one if the temperature is 0.

        It uses the longest context that the text has, and sometimes a shorter one, so that
        the answer is not a quotation.
        """
        lengths = [n for n in (2, 1, 0) if tuple(words[len(words) - n :]) in self.after]
        if len(lengths) > 1 and temperature > 0 and chance.random() < 0.2 * temperature:
            del lengths[0]
        counts = self.after[tuple(words[len(words) - lengths[0] :])]
        if temperature == 0:
            return min(counts, key=lambda word: (-counts[word], word))
        choices = sorted(counts)
        most = max(counts.values())
        weights = [math.exp(math.log(counts[word] / most) / temperature) for word in choices]
        return chance.choices(choices, weights)[0]

    def generate(self, prompt, most, temperature, seed):
        """Yields the words that continue a prompt, each with its space and capital letter."""
        chance = random.Random(seed)
        words = words_of(prompt) or ["."]
        first = not prompt.strip() or prompt.rstrip()[-1] in STOPS
        for _ in range(most):
            word = self.next(words, temperature, chance)
            words.append(word)
            yield printed(word, first)
            first = word in STOPS


def printed(word, first):
    """Returns a word with the space before it, and a capital letter at the start of a sentence."""
    if not word[0].isalnum():
        return word
    return " " + (word.capitalize() if first else word)
