"""Writes the models that stages run, from those that the package rapidocr has inside.

    python3 prepare.py FOLDER

The detector gets the arithmetic of its input: it takes pixels then, a quarter of the bytes on
their way to it. The classifier is as it was.
"""

import shutil
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, load, numpy_helper, save

DETECTOR, CLASSIFIER = "PP-OCRv6_det_small.onnx", "ch_ppocr_mobile_v2.0_cls_mobile.onnx"


def main(folder: Path) -> None:
    """Writes detect.onnx and classify.onnx."""
    models = files("rapidocr") / "models"
    folder.mkdir(exist_ok=True)
    shutil.copyfile(str(models / CLASSIFIER), folder / "classify.onnx")

    model = load(str(models / DETECTOR))
    graph = model.graph
    x = graph.input[0].name  # FP32 [rows, 3, height, width], -1 to 1
    for name, value in ("scale", 1 / 255), ("half", 0.5):
        graph.initializer.append(numpy_helper.from_array(np.float32(value), name))
    steps = [
        helper.make_node("Cast", ["pixels"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["floats", "scale"], ["scaled"]),
        helper.make_node("Sub", ["scaled", "half"], ["centred"]),
        helper.make_node("Div", ["centred", "half"], ["values"]),
        helper.make_node("Transpose", ["values"], [x], perm=[0, 3, 1, 2]),
    ]
    nodes = [*steps, *graph.node]
    del graph.node[:], graph.input[:]
    graph.node.extend(nodes)
    shape = ["rows", "height", "width", 3]
    graph.input.append(helper.make_tensor_value_info("pixels", TensorProto.UINT8, shape))
    save(model, folder / "detect.onnx")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
