"""Which text encoder made a conditioning, decided by evidence: its class and config, the tokens, the width.

The width alone misleads: SDXL's conditioning is 768 + 1280 = 2048 wide, FLUX, SD 3 and WAN feed 4096-wide T5.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sigmascope.stages.text.typed import EncoderDict

CLIP_TOKENS = 77
UNKNOWN_FAMILY = "unknown"
SDXL_PAIR = "CLIP-L + OpenCLIP-G"
T5_VARIANT = "SD 3 / WAN T5"

VARIANT_BY_WIDTH = {768: "SD 1.5 CLIP", 1024: "SD 2.1 CLIP", 1280: "SDXL CLIP", 2048: T5_VARIANT}
"""The seed's table."""

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


class Verdict(NamedTuple):
    """A family, the evidence for it, that evidence in words, and other families that fit it as well."""

    family: str
    evidence: str
    reason: str
    candidates: tuple[str, ...] = ()


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


def variant_by_width(width: int | None) -> str:
    """The seed's table, and no more."""
    return VARIANT_BY_WIDTH.get(width or 0, "Unknown CLIP" if width is None else f"Unknown CLIP ({width})")


def variant_of(verdict: Verdict, width: int | None) -> str:
    """The table's name for a family; a family that the table lacks goes by its own name."""
    if verdict.evidence == "none":
        return variant_by_width(width)
    if verdict.family in _VARIANT_BY_FAMILY:
        return _VARIANT_BY_FAMILY[verdict.family]
    if "T5" in verdict.family:
        return T5_VARIANT
    return variant_by_width(width) if verdict.family == "CLIP" else verdict.family


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
