"""From what an author returned to parts, with errors that say what came and what was wanted."""

from __future__ import annotations

import inspect
import json
from array import array
from typing import Any, List, Mapping, Optional, Sequence, Tuple

from .arrays import Arrays, Mismatch
from .frames import encode
from .packing import is_packed, pack
from .parts import Blob, Body, Column, Raw, split_rows
from .specs import Bytes, Json, Spec, Tensor, Text

__all__ = ["BadOutput"]


class BadOutput(ValueError):
    """What a worker returned is not what it declared."""


def as_outputs(where: str, returned: Any, names: Sequence[str]) -> Mapping[str, Any]:
    """Returns what a method returned where it is a dict; raises BadOutput where it is not."""
    if isinstance(returned, Mapping):
        return returned
    wanted = (
        f"return a dict of outputs by name: {', '.join(map(repr, names))}"
        if names
        else "return a dict of outputs by name"
    )
    if returned is None:
        raise BadOutput(f"{where} returned None; {wanted}")
    if inspect.isgenerator(returned) or inspect.isasyncgen(returned) or inspect.iscoroutine(returned):
        if inspect.isgenerator(returned) or inspect.iscoroutine(returned):
            returned.close()
        raise BadOutput(
            f"{where} returned a {type(returned).__name__}; {wanted}, or write stream(self, item) to answer in chunks"
        )
    raise BadOutput(f"{where} returned a {type(returned).__name__}; {wanted}")


def lacks(value: Any, spec: Optional[Spec]) -> bool:
    """Reports whether an item's value stands for none."""
    return value is None if spec is None else spec.lacks(value)


def check_names(where: str, outputs: Mapping[str, Any], specs: Mapping[str, Spec], of_item: bool) -> None:
    """Raises BadOutput where outputs are missing, or are not declared."""
    if not specs:
        return
    for name in outputs:
        if name not in specs:
            raise BadOutput(
                f"{where} returned output {name!r}, which is not declared; outputs are {', '.join(map(repr, specs))}"
            )
    there = [name for name, value in outputs.items() if not lacks(value, specs[name] if of_item else None)]
    for name, spec in specs.items():
        if name not in there and not spec.optional:
            raise BadOutput(f"{where} returned no output {name!r}; it has {', '.join(map(repr, there)) or 'none'}")


def lists_rows(value: Sequence[Any], spec: Optional[Spec]) -> bool:
    """Reports whether a list has one element for each row, and not one array for each item.

    The depth of the nesting says: a row has one axis less than a tensor.
    """
    if not isinstance(spec, Tensor) or spec.variable != "exact" or not value or any(one is None for one in value):
        return False
    depth, first = 0, value
    while isinstance(first, (list, tuple)) and first:
        depth, first = depth + 1, first[0]
    return depth + (1 if isinstance(first, array) else getattr(first, "ndim", 0)) == len(spec.shape)


def batch_column(
    name: str,
    value: Any,
    spec: Optional[Spec],
    arrays: Arrays,
    rows: Sequence[int],
    has_fault: Sequence[bool],
    joins: bool,
) -> List[Optional[Body]]:
    """Returns one output of a batch that is a list: a body for each item.

    rows are those of each item, has_fault says which items need no outputs, joins that
    axis 0 of tensors is rows.
    """
    if not isinstance(value, (list, tuple)):
        raise BadOutput(
            f"output {name!r}: got {type(value).__name__}, wanted a list of {len(rows)}, "
            f"one {spec} for each item of the batch"
        )
    if len(value) != len(rows):
        raise BadOutput(
            f"output {name!r}: got a list of {len(value)}, wanted {len(rows)}: one value for each item of the batch"
            + ("" if isinstance(spec, Bytes) else " (or one array of all rows)")
        )
    optional = spec is not None and spec.optional
    out: List[Optional[Body]] = []
    for i, one in enumerate(value):
        if has_fault[i] or (one is None and optional):
            out.append(None)
        else:
            out.append(item_body(f"output {name!r} of item {i}", one, spec, arrays, rows[i] if joins else None))
    return out


def whole_column(name: str, value: Any, spec: Optional[Spec], arrays: Arrays, total: int, joins: bool) -> Column:
    """Returns one output of a batch that is one array, of total rows or items."""
    wanted: Optional[Tuple[int, ...]] = None
    if isinstance(spec, Tensor):
        wanted = spec.shape if joins else (-1, *spec.shape)
    elif isinstance(value, (bytes, bytearray, str)):
        raise BadOutput(
            f"output {name!r}: got {type(value).__name__}, wanted a list with one for each item of the batch"
        )
    try:
        raw = arrays.encode(value, spec, wanted)  # type: ignore[arg-type]  # a Tensor, or None
    except Mismatch as error:
        raise BadOutput(f"output {name!r}: {error}") from None
    shape = raw.shape
    if not shape or shape[0] != total:
        of = "row" if joins else "item"
        raise BadOutput(
            f"output {name!r}: got shape {list(shape)}, wanted {[total, *(wanted or shape)[1:]]}: "
            f"axis 0 has one for each {of} of the batch"
        )
    if wanted is not None and (
        len(shape) != len(wanted) or any(want not in (-1, got) for want, got in zip(wanted[1:], shape[1:]))
    ):
        raise BadOutput(f"output {name!r}: got shape {list(shape)}, wanted {[total, *wanted[1:]]}")
    if joins:
        return raw
    return [Raw(one.datatype, one.shape[1:], one.data, one.size) for one in split_rows(raw, [1] * total)]


