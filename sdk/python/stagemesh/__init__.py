"""Workers for stagemesh: predict functions behind a stage of a mesh.

    from stagemesh import InvalidInput, Tensor, Worker, serve

    class Classify(Worker):
        inputs = {"x": Tensor("FP32", [-1, 64])}
        outputs = {"p": Tensor("FP32", [-1, 10])}

        def setup(self, ctx):
            self.net = load(ctx.options["model"])

        def predict(self, batch):
            return {"p": self.net(batch["x"])}

    if __name__ == "__main__":
        serve(Classify)

A stage's host starts the process and talks to it by sdk/PROTOCOL.md; it never imports
it. The package needs Python 3.9 and nothing else; tensors with ``arrays="numpy"``, the
default, need numpy. ``stagemesh.testing`` runs a worker without a mesh, and
``stagemesh check worker.py`` reports what is wrong with one. ``stagemesh.client`` calls a mesh.

In this package ``frames`` and ``parts`` are the protocol's bytes; ``specs``, ``arrays`` and
``values`` turn them into values and back; ``worker``, ``batches`` and ``faults`` are what a
worker is written with; ``runs`` runs batches and ``streams`` streams, and ``spans`` times
them; ``models`` loads several models;
``session`` is the conversation with the host, and ``lifecycle`` is the process around it.

A process serves one worker, in one thread unless ``concurrency`` is above 1. An invalid
declaration ends it with exit code 1 and a message with what to write. Exceptions
of a batch or of an item are replies, and the process continues.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .batches import Batch, Item
    from .faults import InvalidInput, InvalidModel, ItemError, ItemFailed, OutOfMemory, SchemaViolation
    from .lifecycle import serve
    from .models import Model, ModelLimits, below
    from .specs import Bytes, Json, Parameter, Tensor, Text
    from .worker import Context, Worker

__all__ = [
    "Batch",
    "Bytes",
    "Context",
    "InvalidInput",
    "InvalidModel",
    "Item",
    "ItemError",
    "ItemFailed",
    "Json",
    "Model",
    "ModelLimits",
    "OutOfMemory",
    "Parameter",
    "SchemaViolation",
    "Tensor",
    "Text",
    "Worker",
    "__version__",
    "below",
    "serve",
]

# The modules of the names above; stagemesh.client imports this package and none of them.
_HOMES = {
    "batches": ("Batch", "Item"),
    "faults": ("InvalidInput", "InvalidModel", "ItemError", "ItemFailed", "OutOfMemory", "SchemaViolation"),
    "lifecycle": ("serve",),
    "models": ("Model", "ModelLimits", "below"),
    "specs": ("Bytes", "Json", "Parameter", "Tensor", "Text"),
    "worker": ("Context", "Worker"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f".{home}", __name__), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
