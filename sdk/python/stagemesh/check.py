"""``stagemesh check worker.py`` runs this: a worker as a host would, and reports what is wrong.

It starts the worker, sends it what a mesh will send sooner or later (examples, a full
batch, items of mixed sizes, bad input, a cancel, a ping, a batch that raises, a
shutdown, a signal), and prints a line for each check: what is wrong, and what to do
about it. ``python -m stagemesh.check worker.py`` is for machines without that program.
The exit code is 0 if nothing is wrong, 1 if something is, 2 if there is no such worker.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from .faults import ItemError
from .frames import decode
from .parts import DATATYPES
from .specs import Bytes, Json, Spec, Tensor, Text, spec_of
from .testing import BatchFailed, Outcome, Request, Run, WorkerEnded, WorkerSilent

_SLOTS = 4  # the most batches that run at a time
_CANCEL_S = 1.0  # the longest time from a stream's cancel to its end, in seconds
_VARIABLE = 4  # the extent of a variable axis of inputs that are made from a spec


class Problem(Exception):
    """A finding: what is wrong, and what to do."""

    def __init__(self, what: str, do: str) -> None:
        super().__init__(what)
        self.what, self.do = what, do


class Step(NamedTuple):
    """A check: its title, the method that runs it, and which kind of worker it is for.

    The method returns a note, or raises. needs names checks without which this one says
    nothing new.
    """

    title: str
    run: Callable[[Checker], str]
    streams: Optional[bool] = None  # True: only for workers that stream, False: only for others
    needs: Sequence[str] = ()


# What it means for the checks that need these if they find something.
_REASONS = {
    "examples": "its examples are not answered",
    "chunks": "its examples are not streamed",
    "mixed": "an item is not answered among others",
}


class Checker:
    """Checks one worker; start starts it, anew after a check has ended it. wrong counts the findings."""

    def __init__(self, start: Callable[[], Run], max_size: int) -> None:
        self._start = start
        self._max_size = max_size
        self._run: Optional[Run] = None
        self._streams = False  # set once it has started
        self.wrong = 0

    def all(self) -> int:
        """Runs all checks; returns how many found something."""
        failed: Set[str] = set()
        skipped: Dict[str, List[str]] = {}
        try:
            for step in _STEPS:
                if step.streams is not None and step.streams != self._streams:
                    continue
                if step.run is Checker.reload and self._run is not None and not self._run.models:
                    continue
                reason = next((_REASONS[need] for need in step.needs if need in failed), None)
                if reason is not None:
                    skipped.setdefault(reason, []).append(step.title)
                elif not self._check(step):
                    failed.add(step.run.__name__)
                    if step.run is Checker.starts:
                        break  # nothing else can be checked
        finally:
            if self._run is not None:
                self._run.stop()
        for reason, titles in skipped.items():
            print(f"      not checked, since {reason}: {'; '.join(titles)}")
        return self.wrong

    def _check(self, step: Step) -> bool:
        try:
            note = step.run(self)
        except Exception as error:
            problem = self._problem(error)
            self.wrong += 1
            what = problem.what.replace("\n", "\n      ")
            print(f"WRONG {step.title}\n      {what}\n      -> {problem.do}", flush=True)
            return False
        print(f"ok    {step.title}{note and ': ' + note}", flush=True)
        return True

    def _problem(self, error: Exception) -> Problem:
        """Returns the finding that an exception of a check is."""
        if isinstance(error, Problem):
            return error
        if isinstance(error, WorkerEnded):
            if self._run is not None:
                self._run.wait(0)
            self._run = None
            if isinstance(error, WorkerSilent):
                return Problem(
                    str(error),
                    "the tracebacks of its threads are above; a host ends it at its limit, which here is --patience",
                )
            do = "what it wrote is above, if it wrote anything; a worker must survive every request"
            return Problem(str(error), do)
        if not isinstance(error, BatchFailed):  # a request that cannot be sent, or a reply that cannot be read
            do = "declare examples = [{...}] of inputs as callers send them"
            return Problem(f"it cannot be tested: {type(error).__name__}: {error}", do)
        text = f"the whole batch failed: {error.error}: {error.message}"
        if error.traceback:
            text += "\n" + error.traceback.rstrip()
        if error.kind == "out_of_memory":
            do = "lower the stage's batch size: a host runs the halves of such a batch, each time anew"
        elif error.error == "BadOutput":
            what = "yield what outputs declares" if self._streams else "return what outputs declares"
            do = f"{what}, or declare what {'stream yields' if self._streams else 'predict returns'}"
        elif self._streams:
            do = "make stream answer it, or fail it: raise InvalidInput(...)"
        else:
            do = "make predict answer it, or fail single items: batch.fail(i, InvalidInput(...))"
        return Problem(text, do)

    @property
    def run(self) -> Run:
        """The running worker."""
        if self._run is None:
            self._run = self._start()
        return self._run

    # --- the checks ----------------------------------------------------------

    def starts(self) -> str:
        """Starts the worker, and reads its declaration."""
        try:
            run = self.run
        except WorkerSilent:
            raise
        except WorkerEnded as error:
            if error.traceback:
                raise Problem(f"{error}\n{error.traceback}", "make setup run; --options sets its options") from None
            do = "what it wrote is above, if it wrote anything"
            raise Problem(str(error), "declare what can be served" if error.said else do) from None
        except BatchFailed as error:
            raise Problem(f"a model is not loaded: {error}", "make load load it; --model has ID and source") from None
        if not run.spec.get("inputs") or not run.spec.get("outputs"):
            raise Problem(
                "it declares no inputs or no outputs, so a host checks nothing and callers cannot look them up",
                'declare them: inputs = {"x": Tensor("FP32", [-1, 64])}',
            )
        self._streams = run.streams
        self._declare(run)
        kind = "streams, " if self._streams else ""
        return f"{run.hello['name']}, {kind}inputs {', '.join(self._inputs)}, outputs {', '.join(self._outputs)}"

    def _declare(self, run: Run) -> None:
        """Takes the declaration of the model that requests are for."""
        self._inputs = {entry["name"]: spec_of(entry) for entry in run.spec["inputs"]}
        self._outputs = {entry["name"]: spec_of(entry) for entry in run.spec["outputs"]}
        self._joins = run.spec.get("batch_axis", "rows") == "rows"
        declared = run.examples if run.spec.get("examples") else []
        self._from_spec = not declared
        self._examples = declared or [{name: example_of(spec) for name, spec in self._inputs.items()}]

    def examples(self) -> str:
        """Runs the examples one by one."""
        for i, inputs in enumerate(self._examples):
            error = self._predict([inputs])[0].error
            if error is not None and self._from_spec:
                do = "declare examples = [{...}] that the worker answers"
                raise Problem(f"inputs made from the spec: {_text(error)}", do)
            if error is not None:
                raise Problem(f"example {i + 1}: {_text(error)}", "make the example one that it answers")
        return "made from the spec, since it has none" if self._from_spec else f"{len(self._examples)}"

    def reload(self) -> str:
        """Unloads each model, loads it again, and runs an example."""
        run = self.run
        for model, source in run.models.items():
            try:
                run.unload(model)
                run.load(model, source)
            except BatchFailed as error:
                raise Problem(f"model {model}: {error}", "make unload and load work while others are loaded") from None
            self._declare(run)
            self._answer_all(self._examples[:1])
        return ", ".join(run.models)

    def chunks(self) -> str:
        """Streams the examples one by one, and measures when the chunks arrive."""
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
                raise Problem(f"example {i + 1}: {_text(error)}", "make the example one that it answers")
            if number == 0:
                raise Problem(f"example {i + 1} is answered without a chunk", "yield at least one for each example")
            took = time.monotonic() - started
            notes.append(f"{number} chunks, the first after {first * 1000:.1f} ms, all after {took * 1000:.1f} ms")
        return "; ".join(notes)

    def cancel_stream(self) -> str:
        """Cancels a stream after its first chunk, and measures how soon it ends."""
        with self.run.stream(self._examples[0]) as stream:
            next(iter(stream), None)
            stream.cancel()
            started = time.monotonic()
            stream.end()
            took = time.monotonic() - started
        if took > _CANCEL_S:
            raise Problem(
                f"it went on for {took:.2f} s after the cancel",
                "let async def stream await what it waits for; between the steps of long work look at item.cancelled",
            )
        self._answer_all(self._examples[:1])
        return f"{took * 1000:.1f} ms"

    def full(self) -> str:
        """Runs a batch of as many rows as the host may send."""
        requests: List[Mapping[str, Any]] = []
        rows = self._max_size
        while rows > 0:
            fitting = [e for e in self._examples if self._rows(e) <= rows]
            if not fitting:
                break
            requests.append(fitting[len(requests) % len(fitting)])
            rows -= self._rows(requests[-1])
        if not requests:
            raise Problem("no example fits into a batch of --max-size rows", "use examples of one row")
        self._answer_all(requests)
        return f"{self._max_size} rows"

    def mixed(self) -> str:
        """Runs items of one to three rows, and of several extents if they are variable."""
        sizes = [n for n in (1, 2, 3, 1) if n <= self._max_size]
        requests: List[Mapping[str, Any]] = [self._examples[i % len(self._examples)] for i in range(len(sizes))]
        if self._joins and self._from_spec and all(isinstance(spec, Tensor) for spec in self._inputs.values()):
            requests = [
                {name: example_of(spec, rows, extra=i) for name, spec in self._inputs.items()}
                for i, rows in enumerate(sizes)
            ]
        while len(requests) > 1 and sum(map(self._rows, requests)) > self._max_size:
            requests.pop()
        self._answer_all(requests)
        return f"{len(requests)} items"

    def at_a_time(self) -> str:
        """Runs as many batches at a time as the worker takes."""
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
        """Puts one bad item between two good ones if these fit, for each kind of bad input."""
        refused = asked = 0
        good = self._examples[0]
        around = [good] if 3 * self._rows(good) <= self._max_size else []
        for name, spec in self._inputs.items():
            for kind, value in bad_values(spec, good.get(name, example_of(spec, self._rows(good)))):
                asked += 1
                try:
                    outcomes = self._predict([*around, {**good, name: value}, *around])
                except BatchFailed as error:
                    if not around:
                        refused += 1
                        continue
                    raise Problem(
                        f"input {name!r} with {kind} failed the batch as a whole: {error.error}: {error.message}",
                        f"look for it in predict and call batch.fail(i, InvalidInput({name!r}, ...)), or raise it in "
                        "preprocess(self, item); else the host must run every such batch again in halves",
                    ) from None
                bad = outcomes.pop(len(around))
                for neighbour in outcomes:
                    if neighbour.error is not None:
                        raise Problem(
                            f"input {name!r} with {kind} made its neighbour fail: {_text(neighbour.error)}",
                            "let each item's outcome depend on that item alone",
                        )
                refused += bad.error is not None
        return f"{refused} of {asked} kinds refused"

    def cancel_batch(self) -> str:
        """Cancels a batch that may be running."""
        batch = self.run.send([Request(self._examples[0])])
        self.run.tell("cancel", batch=batch)
        self.run.result(batch)
        self._answer_all(self._examples[:1])
        return ""

    def ping(self) -> str:
        """Pings the idle worker."""
        run, started = self.run, time.monotonic()
        run.ping()
        return f"{(time.monotonic() - started) * 1000:.1f} ms"

    def raises(self) -> str:
        """Runs a batch without inputs, which no predict can answer, and a good one."""
        try:
            outcome = self._predict([{}])[0]
            note = "its items failed" if outcome.error is not None else "it answers an item without inputs"
        except BatchFailed as error:
            note = error.error
        self._answer_all(self._examples[:1])
        return note

    def shutdown(self) -> str:
        """Sends a shutdown."""
        run, self._run = self.run, None
        started = time.monotonic()
        return _exit_note(run.stop(5), started)

    def signal(self) -> str:
        """Starts the worker again and ends it by a signal, twice."""
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
        return _exit_note(run.wait(5), started)

    # --- batches -------------------------------------------------------------

    def _predict(self, requests: Sequence[Mapping[str, Any]]) -> List[Outcome]:
        for inputs in requests:
            self.run.add(inputs)
        return self.run.predict()

    def _answer_all(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """Runs a batch whose items must all have their outputs."""
        for i, outcome in enumerate(self._predict(requests)):
            item = f"item {i} of {len(requests)}"
            if outcome.error is not None:
                do = "an input that is answered alone must be answered among others too"
                raise Problem(f"{item}: {_text(outcome.error)}", do)
            for name, spec in self._outputs.items():
                if name not in outcome.outputs and not spec.optional:
                    raise Problem(f"{item} has no output {name!r}", "return it for each item")

    def _rows(self, inputs: Mapping[str, Any]) -> int:
        for name, spec in self._inputs.items():
            value = inputs.get(name)
            if self._joins and isinstance(spec, Tensor) and value is not None:
                shape = shape_of(value)
                return shape[0] if len(shape) == len(spec.shape) else 1
        return 1


_STEPS = (
    Step("starts", Checker.starts),
    Step("answers its examples", Checker.examples),
    Step("streams its examples", Checker.chunks, True, ["examples"]),
    Step("stops a stream that is cancelled", Checker.cancel_stream, True, ["examples", "chunks"]),
    Step("answers a full batch", Checker.full, False, ["examples"]),
    Step("answers items of mixed sizes", Checker.mixed, False, ["examples"]),
    Step("answers batches at a time", Checker.at_a_time, None, ["examples"]),
    Step("bad input is the fault of its item alone", Checker.bad_input, None, ["examples", "mixed"]),
    Step("ends a batch that is cancelled", Checker.cancel_batch, False, ["examples"]),
    Step("unloads and loads models", Checker.reload, None, ["examples"]),
    Step("answers a ping while idle", Checker.ping),
    Step("goes on after a batch that raises", Checker.raises, None, ["examples"]),
    Step("leaves on shutdown", Checker.shutdown),
    Step("leaves on SIGTERM", Checker.signal),
)


def _text(error: ItemError) -> str:
    """Returns an item's error with what the worker raised, if its text does not say that."""
    return f"{error}\n{error.__cause__}" if error.__cause__ is not None else str(error)


