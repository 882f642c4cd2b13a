"""The layers of a model by name: which tensors they are, the block each is in, and its names in diffusers and elsewhere.

Paths with dots (native, PEFT, ComfyUI) and names flattened by underscores (kohya) are understood alike, in the
naming of any family, so that a block has one name in every format (`block_of_module`).

A layer has two names, diffusers' and the original model's:

    down_blocks.1.resnets.0.conv1          input_blocks.4.0.in_layers.2          U-Net
    mid_block.attentions.0.proj_in         middle_block.1.proj_in
    up_blocks.2.upsamplers.0.conv          output_blocks.8.2.conv

    transformer_blocks.3.attn.to_out.0     double_blocks.3.img_attn.proj         FLUX
    blocks.3.attn1.to_q                    blocks.3.self_attn.q                  WAN

The U-Nets of SD 1, SD 2, SDXL and LBM are translated by rule (`to_sgm`, `to_diffusers`). CompVis' naming, `sgm`,
counts the blocks through, so a translation needs to know how many layers a block has, and which of the upper blocks
have attention (`UnetBlocks`).

Diffusion transformers and text encoders are looked up in `TABLES`. Original files keep the query, key and value
matrices of a block as one fused matrix where diffusers has one for each: then several of diffusers' layers are rows
of one original layer, and the look-up gives the line of the table (`Row`).
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from math import log
from os import PathLike
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from sigmascope.errors import ConfigError, LoraFormatError
from sigmascope.files import atomic_path
from sigmascope.lora.families import ModelLayout, Part

Coverage = Literal["full", "attention", "extended"]
"""Which layers of a model are extracted; see `ExtractOptions.target_coverage`."""
_ATTENTION: Final = re.compile(
    r"attn|SelfAttention|EncDecAttention|attentions\.\d+\.to_|single_blocks\.\d+\.linear1$"
)
"""Attention in diffusers' names, in the families' own, in text encoders and VAEs. FLUX's own `linear1` holds the
query, key and value of a block beside its feed-forward layer."""
_AROUND_ATTENTION: Final = re.compile(
    r"(?:^|\.)(?:ff|ff_context|ffn|mlp|\w+_mlp|DenseReluDense|proj_in|proj_mlp)(?:\.|$)"
    r"|\.\d+\.proj_out$|single_blocks\.\d+\.linear2$"
)
"""Feed-forward layers, and the projections into and out of a block; not the model's own last `proj_out`."""

# Blocks, in names with dots or underscores.
_TEXT_ENCODER: Final = re.compile(r"(?:^|[._])(?:te(\d?)|text_encoder(?:[._](\d))?|text_model)(?=[._])")
_COMFYUI_ENCODER: Final = re.compile(
    r"(?:^|[._])text_encoders[._](\w+?)[._]transformer(?=[._])"
    r"|^(\w+?)[._]transformer[._](?=text_model[._]|encoder[._]block[._]|model[._]layers[._])"
)
"""In its checkpoints, and in the CLIP that it holds."""
_NUMBERED_ENCODERS: Final = {"clip_g": "2", "t5xxl": "3", "llama": "4"}
_SGM_ENCODER: Final = re.compile(
    r"^(?:conditioner[._]embedders[._](\d)|cond_stage_model)[._](transformer|model)(?=[._])"
)
_T5: Final = re.compile(r"[._]encoder[._]block[._]\d")
_VAE: Final = re.compile(r"^(?:vae(?:[._]vae_model)?|first_stage_model|lora_vae)[._](encoder|decoder)?")
_NUMBERED: Final = re.compile(
    r"(?:^|[._])((?:down|up|input|output|double|single|joint|vace|single_transformer|transformer)_blocks|blocks)[._](\d+)"
)
_UNNUMBERED: Final = re.compile(
    r"(?:^|[._])(mid_block|middle_block|conv_in|conv_out|conv_norm_out|time_embedding|time_embed|time_in|vector_in"
    r"|guidance_in|img_in|txt_in|add_embedding|label_emb|x_embedder|pos_embed|context_embedder|time_text_embed"
    r"|t_embedder|y_embedder|condition_embedder[._](?:time_embedder|text_embedder|time_proj|image_embedder)"
    r"|text_embedding|time_projection|img_emb|patch_embedding|vace_patch_embedding|final_layer[._](?:linear|adaLN)"
    r"|audio_injector|casual_audio_encoder|scale_shift_table"
    r"|proj_out|norm_out|head|out[._][02]|out)(?=[._]|$)"
)
_LAYER: Final = re.compile(r"(?:layers?|block|resblocks)[._](\d+)")

