"""What the changes that are on a model do to its weights: how much, where, and by how much of each weight."""

from sigmascope.lora.effect.block_effects import BlockEffect, by_block
from sigmascope.lora.effect.key_effect import Effect, effect_of, measured_effect

__all__ = ["BlockEffect", "Effect", "by_block", "effect_of", "measured_effect"]
