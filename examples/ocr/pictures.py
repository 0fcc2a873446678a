"""Writes the pictures, and what stands in them to testdata/texts.json.

    python3 pictures.py

It needs Pillow, and DejaVu's fonts (Debian: apt-get install fonts-dejavu-core).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Dict, List, Tuple

from PIL import Image, ImageDraw, ImageFilter, ImageFont

HERE = Path(__file__).resolve().parent
FONTS = Path("/usr/share/fonts/truetype/dejavu")

Place = Tuple[int, int]
texts: Dict[str, List[str]] = {}


def draw(size: Place, paper: str, ink: str, font: str, height: int, lines: Dict[Place, str]) -> Image.Image:
    """Returns a picture with lines of text at their places, left and top in pixels."""
    image = Image.new("RGB", size, paper)
    face = ImageFont.truetype(str(FONTS / f"DejaVu{font}.ttf"), height)
    for place, text in lines.items():
        ImageDraw.Draw(image).text(place, text, ink, face)
    return image


def below(left: int, top: int, step: int, *lines: str) -> Dict[Place, str]:
    """Returns lines below each other."""
    return {(left, top + i * step): line for i, line in enumerate(lines)}


def save(name: str, image: Image.Image, lines: Dict[Place, str], **options: int) -> None:
    """Writes a picture; its lines are in the order in which they are read."""
    image.save(HERE / "pictures" / name, optimize=True, **options)
    texts[name] = list(lines.values())


def main() -> None:
    """Makes all pictures."""
    lines = below(30, 30, 64, "CORNER BAKERY", "2 x Rye bread 7.80", "1 x Coffee 2.90", "TOTAL 10.70", "Thank you!")
    save("receipt.png", draw((440, 380), "white", "black", "SansMono", 32, lines), lines)

    lines = below(40, 90, 140, "PLATFORM 9", "Trains to Hull")
    save("sign.png", draw((560, 420), "#103a7a", "white", "Sans-Bold", 64, lines), lines)

    lines = below(50, 60, 90, "This side up", "Handle with care", "Lot 2291-B")
    upside_down = dict(reversed(lines.items()))
    save("upside-down.png", draw((480, 380), "#d9b98a", "#202020", "Sans", 44, lines).rotate(180), upside_down)

    lines = below(30, 30, 54, *(
        "A stage is a named function with queues",
        "of its own; a host is a process that",
        "serves it. A pipeline is a list of steps.",
        "Requests wait in the queue of a stage",
        "until a host has room, and run together.",
        "Whoever has more stages than processors",
        "learns which of them is the slowest.",
    ))  # fmt: skip
    save("page.png", draw((560, 430), "#fdfbf3", "#222222", "Serif", 24, lines), lines)

    lines = {}
    for name, price in ("Soup", "4.20"), ("Salad", "6.50"), ("Fish", "14.00"), ("Cake", "3.90"):
        top = 50 + 38 * len(lines)
        lines.update({(40, top): name, (320, top): price})
    save("menu.png", draw((460, 380), "#2b2b2b", "#f2e3b3", "Serif", 40, lines), lines)

    lines = below(50, 60, 100, "Meeting moved", "Room 214, 3 pm", "Bring the plans")
    note = draw((500, 400), "#fff3a0", "#1b2a6b", "Sans", 46, lines)
    note = note.rotate(7, Image.Resampling.BICUBIC, expand=True, fillcolor="#6b5a48")
    save("note.jpg", note.filter(ImageFilter.GaussianBlur(1.2)), lines, quality=60)

    lines = below(60, 60, 110, "NORTH GATE", "Open 8 to 18", "No dogs")
    board = draw((560, 440), "#e9ece4", "#7a1212", "Sans-Bold", 52, lines)
    corners = (-40, -30, -15, 470, 600, 420, 545, 20)  # as seen from the left
    board = board.transform((560, 440), Image.Transform.QUAD, corners, Image.Resampling.BICUBIC, fillcolor="#8a9a80")
    noise = Image.effect_noise(board.size, 40).convert("RGB")
    save("board.jpg", Image.blend(board, noise, 0.15), lines, quality=70)

    lines = {(8, 4): "48-1107"}
    save("ticket.png", draw((84, 28), "white", "black", "SansMono", 16, lines), lines)

    lines = below(100, 90, 300, "SPRING CONCERT, Sunday 14 May", "Town Hall, 19:30, doors at 19:00")
    save("poster.jpg", draw((2040, 700), "#7a2048", "#ffe9d0", "Serif-Bold", 90, lines), lines, quality=40)

    save("blank.png", Image.new("RGB", (240, 240), "#cccccc"), {})
    (HERE / "testdata" / "texts.json").write_text(json.dumps(texts, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
