"""Specs: the values of ``inputs`` and ``outputs``, and how blobs become Python values and back.

MessagePack is read and written by the package msgpack, where that is installed.
"""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple, Union

from .frames import Buffer, decode, encode_unicode
from .parts import DATATYPES, MAX_RANK, pack


class Spec:
    """One input or output; use Tensor, Bytes, Text or Json."""

    optional: bool
    description: str

    def __init__(self, optional: bool, description: str) -> None:
        kind = type(self).__name__
        if type(optional) is not bool:
            raise ValueError(f"{kind}: optional {optional!r}: use True or False")
        if not isinstance(description, str):
            raise ValueError(f"{kind}: description {description!r}: expected a string")
        self.optional = optional
        self.description = description

    def lacks(self, value: Any) -> bool:
        """Reports whether a value means that the item has none."""
        return value is None

    def wire(self, name: str) -> Dict[str, Any]:
        """Returns the part spec of the protocol, without keys that have their defaults."""
        out: Dict[str, Any] = {"name": name}
        if self.optional:
            out["optional"] = True
        if self.description:
            out["description"] = self.description
        return out


def shape_fits(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Reports whether a shape is the wanted one, in which -1 is any extent."""
    return len(shape) == len(wanted) and all(want in (-1, got) for want, got in zip(wanted, shape))


class Tensor(Spec):
    """A tensor: ``Tensor("FP32", [-1, 64])``.

    datatype is one of BOOL, INT8..INT64, UINT8..UINT64, FP16, BF16, FP32, FP64 and
    BYTES. shape has one extent for each axis; -1 is any, and axis 0 is rows
    (unless the worker declares ``batch_axis = "none"``).

    variable is for tensors with a further axis that is -1:

    * ``"exact"``: only items of equal shapes share a batch;
    * ``"list"``: items of any extents share one; ``batch[name]`` is a list, one array
      ``[rows, ...]`` for each item;
    * ``"pad"``: the same, and ``batch[name]`` is one array, filled with the value pad
      up to the longest extents, rounded up to a multiple of multiple;
      ``batch.shapes(name)`` has the shape that each item sent.
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
            raise ValueError(f"Tensor: unknown datatype {datatype!r}, expected one of {', '.join(DATATYPES)}")
        if not isinstance(shape, (list, tuple)):
            raise ValueError(f"Tensor: shape {shape!r}: expected a list of extents, such as [-1, 64]")
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
        try:
            self.fill = b"" if datatype == "BYTES" else pack([pad], datatype)  # one element of padding
        except ValueError as error:
            raise ValueError(f"Tensor: pad {pad!r}: {error}") from None
        self.multiple = multiple

    def wire(self, name: str) -> Dict[str, Any]:
        """Returns the part spec of the protocol, without keys that have their defaults."""
        out = {**super().wire(name), "datatype": self.datatype, "shape": list(self.shape)}
        if self.variable != "exact":
            out["variable"] = self.variable
        if self.variable == "pad" and self.multiple > 1:
            out["multiple"] = self.multiple
        return out

    def fits(self, shape: Sequence[int]) -> bool:
        """Reports whether a shape is one that this spec allows."""
        return shape_fits(shape, self.shape)

    def __str__(self) -> str:
        return f"{self.datatype} {list(self.shape)}"


class Bytes(Spec):
    """Bytes of any kind: ``Bytes("image/png", "image/jpeg")``; a bytes-like object.

    Without content types any is accepted; an output is sent as the first one, or as
    application/octet-stream.
    """

    def __init__(self, *content_types: str, optional: bool = False, description: str = "") -> None:
        super().__init__(optional, description)
        for one in content_types:
            if not isinstance(one, str) or not one:
                raise ValueError(f"{type(self).__name__}: content type {one!r}: expected strings, not a list")
        self.content_types = content_types
        self.content_type = next((t for t in content_types if "*" not in t), "application/octet-stream")  # of outputs

    def wire(self, name: str) -> Dict[str, Any]:
        """Returns the part spec of the protocol, without keys that have their defaults."""
        out = super().wire(name)
        if self.content_types:
            out["content_types"] = list(self.content_types)
        return out

    def decode(self, data: bytes, content_type: str) -> Any:
        """Returns the value of a blob; raises ValueError such as "is not UTF-8: byte 3"."""
        return data

    def encode(self, value: Any) -> Buffer:
        """Returns a value as the bytes of a blob; raises ValueError such as "got int, expected bytes"."""
        try:
            return value if isinstance(value, (bytes, bytearray)) else memoryview(value).cast("B")
        except TypeError:
            raise ValueError(f"got {type(value).__name__}, expected {self}") from None

    def __str__(self) -> str:
        return "bytes"


class Text(Bytes):
    """UTF-8 text: a str. Bytes that are not UTF-8 are a fault of their item."""

    def __init__(self, *content_types: str, optional: bool = False, description: str = "") -> None:
        super().__init__(*(content_types or ("text/plain",)), optional=optional, description=description)

    def decode(self, data: bytes, content_type: str) -> Any:
        """Returns the text of a blob; raises ValueError."""
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"is not UTF-8: byte {error.start}") from None

    def encode(self, value: Any) -> Buffer:
        """Returns a text as the bytes of a blob; raises ValueError."""
        if not isinstance(value, str):
            raise ValueError(f"got {type(value).__name__}, expected {self}")
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"got a str that is not Unicode text: {error}") from None

    def __str__(self) -> str:
        return "str"


