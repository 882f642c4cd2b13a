"""WAN-VACE's conditioning, which holds the content that its latent of zeros does not.

ComfyUI's WanVaceToVideo gives a latent (batch, 16, frames, h, w) of zeros, and in both conditionings `vace_frames`
(1, 32, frames, h, w): what to change and what to keep, 16 channels each, and `vace_mask` (1, 64, frames, h, w): the
8x8 pixels of each latent pixel. A reference picture is one latent frame more at the beginning (`trim_latent`).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from sigmascope.probes import tensor_facts
from sigmascope.records.arithmetic import MIB
from sigmascope.records.finding import Finding
from sigmascope.records.latents import VaeFacts
from sigmascope.stages.host_reading import read_host
from sigmascope.stages.latents.latent_facts import statistics_of
from sigmascope.stages.latents.typed import LatentAnalysis
from sigmascope.stages.text.nesting import leaves_of

_VACE_NAMES = ("vace_frames", "vace_mask")
_HALVES = 2


def find_vace(output: object) -> dict[str, Tensor]:
    """`vace_frames` and `vace_mask` in a node's outputs or a conditioning, the last one of each. Never raises."""
    if not isinstance(output, list | tuple):
        return {}
    named = read_host(lambda: {leaf.name: leaf.tensor for leaf in leaves_of(output)}).value or {}
    return {name: named[name] for name in _VACE_NAMES if name in named}


def vace_analysis(output: object, statistics: bool | None) -> dict[str, Any]:
    """Shape, type, size and values of each part; an empty dict where there is none. Never raises.

    `trim_latent` counts the latent frames of a reference picture, at the beginning.

    Args:
        output: What the node gave: (positive, negative, latent, trim_latent), or a conditioning.
        statistics: Whether to read values, as in `probes.tensor_facts`.
    """
    parts: dict[str, Any] = {name: _part(tensor, statistics) for name, tensor in find_vace(output).items()}
    if parts and isinstance(output, list | tuple):
        trim = output[-1]
        parts["trim_latent"] = trim if isinstance(trim, int) else 0
    return parts


def _part(tensor: Tensor, statistics: bool | None) -> dict[str, Any]:
    facts = tensor_facts(tensor, statistics=statistics)
    return {
        "shape": list(facts.shape),
        "dtype": facts.dtype,
        "device": facts.device,
        "size_mb": facts.nbytes / MIB,
        "statistics": statistics_of(facts),
        "unavailable": dict(facts.unavailable),
    }


def vace_findings(
    vace: Mapping[str, Any], latent: LatentAnalysis, vae: VaeFacts | None, stage: str
) -> Iterator[Finding]:
    """Parts of the conditioning that do not fit the latent, or hold NaN.

    Args:
        vace: What `vace_analysis` gave.
        latent: The latent beside it.
        vae: What encoded; where it is unknown, a factor of 8 is taken, which is WAN's.
        stage: The stage's name.
    """
    channels, side = latent["channels"], (None if vae is None else vae.spatial_factor) or 8
    wanted = {
        "vace_frames": None if channels is None else _HALVES * channels,
        "vace_mask": side * side,
    }
    grid = [latent["frames"], latent["height"], latent["width"]]
    for name in _VACE_NAMES:
        facts = vace.get(name)
        if facts is None:
            continue
        shape = facts["shape"]
        expected = [wanted[name], *grid]
        if None not in expected and shape[1:] != expected:
            message = f"{name} is {shape[1:]} where the latent asks for {expected} (channels, frames, height, width)."
            evidence = {"found": "x".join(map(str, shape)), "expected": "x".join(map(str, expected))}
            yield Finding("vace_shape_unexpected", "error", message, evidence, stage=stage)
        broken = {
            key: facts["statistics"][key] for key in ("nan_count", "inf_count") if facts["statistics"][key]
        }
        if broken:
            message = f"{name} is not finite: {broken}."
            yield Finding("vace_not_finite", "error", message, broken, stage=stage)
