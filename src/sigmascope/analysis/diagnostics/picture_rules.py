"""Rules on the finished pictures, as a watch sees them."""

from collections.abc import Iterator, Mapping
from typing import Any

from sigmascope.analysis.diagnostics.case import Case
from sigmascope.records.finding import Finding

_FACT = "pictures"


def pictures_without_content(case: Case) -> Iterator[Finding]:
    """Pictures that are one colour all over, or hold what is no number; of a video, if all frames looked at are so."""
    for stage in case.stages:
        seen = stage.facts.get(_FACT)
        if not isinstance(seen, Mapping):
            continue
        looked_at, flat, broken, replaced = (
            _count(seen, name) for name in ("looked_at", "one_colour", "not_finite", "replaced")
        )
        evidence = {"pictures": _count(seen, "pictures"), "looked_at": looked_at}
        if broken:
            yield Finding(
                id="picture.not_finite",
                severity="error",
                message=f"{broken} of {looked_at} pictures hold NaN or infinity.",
                evidence={**evidence, "not_finite": broken},
                advice=_ADVICE,
                stage=stage.name,
            )
        if replaced:
            yield Finding(
                id="picture.replaced_by_safety_checker",
                severity="warning",
                message=f"The pipeline's safety checker has put black in place of {replaced} of "
                f"{evidence['pictures']} pictures.",
                evidence={**evidence, "replaced": replaced},
                advice="Take another seed or prompt; nothing is wrong with model or VAE.",
                stage=stage.name,
            )
        elif flat and (flat == looked_at or not seen.get("is_video")):
            colour = ", ".join(f"{band:g}" for band in seen.get("colour") or ())
            yield Finding(
                id="picture.is_one_colour",
                severity="warning",
                message=f"{flat} of {looked_at} pictures are one colour all over ({colour}).",
                evidence={**evidence, "one_colour": flat, "colour": colour},
                advice=_ADVICE,
                stage=stage.name,
            )


_ADVICE = (
    'NaN becomes black. Ask once for output_type="latent": if those latents are finite it is the VAE, to be run in '
    "float32 or bfloat16 (SDXL's overflows in float16: pipe.vae.to(torch.float32), or a mended one); if not, it is the "
    "denoiser, a LoRA or an embedding before it."
)


def _count(seen: Mapping[str, Any], name: str) -> int:
    value = seen.get(name)
    return value if isinstance(value, int) else 0


PICTURE_RULES = (pictures_without_content,)