class Json(Bytes):
    """A JSON document: decoded for inputs, encoded for outputs. Invalid JSON is a fault of its item.

    None is the document null; but if the spec is optional, None as an output is not a document.

    schema is a JSON Schema (2020-12) as a dict: the host validates inputs against it before
    the worker gets them, and outputs afterwards.

    The content types may include application/msgpack, for documents with bytes in them, or
    for speed: such inputs are unpacked, and an output is packed if its first type is that.
    This needs the package msgpack. Without the type, callers may still send MessagePack,
    and the worker gets it as JSON.
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
                _require_msgpack(one)
        self._packs = is_packed(self.content_type)
        self.schema = _copy_schema(schema)

    def wire(self, name: str) -> Dict[str, Any]:
        """Returns the part spec of the protocol, without keys that have their defaults."""
        out = super().wire(name)
        if self.schema is not None:
            out["schema"] = self.schema
        return out

    def lacks(self, value: Any) -> bool:
        """Reports whether a value means that the item has none."""
        return value is None and self.optional

    def decode(self, data: bytes, content_type: str) -> Any:
        """Returns the document of a blob; raises ValueError."""
        if is_packed(content_type):
            try:
                return unpack(data)
            except ValueError as error:
                raise ValueError(f"is not MessagePack: {error}") from None
        try:
            return decode(str(data, "utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"is not UTF-8: byte {error.start}") from None
        except RecursionError:
            raise ValueError("is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"is not JSON: {error}") from None

    def encode(self, value: Any) -> Buffer:
        """Returns a document as the bytes of a blob; raises ValueError."""
        try:
            if self._packs:
                return import_module("msgpack").packb(value, use_bin_type=True)
            return encode_unicode(value).encode()
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            form = "MessagePack" if self._packs else "JSON"
            raise ValueError(f"got {type(value).__name__}, which is not {form}: {error}") from None

    def join(self, documents: int, joined: Union[bytes, bytearray], content_type: str) -> bytes:
        """Returns a list of encoded documents as one document; in JSON, commas separate the joined bytes."""
        if not is_packed(content_type):
            return b"[" + joined + b"]"
        if documents < 1 << 4:
            return bytes([0x90 | documents]) + joined
        if documents < 1 << 16:
            return b"\xdc" + documents.to_bytes(2, "big") + joined
        return b"\xdd" + documents.to_bytes(4, "big") + joined

    def __str__(self) -> str:
        return "anything that json.dumps takes"


def _copy_schema(schema: Optional[Mapping[str, Any]]) -> Optional[Dict[str, Any]]:
    """Returns a copy of a JSON Schema, so that later changes have no effect; raises ValueError."""
    if schema is None:
        return None
    if not isinstance(schema, Mapping):
        raise ValueError(f"Json: schema {schema!r}: expected a dict, such as {{'type': 'object'}}")
    try:
        copy: Dict[str, Any] = json.loads(json.dumps(dict(schema), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"Json: schema: it is not JSON: {error}") from None
    return copy


# --- MessagePack -----------------------------------------------------------------


def is_packed(content_type: str) -> bool:
    """Reports whether a content type is MessagePack."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind in ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")


