"""The stages around the models: rapidocr's own steps, in three workers.

python3 -m stagemesh ocr.py:Decode, or :Crop or :Recognise, is a worker.
"""

import math
from io import BytesIO
from pathlib import Path

import cv2
import numpy as np
import onnxruntime
import rapidocr
from PIL import Image, ImageOps
from rapidocr.ch_ppocr_det.main import TextDetector
from rapidocr.ch_ppocr_det.utils import DBPostProcess, DetPreProcess
from rapidocr.utils.process_img import apply_vertical_padding, map_boxes_to_original

from stagemesh import Bytes, InvalidInput, Json, Tensor, Worker

MODELS = Path(rapidocr.__file__).parent / "models"
FORMATS = "BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP"
MAX_PIXELS = 25_000_000  # of a picture
MAX_RATIO = 100  # of its sides
MAX_LINES = 160  # of text in it; what the classifier takes of them must fit into a message
LINE_HEIGHT, CLASSIFIER_WIDTH, RECOGNISER_WIDTH = 48, 192, 320  # pixels; the last is the least

PIXELS = Tensor("UINT8", [-1, -1, 3], description="blue, green, red")
BOXES = Tensor("FP32", [-1, 4, 2], description="x and y of the corners of each line of text")
PLACE = Json(description="how the pixels were made of the picture, to find a box in it")


class Decode(Worker):
    """A picture in; its pixels out, and x, the same in the size that the detector takes."""

    batch_axis = "none"
    inputs = {"image": Bytes("image/*")}
    outputs = {"pixels": PIXELS, "place": PLACE, "x": Tensor("UINT8", [1, -1, -1, 3])}

    def setup(self, ctx):
        """Reads the package's settings; it loads no model."""
        self.ocr = rapidocr.RapidOCR()
        settings = self.ocr.cfg.Det
        self.resize = DetPreProcess(settings.limit_side_len, settings.limit_type).resize

    def predict_item(self, item):
        """Decodes a picture, turned as its camera says, and resizes it."""
        try:
            image = Image.open(BytesIO(item["image"]), formats=FORMATS)
            width, height = image.size
            if width * height > MAX_PIXELS or max(width, height) > MAX_RATIO * min(width, height):
                raise ValueError(f"it has {width}x{height} pixels, of at most {MAX_PIXELS} and sides of 1:{MAX_RATIO}")
            original = self.ocr.load_img(ImageOps.exif_transpose(image))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise InvalidInput("image", str(error)) from None
        pixels, place = self.ocr.preprocess_img(original)
        pixels, place = apply_vertical_padding(pixels, place, self.ocr.width_height_ratio, self.ocr.min_height)
        return {"pixels": pixels, "place": {"size": original.shape[:2], "steps": place}, "x": self.resize(pixels)[None]}


class Crop(Worker):
    """The detector's map in; the boxes of lines out, and x, each line as the classifier takes it."""

    batch_axis = "none"
    inputs = {"map": Tensor("FP32", [1, 1, -1, -1]), "pixels": PIXELS}
    outputs = {"boxes": BOXES, "x": Tensor("FP32", [-1, 3, LINE_HEIGHT, CLASSIFIER_WIDTH])}

    def setup(self, ctx):
        """Reads the package's settings; it loads no model."""
        self.ocr = rapidocr.RapidOCR()
        names = "thresh", "box_thresh", "max_candidates", "unclip_ratio", "use_dilation", "score_mode"
        self.find = DBPostProcess(**{name: self.ocr.cfg.Det[name] for name in names})

    def predict_item(self, item):
        """Finds lines of text, from top to bottom."""
        boxes, _ = self.find(item["map"], item["pixels"].shape[:2])
        if len(boxes) > MAX_LINES:
            raise InvalidInput("pixels", f"{len(boxes)} lines of text, more than {MAX_LINES}")
        if len(boxes) == 0:  # a stage needs a row
            empty = np.zeros((1, 3, LINE_HEIGHT, CLASSIFIER_WIDTH), np.float32)
            return {"boxes": np.empty((0, 4, 2), np.float32), "x": empty}
        boxes = TextDetector.sorted_boxes(boxes)
        lines = self.ocr.crop_text_regions(item["pixels"], boxes)
        return {"boxes": boxes, "x": np.stack([scale(line, CLASSIFIER_WIDTH) for line in lines])}


class Recognise(Worker):
    """Pixels and boxes in, and the probabilities that a line is upright or upside down; lines of text out."""

    batch_axis = "none"
    inputs = {"pixels": PIXELS, "place": PLACE, "boxes": BOXES, "turned": Tensor("FP32", [-1, 2])}
    outputs = {"lines": Json(description='from top to bottom: [{"text": ..., "score": ..., "box": [[x, y], ...]}]')}

    def setup(self, ctx):
        """Loads the recogniser; its file has the characters too."""
        self.ocr = rapidocr.RapidOCR()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # the stage has workers for the other processors
        path = str(MODELS / "PP-OCRv6_rec_small.onnx")
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        characters = self.session.get_modelmeta().custom_metadata_map["character"].splitlines()
        self.characters = ["", *characters, " "]

    def predict_item(self, item):
        """Recognises the lines of a picture, one by one: on a CPU batches of them are no faster."""
        place, boxes = item["place"], item["boxes"]
        lines = self.ocr.crop_text_regions(item["pixels"], boxes)
        if lines:
            boxes = map_boxes_to_original(boxes, place["steps"], *place["size"])
        out = []
        for line, box, (_, upside_down) in zip(lines, boxes, item["turned"]):
            if upside_down > self.ocr.cfg.Cls.cls_thresh:
                line = np.rot90(line, 2)
            text, score = self.read(line)
            if text.strip() and score >= self.ocr.text_score:
                out.append({"text": text, "score": round(score, 4), "box": box.tolist()})
        return {"lines": out}

    def read(self, line):
        """Returns the text of a line, and its score."""
        height, width = line.shape[:2]
        width = max(RECOGNISER_WIDTH, int(LINE_HEIGHT * (width / height)))
        probabilities = self.session.run(None, {"x": scale(line, width)[None]})[0][0]  # [places, characters]
        best = probabilities.argmax(axis=1)
        keep = (best != 0) & (best != np.append(0, best[:-1]))  # 0 is between characters
        if not keep.any():
            return "", 0.0
        return "".join(self.characters[i] for i in best[keep]), float(probabilities.max(axis=1)[keep].mean())


def scale(line, width):
    """Returns a line as both models take it: FP32 [3, 48, width], -1 to 1, with zeros at the right."""
    height, wide = line.shape[:2]
    wide = min(width, math.ceil(LINE_HEIGHT * (wide / height)))
    out = np.zeros((3, LINE_HEIGHT, width), np.float32)
    out[:, :, :wide] = (cv2.resize(line, (wide, LINE_HEIGHT)).transpose(2, 0, 1).astype("float32") / 255 - 0.5) / 0.5
    return out
