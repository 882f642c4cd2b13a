"""Recognise a checkpoint's family, and how it names its parts.

`layout_of` recognises the family by keys and shapes alone; no tensor is read. Its signatures are keys of diffusers'
models and of the files that the families were published in. Families that share names are told apart by shapes and
blocks (`family_misfit`), and U-Nets by the width of their cross attention (`unet_family`). What a wrapper put before
the keys, such as `module.` or `pipe.dit.`, is found by the signatures too. A model that fits no signature is used under
its own keys, as a single part.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from sigmascope.lora.families.family import Part, Shapes
from sigmascope.lora.families.known import (
    CONTEXT_WIDTHS,
    FAMILIES,
    PARTS_BY_ENCODER,
    family_named,
    known_names,
    likeliest,
)

_WEIGHT: Final = ".weight"
_NUMBER: Final = re.compile(r"\.\d+\.")
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
    ("text_encoder_4", "text_encoder_4."),
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
    *((part, f"text_encoders.{encoder}.transformer.") for encoder, part in PARTS_BY_ENCODER.items()),
)
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

_OTHER_PARTS: Final = tuple(prefix for part, prefix in (*_COMPONENTS, *SINGLE_FILE) if part != "denoiser")
_AVERAGED: Final = re.compile(r"(^|[._])ema[._]")
_CONTEXT: Final = "attn2.to_k.weight"
_LBM_WIDTHS: Final = frozenset({320, 640, 1280})
_ADDED: Final = ("add_embedding.linear_1.weight", "label_emb.0.0.weight")
_VIDEO: Final = ("temporal_transformer_blocks", "time_stack")


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """How a checkpoint names its weights.

    Attributes:
        family: One of `FAMILIES`, or `unknown`.
        naming: The vocabulary of the denoiser's keys, whatever their prefix. `lbm`: diffusers' U-Net keys
            under `denoiser.`. `diffusers`. `sgm`: the U-Net keys of CompVis and Stability AI (`input_blocks`).
            `original`: the family's own (`double_blocks`, `joint_blocks`, WAN's `self_attn`). `unknown`.
        prefixes: What stands before the keys of each part: `unet.`, `model.diffusion_model.`, or nothing.
        is_any_unet: Whether the family is a guess among those of U-Nets, which share their layers' names.
    """

    family: str
    naming: str
    prefixes: Mapping[Part, str]
    is_any_unet: bool = False

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
        The layout. For a model that is not known, it has the family `unknown`, with all keys in the part `denoiser`. A
        VAE or text encoder alone, without a prefix, is a part of its own, and its family is not certain.
    """
    if any(key.startswith("denoiser.") and key.endswith(".weight") for key in infos):
        return ModelLayout("lbm", "lbm", _present(infos, _LBM))
    for prefix in (*_DENOISER_PREFIXES, *_wrappers(infos)):
        namings = dict(_signed(infos, prefix))
        layers = _layers_under(infos, prefix) if namings else {}
        fitting = [name for name in namings if family_misfit(name, layers) is None]
        told = likeliest(_with_most_names(fitting, layers), layers)
        if len(told) == 1:
            return ModelLayout(told[0], namings[told[0]], _prefixes(infos, prefix, told[0]))
    return _without_denoiser(infos)


def _signed(infos: Shapes, prefix: str) -> Iterator[tuple[str, str]]:
    """The families that a denoiser has the signature of, and its naming there; of U-Nets the one that it is."""
    unets: dict[str, str] = {}
    for family in FAMILIES.values():
        for naming, keys in family.signatures.items():
            if not all(prefix + key in infos for key in keys.split()):
                continue
            if not family.is_unet:
                yield family.name, naming
            elif not unets:  # all U-Nets have one signature
                unets = {unet_family(infos, prefix): naming}
                yield from unets.items()


