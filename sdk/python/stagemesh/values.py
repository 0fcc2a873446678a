"""The values of inputs and outputs: from received parts to values, and from returned values to parts.

``Values`` and ``Tensors`` are one input of a batch. ``Encoder`` turns what a worker returns
into parts; its errors name what came and what was wanted.
"""

from __future__ import annotations

import inspect
import sys
from array import array
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from .arrays import Arrays, BufferArrays
from .parts import Blob, Body, Column, Mismatch, Place, Raw, Received, join_rows, split_rows
from .specs import Bytes, Spec, Tensor, Text, shape_fits


def arrays_of(name: str) -> Arrays:
    """Returns the arrays "numpy" or "buffer"; raises ValueError for others, ImportError if they cannot be used."""
    if name == "buffer":
        if sys.byteorder != "little":
            raise ImportError('arrays="buffer" needs a little-endian machine; use arrays="numpy"')
        return BufferArrays()
    if name != "numpy":
        raise ValueError(f'arrays: {name!r}; use "numpy" or "buffer"')
    try:
        from .arrays_numpy import NumpyArrays
    except ImportError as error:
        raise ImportError(
            f'arrays="numpy" needs numpy, which this Python lacks ({error}): '
            'install numpy beside the worker, or set arrays="buffer" for memoryviews'
        ) from error
    return NumpyArrays()


# --- received inputs -----------------------------------------------------------------

# The value of an item that lacks an input; None may be a value, as null is in JSON.
ABSENT: Any = object()


class Values:
    """One input of a batch: a Python value for each item, ABSENT if the item has none."""

    def __init__(self, values: List[Any]) -> None:
        self._values = values

    def whole(self) -> Any:
        """Returns what batch[name] is."""
        return [None if value is ABSENT else value for value in self._values]

    def of(self, index: int) -> Any:
        """Returns the value of one item."""
        return self._values[index]

    def shapes(self) -> List[Tuple[int, ...]]:
        """Returns the shape of each item's value; () if it has none."""
        return [tuple(getattr(value, "shape", ())) for value in self._values]

    def keep(self, indices: Sequence[int]) -> Values:
        """Returns the input of some of the items."""
        return Values([self._values[i] for i in indices])

    def stacked(self) -> Any:
        """Returns one array [N, ...] of tensors of one shape that come one by one; raises TypeError for others."""
        raise TypeError("only tensors can be stacked")


