"""A conditioning's tensors, whatever they are nested in, which text encoder made them, and all that is known of them.

Known forms: a bare tensor or array; ComfyUI's `[[tensor, {…}], …]`, where regional and scheduled prompts are
several entries; what diffusers' `encode_prompt` gives, whole or in part; transformers' outputs; any mapping,
dataclass, named tuple or list of these. Tensors that have a name are told apart by it, those without by their
shape: embeddings are (batch, tokens, width), a pooled output (batch, width), a mask is not floating.

Conditionings can be saved for comparison (`dump_conditioning`). Their tensors are then named by what they are
and not by where they were, so that dumps of two pipelines have the same names, whatever each nests its
conditionings in. What writes is handed in: stages themselves touch no files.

The width alone misleads: SDXL's conditioning is 768 + 1280 = 2048 wide, FLUX, SD 3 and WAN feed 4096-wide T5.

The encoders and tokenizers are found in what a host calls its CLIP (`find_encoders`, `find_tokenizers`).
Everything is known by names and configs, so that neither transformers nor ComfyUI is imported.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor, nn

from sigmascope.files import without_home
from sigmascope.probes.models import components_of, modules_in, unwrap
from sigmascope.probes.reading import Reading, attempt, node_outputs
from sigmascope.probes.tensors import Leaf, as_tensor, leaves_of, plain_values, tensor_facts
from sigmascope.stages.baseline import tensor_dict
from sigmascope.stages.prompt_facts import CLIP_TOKENS, as_text
from sigmascope.stages.schema import ConditioningDict, EncoderDict, EntryDict, TensorDict, as_dict

_MOST_LISTS = 8  # nested in each other around ComfyUI's pairs
MAIN_NAMES = (
    "prompt_embeds",
    "last_hidden_state",
    "encoder_hidden_states",
    "cond",
    "c_crossattn",
    "crossattn",
    "context",
    "conditioning",
    "embeddings",
    "embeds",
    "hidden_states",
)
"""What embeddings are called, best first."""
POOLED_NAMES = (
    "pooled_output",
    "pooled_prompt_embeds",
    "pooled_projections",
    "text_embeds",
    "pooler_output",
    "pooled",
    "vector",
    "y",
)
"""What pooled outputs are called, best first."""
MASK_NAMES = (
    "attention_mask",
    "prompt_embeds_mask",
    "prompt_attention_mask",
    "encoder_attention_mask",
    "encoder_hidden_states_mask",
)
"""What masks are called, best first."""
_OTHER_TEXT = "negative_"  # a tensor of that name is taken only where there is no other
_WIDEST_POSITION = 4  # FLUX's text ids are 3 wide


@dataclass(frozen=True, slots=True)
class Entry:
    """One conditioning: embeddings with what belongs to them. `metadata` has the plain values."""

    tensor: Tensor | None
    pooled: Tensor | None = None
    attention_mask: Tensor | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Conditioning:
    """All entries, and in what they were: "tensor", "comfyui", "mapping", "sequence", "none" or a class."""

    structure: str
    entries: tuple[Entry, ...] = ()

    @property
    def first(self) -> Entry:
        """The first entry with embeddings; an empty one if there is none."""
        return next((entry for entry in self.entries if entry.tensor is not None), Entry(None))


def read_conditioning(conditioning: object) -> tuple[Conditioning, str | None]:
    """The tensors of a conditioning, or none and why it could not be read. Never raises."""
    reading = attempt(lambda: find_conditioning(conditioning))
    return reading.value or Conditioning(type(conditioning).__name__), reading.reason


def find_conditioning(conditioning: object) -> Conditioning:
    """The tensors of a conditioning, by entry. Nothing is copied or moved.

    Raises:
        RecursionError, RuntimeError, TypeError, ValueError, AttributeError: Its own code fails when read.
    """
    conditioning = node_outputs(conditioning)
    if conditioning is None:
        return Conditioning("none")
    pairs = _comfyui_pairs(conditioning)
    if pairs is not None:
        return Conditioning("comfyui", tuple(_comfyui_entry(*pair) for pair in pairs))
    leaves = list(leaves_of(conditioning))
    structure = _structure(conditioning)
    if not leaves:
        return Conditioning(structure)
    if structure == "sequence" and len(leaves) > 1 and _is_one_text_an_item(leaves, conditioning):
        return Conditioning(structure, tuple(Entry(leaf.tensor) for leaf in leaves))
    return Conditioning(structure, (entry_of(leaves, plain_values(conditioning)),))


def _comfyui_pairs(conditioning: object, depth: int = 0) -> list[tuple[Any, Mapping[Any, Any]]] | None:
    """The `[tensor, {…}]` pairs of ComfyUI's list, of a single such pair, or of lists of these; None if it is other."""
    if depth > _MOST_LISTS or not isinstance(conditioning, list | tuple) or not conditioning:
        return None
    if _is_pair(conditioning):
        return [(conditioning[0], conditioning[1])]
    pairs: list[tuple[Any, Mapping[Any, Any]]] = []
    for item in conditioning:
        inner = _comfyui_pairs(item, depth + 1)
        if inner is None:
            return None
        pairs += inner
    return pairs


