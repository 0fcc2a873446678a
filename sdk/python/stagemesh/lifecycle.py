"""The process of a worker: how its class is found and served, signals, the lifeline and forks.

* SIGTERM and SIGINT ask it to stop. They end setup and the wait for the next batch at
  once; a running batch is finished. A second signal changes nothing.
* The lifeline's end of file means that the host is gone: the process then ends with its
  whole process group. A daemon thread waits for it. On Linux the kernel also sends the
  signal itself, since the thread cannot run while native code holds the interpreter's lock.
* A forked child gets the system's signal handlers back, and closes the connection.

There is one Life in a process, made in the main thread before it connects.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import select
import signal
import socket
import stat
import sys
import threading
import types
from types import FrameType
from typing import Any, Dict, List, Mapping, NoReturn, Optional, Tuple, Type

from .frames import Connection
from .session import EXIT_FAILED, EXIT_HOST_GONE, EXIT_USAGE, THREADS_S, Session, Signals, StopRequested, report
from .worker import Worker, check_class

# The host's variables, which a worker's module may delete before it calls serve.
_STARTED_WITH = dict(os.environ)

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
    for name, descriptor in (("stdout", 1), ("stderr", 2)):  # so that output reaches the host's log line by line
        stream = getattr(sys, name)
        if stream is None or getattr(stream, "closed", False):
            setattr(sys, name, open(descriptor, "w", buffering=1, errors="backslashreplace", closefd=False))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    if not logging.getLogger().handlers:
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("stagemesh.worker").disabled = False  # as dictConfig leaves loggers that it does not name
    if not faulthandler.is_enabled():
        faulthandler.enable(2)  # so that a crash of native code writes a traceback
    life = Life()
    code = EXIT_FAILED
    try:
        code = _serve(worker, arrays, life)
    finally:
        life.end(code, THREADS_S)
    sys.exit(code)


def refuse_breakpoints() -> None:
    """Makes breakpoint() an error where it would read an empty standard input, and end in BdbQuit."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "breakpoint() in a worker of a host, which has no terminal; use stagemesh.testing.run(process=False) "
            "under python or pytest, or a remote debugger by PYTHONBREAKPOINT: docs/debugging.md"
        )

    own = sys.breakpointhook is not sys.__breakpointhook__ or os.environ.get("PYTHONBREAKPOINT")
    if not own and not (sys.stdin and not sys.stdin.closed and sys.stdin.isatty()):
        sys.breakpointhook = refuse


def _serve(worker: Type[Worker], arrays: Optional[str], life: Life) -> int:
    refuse_breakpoints()
    try:
        check_class(worker)
    except ValueError as error:
        return report(str(error), EXIT_FAILED)
    try:
        environ = {**_STARTED_WITH, **os.environ}
        life.begin(environ)
        path = environ.get("STAGEMESH_SOCKET", "")
        if not path:
            return report(
                "STAGEMESH_SOCKET is not set: a host starts this process. To try a worker by hand: "
                'stagemesh check FILE. To import one: serve(...) below if __name__ == "__main__":',
                EXIT_USAGE,
            )
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(None)  # whatever socket.setdefaulttimeout says
        try:
            sock.connect(path)
        except OSError as error:
            return report(f"the host's socket {path}: {error}", EXIT_HOST_GONE)
        life.connected(sock)
        return Session(Connection(sock), worker, arrays, life, environ).run()
    except ValueError as error:
        return report(str(error), EXIT_USAGE)
    except StopRequested:  # before the session, which handles it itself
        return 0
    finally:
        life.starting = False


# --- finding a worker ------------------------------------------------------------------


class NotFound(ValueError):
    """There is no worker, or more than one; the message has what to do."""


