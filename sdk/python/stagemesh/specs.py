"""What a worker takes and gives: the values of ``inputs`` and ``outputs``."""

from __future__ import annotations

import json
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

from .datatypes import DATATYPES, MAX_RANK, pack
from .packing import is_packed, require

__all__ = ["Bytes", "Json", "Spec", "Tensor", "Text"]


class Spec:
    """One input or output; use Tensor, Bytes, Text or Json."""

    optional: bool
    description: str

    def __init__(self, optional: bool, description: str) -> None:
        kind = type(self).__name__
        if type(optional) is not bool:
            raise ValueError(f"{kind}: optional {optional!r}: use True or False")
        if not isinstance(description, str):
            raise ValueError(f"{kind}: description {description!r}: a string is wanted")
        self.optional = optional
        self.description = description

    def lacks(self, value: Any) -> bool:
        """Reports whether a value stands for none."""
        return value is None

    def wire(self, name: str) -> Dict[str, Any]:
        """Returns the spec as the host is told it."""
        out: Dict[str, Any] = {"name": name}
        if self.optional:
            out["optional"] = True
        if self.description:
            out["description"] = self.description
        return out


class Tensor(Spec):
    """A tensor: ``Tensor("FP32", [-1, 64])``.

    datatype is one of BOOL, INT8..INT64, UINT8..UINT64, FP16, BF16, FP32, FP64 and
    BYTES. shape has one extent for each axis; -1 is any, and axis 0 is rows
    (unless the worker says ``batch_axis = "none"``).

    variable is for tensors with a further axis that is -1:

    * ``"exact"``: only items of equal shapes share a batch;
    * ``"list"``: items of any extents do; ``batch[name]`` is a list, one array
      ``[rows, ...]`` for each item;
    * ``"pad"``: the same, and ``batch[name]`` is one array, filled up with the
      value pad to the longest extents, rounded up to a multiple of multiple;
      ``batch.shapes(name)`` has what each item sent.
    """

    def __init__(
        self,
        datatype: str,
        shape: Sequence[int],
        *,
        variable: str = "exact",
        pad: float = 0,
        multiple: int = 1,
        optional: bool = False,
        description: str = "",
    ) -> None:
        super().__init__(optional, description)
        if not isinstance(datatype, str) or datatype not in DATATYPES:
            raise ValueError(f"Tensor: datatype {datatype!r} is none of {', '.join(DATATYPES)}")
        if not isinstance(shape, (list, tuple)):
            raise ValueError(f"Tensor: shape {shape!r}: a list of extents is wanted, such as [-1, 64]")
        if len(shape) > MAX_RANK:
            raise ValueError(f"Tensor: {len(shape)} axes, at most {MAX_RANK} are supported")
        if any(type(extent) is not int or extent < -1 for extent in shape):
            raise ValueError(f"Tensor: shape {list(shape)}: extents are whole numbers from 0, or -1 for any")
        if variable not in ("exact", "list", "pad"):
            raise ValueError(f'Tensor: variable {variable!r}: use "exact", "list" or "pad"')
        if variable != "exact" and -1 not in shape[1:]:
            raise ValueError(
                f"Tensor: variable={variable!r} needs an axis after the first that is -1, shape is {list(shape)}"
            )
        if variable == "pad" and datatype == "BYTES":
            raise ValueError('Tensor: BYTES cannot be padded; use variable="list"')
        if type(multiple) is not int or multiple < 1:
            raise ValueError(f"Tensor: multiple {multiple!r} is not a whole number from 1")
        self.datatype = datatype
        self.shape: Tuple[int, ...] = tuple(shape)
        self.variable = variable
        self.pad = pad
        # One element of padding, as bytes.
        self.fill = b"" if datatype == "BYTES" else _fill(datatype, pad)
        self.multiple = multiple

    def wire(self, name: str) -> Dict[str, Any]:
        """Returns the spec as the host is told it."""
        out = super().wire(name)
        out["datatype"] = self.datatype
        out["shape"] = list(self.shape)
        if self.variable != "exact":
            out["variable"] = self.variable
        return out

    def fits(self, shape: Sequence[int]) -> bool:
        """Reports whether a shape is one of this tensor's."""
        if len(shape) != len(self.shape):
            return False
        return all(want in (-1, got) for want, got in zip(self.shape, shape))

    def __str__(self) -> str:
        return f"{self.datatype} {list(self.shape)}"