def item_body(where: str, value: Any, spec: Optional[Spec], arrays: Arrays, rows: Optional[int]) -> Body:
    """Returns the output of one item; rows of its tensors, None where they have no such axis."""
    if isinstance(spec, Bytes) or (spec is None and isinstance(value, (bytes, bytearray, str))):
        return _blob(where, value, spec)
    tensor = spec if isinstance(spec, Tensor) else None
    wanted: Optional[Tuple[int, ...]] = None
    if tensor is not None:
        wanted = tensor.shape if rows is None else (rows, *tensor.shape[1:])
    try:
        raw = arrays.encode(value, tensor, wanted)
    except Mismatch as error:
        raise BadOutput(f"{where}: {error}") from None
    shape = raw.shape
    if wanted is None:
        if rows is not None and shape[:1] != (rows,):
            raise BadOutput(f"{where}: got shape {list(shape)}, wanted {rows} on axis 0: the item's rows")
    elif len(shape) != len(wanted) or any(want not in (-1, got) for want, got in zip(wanted, shape)):
        hint = ""
        if rows is not None and tensor is not None and tensor.fits((rows, *shape)):
            hint = ": axis 0 is the item's rows"
        raise BadOutput(f"{where}: got shape {list(shape)}, wanted {list(wanted)}{hint}")
    return raw


def _blob(where: str, value: Any, spec: Optional[Bytes]) -> Blob:
    content_type = spec.content_type if spec is not None else "application/octet-stream"
    if isinstance(spec, Json):
        try:
            return Blob(content_type, pack(value) if is_packed(content_type) else _document(value))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            form = "MessagePack" if is_packed(content_type) else "JSON"
            raise BadOutput(f"{where}: got {type(value).__name__}, which is not {form}: {error}") from None
    if isinstance(value, str) and (spec is None or isinstance(spec, Text)):
        try:
            return Blob("text/plain" if spec is None else content_type, value.encode())
        except UnicodeEncodeError as error:
            raise BadOutput(f"{where}: got a str that is not Unicode text: {error}") from None
    try:
        if isinstance(spec, Text):
            raise TypeError
        return Blob(content_type, memoryview(value).cast("B") if not isinstance(value, (bytes, bytearray)) else value)
    except TypeError:
        raise BadOutput(f"{where}: got {type(value).__name__}, wanted {spec or 'bytes'}") from None


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode


def _document(value: Any) -> bytes:
    try:
        return _encode(value).encode()
    except UnicodeEncodeError:  # half of a pair, which JSON has an escape for
        return encode(value).encode()


def encode_input(where: str, name: str, value: Any, spec: Optional[Spec], arrays: Arrays, joins: bool) -> Body:
    """Returns an input, of an example or a test, as a part's body. Raises ValueError.

    With joins a tensor may lack axis 0, and is one row then, as a caller's may.
    """
    if isinstance(spec, Bytes) and isinstance(value, (bytes, bytearray)):
        return Blob(spec.content_type, value)  # bytes as they are, be they text, JSON or neither
    where = f"{where}: input {name!r}"
    try:
        if joins and isinstance(spec, Tensor) and not isinstance(value, (bytes, bytearray)):
            raw = arrays.encode(value, spec, None)
            if spec.fits((1, *raw.shape)):
                return Raw(raw.datatype, (1, *raw.shape), raw.data, raw.size)
        return item_body(where, value, spec, arrays, None)
    except Mismatch as error:
        raise ValueError(f"{where}: {error}") from None
    except BadOutput as error:
        raise ValueError(str(error)) from None


def shares(column: Column, rows: Sequence[int]) -> List[Optional[Body]]:
    """Returns a body for each item, of a tensor of all or of bodies."""
    if isinstance(column, Raw):
        return list(split_rows(column, rows))
    return column


def joinable(bodies: Sequence[Optional[Body]]) -> Optional[List[Raw]]:
    """Returns tensors that can be sent as one; None where they cannot."""
    raws: List[Raw] = []
    for body in bodies:
        if not isinstance(body, Raw) or not body.shape:
            return None
        if raws and (body.datatype != raws[0].datatype or body.shape[1:] != raws[0].shape[1:]):
            return None
        raws.append(body)
    return raws
