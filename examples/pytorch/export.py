"""Writes the module of worker.py as an ONNX file, which the stage kind onnx runs without torch.

python3 export.py FILE
"""

import sys

import torch
from worker import build

module = torch.nn.Sequential(build({}), torch.nn.Softmax(dim=1)).eval()
rows = {0: "rows"}  # axis 0 is dynamic: the rows of a batch
torch.onnx.export(
    module,
    (torch.zeros(2, 64),),
    sys.argv[1],
    input_names=["x"],
    output_names=["p"],
    dynamic_axes={"x": rows, "p": rows},
)