def _exit_note(code: Optional[int], started: float) -> str:
    took = time.monotonic() - started
    if code == 0:
        return f"exit code 0 after {took:.2f} s"
    how = f"it was ended by signal {-code}" if code is not None and code < 0 else f"it exited with {code}"
    raise Problem(
        f"{how} after {took:.2f} s, expected exit code 0 within 5 s",
        "end threads and processes that it has started in teardown(self), or make them daemons; "
        "leave the handlers of SIGTERM and SIGINT as they are",
    )


# --- inputs --------------------------------------------------------------------------


def example_of(spec: Spec, rows: int = 1, extra: int = 0) -> Any:
    """Returns an input for a spec: zeros, or a word; extra is added to variable extents."""
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
    """Returns nested lists of this shape, filled with one value."""
    if not shape:
        return value
    return [nested(shape[1:], value) for _ in range(shape[0])]


def bad_values(spec: Spec, example: Any) -> List[Tuple[str, Any]]:
    """Returns kinds of bad input that callers send sooner or later, each with a value."""
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
    bits = DATATYPES[spec.datatype].size * 8
    if spec.datatype.startswith("FP"):
        return [("NaN", nested(shape, math.nan)), ("infinity", nested(shape, math.inf))] if math.prod(shape) else []
    if spec.datatype.startswith("INT"):
        return [
            ("the smallest number", nested(shape, -(1 << (bits - 1)))),
            ("the largest", nested(shape, (1 << (bits - 1)) - 1)),
        ]
    if spec.datatype.startswith("UINT"):
        return [("the largest number", nested(shape, (1 << bits) - 1))]
    return []


