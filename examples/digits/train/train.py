"""Train the digits example: writes ../digits.onnx and ../images.

A perceptron with two hidden layers, 64-128-64-10, on scikit-learn's copy of
the UCI handwritten digits: 8x8 grey, intensities 0..16 scaled to 0..1, bright
strokes on black. It learns from the first 1,500 images, each also moved by one
pixel and given some noise, and is tested on the other 297, which other people
wrote. The arithmetic is numpy on one thread from a fixed seed, so on one
machine every run writes the same bytes.

    pip install -r requirements.txt && python3 train.py
"""

import os

for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[threads] = "1"  # before numpy: the order of sums must not vary

import struct
import zlib
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits

SEED = 20
TRAINING_IMAGES = 1500
IMAGES_SHOWN = 50
LAYERS = (64, 128, 64, 10)
EPOCHS = 120
BATCH = 64
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 2e-3
SMOOTHING = 0.05  # of the labels
NOISE = 0.08
DROPOUT = 0.2

HERE = Path(__file__).resolve().parent.parent


def shifted(images, rng):
    """Returns the images, each moved by -1, 0 or 1 pixels on both axes."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    down, right = rng.integers(0, 3, size=(2, len(images)))
    # Most digits touch the upper and lower edge: moving them that way would
    # cut them, so half of the images stay in their rows.
    down[rng.random(len(images)) < 0.5] = 1
    rows = down[:, None, None] + np.arange(8)[None, :, None]
    columns = right[:, None, None] + np.arange(8)[None, None, :]
    return padded[np.arange(len(images))[:, None, None], rows, columns]


def softmax(logits):
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def forward(weights, x, rng=None):
    """Returns the activations of every layer; the last ones are logits."""
    layers = [x]
    for i, (w, b) in enumerate(weights):
        x = x @ w + b
        if i < len(weights) - 1:
            x = np.maximum(x, 0)
            if rng is not None:
                x = x * (rng.random(x.shape) >= DROPOUT) / (1 - DROPOUT)
        layers.append(x)
    return layers


def gradients(weights, x, target, rng):
    layers = forward(weights, x, rng)
    delta = (softmax(layers[-1]) - target) / len(x)
    out = []
    for i in reversed(range(len(weights))):
        out.append((layers[i].T @ delta, delta.sum(axis=0)))
        if i > 0:
            # Where dropout or the rectifier left nothing, nothing flows back.
            delta = (delta @ weights[i][0].T) * (layers[i] > 0) / (1 - DROPOUT)
    return out[::-1]


class Adam:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    def __init__(self, shapes):
        self.mean = [np.zeros(s) for s in shapes]
        self.square = [np.zeros(s) for s in shapes]
        self.step = 0

    def update(self, parameters, grads, rate):
        self.step += 1
        for p, g, m, s in zip(parameters, grads, self.mean, self.square):
            m += 0.1 * (g - m)
            s += 0.001 * (g * g - s)
            update = (m / (1 - 0.9**self.step)) / (np.sqrt(s / (1 - 0.999**self.step)) + 1e-8)
            if p.ndim == 2:
                update = update + WEIGHT_DECAY * p
            p -= rate * update


def train(images, labels):
    rng = np.random.default_rng(SEED)
    weights = [
        (rng.normal(0, np.sqrt(2 / n_in), (n_in, n_out)), np.zeros(n_out))
        for n_in, n_out in zip(LAYERS, LAYERS[1:])
    ]
    flat = [p for layer in weights for p in layer]
    adam = Adam([p.shape for p in flat])
    targets = np.eye(10)[labels] * (1 - SMOOTHING) + SMOOTHING / 10
    steps, step = EPOCHS * -(-len(images) // BATCH), 0
    for _ in range(EPOCHS):
        order = rng.permutation(len(images))
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            x = shifted(images[chosen], rng).reshape(len(chosen), -1)
            x = np.clip(x + rng.normal(0, NOISE, x.shape), 0, 1)
            grads = gradients(weights, x, targets[chosen], rng)
            rate = LEARNING_RATE * 0.5 * (1 + np.cos(np.pi * step / steps))
            adam.update(flat, [g for layer in grads for g in layer], rate)
            step += 1
    return [(w.astype(np.float32), b.astype(np.float32)) for w, b in weights]


def export(weights, path):
    nodes, tensors, x = [], [], "x"
    for i, (w, b) in enumerate(weights, start=1):
        # With the inputs of a neuron side by side nothing has to be transposed
        # for every batch.
        w = np.ascontiguousarray(w.T)
        tensors += [numpy_helper.from_array(w, f"w{i}"), numpy_helper.from_array(b, f"b{i}")]
        nodes.append(helper.make_node("Gemm", [x, f"w{i}", f"b{i}"], [f"z{i}"], name=f"dense{i}", transB=1))
        x = f"z{i}"
        if i < len(weights):
            nodes.append(helper.make_node("Relu", [x], [f"h{i}"], name=f"relu{i}"))
            x = f"h{i}"
    nodes.append(helper.make_node("Softmax", [x], ["p"], name="softmax", axis=-1))
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", LAYERS[0]])],
        [helper.make_tensor_value_info("p", TensorProto.FLOAT, ["rows", LAYERS[-1]])],
        tensors,
    )
    model = helper.make_model(
        graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)], producer_name="train.py"
    )
    onnx.checker.check_model(model, full_check=True)
    path.write_bytes(model.SerializeToString(deterministic=True))


def png(pixels):
    """Returns an 8-bit grey PNG of a two-dimensional array."""
    height, width = pixels.shape

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes(row.tolist()) for row in pixels)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(rows, 9))
        + chunk(b"IEND", b"")
    )


def write_images(folder, images, labels):
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    for i, (image, label) in enumerate(zip(images, labels)):
        grey = np.round(image * 255).astype(np.uint8)  # the intensity v of 0..16 as v*255/16
        (folder / f"{i:02d}-{label}.png").write_bytes(png(grey.repeat(4, axis=0).repeat(4, axis=1)))


def main():
    data = load_digits()
    images, labels = data.images / 16.0, data.target
    weights = train(images[:TRAINING_IMAGES], labels[:TRAINING_IMAGES])
    export(weights, HERE / "digits.onnx")

    unseen, expected = images[TRAINING_IMAGES:], labels[TRAINING_IMAGES:]
    logits = forward(weights, unseen.reshape(len(unseen), -1).astype(np.float32))[-1]
    hits = logits.argmax(axis=1) == expected
    write_images(HERE / "images", unseen[:IMAGES_SHOWN], expected[:IMAGES_SHOWN])
    print(f"{hits.sum()} of {len(hits)} unseen images read correctly: {hits.mean():.3f}")
    print(f"{hits[:IMAGES_SHOWN].sum()} of the {IMAGES_SHOWN} in images/")


if __name__ == "__main__":
    main()
