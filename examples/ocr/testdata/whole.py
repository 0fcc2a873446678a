"""Prints the texts that rapidocr reads in pictures in one process, line by line: a JSON list for each.

Its arguments are the pictures. Lines are recognised one by one, as a mesh does unless they are equally wide.
"""

import json
import sys

from rapidocr import RapidOCR

ocr = RapidOCR(params={"Global.log_level": "error", "Rec.rec_batch_num": 1})
for path in sys.argv[1:]:
    print(json.dumps(ocr(path).txts or []))
