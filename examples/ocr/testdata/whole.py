"""Prints what rapidocr reads in pictures in one process: for each a JSON list of texts and scores.

Its arguments are the pictures. Lines are recognised one by one, as a mesh does unless they are equally wide.
"""

import json
import sys

from rapidocr import RapidOCR

ocr = RapidOCR(params={"Global.log_level": "error", "Rec.rec_batch_num": 1})
for path in sys.argv[1:]:
    read = ocr(path)
    print(json.dumps(list(zip(read.txts or (), read.scores or ()))))
