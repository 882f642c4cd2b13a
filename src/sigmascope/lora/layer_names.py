"""Names of a model's layers: which tensors are layers, their blocks, and their names in another naming.

Dotted paths (native, PEFT, ComfyUI) and names flattened with underscores (kohya) are both understood, in any family's
naming, so a block has one name in every format (`block_of_module`).

A layer has two names, diffusers' and the original model's (`renamed` translates):

    down_blocks.1.resnets.0.conv1          input_blocks.4.0.in_layers.2          U-Net
    mid_block.attentions.0.proj_in         middle_block.1.proj_in
    up_blocks.2.upsamplers.0.conv          output_blocks.8.2.conv

    transformer_blocks.3.attn.to_out.0     double_blocks.3.img_attn.proj         FLUX
    blocks.3.attn1.to_q                    blocks.3.self_attn.q                  WAN

The U-Nets of SD 1, SD 2, SDXL and LBM are translated by rule (`to_sgm`, `to_diffusers`). CompVis' naming, `sgm`,
numbers all blocks in one sequence, so the translation needs to know how many layers a block has and which upper blocks
have attention (`UnetBlocks`).

Diffusion transformers and text encoders are looked up in their families' records. Many original files fuse a block's
query, key and value matrices into one, where diffusers has three. Several of diffusers' layers are then rows of one
original layer, and the look-up returns that row of the family's table (`Row`).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from math import log
from os import PathLike
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from sigmascope.errors import ConfigError, LoraFormatError
from sigmascope.files import atomic_path
from sigmascope.lora.families import (
    UNET_FAMILIES,
    ModelLayout,
    Naming,
    Part,
    Row,
    UnetBlocks,
    family_named,
    row_of_diffusers,
    row_of_original,
)
from sigmascope.lora.families.family import Family
from sigmascope.lora.families.known import (
    AROUND_ATTENTION,
    ATTENTION,
    BLOCK_LISTS,
    FLOW,
    LISTS_OF_LAYERS,
    SINGLE_BLOCKS,
)
from sigmascope.lora.families.unet import SDXL_BLOCKS

Coverage = Literal["full", "attention", "extended"]
"""Which layers are extracted; see `ExtractOptions.target_coverage`."""
_ATTENTION: Final = re.compile(
    "|".join((r"attn|SelfAttention|EncDecAttention|attentions\.\d+\.to_", *ATTENTION))
)
"""Attention in diffusers' names, in the families' own, in text encoders and VAEs. FLUX's own `linear1` holds the
query, key and value of a block beside its feed-forward layer."""
_AROUND_ATTENTION: Final = re.compile(
    "|".join(
        (
            r"(?:^|\.)(?:ff|ff_context|ffn|mlp|\w+_mlp|DenseReluDense|proj_in|proj_mlp)(?:\.|$)",
            r"\.\d+\.proj_out$",
            *AROUND_ATTENTION,
        )
    )
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


def any_of(names: Iterable[str], dot: str = r"\.") -> str:
    """A pattern that matches the longest of some names that is there.

    Names that begin alike share their beginning, so that a search tries few of them at each place.

    Args:
        names: The names; not none.
        dot: The pattern of a dot in them.
    """
    rests: defaultdict[str, set[str]] = defaultdict(set)
    for name in names:
        rests[name[:1]].add(name[1:])
    may_end = rests.pop("", None) is not None
    branches = [
        (dot if first == "." else re.escape(first)) + any_of(rest, dot)
        for first, rest in sorted(rests.items())
    ]
    one = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})" if branches else ""
    return f"(?:{one})?" if may_end and one else one


def _dotted_or_flat(names: Iterable[str]) -> str:
    return any_of(names, "[._]")


_NUMBERED: Final = re.compile(rf"(?:^|[._])({_dotted_or_flat(BLOCK_LISTS)})[._](?:block)?(\d+)")
_OF_LAYERS: Final = {
    shown: re.compile(
        rf"(?:{_dotted_or_flat(name for name, list_ in LISTS_OF_LAYERS.items() if list_ == shown)})(?=[._]|$)".replace(
            r"\#", r"\d+"
        )
    )
    for shown in set(LISTS_OF_LAYERS.values())
}
"""The layers of blocks whose list another family has under the same name, by what reports call the list."""
_UNNUMBERED: Final = re.compile(rf"(?:^|[._])({_dotted_or_flat(SINGLE_BLOCKS)})(?=[._]|$)")
_LISTS_BY_FLAT: Final = {name.replace(".", "_"): shown for name, shown in BLOCK_LISTS.items()}
_SINGLE_BY_FLAT: Final = {name.replace(".", "_"): shown for name, shown in SINGLE_BLOCKS.items()}
_LAYER: Final = re.compile(r"(?:layers?|block|resblocks)[._](\d+)")

_SGM_LAYERS_PER_LEVEL: Final = (
    3  # of sgm's U-Nets: two residual layers and a sampler, or three residual layers
)

# Blocks in the order in which a latent passes them, text encoders first.
_ENCODERS: Final = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")
_BLOCK_ORDER: Final = {name: index for index, name in enumerate((*_ENCODERS, *FLOW))}

# Weights of layers.
WEIGHT: Final = ".weight"
_LAYER_DIMENSIONS: Final = range(2, 6)  # Linear (out, in); Conv1d, Conv2d, Conv3d (out, in, *kernel)
_EMBEDDING_ENDINGS: Final = ("embedding", "embeddings", "embed", "emb")
_EMBEDDINGS: Final = frozenset(
    {"embed_tokens", "embed_positions", "shared", "wte", "wpe", "relative_attention_bias"}
)
_PARAMETERS: Final = frozenset({"modulation", "scale_shift_table"})

_WORDS: Final = re.compile(r"[^._]+")
_NEAREST_COUNT: Final = 3

# Prefixes of CLIP's and a U-Net's layers, and the namings that are diffusers'.
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
_SGM_BY_MIDDLE: Final = {"resnets.0": "0", "attentions.0": "1", "resnets.1": "2"}
_SGM_BY_CHILD: Final = {"resnets": "0", "attentions": "1"}
TOP_OF_SGM: Final = {sgm: name for name, sgm in TOP.items()}
RESNET_OF_SGM: Final = {sgm: name for name, sgm in RESNET.items()}
_MIDDLE_BY_SGM: Final = {sgm: name for name, sgm in _SGM_BY_MIDDLE.items()}
# The paths of a U-Net's layers, in diffusers' naming and in sgm's.
_SIDE: Final = re.compile(
    r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)"
)
_MID: Final = re.compile(r"mid_block\.((?:resnets|attentions)\.\d+)\.(.+)")
_SGM_SIDE: Final = re.compile(r"(input|output)_blocks\.(\d+)\.(\d+)\.(.+)")
_SGM_MID: Final = re.compile(r"middle_block\.(\d)\.(.+)")
_CONVOLUTION: Final = re.compile(r"(^|\.)conv(\d|_in|_out)?$")


def is_layer(key: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is the weight of a Linear or convolution layer.

    A Linear and an Embedding both have two axes; the name tells them apart, as in `token_embedding`,
    `embed_tokens`, T5's `shared` and `relative_attention_bias`. `time_embedding.linear_1` is a Linear.

    Args:
        key: Such as `unet.mid_block.attentions.0.proj_in.weight`.
        shape: The tensor's.
    """
    module = key.removesuffix(WEIGHT)
    if not key.endswith(WEIGHT) or len(shape) not in _LAYER_DIMENSIONS or 0 in shape or is_parameter(module):
        return False
    return len(shape) > 2 or not _is_embedding(module.rpartition(".")[2])


