"""The layers of a model by name: which tensors they are, and which of them a block, coverage or pattern picks.

Paths with dots (native, PEFT, ComfyUI) and names flattened by underscores (kohya) are understood alike, in the
naming of any family, so that a block has one name in every format.
"""

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from os import PathLike
from typing import Final, Literal

from sigmascope.errors import ConfigError
from sigmascope.files import atomic_path

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

_NEAREST: Final = 3  # layers that are named where a pattern matches none


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
