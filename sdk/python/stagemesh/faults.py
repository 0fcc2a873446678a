"""What may become of one item: errors that are data, not accidents.

An author raises one of these about an item (in ``predict_item``, ``preprocess``
and ``postprocess``) or hands it to ``batch.fail``. The item's caller gets reason,
message and field; its neighbours have their own outcomes. Any other exception
about one item becomes RUNNER_FAILED with a general sentence, and its traceback
goes to the log: its text was not written for callers.

The functions here take any exception and raise none, whatever its own methods do.
"""

from __future__ import annotations

import os
import traceback
from types import TracebackType
from typing import Any, Dict, Optional, Tuple, Type, Union

__all__ = ["InvalidInput", "ItemError", "ItemFailed", "OutOfMemory", "SchemaViolation"]


def text_of(value: Any) -> str:
    """Returns what an error, or a part of it, says."""
    try:
        return str(value)
    except BaseException as another:
        return f"its message raised {type(another).__name__}"


# What the caller of an item hears when the error was not written for callers.
GENERAL = "the worker could not run this item"


class ItemError(Exception):
    """The outcome of one item that has no outputs; raise one of the subclasses."""

    reason = "RUNNER_FAILED"
    # Of subclasses whose __init__ is their own.
    message: str = ""
    field: str = ""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    def __reduce__(self) -> Any:
        """Says how it is pickled: as it is, since what __init__ takes is not kept."""
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
    """The input can be read, and is not what the stage takes."""

    reason = "SCHEMA_VIOLATION"


class OutOfMemory(ItemError):
    """There was not enough memory.

    About one item: that item alone is too large. Raised for a batch: the host
    runs its halves, and blames nobody until one item is alone.
    """

    reason = "RUNNER_OUT_OF_MEMORY"

    def __init__(self, message: str = "out of memory") -> None:
        super().__init__(message)


class ItemFailed(ItemError):
    """Anything else that the item's caller is to read: the message goes to them."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


_BY_REASON = {"INVALID_INPUT": InvalidInput, "SCHEMA_VIOLATION": SchemaViolation}


def error_of(reason: str, message: str, field: str) -> ItemError:
    """Returns the error that a fault on the wire was made of."""
    if reason in _BY_REASON:
        return _BY_REASON[reason](field, message)
    if reason == OutOfMemory.reason:
        return OutOfMemory(message)
    return ItemFailed(message)


def fault_of(index: int, error: BaseException) -> Dict[str, Union[int, str]]:
    """Returns the fault of an item as the wire has it; index is the batch's."""
    if isinstance(error, ItemError):
        message = text_of(error.message) or text_of(error) or type(error).__name__
        fault: Dict[str, Union[int, str]] = {"item": index, "reason": str(error.reason), "message": message}
        field = text_of(error.field)
        if field:
            fault["field"] = field
        return fault
    if is_out_of_memory(error):
        return {"item": index, "reason": OutOfMemory.reason, "message": "the item is too large for the worker's memory"}
    return {"item": index, "reason": ItemFailed.reason, "message": GENERAL}


def is_out_of_memory(error: BaseException) -> bool:
    """Reports whether the error says that memory ran out.

    Libraries are known by the names of their errors, so none is imported:
    torch.cuda.OutOfMemoryError and torch.OutOfMemoryError, cupy's of the same
    name, and the RuntimeErrors by which older torch, JAX and ONNX Runtime say it.
    """
    if isinstance(error, (MemoryError, OutOfMemory)):
        return True
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and "out of memory" in text_of(error).lower()


_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def _from_author(error: BaseException) -> Optional[TracebackType]:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_HERE):
        trace = trace.tb_next
    return trace


def is_of_author(error: BaseException) -> bool:
    """Reports whether an error was raised in the author's code, or by what it called."""
    return _from_author(error) is not None


def traceback_of(error: BaseException) -> str:
    """Returns an error's traceback from the author's code on, without the frames of this package before it."""
    trace = _from_author(error)
    if trace is None and not isinstance(error, SyntaxError):  # which says itself where it is
        trace = error.__traceback__
    try:
        return "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    except Exception as another:
        return f"{type(error).__name__}, whose traceback raised {type(another).__name__}"