def is_parameter(path: str) -> bool:
    """Whether a path is that of a block's own parameter: WAN's `modulation` (1, 6, width) is no layer of one output."""
    return path.rpartition(".")[2] in _PARAMETERS


def _is_embedding(module: str) -> bool:
    return module in _EMBEDDINGS or module.endswith(_EMBEDDING_ENDINGS)


def in_coverage(module: str, coverage: Coverage) -> bool:
    """Whether a coverage includes a layer, in any family's naming.

    Args:
        module: Path of the layer, such as `denoiser.mid_block.attentions.0.proj_in`.
        coverage: See `ExtractOptions.target_coverage`.
    """
    if coverage == "full" or _ATTENTION.search(module):
        return True
    return coverage == "extended" and _AROUND_ATTENTION.search(module) is not None


@lru_cache(maxsize=4096)
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
        return _numbered_block(numbered[1], int(numbered[2]), name[numbered.start(1) :])
    if single is not None:
        return _SINGLE_BY_FLAT[single[1].replace(".", "_")]
    layer = _LAYER.search(name)
    if layer is not None:
        return f"{layer[0][: -len(layer[1]) - 1]}.{layer[1]}"
    path = re.sub(
        r"^(?:lora_unet_|oft_unet_|denoiser\.|(?:model\.)?diffusion_model\.|transformer\.|unet\.)", "", name
    )
    return re.split(r"[._]", path, maxsplit=1)[0]


