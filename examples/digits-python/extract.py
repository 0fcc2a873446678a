"""Writes weights.npz: the weights of the network in ../digits/digits.onnx.

    python3 extract.py

An ONNX file is a protobuf message, of which this needs the initializers alone:
ModelProto.graph is field 7, GraphProto.initializer field 5; of a TensorProto dims
is field 1, data_type 2 (1 is float), name 8 and raw_data 9
(https://github.com/onnx/onnx/blob/main/onnx/onnx.proto).
"""

from __future__ import annotations

from pathlib import Path
from typing import Dict, Iterator, Tuple, Union

import numpy as np

HERE = Path(__file__).resolve().parent


def fields(data: bytes) -> Iterator[Tuple[int, Union[int, bytes]]]:
    """Yields number and value of each field of a protobuf message."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            value, at = varint(data, at)
            yield key >> 3, value
            continue
        if key & 7 == 2:
            size, at = varint(data, at)
        else:
            size = {1: 8, 5: 4}[key & 7]
        yield key >> 3, data[at : at + size]
        at += size


def varint(data: bytes, at: int) -> Tuple[int, int]:
    """Returns a number and where it ends."""
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return value, at


def initializers(model: bytes) -> Dict[str, np.ndarray]:
    """Returns the constant tensors of an ONNX model by name."""
    out = {}
    for number, graph in fields(model):
        if number != 7 or not isinstance(graph, bytes):
            continue
        for number, tensor in fields(graph):
            if number == 5 and isinstance(tensor, bytes):
                name, array = decode(tensor)
                out[name] = array
    return out


def decode(tensor: bytes) -> Tuple[str, np.ndarray]:
    """Returns name and values of a TensorProto of floats."""
    name, dims, raw, kind = "", [], b"", 0
    for number, value in fields(tensor):
        if number == 1 and isinstance(value, bytes):
            at = 0
            while at < len(value):
                extent, at = varint(value, at)
                dims.append(extent)
        elif number == 1:
            dims.append(value)
        elif number == 2:
            kind = value
        elif number == 8 and isinstance(value, bytes):
            name = value.decode()
        elif number == 9 and isinstance(value, bytes):
            raw = value
    if kind != 1 or not raw:
        raise SystemExit(f"initializer {name!r} is not raw floats")
    return name, np.frombuffer(raw, "<f4").reshape(dims)


if __name__ == "__main__":
    found = initializers((HERE.parent / "digits" / "digits.onnx").read_bytes())
    np.savez(HERE / "weights.npz", **found)
    print({name: array.shape for name, array in found.items()})
