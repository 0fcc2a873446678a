"""Tensors as numpy arrays and as memoryviews: the same bytes, and errors that name the fix."""

from __future__ import annotations

import array
import struct
import unittest
from typing import Any, Tuple

import numpy as np

from stagemesh.arrays import Arrays
from stagemesh.parts import DATATYPES, Mismatch, Raw, bytes_elements, join_rows, pack_bytes, split_rows
from stagemesh.specs import Tensor
from stagemesh.values import arrays_of

NUMPY, BUFFER = arrays_of("numpy"), arrays_of("buffer")
DTYPES = {
    "BOOL": "bool", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64", "INT8": "int8",
    "INT16": "int16", "INT32": "int32", "INT64": "int64", "FP16": "float16", "FP32": "float32", "FP64": "float64",
}  # fmt: skip


def raw_of(values: Any) -> Raw:
    a = np.asarray(values)
    name = next(n for n, d in DTYPES.items() if np.dtype(d) == a.dtype)
    data = memoryview(a.tobytes())
    return Raw(name, a.shape, data, len(data))


def bytes_of(raw: Raw) -> bytes:
    return bytes(memoryview(raw.data).cast("B")) if raw.size else b""


class NumpyTest(unittest.TestCase):
    def test_datatypes_round_trip_without_a_copy(self) -> None:
        for name, dtype in DTYPES.items():
            with self.subTest(name):
                a = (np.arange(6) % 2).astype(dtype).reshape(2, 3)
                raw = NUMPY.encode(a, Tensor(name, [-1, 3]), (-1, 3))
                self.assertEqual((raw.datatype, raw.shape, raw.size), (name, (2, 3), a.nbytes))
                self.assertIs(raw.data, a)
                self.assertEqual(NUMPY.encode(a, None, None).datatype, name)
                back = NUMPY.view(Raw(name, (2, 3), memoryview(a.tobytes()), a.nbytes))
                self.assertTrue((back == a).all() and back.dtype == a.dtype)

    def test_bfloats_are_uint16_bits(self) -> None:
        a = np.array([[0x3F80]], "uint16")
        self.assertEqual(NUMPY.encode(a, Tensor("BF16", [-1, 1]), None).datatype, "BF16")
        self.assertEqual(NUMPY.view(Raw("BF16", (1, 1), memoryview(a.tobytes()), 2)).dtype, np.uint16)

    def test_other_memory_layouts_are_copied_correctly(self) -> None:
        a = np.arange(12, dtype="float32").reshape(3, 4)
        spec = Tensor("FP32", [-1, -1])
        for name, one in (
            ("transposed", a.T),
            ("sliced", a[:, ::2]),
            ("big-endian", a.astype(">f4")),
            ("a scalar's", a[0, 0]),
        ):
            with self.subTest(name):
                raw = NUMPY.encode(one, spec, None)
                self.assertEqual(bytes_of(raw), np.ascontiguousarray(one, "<f4").tobytes())
                self.assertEqual(raw.shape, np.shape(one))

    def test_wrong_dtype_names_the_fix(self) -> None:
        with self.assertRaisesRegex(Mismatch, r"got dtype float64, expected FP32: use \.astype\(numpy\.float32\)"):
            NUMPY.encode(np.zeros(3), Tensor("FP32", [-1]), None)
        with self.assertRaisesRegex(Mismatch, "complex128"):
            NUMPY.encode(np.zeros(3, "complex"), None, None)

    def test_python_numbers_take_the_datatype_without_loss(self) -> None:
        self.assertEqual(NUMPY.encode([[1, 2.5]], Tensor("FP32", [-1, 2]), None).size, 8)
        self.assertEqual(NUMPY.encode([1, 2], Tensor("INT64", [-1]), None).size, 16)
        with self.assertRaisesRegex(Mismatch, "expected INT64"):
            NUMPY.encode([0.5], Tensor("INT64", [-1]), None)
        values: Tuple[Any, ...] = ({}, "text", [[1], [1, 2]])
        for value in values:
            with self.assertRaises(Mismatch):
                NUMPY.encode(value, Tensor("FP32", [-1]), None)

    def test_python_integers_fit_any_datatype_that_holds_them(self) -> None:
        for arrays in (NUMPY, BUFFER):
            for sign, bits in ((s, b) for s in ("INT", "UINT") for b in (8, 16, 32, 64)):
                least = -(1 << (bits - 1)) if sign == "INT" else 0
                most = least + (1 << bits) - 1
                spec = Tensor(f"{sign}{bits}", [-1])
                raw = arrays.encode([least, 1, most], spec, None)
                size, signed = bits // 8, sign == "INT"
                data = bytes_of(raw)
                got = [int.from_bytes(data[i : i + size], "little", signed=signed) for i in range(0, 3 * size, size)]
                self.assertEqual((got, raw.shape), ([least, 1, most], (3,)))
                for wrong in ([least - 1], [0, most + 1], [0.5], [None], ["1"]):
                    with self.assertRaisesRegex(Mismatch, spec.datatype):
                        arrays.encode(wrong, spec, None)
            spec = Tensor("BOOL", [-1, 2])
            self.assertEqual(bytes_of(arrays.encode([[0, 1], [True, False]], spec, None)), b"\0\1\1\0")
            self.assertEqual(bytes_of(arrays.encode([], Tensor("UINT8", [-1]), None)), b"")
            with self.assertRaisesRegex(Mismatch, "BOOL"):
                arrays.encode([[0, 2]], spec, None)
            spec = Tensor("BF16", [-1])
            self.assertEqual(bytes_of(arrays.encode([1, -2.5], spec, None)), b"\x80\x3f\x20\xc0")

    def test_values_that_are_no_array_are_named(self) -> None:
        for datatype in ("FP32", "INT8"):
            with self.assertRaisesRegex(Mismatch, f"got generator, expected {datatype}"):
                NUMPY.encode((x for x in [1]), Tensor(datatype, [-1]), None)

    def test_arrays_of_other_libraries_are_accepted(self) -> None:
        class Other:
            def __array__(self, *_: Any, **__: Any) -> Any:
                return np.ones((1, 2), "float32")

        self.assertEqual(NUMPY.encode(Other(), Tensor("FP32", [-1, 2]), None).shape, (1, 2))
        with self.assertRaisesRegex(Mismatch, "expected FP64"):
            NUMPY.encode(Other(), Tensor("FP64", [-1, 2]), None)

    def test_strings(self) -> None:
        spec = Tensor("BYTES", [-1, 2])
        for value in ([["a", b"\xff\0"]], np.array([["a", "b"]]), np.array([[b"a", "é"]], object)):
            raw = NUMPY.encode(value, spec, None)
            view = NUMPY.view(Raw("BYTES", raw.shape, memoryview(raw.data), raw.size))
            self.assertEqual(view.shape, (1, 2))
            self.assertEqual(view[0, 0], b"a")
        with self.assertRaisesRegex(Mismatch, "int"):
            NUMPY.encode(np.array([[1, 2]], object), spec, None)
        for arrays in (NUMPY, BUFFER):
            with self.assertRaisesRegex(Mismatch, "not Unicode text"):
                arrays.encode([["a", "\udcff"]], spec, None)

    def test_a_string_alone_keeps_its_zeros(self) -> None:
        for value, want in ((b"a\0\0", b"a\0\0"), (b"", b""), ("ü\0", "ü\0".encode())):
            for arrays in (NUMPY, BUFFER):
                raw = arrays.encode(value, Tensor("BYTES", []), None)
                self.assertEqual(raw.shape, (), arrays)
                self.assertEqual([bytes(e) for e in bytes_elements(raw.data)], [want], arrays)


