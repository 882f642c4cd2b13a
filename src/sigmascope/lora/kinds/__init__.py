"""Kinds of change that depend on the weight they change, a file for each.

A new kind is a subclass of `BaseChange` in a file of its own, and a line in `BASE_CHANGES`. Reading, merging, converting and
attaching follow from it.
"""

from collections.abc import Mapping
from typing import Final

from sigmascope.lora.kinds.base_change import BaseChange
from sigmascope.lora.kinds.boft import BoftChange, PeftBoftChange
from sigmascope.lora.kinds.glora import GloraChange
from sigmascope.lora.kinds.hra import HraChange
from sigmascope.lora.kinds.ia3 import Ia3BiasChange, Ia3Change, PeftIa3Change
from sigmascope.lora.kinds.oft import OftChange, PeftOftChange, SplitOftChange
from sigmascope.lora.kinds.vera import VeraChange

__all__ = ["BASE_CHANGES", "NEEDS_BASE", "BaseChange"]

BASE_CHANGES: Final[Mapping[str, type[BaseChange]]] = {
    change.__name__: change
    for change in (
        OftChange,
        SplitOftChange,
        PeftOftChange,
        BoftChange,
        PeftBoftChange,
        GloraChange,
        Ia3Change,
        PeftIa3Change,
        Ia3BiasChange,
        VeraChange,
        HraChange,
    )
}
"""Every such kind, in each form in which files hold it."""

NEEDS_BASE: Final = frozenset({"dora", "set"} | {change.kind for change in BASE_CHANGES.values()})
"""Kinds of change that depend on the weight they change, as `WeightChange.kind` names them."""
