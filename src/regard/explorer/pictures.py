"""Built-in example pictures: letters and digits, rendered from the fonts that matplotlib brings."""

from functools import lru_cache
from importlib.util import find_spec
from io import BytesIO

from regard.explorer.subject import Picture

SIZE = 112
GLYPHS = ("A", "B", "R", "5", "8")


def picture_names() -> list[str]:
    """The names of the built-in pictures; none where matplotlib or Pillow is not installed."""
    return [f"letter {glyph}" for glyph in GLYPHS] if find_spec("matplotlib") and find_spec("PIL") else []


@lru_cache(maxsize=16)
def picture_by_name(name: str) -> Picture:
    """A built-in picture; ValueError for another name."""
    if name not in picture_names():
        raise ValueError(f"image: expected one of {', '.join(picture_names()) or 'none'}, got {name!r:.40}")
    from matplotlib import font_manager
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans"), round(0.8 * SIZE))
    picture = Image.new("L", (SIZE, SIZE), 0)
    draw = ImageDraw.Draw(picture)
    draw.text((SIZE / 2, SIZE / 2), name[-1], fill=255, font=font, anchor="mm")
    file = BytesIO()
    picture.save(file, "PNG")
    return Picture(file.getvalue())