class BufferTest(unittest.TestCase):
    def test_datatypes_round_trip(self) -> None:
        for name, datatype in DATATYPES.items():
            if name in ("BYTES", "FP16", "BF16"):
                continue
            with self.subTest(name):
                raw = BUFFER.encode([[0, 1, 1], [1, 0, 1]], Tensor(name, [-1, 3]), None)
                self.assertEqual((raw.shape, raw.size), ((2, 3), 6 * datatype.size))
                view = BUFFER.view(Raw(name, raw.shape, memoryview(raw.data), raw.size))
                self.assertEqual(view.tolist(), [[0, 1, 1], [1, 0, 1]])
                again = BUFFER.encode(view, Tensor(name, [-1, 3]), None)
                self.assertIs(again.data, view)
                self.assertEqual(BUFFER.encode(view, None, None).datatype, name)

    def test_fp16_and_bf16_match_numpy(self) -> None:
        values = [0.0, 1.0, -2.5, 65504.0]
        raw = BUFFER.encode(values, Tensor("FP16", [-1]), None)
        self.assertEqual(bytes(raw.data), np.array(values, "<f2").tobytes())
        raw = BUFFER.encode([1.0, -2.0, float("nan"), 3.14159], Tensor("BF16", [-1]), None)
        bits = struct.unpack("<4H", raw.data)
        self.assertEqual((bits[0], bits[1], bits[3]), (0x3F80, 0xC000, 0x4049))
        self.assertTrue(bits[2] & 0x7F80 == 0x7F80 and bits[2] & 0x7F)

    def test_flat_buffers_take_the_shape_of_the_spec(self) -> None:
        spec = Tensor("FP32", [-1, 3])
        for value in (
            array.array("f", range(6)),
            memoryview(array.array("f", range(6))),
            array.array("f", range(6)).tobytes(),
        ):
            self.assertEqual(BUFFER.encode(value, spec, (-1, 3)).shape, (2, 3))
        with self.assertRaisesRegex(Mismatch, r"5 elements in a flat buffer"):
            BUFFER.encode(array.array("f", range(5)), spec, (-1, 3))
        with self.assertRaisesRegex(Mismatch, "not whole elements"):
            BUFFER.encode(b"12345", spec, (-1, 3))

    def test_wrong_formats_are_refused(self) -> None:
        with self.assertRaisesRegex(Mismatch, "format 'd', expected FP32"):
            BUFFER.encode(array.array("d", [1]), Tensor("FP32", [-1]), (-1,))
        with self.assertRaisesRegex(Mismatch, "nested lists whose lengths differ at axis 1"):
            BUFFER.encode([[1], [1, 2]], Tensor("FP32", [-1, -1]), None)
        with self.assertRaisesRegex(Mismatch, "not INT8"):
            BUFFER.encode([300], Tensor("INT8", [-1]), None)
        with self.assertRaisesRegex(Mismatch, "expected a buffer"):
            BUFFER.encode({}, Tensor("INT8", [-1]), None)

    def test_empty_views_are_flat(self) -> None:
        self.assertEqual(BUFFER.view(Raw("FP32", (0, 3), memoryview(b""), 0)).tolist(), [])

    def test_strings(self) -> None:
        raw = BUFFER.encode([["a", b"bc"]], Tensor("BYTES", [-1, 2]), None)
        self.assertEqual(BUFFER.view(Raw("BYTES", (1, 2), memoryview(raw.data), raw.size)), [[b"a", b"bc"]])

    def test_views_copy_nothing(self) -> None:
        body = bytearray(struct.pack("<4f", 1, 2, 3, 4))
        view = BUFFER.view(Raw("FP32", (2, 2), memoryview(body), 16))
        body[0:4] = struct.pack("<f", 9)
        self.assertEqual(view[0, 0], 9)


