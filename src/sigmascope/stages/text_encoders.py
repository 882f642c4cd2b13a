"""Which text encoder made a conditioning, decided by evidence: its class and config, the tokens, the width.

The width alone misleads: SDXL's conditioning is 768 + 1280 = 2048 wide, FLUX, SD 3 and WAN feed 4096-wide T5.

The encoders and tokenizers are found in what a host calls its CLIP (`find_encoders`, `find_tokenizers`).
Everything is known by names and configs, so that neither transformers nor ComfyUI is imported.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from sigmascope.probes.models import modules_in
from sigmascope.stages.schema import EncoderDict

CLIP_TOKENS = 77
UNKNOWN_FAMILY = "unknown"
SDXL_PAIR = "CLIP-L + OpenCLIP-G"
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
    4096: ("T5-XXL", "UMT5-XXL", "Llama 3", "Qwen3"),
}
_VARIANT_BY_FAMILY = {
    "CLIP-L": "SD 1.5 CLIP",
    "OpenCLIP-H": "SD 2.1 CLIP",
    "OpenCLIP-G": "SDXL CLIP",
    SDXL_PAIR: "SDXL CLIP",
}
_SIZES = {
    "CLIP": {768: "CLIP-L", 1024: "OpenCLIP-H", 1280: "OpenCLIP-G"},
    "T5": {512: "T5-Small", 768: "T5-Base", 1024: "T5-Large", 2048: "T5-XL", 4096: "T5-XXL"},
    "UMT5": {512: "UMT5-Small", 768: "UMT5-Base", 2048: "UMT5-XL", 4096: "UMT5-XXL"},
}
"""The usual name of a family's sizes; another width goes by the family's own name."""
_MODEL_TYPES = (
    ("clip", "CLIP"),
    ("umt5", "UMT5"),
    ("mt5", "mT5"),
    ("t5", "T5"),
    ("qwen2_5_vl", "Qwen2.5-VL"),
    ("qwen2_vl", "Qwen2-VL"),
    ("qwen3_vl", "Qwen3-VL"),
    ("qwen3", "Qwen3"),
    ("qwen2", "Qwen2"),
    ("gemma3", "Gemma 3"),
    ("gemma2", "Gemma 2"),
    ("gemma", "Gemma"),
    ("mistral", "Mistral"),
    ("llama", "Llama"),
    ("llava", "Llama"),
    ("chatglm", "ChatGLM"),
    ("phi3", "Phi 3"),
)
"""transformers' `model_type`, by its beginning."""
_CLASS_NAMES = (
    ("byt5", "ByT5"),
    ("umt5", "UMT5"),
    ("t5", "T5"),
    ("qwen25", "Qwen2.5-VL"),
    ("qwen2_5_vl", "Qwen2.5-VL"),
    ("qwen2vl", "Qwen2-VL"),
    ("qwen3", "Qwen3"),
    ("gemma3", "Gemma 3"),
    ("gemma2", "Gemma 2"),
    ("gemma", "Gemma"),
    ("mistral", "Mistral"),
    ("llama", "Llama"),
    ("llava", "Llama"),
    ("chatglm", "ChatGLM"),
    ("clip", "CLIP"),
)
"""What a class or attribute name holds, where there is no config: ComfyUI's `t5xxl`, `Gemma2_2BModel`, `clip_l`."""
_COMFYUI_ENCODER = "transformer"
_PIPELINE_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")
_PIPELINE_TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3", "tokenizer_4")
_WIDTH_FIELDS = ("hidden_size", "d_model", "n_embd")


@dataclass(frozen=True, slots=True)
class EncoderFacts:
    """One text encoder as its class and config tell it. `width` is that of the embeddings it gives."""

    family: str
    class_name: str
    width: int | None = None
    source: str = ""

    @property
    def is_clip(self) -> bool:
        """Whether it belongs to the CLIP kin, whose prompts are 77 tokens long."""
        return "CLIP" in self.family


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
    verdict = by_class or by_shape
    table = variant_by_width(width)
    variant = variant_of(verdict, width)
    return {
        "family": verdict.family,
        "evidence": verdict.evidence,
        "reason": verdict.reason,
        "candidates": list(verdict.candidates),
        "width": width,
        "clip_variant": variant,
        "clip_variant_by_width": table,
        "conflict": _conflict(verdict, by_shape, variant, table, width),
    }


class Verdict(NamedTuple):
    """A family, the evidence for it, that evidence in words, and other families that fit it as well."""

    family: str
    evidence: str
    reason: str
    candidates: tuple[str, ...] = ()


def _conflict(verdict: Verdict, by_shape: Verdict, variant: str, table: str, width: int | None) -> str | None:
    """What other evidence claims; None where all agree."""
    claims = []
    if variant != table:
        claims.append(f"width {width} alone says {table!r}, {verdict.evidence} says {variant!r}")
    by_class = verdict.evidence == "class" and by_shape.family != UNKNOWN_FAMILY
    agreeing = {by_shape.family, *by_shape.candidates}
    if by_class and not any(family in verdict.family for family in agreeing):
        claims.append(f"the tensor's {by_shape.evidence} suggests {by_shape.family}")
    return "; ".join(claims) or None