def _is_pair(item: object) -> bool:
    return (
        isinstance(item, list | tuple)
        and len(item) == 2
        and isinstance(item[0], Tensor | np.ndarray | None)
        and isinstance(item[1], Mapping)
    )


def _comfyui_entry(tensor: object, options: Mapping[Any, Any]) -> Entry:
    beside = entry_of(list(leaves_of(options)), plain_values(options), named_only=True)
    others = dict(beside.others)
    if beside.tensor is not None:  # in ComfyUI's options nothing is the conditioning itself
        others["embeddings"] = beside.tensor
    return Entry(as_tensor(tensor), beside.pooled, beside.attention_mask, others, beside.metadata)


def _structure(conditioning: object) -> str:
    if isinstance(conditioning, Tensor | np.ndarray):
        return "tensor"
    if isinstance(conditioning, Mapping):
        return "mapping"
    return "sequence" if isinstance(conditioning, list | tuple) else type(conditioning).__name__


def _is_one_text_an_item(leaves: list[Leaf], conditioning: object) -> bool:
    """A list with a (tokens, width) tensor for every prompt, as pipelines without padding give.

    In a tuple two of one shape are the prompt and the negative prompt.
    """
    tensors = [leaf.tensor for leaf in leaves]
    widths = {tensor.shape[-1] for tensor in tensors if tensor.ndim == 2}
    return (
        all(leaf.name == "" and leaf.tensor.ndim == 2 and leaf.tensor.is_floating_point() for leaf in leaves)
        and len(widths) == 1
        and (isinstance(conditioning, list) or len({tensor.shape[0] for tensor in tensors}) > 1)
    )


def entry_of(leaves: list[Leaf], metadata: Mapping[str, Any], *, named_only: bool = False) -> Entry:
    """Sort tensors by what they are, names first, then shapes.

    Args:
        leaves: All tensors of the conditioning.
        metadata: Its plain values.
        named_only: Whether tensors without a telling name are others, whatever their shape.
    """
    rest = list(leaves)
    main = _take_named(rest, MAIN_NAMES)
    pooled = _take_named(rest, POOLED_NAMES)
    mask = _take_named(rest, MASK_NAMES)
    if not named_only:
        main = main or _take(rest, _is_embedding) or _take(rest, _is_floating_matrix)
        if main is not None:
            pooled = pooled or _take(rest, lambda leaf: _is_pooled(leaf, main.tensor))
            mask = mask or _take(rest, lambda leaf: _is_mask(leaf, main.tensor))
    others = {".".join(leaf.path) or f"tensor_{index}": leaf.tensor for index, leaf in enumerate(rest)}
    return Entry(_tensor_of(main), _tensor_of(pooled), _tensor_of(mask), others, metadata)


def _take_named(rest: list[Leaf], names: tuple[str, ...]) -> Leaf | None:
    """Take the tensor with the first of these names; of several (all layers), the last one."""
    for name in names:
        named = [leaf for leaf in rest if leaf.name == name]
        if named:
            rest.remove(named[-1])
            return named[-1]
    return None


def _take(rest: list[Leaf], is_it: Callable[[Leaf], bool]) -> Leaf | None:
    candidates = [leaf for leaf in rest if is_it(leaf)]
    chosen = next((leaf for leaf in candidates if not leaf.name.startswith(_OTHER_TEXT)), None)
    chosen = chosen or next(iter(candidates), None)
    if chosen is not None:
        rest.remove(chosen)
    return chosen


def _is_embedding(leaf: Leaf) -> bool:
    return leaf.tensor.ndim >= 3 and leaf.tensor.is_floating_point()


