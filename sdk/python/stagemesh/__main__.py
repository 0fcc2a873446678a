"""``python -m stagemesh worker.py``: serves the worker in a file."""

from __future__ import annotations

import argparse
import sys
from typing import List, NoReturn, Optional

from .faults import traceback_of
from .life import EXIT_FAILED, EXIT_USAGE
from .serving import NotFound, load, serve_and_exit


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
        found = load(given.worker)
    except NotFound as error:
        print(f"stagemesh: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    except Exception as error:
        print(traceback_of(error), file=sys.stderr)
        sys.exit(EXIT_FAILED)
    serve_and_exit(found.worker, given.arrays or found.arrays)


if __name__ == "__main__":
    main()
