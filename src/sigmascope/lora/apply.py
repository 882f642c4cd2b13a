"""Ways to apply a LoRA to a model: hot (`attach_lora`) or merged (`merge_lora`)."""

from sigmascope.lora.applying.merged_lora import MergedLora, merge_lora
from sigmascope.lora.attach import AttachedLora, attach_lora
from sigmascope.lora.matching import LoraTarget, match_modules

__all__ = ["AttachedLora", "LoraTarget", "MergedLora", "attach_lora", "match_modules", "merge_lora"]