class PadTest(unittest.TestCase):
    def padded(self, arrays: Arrays, stack: bool, spec: Tensor, *values: Any) -> Any:
        return arrays.pad([raw_of(np.asarray(v, "float32")) for v in values], spec, stack)

    def test_both_kinds_of_arrays_pad_alike(self) -> None:
        cases: Tuple[Any, ...] = (
            (False, Tensor("FP32", [-1, -1], variable="pad", pad=-1), [[[1, 2]], [[3, 4, 5], [6, 7, 8]]]),
            (False, Tensor("FP32", [-1, -1], variable="pad", multiple=4), [[[1, 2]], [[3, 4, 5]]]),
            (
                False,
                Tensor("FP32", [-1, -1, 2, -1], variable="pad", pad=7),
                [np.ones((1, 2, 2, 1)), np.ones((2, 1, 2, 3))],
            ),
            (True, Tensor("FP32", [-1, -1], variable="pad", pad=9), [np.ones((2, 3)), np.ones((1, 4))]),
        )
        for stack, spec, values in cases:
            with self.subTest(spec=str(spec)):
                a, b = self.padded(NUMPY, stack, spec, *values), self.padded(BUFFER, stack, spec, *values)
                self.assertEqual(a.tolist(), b.tolist())
                self.assertEqual(a.shape, b.shape)

    def test_mostly_padding_is_out_of_memory(self) -> None:
        spec = Tensor("FP32", [-1, -1, -1], variable="pad")
        long, wide = np.ones((1, 5000, 1)), np.ones((1, 1, 5000))
        for arrays in (NUMPY, BUFFER):
            with self.subTest(arrays=arrays.name):
                with self.assertRaisesRegex(MemoryError, r"40000 bytes padded to \[2, 5000, 5000\]"):
                    self.padded(arrays, False, spec, long, wide)
                with self.assertRaises(MemoryError):
                    self.padded(arrays, False, Tensor("FP32", [-1, -1], variable="pad", multiple=1 << 30), [[1]])
                self.assertEqual(len(self.padded(arrays, False, spec, long, long)), 2)

    def test_padding_covers_variable_axes_only(self) -> None:
        spec = Tensor("FP32", [-1, -1], variable="pad", pad=-1, multiple=4)
        got = self.padded(NUMPY, False, spec, [[1, 2]], [[3, 4, 5]])
        self.assertEqual(got.tolist(), [[1, 2, -1, -1], [3, 4, 5, -1]])


class RowsTest(unittest.TestCase):
    def test_rows_are_split_and_joined(self) -> None:
        raw = raw_of(np.arange(12, dtype="int32").reshape(6, 2))
        pieces = split_rows(raw, [1, 3, 2])
        self.assertEqual([p.shape for p in pieces], [(1, 2), (3, 2), (2, 2)])
        self.assertEqual(bytes_of(join_rows(pieces)), bytes_of(raw))

    def test_rows_of_strings_are_split(self) -> None:
        data = pack_bytes([b"a", b"bb", b"", b"dddd"])
        pieces = split_rows(Raw("BYTES", (2, 2), memoryview(data), len(data)), [1, 1])
        self.assertEqual([BUFFER.view(p) for p in pieces], [[[b"a", b"bb"]], [[b"", b"dddd"]]])


class ChoiceTest(unittest.TestCase):
    def test_unknown_arrays_are_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, 'use "numpy" or "buffer"'):
            arrays_of("torch")


if __name__ == "__main__":
    unittest.main()
