"""Pictures side by side, each under its name."""

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

MARGIN, CAPTION_HEIGHT = 8, 22
PAPER, INK = (250, 250, 248), (30, 30, 34)
SMALLEST_SIDE, LARGEST_SIDE = 192, 384
"""Pictures are shown with their longer side between these, in pixels."""


def contact_sheet(pictures: Sequence[tuple[str, Image.Image]], *, columns: int | None = None) -> Image.Image:
    """Return one picture that shows all, in rows, each with its caption above it.

    Args:
        pictures: Captions and pictures; all are shown at the size of the first.
        columns: Pictures in a row; all in one row by default.

    Raises:
        ValueError: There is nothing to show.
    """
    if not pictures:
        raise ValueError("a contact sheet needs at least one picture")
    columns = columns or len(pictures)
    width, height = _shown_size(pictures[0][1])
    rows = -(-len(pictures) // columns)
    cell_width, cell_height = width + MARGIN, height + CAPTION_HEIGHT + MARGIN
    sheet = Image.new("RGB", (columns * cell_width + MARGIN, rows * cell_height + MARGIN), PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=14)
    for index, (caption, picture) in enumerate(pictures):
        left = MARGIN + index % columns * cell_width
        top = MARGIN + index // columns * cell_height
        draw.text((left, top), caption, fill=INK, font=font)
        shown = picture.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
        sheet.paste(shown, (left, top + CAPTION_HEIGHT))
    return sheet


def _shown_size(picture: Image.Image) -> tuple[int, int]:
    longer = max(picture.size)
    scale = min(max(longer, SMALLEST_SIDE), LARGEST_SIDE) / longer
    return max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
