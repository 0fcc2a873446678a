"""The life of a worker's process: signals, the lifeline, forks, exit codes.

* SIGTERM and SIGINT ask it to stop. They end setup and the wait for the next batch at
  once; a running batch is finished. A second signal changes nothing.
* The lifeline's end of file means that the host is gone: the process then ends with its
  whole process group. A daemon thread waits for it. On Linux the kernel also sends the
  signal itself, since the thread cannot run while native code holds the interpreter's lock.
* A forked child gets the system's signal handlers back, and closes the connection.

There is one Life in a process, made in the main thread before it connects.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import stat
import sys
import threading
from types import FrameType
from typing import Any, Mapping, Optional

# Exit codes. 0 means that the process was asked to stop, and nothing else.
EXIT_FAILED = 1  # setup or teardown failed, or the worker's declaration is invalid
EXIT_USAGE = 2  # started wrongly
EXIT_HOST_GONE = 3  # the connection or the lifeline ended
EXIT_VIOLATION = 4  # the host breaks the protocol, or uses another version
EXIT_UNFINISHED = 5  # asked to stop, and streams were unfinished when the time was over

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# How often a signal that the main thread missed is checked again, in milliseconds.
_REPEAT_MS = 50

# The most threads that are named in a message.
_NAMED = 5


def report(text: str, code: int) -> int:
    """Writes the reason of the process's end to the log, and returns the code."""
    print(f"stagemesh: {text}", file=sys.stderr, flush=True)
    return code


class StopRequested(BaseException):
    """The process was asked to stop while it starts."""


class Life:
    """The requests that reach the process from outside; stop_requested is true after a signal."""

    def __init__(self) -> None:
        self.stop_requested = False
        self.starting = True  # a signal raises StopRequested
        self.waiting = False  # the main thread waits for a frame
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
        """Ends the process after that many seconds, even if threads of the worker still run."""

        def leave() -> None:
            names = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
            some = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
            what = f"the threads {some}" if names else "what runs at its exit, such as the children of multiprocessing"
            print(f"stagemesh: ended without waiting for {what}", file=sys.stderr, flush=True)
            os._exit(code)

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
            raise ValueError("it is no pipe")
        os.set_inheritable(descriptor, False)
    except (ValueError, OSError) as error:
        raise ValueError(f"environment: STAGEMESH_LIFELINE is {text!r}, which is no open pipe: {error}") from None
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