def _numbered_block(kind: str, number: int, path: str) -> str:
    """Sgm numbers the layers of all levels in one sequence, beginning with `conv_in`."""
    if kind == "input_blocks":
        level = (number - 1) // _SGM_LAYERS_PER_LEVEL
        return f"down_blocks.{level}" if number > 0 else "conv_in"
    if kind == "output_blocks":
        return f"up_blocks.{number // _SGM_LAYERS_PER_LEVEL}"
    usual = BLOCK_LISTS.get(kind) or _LISTS_BY_FLAT[kind]
    shown = next((shown for shown, layers in _OF_LAYERS.items() if layers.match(path)), usual)
    return f"{shown}.{number}"


def block_position(block: str) -> tuple[int, str, int]:
    """Sorting key: the order in which a latent passes the blocks; text encoders first, unknown blocks last."""
    first, _, number = block.partition(".")
    position = _BLOCK_ORDER.get(first, len(_BLOCK_ORDER))
    return position, first if position == len(_BLOCK_ORDER) else "", int(number) if number.isdigit() else -1


def layer_order(module: str) -> tuple[tuple[int, str, int], list[tuple[int, str]]]:
    """Sorting key for layers: by block, then by name with numbers as numbers (2 before 10)."""
    pieces = re.split(r"(\d+)", module)
    return block_position(block_of_module(module)), [(int(p), "") if p.isdigit() else (-1, p) for p in pieces]


def write_layer_names(path: str | PathLike[str], names: Iterable[str]) -> Sequence[str]:
    """Write `lora_layer_names.txt`: the LoRA's layers, one per line, in the model's order.

    A line, or any part of it (`attn1`, `ff.net`, `up_blocks.1`), can be used in a training configuration's
    `trainable_lora_modules`, which takes partial names.

    Args:
        path: The text file; an existing one is replaced.
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
    """Refuse an invalid regular expression, and an empty one, which would match every layer.

    Raises:
        ConfigError: Names the flag, the pattern and what is wrong with it.
    """
    if not pattern:
        raise ConfigError(f"{flag} has no pattern.", hint="Use one such as 'up_blocks.*attn1'.")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{flag} {pattern!r} is not a valid regular expression: {error}.",
            hint="Put a backslash before a character that is meant literally, such as \\( or \\[.",
        ) from error


def require_matches(pattern: str, layers: Sequence[str], flag: str) -> None:
    """Refuse a pattern that matches no layer: it is a typing error.

    Raises:
        ConfigError: Names the nearest layers.
    """
    if any(matches(pattern, layer) for layer in layers):
        return
    nearest = nearest_layers(pattern, layers)
    raise ConfigError(
        f"{flag} {pattern!r} matches none of the {len(layers)} layers.",
        hint=f"The nearest layers are {', '.join(nearest)}." if nearest else "The model has no layers.",
    )


def matches(pattern: str, layer: str) -> bool:
    """Whether a pattern matches anywhere in a layer's path."""
    return re.search(pattern, layer) is not None


