"""``python -m stagemesh worker.py``: serves the worker in a file."""

from __future__ import annotations

import argparse
import sys
from typing import List, NoReturn, Optional

from .faults import traceback_of
from .lifecycle import NotFound, load, serve_and_exit
from .session import EXIT_FAILED, EXIT_USAGE


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
    try:
        worker, arrays = load(given.worker)
    except NotFound as error:
        print(f"stagemesh: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    except Exception as error:
        print(traceback_of(error), file=sys.stderr)
        sys.exit(EXIT_FAILED)
    serve_and_exit(worker, given.arrays or arrays)


if __name__ == "__main__":
    main()
