"""Calls each pipeline of mesh.yaml by the client that the test has made, and prints what comes back."""

import asyncio
import sys

import typed_mesh as typed

from stagemesh.client import AsyncMesh, Blob, InvalidArgument, Mesh, Tensor


def same(got, want):
    assert got == want, f"got {got!r}, want {want!r}"


def values(tensor):
    return tensor.tolist()


mesh = Mesh(sys.argv[1])
tensors = typed.tensors(
    mesh,
    fixed=Tensor([[1, 2, 3], [4, 5, 6]], "FP32"),
    half=Tensor([0.5], "FP16"),
    brain=Tensor([1.5], "BF16"),
    words=Tensor([[b"a", b"noun"]], "BYTES"),
)
same(values(tensors.fixed), [[1, 2, 3], [4, 5, 6]])
same(values(tensors.words), [[b"a", b"noun"]])
same((tensors.counts, tensors.answer.pipeline), (None, "tensors"))
flagged = typed.tensors(
    mesh,
    fixed=Tensor([[0.0] * 3] * 2, "FP32"),
    half=Tensor([0.5], "FP16"),
    brain=Tensor([1.5], "BF16"),
    words=Tensor([[b"a", b"noun"]], "BYTES"),
    flag=Tensor(True, "BOOL"),
)
same(values(flagged.flag), True)
try:
    typed.tensors(mesh, fixed=Tensor([1.0], "FP64"), half=None, brain=None, words=None)
    raise AssertionError("a tensor that does not fit is sent")
except InvalidArgument as fault:
    same(fault.message, "input 'fixed': got FP64[1], expected FP32[2, 3]")
same(typed.caption(mesh, caption="hello").note, "hello")
picture = typed.picture(mesh, image=Blob(b"\x89PNG", "image/png"), settings={"size": 2})
same((picture.image, picture.settings), (b"\x89PNG", {"size": 2}))
same(typed.picture(mesh, image=b"\xff\xd8").settings, None)
try:
    typed.picture(mesh, image=b"\xff\xd8", settings={"size": 0})
    raise AssertionError("the schema does not hold")
except InvalidArgument as fault:
    same(fault.reason, "SCHEMA_VIOLATION")
mixed = typed.mixed(mesh, document=[1, "two"], file=b"\x00")
same((mixed.document, mixed.file), ([1, "two"], b"\x00"))
odd = typed.odd_names_1(mesh, my_input="x", class_=Tensor(0.5, "FP64"), x_3d=Tensor([[[1, 2]]], "INT32"))
same((odd.my_input, values(odd.class_), values(odd.x_3d), odd.mesh_), ("x", 0.5, [[[1, 2]]], None))
same(typed.class_(mesh, {"anything": "goes"})["anything"], "goes")
same(typed.later(mesh, image=b"\x89PNG", note="kept").note, "kept")
both = typed.both(mesh, image=b"\x89PNG", note="beside")
same((both.thumb, both.note), (b"\x89PNG", "beside"))
same(typed.both(mesh, image=b"\x89PNG", note="beside", mode="again").note, "beside")
same(values(typed.each_row(mesh, rows=Tensor([[1, 2], [3, 4]], "FP32")).x), [[1, 2], [3, 4]])
same(values(typed.double(mesh, x=Tensor([[1, 2], [3, 4]], "FP32")).double), [[2, 4], [6, 8]])
same(values(typed.double(mesh, x=Tensor([1, 2], "FP32")).double), [2, 4])
with typed.tale_stream(mesh, text="one two") as stream:
    same([chunk.word for chunk in stream], ["one", "two"])
same((stream.answer.word, typed.tale(mesh, text="one two").word), ("two", "two"))


async def twins():
    async with AsyncMesh(sys.argv[1]) as mesh:
        same((await typed.caption_async(mesh, caption="hello")).note, "hello")
        async with typed.tale_stream_async(mesh, text="one two") as stream:
            same([chunk.word async for chunk in stream], ["one", "two"])
        same(stream.answer.word, "two")


asyncio.run(twins())
mesh.close()
print("all answered")