class NearestNames:
    """Finds the names that share the most words with a given one; rare words count for more.

    Args:
        names: Names of the model's layers, with dots or underscores.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)
        counts = [Counter(_WORDS.findall(name)) for name in self._names]
        self._times: dict[str, NDArray[np.float64]] = {}
        for index, words in enumerate(counts):
            for word, times in words.items():
                self._times.setdefault(word, np.zeros(len(self._names)))[index] = times
        # If two names share as much, the shorter one is nearer.
        self._lengths = np.array([sum(words.values()) or 1 for words in counts], dtype=np.float64) ** 0.25

    def nearest(self, name: str) -> tuple[str, ...]:
        """Up to three names, the nearest first; each shares at least one word."""
        scores = np.zeros(len(self._names))
        for word, times in Counter(_WORDS.findall(name)).items():
            times_by_name = self._times.get(word)
            if times_by_name is not None:
                rarity = log(1.0 + len(self._names) / np.count_nonzero(times_by_name))
                scores += rarity * np.minimum(times_by_name, times)
        scores /= self._lengths
        best = np.argsort(-scores, kind="stable")[:_NEAREST_COUNT]
        return tuple(self._names[index] for index in best if scores[index] > 0.0)


def nearest_layers(pattern: str, layers: Iterable[str]) -> list[str]:
    """The three layers whose words are most similar to the pattern's, typing errors allowed; the nearest first."""
    wanted = _pieces(pattern)
    likeness: dict[tuple[str, str], float] = {}

    def like(piece: str, part: str) -> float:
        if (piece, part) not in likeness:
            likeness[piece, part] = SequenceMatcher(None, piece, part, autojunk=False).ratio()
        return likeness[piece, part]

    def distance(layer: str) -> tuple[float, int]:
        parts = _pieces(layer) or [layer]
        return -sum(max(like(piece, part) for part in parts) for piece in wanted), len(layer)

    return sorted(layers, key=distance)[:_NEAREST_COUNT]


def _pieces(text: str) -> list[str]:
    return [piece for piece in re.split(r"[\W_]+", text) if piece]


def renamed(
    path: str, part: Part, layout: ModelLayout, wanted: Naming, blocks: UnetBlocks | None = None
) -> str | Row:
    """A layer's path in another naming.

    Args:
        path: The layer's path inside its part of the model, in the layout's naming.
        part: That part.
        layout: The layout of the path's checkpoint.
        wanted: The naming to translate to; `original` is that of the family's single files, sgm's for U-Nets.
        blocks: The U-Net's blocks; the family's usual ones by default.

    Returns:
        The path; or the table's row if the layer is fused with others there, or has its rows in another order.

    Raises:
        LoraFormatError: No name of the layer is known there.
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
            f"no {wanted} name is known for {path} of a {layout.family} model.",
            hint="Write the native format, which keeps the model's own names.",
        )
    return new_name


def is_unet_layer(path: str, layout: ModelLayout) -> bool:
    """Whether a denoiser's layer belongs to a Stable Diffusion U-Net, in either naming."""
    unknown = layout.family == "unknown"
    return layout.family in UNET_FAMILIES or (unknown and path.startswith(_UNET_STARTS))


def unet_kernel(path: str, layout: ModelLayout) -> int | None:
    """Kernel side of a U-Net's convolution, told by its diffusers name; None for any other layer."""
    return kernel_of(path, family_named(layout.family)) if is_unet_layer(path, layout) else None


def kernel_of(path: str, family: Family) -> int | None:
    """`unet_kernel` of a layer of a family's U-Net."""
    projects = family.projects_by_convolution and path.endswith((".proj_in", ".proj_out"))
    if projects or path.endswith(".conv_shortcut"):
        return 1
    return 3 if _CONVOLUTION.search(path) else None


_PATCHES: Final = re.compile(
    r"(?:^|\.)(?:patch_embedding|(?:pos_embed|patch_embed|x_embedder|img_in)\.proj|conv\w*)(?:\.|$)"
)
"""Layers of transformers that may be convolutions."""