def _fill(datatype: str, pad: float) -> bytes:
    try:
        return pack([pad], datatype)
    except ValueError as error:
        raise ValueError(f"Tensor: pad {pad!r}: {error}") from None


class Bytes(Spec):
    """Bytes of any kind: ``Bytes("image/png", "image/jpeg")``; a bytes-like object.

    Without content types any is taken; an output is sent as the first one, or as
    application/octet-stream.
    """

    def __init__(self, *content_types: str, optional: bool = False, description: str = "") -> None:
        super().__init__(optional, description)
        for one in content_types:
            if not isinstance(one, str) or not one:
                raise ValueError(f"{type(self).__name__}: content type {one!r}: strings are wanted, not a list")
        self.content_types = content_types

    @property
    def content_type(self) -> str:
        """The content type of outputs."""
        return next((t for t in self.content_types if "*" not in t), "application/octet-stream")

    def wire(self, name: str) -> Dict[str, Any]:
        """Returns the spec as the host is told it."""
        out = super().wire(name)
        if self.content_types:
            out["content_types"] = list(self.content_types)
        return out

    def __str__(self) -> str:
        return "bytes"


class Text(Bytes):
    """UTF-8 text: a str. Bytes that are not UTF-8 are their item's fault."""

    def __init__(self, *content_types: str, optional: bool = False, description: str = "") -> None:
        super().__init__(*(content_types or ("text/plain",)), optional=optional, description=description)

    def __str__(self) -> str:
        return "str"


class Json(Bytes):
    """A JSON document: decoded for inputs, encoded for outputs. Bad JSON is its item's fault.

    None is the document null; but where it is optional, None given is no document.

    schema is a JSON Schema (2020-12) as a dict: the host holds inputs against it before
    the worker sees them, and outputs afterwards.

    Among the content types may be application/msgpack, for documents with bytes in them,
    or for speed: what comes so is unpacked, and an output whose first type it is is
    packed. That needs the package msgpack. Without the type, callers may send MessagePack
    all the same, and it comes as JSON.
    """

    def __init__(
        self,
        *content_types: str,
        schema: Optional[Mapping[str, Any]] = None,
        optional: bool = False,
        description: str = "",
    ) -> None:
        super().__init__(*(content_types or ("application/json",)), optional=optional, description=description)
        for one in self.content_types:
            if is_packed(one):
                require("Json", one)
        self.schema = _schema(schema)

    def wire(self, name: str) -> Dict[str, Any]:
        """Returns the spec as the host is told it."""
        out = super().wire(name)
        if self.schema is not None:
            out["schema"] = self.schema
        return out

    def lacks(self, value: Any) -> bool:
        """Reports whether a value stands for none."""
        return value is None and self.optional

    def __str__(self) -> str:
        return "anything that json.dumps takes"


def _schema(schema: Optional[Mapping[str, Any]]) -> Optional[Dict[str, Any]]:
    """Returns a copy of a JSON Schema as it is sent, so that later changes of it are none."""
    if schema is None:
        return None
    if not isinstance(schema, Mapping):
        raise ValueError(f"Json: schema {schema!r}: a dict is wanted, such as {{'type': 'object'}}")
    try:
        text = json.dumps(dict(schema), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"Json: schema: it is not JSON: {error}") from None
    copy: Dict[str, Any] = json.loads(text)
    return copy


def check_specs(where: str, specs: Mapping[str, Spec], rows: bool) -> None:
    """Raises ValueError where specs of a worker cannot be; where says which they are."""
    if not isinstance(specs, Mapping):
        raise ValueError(f"{where}: a dict of names and specs is wanted, got {type(specs).__name__}")
    for name, spec in specs.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"{where}: {name!r} is no name")
        if not isinstance(spec, Spec):
            raise ValueError(f"{where}[{name!r}]: Tensor, Bytes, Text or Json is wanted, got {spec!r}")
        if rows and isinstance(spec, Tensor) and spec.shape[:1] != (-1,):
            raise ValueError(
                f"{where}[{name!r}]: axis 0 is rows, so the shape begins with -1, got {list(spec.shape)}; "
                'or say batch_axis = "none" for items that are not joined'
            )