def _is_floating_matrix(leaf: Leaf) -> bool:
    shape = leaf.tensor.shape
    return len(shape) in (1, 2) and leaf.tensor.is_floating_point() and shape[-1] > _WIDEST_POSITION


def _is_pooled(leaf: Leaf, main: Tensor) -> bool:
    """(batch, width) beside (batch, tokens, width); FLUX's text ids (tokens, 3) and masks (batch, tokens) are none."""
    shape = leaf.tensor.shape
    if not _is_floating_matrix(leaf) or main.ndim < 3 or _is_mask(leaf, main):
        return False
    return len(shape) == 1 or shape[0] == main.shape[0]


def _is_mask(leaf: Leaf, main: Tensor) -> bool:
    """(batch, tokens); one of floating numbers only where it cannot be as wide as the embeddings."""
    shape = leaf.tensor.shape
    if main.ndim < 2 or shape[-1:] != main.shape[-2:-1]:
        return False
    return not leaf.tensor.is_floating_point() or (len(shape) == 2 and shape[-1] != main.shape[-1])


def _tensor_of(leaf: Leaf | None) -> Tensor | None:
    return None if leaf is None else leaf.tensor


@dataclass(frozen=True, slots=True)
class EncoderFacts:
    """One text encoder as its class and config tell it.

    Attributes:
        family: Such as "CLIP-L"; "unknown" where nothing tells.
        class_name: Of the encoder itself.
        width: Of the embeddings it gives.
        source: Its name in what holds it; empty for an encoder that was given by itself.
        layers: How many it has, where its config says so.
    """

    family: str
    class_name: str
    width: int | None = None
    source: str = ""
    layers: int | None = None

    @property
    def is_clip(self) -> bool:
        """Whether it belongs to the CLIP kin, whose prompts are 77 tokens long."""
        return "CLIP" in self.family

    @property
    def has_partners(self) -> bool:
        """Whether pipelines have other encoders beside it that make the conditioning wider, as beside CLIPs."""
        return self.is_clip or self.family == "BERT"


def conditioning_facts(
    conditioning: Conditioning,
    encoders: Sequence[EncoderFacts],
    statistics: bool | None,
    reason: str | None = None,
) -> ConditioningDict:
    """All facts about one conditioning."""
    entries = [_entry_dict(entry, statistics) for entry in conditioning.entries]
    index = next((i for i, entry in enumerate(entries) if entry["tensor"] is not None), None)
    if index is None:
        return _without_tensor(conditioning, entries, reason)
    main, entry = entries[index]["tensor"], entries[index]
    assert main is not None
    shape = main["shape"]
    encoder = identify(shape, encoders)
    return as_dict(
        ConditioningDict,
        {**entry, **main},
        {"width": encoder["reason"]},
        status="success",
        structure=conditioning.structure,
        sequence_length=Reading(shape[-2] if len(shape) >= 2 else None, "it has one axis"),
        clip_variant=encoder["clip_variant"],
        encoder_family=encoder["family"],
        encoder=encoder,
        entries=entries,
        total_size_mb=sum(tensor["size_mb"] for facts in entries for tensor in tensors_of(facts)),
    )


def _entry_dict(entry: Entry, statistics: bool | None) -> EntryDict:
    def facts(tensor: Tensor) -> TensorDict:
        return tensor_dict(tensor_facts(tensor, statistics=statistics))

    return {
        "tensor": None if entry.tensor is None else facts(entry.tensor),
        "pooled": None if entry.pooled is None else facts(entry.pooled),
        "attention_mask": None if entry.attention_mask is None else facts(entry.attention_mask),
        "others": {name: facts(tensor) for name, tensor in entry.others.items()},
        "metadata": dict(entry.metadata),
    }


def _without_tensor(
    conditioning: Conditioning, entries: list[EntryDict], reason: str | None
) -> ConditioningDict:
    if reason is not None:
        status, why = "failed", reason
    elif conditioning.structure == "none":
        status, why = "missing", "no conditioning was given"
    else:
        status, why = "no_tensor", _why_none(conditioning, entries)
    structure = conditioning.structure
    return as_dict(
        ConditioningDict, why=why, status=status, structure=structure, metadata={}, entries=entries
    )


