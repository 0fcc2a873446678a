"""``python -m stagemesh.check worker.py``: drives a worker as a host would, and tells what is wrong.

It starts the worker, asks it what a mesh will ask it sooner or later (examples, a
full batch, items of mixed sizes, bad input, a cancel, a ping, a batch that raises,
a shutdown, a signal), and prints a line for each check: what is wrong, and what to
do about it. The exit code is 0 where nothing is, 1 where something is, 2 where
there is no such worker.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from .parts import DATATYPES, elements
from .specs import Bytes, Json, Spec, Tensor, Text, spec_of
from .testing import BatchFailed, Outcome, Request, Run, WorkerEnded, WorkerSilent

_SLOTS = 4  # as many batches at a time as a worker takes, up to this
_CANCEL_S = 1.0  # how long a stream may go on that nobody waits for, in seconds
# Checks, by the methods' names, that are for workers that stream, and for those that do not.
_OF_STREAMS = ("chunks", "calls_off")
_OF_BATCHES = ("full", "mixed", "cancel")
_VARIABLE = 4  # the extent of a variable axis of inputs made from the spec


class Problem(Exception):
    """What is wrong, and what to do."""

    def __init__(self, what: str, do: str) -> None:
        super().__init__(what)
        self.what, self.do = what, do


class Settings(NamedTuple):
    """What the command line says."""

    worker: str
    options: Dict[str, Any]
    max_size: int
    patience_s: float
    arrays: Optional[str]


class Need(NamedTuple):
    """Why some checks are not worth asking after another has found something; by the methods' names."""

    why: str
    checks: Tuple[str, ...]


_NEEDS = {
    "examples": Need(
        "its examples are not answered",
        ("chunks", "calls_off", "full", "mixed", "at_a_time", "bad_input", "cancel", "raises"),
    ),
    "chunks": Need("its examples are not streamed", ("calls_off",)),
    "mixed": Need("an item is not answered among others", ("bad_input",)),
}


