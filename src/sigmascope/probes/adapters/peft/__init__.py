"""What PEFT injected into a model, and with it diffusers' LoRA loaders: which adapters are on which weights, and act.

PEFT is not imported: its layers are known by what they hold. Modules are walked by what is registered on them and
not by `named_modules` or `state_dict`, which PEFT's attention layer answers by registering its weights anew.
"""

from sigmascope.probes.adapters.peft.reader import is_peft, read_adapters
from sigmascope.probes.adapters.peft.walk import base_weight, base_weights

__all__ = ["base_weight", "base_weights", "is_peft", "read_adapters"]
