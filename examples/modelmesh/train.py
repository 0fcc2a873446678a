"""Trains the softmax reader: writes softmax.json.

A linear softmax on the images that the network of ../digits learns from: see ../digits/train.

    pip install -r ../digits/train/requirements.txt && python3 train.py
"""

import json
from pathlib import Path

from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

TRAINING_IMAGES = 1500

if __name__ == "__main__":
    digits = load_digits()
    images, labels = digits.data / 16, digits.target
    model = LogisticRegression(C=0.1, max_iter=1000).fit(images[:TRAINING_IMAGES], labels[:TRAINING_IMAGES])
    weights = {
        "weights": [[round(w, 4) for w in row] for row in model.coef_.tolist()],
        "bias": [round(b, 4) for b in model.intercept_.tolist()],
    }
    Path(__file__).with_name("softmax.json").write_text(json.dumps(weights) + "\n")
    print("accuracy:", model.score(images[TRAINING_IMAGES:], labels[TRAINING_IMAGES:]))
