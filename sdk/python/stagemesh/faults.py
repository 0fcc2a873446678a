"""What may become of one item: errors that are data, not accidents.

An author raises one of these about an item (in ``predict_item``, ``preprocess``
and ``postprocess``) or hands it to ``batch.fail``. The item's caller gets reason,
message and field; its neighbours have their own outcomes. Any other exception
about one item becomes RUNNER_FAILED with a general sentence, and its traceback
goes to the log: its text was not written for callers.
"""

from __future__ import annotations

import os
import traceback
from typing import Dict, Union

__all__ = ["InvalidInput", "ItemError", "ItemFailed", "OutOfMemory", "SchemaViolation"]

# What the caller of an item hears when the error was not written for callers.
GENERAL = "the worker could not run this item"


class ItemError(Exception):
    """The outcome of one item that has no outputs; raise one of the subclasses."""

    reason = "RUNNER_FAILED"

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field


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
        fault: Dict[str, Union[int, str]] = {
            "item": index,
            "reason": error.reason,
            "message": str(error.message),
        }
        if error.field:
            fault["field"] = str(error.field)
        return fault
    if is_out_of_memory(error):
        return {"item": index, "reason": OutOfMemory.reason, "message": "the item is too large for the worker's memory"}
    return {"item": index, "reason": ItemFailed.reason, "message": GENERAL}


def is_declared(error: BaseException) -> bool:
    """Reports whether the error was written for the item's caller."""
    return isinstance(error, ItemError)


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
    return isinstance(error, RuntimeError) and "out of memory" in str(error).lower()


_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def traceback_of(error: BaseException) -> str:
    """Returns an error's traceback from the author's code on, without the frames of this package before it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_HERE):
        trace = trace.tb_next
    if trace is None and not isinstance(error, SyntaxError):  # which says itself where it is
        trace = error.__traceback__
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()
