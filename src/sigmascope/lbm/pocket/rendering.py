"""A scene as two PNG files in memory. Imports neither torch nor WebDataset: each worker process loads this."""

import io
import multiprocessing
import os
import signal
import threading

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


def begin_worker() -> None:
    """Leave Ctrl-C, which reaches every process of a terminal, to the parent, and do not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    """A parent that was killed cannot end its workers, and they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