class Tensors(Values):
    """One input of a batch that is a tensor: of all items joined on axis 0, or one for each item.

    joined is the tensor of all, and rows are those of each item; otherwise raws[i] is the
    tensor of item i, None if the item has none, in a frame with that body. joins means
    that axis 0 of tensors is rows.
    """

    def __init__(
        self,
        arrays: Arrays,
        spec: Optional[Spec],
        joins: bool,
        raws: Sequence[Optional[Raw]] = (),
        body: memoryview = memoryview(b""),  # noqa: B008  # immutable
        *,
        joined: Optional[Raw] = None,
        rows: Sequence[int] = (),
    ) -> None:
        self._arrays, self._joins, self._body, self._joined, self._rows = arrays, joins, body, joined, rows
        self._spec = spec if isinstance(spec, Tensor) else None
        self._own = raws

    @property
    def _raws(self) -> Sequence[Optional[Raw]]:
        if self._joined is not None and not self._own:
            self._own = split_rows(self._joined, self._rows)
        return self._own

    def whole(self) -> Any:
        """Returns one array, or a list of arrays as the spec says."""
        spec, joined = self._spec, self._joined
        if spec is not None and spec.variable == "pad" and (joined is None or spec.multiple > 1):
            raws = self._all_raws("padded") if joined is None else [joined]
            return self._arrays.pad(raws, spec, stack=not self._joins)
        if joined is not None and (spec is None or spec.variable != "list"):
            return self._arrays.view(joined)
        return [None if raw is None else self._arrays.view(raw) for raw in self._raws]

    def of(self, index: int) -> Any:
        """Returns the array of one item; ABSENT if it has none."""
        raw = self._raws[index]
        return ABSENT if raw is None else self._arrays.view(raw)

    def shapes(self) -> List[Tuple[int, ...]]:
        """Returns the shape of each item's tensor; () if it has none."""
        return [() if raw is None else raw.shape for raw in self._raws]

    def keep(self, indices: Sequence[int]) -> Values:
        """Returns the tensors of some of the items; joined tensors are copied."""
        raws = [self._raws[i] for i in indices]
        if self._joined is None:
            return Tensors(self._arrays, self._spec, self._joins, raws, self._body)
        joined = join_rows([raw for raw in raws if raw is not None])
        return Tensors(self._arrays, self._spec, self._joins, joined=joined, rows=[self._rows[i] for i in indices])

    def stacked(self) -> Any:
        """Returns one array [N, ...] of tensors of one shape; without a copy if they follow each other in the body."""
        if self._joined is not None:
            return super().stacked()
        raws = self._all_raws("stacked")
        shape = raws[0].shape
        if any(raw.shape != shape for raw in raws):
            raise ValueError(f"tensors of the shapes {sorted({raw.shape for raw in raws})} cannot be stacked")
        at, size = raws[0].at, raws[0].size
        if at >= 0 and all(raw.at == at + i * size for i, raw in enumerate(raws)):
            data = self._body[at : at + size * len(raws)]
        else:
            data = memoryview(bytearray().join([raw.data for raw in raws]))
        return self._arrays.view(Raw(raws[0].datatype, (len(raws), *shape), data, len(data)))

    def _all_raws(self, done: str) -> List[Raw]:
        raws = [raw for raw in self._raws if raw is not None]
        if len(raws) != len(self._raws):
            raise ValueError(f"an optional input that some items lack cannot be {done}: take item[name] one by one")
        return raws


def values_of(
    column: Received, body: memoryview, rows: List[int], arrays: Arrays, spec: Optional[Spec], joins: bool
) -> Values:
    """Returns the input that the parts of one name are. Blobs are not decoded: their values are bytes."""
    if isinstance(column, Raw):
        return Tensors(arrays, spec, joins, joined=column, rows=rows)
    if any(type(part) is Place for part in column):
        return Values([body[part.at : part.stop].tobytes() if type(part) is Place else ABSENT for part in column])
    return Tensors(arrays, spec, joins, [part if isinstance(part, Raw) else None for part in column], body)


# --- returned outputs ----------------------------------------------------------------


class BadOutput(ValueError):
    """A worker returned something else than it declares."""

    explained = True  # its text tells all, and a traceback nothing


