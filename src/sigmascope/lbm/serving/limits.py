"""How much one request may ask for, so that a mistake or a hostile picture does not take the machine down."""

from dataclasses import dataclass
from typing import Final

MIB: Final = 1024**2

LORA_SCALES: Final = (0.0, 2.0)
"""Range of the strength (SPEC section 7)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the page.

    Attributes:
        upload_bytes: Of one picture as sent.
        uploads: Pictures that are being sent at once, each held in memory until it is whole.
        body_seconds: In which a request's body must be here.
        picture_pixels: Of one picture when decoded: a few kilobytes may hold gigabytes.
        working_pixels: At which the model works; its memory grows with this.
        steps: Of the bridge.
        waiting: Requests in line, over all clients.
        kept_pictures_bytes: Decoded pictures that are kept, the oldest forgotten first.
        kept_results_bytes: Results that are kept, likewise.
    """

    upload_bytes: int = 50 * MIB
    uploads: int = 16
    body_seconds: float = 120.0
    picture_pixels: int = 50_000_000
    working_pixels: int = 2048 * 2048
    steps: int = 100
    waiting: int = 32
    kept_pictures_bytes: int = 384 * MIB
    kept_results_bytes: int = 256 * MIB