# One name for what several formats name otherwise: diffusers', or the original's where that says more.
_SAME: Final = {
    "double_blocks": "transformer_blocks",
    "joint_blocks": "transformer_blocks",
    "single_blocks": "single_transformer_blocks",
    "middle_block": "mid_block",
    "time_embed": "time_embedding",
    "label_emb": "add_embedding",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
    "x_embedder": "img_in",
    "pos_embed": "img_in",
    "context_embedder": "txt_in",
    **dict.fromkeys(("time_in", "vector_in", "guidance_in", "t_embedder", "y_embedder"), "time_text_embed"),
    "condition_embedder.time_embedder": "time_embedding",
    "condition_embedder.text_embedder": "text_embedding",
    "condition_embedder.time_proj": "time_projection",
    "condition_embedder.image_embedder": "img_emb",
    "final_layer.linear": "proj_out",
    "final_layer.adaLN": "norm_out",
    "head": "proj_out",
    "scale_shift_table": "proj_out",
}
_LAYERS_OF_A_LEVEL: Final = 3  # of sgm's U-Nets: two residual layers and a sampler, or three residual layers

# Blocks in the order in which a latent passes them, text encoders first.
_FLOW: Final = (
    "text_encoder text_encoder_2 text_encoder_3 text_encoder_4 conv_in img_in patch_embedding vace_patch_embedding txt_in "
    "text_embedding img_emb time_embedding time_projection time_text_embed add_embedding down_blocks mid_block "
    "up_blocks transformer_blocks single_transformer_blocks vace_blocks blocks norm_out conv_norm_out conv_out proj_out out"
)
_ORDER: Final = {name: index for index, name in enumerate(_FLOW.split())}

# Weights of layers.
WEIGHT: Final = ".weight"
_LAYER_DIMENSIONS: Final = range(2, 6)  # Linear (out, in); Conv1d, Conv2d, Conv3d (out, in, *kernel)
_EMBEDDING_ENDINGS: Final = ("embedding", "embeddings", "embed", "emb")
_EMBEDDINGS: Final = frozenset(
    {"embed_tokens", "embed_positions", "shared", "wte", "wpe", "relative_attention_bias"}
)

_WORDS: Final = re.compile(r"[^._]+")
_NEAREST: Final = 3  # layers that are named where a pattern matches none

Naming = Literal["diffusers", "original"]
UNET_FAMILIES: Final = frozenset({"lbm", "sd15", "sd2", "sdxl"})
# How the layers of CLIP and of a U-Net begin, and the namings that are diffusers'.
_CLIP_STARTS: Final = ("encoder.layers.", "embeddings.", "final_layer_norm")
_DIFFUSERS: Final = frozenset({"diffusers", "lbm"})
_UNET_STARTS: Final = (
    *("down_blocks.", "mid_block.", "up_blocks.", "conv_in", "conv_norm_out", "conv_out"),
    *("time_embedding.", "add_embedding.", "input_blocks.", "middle_block.", "output_blocks."),
    *("time_embed.", "label_emb.", "out.0", "out.2"),
)
# A U-Net's layers, by diffusers' name: outside of the blocks, inside a residual layer, and the blocks' children.
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
# The paths of a U-Net's layers, in diffusers' naming and in sgm's.
_SIDE: Final = re.compile(
    r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)"
)
_MID: Final = re.compile(r"mid_block\.((?:resnets|attentions)\.\d+)\.(.+)")
_SGM_SIDE: Final = re.compile(r"(input|output)_blocks\.(\d+)\.(\d+)\.(.+)")
_SGM_MID: Final = re.compile(r"middle_block\.(\d)\.(.+)")
_CONVOLUTION: Final = re.compile(r"(^|\.)conv(\d|_in|_out)?$")
# A numbered block of a transformer, in any of `TABLES`.
_BLOCK: Final = re.compile(
    r"((?:\w+_)?(?:blocks|resblocks)|encoder\.layers|encoder\.block|transformer\.resblocks)\.(\d+)\.(.+)"
)


