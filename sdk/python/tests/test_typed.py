"""typed_mesh.py, which `stagemesh client python` has made, against a small gateway and the type checker.

make python-lint checks the types of this file: it reports an ignore that hides no error, so each of them
is a promise that a wrong type is refused.
"""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any, List, Optional

import numpy as np
from numpy.typing import NDArray

from stagemesh.client import AsyncMesh, Blob, InvalidArgument, Mesh, Tensor
from stagemesh.client.typed import Part, inputs

from . import typed_mesh
from .gateway import TIMELINE, echo, event, events
from .test_client import ClientTest

FIXED = np.zeros((2, 3), np.float32)
HALF = np.zeros(2, np.float16)
BRAIN = np.array([0x3FC0], np.uint16)  # the bits of 1.5
WORDS = np.array([[b"a", b"noun"]], object)


def accepted(mesh: Mesh, path: Path) -> None:
    """Is not called: its types fit."""
    fixed: NDArray[np.float32] = typed_mesh.tensors(mesh, fixed=FIXED, half=HALF, brain=BRAIN, words=WORDS).fixed
    counts: Optional[NDArray[np.int64]] = typed_mesh.tensors(
        mesh,
        fixed=fixed,
        half=Tensor([0.5], "FP16"),
        brain=BRAIN,
        words=np.array([["a", "b"]]),
        counts=np.zeros(3, np.int64),
    ).counts
    text: str = typed_mesh.caption(mesh, caption="hello").note
    typed_mesh.caption(mesh, caption=path)
    with open(path) as file, open(path, "rb") as binary:
        typed_mesh.caption(mesh, caption=file)
        image: bytes = typed_mesh.picture(mesh, image=binary, settings={"size": 1}).image
    typed_mesh.picture(mesh, image=Blob(image, "image/png"))
    typed_mesh.mixed(mesh, document=[1, "two", None], file=b"")
    typed_mesh.mixed(mesh, document=text, file={"any": counts})
    words: List[Optional[str]] = [one.word for one in typed_mesh.tale_stream(mesh, text="a")]
    typed_mesh.class_(mesh, {"x": words})


async def refused(mesh: Mesh, twin: AsyncMesh) -> None:
    """Is not called: its types do not fit."""
    typed_mesh.caption(mesh)  # type: ignore[call-arg]
    typed_mesh.caption(mesh, caption="x", more="y")  # type: ignore[call-arg]
    typed_mesh.caption(mesh, caption=1)  # type: ignore[arg-type]
    typed_mesh.caption(mesh, "x")  # type: ignore[call-arg]
    typed_mesh.caption(twin, caption="x")  # type: ignore[arg-type]
    await typed_mesh.caption_async(mesh, caption="x")  # type: ignore[arg-type]
    typed_mesh.picture(mesh, image="7.png")  # type: ignore[arg-type]
    typed_mesh.picture(mesh, image=b"", settings="{}")  # type: ignore[arg-type]
    typed_mesh.double(mesh, x=np.zeros((1, 2)))  # type: ignore[arg-type]
    typed_mesh.double(mesh, x=[[1.0, 2.0]])  # type: ignore[arg-type]
    print(typed_mesh.double(mesh, x=np.zeros((1, 2), np.float32)).scores)  # type: ignore[attr-defined]
    number: int = typed_mesh.caption(mesh, caption="x").note  # type: ignore[assignment]
    print(number)


