"""Which family a checkpoint is of, how it names its parts, and the fingerprint of its denoiser.

`layout_of` tells the family by keys and shapes alone, so that no tensor is read. Its signatures are keys of
diffusers' models and of the files that the families were published in; a U-Net's family shows in the width of its
cross attention (`unet_family`). A model that no signature fits works by its own keys: all of it is then one part.

`denoiser_fingerprint` does read tensors. A LoRA file carries the fingerprint of its base (`BASE_FINGERPRINT`), which
tells later whether a base is the one that the LoRA was made from.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Final, Literal

import torch
from torch import Tensor

from sigmascope.checkpoints import Checkpoint, tensor_fingerprint
from sigmascope.lora.linalg import at_least_float32

Part = Literal["denoiser", "denoiser_2", "vae", "text_encoder", "text_encoder_2", "text_encoder_3", "other"]
Shapes = Mapping[str, tuple[int, ...]]

UNET: Final = "a U-Net, whose family its shapes tell"
# Family, naming of the denoiser, and the keys by which they are told.
_SIGNATURES: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    (
        "flux",
        "diffusers",
        (
            "x_embedder.weight",
            "time_text_embed.text_embedder.linear_1.weight",
            "single_transformer_blocks.0.proj_mlp.weight",
        ),
    ),
    (
        "flux",
        "original",
        (
            "vector_in.in_layer.weight",
            "double_blocks.0.img_attn.qkv.weight",
            "single_blocks.0.linear1.weight",
        ),
    ),
    (
        "sd3",
        "diffusers",
        (
            "pos_embed.proj.weight",
            "context_embedder.weight",
            "transformer_blocks.0.norm1_context.linear.weight",
        ),
    ),
    (
        "sd3",
        "original",
        ("x_embedder.proj.weight", "context_embedder.weight", "joint_blocks.0.x_block.attn.qkv.weight"),
    ),
    (
        "wan",
        "diffusers",
        (
            "patch_embedding.weight",
            "condition_embedder.time_embedder.linear_1.weight",
            "blocks.0.attn1.to_q.weight",
        ),
    ),
    ("wan", "original", ("patch_embedding.weight", "head.modulation", "blocks.0.self_attn.q.weight")),
    (
        "qwen_image",
        "diffusers",
        ("img_in.weight", "txt_norm.weight", "transformer_blocks.0.img_mod.1.weight"),
    ),
    (UNET, "diffusers", ("conv_in.weight", "conv_out.weight", "time_embedding.linear_1.weight")),
    (UNET, "sgm", ("input_blocks.0.0.weight", "out.2.weight", "time_embed.0.weight")),
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
_SINGLE_FILE: Final[tuple[tuple[Part, str], ...]] = (
    ("denoiser", "model.diffusion_model."),
    ("vae", "first_stage_model."),
    ("vae", "vae."),
    ("text_encoder", "cond_stage_model.transformer."),
    ("text_encoder", "cond_stage_model.model."),
    ("text_encoder", "conditioner.embedders.0.transformer."),
    ("text_encoder_2", "conditioner.embedders.0.model."),  # SDXL's refiner has this encoder alone
    ("text_encoder_2", "conditioner.embedders.1.model."),
    ("text_encoder", "text_encoders.clip_l.transformer."),
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
)

# U-Nets are told apart by the width of the context that their cross attention reads.
_CONTEXT: Final = "attn2.to_k.weight"
_CONTEXT_WIDTHS: Final = {768: "sd15", 1024: "sd2", 2048: "sdxl"}
_ADDED: Final = ("add_embedding.linear_1.weight", "label_emb.0.0.weight")
_VIDEO: Final = ("temporal_transformer_blocks", "time_stack")

BASE_FINGERPRINT: Final = "sigmascope_base_fingerprint"
"""The field of a LoRA file's header that holds its base's fingerprint."""
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
        found = [
            (len(prefix), part, prefix) for part, prefix in self.prefixes.items() if key.startswith(prefix)
        ]
        if not found:
            return "other", key
        _, part, prefix = max(found)
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
            if all(prefix + key in infos for key in keys):
                if family == UNET:
                    family = unet_family(infos, prefix)
                return ModelLayout(family, naming, _prefixes(infos, prefix, family))
    return _without_denoiser(infos)


def _prefixes(infos: Shapes, denoiser: str, family: str) -> dict[Part, str]:
    if denoiser in {"unet.", "transformer."}:
        return _present(infos, _COMPONENTS) | {"denoiser": denoiser}
    found = _present(infos, _SINGLE_FILE)
    if family == "sd3" and found.get("text_encoder_2") == _T5:
        del found["text_encoder_2"]
    if family == "sd3" and _starts(infos, _T5):
        found["text_encoder_3"] = _T5
    return found | {"denoiser": denoiser}


def _without_denoiser(infos: Shapes) -> ModelLayout:
    if _starts(infos, "vae.vae_model."):
        return ModelLayout("lbm", "lbm", _present(infos, _LBM))
    components = _present(infos, _COMPONENTS)
    # One name alone proves nothing: language models begin all their keys with `transformer.`.
    if len(components) > 1:
        return ModelLayout("unknown", "diffusers", components)
    if single := _present(infos, _SINGLE_FILE):
        return ModelLayout("unknown", "unknown", single)
    for part, naming, key in _BARE_PARTS:
        if key in infos:
            return ModelLayout("unknown", naming, {part: ""})
    return ModelLayout("unknown", "unknown", {"denoiser": ""})


def _present(infos: Shapes, table: Iterable[tuple[Part, str]]) -> dict[Part, str]:
    """The entries of a table that any key begins with; the first of a part wins."""
    found: dict[Part, str] = {}
    for part, prefix in table:
        if part not in found and _starts(infos, prefix):
            found[part] = prefix
    return found


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
    if width in _CONTEXT_WIDTHS and not (has_added and width == 768):
        return _CONTEXT_WIDTHS[width]
    if has_added:
        return "sdxl"
    if not first_level and all(keys == queries for queries, keys in context.values()):
        return "lbm"  # its cross attention attends to the hidden states themselves
    return _by_projection(shapes, prefix)


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
        rounded = tensor if tensor.dtype == torch.bfloat16 else _rounded(tensor)
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


def _rounded(tensor: Tensor) -> Tensor:
    return tensor.to(at_least_float32(tensor.dtype)).to(torch.float32).to(torch.bfloat16)
