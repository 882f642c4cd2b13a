"""Which kind of denoiser a model is, from its modules and never from its name (SPEC section 6)."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from torch import nn

from sigmascope.probes.modules import components_of, unwrap
from sigmascope.probes.reading import Reading, attempt
from sigmascope.probes.walking import named_modules_in

ArchitectureKind = Literal["MMDiT", "DiT", "UNet"]

_DENOISERS: Final = ("transformer", "unet", "transformer_2", "denoiser", "prior", "decoder")
"""Where pipelines keep what denoises, the usual ones first."""

# Of both streams of a joint block, as diffusers and the code of FLUX, SD3, AuraFlow and HiDream call them.
_JOINT_PROJECTION: Final = "add_q_proj"
_JOINT_PAIRS: Final = (
    ("img_attn", "txt_attn"),
    ("x_block", "context_block"),
    ("w1q", "w2q"),
    ("to_q", "to_q_t"),
)

_ROOT = r"(?:(?:diffusion_model|model|module|base_model|denoiser|unet)\.)*"
_DOWN: Final = re.compile(rf"{_ROOT}(?:down_blocks|input_blocks)\.\d+$")
_UP: Final = re.compile(rf"{_ROOT}(?:up_blocks|output_blocks)\.\d+$")
_BLOCK: Final = re.compile(
    r"(.*(?:blocks?|layers)\.\d+)\.(?:attn\w*|self_attn|cross_attn|attention\w*|mixer)$"
)
_IN_LEVEL: Final = re.compile(r"(?:^|\.)(?:down_blocks|input_blocks)\.")
"""Where a UNet, or a ControlNet as half of one, has its transformers."""

_TIME: Final = re.compile(
    r"(?:^|[._])(?:time|timestep|t_embed|t_block|adaln|ada_ln|adaLN|sigma_embed|condition_embed)"
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a denoiser is, and by which modules.

    Attributes:
        kind: MMDiT: blocks in which text and image each have projections of their own and attend jointly (SD3,
            FLUX, Qwen-Image). DiT: a transformer that attends to the text across, or has all in one stream (WAN,
            PixArt). UNet: convolutions down and up again.
        class_name: Of the denoiser.
        evidence: The modules that decided, in words.
        blocks: How many blocks with attention, or levels of a UNet, there are.
        joint_blocks: How many of them are joint.
    """

    kind: ArchitectureKind
    class_name: str
    evidence: str
    blocks: int
    joint_blocks: int = 0


def detect_architecture(model: object) -> Reading[Architecture]:
    """Which kind of denoiser a model is. Never raises.

    Args:
        model: A module, what wraps one (ComfyUI's ModelPatcher, a compiled or replicated module), or a pipeline,
            whose denoiser is looked at.

    Returns:
        The architecture, or None and why it is not known: a VAE or a text encoder is no denoiser.
    """
    return attempt(lambda: _architecture_of(model))


def denoisers_of(model: object) -> list[object]:
    """What of a pipeline's components may denoise, the usual ones first; the model itself if it is no pipeline."""
    parts = model if isinstance(model, Mapping) else components_of(model)
    if not parts:
        return [model]
    return [parts[name] for name in _DENOISERS if parts.get(name) is not None]


def _architecture_of(model: object) -> Architecture:
    for candidate in denoisers_of(model):
        module = unwrap(candidate)
        found = None if module is None else _classify(module)
        if found is not None:
            return found
    raise LookupError(f"{type(model).__name__} holds no denoiser of a kind that is known")


def _classify(module: nn.Module) -> Architecture | None:
    names = [name.replace("_orig_mod.", "") for name, _ in named_modules_in(module)]
    class_name = type(module).__name__
    joint = _joint_blocks(names)
    blocks = {found[1] for name in names if (found := _BLOCK.fullmatch(name))}
    is_levelled = any(_IN_LEVEL.search(name) for name in blocks)
    levels = {name for name in names if _DOWN.match(name) or _UP.match(name)}
    has_time = any(_TIME.search(name) for name in names)
    if joint:
        evidence = (
            f"{len(joint)} blocks with projections of their own for text and image, such as {min(joint)}"
        )
        return Architecture("MMDiT", class_name, evidence, max(len(blocks), len(joint)), len(joint))
    if any(_DOWN.match(name) for name in levels) and any(_UP.match(name) for name in levels):
        return Architecture("UNet", class_name, f"{len(levels)} blocks down and up again", len(levels))
    if blocks and has_time and not is_levelled:
        evidence = (
            f"{len(blocks)} attention blocks without joint projections, and an embedding of the timestep"
        )
        return Architecture("DiT", class_name, evidence, len(blocks))
    return None


def _joint_blocks(names: Iterable[str]) -> set[str]:
    """Paths of the modules in which two streams are projected apart and attend together."""
    children: dict[str, set[str]] = {}
    for name in names:
        parent, _, last = name.rpartition(".")
        children.setdefault(parent, set()).add(last)
    return {
        parent
        for parent, held in children.items()
        if _JOINT_PROJECTION in held or any(held.issuperset(pair) for pair in _JOINT_PAIRS)
    }
