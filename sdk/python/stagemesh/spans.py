"""Spans of a traced batch: its predict has a trace, its reply has the spans, and the host exports them."""

from __future__ import annotations

import functools
import importlib
import sys
import time
from contextvars import ContextVar
from numbers import Integral, Real
from typing import Any, Callable, Dict, List, Optional, Union

from .frames import MAX_HEADER, encode

MAX_SPANS = 128  # of a batch
_MAX_TEXT = 256  # characters


class Span:
    """A timed part of a batch's run, as a context; NO_SPAN does nothing."""

    _end = 0
    _error = ""

    def __init__(self, spans: Optional[Spans], name: str, attributes: Dict[str, Any]) -> None:
        self._spans = spans
        self._name = name
        self._attributes = attributes

    def __enter__(self) -> Span:
        if self._spans is not None:
            self._outer = _current.get()
            self._detach = None if self._outer in self._spans else _attach(self._spans.trace)
            _current.set(self)
            self._start = time.time_ns() // 1000
            if len(self._spans) < MAX_SPANS:
                self._spans.append(self)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._spans is not None:
            self._end = time.time_ns() // 1000
            if isinstance(error, Exception):  # GeneratorExit and CancelledError are no failures
                self._error = type(error).__name__
            _current.set(self._outer)
            if self._detach is not None:
                self._detach()

    def set(self, **attributes: Any) -> None:
        """Adds attributes: booleans, numbers and strings."""
        if self._spans is not None:
            self._attributes.update(attributes)

    def _wire(self, spans: List[Span], now: int) -> Dict[str, Any]:
        out: Dict[str, Any] = {"name": str(self._name)[:_MAX_TEXT], "start": self._start, "end": self._end or now}
        if self._outer in spans:
            out["parent"] = spans.index(self._outer)
        if self._attributes:
            attributes = dict(self._attributes)  # a copy, since threads may set more
            out["attributes"] = {name: _value(value) for name, value in attributes.items()}
        if self._error:
            out["error"] = self._error
        return out


NO_SPAN = Span(None, "", {})
_current: ContextVar[Span] = ContextVar("stagemesh_span", default=NO_SPAN)


class Spans(List[Span]):
    """The spans of one batch in the order of their starts; trace is a W3C traceparent."""

    def __init__(self, trace: str) -> None:
        self.trace = trace

    def added_to(self, header: bytes) -> bytes:
        """Returns the header of a reply with the spans, or without them if they do not fit."""
        spans, now = list(self), time.time_ns() // 1000  # a copy, since threads may add more
        text = encode([span._wire(spans, now) for span in spans])
        out = header[:-1] + f',"spans":{text}}}'.encode("ascii")
        return out if len(out) <= MAX_HEADER else header


def _value(value: Any) -> Union[bool, int, float, str]:
    """Returns a value as the protocol has it, also for the numbers of numpy."""
    real, whole = isinstance(value, Real), isinstance(value, Integral)
    try:
        if real and abs(value) < 1 << 63:
            return value if type(value) is bool else int(value) if whole else float(value)
        return str(value)[:_MAX_TEXT]
    except Exception:  # of the value's own methods; the batch has ended, and is to be answered
        return f"<{type(value).__name__}>"


def _attach(trace: str) -> Optional[Callable[[], None]]:
    """Makes the batch's span that of opentelemetry-api's context, if the worker uses that; returns what undoes it."""
    if "opentelemetry.trace" not in sys.modules:
        return None
    context = importlib.import_module("opentelemetry.context")
    traces = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
    parent = traces.TraceContextTextMapPropagator().extract({"traceparent": trace})
    return functools.partial(context.detach, context.attach(parent))
