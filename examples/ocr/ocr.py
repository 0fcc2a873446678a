"""The stages around the models: rapidocr's own steps, in workers.

python3 -m stagemesh ocr.py:Decode, and the like for the other classes, is a worker.
"""

import math
from io import BytesIO
from pathlib import Path

import cv2
import numpy as np
import rapidocr
from PIL import Image, ImageOps
from rapidocr.ch_ppocr_det.main import TextDetector
from rapidocr.ch_ppocr_det.utils import DBPostProcess, DetPreProcess
from rapidocr.utils.process_img import apply_vertical_padding, map_boxes_to_original

from stagemesh import Bytes, InvalidInput, Json, Tensor, Worker

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
    """The detector's map in; the boxes of lines out, their pixels, and x, each as the classifier takes it."""

    batch_axis = "none"
    inputs = {"map": Tensor("FP32", [1, 1, -1, -1]), "pixels": PIXELS}
    outputs = {
        "boxes": BOXES,
        "lines": Tensor("BYTES", [-1], description="a BMP of each line"),
        "x": Tensor("FP32", [-1, 1, 3, LINE_HEIGHT, CLASSIFIER_WIDTH], description="a batch of one for each line"),
    }

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
        if len(boxes) > 0:
            boxes = TextDetector.sorted_boxes(boxes)
        lines = self.ocr.crop_text_regions(item["pixels"], boxes)
        x = np.empty((len(lines), 1, 3, LINE_HEIGHT, CLASSIFIER_WIDTH), np.float32)
        for i, line in enumerate(lines):
            x[i, 0] = scale(line, CLASSIFIER_WIDTH)
        return {"boxes": np.float32(boxes).reshape(-1, 4, 2), "lines": bitmaps(lines), "x": x}


class Turn(Worker):
    """A line in, and the probabilities that it is upright or upside down; x, as the recogniser takes it, out."""

    batch_axis = "none"
    inputs = {"line": Tensor("BYTES", []), "turned": Tensor("FP32", [1, 2])}
    outputs = {"x": Tensor("FP32", [1, 3, LINE_HEIGHT, -1])}

    def setup(self, ctx):
        """Reads the package's settings; it loads no model."""
        self.threshold = rapidocr.RapidOCR().cfg.Cls.cls_thresh
        blank = np.zeros((LINE_HEIGHT, RECOGNISER_WIDTH, 3), np.uint8)
        self.examples = {"a blank line": {"line": bitmaps([blank]).reshape(()), "turned": [[1, 0]]}}

    def predict_item(self, item):
        """Turns a line if it is upside down, and scales it."""
        line = cv2.imdecode(np.frombuffer(item["line"].item(), np.uint8), cv2.IMREAD_COLOR)
        if item["turned"][0, 1] > self.threshold:
            line = np.rot90(line, 2)
        height, width = line.shape[:2]
        return {"x": scale(line, max(RECOGNISER_WIDTH, int(LINE_HEIGHT * (width / height))))[None]}


class Spell(Worker):
    """The likeliest character at each place of a line in; its text out, and how likely it is."""

    batch_axis = "none"
    inputs = {"characters": Tensor("INT64", [1, -1]), "likely": Tensor("FP32", [1, -1])}
    outputs = {"text": Tensor("BYTES", []), "score": Tensor("FP32", [])}

    def setup(self, ctx):
        """Reads the characters by their numbers; 0 is between characters."""
        text = Path("models", "characters.txt").read_text("utf-8")
        self.characters = ["", *text.splitlines(), " "]

    def predict_item(self, item):
        """Joins the characters of a line; one that is the same as before it is no other."""
        best, likely = item["characters"][0], item["likely"][0]
        keep = (best != 0) & (best != np.append(0, best[:-1]))
        text = "".join(self.characters[i] for i in best[keep])
        return {"text": np.array(text.encode(), object), "score": np.float32(likely[keep].mean() if text else 0)}


class Gather(Worker):
    """The texts and boxes of all lines in; those that are likely enough out."""

    batch_axis = "none"
    inputs = {"place": PLACE, "boxes": BOXES, "texts": Tensor("BYTES", [-1]), "scores": Tensor("FP32", [-1])}
    outputs = {"lines": Json(description='from top to bottom: [{"text": ..., "score": ..., "box": [[x, y], ...]}]')}

    def setup(self, ctx):
        """Reads the package's settings; it loads no model."""
        self.threshold = rapidocr.RapidOCR().text_score

    def predict_item(self, item):
        """Returns the lines, with boxes in the picture as it was sent."""
        place, boxes = item["place"], item["boxes"]
        if len(boxes) > 0:
            boxes = map_boxes_to_original(boxes, place["steps"], *place["size"])
        lines = zip(item["texts"], item["scores"], boxes)
        return {
            "lines": [
                {"text": text.decode(), "score": round(float(score), 4), "box": box.tolist()}
                for text, score, box in lines
                if text.strip() and score >= self.threshold
            ]
        }


def bitmaps(lines):
    """Returns the pixels of lines as BYTES [lines]."""
    return np.array([cv2.imencode(".bmp", line)[1].tobytes() for line in lines], object)


def scale(line, width):
    """Returns a line as both models take it: FP32 [3, 48, width], -1 to 1, with zeros at the right."""
    height, wide = line.shape[:2]
    wide = min(width, math.ceil(LINE_HEIGHT * (wide / height)))
    out = np.zeros((3, LINE_HEIGHT, width), np.float32)
    out[:, :, :wide] = (cv2.resize(line, (wide, LINE_HEIGHT)).transpose(2, 0, 1).astype("float32") / 255 - 0.5) / 0.5
    return out