def _require_msgpack(content_type: str) -> None:
    try:
        import_module("msgpack")
    except ImportError:
        raise ValueError(
            f"Json: {content_type} needs the package msgpack, which is not installed here. Install it, or leave the"
            " type out: what callers send as MessagePack comes as JSON to a worker that takes that"
        ) from None


def unpack(data: bytes) -> Any:
    """Returns a MessagePack document; raises ValueError if the bytes are none."""
    msgpack = import_module("msgpack")
    try:
        return msgpack.unpackb(data, raw=False)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except msgpack.UnpackException as error:  # some are not ValueErrors, or have no text
        raise ValueError(str(error) or "it is malformed") from None


class Parameter:
    """A parameter that the worker reads: ``Parameter(int, "how many words follow")``.

    kind is bool, int, float or str; a caller's text for a bool or a number is refused.
    """

    def __init__(self, kind: type, description: str = "") -> None:
        if kind not in _KINDS:
            raise ValueError(f"Parameter: kind {kind!r}: use bool, int, float or str")
        if not isinstance(description, str):
            raise ValueError(f"Parameter: description {description!r}: expected a string")
        self.kind = kind
        self.description = description

    def wire(self, name: str) -> Dict[str, Any]:
        """Returns the parameter spec of the protocol."""
        out = {"name": name, "type": _KINDS[self.kind]}
        return {**out, "description": self.description} if self.description else out


_KINDS: Dict[type, str] = {bool: "bool", int: "int", float: "float", str: "string"}


# --- declarations ------------------------------------------------------------------


def check_specs(where: str, specs: Mapping[str, Spec], joins: bool) -> None:
    """Raises ValueError if declared specs are invalid; joins means that axis 0 of tensors is rows."""
    if not isinstance(specs, Mapping):
        raise ValueError(f"{where}: expected a dict of names and specs, got {type(specs).__name__}")
    for name, spec in specs.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"{where}: {name!r} is not a name")
        if not isinstance(spec, Spec):
            raise ValueError(f"{where}[{name!r}]: expected Tensor, Bytes, Text or Json, got {spec!r}")
        if joins and isinstance(spec, Tensor) and spec.shape[:1] != (-1,):
            raise ValueError(
                f"{where}[{name!r}]: axis 0 is rows, so the shape begins with -1, got {list(spec.shape)}; "
                'or set batch_axis = "none" for items that are not joined'
            )


def check_parameters(where: str, parameters: Optional[Mapping[str, Parameter]]) -> None:
    """Raises ValueError if declared parameters are invalid."""
    if parameters is None:
        return
    if not isinstance(parameters, Mapping):
        raise ValueError(f"{where}: expected a dict of names and Parameter, got {type(parameters).__name__}")
    for name, parameter in parameters.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"{where}: {name!r} is not a name")
        if not isinstance(parameter, Parameter):
            raise ValueError(f"{where}[{name!r}]: expected Parameter, got {parameter!r}")


def spec_of(entry: Mapping[str, Any]) -> Spec:
    """Returns the spec that ``wire`` has written; padding is not part of it."""
    common = {"optional": entry.get("optional", False), "description": entry.get("description", "")}
    if "datatype" in entry:
        return Tensor(entry["datatype"], entry["shape"], variable=entry.get("variable", "exact"), **common)
    types = tuple(entry.get("content_types", ()))
    if types and all(t.startswith("text/") for t in types):
        return Text(*types, **common)
    if types and all(t == "application/json" or t.endswith("+json") or is_packed(t) for t in types):
        return Json(*types, schema=entry.get("schema"), **common)
    return Bytes(*types, **common)