class Encoder:
    """Turns values by name into parts, as specs declare them.

    joins means that axis 0 of tensors is rows. Errors are BadOutput; where is the method
    that returned the value, for their texts.
    """

    def __init__(self, specs: Mapping[str, Spec], arrays: Arrays, joins: bool) -> None:
        self.specs = specs
        self.joins = joins
        self._arrays = arrays

    # --- names -----------------------------------------------------------

    def by_name(self, where: str, returned: Any) -> Mapping[str, Any]:
        """Returns what a method returned if it is a dict."""
        if type(returned) is dict or isinstance(returned, Mapping):
            return returned
        names = self._names()
        wanted = f"return a dict of outputs by name{names and ': ' + names}"
        if returned is None:
            raise BadOutput(f"{where} returned None; {wanted}")
        if inspect.isgenerator(returned) or inspect.isasyncgen(returned) or inspect.iscoroutine(returned):
            if not inspect.isasyncgen(returned):
                returned.close()
            wanted += ", or write stream(self, item) to answer in chunks"
        raise BadOutput(f"{where} returned a {type(returned).__name__}; {wanted}")

    def lacks(self, name: str, value: Any) -> bool:
        """Reports whether an item's value means that it has no such output."""
        spec = self.specs.get(name)
        return value is None if spec is None else spec.lacks(value)

    def check_names(self, where: str, outputs: Mapping[str, Any], of_item: bool) -> None:
        """Raises BadOutput if outputs are missing or not declared; of_item: they are those of one item."""
        if not self.specs:
            return
        for name in outputs:
            if name not in self.specs:
                raise BadOutput(f"{where} returned output {name!r}, which is not declared; outputs are {self._names()}")
        there = [n for n, value in outputs.items() if not (self.lacks(n, value) if of_item else value is None)]
        for name, spec in self.specs.items():
            if name not in there and not spec.optional:
                raise BadOutput(f"{where} returned no output {name!r}; it has {', '.join(map(repr, there)) or 'none'}")

    # --- one item ----------------------------------------------------------

    def item_outputs(self, where: str, returned: Any, rows: int) -> Dict[str, Body]:
        """Returns the outputs of one item by name, from what a method returned for it."""
        outputs = self.by_name(where, returned)
        self.check_names(where, outputs, of_item=True)
        return {
            name: self.item(f"output {name!r}", name, value, rows)
            for name, value in outputs.items()
            if not self.lacks(name, value)
        }

    def item(self, what: str, name: str, value: Any, rows: Optional[int] = None) -> Body:
        """Returns the part of one item; what names it in errors.

        rows is the wanted extent of axis 0, None for any; it counts only if tensors are joined.
        """
        spec = self.specs.get(name)
        if spec is None and isinstance(value, (bytes, bytearray, str)):
            spec = Text() if isinstance(value, str) else Bytes()
        if isinstance(spec, Bytes):
            try:
                return Blob(spec.content_type, spec.encode(value))
            except ValueError as error:
                raise BadOutput(f"{what}: {error}") from None
        tensor = spec if isinstance(spec, Tensor) else None
        if not self.joins:
            rows = None
        wanted: Optional[Tuple[int, ...]] = None
        if tensor is not None:
            wanted = tensor.shape if rows is None else (rows, *tensor.shape[1:])
        raw = self._encode(what, value, tensor, wanted)
        shape = raw.shape
        if wanted is None:
            if rows is not None and shape[:1] != (rows,):
                raise BadOutput(f"{what}: got shape {list(shape)}, expected {rows} on axis 0: the item's rows")
        elif not shape_fits(shape, wanted):
            hint = ""
            if rows is not None and tensor is not None and tensor.fits((rows, *shape)):
                hint = ": axis 0 is the item's rows"
            raise BadOutput(f"{what}: got shape {list(shape)}, expected {list(wanted)}{hint}")
        return raw

    def _input(self, where: str, name: str, value: Any) -> Body:
        """Returns an input; if tensors are joined one may lack axis 0, and is one row then, as a caller's may."""
        spec = self.specs.get(name)
        if isinstance(spec, Bytes) and isinstance(value, (bytes, bytearray)):
            return Blob(spec.content_type, value)  # bytes as they are, even if they are not valid text or JSON
        what = f"{where}: input {name!r}"
        try:
            if self.joins and isinstance(spec, Tensor) and not isinstance(value, (bytes, bytearray)):
                raw = self._encode(what, value, spec, None)
                if spec.fits((1, *raw.shape)):
                    return Raw(raw.datatype, (1, *raw.shape), raw.data, raw.size)
            return self.item(what, name, value)
        except BadOutput as error:
            raise ValueError(str(error)) from None

    def inputs(self, where: str, values: Mapping[str, Any]) -> Dict[str, Body]:
        """Returns the inputs of an example or a test by name. Raises ValueError."""
        parts: Dict[str, Body] = {}
        for name, value in values.items():
            if not isinstance(name, str) or not name:
                raise ValueError(f"{where}: {name!r} is not a name of an input")
            if self.specs and name not in self.specs:
                raise ValueError(f"{where}: input {name!r} is not declared; inputs are {self._names()}")
            parts[name] = self._input(where, name, value)
        return parts

    def _names(self) -> str:
        return ", ".join(map(repr, self.specs))

    def _encode(self, what: str, value: Any, spec: Optional[Tensor], shape: Optional[Tuple[int, ...]]) -> Raw:
        try:
            return self._arrays.encode(value, spec, shape)
        except Mismatch as error:
            raise BadOutput(f"{what}: {error}") from None

    # --- all items of a batch ------------------------------------------------

    def column(self, name: str, value: Any, rows: Sequence[int], has_fault: Sequence[bool]) -> Column:
        """Returns one output of a batch: a tensor of all items, or a list with a part for each.

        rows are those of each item; items with a fault need no outputs.
        """
        spec = self.specs.get(name)
        listed = type(value) is list or type(value) is tuple
        if not isinstance(spec, Bytes) and not (listed and not (self.joins and _lists_rows(value, spec))):
            return self._whole_column(name, value, rows)
        if not isinstance(value, (list, tuple)):
            raise BadOutput(
                f"output {name!r}: got {type(value).__name__}, expected a list of {len(rows)}, "
                f"one {spec} for each item of the batch"
            )
        if len(value) != len(rows):
            raise BadOutput(
                f"output {name!r}: got a list of {len(value)}, "
                f"expected {len(rows)}: one value for each item of the batch"
                + ("" if isinstance(spec, Bytes) else " (or one array of all rows)")
            )
        optional = spec is not None and spec.optional
        out: List[Optional[Body]] = []
        if isinstance(spec, Bytes):  # as item does, without a call for each
            kind, encode = spec.content_type, spec.encode
            try:
                for one, failed in zip(value, has_fault):
                    out.append(None if failed or (one is None and optional) else Blob(kind, encode(one)))
            except ValueError as error:
                raise BadOutput(f"output {name!r} of item {len(out)}: {error}") from None
            return out
        for i, one in enumerate(value):
            absent = has_fault[i] or (one is None and optional)
            out.append(None if absent else self.item(f"output {name!r} of item {i}", name, one, rows[i]))
        return out

    def _whole_column(self, name: str, value: Any, rows: Sequence[int]) -> Column:
        """Returns one output of a batch that is one array: of all rows, or stacked if items are not joined."""
        spec = self.specs.get(name)
        total = sum(rows) if self.joins else len(rows)
        wanted: Optional[Tuple[int, ...]] = None
        if isinstance(spec, Tensor):
            wanted = spec.shape if self.joins else (-1, *spec.shape)
        elif isinstance(value, (bytes, bytearray, str)):
            kind = type(value).__name__
            raise BadOutput(f"output {name!r}: got {kind}, expected a list with one for each item of the batch")
        raw = self._encode(f"output {name!r}", value, spec if isinstance(spec, Tensor) else None, wanted)
        shape = raw.shape
        if not shape or shape[0] != total:
            of = "row" if self.joins else "item"
            raise BadOutput(
                f"output {name!r}: got shape {list(shape)}, expected {[total, *(wanted or shape)[1:]]}: "
                f"axis 0 has one for each {of} of the batch"
            )
        if wanted is not None and not shape_fits(shape[1:], wanted[1:]):
            raise BadOutput(f"output {name!r}: got shape {list(shape)}, expected {[total, *wanted[1:]]}")
        if self.joins:
            return raw
        return [Raw(one.datatype, one.shape[1:], one.data, one.size) for one in split_rows(raw, [1] * total)]


def _lists_rows(value: Sequence[Any], spec: Optional[Spec]) -> bool:
    """Reports whether a list has one element for each row, instead of one array for each item.

    The depth of the nesting decides: a row has one axis less than the tensor.
    """
    if not isinstance(spec, Tensor) or spec.variable != "exact" or not value or any(one is None for one in value):
        return False
    depth, first = 0, value
    while isinstance(first, (list, tuple)) and first:
        depth, first = depth + 1, first[0]
    return depth + (1 if isinstance(first, array) else getattr(first, "ndim", 0)) == len(spec.shape)