def _why_none(conditioning: Conditioning, entries: list[EntryDict]) -> str:
    others = [tensor for entry in entries for tensor in tensors_of(entry)]
    if not others:
        return f"no tensor was found in it ({conditioning.structure})"
    shown = ", ".join(f"{tuple(tensor['shape'])} {tensor['dtype']}" for tensor in others[:3])
    return f"no embeddings were found in it, but {shown}{', …' if len(others) > 3 else ''}"


def tensors_of(entry: EntryDict) -> list[TensorDict]:
    """Every tensor of an entry."""
    parts = (entry["tensor"], entry["pooled"], entry["attention_mask"], *entry["others"].values())
    return [part for part in parts if part is not None]


@runtime_checkable
class DumpFolder(Protocol):
    """What keeps tensors by name, such as `sigmascope.TensorDumps`."""

    def save(self, name: str, tensors: Any, *, prompt: Any, encoder: str | None, **metadata: Any) -> Path:
        """Write tensors of any nesting and give the file."""
        ...


def dump_conditioning(
    dumps: DumpFolder, name: str, conditioning: Conditioning, facts: ConditioningDict, prompt: object
) -> None:
    """Save one conditioning and note in its facts where, or why it was not saved."""
    if facts["status"] != "success":
        facts["unavailable"]["tensor_dump"] = facts["unavailable"]["shape"]
        return
    saved = attempt(
        lambda: dumps.save(
            name,
            tensors_by_name(conditioning),
            prompt=prompt if as_text(prompt) is not None else None,
            encoder=facts["encoder_family"],
            clip_variant=facts["clip_variant"],
            structure=conditioning.structure,
            entries=[dict(entry.metadata) for entry in conditioning.entries],
        )
    )
    if saved.value is None:
        facts["unavailable"]["tensor_dump"] = saved.reason or "nothing was written"
    else:
        facts["tensor_dump"] = without_home(str(saved.value))


def tensors_by_name(conditioning: Conditioning) -> dict[str, Tensor]:
    """`embeddings`, `pooled`, `attention_mask` and `other.…`; a second entry's begin with `entry_2.`, and so on."""
    named: dict[str, Tensor] = {}
    for number, entry in enumerate(conditioning.entries, 1):
        prefix = "" if number == 1 else f"entry_{number}."
        known = {"embeddings": entry.tensor, "pooled": entry.pooled, "attention_mask": entry.attention_mask}
        others = {f"other.{name}": tensor for name, tensor in entry.others.items()}
        named |= {
            f"{prefix}{name}": tensor for name, tensor in {**known, **others}.items() if tensor is not None
        }
    return named


