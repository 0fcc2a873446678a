"""The worker of the runner ``onnx_models``: several ONNX models in one process, each in a session.

A model's source is the path of its file, which the host has checked. Its options are those of
onnx_worker.py, which lies beside it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from typing import Any, Mapping

from onnx_worker import Network, Refused, Runtime, files_and_axes
from stagemesh import Batch, Context, InvalidModel, Model, ModelLimits, Parameter, Worker, serve

_KEPT = 64  # optimised models of a stage


class RefusedModel(InvalidModel):
    """No host can run the model."""

    explained = True  # its text tells all, and a traceback nothing


class OnnxModels(Worker):
    """Runs each batch on its model."""

    models = ModelLimits()
    parameters: Mapping[str, Parameter] = {}
    concurrency = 1024  # onnxruntime runs as many batches side by side as the host sends

    def setup(self, ctx: Context) -> None:
        """Chooses threads and providers."""
        self.runtime = Runtime(ctx)
        self.batch_axis = self.runtime.batch_axis
        self.engine_name = self.runtime.name(self.runtime.providers)
        self.measuring = threading.Lock()

    def load(self, model: Model) -> Network:
        """Loads a model, and measures by how much the process grows."""
        with self.measuring:
            before = _memory()
            try:
                # Without an arena, which would keep the memory of the largest batch.
                network = Network(self.runtime, model.source, _KEPT, arena=False)
            except Refused as error:
                raise RefusedModel(str(error)) from None
            network.example = {}
            files = sum(map(os.path.getsize, network.files))
            model.size = max(files, _memory() - before), self._on_device(files)
        model.inputs, model.outputs = network.inputs, network.outputs
        return network

    def unload(self, model: Model) -> None:
        """Gives the memory of a model back to the system."""
        with self.measuring:
            model.value = None
            _trim()

    def size(self, model: Model) -> Any:
        """Returns what load measured, or the size of the files."""
        if model.size:
            return model.size
        try:
            size = sum(map(os.path.getsize, files_and_axes(model.source)[0]))
        except Refused:  # load says why
            size = os.path.getsize(model.source)
        return size, self._on_device(size)

    def _on_device(self, weights: int) -> int:
        """Returns what the weights take on a device, which nothing measures."""
        return 0 if self.runtime.providers[0] == "CPUExecutionProvider" else weights

    def predict(self, batch: Batch) -> Mapping[str, Any]:
        """Runs the batch's model."""
        network: Network = batch.model
        return network.predict(batch)


def _trim() -> None:
    with contextlib.suppress(AttributeError, OSError):  # which is glibc's alone
        ctypes.CDLL(None).malloc_trim(0)


def _memory() -> int:
    """Returns the bytes of memory of this process that no file has; 0 where the system does not tell."""
    _trim()
    with contextlib.suppress(FileNotFoundError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    serve(OnnxModels)