def from_encoders(width: int | None, tokens: int | None, encoders: Sequence[EncoderFacts]) -> Verdict | None:
    """The verdict of the live encoders' classes and configs; None if there are none that are known."""
    known = [encoder for encoder in encoders if encoder.family != UNKNOWN_FAMILY]
    if not known:
        return None
    makers = [encoder for encoder in known if encoder.width == width]
    clips = [encoder for encoder in known if encoder.is_clip]
    joined = width is not None and len(clips) > 1 and sum(clip.width or 0 for clip in clips) == width
    if joined and not any(maker.is_clip for maker in makers):
        makers = clips if tokens is None or tokens % CLIP_TOKENS == 0 else makers or clips
    elif len(clips) > 1 and makers and not makers[0].is_clip and _holds_clip_tokens(tokens):
        makers = [*clips, *makers]  # SD 3: CLIP's tokens, filled up to T5's width, come before T5's
    chosen = makers or known
    family = " + ".join(dict.fromkeys(encoder.family for encoder in chosen))
    classes = ", ".join(dict.fromkeys(encoder.class_name for encoder in chosen))
    return Verdict(family, "class", f"the encoder's class and config: {classes}")


def _holds_clip_tokens(tokens: int | None) -> bool:
    return tokens is not None and tokens > CLIP_TOKENS


def from_shape(width: int | None, tokens: int | None) -> Verdict:
    """The verdict of a tensor alone: 77·k tokens mean CLIP if a CLIP has that width, else the width."""
    if width is None:
        return Verdict(UNKNOWN_FAMILY, "none", "there is no tensor")
    if tokens is not None and tokens > 0 and tokens % CLIP_TOKENS == 0 and width in _CLIP_BY_WIDTH:
        reason = f"{tokens} tokens = {CLIP_TOKENS}·{tokens // CLIP_TOKENS}, as CLIP has, at width {width}"
        return Verdict(_CLIP_BY_WIDTH[width], "token_count", reason)
    families = _FAMILIES_BY_WIDTH.get(width)
    if families is None:
        return Verdict(UNKNOWN_FAMILY, "none", f"no encoder known to us is {width} wide")
    return Verdict(families[0], "width", f"the width {width} alone", families)


def variant_of(verdict: Verdict, width: int | None) -> str:
    """The table's name for a family; a family that the table lacks goes by its own name."""
    if verdict.evidence == "none":
        return variant_by_width(width)
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
    width = _width(config, inner)
    if family is None:
        names = (name, type(module).__name__, type(inner).__name__)
        family = next((found for one in names if (found := _family_by_name(one))), None)
    sized = _SIZES.get(family or "", {}).get(width or 0, family or UNKNOWN_FAMILY)
    return EncoderFacts(sized, type(inner).__name__, width, name)


def _is_comfyui_encoder(module: nn.Module) -> bool:
    """ComfyUI's wrapper of one encoder keeps it as `transformer`."""
    return isinstance(getattr(module, _COMFYUI_ENCODER, None), nn.Module)


def _family_of_config(config: object) -> str | None:
    kind = getattr(config, "model_type", None)
    if not isinstance(kind, str):
        return None
    return next((family for prefix, family in _MODEL_TYPES if kind.startswith(prefix)), None)


def _width(config: object, module: object) -> int | None:
    """Width of the embeddings: what the config says, else that of the first embedding table."""
    for name in _WIDTH_FIELDS:
        width = getattr(config, name, None)
        if isinstance(width, int):
            return width
    if not isinstance(module, nn.Module):
        return None
    tables = (part for part in modules_in(module) if isinstance(part, nn.Embedding))
    return next((table.embedding_dim for table in tables), None)


def _family_by_name(name: str) -> str | None:
    lowered = name.lower()
    return next((family for part, family in _CLASS_NAMES if part in lowered), None)


def _encoders(clip: object) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of each encoder."""
    parts = _named_parts(clip)
    if parts:
        for name, part in parts.items():
            if isinstance(part, nn.Module) and (
                not hasattr(clip, "components") or name in _PIPELINE_ENCODERS
            ):
                yield str(name), _unwrapped(part)
        return
    root = clip if isinstance(clip, nn.Module) else getattr(clip, "cond_stage_model", None)
    if not isinstance(root, nn.Module):
        return
    root = _unwrapped(root)
    inner = [(name, child) for name, child in root.named_children() if _is_comfyui_encoder(child)]
    if inner:
        yield from inner
    else:
        yield "", root


def _named_parts(thing: object) -> Mapping[str, object]:
    if isinstance(thing, Mapping):
        return thing
    components = None if isinstance(thing, nn.Module) else getattr(thing, "components", None)
    return components if isinstance(components, Mapping) else {}


def _unwrapped(module: nn.Module) -> nn.Module:
    """What torch.compile, DataParallel or DistributedDataParallel wrap."""
    while True:
        wraps = isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel)
        inner = getattr(module, "module" if wraps else "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


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
    if isinstance(tokenizer, Mapping) and all(_is_tokenizer(one) for one in tokenizer.values()):
        return {str(name): one for name, one in tokenizer.items()}
    if isinstance(tokenizer, list | tuple):
        return dict(zip(_PIPELINE_TOKENIZERS, tokenizer, strict=False))
    return find_tokenizers(tokenizer)