# --- the command line ------------------------------------------------------------------


def _json_object(text: str) -> Dict[str, Any]:
    try:
        found = decode(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return found


def main(arguments: Optional[List[str]] = None) -> int:
    """Checks the worker that the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m stagemesh.check", description=str(__doc__).split("\n\n")[1])
    parser.add_argument("worker", help="worker.py, worker.py:Class or package.module:Class")
    parser.add_argument("--options", type=_json_object, default={}, help="ctx.options of setup, a JSON object")
    parser.add_argument("--max-size", type=int, default=32, help="rows of the largest batch (default 32)")
    parser.add_argument("--model", action="append", default=[], help="ID=SOURCE, of a worker with several models")
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait for each answer (default 60)")
    parser.add_argument(
        "--arrays", choices=("numpy", "buffer"), help="how tensors look to it; by default what it declares"
    )
    given = parser.parse_args(arguments)
    if given.max_size < 1:
        parser.error("--max-size is at least 1")
    if not 0 < given.patience < 1e6:
        parser.error("--patience is a number of seconds above 0")
    place = given.worker.rpartition(":")[0] or given.worker
    if place.endswith(".py") and not os.path.exists(place):
        print(f"{place}: there is no such file", file=sys.stderr)
        return 2

    models = {model: source for model, _, source in (text.partition("=") for text in given.model)}

    def start() -> Run:
        settings = {"slots": _SLOTS, "patience_s": given.patience, "arrays": given.arrays, "stdout": 2}
        return Run(given.worker, given.options, max_size=given.max_size, models=models, **settings).start()

    wrong = Checker(start, given.max_size).all()
    print(f"{wrong} of the checks found something wrong" if wrong else "nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