class TypedTest(ClientTest):
    def test_arrays_are_sent_by_their_datatypes(self) -> None:
        mesh = self.mesh(self.gateway(echo))
        got = typed_mesh.tensors(mesh, fixed=FIXED, half=HALF, brain=BRAIN, words=WORDS, flag=np.bool_(True))  # type: ignore[arg-type]
        self.assertEqual(
            [got.fixed.dtype, got.half.dtype, got.brain.tolist(), got.words.tolist(), got.counts],
            [np.float32, np.float16, BRAIN.tolist(), WORDS.tolist(), None],
        )
        assert got.flag is not None
        self.assertEqual((got.flag.shape, bool(got.flag)), ((), True))
        self.assertEqual(got.answer.timeline.total_ms, 3.2)

    def test_tensors_that_do_not_fit_are_not_sent(self) -> None:
        gateway = self.gateway(echo)
        mesh = self.mesh(gateway)
        good: Any = {"fixed": FIXED, "half": HALF, "brain": BRAIN, "words": WORDS}
        for name, value, want in [
            ("fixed", np.zeros((2, 3)), "got dtype float64, expected FP32: use .astype(numpy.float32)"),
            ("fixed", np.zeros((3, 2), np.float32), "got FP32[3, 2], expected FP32[2, 3]"),
            ("fixed", Tensor([1], "INT8"), "got INT8[1], expected FP32[2, 3]"),
            ("fixed", "text", "got str, expected a buffer or nested lists"),
            ("half", np.zeros((1, 1), np.float16), "got FP16[1, 1], expected FP16[any]"),
            ("words", np.zeros((1, 2)), "got dtype float64, expected BYTES (an array of bytes or str)"),
            ("counts", np.zeros(1, np.int32), "got dtype int32, expected INT64: use .astype(numpy.int64)"),
        ]:
            fault = self.fails(InvalidArgument, typed_mesh.tensors, mesh, **{**good, name: value})
            self.assertEqual(
                (fault.message, fault.reason, fault.violations),
                (f"input {name!r}: {want}", "INVALID_INPUT", ((f"inputs.{name}", want),)),
            )
        self.assertEqual(gateway.asked, [])

    def test_a_row_may_lack_its_axis_where_the_stage_says_so(self) -> None:
        row, two = Tensor([1, 2], "FP32"), Tensor([[1, 2], [3, 4]], "FP32")
        rows = Part("x", "FP32", (-1, 2), rows=True)
        self.assertEqual([inputs((rows,), one)["x"].shape for one in (row, two)], [(2,), (2, 2)])
        self.fails(InvalidArgument, inputs, (rows._replace(rows=False),), row)

    def test_only_optional_inputs_may_be_none(self) -> None:
        parts = (Part("document"), Part("mask", "BOOL", (-1,), optional=True))
        self.assertEqual(inputs(parts, None, None), {"document": None})
        self.fails(InvalidArgument, inputs, (parts[1]._replace(optional=False),), None)

    def test_names_of_the_mesh_are_sent(self) -> None:
        gateway = self.gateway(echo)
        got = typed_mesh.odd_names_1(
            self.mesh(gateway), my_input=io.StringIO("x"), class_=np.array(0.5), x_3d=np.zeros((1, 4, 2), np.int32)
        )
        self.assertEqual((got.my_input, got.class_.shape, got.x_3d.shape, got.mesh_), ("x", (), (1, 4, 2), None))
        self.assertEqual(gateway.asked[0].path, "/v1/pipelines/odd.names-1:infer")
        self.assertEqual([part["name"] for part in gateway.asked[0].document()["inputs"]], ["my input", "class", "3d"])

    def test_an_output_that_is_missing_is_named(self) -> None:
        mesh = self.mesh(self.gateway(echo))
        with self.assertRaisesRegex(KeyError, "no output 'note'; there are 'caption'"):
            typed_mesh.caption(mesh, caption="x")

    def test_streams_have_typed_chunks(self) -> None:
        def outputs(name: str, text: str) -> Any:
            return [{"name": name, "content_type": "text/plain", "text": text}]

        script = events(
            event("chunk", {"seq": 1, "outputs": outputs("word", "one")}),
            event("chunk", {"seq": 2, "outputs": outputs("more", "two")}),
            event("done", {"outputs": outputs("word", "two"), "timeline": TIMELINE}),
        )
        with typed_mesh.tale_stream(self.mesh(self.gateway(script)), text="x") as stream:
            self.assertIsNone(stream.answer)
            self.assertEqual([(one.word, one.chunk.seq) for one in stream], [("one", 1), (None, 2)])
        assert stream.answer is not None
        self.assertEqual(stream.answer.word, "two")

    def test_twins_for_asyncio_answer(self) -> None:
        gateway = self.gateway(echo)

        async def ask() -> None:
            async with AsyncMesh(gateway.url) as mesh:
                got = await typed_mesh.picture_async(mesh, image=b"png")
                self.assertEqual((got.image, got.settings), (b"png", None))

        asyncio.run(ask())
