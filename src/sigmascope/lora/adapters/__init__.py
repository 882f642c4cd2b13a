"""Changes of a weight that are more than one product up·down, each with its own formula for ΔW."""

from sigmascope.lora.adapters.change import Adapter, AdapterFacts, WeightChange, scale_of
from sigmascope.lora.adapters.diff import DiffChange, SetChange
from sigmascope.lora.adapters.dora import DoraChange
from sigmascope.lora.adapters.loha import LohaChange
from sigmascope.lora.adapters.lokr import LokrChange
from sigmascope.lora.adapters.tucker import TuckerChange

__all__ = [
    "Adapter",
    "AdapterFacts",
    "DiffChange",
    "DoraChange",
    "LohaChange",
    "LokrChange",
    "SetChange",
    "TuckerChange",
    "WeightChange",
    "scale_of",
]
