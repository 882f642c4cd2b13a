"""A scene as two PNG files in memory. Imports neither torch nor WebDataset: each worker process loads this."""

import io
import signal

from PIL import Image

from sigmascope.lbm.pocket.scenes import Light, relighting_pair


def render_pair(number: int, light: Light, size: int) -> tuple[str, dict[str, bytes]]:
    """Render a scene.

    Args:
        number: Of the scene.
        light: Of the target.
        size: Height and width in pixels.

    Returns:
        The scene's name, and PNG files as `source.png` (soft light) and `target.png`.
    """
    source, target = relighting_pair(number, light, size)
    members = {"source.png": source, "target.png": target}
    return f"scene-{number:06d}", {name: _png(Image.fromarray(pixels)) for name, pixels in members.items()}


def leave_ctrl_c_to_the_parent() -> None:
    """Begin a worker: Ctrl-C reaches every process of the terminal, and the parent ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
