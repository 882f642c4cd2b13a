"""One layer that PEFT put around a module: which adapters are in it, and which of them act."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sigmascope.probes.adapters.applied import AdapterType, PatchState
from sigmascope.probes.adapters.guarded import attribute, number, sequence


def by_adapter(layer: object, name: str) -> dict[str, Any]:
    """What a layer keeps under `name` for each adapter: a dict, a ModuleDict or a ParameterDict."""
    held = attribute(layer, name)
    if not isinstance(held, Mapping | nn.ModuleDict | nn.ParameterDict):
        return {}
    return {str(adapter): held[adapter] for adapter in list(held.keys())}


def tensor_of(held: object) -> Tensor | None:
    """A factor, whether kept as a parameter or as the weight of a layer; it shares the host's memory."""
    found = held if isinstance(held, Tensor) else attribute(held, "weight")
    return found.detach() if isinstance(found, Tensor) else None


def number_for(layer: object, name: str, adapter: str) -> float | None:
    """A number that a layer keeps for an adapter."""
    value = by_adapter(layer, name).get(adapter)
    return None if value is None else number(value)


@dataclass(frozen=True, slots=True)
class Standing:
    """Which adapters of a layer act.

    Attributes:
        active: Those that were set active, in the order in which they run; the layer need not have them all.
        merged: Those that are in the weight, in the order in which they were merged.
        disabled: Whether adapters are switched off.
    """

    active: tuple[str, ...]
    merged: tuple[str, ...]
    disabled: bool

    def order(self, adapter: str) -> tuple[int, int]:
        """Sorting key: merged ones first, then active ones, then the others."""
        for place, names in enumerate((self.merged, self.active)):
            if adapter in names:
                return place, names.index(adapter)
        return 2, 0

    def of(self, adapter: str, strength: float | None, kind: AdapterType) -> tuple[PatchState, str]:
        """How far an adapter has come in this layer, and what that was read from.

        A DoRA of strength 0 still scales the weight to its own magnitudes.
        """
        if adapter in self.merged:
            if self.disabled:
                return "merged", "adapters are switched off: PEFT takes it out of the weight at the next call"
            return "merged", "PEFT lists it among the merged adapters"
        if self.disabled:
            return "inactive", "adapters are switched off"
        if adapter not in self.active:
            return "inactive", f"not among the active adapters: {_listed(self.active)}"
        if self.merged:
            return "inactive", f"PEFT runs none beside merged adapters: {_listed(self.merged)}"
        if strength == 0.0 and kind != "dora":
            return "inactive", "its strength is 0"
        return "lazy", "PEFT runs it beside the weight in each forward pass"


def standing_of(layer: object) -> Standing:
    """Read from the layer itself: diffusers and PEFT both set it there."""
    active = attribute(layer, "active_adapters")
    names = (active,) if isinstance(active, str) else sequence(active)
    merged = sequence(attribute(layer, "merged_adapters"))
    return Standing(
        tuple(map(str, names)), tuple(map(str, merged)), attribute(layer, "disable_adapters") is True
    )


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) if names else "none is"
