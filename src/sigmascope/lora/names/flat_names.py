"""Give kohya's names their dots back: `down_blocks_1_resnets_0_conv1` is `down_blocks.1.resnets.0.conv1`.

A name with all its dots turned into underscores could be many paths. Here it is matched against the grammar of
the architectures that are known; a name outside of it stays flat, and only a model's own layers can tell it.
"""

import re
from typing import Final

from sigmascope.lora.names.transformer_names import unflattened
from sigmascope.lora.names.unet_names import RESNET, RESNET_OF_SGM, TOP, TOP_OF_SGM

_DENOISERS: Final = ("flux", "sd3", "wan", "qwen_image")
_TEXT_MODEL: Final = "text_model_"


def flat(path: str) -> str:
    """A path with underscores for dots."""
    return path.replace(".", "_")


def _dotted(*paths: str) -> dict[str, str]:
    return {flat(path): path for path in paths}


_ATTENTION: Final = _dotted("proj_in", "proj_out", "norm")
_TRANSFORMER_LAYERS: Final = _dotted(
    *(f"attn{number}.to_{name}" for number in (1, 2) for name in ("q", "k", "v", "out.0")),
    *("ff.net.0.proj", "ff.net.2"),
    *(f"norm{number}" for number in (1, 2, 3)),
)
_RESNETS: Final = _dotted(*RESNET, *RESNET_OF_SGM)
_TOP_NAMES: Final = _dotted(*TOP, *TOP_OF_SGM)
_BLOCKS: Final = re.compile(
    r"(?:(down_blocks|up_blocks)_(\d+)_(resnets|attentions|downsamplers|upsamplers)_(\d+)"
    r"|(mid_block)_(resnets|attentions)_(\d+)"
    r"|(input_blocks|output_blocks)_(\d+)_(\d+)"
    r"|(middle_block)_(\d+))_(\w+)"
)
_TRANSFORMER_BLOCK: Final = re.compile(r"transformer_blocks_(\d+)_(\w+)")


def unflattened_denoiser(name: str) -> str | None:
    """The path of a denoiser's layer, in the naming that the flat name is of.

    Args:
        name: Without `lora_unet_` or the like.

    Returns:
        The path; None for a name of no known architecture.
    """
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    block = _BLOCKS.fullmatch(name)
    if block is None:
        return unflattened(name, _DENOISERS)
    *start, rest = (piece for piece in block.groups() if piece is not None)
    inner = _inside_block(rest)
    return None if inner is None else ".".join([*start, inner])


def unflattened_text_encoder(name: str) -> str | None:
    """The path of a text encoder's layer, as transformers names it.

    Args:
        name: Without `lora_te_` or the like.

    Returns:
        The path; None for a name of no known architecture.
    """
    if name == "text_projection":
        return name
    inner = unflattened(name.removeprefix(_TEXT_MODEL), ("open_clip", "t5"))
    if inner is None:
        return None
    return f"text_model.{inner}" if name.startswith(_TEXT_MODEL) else inner


def _inside_block(rest: str) -> str | None:
    transformer = _TRANSFORMER_BLOCK.fullmatch(rest)
    if transformer is not None:
        inner = _TRANSFORMER_LAYERS.get(transformer[2])
        return None if inner is None else f"transformer_blocks.{transformer[1]}.{inner}"
    if rest in {"conv", "op"}:
        return rest
    return _ATTENTION.get(rest) or _RESNETS.get(rest)
