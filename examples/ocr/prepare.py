"""Writes the models that stages run, from those that the package rapidocr has inside.

    python3 prepare.py FOLDER

The detector gets the arithmetic of its input: it takes pixels then, a quarter of the bytes on
their way to it. The recogniser gets the first step of what follows it: it returns the likeliest
character of each place then, 12 bytes instead of 75,000. The classifier is as it was.
"""

import shutil
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper, load, numpy_helper, save

DETECTOR, CLASSIFIER, RECOGNISER = (
    "PP-OCRv6_det_small.onnx",
    "ch_ppocr_mobile_v2.0_cls_mobile.onnx",
    "PP-OCRv6_rec_small.onnx",
)


def main(folder: Path) -> None:
    """Writes detect.onnx, classify.onnx and recognise.onnx, and characters.txt, one a line."""
    models = files("rapidocr") / "models"
    folder.mkdir(exist_ok=True)
    shutil.copyfile(str(models / CLASSIFIER), folder / "classify.onnx")
    save(with_input(load(str(models / DETECTOR))), folder / "detect.onnx")
    recogniser = load(str(models / RECOGNISER))
    (folder / "characters.txt").write_text({p.key: p.value for p in recogniser.metadata_props}["character"], "utf-8")
    save(with_output(recogniser), folder / "recognise.onnx")


def with_input(model: ModelProto) -> ModelProto:
    """Puts before the model how its x, FP32 [rows, 3, height, width] from -1 to 1, is made of pixels."""
    graph = model.graph
    for name, value in ("scale", 1 / 255), ("half", 0.5):
        graph.initializer.append(numpy_helper.from_array(np.float32(value), name))
    steps = [
        helper.make_node("Cast", ["pixels"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["floats", "scale"], ["scaled"]),
        helper.make_node("Sub", ["scaled", "half"], ["centred"]),
        helper.make_node("Div", ["centred", "half"], ["values"]),
        helper.make_node("Transpose", ["values"], [graph.input[0].name], perm=[0, 3, 1, 2]),
    ]
    nodes = [*steps, *graph.node]
    del graph.node[:], graph.input[:]
    graph.node.extend(nodes)
    graph.input.append(helper.make_tensor_value_info("pixels", TensorProto.UINT8, ["rows", "height", "width", 3]))
    return model


def with_output(model: ModelProto) -> ModelProto:
    """Puts after the model which character is the likeliest at each place, and how likely it is."""
    graph = model.graph
    probabilities = graph.output[0].name  # [rows, places, characters]
    graph.node.append(helper.make_node("ArgMax", [probabilities], ["characters"], axis=2, keepdims=0))
    graph.node.append(helper.make_node("ReduceMax", [probabilities], ["likely"], axes=[2], keepdims=0))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("characters", TensorProto.INT64, ["rows", "places"]))
    graph.output.append(helper.make_tensor_value_info("likely", TensorProto.FLOAT, ["rows", "places"]))
    return model


if __name__ == "__main__":
    main(Path(sys.argv[1]))
