"""What ComfyUI's `ModelPatcher` and `CLIP` hold, in every shape that their versions have given it.

Nothing of ComfyUI is imported: its objects are known by what they have. Nothing is called that could load,
merge, move or wrap anything, and no mark is left on a patcher, whose clones compare their attributes.
"""

from sigmascope.probes.adapters.comfyui.patcher import is_comfyui, original_weight, weights_of
from sigmascope.probes.adapters.comfyui.reader import read_patches

__all__ = ["is_comfyui", "original_weight", "read_patches", "weights_of"]