def is_layer(key: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is the weight of a Linear or convolution layer.

    A Linear and an Embedding both have two axes; the name tells them apart, as in `token_embedding`,
    `embed_tokens`, T5's `shared` and `relative_attention_bias`. `time_embedding.linear_1` is a Linear.

    Args:
        key: Such as `unet.mid_block.attentions.0.proj_in.weight`.
        shape: The tensor's.
    """
    if not key.endswith(WEIGHT) or len(shape) not in _LAYER_DIMENSIONS or 0 in shape:
        return False
    return len(shape) > 2 or not _is_embedding(key.removesuffix(WEIGHT).rpartition(".")[2])


def _is_embedding(module: str) -> bool:
    return module in _EMBEDDINGS or module.endswith(_EMBEDDING_ENDINGS)


def in_coverage(module: str, coverage: Coverage) -> bool:
    """Whether a layer is among those that a coverage names, in any family's names.

    Args:
        module: Path of the layer, such as `denoiser.mid_block.attentions.0.proj_in`.
        coverage: See `ExtractOptions.target_coverage`.
    """
    if coverage == "full" or _ATTENTION.search(module):
        return True
    return coverage == "extended" and _AROUND_ATTENTION.search(module) is not None


def block_of_module(name: str) -> str:
    """Name the block, such as `down_blocks.0`, `mid_block` or `text_encoder.3`.

    Args:
        name: Path of a module with dots (native, PEFT, ComfyUI) or flattened by underscores (kohya).

    Returns:
        A name that is the same in every format; the first part of the path where no block is known.
    """
    vae = _VAE.match(name)
    if vae is not None:
        return ".".join(filter(None, ("vae", vae[1], _block_in(name[vae.end() :].lstrip("._")))))
    encoder = _encoder_in(name)
    return _block_in(name) if encoder is None else encoder


def _encoder_in(name: str) -> str | None:
    """The text encoder and the layer in it."""
    if match := _COMFYUI_ENCODER.search(name):
        number = _NUMBERED_ENCODERS.get(match[1] or match[2])
    elif match := _SGM_ENCODER.search(name):  # SDXL's second, which is its refiner's first
        number = "2" if match[1] and match[2] == "model" else None
    elif match := _TEXT_ENCODER.search(name):
        number = match[1] or match[2]
        if number == "2" and _T5.search(name, match.end()):
            number = "3"  # T5 is the second of FLUX and the third of SD 3; kohya's tools call it te3 in both
    else:
        return None
    encoder = "text_encoder" if number in (None, "", "1") else f"text_encoder_{number}"
    layer = _LAYER.search(name, match.end())
    return f"{encoder}.{layer[1]}" if layer else encoder


def _block_in(name: str) -> str:
    numbered = _NUMBERED.search(name)
    single = _UNNUMBERED.search(name)
    if numbered is not None and (single is None or numbered.start() <= single.start()):
        return _numbered_block(numbered[1], int(numbered[2]))
    if single is not None:
        dotted = re.sub(r"^(condition_embedder|final_layer|out)_", r"\1.", single[1])
        return _SAME.get(dotted, dotted)
    layer = _LAYER.search(name)
    if layer is not None:
        return f"{layer[0][: -len(layer[1]) - 1]}.{layer[1]}"
    path = re.sub(r"^(?:lora_unet_|denoiser\.|(?:model\.)?diffusion_model\.|transformer\.|unet\.)", "", name)
    return re.split(r"[._]", path, maxsplit=1)[0]


def _numbered_block(kind: str, number: int) -> str:
    """Sgm counts the layers of all levels through, from its `conv_in` on."""
    if kind == "input_blocks":
        level = (number - 1) // _LAYERS_OF_A_LEVEL
        return f"down_blocks.{level}" if number > 0 else "conv_in"
    if kind == "output_blocks":
        return f"up_blocks.{number // _LAYERS_OF_A_LEVEL}"
    return f"{_SAME.get(kind, kind)}.{number}"


def block_position(block: str) -> tuple[int, str, int]:
    """Sorting key: the order in which a latent passes the blocks, text encoders first, unknown ones last."""
    first, _, number = block.partition(".")
    position = _ORDER.get(first, len(_ORDER))
    return position, first if position == len(_ORDER) else "", int(number) if number.isdigit() else -1


def layer_order(module: str) -> tuple[tuple[int, str, int], list[tuple[int, str]]]:
    """Sorting key for layers: by block, then by name with numbers as numbers (2 before 10)."""
    pieces = re.split(r"(\d+)", module)
    return block_position(block_of_module(module)), [(int(p), "") if p.isdigit() else (-1, p) for p in pieces]


def write_layer_names(path: str | PathLike[str], names: Iterable[str]) -> Sequence[str]:
    """Write `lora_layer_names.txt`: the LoRA's layers, one a line, in the model's order.

    Each line, or any part of one (`attn1`, `ff.net`, `up_blocks.1`), can go into a training
    configuration's `trainable_lora_modules`, which takes partial names.

    Args:
        path: The text file; replaced as a whole.
        names: Module paths in native naming.

    Returns:
        The names as written.

    Raises:
        WriteError: The file cannot be written.
    """
    ordered = sorted(set(names), key=layer_order)
    with atomic_path(path) as temporary:
        temporary.write_text("".join(f"{name}\n" for name in ordered), encoding="utf-8")
    return ordered


def require_pattern(pattern: str, flag: str) -> None:
    """Refuse what is no regular expression, or an empty one, which would pick every layer.

    Raises:
        ConfigError: With the flag, the pattern and what is wrong with it.
    """
    if not pattern:
        raise ConfigError(f"{flag} has no pattern.", hint="Write one such as 'up_blocks.*attn1'.")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{flag} {pattern!r} is no regular expression: {error}.",
            hint="Put a backslash before a sign that is meant as it stands, such as \\( or \\[.",
        ) from error


def require_matches(pattern: str, layers: Sequence[str], flag: str) -> None:
    """Refuse a pattern that is found in no layer: it is a typing error, not a wish.

    Raises:
        ConfigError: With the layers whose names come nearest.
    """
    if any(matches(pattern, layer) for layer in layers):
        return
    nearest = nearest_layers(pattern, layers)
    raise ConfigError(
        f"{flag} {pattern!r} matches none of the {len(layers)} layers.",
        hint=f"The nearest are {', '.join(nearest)}." if nearest else "The model has no layers.",
    )


def matches(pattern: str, layer: str) -> bool:
    """Whether a pattern is found anywhere in a layer's path."""
    return re.search(pattern, layer) is not None


class NearestNames:
    """Names compared by their words, dots and underscores alike, rare words counting for more.

    Args:
        names: Of the model's layers.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)
        counts = [Counter(_WORDS.findall(name)) for name in self._names]
        self._times: dict[str, NDArray[np.float64]] = {}
        for index, words in enumerate(counts):
            for word, times in words.items():
                self._times.setdefault(word, np.zeros(len(self._names)))[index] = times
        # Of two names that share as much the shorter is nearer.
        self._lengths = np.array([sum(words.values()) or 1 for words in counts], dtype=np.float64) ** 0.25

    def nearest(self, name: str, count: int = 3) -> tuple[str, ...]:
        """Up to `count` names, the nearest first; none that shares no word."""
        scores = np.zeros(len(self._names))
        for word, times in Counter(_WORDS.findall(name)).items():
            having = self._times.get(word)
            if having is not None:
                rarity = log(1.0 + len(self._names) / np.count_nonzero(having))
                scores += rarity * np.minimum(having, times)
        scores /= self._lengths
        best = np.argsort(-scores, kind="stable")[:count]
        return tuple(self._names[index] for index in best if scores[index] > 0.0)


def nearest_layers(pattern: str, layers: Iterable[str]) -> list[str]:
    """The few layers whose names have the pieces most like the pattern's, nearest first."""
    wanted = _pieces(pattern)
    likeness: dict[tuple[str, str], float] = {}

    def like(piece: str, part: str) -> float:
        if (piece, part) not in likeness:
            likeness[piece, part] = SequenceMatcher(None, piece, part, autojunk=False).ratio()
        return likeness[piece, part]

    def distance(layer: str) -> tuple[float, int]:
        parts = _pieces(layer) or [layer]
        return -sum(max(like(piece, part) for part in parts) for piece in wanted), len(layer)

    return sorted(layers, key=distance)[:_NEAREST]


def _pieces(text: str) -> list[str]:
    return [piece for piece in re.split(r"[\W_]+", text) if piece]


@dataclass(frozen=True, slots=True)
class UnetBlocks:
    """What a translation needs to know of a U-Net.

    Attributes:
        layers_per_block: Residual layers of a lower block; an upper block has one more.
        attention: The upper blocks that have attention.
    """

    layers_per_block: int = 2
    attention: frozenset[int] = frozenset({0, 1})


@dataclass(frozen=True, slots=True)
class Row:
    """One line of `TABLES`.

    Attributes:
        original: The layer's name in the original model.
        parts: Diffusers' layers that are its rows, in order; one where nothing is fused.
        swapped: Whether the halves of the rows lie the other way round, in a layer of twice as many outputs as
            inputs.
    """

    original: str
    parts: tuple[str, ...]
    swapped: bool = False

    @property
    def is_rename(self) -> bool:
        """Whether the two layers hold the same matrix under two names."""
        return len(self.parts) == 1 and not self.swapped

    def numbered(self, number: str) -> "Row":
        """The line for one block."""
        return Row(
            self.original.replace("#", number),
            tuple(part.replace("#", number) for part in self.parts),
            self.swapped,
        )


def renamed(
    path: str, part: Part, layout: ModelLayout, wanted: Naming, blocks: UnetBlocks | None = None
) -> str | Row:
    """A layer's path in the naming that a format wants.

    Args:
        path: Inside its part of the model, in the layout's naming.
        part: That part.
        layout: Of the checkpoint that the path is of.
        wanted: `original` is the naming of the family's single files, sgm's for U-Nets.
        blocks: The U-Net's; the family's own when left out.

    Returns:
        The path, or the line of the table where the layer is a part of another one or its rows lie otherwise.

    Raises:
        LoraFormatError: The layer has no name there that is known.
    """
    if part not in {"denoiser", "denoiser_2"}:
        return _in_other_part(path, part)
    if layout.naming == "unknown" or wanted == ("diffusers" if layout.naming in _DIFFUSERS else "original"):
        return path
    if is_unet_layer(path, layout):
        new_name = (to_diffusers if wanted == "diffusers" else to_sgm)(
            path, blocks or usual_blocks(layout.family)
        )
    else:
        look_up = row_of_original if wanted == "diffusers" else row_of_diffusers
        row = look_up(layout.family, path)
        if row is not None and not row.is_rename:
            return row
        new_name = None if row is None else row.parts[0] if wanted == "diffusers" else row.original
    if new_name is None:
        raise LoraFormatError(
            f"{path} of a model of family {layout.family} has no {wanted} name that is known.",
            hint="Write the format that keeps the model's own names: native.",
        )
    return new_name


def is_unet_layer(path: str, layout: ModelLayout) -> bool:
    """Whether a denoiser's layer is one of a Stable Diffusion U-Net, in either naming."""
    unknown = layout.family == "unknown"
    return layout.family in UNET_FAMILIES or (unknown and path.startswith(_UNET_STARTS))


def unet_kernel(path: str, layout: ModelLayout) -> int | None:
    """Side of the kernel of such a U-Net's convolution, by its name in diffusers' naming; None of another layer."""
    if not is_unet_layer(path, layout):
        return None
    if path.endswith(".conv_shortcut") or (
        layout.family == "sd15" and path.endswith((".proj_in", ".proj_out"))
    ):
        return 1
    return 3 if _CONVOLUTION.search(path) else None


def usual_blocks(family: str) -> UnetBlocks:
    """The blocks of a family's published U-Net."""
    return SD_BLOCKS if family in {"sd15", "sd2"} else SDXL_BLOCKS


SD_BLOCKS: Final = UnetBlocks(attention=frozenset({1, 2, 3}))
"""SD 1 and SD 2."""
SDXL_BLOCKS: Final = UnetBlocks()
"""SDXL and LBM."""


def _in_other_part(path: str, part: Part) -> str | Row:
    """Text encoders are named as in transformers in every LoRA format; other parts keep their paths."""
    if not part.startswith("text_encoder"):
        return path
    if path.startswith(_CLIP_STARTS):  # as of version 5, CLIPTextModel's own keys begin here
        return f"text_model.{path}"
    row = row_of_original("open_clip", path)
    if row is None:
        return path
    parts = tuple(f"text_model.{part}" for part in row.parts)
    return parts[0] if row.is_rename else Row(row.original, parts, row.swapped)


def blocks_of(paths: Iterable[str], usual: UnetBlocks | None = None, *, complete: bool = True) -> UnetBlocks:
    """Read a U-Net's blocks off the paths of its layers, in either naming.

    Args:
        paths: Inside the U-Net, without `.weight`.
        usual: What to take where the paths prove nothing else; SDXL's when left out.
        complete: Whether they are all of its layers, and not only some, as a LoRA has them.
    """
    known, usual = list(paths), usual or SDXL_BLOCKS
    sides = [match for match in map(_SIDE.fullmatch, known) if match is not None]
    sgm_sides = [match for match in map(_SGM_SIDE.fullmatch, known) if match is not None]
    lower, upper = (
        {int(match[4]) for match in sides if (match[1], match[3]) == (side, "resnets")}
        for side in ("down", "up")
    )
    ends = sorted(int(match[2]) for match in sgm_sides if match[4] == "op")
    layers = usual.layers_per_block
    if lower and (complete or max(upper, default=0) == max(lower) + 1):  # an upper block has one layer more
        layers = 1 + max(lower)
    elif ends and complete:  # the first block's downsampler comes after its layers and the input convolution
        layers = ends[0] - 1
    elif len(ends) > 1:
        layers = ends[1] - ends[0] - 1
    attention = {int(match[2]) for match in sides if (match[1], match[3]) == ("up", "attentions")} | {
        int(match[2]) // (layers + 1) for match in sgm_sides if match[1] == "output" and "attn1" in match[4]
    }
    proves_none = complete and (lower or ends)
    return UnetBlocks(layers, frozenset(attention) if attention or proves_none else usual.attention)


def blocks_of_model(layers: Iterable[str], layout: ModelLayout) -> UnetBlocks:
    """The same from the paths of all layers of a model; those of its other parts do not count."""
    return blocks_of(path for part, path in map(layout.split, layers) if part == "denoiser")


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


def row_of_original(family: str, path: str) -> Row | None:
    """The line of a layer by its original name, with the block's number in it."""
    return _looked_up(_by_original(family), path)


def row_of_diffusers(family: str, path: str) -> Row | None:
    """The line of a layer by its name in diffusers, with the block's number in it."""
    return _looked_up(_by_part(family), path)


def unflattened(flat: str, families: Iterable[str]) -> str | None:
    """The dotted path of a layer whose dots became underscores, in the naming that it is of.

    Args:
        flat: Such as `double_blocks_3_img_attn_proj`.
        families: Those whose tables to look in, in order.

    Returns:
        The path; None for one that is in no table.
    """
    for family in families:
        numbers = re.findall(r"_(\d+)_", flat)
        for template in (flat, *(flat.replace(f"_{number}_", "_#_", 1) for number in numbers[:1])):
            path = _flat_names(family).get(template)
            if path is not None:
                return path.replace("#", numbers[0]) if "#" in path else path
    return None


def families_with(paths: Iterable[str]) -> list[str]:
    """The families whose table has every one of these dotted paths, in either naming."""
    wanted = list(paths)
    return [
        family
        for family in TABLES
        if wanted and all(row_of_original(family, path) or row_of_diffusers(family, path) for path in wanted)
    ]


def _looked_up(table: dict[str, Row], path: str) -> Row | None:
    block = _BLOCK.fullmatch(path)
    if block is None:
        return table.get(path)
    row = table.get(f"{block[1]}.#.{block[3]}")
    return None if row is None else row.numbered(block[2])


@cache
def _by_original(family: str) -> dict[str, Row]:
    return {row.original: row for row in rows(family)}


@cache
def _by_part(family: str) -> dict[str, Row]:
    return {part: row for row in rows(family) for part in row.parts}


@cache
def _flat_names(family: str) -> dict[str, str]:
    names = [name for row in rows(family) for name in (row.original, *row.parts)]
    return {name.replace(".", "_"): name for name in names}


@cache
def rows(family: str) -> tuple[Row, ...]:
    """The table of a family; empty for one that has none."""
    rows = []
    for line in filter(None, map(str.strip, TABLES.get(family, "").splitlines())):
        original, _, names = line.partition(" = ")
        parts = tuple(name.strip() for name in (names or original).removesuffix(" swapped").split(","))
        rows.append(Row(original, parts, names.endswith(" swapped")))
    return tuple(rows)


TABLES: Final[dict[str, str]] = {
    "flux": """
        double_blocks.#.img_attn.qkv = transformer_blocks.#.attn.to_q, transformer_blocks.#.attn.to_k, transformer_blocks.#.attn.to_v
        double_blocks.#.txt_attn.qkv = transformer_blocks.#.attn.add_q_proj, transformer_blocks.#.attn.add_k_proj, transformer_blocks.#.attn.add_v_proj
        double_blocks.#.img_attn.proj = transformer_blocks.#.attn.to_out.0
        double_blocks.#.txt_attn.proj = transformer_blocks.#.attn.to_add_out
        double_blocks.#.img_mlp.0 = transformer_blocks.#.ff.net.0.proj
        double_blocks.#.img_mlp.2 = transformer_blocks.#.ff.net.2
        double_blocks.#.txt_mlp.0 = transformer_blocks.#.ff_context.net.0.proj
        double_blocks.#.txt_mlp.2 = transformer_blocks.#.ff_context.net.2
        double_blocks.#.img_mod.lin = transformer_blocks.#.norm1.linear
        double_blocks.#.txt_mod.lin = transformer_blocks.#.norm1_context.linear
        single_blocks.#.linear1 = single_transformer_blocks.#.attn.to_q, single_transformer_blocks.#.attn.to_k, single_transformer_blocks.#.attn.to_v, single_transformer_blocks.#.proj_mlp
        single_blocks.#.linear2 = single_transformer_blocks.#.proj_out
        single_blocks.#.modulation.lin = single_transformer_blocks.#.norm.linear
        img_in = x_embedder
        txt_in = context_embedder
        time_in.in_layer = time_text_embed.timestep_embedder.linear_1
        time_in.out_layer = time_text_embed.timestep_embedder.linear_2
        vector_in.in_layer = time_text_embed.text_embedder.linear_1
        vector_in.out_layer = time_text_embed.text_embedder.linear_2
        guidance_in.in_layer = time_text_embed.guidance_embedder.linear_1
        guidance_in.out_layer = time_text_embed.guidance_embedder.linear_2
        final_layer.adaLN_modulation.1 = norm_out.linear swapped
        final_layer.linear = proj_out
    """,
    "sd3": """
        joint_blocks.#.x_block.attn.qkv = transformer_blocks.#.attn.to_q, transformer_blocks.#.attn.to_k, transformer_blocks.#.attn.to_v
        joint_blocks.#.x_block.attn2.qkv = transformer_blocks.#.attn2.to_q, transformer_blocks.#.attn2.to_k, transformer_blocks.#.attn2.to_v
        joint_blocks.#.context_block.attn.qkv = transformer_blocks.#.attn.add_q_proj, transformer_blocks.#.attn.add_k_proj, transformer_blocks.#.attn.add_v_proj
        joint_blocks.#.x_block.attn.proj = transformer_blocks.#.attn.to_out.0
        joint_blocks.#.x_block.attn2.proj = transformer_blocks.#.attn2.to_out.0
        joint_blocks.#.context_block.attn.proj = transformer_blocks.#.attn.to_add_out
        joint_blocks.#.x_block.mlp.fc1 = transformer_blocks.#.ff.net.0.proj
        joint_blocks.#.x_block.mlp.fc2 = transformer_blocks.#.ff.net.2
        joint_blocks.#.context_block.mlp.fc1 = transformer_blocks.#.ff_context.net.0.proj
        joint_blocks.#.context_block.mlp.fc2 = transformer_blocks.#.ff_context.net.2
        joint_blocks.#.x_block.adaLN_modulation.1 = transformer_blocks.#.norm1.linear
        joint_blocks.#.context_block.adaLN_modulation.1 = transformer_blocks.#.norm1_context.linear swapped
        context_embedder
        x_embedder.proj = pos_embed.proj
        t_embedder.mlp.0 = time_text_embed.timestep_embedder.linear_1
        t_embedder.mlp.2 = time_text_embed.timestep_embedder.linear_2
        y_embedder.mlp.0 = time_text_embed.text_embedder.linear_1
        y_embedder.mlp.2 = time_text_embed.text_embedder.linear_2
        final_layer.adaLN_modulation.1 = norm_out.linear swapped
        final_layer.linear = proj_out
    """,
    "wan": """
        blocks.#.self_attn.q = blocks.#.attn1.to_q
        blocks.#.self_attn.k = blocks.#.attn1.to_k
        blocks.#.self_attn.v = blocks.#.attn1.to_v
        blocks.#.self_attn.o = blocks.#.attn1.to_out.0
        blocks.#.self_attn.norm_q = blocks.#.attn1.norm_q
        blocks.#.self_attn.norm_k = blocks.#.attn1.norm_k
        blocks.#.cross_attn.q = blocks.#.attn2.to_q
        blocks.#.cross_attn.k = blocks.#.attn2.to_k
        blocks.#.cross_attn.v = blocks.#.attn2.to_v
        blocks.#.cross_attn.o = blocks.#.attn2.to_out.0
        blocks.#.cross_attn.k_img = blocks.#.attn2.add_k_proj
        blocks.#.cross_attn.v_img = blocks.#.attn2.add_v_proj
        blocks.#.cross_attn.norm_q = blocks.#.attn2.norm_q
        blocks.#.cross_attn.norm_k = blocks.#.attn2.norm_k
        blocks.#.cross_attn.norm_k_img = blocks.#.attn2.norm_added_k
        blocks.#.norm3 = blocks.#.norm2
        blocks.#.ffn.0 = blocks.#.ffn.net.0.proj
        blocks.#.ffn.2 = blocks.#.ffn.net.2
        blocks.#.modulation = blocks.#.scale_shift_table
        patch_embedding
        text_embedding.0 = condition_embedder.text_embedder.linear_1
        text_embedding.2 = condition_embedder.text_embedder.linear_2
        time_embedding.0 = condition_embedder.time_embedder.linear_1
        time_embedding.2 = condition_embedder.time_embedder.linear_2
        time_projection.1 = condition_embedder.time_proj
        img_emb.proj.0 = condition_embedder.image_embedder.norm1
        img_emb.proj.1 = condition_embedder.image_embedder.ff.net.0.proj
        img_emb.proj.3 = condition_embedder.image_embedder.ff.net.2
        img_emb.proj.4 = condition_embedder.image_embedder.norm2
        head.head = proj_out
        head.modulation = scale_shift_table
    """,
    "qwen_image": """
        transformer_blocks.#.attn.to_q
        transformer_blocks.#.attn.to_k
        transformer_blocks.#.attn.to_v
        transformer_blocks.#.attn.add_q_proj
        transformer_blocks.#.attn.add_k_proj
        transformer_blocks.#.attn.add_v_proj
        transformer_blocks.#.attn.to_out.0
        transformer_blocks.#.attn.to_add_out
        transformer_blocks.#.img_mlp.net.0.proj
        transformer_blocks.#.img_mlp.net.2
        transformer_blocks.#.txt_mlp.net.0.proj
        transformer_blocks.#.txt_mlp.net.2
        transformer_blocks.#.img_mod.1
        transformer_blocks.#.txt_mod.1
        img_in
        txt_in
        time_text_embed.timestep_embedder.linear_1
        time_text_embed.timestep_embedder.linear_2
        norm_out.linear
        proj_out
    """,
    "open_clip": """
        transformer.resblocks.#.attn.in_proj_weight = encoder.layers.#.self_attn.q_proj, encoder.layers.#.self_attn.k_proj, encoder.layers.#.self_attn.v_proj
        transformer.resblocks.#.attn.out_proj = encoder.layers.#.self_attn.out_proj
        transformer.resblocks.#.mlp.c_fc = encoder.layers.#.mlp.fc1
        transformer.resblocks.#.mlp.c_proj = encoder.layers.#.mlp.fc2
        transformer.resblocks.#.ln_1 = encoder.layers.#.layer_norm1
        transformer.resblocks.#.ln_2 = encoder.layers.#.layer_norm2
        token_embedding = embeddings.token_embedding
        ln_final = final_layer_norm
    """,
    "t5": """
        encoder.block.#.layer.0.SelfAttention.q
        encoder.block.#.layer.0.SelfAttention.k
        encoder.block.#.layer.0.SelfAttention.v
        encoder.block.#.layer.0.SelfAttention.o
        encoder.block.#.layer.1.DenseReluDense.wi
        encoder.block.#.layer.1.DenseReluDense.wi_0
        encoder.block.#.layer.1.DenseReluDense.wi_1
        encoder.block.#.layer.1.DenseReluDense.wo
    """,
}
"""A family's layers: the original model's on the left, diffusers' or transformers' on the right.

`#` is the number of a block. A name alone is the same in both. Several names on the right are rows of one fused matrix on the left, in that order.
`swapped`: the two halves of the rows lie the other way round, where the layer gives (shift, scale) only.
"""