def load(target: str) -> Tuple[Type[Worker], Optional[str]]:
    """Runs a file, or imports a module; returns its worker, and the arrays that a call of serve in it names.

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
            raise NotFound(f"{place}: {name} is not a subclass of stagemesh.Worker")
        return worker, found.get(worker)
    candidates = list(found) or _workers(module)
    if len(candidates) == 1:
        return candidates[0], found.get(candidates[0])
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


# --- signals and the lifeline ----------------------------------------------------------

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# How often a signal that the main thread missed is checked again, in milliseconds.
_REPEAT_MS = 50

# The most threads that are named in a message.
_NAMED = 5


class Life(Signals):
    """The signals and the lifeline of this process; stop_requested is true after a signal."""

    def __init__(self) -> None:
        self._sock: Optional[socket.socket] = None
        self._wake_read = self._wake_write = -1
        self._unseen = False  # a signal may have been missed; of the watching thread
        self._lifeline: Optional[int] = None
        self._main = threading.main_thread().ident

    # --- before the connection -------------------------------------------

    def begin(self, environ: Mapping[str, str]) -> None:
        """Installs the signal handlers and watches the lifeline. Raises ValueError if that is not a pipe."""
        self._lifeline = lifeline_of(environ)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forked)
        if self._lifeline is not None:
            _kill_group_at_end_of(self._lifeline)
        threading.Thread(target=self._watch, name="stagemesh-lifeline", daemon=True).start()

    def connected(self, sock: socket.socket) -> None:
        """Sets the connection whose read a signal interrupts."""
        self._sock = sock

    # --- signals ---------------------------------------------------------

    def _on_signal(self, number: int, frame: Optional[FrameType]) -> None:
        first, self.stop_requested = not self.stop_requested, True
        if self.starting and first:
            raise StopRequested
        if self.waiting and self._sock is not None:
            # Python repeats the interrupted read, which then returns at once, with a frame
            # or without: so no frame is lost.
            os.set_blocking(self._sock.fileno(), False)

    # --- the thread that watches -----------------------------------------

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        if self._lifeline is not None:
            poll.register(self._lifeline, select.POLLIN | select.POLLHUP)
        while True:
            # Signals that the main thread has not handled yet are checked again.
            for descriptor, _ in poll.poll(_REPEAT_MS if self._unseen else None):
                if descriptor == self._lifeline:
                    end_group()
            self._repeat()

    def _repeat(self) -> None:
        """Repeats a signal that arrived just before the main thread began to wait.

        Python checks for signals before a system call, not in it, so such a signal would
        be handled only after the next frame.
        """
        try:
            arrived = os.read(self._wake_read, 4096)
        except BlockingIOError:
            arrived = b""
        if signal.SIGTERM in arrived or signal.SIGINT in arrived:
            self._unseen = True
        elif self._unseen and self.waiting and not self.stop_requested and self._main is not None:
            signal.pthread_kill(self._main, signal.SIGTERM)
        self._unseen = self._unseen and not self.stop_requested

    # --- forks and the end -----------------------------------------------

    def _forked(self) -> None:
        """Makes a forked child independent of the host."""
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) == self._on_signal:
                default: Any = signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler
                signal.signal(number, default)
        signal.set_wakeup_fd(-1)
        if self._sock is not None:
            self._sock.close()

    @staticmethod
    def end(code: int, after_s: float) -> None:
        """Ends the process after that many seconds, even if threads of the worker still run.

        Further signals are ignored: Python drops its handlers before it ends, and the
        process would look killed.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

        def leave() -> None:
            names = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
            some = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
            what = f"the threads {some}" if names else "what runs at its exit, such as the children of multiprocessing"
            os._exit(report(f"ended without waiting for {what}", code))

        timer = threading.Timer(after_s, leave)
        timer.daemon = True
        timer.start()


def lifeline_of(environ: Mapping[str, str]) -> Optional[int]:
    """Returns the file descriptor of the lifeline, a pipe; None if there is none. Raises ValueError."""
    text = environ.get("STAGEMESH_LIFELINE", "")
    if not text:
        return None
    try:
        descriptor = int(text)
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a pipe")
        os.set_inheritable(descriptor, False)
    except (ValueError, OSError) as error:
        raise ValueError(f"environment: STAGEMESH_LIFELINE is {text!r}, which is not an open pipe: {error}") from None
    return descriptor


def end_group() -> None:
    """Kills this process and its group, without a message: the host that would read it is gone."""
    try:
        os.killpg(os.getpgrp(), signal.SIGKILL)
    finally:
        os._exit(EXIT_HOST_GONE)


def _kill_group_at_end_of(lifeline: int) -> None:
    """Asks the kernel to kill the process group when the lifeline ends; Linux only.

    The descriptor is opened anew, since the setting belongs to the open file, which
    several workers may share.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes
    import fcntl

    try:
        own = os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(own, getattr(fcntl, "F_SETSIG", 10), signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    except OSError:
        return  # then only the thread watches

    # A host may have asked the kernel to kill this process when the host dies. That would
    # come before the lifeline's end, and nobody would be left to end the children.
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
    except (OSError, AttributeError):
        pass