class Check:
    """One worker under test; it is started anew where a check has ended it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._run: Optional[Run] = None
        self.wrong = 0
        self._streams = False  # known once it has started

    # --- running the checks ------------------------------------------------

    def all(self) -> int:
        """Runs all checks; returns how many found something."""
        checks: List[Tuple[str, Callable[[], str]]] = [
            ("starts", self.starts),
            ("answers its examples", self.examples),
            ("streams its examples", self.chunks),
            ("stops a stream that is cancelled", self.calls_off),
            ("answers a full batch", self.full),
            ("answers items of mixed sizes", self.mixed),
            ("answers batches at a time", self.at_a_time),
            ("bad input is the fault of its item alone", self.bad_input),
            ("ends a batch that is cancelled", self.cancel),
            ("answers a ping while idle", self.ping),
            ("goes on after a batch that raises", self.raises),
            ("leaves on shutdown", self.shutdown),
            ("leaves on SIGTERM", self.signal),
        ]
        try:
            self._ask(checks)
        finally:
            if self._run is not None:
                self._run.stop()
        return self.wrong

    def _ask(self, checks: Sequence[Tuple[str, Callable[[], str]]]) -> None:
        failed: Set[str] = set()  # names of methods
        skipped: Dict[str, List[str]] = {}
        for name, check in checks:
            method = check.__name__
            if method in (_OF_BATCHES if self._streams else _OF_STREAMS):
                continue
            why = next((need.why for one, need in _NEEDS.items() if one in failed and method in need.checks), None)
            if why is not None:
                skipped.setdefault(why, []).append(name)
            elif not self._one(name, check):
                failed.add(method)
            if "starts" in failed:
                break  # nothing else can be asked
        for why, names in skipped.items():
            print(f"      not checked, since {why}: {'; '.join(names)}")

    def _one(self, name: str, check: Callable[[], str]) -> bool:
        try:
            note = check()
        except Problem as problem:
            return self._say(name, problem)
        except WorkerEnded as error:
            if self._run is not None:
                self._run.wait(0)
            self._run = None
            do = "what it wrote is above, if it wrote anything; a worker must outlive whatever it is asked"
            if isinstance(error, WorkerSilent):
                do = "what it was at is above; a host ends it at its limit, which here is --patience"
            return self._say(name, Problem(str(error), do))
        except BatchFailed as error:
            text = f"the whole batch failed: {error.error}: {error.message}"
            if error.traceback:
                text += "\n" + error.traceback.rstrip()
            do = "make predict answer it, or fail single items: batch.fail(i, InvalidInput(...))"
            if self._streams:
                do = "make stream answer it, or fail it: raise InvalidInput(...)"
            if error.error == "BadOutput":
                what = "yield what outputs declares" if self._streams else "return what outputs declares"
                do = f"{what}, or declare what {'stream yields' if self._streams else 'predict returns'}"
            if error.kind == "out_of_memory":
                do = "lower the stage's batch size: a host runs the halves of such a batch, each time anew"
            return self._say(name, Problem(text, do))
        except Exception as error:  # of what cannot be sent, or read
            do = "declare examples = [{...}] of inputs as callers send them"
            return self._say(name, Problem(f"it cannot be asked: {type(error).__name__}: {error}", do))
        print(f"ok    {name}{note and ': ' + note}", flush=True)
        return True

    def _say(self, name: str, problem: Problem) -> bool:
        self.wrong += 1
        what = problem.what.replace("\n", "\n      ")
        print(f"WRONG {name}\n      {what}\n      -> {problem.do}", flush=True)
        return False

    @property
    def run(self) -> Run:
        """The worker, which runs."""
        if self._run is None:
            s = self._settings
            run = Run(
                s.worker,
                s.options,
                max_size=s.max_size,
                slots=_SLOTS,
                patience_s=s.patience_s,
                arrays=s.arrays,
                stdout=2,
            )
            run.start()
            self._run = run
        return self._run

    # --- the checks ----------------------------------------------------------

    def starts(self) -> str:
        """Starts it, and looks at what it declares."""
        try:
            run = self.run
        except WorkerSilent:
            raise
        except WorkerEnded as error:
            if error.traceback:
                raise Problem(f"{error}\n{error.traceback}", "make setup work; --options hands it options") from None
            do = "what it wrote is above, if it wrote anything"
            raise Problem(str(error), "declare what can be served" if error.said else do) from None
        if not run.spec.get("inputs") or not run.spec.get("outputs"):
            raise Problem(
                "it declares no inputs or no outputs, so a host checks nothing and callers are told nothing",
                'declare them: inputs = {"x": Tensor("FP32", [-1, 64])}',
            )
        self._inputs = {entry["name"]: spec_of(entry) for entry in run.spec["inputs"]}
        self._outputs = {entry["name"]: spec_of(entry) for entry in run.spec["outputs"]}
        self._joins = run.spec.get("batch_axis", "rows") == "rows"
        self._streams = run.streams
        self._from_spec = not run.examples
        self._examples = run.examples or [{name: made(spec) for name, spec in self._inputs.items()}]
        kind = "streams, " if self._streams else ""
        return f"{run.hello['name']}, {kind}inputs {', '.join(self._inputs)}, outputs {', '.join(self._outputs)}"

    def examples(self) -> str:
        """Runs the examples one by one."""
        for i, inputs in enumerate(self._examples):
            outcome = self._batch([inputs])[0]
            if outcome.error is None:
                continue
            what = f"{'inputs made from the spec' if self._from_spec else f'example {i + 1}'}: {outcome.error}"
            do = (
                "declare examples = [{...}] that the worker answers"
                if self._from_spec
                else "make the example one that it answers"
            )
            raise Problem(what, do)
        return "made from the spec, since it has none" if self._from_spec else f"{len(self._examples)}"

    def chunks(self) -> str:
        """Streams the examples one by one, and looks at when the chunks come."""
        notes = []
        for i, inputs in enumerate(self._examples):
            started = time.monotonic()
            first = 0.0
            number = 0
            with self.run.stream(inputs) as stream:
                for _ in stream:
                    number += 1
                    first = first or time.monotonic() - started
                error = stream.end().error
            if error is not None:
                raise Problem(f"example {i + 1}: {error}", "make the example one that it answers")
            took = time.monotonic() - started
            notes.append(f"{number} chunks, the first after {first * 1000:.1f} ms, all after {took * 1000:.1f} ms")
            if number == 0:
                raise Problem(f"example {i + 1} is answered without a chunk", "yield at least one for each example")
        return "; ".join(notes)

    def calls_off(self) -> str:
        """Cancels a stream after its first chunk, and looks how soon it ends."""
        with self.run.stream(self._examples[0]) as stream:
            next(iter(stream), None)
            stream.cancel()
            started = time.monotonic()
            stream.end()
            took = time.monotonic() - started
        if took > _CANCEL_S:
            raise Problem(
                f"it went on for {took:.2f} s, and nobody waited",
                "let async def stream await what it waits for; between the steps of long work look at item.cancelled",
            )
        self._all_answered(self._examples[:1])
        return f"{took * 1000:.1f} ms"

    def full(self) -> str:
        """Runs a batch of as many rows as the host may send."""
        requests = self._repeat(self._settings.max_size)
        self._all_answered(requests)
        return f"{self._settings.max_size} rows"

    def mixed(self) -> str:
        """Runs items of one to three rows, and of several extents where they may differ."""
        requests: List[Mapping[str, Any]] = []
        sizes = [n for n in (1, 2, 3, 1) if n <= self._settings.max_size]
        tensors = all(isinstance(spec, Tensor) for spec in self._inputs.values())
        if self._joins and tensors and self._from_spec:
            for i, rows in enumerate(sizes):
                requests.append({name: made(spec, rows, extra=i) for name, spec in self._inputs.items()})
        else:
            requests = [self._examples[i % len(self._examples)] for i in range(len(sizes))]
        self._all_answered(requests)
        return f"{len(requests)} items"

    def at_a_time(self) -> str:
        """Runs as many batches at a time as it takes."""
        run = self.run
        if run.slots == 1:
            return "it takes one"
        errors: List[Exception] = []
        for batch in [run.send([Request(self._examples[0])]) for _ in range(run.slots)]:
            try:
                errors += [outcome.error for outcome in run.result(batch) if outcome.error is not None]
            except BatchFailed as error:
                errors.append(error)
        if errors:
            raise Problem(
                f"{len(errors)} of {run.slots} batches at a time are not answered: {errors[0]}",
                "all threads share self: keep what predict changes in variables of its own, or lock it",
            )
        return f"{run.slots}"

    def bad_input(self) -> str:
        """Puts one bad item between two good ones, for each kind of bad."""
        refused = asked = 0
        for name, spec in self._inputs.items():
            for kind, value in bad(spec, self._examples[0].get(name)):
                good = self._examples[0]
                asked += 1
                try:
                    first, second, third = self._batch([good, {**good, name: value}, good])
                except BatchFailed as error:
                    raise Problem(
                        f"input {name!r} with {kind} failed the batch as a whole: {error.error}: {error.message}",
                        f"look for it in predict and say batch.fail(i, InvalidInput({name!r}, ...)), or raise it in "
                        "preprocess(self, item); else the host must run every such batch again in halves",
                    ) from None
                for neighbour in (first, third):
                    if neighbour.error is not None:
                        raise Problem(
                            f"input {name!r} with {kind} made its neighbour fail: {neighbour.error}",
                            "let each item's outcome depend on that item alone",
                        )
                refused += second.error is not None
        return f"{refused} of {asked} kinds refused"

    def cancel(self) -> str:
        """Cancels a batch that is on its way."""
        run = self.run
        batch = run.send([Request(self._examples[0])])
        run.tell("cancel", batch=batch)
        run.result(batch)
        self._all_answered(self._examples[:1])
        return ""

    def ping(self) -> str:
        """Pings it."""
        run, started = self.run, time.monotonic()
        run.ping()
        return f"{(time.monotonic() - started) * 1000:.1f} ms"

    def raises(self) -> str:
        """Sends a batch without inputs, which no predict can answer, and a good one."""
        try:
            outcome = self._batch([{}])[0]
            note = "its items failed" if outcome.error is not None else "it answers an item without inputs"
        except BatchFailed as error:
            note = error.error
        self._all_answered(self._examples[:1])
        return note

    def shutdown(self) -> str:
        """Asks it to leave."""
        run, self._run = self.run, None
        started = time.monotonic()
        return self._left(run.stop(5), started)

    def signal(self) -> str:
        """Starts it again and ends it by a signal, twice."""
        run = self.run
        run.ping()
        self._run = None
        started = time.monotonic()
        assert run.process is not None
        for _ in range(2):
            try:
                os.kill(run.process.pid, signal.SIGTERM)
            except ProcessLookupError:
                break
        return self._left(run.wait(5), started)

    def _left(self, code: Optional[int], started: float) -> str:
        if code == 0:
            return f"exit code 0 after {time.monotonic() - started:.2f} s"
        how = f"it was ended by signal {-code}" if code is not None and code < 0 else f"it exited with {code}"
        raise Problem(
            f"{how} after {time.monotonic() - started:.2f} s, wanted exit code 0 within 5 s",
            "end threads and processes that it has started in teardown(self), or make them daemons; "
            "leave the handlers of SIGTERM and SIGINT as they are",
        )

    # --- batches -------------------------------------------------------------

    def _batch(self, requests: Sequence[Mapping[str, Any]]) -> List[Outcome]:
        for inputs in requests:
            self.run.add(inputs)
        return self.run.predict()

    def _all_answered(self, requests: Sequence[Mapping[str, Any]]) -> None:
        for i, outcome in enumerate(self._batch(requests)):
            if outcome.error is not None:
                raise Problem(
                    f"item {i} of {len(requests)}: {outcome.error}",
                    "an input that is answered alone must be answered among others too",
                )
            missing = [
                name for name, spec in self._outputs.items() if name not in outcome.outputs and not spec.optional
            ]
            if missing:
                raise Problem(f"item {i} of {len(requests)} has no output {missing[0]!r}", "return it for each item")

    def _repeat(self, rows: int) -> List[Mapping[str, Any]]:
        """Returns requests of the examples that have so many rows together."""
        out: List[Mapping[str, Any]] = []
        while rows > 0:
            fitting = [e for e in self._examples if self._rows(e) <= rows]
            if not fitting:
                break
            out.append(fitting[len(out) % len(fitting)])
            rows -= self._rows(out[-1])
        if not out:
            raise Problem("no example fits into a batch of --max-size rows", "use examples of one row")
        return out

    def _rows(self, inputs: Mapping[str, Any]) -> int:
        for name, spec in self._inputs.items():
            value = inputs.get(name)
            if self._joins and isinstance(spec, Tensor) and value is not None:
                shape = shape_of(value)
                return shape[0] if len(shape) == len(spec.shape) else 1
        return 1


def made(spec: Spec, rows: int = 1, extra: int = 0) -> Any:
    """Returns an input for a spec: zeros, or a word; extra is added to extents that may vary."""
    if isinstance(spec, Tensor):
        extra = extra if spec.variable != "exact" else 0
        shape = tuple(
            rows if axis == 0 and extent == -1 else _VARIABLE + extra if extent == -1 else extent
            for axis, extent in enumerate(spec.shape)
        )
        return nested(shape, {"BYTES": b"", "BOOL": False}.get(spec.datatype, 0))
    if isinstance(spec, Json):
        return {}
    return "stagemesh" if isinstance(spec, Text) else b"stagemesh"


def shape_of(value: Any) -> Tuple[int, ...]:
    """Returns the shape of an array, or of nested lists."""
    if hasattr(value, "shape"):
        return tuple(value.shape)
    shape: List[int] = []
    while isinstance(value, (list, tuple)):
        shape.append(len(value))
        value = value[0] if value else None
    return tuple(shape)


def nested(shape: Tuple[int, ...], value: Any) -> Any:
    """Returns nested lists of one value."""
    if not shape:
        return value
    return [nested(shape[1:], value) for _ in range(shape[0])]


def bad(spec: Spec, example: Any) -> List[Tuple[str, Any]]:
    """Returns values of the kinds that callers send sooner or later, in words and as they are."""
    if isinstance(spec, Json) and spec.schema is not None:
        return []  # the host refuses them
    if isinstance(spec, Json):
        return [("bytes that are not JSON", b"{"), ("another document than wanted", [None])]
    if isinstance(spec, Text):
        return [("bytes that are not UTF-8", b"\xff\xfe"), ("an empty text", b"")]
    if isinstance(spec, Bytes):
        return [("no bytes", b""), ("bytes of another kind", b"\x00\x01\x02 not this")]
    assert isinstance(spec, Tensor)
    shape = shape_of(example)
    if spec.datatype == "BYTES":
        return [("an element that is not UTF-8", nested(shape, b"\xff\xfe"))]
    size = DATATYPES[spec.datatype].size * 8
    if spec.datatype.startswith("FP"):
        return [("NaN", nested(shape, math.nan)), ("infinity", nested(shape, math.inf))] if elements(shape) else []
    if spec.datatype.startswith("INT"):
        return [
            ("the smallest number", nested(shape, -(1 << (size - 1)))),
            ("the largest", nested(shape, (1 << (size - 1)) - 1)),
        ]
    if spec.datatype.startswith("UINT"):
        return [("the largest number", nested(shape, (1 << size) - 1))]
    return []


def _object(text: str) -> Dict[str, Any]:
    """Returns a JSON object of the command line."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return found


def main(arguments: Optional[List[str]] = None) -> int:
    """Parses, checks, prints; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m stagemesh.check", description=str(__doc__).split("\n\n")[1])
    parser.add_argument("worker", help="worker.py, worker.py:Class or package.module:Class")
    parser.add_argument("--options", type=_object, default={}, help="what setup gets as ctx.options, a JSON object")
    parser.add_argument("--max-size", type=int, default=32, help="rows of the largest batch (default 32)")
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait for each answer (default 60)")
    parser.add_argument("--arrays", choices=("numpy", "buffer"), help="how tensors look to it; by default what it says")
    given = parser.parse_args(arguments)
    if given.max_size < 1:
        parser.error("--max-size is at least 1")
    place = given.worker.rpartition(":")[0] or given.worker
    if place.endswith(".py") and not os.path.exists(place):
        print(f"{place}: there is no such file", file=sys.stderr)
        return 2
    settings = Settings(given.worker, given.options, given.max_size, given.patience, given.arrays)
    wrong = Check(settings).all()
    print(f"{wrong} of the checks found something wrong" if wrong else "nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
