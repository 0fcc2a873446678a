"""Errors that are the outcome of one item.

A worker raises one of these about an item (in ``predict_item``, ``preprocess`` and
``postprocess``) or passes it to ``batch.fail``. The item's caller gets reason, message
and field; the other items of the batch are not affected. Any other exception about one
item becomes RUNNER_FAILED with a general sentence, since its text was not written for
callers. The host gets it too, for its log, and shows it to callers if the stage says so.

The functions here accept any exception and raise none, even if its own methods raise.
"""

from __future__ import annotations

import os
import traceback
from types import TracebackType
from typing import Any, Dict, Optional, Tuple, Type, Union


def text_of(value: Any) -> str:
    """Returns the text of an error, or of a part of it."""
    try:
        return str.__str__(str(value))  # of a subclass of str, whose methods may raise, too
    except BaseException as another:
        return f"its message raised {type(another).__name__}"


def _text_in(owner: Any, name: str) -> str:
    """Returns the text of an attribute of an error or of its class; empty if that is missing or raises."""
    try:
        return text_of(getattr(owner, name, ""))
    except BaseException:
        return ""


# The message that an item's caller gets for an error that was not written for callers.
GENERAL = "the worker could not run this item"


class ItemError(Exception):
    """The outcome of one item that has no outputs; raise one of the subclasses."""

    reason = "RUNNER_FAILED"
    # For subclasses whose own __init__ does not set them.
    message: str = ""
    field: str = ""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    def __reduce__(self) -> Any:
        """Pickles the attributes, since the arguments of a subclass's __init__ are not kept."""
        return _unpickled, (type(self), self.args), self.__dict__


def _unpickled(kind: Type[ItemError], args: Tuple[Any, ...]) -> ItemError:
    return kind.__new__(kind, *args)


class InvalidInput(ItemError):
    """The caller's input cannot be used: ``InvalidInput("x", "is not finite")``."""

    reason = "INVALID_INPUT"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message, field)

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class SchemaViolation(InvalidInput):
    """The input can be read, but does not fit the schema of the stage."""

    reason = "SCHEMA_VIOLATION"


class OutOfMemory(ItemError):
    """There was not enough memory.

    For one item: that item alone is too large. Raised for a batch: the host runs its
    halves, and no item fails until it runs alone.
    """

    reason = "RUNNER_OUT_OF_MEMORY"

    def __init__(self, message: str = "out of memory") -> None:
        super().__init__(message)


class ItemFailed(ItemError):
    """Any other failure of an item; its caller gets the message."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


# The most errors of one validation that its message tells.
_MAX_VALIDATIONS = 8


def of_validation(error: BaseException) -> BaseException:
    """Returns the SchemaViolation that a ValidationError of pydantic means; any other error as it is."""
    kind = type(error)
    if _text_in(kind, "__name__") != "ValidationError" or not _text_in(kind, "__module__").startswith("pydantic"):
        return error
    try:
        errors = error.errors()  # type: ignore[attr-defined]
        texts = [f"{'.'.join(map(str, one['loc'])) or 'the value'}: {one['msg']}" for one in errors]
    except Exception:
        texts = [text_of(error)]
    more = len(texts) - _MAX_VALIDATIONS
    return SchemaViolation("", "; ".join(texts[:_MAX_VALIDATIONS]) + (f"; and {more} more" if more > 0 else ""))


class InvalidModel(Exception):
    """Raised by load: the model cannot be loaded on any host, as its source is missing or broken."""


class ModelGone(Exception):
    """A batch names a model that is not loaded."""

    explained = True  # its text tells all, and a traceback nothing


# The longest texts in a header, in characters; of the tracebacks of a result together.
MAX_MESSAGE, _MAX_TRACEBACK, _MAX_TRACEBACKS = 4096, 65536, 131072


def exception_of(error: BaseException, trace: Optional[str] = None) -> Dict[str, str]:
    """Returns an exception as the protocol has it; trace replaces its traceback."""
    if trace is None:
        trace = "" if _text_in(error, "explained") == "True" else traceback_of(error)
    fields = {"error": _text_in(type(error), "__name__"), "message": text_of(error)[:MAX_MESSAGE]}
    return {**fields, "traceback": trace[-_MAX_TRACEBACK:]} if trace else fields


class Raised(Dict[int, Dict[str, str]]):
    """What the items of a batch raised that was not written for their callers, by number.

    It is bounded, so that it fits into the header of a result: later ones have no traceback,
    or are missing.
    """

    _room = _MAX_TRACEBACKS

    def add(self, number: int, error: BaseException) -> None:
        """Adds an item's first exception."""
        own = exception_of(error)
        if sum(map(len, own.values())) > self._room:
            own.pop("traceback", "")
        size = sum(map(len, own.values()))
        if size <= self._room and number not in self:
            self._room -= size
            self[number] = own


_BY_REASON = {"INVALID_INPUT": InvalidInput, "SCHEMA_VIOLATION": SchemaViolation}


def error_of(reason: str, message: str, field: str) -> ItemError:
    """Returns the error that a fault of the protocol was made of."""
    if reason in _BY_REASON:
        return _BY_REASON[reason](field, message)
    if reason == OutOfMemory.reason:
        return OutOfMemory(message)
    return ItemFailed(message)


def fault_of(index: int, error: BaseException) -> Dict[str, Union[int, str]]:
    """Returns an item's error as a fault of the protocol; index is the item's place in the message."""
    if isinstance(error, ItemError):
        message = _text_in(error, "message") or text_of(error) or _text_in(type(error), "__name__")
        reason = _text_in(error, "reason") or ItemFailed.reason
        fault: Dict[str, Union[int, str]] = {"item": index, "reason": reason, "message": message}
        field = _text_in(error, "field")
        if field:
            fault["field"] = field
        return fault
    if is_out_of_memory(error):
        return {"item": index, "reason": OutOfMemory.reason, "message": "the item is too large for the worker's memory"}
    return {"item": index, "reason": ItemFailed.reason, "message": GENERAL}


def is_out_of_memory(error: BaseException) -> bool:
    """Reports whether the error means that memory ran out.

    Errors of libraries are recognized by name, so none is imported: OutOfMemoryError of
    torch and cupy, and the RuntimeErrors of older torch, JAX and ONNX Runtime.
    """
    if isinstance(error, (MemoryError, OutOfMemory)):
        return True
    if any(_text_in(kind, "__name__") == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and "out of memory" in text_of(error).lower()


_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def _user_traceback(error: BaseException) -> Optional[TracebackType]:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_HERE):
        trace = trace.tb_next
    return trace


def is_from_user_code(error: BaseException) -> bool:
    """Reports whether an error was raised in the worker's own code, or in code that it called."""
    return _user_traceback(error) is not None


def traceback_of(error: BaseException) -> str:
    """Returns an error's traceback from the worker's own code on, without this package's frames before it."""
    trace = _user_traceback(error)
    if trace is None and not isinstance(error, SyntaxError):  # whose text has the place
        trace = error.__traceback__
    try:
        return "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    except BaseException as another:
        return f"{_text_in(type(error), '__name__')}, whose traceback raised {type(another).__name__}"
