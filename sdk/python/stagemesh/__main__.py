"""``python -m stagemesh worker.py``: serves the worker in a file."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, List, NoReturn, Optional, Type

from .faults import traceback_of
from .lifecycle import NotFound, load, refuse_breakpoints, serve_and_exit
from .session import EXIT_FAILED, EXIT_USAGE, report
from .worker import Worker


def main(arguments: Optional[List[str]] = None) -> NoReturn:
    """Loads and serves the worker that the command line names; ends the process."""
    parser = argparse.ArgumentParser(
        prog="python -m stagemesh", description="Serve a worker to the host that starts this process."
    )
    parser.add_argument("worker", help="worker.py, worker.py:Class or package.module:Class")
    parser.add_argument(
        "--arrays", choices=("numpy", "buffer"), help="how tensors look to it; by default what it declares"
    )
    given = parser.parse_args(arguments)
    refuse_breakpoints()
    try:
        worker, arrays = load(given.worker)
    except Exception as error:
        if "STAGEMESH_SOCKET" in os.environ:
            serve_and_exit(_failed(error), "buffer")
        if isinstance(error, NotFound):
            sys.exit(report(str(error), EXIT_USAGE))
        print(traceback_of(error), file=sys.stderr)
        sys.exit(EXIT_FAILED)
    serve_and_exit(worker, given.arrays or arrays)


def _failed(error: Exception) -> Type[Worker]:
    """Returns a worker whose setup raises the error, so that the host gets it."""

    class Failed(Worker):
        def setup(self, ctx: Any) -> None:
            raise error

        def predict(self, batch: Any) -> Any: ...

    return Failed


if __name__ == "__main__":
    main()
