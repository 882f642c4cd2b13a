"""int8 ConvRot (arXiv 2512.03673): rows rotated in groups by a Hadamard matrix, with a scale for each row."""

from typing import Any, Final

import torch
from torch import Tensor

from sigmascope.checkpoints.checkpoint import shortened
from sigmascope.checkpoints.kinds import comfy_kitchen
from sigmascope.checkpoints.kinds.kind import INT8, REAL, Config, Kind, Scale, Scales, Shape, per_row
from sigmascope.checkpoints.rounding import Spread

_TITLE: Final = "int8 ConvRot"
_LAYOUT: Final = "TensorWiseINT8Layout"
_SEED: Final = 1  # of the draw; 0 is rounding to the nearest


def _named(name: str, config: Config) -> Config | None:
    """ComfyUI names the format of plain int8, with ConvRot beside it."""
    params = config.get("params")
    both = {**(params if isinstance(params, dict) else {}), **config}
    if name != "int8_tensorwise" or not both.get("convrot"):
        return None
    return {"convrot_groupsize": both.get("convrot_groupsize", 256)}


def _params(config: Config) -> dict[str, Any]:
    return {"is_weight": True, "convrot": True, "convrot_groupsize": config["convrot_groupsize"]}


def _numbers(codes: Tensor, scales: Scales, config: Config) -> Tensor:
    scale = scales["scale"].to(torch.float32).reshape(-1, 1)
    return comfy_kitchen.dequantised(_LAYOUT, codes, codes.shape[1], scale=scale, **_params(config))


def _again(peak: Tensor, numbers: Tensor, scales: Scales, config: Config) -> Tensor:
    return comfy_kitchen.stored(_LAYOUT, numbers, per_channel=True, **_params(config))


def _merged(peak: Tensor, numbers: Tensor, scales: Scales, config: Config) -> Spread:
    """One draw of the package, by a seed: what is drawn is in the rotated rows, which only the package knows."""
    how = {"per_channel": True, "stochastic_rounding": _SEED}
    return Spread(comfy_kitchen.stored(_LAYOUT, numbers, **how, **_params(config)))


def _unusable(config: Config, shape: Shape) -> str | None:
    group = config.get("convrot_groupsize")
    if not (isinstance(group, int) and group > 0 and shape[-1] % group == 0):
        return f"rows of {shape[-1]} do not divide into the groups of {shortened(group)} that its comfy_quant names"
    if group != 4 ** max(1, (group.bit_length() - 1) // 2):
        return f"its comfy_quant names groups of {group}, and its Hadamard matrix has a power of 4"
    return comfy_kitchen.missing(_TITLE)


KIND: Final = Kind(
    _TITLE,
    frozenset({INT8}),
    scales={"scale": Scale((".weight_scale",), REAL, per_row)},
    named=_named,
    numbers=_numbers,
    again=_again,
    merged=_merged,
    unusable=_unusable,
)