UNKNOWN_FAMILY = "unknown"
SDXL_PAIR = "CLIP-L + OpenCLIP-G"
_SDXL_WIDTH = 768 + 1280
T5_VARIANT = "SD 3 / WAN T5"
VARIANT_BY_WIDTH = {768: "SD 1.5 CLIP", 1024: "SD 2.1 CLIP", 1280: "SDXL CLIP", 2048: T5_VARIANT}
"""The name that the width alone gives, which can mislead."""
_CLIP_BY_WIDTH = {768: "CLIP-L", 1024: "OpenCLIP-H", 1280: "OpenCLIP-G", 2048: SDXL_PAIR}
_FAMILIES_BY_WIDTH = {
    768: ("CLIP-L", "T5-Base"),
    1024: ("OpenCLIP-H", "T5-Large"),
    1280: ("OpenCLIP-G",),
    2048: ("T5-XL", SDXL_PAIR, "Gemma", "Qwen2.5-VL"),
    2304: ("Gemma 2",),
    2560: ("Qwen3", "Gemma 3"),
    3072: ("Llama 3",),
    3584: ("Qwen2.5-VL", "Gemma 2"),
    4096: ("T5-XXL", "UMT5-XXL", "Llama 3", "Qwen3", SDXL_PAIR),
}
_VARIANT_BY_FAMILY = {
    "CLIP-L": "SD 1.5 CLIP",
    "OpenCLIP-H": "SD 2.1 CLIP",
    "OpenCLIP-G": "SDXL CLIP",
    SDXL_PAIR: "SDXL CLIP",
}
_SIZES = {
    "CLIP": {width: name for width, name in _CLIP_BY_WIDTH.items() if name != SDXL_PAIR},
    "T5": {512: "T5-Small", 768: "T5-Base", 2048: "T5-XL", 4096: "T5-XXL"},
    "UMT5": {512: "UMT5-Small", 768: "UMT5-Base", 2048: "UMT5-XL", 4096: "UMT5-XXL"},
    "mT5": {512: "mT5-Small", 768: "mT5-Base", 1024: "mT5-Large", 2048: "mT5-XL", 4096: "mT5-XXL"},
}
"""The usual name of a family's sizes; another width goes by the family's own name, and so do T5-Large, T5-3B and
T5-11B, which are all 1024 wide."""
_MODEL_TYPES = (
    ("umt5", "UMT5"),
    ("mt5", "mT5"),
    ("t5gemma", "T5Gemma"),
    ("t5", "T5"),
    ("bert", "BERT"),
    ("qwen2_5_vl", "Qwen2.5-VL"),
    ("qwen2_vl", "Qwen2-VL"),
    ("qwen3_vl", "Qwen3-VL"),
    ("qwen3", "Qwen3"),
    ("qwen2", "Qwen2"),
    ("gemma3", "Gemma 3"),
    ("gemma2", "Gemma 2"),
    ("gemma", "Gemma"),
    ("mistral", "Mistral"),
    ("ministral", "Mistral"),
    ("llama", "Llama"),
    ("llava", "Llama"),
    ("chatglm", "ChatGLM"),
    ("glm", "GLM"),
    ("phi3", "Phi 3"),
    ("clip", "CLIP"),
)
"""transformers' `model_type`, by its beginning."""
_CLASS_NAMES = (
    ("byt5", "ByT5"),
    ("qwen25", "Qwen2.5-VL"),
    ("qwen2vl", "Qwen2-VL"),
    *_MODEL_TYPES,
)
"""What a class or attribute name holds, where there is no config: ComfyUI's `t5xxl`, `Gemma2_2BModel`, `clip_l`.

The first that any of an encoder's names holds is it: Hunyuan-DiT's BERT is `hydit_clip` there."""
_COMFYUI_ENCODER = "transformer"
_PIPELINE_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")
_PIPELINE_TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3", "tokenizer_4")
_WIDTH_FIELDS = ("hidden_size", "d_model", "n_embd")
_LAYER_FIELDS = ("num_hidden_layers", "num_layers", "n_layer")
_JOINED_LAYERS = range(2, 5)
"""How many hidden states pipelines join to one embedding: FLUX.2 takes three. LTX-2 takes all there are."""


def identify(shape: Sequence[int] | None, encoders: Sequence[EncoderFacts]) -> EncoderDict:
    """Say which encoder made a conditioning of this shape.

    Args:
        shape: (batch, tokens, width), (tokens, width) or (batch, width); None if there is no tensor.
        encoders: The live encoders, if any are known.
    """
    width = shape[-1] if shape else None
    tokens = shape[-2] if shape is not None and len(shape) >= 3 else None
    by_class = from_encoders(width, tokens, encoders)
    by_shape = from_shape(width, tokens)
    shape_tells_more = is_one_of_several(width, encoders) and by_shape.family != UNKNOWN_FAMILY
    verdict = by_shape if by_class is None or shape_tells_more else by_class
    table = variant_by_width(width)
    variant = variant_of(verdict, width)
    other = None if any(encoder.width == width for encoder in encoders) else by_shape
    return as_dict(
        EncoderDict,
        verdict,
        candidates=list(verdict.candidates),
        width=width,
        clip_variant=variant,
        clip_variant_by_width=table,
        conflict=_conflict(verdict, other, variant, table, width),
    )


class EncoderVerdict(NamedTuple):
    """A family, the evidence for it, that evidence in words, and other families that fit it as well."""

    family: str
    evidence: str
    reason: str
    candidates: tuple[str, ...] = ()


def _conflict(
    verdict: EncoderVerdict, by_shape: EncoderVerdict | None, variant: str, table: str, width: int | None
) -> str | None:
    """What other evidence claims; None where all agree. The shape has no say where an encoder gives this very width."""
    claims = []
    if variant != table:
        claims.append(f"width {width} alone says {table!r}, {verdict.evidence} says {variant!r}")
    if by_shape is not None and verdict.evidence == "class" and by_shape.family != UNKNOWN_FAMILY:
        agreeing = {by_shape.family, *by_shape.candidates}
        if not any(family in verdict.family for family in agreeing):
            claims.append(f"the tensor's {by_shape.evidence} suggests {by_shape.family}")
    return "; ".join(claims) or None


