"""The life of a worker's process: signals, the lifeline, forks, the end.

* SIGTERM and SIGINT ask it to stop. They end a setup at once and a wait for the next
  batch too; a batch in hand is finished. A second signal changes nothing.
* The lifeline's end of file means that the host is gone: the process ends with its
  whole group, whatever it does. A daemon thread waits for it; where the system can,
  it also sends the signal itself, since the thread cannot run while native code
  holds the interpreter's lock.
* A forked child is none of this: its signals are the system's again, and the
  connection is not its.

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

# Exit codes. 0 is for a stop that was asked for, and for nothing else.
EXIT_FAILED = 1  # setup or teardown failed, or what the worker declares cannot be
EXIT_USAGE = 2  # started wrongly
EXIT_HOST_GONE = 3  # the connection or the lifeline ended
EXIT_VIOLATION = 4  # the host does not keep to the protocol, or speaks another version
EXIT_UNFINISHED = 5  # asked to stop, and streams were left at the end of the time

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# How often a signal is repeated that came between two looks at it, in milliseconds.
_REPEAT_MS = 50

# How many of the threads that stay are named.
_NAMED = 5


def say(text: str, code: int) -> int:
    """Tells the log why the process ends, and returns the code."""
    print(f"stagemesh: {text}", file=sys.stderr, flush=True)
    return code


class Asked(BaseException):
    """The process was asked to stop while it started."""


class Life:
    """What the process was told from outside; ``asked`` says that it is to stop."""

    def __init__(self) -> None:
        self.asked = False
        self.starting = True  # a signal raises Asked
        self.waiting = False  # the main thread waits for a frame
        self._sock: Optional[socket.socket] = None
        self._wake_read = self._wake_write = -1
        self._unseen = False  # of the thread that watches
        self._lifeline: Optional[int] = None
        self._main = threading.main_thread().ident

    # --- before the connection -------------------------------------------

    def begin(self, environ: Mapping[str, str]) -> None:
        """Installs the signal handlers and watches the lifeline. Raises ValueError for a lifeline that is none."""
        self._lifeline = lifeline_of(environ)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forked)
        if self._lifeline is not None:
            _arm(self._lifeline)
        threading.Thread(target=self._watch, name="stagemesh-lifeline", daemon=True).start()

    def connected(self, sock: socket.socket) -> None:
        """Hands over the connection that a signal is to wake."""
        self._sock = sock

    # --- signals ---------------------------------------------------------

    def _on_signal(self, number: int, frame: Optional[FrameType]) -> None:
        first, self.asked = not self.asked, True
        if self.starting and first:
            raise Asked
        if self.waiting and self._sock is not None:
            # The read that was interrupted is tried again, and returns with
            # nothing where nothing is there: so no frame is lost.
            os.set_blocking(self._sock.fileno(), False)

    # --- the thread that watches -----------------------------------------

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        if self._lifeline is not None:
            poll.register(self._lifeline, select.POLLIN | select.POLLHUP)
        while True:
            # Signals that came and were not seen yet are looked at again.
            for descriptor, _ in poll.poll(_REPEAT_MS if self._unseen else None):
                if descriptor == self._lifeline:
                    end_group()
            self._repeat()

    def _repeat(self) -> None:
        """Repeats a signal that came just before the main thread began to wait.

        Python looks for signals before a system call, not in it, so such a signal
        would be seen with the next frame.
        """
        try:
            came = os.read(self._wake_read, 4096)
        except BlockingIOError:
            came = b""
        if signal.SIGTERM in came or signal.SIGINT in came:
            self._unseen = True
        elif self._unseen and self.waiting and not self.asked and self._main is not None:
            signal.pthread_kill(self._main, signal.SIGTERM)
        self._unseen = self._unseen and not self.asked

    # --- forks and the end -----------------------------------------------

    def _forked(self) -> None:
        """Makes a forked child a process of its own."""
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) == self._on_signal:
                default: Any = signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler
                signal.signal(number, default)
        signal.set_wakeup_fd(-1)
        if self._sock is not None:
            self._sock.close()

    @staticmethod
    def end(code: int, after_s: float) -> None:
        """Sees that the process ends so many seconds later, though threads of the worker may not."""

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
    """Returns the descriptor of the lifeline, a pipe; None where there is none."""
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
    """Ends this process and its group, since the host is gone: so nobody reads a word about it."""
    try:
        os.killpg(os.getpgrp(), signal.SIGKILL)
    finally:
        os._exit(EXIT_HOST_GONE)


def _arm(lifeline: int) -> None:
    """Asks the system to end the process group when the lifeline ends; Linux only.

    The descriptor is opened anew, since the setting belongs to the open file and
    workers may share the one that they inherited.
    """
    if not sys.platform.startswith("linux"):
        return
    import fcntl

    try:
        own = os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(own, getattr(fcntl, "F_SETSIG", 10), signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    except OSError:
        return  # the thread alone then
    _leave_parent()


def _leave_parent() -> None:
    """Takes back that this process alone is killed when the host dies.

    A host may have asked the system for that. It comes before the lifeline ends, so
    the children would stay: nobody would be left who ends the group.
    """
    import ctypes

    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
    except (OSError, AttributeError):
        pass  # then it is as the host has asked
