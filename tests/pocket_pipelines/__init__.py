"""Two trained pipelines of diffusers that are small enough to keep here, each with a fine-tune of another look."""

from tests.pocket_pipelines.pipelines import KINDS, LOOKS, WEIGHTS, load_pocket, new_pocket, save_pocket
from tests.pocket_pipelines.solids import prompts, solid_of

__all__ = ["KINDS", "LOOKS", "WEIGHTS", "load_pocket", "new_pocket", "prompts", "save_pocket", "solid_of"]