def _wrappers(infos: Shapes) -> Iterator[str]:
    """What stands before a family's signature where no usual prefix does; nothing if two models are there.

    Words with a number are no wrapper but a block. Of two copies, one of which is averaged (`ema`), the other is the
    model. What is inside a part that has a prefix of its own belongs to that part.
    """
    signatures = [keys.split() for family in FAMILIES.values() for keys in family.signatures.values()]
    ends = {keys[0] for keys in signatures}
    found = {key[: -len(end)]: None for key in infos for end in _ends(key) if end in ends}
    signed = [
        start for start in found if any(all(start + key in infos for key in keys) for keys in signatures)
    ]
    inside = next((prefix for prefix in _DENOISER_PREFIXES if prefix and _starts(infos, prefix)), "")
    starts = [
        start
        for start in signed
        if start not in _DENOISER_PREFIXES and start.startswith(inside) and not start.startswith(_OTHER_PARTS)
    ]
    models = [start for start in starts if not _AVERAGED.search(start)] or starts
    if len(models) == 1:
        yield models[0]


def _ends(key: str) -> Iterator[str]:
    """What remains of a key without its first words, up to a number."""
    rest = key
    while True:
        word, found, rest = rest.partition(".")
        if not found or word.isdigit():
            return
        yield rest


def _with_most_names(families: Sequence[str], layers: Iterable[str]) -> list[str]:
    """Of families that fit, those that have the most of its names: LTX-2 has all of LTX-Video's, and more."""
    if len(families) < 2:
        return list(families)
    counts = known_names(layers)
    most = max(counts[name] for name in families)
    return [name for name in families if counts[name] == most]


def _layers_under(infos: Shapes, prefix: str) -> dict[str, tuple[int, ...]]:
    return {
        key[len(prefix) : -len(_WEIGHT)]: shape
        for key, shape in infos.items()
        if key.startswith(prefix) and key.endswith(_WEIGHT)
    }


def family_misfit(family: str, shapes: Shapes) -> str | None:
    """How a denoiser differs from a family although its names may be the family's.

    Args:
        family: As in `ModelLayout.family`.
        shapes: Of weights, by the layer's path in the denoiser, in either naming.

    Returns:
        Such as "double_blocks.0.img_mlp.0 is 36864 × 6144, not 4 times as many outputs as inputs"; None if all fits,
        or if at most half of the layers of a kind do not: a single layer of another shape is damage.
    """
    record = family_named(family)
    blocks, widest = record.most_blocks, record.widest
    attention: list[str | None] = []
    multiples: dict[str, list[str | None]] = {}
    for path, shape in shapes.items():
        name, _, rest = path.partition(".")
        number = rest.partition(".")[0]
        if name in blocks and number.isdigit() and int(number) >= blocks[name]:
            return f"it has more than {blocks[name]} {name} ({path})"
        if len(shape) != 2:
            continue
        if widest is not None and name in blocks and "attn." in path:
            wide = f"{path} reads {shape[1]} features, more than {widest}"
            attention.append(wide if shape[1] > widest else None)
        layer = _NUMBER.sub(".0.", path)
        ratios = [ratio for ratio in record.ratios if ratio.matches(layer)]
        if ratios:
            fits = any(shape[0] * ratio.inputs == shape[1] * ratio.outputs for ratio in ratios)
            other = f"{path} is {shape[0]} × {shape[1]}, not {' or '.join(ratio.words for ratio in ratios)}"
            multiples.setdefault(ratios[0].layers, []).append(None if fits else other)
    for told in (*multiples.values(), attention):
        if 2 * told.count(None) < len(told):
            return next(filter(None, told))
    return None


def _prefixes(infos: Shapes, denoiser: str, family: str) -> dict[Part, str]:
    if denoiser in {"unet.", "transformer."}:
        return _present(infos, _COMPONENTS) | {"denoiser": denoiser}
    own = [
        (part, f"text_encoders.{encoder}.transformer.")
        for part, encoders in family_named(family).encoders.items()
        for encoder in encoders
    ]
    taken = {prefix for _, prefix in own}
    others = [entry for entry in SINGLE_FILE if entry[1] not in taken]
    is_wrapped = denoiser not in _DENOISER_PREFIXES
    table = [*own, *others, *(_COMPONENTS if is_wrapped else ())]
    # The other parts may be in the denoiser's wrapper, or in what is around that.
    starts = ["", *accumulate(f"{word}." for word in denoiser.split(".")[:-1])] if is_wrapped else [""]
    prefixes = _present(infos, ((part, start + prefix) for start in starts for part, prefix in table))
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
    """Whether cross attention reads the hidden states, as LBM's does: then it is as wide as they are at each level.

    Text has the same width at all levels, and in a small model this may equal the hidden states' width by chance. So a
    single width proves it only if it is LBM's own.

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
