"""Rules on whether model, scheduler, guidance and LoRA go together."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from sigmascope.analysis.diagnostics.case import Case, seconds_of
from sigmascope.analysis.few_steps import few_step_evidence
from sigmascope.records.finding import Finding

_EDIT: Final = ("Edit", "Kontext", "Inpaint", "Img2Img")
_MUST_HAVE_IMAGE: Final = ("Edit", "Inpaint", "Img2Img")
_FEW_STEP_SCHEDULERS: Final = frozenset({"LCMScheduler", "TCDScheduler", "FlowMatchLCMScheduler"})
_FEW_STEPS: Final = 12
_ENOUGH_STEPS: Final = 8


def edit_model_for_text_to_image(case: Case) -> Iterator[Finding]:
    """An editing model that gets no image does work for one all the same, and makes worse images."""
    if case.pipeline is None or case.call.has_image is not False:
        return
    names = (case.pipeline.class_name, case.pipeline.source or "")
    if not any(word in name for name in names for word in _EDIT):
        return
    is_qwen = any("Qwen" in name for name in names)
    instead = "Qwen/Qwen-Image with QwenImagePipeline" if is_qwen else "the family's text-to-image model"
    must = any(word in case.pipeline.class_name for word in _MUST_HAVE_IMAGE)
    yield Finding(
        id="model.edit_model_for_text_to_image",
        severity="warning",
        message=f"{case.pipeline.source or case.pipeline.class_name} is made to change an image, and was called without "
        "one.",
        evidence={"pipeline": case.pipeline.class_name, "source": case.pipeline.source, "needs_image": must},
        advice=f"For text to image take {instead}.",
    )


def steps_of_a_distilled_model(case: Case) -> Iterator[Finding]:
    """Few-step models gain nothing from many steps, and others need more than a few."""
    steps = case.call.num_inference_steps
    if case.pipeline is None or steps is None:
        return
    why = few_step_evidence(case.pipeline)
    scheduler = next((part.class_name for part in case.components("scheduler").values()), None)
    if why is not None and steps > _FEW_STEPS:
        spent = seconds_of(case.named("denoising"))
        gain = spent * (1 - _ENOUGH_STEPS / steps) if spent else None
        yield Finding(
            id="model.too_many_steps",
            severity="warning",
            message=f"{steps} steps of a model that is made for 1 to {_ENOUGH_STEPS} ({why}).",
            evidence={"steps": steps, "why": why, "gain_seconds": gain},
            advice=f"num_inference_steps={_ENOUGH_STEPS} or fewer.",
        )
    elif why is None and scheduler in _FEW_STEP_SCHEDULERS:
        yield Finding(
            id="model.scheduler_for_distilled_models",
            severity="warning",
            message=f"{scheduler} is made for models distilled to few steps, and nothing says that this one is.",
            evidence={"scheduler": scheduler, "steps": steps},
            advice="Load the LCM or TCD weights or LoRA that belongs to it, or take the scheduler that the model came with.",
        )


def guidance_doubles_the_work(case: Case) -> Iterator[Finding]:
    """Classifier-free guidance runs the denoiser for the negative prompt as well."""
    call = case.call
    if call.guidance_batches is None or call.guidance_batches < 2 or case.pipeline is None:
        return
    spent = seconds_of(case.named("denoising"))
    why = few_step_evidence(case.pipeline)
    half = spent / 2 if spent else None
    yield Finding(
        id="model.guidance_doubles_the_work",
        severity="info" if why is None else "warning",
        message=f"Guidance at {call.guidance_scale:g} runs the denoiser {call.guidance_batches} times for each step's sample"
        + (f", though the model is distilled to do without ({why})." if why else ".")
        if call.guidance_scale is not None
        else f"Guidance runs the denoiser {call.guidance_batches} times for each step's sample.",
        evidence={"guidance_scale": call.guidance_scale, "gain_seconds": half},
        advice="guidance_scale=1 (0 for SD-Turbo's pipelines)." if why else "Where quality allows, a guidance-distilled "
        "model, or guidance in part of the steps only (PAG, guidance interval), takes up to half of the time.",
    )  # fmt: skip


def lora_modules_unmatched(case: Case) -> Iterator[Finding]:
    """A LoRA that was loaded, and of which modules are not on the model."""
    for stage in case.named("lora_application"):
        analysis = _mapping(stage.facts.get("lora_application"))
        applied, verdict = _mapping(analysis.get("applied_verdict")), _mapping(analysis.get("verdict"))
        total = applied.get("total_modules", verdict.get("total_modules"))
        matched = applied.get("modules_there", verdict.get("matched_modules"))
        if not isinstance(total, int) or not isinstance(matched, int) or matched >= total:
            continue
        none = matched == 0
        yield Finding(
            id="lora.modules_unmatched",
            severity="error" if none else "warning",
            message=("None" if none else f"Only {matched}")
            + f" of the LoRA's {total} modules are on the model.",
            evidence={"modules": total, "matched": matched},
            advice="sigmascope lora inspect FILE --model MODEL names each module and the likely reason.",
            stage=stage.name,
        )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


MODEL_RULES = (
    edit_model_for_text_to_image,
    steps_of_a_distilled_model,
    guidance_doubles_the_work,
    lora_modules_unmatched,
)
