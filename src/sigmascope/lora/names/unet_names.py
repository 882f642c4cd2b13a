"""The two names of every layer of a Stable Diffusion U-Net: diffusers' and CompVis' (`sgm`).

    down_blocks.1.resnets.0.conv1          input_blocks.4.0.in_layers.2
    mid_block.attentions.0.proj_in         middle_block.1.proj_in
    up_blocks.2.upsamplers.0.conv          output_blocks.8.2.conv

Both name the same layers of SD 1, SD 2, SDXL and LBM; sgm counts the blocks through, so a translation needs to
know how many layers a block has, and which of the upper blocks have attention.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

TOP: Final = {
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
RESNET: Final = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_MIDDLE: Final = {"resnets.0": "0", "attentions.0": "1", "resnets.1": "2"}
_CHILDREN: Final = {"resnets": "0", "attentions": "1"}

TOP_OF_SGM: Final = {sgm: name for name, sgm in TOP.items()}
RESNET_OF_SGM: Final = {sgm: name for name, sgm in RESNET.items()}
_MIDDLE_OF_SGM: Final = {sgm: name for name, sgm in _MIDDLE.items()}

_SIDE: Final = re.compile(
    r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)"
)
_MID: Final = re.compile(r"mid_block\.((?:resnets|attentions)\.\d+)\.(.+)")
_SGM_SIDE: Final = re.compile(r"(input|output)_blocks\.(\d+)\.(\d+)\.(.+)")
_SGM_MID: Final = re.compile(r"middle_block\.(\d)\.(.+)")


@dataclass(frozen=True, slots=True)
class UnetBlocks:
    """What a translation needs to know of a U-Net.

    Attributes:
        layers_per_block: Residual layers of a lower block; an upper block has one more.
        attention: The upper blocks that have attention.
    """

    layers_per_block: int = 2
    attention: frozenset[int] = frozenset({0, 1})


SDXL_BLOCKS: Final = UnetBlocks()
"""SDXL and LBM."""
SD_BLOCKS: Final = UnetBlocks(attention=frozenset({1, 2, 3}))
"""SD 1 and SD 2."""


def blocks_of(paths: Iterable[str]) -> UnetBlocks:
    """Read a U-Net's blocks off the paths of all its layers, in either naming.

    Args:
        paths: Inside the U-Net, without `.weight`.

    Returns:
        The blocks; SDXL's where the paths are no U-Net's.
    """
    known = list(paths)
    sides = [match for match in map(_SIDE.fullmatch, known) if match is not None]
    lower = [int(match[4]) for match in sides if (match[1], match[3]) == ("down", "resnets")]
    if lower:
        attention = {int(match[2]) for match in sides if (match[1], match[3]) == ("up", "attentions")}
        return UnetBlocks(1 + max(lower), frozenset(attention))
    sgm_sides = [match for match in map(_SGM_SIDE.fullmatch, known) if match is not None]
    ends = [int(match[2]) for match in sgm_sides if match[4] == "op"]
    if not ends:
        return SDXL_BLOCKS
    layers = min(ends) - 1  # the first block's downsampler comes after its layers and the input convolution
    upper = {int(match[2]) for match in sgm_sides if match[1] == "output" and "attn1" in match[4]}
    return UnetBlocks(layers, frozenset(number // (layers + 1) for number in upper))


def likely_blocks(paths: Iterable[str], usual: UnetBlocks = SDXL_BLOCKS) -> UnetBlocks:
    """Guess a U-Net's blocks from the paths of some of its layers, as a LoRA has them.

    Args:
        paths: In either naming.
        usual: What to take where the paths prove nothing else.
    """
    known = list(paths)
    sides = [match for match in map(_SIDE.fullmatch, known) if match is not None]
    lower, upper = (
        [int(match[4]) for match in sides if match[1] == side and match[3] == "resnets"]
        for side in ("down", "up")
    )
    sgm_sides = [match for match in map(_SGM_SIDE.fullmatch, known) if match is not None]
    ends = sorted(int(match[2]) for match in sgm_sides if match[4] == "op")
    layers = usual.layers_per_block
    if lower and upper and max(upper) == max(lower) + 1:  # an upper block has one layer more than a lower one
        layers = max(upper)
    elif len(ends) > 1:
        layers = ends[1] - ends[0] - 1
    attention = {int(match[2]) for match in sides if match[1] == "up" and match[3] == "attentions"} | {
        int(match[2]) // (layers + 1) for match in sgm_sides if match[1] == "output" and "attn1" in match[4]
    }
    return UnetBlocks(layers, frozenset(attention) or usual.attention)


def to_sgm(path: str, blocks: UnetBlocks = SDXL_BLOCKS) -> str | None:
    """The sgm name of a layer, by diffusers' path inside the U-Net.

    Returns:
        Its path; None for one that is not of such a U-Net.
    """
    if path in TOP:
        return TOP[path]
    middle = _MID.fullmatch(path)
    if middle is not None:
        kind = middle[1].partition(".")[0]
        return _joined("middle_block", _MIDDLE.get(middle[1]), _renamed(middle[2], kind, RESNET))
    side = _SIDE.fullmatch(path)
    if side is None:
        return None
    kind, rest, upper = side[3], side[5], side[1] == "up"
    number = int(side[2]) * (blocks.layers_per_block + 1) + int(side[4]) + (0 if upper else 1)
    start = f"output_blocks.{number}" if upper else f"input_blocks.{number}"
    if kind in _CHILDREN:
        return _joined(start, _CHILDREN[kind], _renamed(rest, kind, RESNET))
    last = number + blocks.layers_per_block  # samplers count as layer 0 in diffusers, and come last in sgm
    if rest != "conv":
        return None
    if not upper:
        return f"input_blocks.{last}.0.op"
    return f"output_blocks.{last}.{2 if int(side[2]) in blocks.attention else 1}.conv"


def to_diffusers(path: str, blocks: UnetBlocks = SDXL_BLOCKS) -> str | None:
    """Diffusers' name of a layer, by its sgm path inside the U-Net.

    Returns:
        Its path; None for one that is not of such a U-Net.
    """
    if path in TOP_OF_SGM:
        return TOP_OF_SGM[path]
    middle = _SGM_MID.fullmatch(path)
    if middle is not None:
        inner = _MIDDLE_OF_SGM.get(middle[1], "")
        kind = inner.partition(".")[0]
        return _joined("mid_block", inner, _renamed(middle[2], kind, RESNET_OF_SGM))
    side = _SGM_SIDE.fullmatch(path)
    if side is None:
        return None
    upper, child, rest = side[1] == "output", side[3], side[4]
    block, layer = divmod(int(side[2]) - (0 if upper else 1), blocks.layers_per_block + 1)
    start = f"up_blocks.{block}" if upper else f"down_blocks.{block}"
    if rest in {"op", "conv"}:
        return f"{start}.{'upsamplers' if rest == 'conv' else 'downsamplers'}.0.conv"
    kind = {number: name for name, number in _CHILDREN.items()}.get(child, "")
    return _joined(start, kind and f"{kind}.{layer}", _renamed(rest, kind, RESNET_OF_SGM))


def _renamed(rest: str, kind: str, resnet: dict[str, str]) -> str | None:
    """The name inside a residual or attention layer; an attention's own names are the same in both."""
    return resnet.get(rest) if kind == "resnets" else rest


def _joined(*pieces: str | None) -> str | None:
    return ".".join(map(str, pieces)) if all(pieces) else None
