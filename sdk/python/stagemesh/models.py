"""Several models in one worker: what a worker is given of each, and the threads that load them.

A worker whose class has ``models = ModelLimits(...)`` has these methods, each called in a
thread of its own, so that batches go on:

    load(self, model)      loads a model; returns what batch.model is for its batches. An exception
                           fails the load and keeps nothing: InvalidModel if no host can load it
    unload(self, model)    optional: frees what does not end with model.value
    size(self, model)      optional: its size, measured if it is loaded, else predicted
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple, Union

from .faults import InvalidModel, ModelGone
from .frames import MAX_NUMBER, MAX_SLOTS, Ended, Header, message
from .specs import Spec

# Bytes of the host's memory; or of the host's and of the devices'.
Size = Union[int, Tuple[int, int]]


class ModelLimits(NamedTuple):
    """What a worker can hold; 0 is not known. load_timeout is in seconds."""

    capacity: Size = 0
    default_size: Size = 0
    load_slots: int = 1
    load_timeout: float = 0

    def wire(self) -> Dict[str, Any]:
        """Returns the limits as ready carries them; raises ValueError."""
        if type(self.load_slots) is not int or not 1 <= self.load_slots <= MAX_SLOTS:
            raise ValueError(f"models.load_slots: expected a whole number from 1 to {MAX_SLOTS}")
        out = {"capacity": _wire_size(self.capacity), "default_size": _wire_size(self.default_size)}
        timeout = {"load_timeout": max(1, int(self.load_timeout * 1000))} if self.load_timeout else {}
        return {**out, "load_slots": self.load_slots, **timeout}


def _wire_size(size: Size) -> Dict[str, int]:
    pair = size if isinstance(size, tuple) else (size, 0)
    if len(pair) != 2 or any(type(n) is not int or not 0 <= n <= MAX_NUMBER for n in pair):
        raise ValueError(f"a size is whole bytes, or a pair of them for host and devices; got {size!r}")
    return {"host": pair[0], "device": pair[1]}


class Model:
    """The argument of load, unload and size.

    id, type, source, options    the model's in its registry; options are strings by name
    value              what load returned; None before
    size               its bytes, or those of host and devices; load may set it
    max_concurrency    how many of its batches may run at a time; load may set it; 0: all slots
    inputs, outputs    specs by name; load may set both where they are not the worker's
    cancelled          whether the load is cancelled; long loads look at it
    """

    def __init__(self, id: str, type: str = "", source: str = "", options: Optional[Mapping[str, str]] = None) -> None:
        self.id, self.type, self.source, self.options = id, type, source, dict(options or {})
        self.value: Any = None
        self.size: Size = 0
        self.max_concurrency = 0
        self.inputs: Mapping[str, Spec] = {}
        self.outputs: Mapping[str, Spec] = {}
        self._runs: Any = None  # runs its batches, where it has specs
        self.cancelled = False
        self._ended = threading.Event()  # of its load


def below(folder: str, source: str) -> str:
    """Returns the path of a source below a folder.

    Raises InvalidModel if it does not exist, or leaves the folder: by .., by a symbolic link or
    as an absolute path.
    """
    root = os.path.realpath(folder)
    path = os.path.realpath(os.path.join(root, source))
    if os.path.isabs(source) or os.path.commonpath([root, path]) != root:
        raise InvalidModel(f"source {source!r} is not below the worker's folder")
    if not os.path.exists(path):
        raise InvalidModel(f"source {source!r} does not exist")
    return path


class Models:
    """The models of one worker.

    send sends a message, error makes one of an exception, and spec returns that of a model with
    specs of its own, or raises ValueError.
    """

    def __init__(
        self,
        worker: Any,
        send: Callable[[bytes], None],
        error: Callable[..., bytes],
        spec: Callable[[Any, Model], Dict[str, Any]],
    ) -> None:
        self._worker, self._send, self._error, self._spec = worker, send, error, spec
        self._unload = getattr(worker, "unload", lambda model: None)
        self._size = getattr(worker, "size", lambda model: model.size)
        self._loaded: Dict[str, Model] = {}
        self._loads: Dict[str, Model] = {}
        self._lock = threading.Lock()  # of the loads
        self._threads: List[threading.Thread] = []

    def get(self, reference: Any) -> Optional[Model]:
        """Returns the model that a predict names, if it is loaded."""
        name = reference.get("id") if isinstance(reference, dict) else None
        return self._loaded.get(name) if isinstance(name, str) else None

    def find(self, reference: Any) -> Any:
        """Returns the value of the model that a predict names; raises ModelGone."""
        model = self.get(reference)
        if model is None:
            raise ModelGone("the model of the batch is not loaded")
        return model.value

    def begin(self, header: Header) -> None:
        """Begins a load, unload or size. An unload cancels a load, and waits for it."""
        name = header["model"]
        model = Model(name, header.get("model_type", ""), header.get("source", ""), header.get("options"))
        with self._lock:
            running = self._loads.get(name)
            if header["type"] == "load":
                self._loads[name] = model
        if header["type"] == "unload" and running is not None:
            running.cancelled = True
        thread = threading.Thread(target=self._run, args=(header, model, running), name="stagemesh-model", daemon=True)
        self._threads = [one for one in self._threads if one.is_alive()] + [thread]
        thread.start()

    def close(self, timeout_s: float) -> bool:
        """Cancels the loads and waits for them; reports whether all requests have ended."""
        for model in list(self._loads.values()):
            model.cancelled = True
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, header: Header, model: Model, running: Optional[Model]) -> None:
        kind, fields = header["type"], {"load": header["load"]}
        try:
            if kind == "load":
                reply = self._load(model, dict(fields))
            elif kind == "unload":
                if running is not None:
                    running._ended.wait()
                loaded = self._loaded.get(model.id)
                if loaded is not None:
                    self._unload(loaded)
                    del self._loaded[model.id]
                reply = message("unloaded", **fields)
            else:
                size = self._size(self._loaded.get(model.id, model))
                reply = message("sized", size=_wire_size(size), **fields)
        except BaseException as error:  # sys.exit in load must not lose the answer
            why = "cancelled" if model.cancelled else "invalid_model" if isinstance(error, InvalidModel) else ""
            reply = self._error(error, kind=why, **fields)
        try:
            self._send(reply)
        except Ended:
            pass  # the main thread gets this error too
        finally:
            model._ended.set()
        with self._lock:
            if self._loads.get(model.id) is model:
                del self._loads[model.id]

    def _load(self, model: Model, fields: Dict[str, Any]) -> bytes:
        """Loads a model that is not loaded; returns the answer."""
        model = self._loaded.get(model.id, model)
        fresh = model.id not in self._loaded
        if fresh:
            model.value = self._worker.load(model)
        try:
            most = model.max_concurrency or 0
            if type(most) is not int or not 0 <= most <= MAX_SLOTS:
                raise ValueError(f"max_concurrency: expected a whole number from 0 to {MAX_SLOTS}, got {most!r}")
            if most:
                fields["max_concurrency"] = most
            if model.inputs or model.outputs:
                fields["spec"] = self._spec(self._worker, model)
            reply = message("loaded", size=_wire_size(model.size), **fields)
        except Exception:
            if fresh:
                self._unload(model)
            raise
        self._loaded[model.id] = model
        return reply
