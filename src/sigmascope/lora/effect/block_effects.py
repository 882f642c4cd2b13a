"""The effects of a model's weights, put together block by block."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from sigmascope.lora.effect.key_effect import Effect
from sigmascope.lora.models.block_names import block_of_module, block_position
from sigmascope.lora.norms import root_sum_square


@dataclass(frozen=True, slots=True)
class BlockEffect:
    """What is done to the changed weights of one block.

    Attributes:
        name: Such as `up_blocks.1` or `text_encoder.3`.
        keys: How many weights of it have changes.
        delta_norm: ‖ΔW‖ of those that could be measured; None where none could.
        weight_norm: ‖W‖ of all its weights that have changes; None unless all are known.
        relative_change: ‖ΔW‖ / ‖W‖ of the weights of which both are known; None without any.
        share: Of all blocks' ‖ΔW‖², 0 to 1.
        predicted: Whether any of it was calculated from the changes and not read from contents.
        unavailable: What could not be had, with the reason.
    """

    name: str
    keys: int
    delta_norm: float | None
    weight_norm: float | None
    relative_change: float | None
    share: float
    predicted: bool
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The block as JSON values."""
        return asdict(self) | {"unavailable": dict(self.unavailable)}


def by_block(effects: Mapping[str, Effect]) -> tuple[BlockEffect, ...]:
    """Put effects together, in the order in which a latent passes the blocks.

    Args:
        effects: By name of the weight in a model's state dict, or of the module in a LoRA file.
    """
    placed = sorted(
        ((block_of_module(key), effect) for key, effect in effects.items()),
        key=lambda item: block_position(item[0]),
    )
    total = root_sum_square([effect.delta_norm or 0.0 for effect in effects.values()])
    return tuple(
        _block(name, [effect for _, effect in members], total)
        for name, members in groupby(placed, key=lambda item: item[0])
    )


def _block(name: str, effects: list[Effect], total: float) -> BlockEffect:
    deltas = [effect.delta_norm for effect in effects if effect.delta_norm is not None]
    weights = [effect.weight_norm for effect in effects if effect.weight_norm is not None]
    both = [effect for effect in effects if effect.delta_norm is not None and effect.weight_norm is not None]
    delta = root_sum_square(deltas) if deltas else None
    below = root_sum_square([effect.weight_norm or 0.0 for effect in both])
    above = root_sum_square([effect.delta_norm or 0.0 for effect in both])
    return BlockEffect(
        name=name,
        keys=len(effects),
        delta_norm=delta,
        weight_norm=root_sum_square(weights) if len(weights) == len(effects) else None,
        relative_change=above / below if below > 0.0 else None,
        share=((delta or 0.0) / total) ** 2 if total > 0.0 else 0.0,
        predicted=any(effect.predicted for effect in effects),
        unavailable=_reasons(effects),
    )


def _reasons(effects: list[Effect]) -> dict[str, str]:
    """The first reason of each figure, and of how many weights it is missing."""
    found: dict[str, list[str]] = {}
    for effect in effects:
        for figure, reason in effect.unavailable.items():
            found.setdefault(figure, []).append(reason)
    return {
        figure: f"of {len(reasons)} of {len(effects)} weights: {reasons[0]}"
        for figure, reasons in found.items()
    }
