"""Finds the worker in a file or module.

``worker.py`` runs the file as ``python worker.py`` does, so that a serve below
``if __name__ == "__main__":`` says which worker is meant. ``worker.py:Class`` and
``package.module:Class`` import it, and name the class themselves.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Type

from . import serving
from .worker import Worker


class Found(NamedTuple):
    """A worker class, and the arrays that its file's serve names, if it does."""

    worker: Type[Worker]
    arrays: Optional[str]


class NotFound(Exception):
    """There is no worker, or more than one; the message says what to do."""


def split(target: str) -> Tuple[str, str]:
    """Returns the place of a target and the name of the class, empty where none is named."""
    place, _, name = target.rpartition(":")
    return (place, name) if place else (target, "")


def is_file(place: str) -> bool:
    """Reports whether a place is a file, and not a module's name."""
    return place.endswith(".py") or os.sep in place


def load(target: str) -> Found:
    """Runs a file, or imports a module, and returns its worker.

    A serve in it does not serve; it says which worker is meant. Raises NotFound, and
    whatever the file raises.
    """
    place, name = split(target)
    declared: Dict[Type[Worker], Optional[str]] = {}
    serving._declared = declared
    try:
        module = _run(place, "__worker__" if name else "__main__") if is_file(place) else importlib.import_module(place)
    finally:
        serving._declared = None
    if name:
        worker = _attribute(place, module, name)
        if not isinstance(worker, type) or not issubclass(worker, Worker):
            raise NotFound(f"{place}: {name} is no subclass of stagemesh.Worker")
        return Found(worker, declared.get(worker))
    candidates = list(declared) or _workers(module)
    if len(candidates) == 1:
        return Found(candidates[0], declared.get(candidates[0]))
    if not candidates:
        raise NotFound(f"{place}: there is no subclass of stagemesh.Worker in it")
    names = ", ".join(kind.__name__ for kind in candidates)
    raise NotFound(f"{place}: there are several workers ({names}); name one: {place}:{candidates[0].__name__}")


def _run(path: str, name: str) -> types.ModuleType:
    """Runs a file as a module of the name, and returns it."""
    try:
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec")
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}") from None
    module = types.ModuleType(name)
    module.__file__ = os.path.abspath(path)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules[name] = module
    sys.path.insert(0, os.path.dirname(module.__file__))
    sys.argv = [path]
    exec(code, module.__dict__)
    return module


def _attribute(place: str, module: types.ModuleType, name: str) -> Any:
    found: Any = module
    for step in name.split("."):
        found = getattr(found, step, None)
        if found is None:
            raise NotFound(f"{place}: there is no {name}")
    return found


def _workers(module: types.ModuleType) -> List[Type[Worker]]:
    """Returns the workers that a module defines, without those that others are made of."""
    mine = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, Worker)
        and kind.__module__ == module.__name__
        and not kind.__name__.startswith("_")
    ]
    return [kind for kind in dict.fromkeys(mine) if not any(kind in other.__mro__[1:] for other in mine)]


def target_of(worker: Type[Worker]) -> str:
    """Returns the target under which another process finds a class; raises NotFound where it cannot."""
    name = worker.__qualname__
    if "<locals>" in name:
        raise NotFound(
            f"{name} is defined in a function, where another process cannot find it: "
            "move it to its module, or use process=False"
        )
    module = sys.modules.get(worker.__module__)
    if module is None or module.__name__ == "__main__" or getattr(module, "__spec__", None) is None:
        path = getattr(module, "__file__", None)
        if path is None:
            raise NotFound(f"{name} is in no file, where another process could find it: use process=False")
        return f"{os.path.abspath(path)}:{name}"
    return f"{worker.__module__}:{name}"
