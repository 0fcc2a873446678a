"""From a file to a worker that serves: how its class is found, and the process around its session."""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import socket
import sys
import types
from typing import Any, Dict, List, NamedTuple, NoReturn, Optional, Type

from .frames import Connection
from .life import EXIT_FAILED, EXIT_HOST_GONE, EXIT_USAGE, Life, StopRequested, report
from .session import THREADS_S, Session
from .worker import Worker, check_class

# While load runs a file: the workers that the file's calls of serve name, with their arrays.
# Otherwise None, and serve serves.
_declared: Optional[Dict[Type[Worker], Optional[str]]] = None

# --- serving -----------------------------------------------------------------------


def serve(worker: Type[Worker], *, arrays: Optional[str] = None) -> None:
    """Serves a worker to the host that started this process, and exits.

    arrays is ``"numpy"``, or ``"buffer"`` for memoryviews; None: as the class declares. In a
    child that multiprocessing starts, which runs the file again, serve does nothing.

    Exit codes: 0 if the process was asked to stop; 1 if setup or teardown failed, or the
    class cannot be served; 2 if the process was not started by a host; 3 if the host is
    gone; 4 if the host breaks the protocol; 5 if the process was asked to stop and had to
    leave streams unfinished.
    """
    if _declared is not None:
        _declared[worker] = arrays
        return
    if sys._getframe(1).f_globals.get("__name__") == "__mp_main__":
        return
    serve_and_exit(worker, arrays)


def serve_and_exit(worker: Type[Worker], arrays: Optional[str]) -> NoReturn:
    """Serves a worker and ends the process."""
    for stream in (sys.stdout, sys.stderr):  # so that output reaches the host's log line by line
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True, errors="backslashreplace")
    if not logging.getLogger().handlers:
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        faulthandler.enable()  # so that a crash of native code writes a traceback
    except (AttributeError, ValueError, OSError):  # standard error is no file
        pass
    life = Life()
    code = EXIT_FAILED
    try:
        code = _serve(worker, arrays, life)
    finally:
        life.end(code, THREADS_S)
    sys.exit(code)


def _serve(worker: Type[Worker], arrays: Optional[str], life: Life) -> int:
    try:
        check_class(worker)
    except ValueError as error:
        return report(str(error), EXIT_FAILED)
    try:
        life.begin(os.environ)
        path = os.environ.get("STAGEMESH_SOCKET", "")
        if not path:
            return report(
                "STAGEMESH_SOCKET is not set: a host starts this process. To try a worker by hand: "
                'python -m stagemesh.check FILE. To import one: serve(...) below if __name__ == "__main__":',
                EXIT_USAGE,
            )
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(path)
        except OSError as error:
            return report(f"the host's socket {path}: {error}", EXIT_HOST_GONE)
        life.connected(sock)
        return Session(Connection(sock), worker, arrays, life, os.environ).run()
    except ValueError as error:
        return report(str(error), EXIT_USAGE)
    except StopRequested:  # before the session, which handles it itself
        return 0
    finally:
        life.starting = False


# --- finding a worker ------------------------------------------------------------------


class Found(NamedTuple):
    """A worker class, and the arrays that the call of serve in its file names; None if it names none."""

    worker: Type[Worker]
    arrays: Optional[str]


class NotFound(Exception):
    """There is no worker, or more than one; the message tells what to do."""


def load(target: str) -> Found:
    """Runs a file, or imports a module, and returns its worker.

    ``worker.py`` is run as ``python worker.py`` runs it, so that a serve below
    ``if __name__ == "__main__":`` names the worker instead of serving it.
    ``worker.py:Class`` and ``package.module:Class`` are imported. Raises NotFound, and
    every exception of the file.
    """
    global _declared
    place, _, name = target.rpartition(":")
    if not place:
        place, name = target, ""
    found: Dict[Type[Worker], Optional[str]] = {}
    _declared = found
    try:
        if place.endswith(".py") or os.sep in place:
            module = _run_file(place, "__worker__" if name else "__main__")
        else:
            module = importlib.import_module(place)
    finally:
        _declared = None
    if name:
        worker: Any = module
        for step in name.split("."):
            worker = getattr(worker, step, None)
            if worker is None:
                raise NotFound(f"{place}: there is no {name}")
        if not isinstance(worker, type) or not issubclass(worker, Worker):
            raise NotFound(f"{place}: {name} is no subclass of stagemesh.Worker")
        return Found(worker, found.get(worker))
    candidates = list(found) or _workers(module)
    if len(candidates) == 1:
        return Found(candidates[0], found.get(candidates[0]))
    if not candidates:
        raise NotFound(f"{place}: there is no subclass of stagemesh.Worker in it")
    names = ", ".join(kind.__name__ for kind in candidates)
    raise NotFound(f"{place}: there are several workers ({names}); name one: {place}:{candidates[0].__name__}")


def _run_file(path: str, name: str) -> types.ModuleType:
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


def _workers(module: types.ModuleType) -> List[Type[Worker]]:
    """Returns the workers that a module defines, without the base classes of others."""
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
    """Returns the target from which another process can load a class; raises NotFound if it cannot."""
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