def from_encoders(
    width: int | None, tokens: int | None, encoders: Sequence[EncoderFacts]
) -> EncoderVerdict | None:
    """The verdict of the live encoders' classes and configs; None if there are none that are known."""
    known = [encoder for encoder in encoders if encoder.family != UNKNOWN_FAMILY]
    if not known:
        return None
    makers = [encoder for encoder in known if encoder.width == width]
    clips = [encoder for encoder in known if encoder.is_clip]
    joined = width is not None and len(clips) > 1 and sum(clip.width or 0 for clip in clips) == width
    if joined and not any(maker.is_clip for maker in makers):
        makers = clips if tokens is None or tokens % CLIP_TOKENS == 0 else makers or clips
    elif len(clips) > 1 and makers and not makers[0].is_clip and (tokens or 0) > CLIP_TOKENS:
        makers = [*clips, *makers]  # SD 3: CLIP's tokens, filled up to T5's width, come before T5's
    chosen = makers or known
    family = " + ".join(dict.fromkeys(encoder.family for encoder in chosen))
    classes = ", ".join(dict.fromkeys(encoder.class_name for encoder in chosen))
    return EncoderVerdict(family, "class", f"the encoder's class and config: {classes}")


def is_one_of_several(width: int | None, encoders: Sequence[EncoderFacts]) -> bool:
    """Whether one encoder, given by itself, needs others for this width: CLIP-L in SDXL (2048), SD 3 and FLUX (4096).

    Such a width is larger than its own, and not that of another CLIP, which would have made it alone. Beside a CLIP of a
    usual size it is a usual one too.
    """
    if width is None or len(encoders) != 1 or encoders[0].source or not encoders[0].has_partners:
        return False
    own = encoders[0].width
    if own is None or width <= own or (own in _CLIP_BY_WIDTH and width not in _FAMILIES_BY_WIDTH):
        return False
    return from_shape(width, None).family not in _VARIANT_BY_FAMILY


def joined_layers(width: int, encoder: EncoderFacts) -> int | None:
    """How many of an encoder's hidden states, side by side, are this wide; None for a number that nothing joins."""
    if encoder.has_partners or not encoder.width or width % encoder.width:
        return None
    count = width // encoder.width
    every = None if encoder.layers is None else encoder.layers + 1  # the embeddings are one more
    return count if count in _JOINED_LAYERS or count == every else None


def from_shape(width: int | None, tokens: int | None) -> EncoderVerdict:
    """The verdict of a tensor alone: 77·k tokens mean CLIP if a CLIP has that width, else the width."""
    if width is None:
        return EncoderVerdict(UNKNOWN_FAMILY, "none", "there is no tensor")
    if tokens is not None and tokens > 0 and tokens % CLIP_TOKENS == 0 and width in _CLIP_BY_WIDTH:
        reason = f"{tokens} tokens = {CLIP_TOKENS}·{tokens // CLIP_TOKENS}, as CLIP has, at width {width}"
        return EncoderVerdict(_CLIP_BY_WIDTH[width], "token_count", reason)
    families = _FAMILIES_BY_WIDTH.get(width)
    if families is None:
        return EncoderVerdict(UNKNOWN_FAMILY, "none", f"no known encoder is {width} wide")
    return EncoderVerdict(families[0], "width", f"the width {width} alone", families)


def variant_of(verdict: EncoderVerdict, width: int | None) -> str:
    """The table's name for a family; a family that the table lacks goes by its own name."""
    if verdict.evidence == "none":
        return variant_by_width(width)
    if verdict.family == SDXL_PAIR and width != _SDXL_WIDTH:
        return "SD 3 CLIP"  # filled up to T5's width
    if verdict.family in _VARIANT_BY_FAMILY:
        return _VARIANT_BY_FAMILY[verdict.family]
    if "T5" in verdict.family:
        return T5_VARIANT
    return variant_by_width(width) if verdict.family == "CLIP" else verdict.family


def variant_by_width(width: int | None) -> str:
    """What the table of widths says, and no more."""
    return VARIANT_BY_WIDTH.get(width or 0, "Unknown CLIP" if width is None else f"Unknown CLIP ({width})")


def find_encoders(clip: object) -> list[EncoderFacts]:
    """The text encoders in a transformers model, a pipeline, a mapping of these or a ComfyUI CLIP.

    Raises:
        AttributeError, TypeError, RuntimeError: An object of the host's cannot be read.
    """
    return [_encoder_facts(name, module) for name, module in _encoders(clip)]