def is_linear(path: str, family: Family) -> bool:
    """Whether a denoiser's layer, named as in diffusers, is known to be a linear one."""
    return kernel_of(path, family) is None if family.is_unet else _PATCHES.search(path) is None


def usual_blocks(family: str) -> UnetBlocks:
    """The blocks of the family's published U-Net."""
    return family_named(family).unet_blocks


def _in_other_part(path: str, part: Part) -> str | Row:
    """Every LoRA format names text encoders as transformers does; other parts keep their paths."""
    if not part.startswith("text_encoder"):
        return path
    if path.startswith(_CLIP_STARTS):  # since transformers 5, CLIPTextModel's keys lack `text_model.`
        return f"text_model.{path}"
    row = row_of_original("open_clip", path)
    if row is None:
        return path
    parts = tuple(f"text_model.{part}" for part in row.parts)
    return parts[0] if row.is_rename else Row(row.original, parts, row.swapped)


def blocks_of(paths: Iterable[str], usual: UnetBlocks | None = None, *, complete: bool = True) -> UnetBlocks:
    """Tell a U-Net's blocks from the paths of its layers, in either naming.

    Args:
        paths: Paths inside the U-Net, without `.weight`.
        usual: What to assume if the paths prove nothing else; SDXL's blocks by default.
        complete: Whether these are all layers of the U-Net; a LoRA has only some.
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
    if lower and (complete or max(upper, default=0) == max(lower) + 1):  # an upper block has one more layer
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
    """The U-Net's blocks, told from the paths of all layers of a model."""
    return blocks_of(path for part, path in map(layout.split, layers) if part == "denoiser")


@lru_cache(maxsize=16384)
def to_sgm(path: str, blocks: UnetBlocks = SDXL_BLOCKS) -> str | None:
    """The sgm path of a layer, given its diffusers path inside the U-Net.

    Returns:
        The path; None if the layer does not belong to such a U-Net.
    """
    if path in TOP:
        return TOP[path]
    middle = _MID.fullmatch(path)
    if middle is not None:
        kind = middle[1].partition(".")[0]
        return _joined("middle_block", _SGM_BY_MIDDLE.get(middle[1]), _renamed(middle[2], kind, RESNET))
    side = _SIDE.fullmatch(path)
    if side is None:
        return None
    kind, rest, upper = side[3], side[5], side[1] == "up"
    number = int(side[2]) * (blocks.layers_per_block + 1) + int(side[4]) + (0 if upper else 1)
    start = f"output_blocks.{number}" if upper else f"input_blocks.{number}"
    if kind in _SGM_BY_CHILD:
        return _joined(start, _SGM_BY_CHILD[kind], _renamed(rest, kind, RESNET))
    last = number + blocks.layers_per_block  # samplers count as layer 0 in diffusers, and come last in sgm
    if rest != "conv":
        return None
    if not upper:
        return f"input_blocks.{last}.0.op"
    return f"output_blocks.{last}.{2 if int(side[2]) in blocks.attention else 1}.conv"


@lru_cache(maxsize=16384)
def to_diffusers(path: str, blocks: UnetBlocks = SDXL_BLOCKS) -> str | None:
    """The diffusers path of a layer, given its sgm path inside the U-Net.

    Returns:
        The path; None if the layer does not belong to such a U-Net.
    """
    if path in TOP_OF_SGM:
        return TOP_OF_SGM[path]
    middle = _SGM_MID.fullmatch(path)
    if middle is not None:
        inner = _MIDDLE_BY_SGM.get(middle[1], "")
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
    kind = {number: name for name, number in _SGM_BY_CHILD.items()}.get(child, "")
    return _joined(start, kind and f"{kind}.{layer}", _renamed(rest, kind, RESNET_OF_SGM))


def _renamed(rest: str, kind: str, resnet: dict[str, str]) -> str | None:
    """The name inside a residual or attention layer; attention layers are named alike in both."""
    return resnet.get(rest) if kind == "resnets" else rest


def _joined(*pieces: str | None) -> str | None:
    return ".".join(map(str, pieces)) if all(pieces) else None
