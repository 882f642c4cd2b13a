"""The pocket model: a trained Latent Bridge Matching model of under 8 MB that ships with the package.

`base` relights a picture with a warm light from the left; `tuned` was fine-tuned from it, every weight, to a
blue light from the right. Apart from their size they are like the full-size LBM, so everything that works on
one works on the other.
"""

from pathlib import Path

POCKET_FOLDER = Path(__file__).parent / "weights"
BASE_PATH = POCKET_FOLDER / "base.safetensors"
TUNED_PATH = POCKET_FOLDER / "tuned.safetensors"
CONFIG_PATH = POCKET_FOLDER / "config.yaml"
EXAMPLE_SCENE = 4
"""A held-out scene (training uses those from 1000 on) for the demo."""

__all__ = ["BASE_PATH", "CONFIG_PATH", "EXAMPLE_SCENE", "POCKET_FOLDER", "TUNED_PATH"]