def _encoder_facts(name: str, module: nn.Module) -> EncoderFacts:
    inner = getattr(module, _COMFYUI_ENCODER, None) if _is_comfyui_encoder(module) else module
    config = getattr(inner, "config", None)
    config = getattr(config, "text_config", None) or config
    family = _family_of_config(config)
    width = _number(config, _WIDTH_FIELDS)
    if width is None and isinstance(inner, nn.Module):
        width = _width_of_tokens(inner)
    if family is None:
        family = _family_by_names(name, type(module).__name__, type(inner).__name__)
    sized = _SIZES.get(family or "", {}).get(width or 0, family or UNKNOWN_FAMILY)
    return EncoderFacts(sized, type(inner).__name__, width, name, _number(config, _LAYER_FIELDS))


def _is_comfyui_encoder(module: nn.Module) -> bool:
    """ComfyUI's wrapper of one encoder keeps it as `transformer`."""
    return isinstance(getattr(module, _COMFYUI_ENCODER, None), nn.Module)


def _family_of_config(config: object) -> str | None:
    kind = getattr(config, "model_type", None)
    if not isinstance(kind, str):
        return None
    return next((family for prefix, family in _MODEL_TYPES if kind.startswith(prefix)), None)


def _number(config: object, names: Sequence[str]) -> int | None:
    """The first of these that the config says."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _width_of_tokens(module: nn.Module) -> int | None:
    """Width of the tokens' embeddings. Other tables count positions, or distances in attention as the first of T5's."""
    own = getattr(module, "get_input_embeddings", None)
    table = attempt(own).value if callable(own) else None
    if table is None:
        tables = (part for part in modules_in(module) if isinstance(part, nn.Embedding))
        table = max(tables, key=lambda embedding: embedding.num_embeddings, default=None)
    width = getattr(table, "embedding_dim", None)
    return width if isinstance(width, int) else None


def _family_by_names(*names: str) -> str | None:
    lowered = [name.lower() for name in names]
    return next((family for part, family in _CLASS_NAMES if any(part in name for name in lowered)), None)


def _encoders(clip: object) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of each encoder."""
    parts = _named_parts(clip)
    if parts:
        wanted = _PIPELINE_ENCODERS if hasattr(clip, "components") else parts
        for name, part in parts.items():
            module = unwrap(part) if isinstance(part, nn.Module) and name in wanted else None
            if module is not None:
                yield str(name), module
        return
    holder = "" if isinstance(clip, nn.Module) else "cond_stage_model"
    held = getattr(clip, holder, None) if holder else clip
    root = unwrap(held) if isinstance(held, nn.Module) else None
    if root is None:
        return
    inner = [(name, child) for name, child in root.named_children() if _is_comfyui_encoder(child)]
    yield from inner or [(holder, root)]


def _named_parts(thing: object) -> Mapping[str, object]:
    return thing if isinstance(thing, Mapping) else components_of(thing)


def find_tokenizers(clip: object) -> dict[str, Any]:
    """The tokenizers that a pipeline, a mapping or a ComfyUI CLIP holds, by name."""
    parts = _named_parts(clip)
    if not parts and callable(getattr(clip, "tokenize_with_weights", None)):
        return {"tokenizer": clip}
    held = {name: parts.get(name, getattr(clip, name, None)) for name in _PIPELINE_TOKENIZERS}
    known = {name: tokenizer for name, tokenizer in held.items() if _is_tokenizer(tokenizer)}
    if not known and _is_tokenizer(clip):
        return {"tokenizer": clip}
    return known


def _is_tokenizer(thing: object) -> bool:
    """Whether it turns text into tokens; a module that can be called does not."""
    if thing is None or isinstance(thing, nn.Module | Mapping):
        return False
    if callable(getattr(thing, "tokenize_with_weights", None)):
        return True
    return callable(thing) and hasattr(thing, "tokenize")


def named_tokenizers(tokenizer: object) -> dict[str, Any]:
    """What a caller gives as its tokenizer: one, several, a mapping, or whatever holds them."""
    if isinstance(tokenizer, Mapping) and all(_is_tokenizer(held) for held in tokenizer.values()):
        return {str(name): held for name, held in tokenizer.items()}
    if isinstance(tokenizer, list | tuple):
        return dict(zip(_PIPELINE_TOKENIZERS, tokenizer, strict=False))
    return find_tokenizers(tokenizer)
