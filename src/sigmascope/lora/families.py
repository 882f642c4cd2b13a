"""Which family a checkpoint is of, how it names its parts, and the fingerprint of its denoiser.

`layout_of` tells the family by keys and shapes alone, so that no tensor is read. Its signatures are keys of
diffusers' models and of the files that the families were published in; what another model shares the names of, it
differs from in shapes or blocks (`misfit`). A U-Net's family shows in the width of its cross attention (`unet_family`). A model that no signature fits works by its own keys: all of it is then one part.

`denoiser_fingerprint` does read tensors. A LoRA file carries the fingerprint of its base (`BASE_FINGERPRINT`), which
tells later whether a base is the one that the LoRA was made from.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, Literal

import torch

from sigmascope.checkpoints import Checkpoint, tensor_fingerprint

Part = Literal["denoiser", "denoiser_2", "vae", "text_encoder", "text_encoder_2", "text_encoder_3", "other"]
Shapes = Mapping[str, tuple[int, ...]]

_WEIGHT: Final = ".weight"
UNET: Final = "a U-Net, whose family its shapes tell"
# Family, naming of the denoiser, and the keys by which they are told.
_SIGNATURES: Final = (
    (
        "flux",
        "diffusers",
        "x_embedder.weight time_text_embed.text_embedder.linear_1.weight single_transformer_blocks.0.proj_mlp.weight",
    ),
    (
        "flux",
        "original",
        "img_in.weight vector_in.in_layer.weight double_blocks.0.img_attn.qkv.weight single_blocks.0.linear1.weight",
    ),
    (
        "sd3",
        "diffusers",
        "pos_embed.proj.weight context_embedder.weight transformer_blocks.0.norm1_context.linear.weight",
    ),
    (
        "sd3",
        "original",
        "x_embedder.proj.weight context_embedder.weight joint_blocks.0.x_block.attn.qkv.weight",
    ),
    (
        "wan",
        "diffusers",
        "patch_embedding.weight condition_embedder.time_embedder.linear_1.weight blocks.0.attn1.to_q.weight",
    ),
    ("wan", "original", "patch_embedding.weight head.modulation blocks.0.self_attn.q.weight"),
    ("qwen_image", "diffusers", "img_in.weight txt_norm.weight transformer_blocks.0.img_mod.1.weight"),
    (UNET, "diffusers", "conv_in.weight conv_out.weight time_embedding.linear_1.weight"),
    (UNET, "sgm", "input_blocks.0.0.weight out.2.weight time_embed.0.weight"),
)
_DENOISER_PREFIXES: Final = ("", "model.diffusion_model.", "unet.", "transformer.", "diffusion_model.")
# What stands before the keys of each part: in diffusers' folders, in single files, and in LBM's checkpoints.
_COMPONENTS: Final[tuple[tuple[Part, str], ...]] = (
    ("denoiser", "unet."),
    ("denoiser", "transformer."),
    ("denoiser_2", "transformer_2."),
    ("vae", "vae."),
    ("text_encoder", "text_encoder."),
    ("text_encoder_2", "text_encoder_2."),
    ("text_encoder_3", "text_encoder_3."),
)
SINGLE_FILE: Final[tuple[tuple[Part, str], ...]] = (
    ("denoiser", "model.diffusion_model."),
    ("vae", "first_stage_model."),
    ("vae", "vae."),
    ("text_encoder", "cond_stage_model.transformer."),
    ("text_encoder", "cond_stage_model.model."),
    ("text_encoder", "conditioner.embedders.0.transformer."),
    ("text_encoder_2", "conditioner.embedders.0.model."),  # SDXL's refiner has this encoder alone
    ("text_encoder_2", "conditioner.embedders.1.model."),
    ("text_encoder", "text_encoders.clip_l.transformer."),
    ("text_encoder", "text_encoders.clip_h.transformer."),
    ("text_encoder", "text_encoders.qwen25_7b.transformer."),
    ("text_encoder", "text_encoders.umt5xxl.transformer."),
    ("text_encoder_2", "text_encoders.clip_g.transformer."),
    ("text_encoder_2", "text_encoders.t5xxl.transformer."),
)
_T5: Final = "text_encoders.t5xxl.transformer."
_LBM: Final[tuple[tuple[Part, str], ...]] = (("denoiser", "denoiser."), ("vae", "vae.vae_model."))
# A part alone, without a prefix: the part, its naming, and the key by which it is told.
_BARE_PARTS: Final[tuple[tuple[Part, str, str], ...]] = (
    ("vae", "diffusers", "decoder.mid_block.resnets.0.conv1.weight"),
    ("vae", "sgm", "decoder.mid.block_1.conv1.weight"),
    ("vae", "original", "decoder.middle.0.residual.0.gamma"),
    ("text_encoder", "diffusers", "text_model.encoder.layers.0.self_attn.q_proj.weight"),
    ("text_encoder", "diffusers", "encoder.layers.0.self_attn.q_proj.weight"),
    ("text_encoder", "diffusers", "encoder.block.0.layer.0.SelfAttention.q.weight"),
    ("text_encoder", "diffusers", "model.language_model.layers.0.self_attn.q_proj.weight"),
    ("text_encoder", "diffusers", "model.layers.0.self_attn.q_proj.weight"),
)

# U-Nets are told apart by the width of the context that their cross attention reads.
_CONTEXT: Final = "attn2.to_k.weight"
CONTEXT_WIDTHS: Final = {768: "sd15", 1024: "sd2", 2048: "sdxl"}
_LBM_WIDTHS: Final = frozenset({320, 640, 1280})
_ADDED: Final = ("add_embedding.linear_1.weight", "label_emb.0.0.weight")
_VIDEO: Final = ("temporal_transformer_blocks", "time_stack")

# What models have that share a family's names: outputs and inputs as multiples of the family's width, and blocks.
# FLUX.2's layers are 6, 3, 9 and 4 wide, and read 6144 ([dev]) or 4096 ([klein] 9B) features; Hunyuan's video models
# have more blocks.
_FEED_FORWARD: Final = (
    (re.compile(r"transformer_blocks\.\d+\.ff(?:_context)?\.net\.0\.proj"), 4, 1),
    (re.compile(r"transformer_blocks\.\d+\.ff(?:_context)?\.net\.2"), 1, 4),
)
_MULTIPLES: Final[dict[str, tuple[tuple[re.Pattern[str], int, int], ...]]] = {
    "flux": (
        *_FEED_FORWARD,
        (re.compile(r"double_blocks\.\d+\.(?:img|txt)_mlp\.0"), 4, 1),
        (re.compile(r"double_blocks\.\d+\.(?:img|txt)_mlp\.2"), 1, 4),
        (re.compile(r"single_transformer_blocks\.\d+\.proj_mlp"), 4, 1),
        (re.compile(r"single_transformer_blocks\.\d+\.proj_out"), 1, 5),
        (re.compile(r"single_blocks\.\d+\.linear1"), 7, 1),
        (re.compile(r"single_blocks\.\d+\.linear2"), 1, 5),
    ),
    "sd3": (
        *_FEED_FORWARD,
        (re.compile(r"joint_blocks\.\d+\.(?:x|context)_block\.mlp\.fc1"), 4, 1),
        (re.compile(r"joint_blocks\.\d+\.(?:x|context)_block\.mlp\.fc2"), 1, 4),
    ),
}
_WIDEST: Final = {"flux": 3072}  # features that attention reads
_BLOCKS: Final = {
    "flux": {
        "double_blocks": 19,
        "single_blocks": 38,
        "transformer_blocks": 19,
        "single_transformer_blocks": 38,
    }
}

BASE_FINGERPRINT: Final = "sigmascope_base_fingerprint"
"""The field of a LoRA file's header that holds its base's fingerprint."""
TUNED_FINGERPRINT: Final = "sigmascope_tuned_fingerprint"
"""The same of the model that it was extracted from."""
# Tensors that are hashed for it.
_SMALL: Final = 16 * 1024  # elements
_LARGE_TENSORS: Final = 16
_LARGE_ELEMENTS: Final = 1 << 26  # of all large tensors together: 256 MiB in float32


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """How a checkpoint names its weights.

    Attributes:
        family: `lbm`, `sd15`, `sd2`, `sdxl`, `sd3`, `flux`, `wan`, `qwen_image` or `unknown`.
        naming: The vocabulary of the denoiser's keys, whatever stands before them. `lbm`: diffusers' U-Net keys
            under `denoiser.`. `diffusers`. `sgm`: the U-Net keys of CompVis and Stability AI (`input_blocks`).
            `original`: the family's own (`double_blocks`, `joint_blocks`, WAN's `self_attn`). `unknown`.
        prefixes: What stands before the keys of each part: `unet.`, `model.diffusion_model.`, or nothing.
    """

    family: str
    naming: str
    prefixes: Mapping[Part, str]

    def split(self, key: str) -> tuple[Part, str]:
        """The part that a key belongs to, and the key inside that part.

        Returns:
            Such as ("denoiser", "down_blocks.0.resnets.0.conv1.weight"); ("other", key) for a key of no part.
        """
        matches = [
            (len(prefix), part, prefix) for part, prefix in self.prefixes.items() if key.startswith(prefix)
        ]
        if not matches:
            return "other", key
        _, part, prefix = max(matches)
        return part, key.removeprefix(prefix)


def layout_of(infos: Shapes) -> ModelLayout:
    """Recognise a model by its keys and shapes.

    Args:
        infos: Shapes by key, of a whole checkpoint or of one component.

    Returns:
        The layout; of a model that is not known, family `unknown` with all keys in the part `denoiser`. A VAE or
        text encoder alone, without a prefix, is a part of its own and of no certain family.
    """
    if any(key.startswith("denoiser.") and key.endswith(".weight") for key in infos):
        return ModelLayout("lbm", "lbm", _present(infos, _LBM))
    for prefix in _DENOISER_PREFIXES:
        for family, naming, keys in _SIGNATURES:
            if all(prefix + key in infos for key in keys.split()):
                if family == UNET:
                    family = unet_family(infos, prefix)
                elif misfit(family, _layers_under(infos, prefix)) is not None:
                    continue
                return ModelLayout(family, naming, _prefixes(infos, prefix, family))
    return _without_denoiser(infos)


def _layers_under(infos: Shapes, prefix: str) -> dict[str, tuple[int, ...]]:
    return {
        key[len(prefix) : -len(_WEIGHT)]: shape
        for key, shape in infos.items()
        if key.startswith(prefix) and key.endswith(_WEIGHT)
    }


def misfit(family: str, shapes: Shapes) -> str | None:
    """What of a denoiser is otherwise than in a family, although its names may be the family's.

    Args:
        family: As in `ModelLayout.family`.
        shapes: Of weights, by the layer's path in the denoiser, in either naming.

    Returns:
        Such as "double_blocks.0.img_mlp.0 is 36864 × 6144, not 4 times as many outputs as inputs"; None if all fits,
        or no more than half of what tells does not: a single layer of another shape is damage.
    """
    blocks = _BLOCKS.get(family, {})
    attention: list[str | None] = []
    multiples: list[str | None] = []
    for path, shape in shapes.items():
        name, _, rest = path.partition(".")
        number = rest.partition(".")[0]
        if name in blocks and number.isdigit() and int(number) >= blocks[name]:
            return f"it has more than {blocks[name]} {name} ({path})"
        if len(shape) != 2:
            continue
        if name in blocks and "attn." in path:
            wide = f"{path} reads {shape[1]} features, more than {_WIDEST[family]}"
            attention.append(wide if shape[1] > _WIDEST[family] else None)
        for pattern, out, inner in _MULTIPLES.get(family, ()):
            if pattern.fullmatch(path):
                times = f"{out} times as many outputs as inputs"
                if inner > out:
                    times = f"{inner} times as many inputs as outputs"
                other = f"{path} is {shape[0]} × {shape[1]}, not {times}"
                multiples.append(other if shape[0] * inner != shape[1] * out else None)
    for told in (multiples, attention):
        if 2 * told.count(None) < len(told):
            return next(filter(None, told))
    return None


def _prefixes(infos: Shapes, denoiser: str, family: str) -> dict[Part, str]:
    if denoiser in {"unet.", "transformer."}:
        return _present(infos, _COMPONENTS) | {"denoiser": denoiser}
    prefixes = _present(infos, SINGLE_FILE)
    if family == "sd3" and prefixes.get("text_encoder_2") == _T5:
        del prefixes["text_encoder_2"]
    if family == "sd3" and _starts(infos, _T5):
        prefixes["text_encoder_3"] = _T5
    return prefixes | {"denoiser": denoiser}


def _without_denoiser(infos: Shapes) -> ModelLayout:
    if _starts(infos, "vae.vae_model."):
        return ModelLayout("lbm", "lbm", _present(infos, _LBM))
    components = _present(infos, _COMPONENTS)
    # One name alone proves nothing: language models begin all their keys with `transformer.`.
    if len(components) > 1:
        return ModelLayout("unknown", "diffusers", components)
    if single := _present(infos, SINGLE_FILE):
        return ModelLayout("unknown", "unknown", single)
    for part, naming, key in _BARE_PARTS:
        if key in infos:
            return ModelLayout("unknown", naming, {part: ""})
    return ModelLayout("unknown", "unknown", {"denoiser": ""})


def _present(infos: Shapes, table: Iterable[tuple[Part, str]]) -> dict[Part, str]:
    """The entries of a table that any key begins with; the first of a part wins."""
    prefixes: dict[Part, str] = {}
    for part, prefix in table:
        if part not in prefixes and _starts(infos, prefix):
            prefixes[part] = prefix
    return prefixes


def _starts(infos: Shapes, prefix: str) -> bool:
    return any(key.startswith(prefix) for key in infos)


def unet_family(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> str:
    """Tell SD1.5, SD2, SDXL and LBM apart, in diffusers' or sgm's keys; small models of the same make too.

    Args:
        shapes: Shapes by key.
        prefix: What stands before the U-Net's keys.

    Returns:
        `sd15`, `sd2`, `sdxl`, `lbm` (a denoiser that was taken out of its checkpoint) or `unknown`.
    """
    context = {
        key: shape
        for key, shape in shapes.items()
        if key.startswith(prefix) and key.endswith(_CONTEXT) and len(shape) == 2
    }
    if not context or any(mark in key for key in context for mark in _VIDEO):
        return "unknown"
    width = next(iter(context.values()))[1]
    has_added = any(prefix + key in shapes for key in _ADDED)
    first_level = any(
        key.startswith((f"{prefix}down_blocks.0.", f"{prefix}input_blocks.1.")) for key in context
    )
    if width in CONTEXT_WIDTHS and not (has_added and width == 768):
        return CONTEXT_WIDTHS[width]
    if has_added:
        return "sdxl"
    if not first_level and attends_to_itself(context.values()):
        return "lbm"
    return _by_projection(shapes, prefix)


def attends_to_itself(context: Iterable[Sequence[int]]) -> bool:
    """Whether cross attention reads the hidden states themselves, as LBM's does: it is as wide as they are at each level.

    Text is of one width for all levels, which that of small models may equal by chance: one width alone proves it
    only where it is LBM's own.

    Args:
        context: (hidden states, context): the shapes of the matrices `to_k` or `to_v` of cross attention.
    """
    widths = {tuple(shape) for shape in context}
    is_square = bool(widths) and all(hidden == read for hidden, read in widths)
    return is_square and (len(widths) > 1 or any(hidden in _LBM_WIDTHS for hidden, _ in widths))


def _by_projection(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> str:
    """SD1.5 projects into its transformers by 1×1 convolutions, SD2 by matrices."""
    for key, shape in shapes.items():
        if key.startswith(prefix) and key.endswith(".proj_in.weight"):
            return "sd15" if len(shape) == 4 else "sd2"
    return "unknown"


def denoiser_fingerprint(checkpoint: Checkpoint) -> str:
    """Identify a denoiser by its small tensors and a sample of its large ones.

    All tensors of up to 16,384 elements are hashed (biases, norms, the convolutions at both ends), and up to
    16 larger ones, chosen by their names alone and together no more than 64 million elements, so that a
    full-size file needs no more than 256 MiB of reading. Values are rounded to bfloat16 first: a model
    and its exact float32 or bfloat16 copy are one base.

    What it can miss: a training that changed only layers outside the sample, or every value by less than
    bfloat16 shows. What it tells apart without need: a model and its float16 copy, whose rounding differs.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for key in _hashed_keys(checkpoint):
        tensor = checkpoint.tensor(key)
        rounded = tensor if tensor.dtype == torch.bfloat16 else tensor.to(torch.float32).to(torch.bfloat16)
        digest.update(f"{key!r}\n{tensor_fingerprint(rounded)}\n".encode())
    return digest.hexdigest()


def _hashed_keys(checkpoint: Checkpoint) -> list[str]:
    """The same for any two files of one architecture, whatever their dtypes and order."""
    shapes = {key: checkpoint.info(key).shape for key in checkpoint}
    layout = layout_of(shapes)
    sizes = {key: prod(shape) for key, shape in shapes.items() if layout.split(key)[0] == "denoiser"}
    sizes = sizes or {key: prod(shape) for key, shape in shapes.items()}  # a VAE or text encoder alone
    chosen = [key for key, size in sizes.items() if size <= _SMALL]
    room = _LARGE_ELEMENTS
    # By a hash of the name: any even step through the names could meet the same kind of layer each time.
    large = sorted(sizes.keys() - chosen, key=lambda key: hashlib.sha256(repr(key).encode()).digest())
    for key in large[:_LARGE_TENSORS]:
        if sizes[key] <= room:
            chosen.append(key)
            room -= sizes[key]
    return sorted(chosen)
