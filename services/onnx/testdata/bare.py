"""Runs a model in a loop, as a program without a mesh does: bare.py MODEL ROWS.

For each line of standard input, a number of runs, it writes a line when they are done.
"""

import os
import sys

import numpy as np
import onnxruntime as ort

settings = ort.SessionOptions()
settings.intra_op_num_threads = len(os.sched_getaffinity(0))
session = ort.InferenceSession(sys.argv[1], settings, providers=["CPUExecutionProvider"])
(given,) = session.get_inputs()
x = np.zeros([int(sys.argv[2]), *given.shape[1:]], np.float32)
for line in sys.stdin:
    for _ in range(int(line)):
        session.run(None, {given.name: x})
    print("done", flush=True)
