"""Rules on what runs: model, scheduler, guidance and LoRA, precision, attention, prompts, finished pictures.

`few_step_evidence` looks in a pipeline's record for signs that its denoiser was distilled to few steps.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from sigmascope import units
from sigmascope.analysis.generations import Case
from sigmascope.analysis.rules import Seen, rule
from sigmascope.analysis.run_figures import seconds_in_steps
from sigmascope.records.memory import mib
from sigmascope.records.run import ComponentFacts, JsonScalar, PipelineFacts

_EDIT_NAMES: Final = ("Edit", "Kontext", "Inpaint", "Img2Img")
_MUST_HAVE_IMAGE: Final = ("Edit", "Inpaint", "Img2Img")
_FEW_STEP_SCHEDULERS: Final = frozenset({"LCMScheduler", "TCDScheduler", "FlowMatchLCMScheduler"})
_MOST_DISTILLED_STEPS: Final = 12
_ENOUGH_DISTILLED_STEPS: Final = 8
_FEW_STEP_NAMES: Final = ("turbo", "lightning", "schnell", "lcm", "hyper-sd", "hyper_sd", "distill", "dmd")
_LEAST_BF16_CAPABILITY: Final = (8, 0)
"""CUDA C++ Programming Guide, table of features: from here on, tensor cores multiply bfloat16."""
_FLOAT32, _HALF = "float32", frozenset({"float16", "bfloat16"})
_ONE_TENSOR_PROCESSORS: Final = frozenset(
    {
        "AttnProcessor",
        "AttnProcessor2_0",
        "AttnProcessorNPU",
        "XFormersAttnProcessor",
        "SlicedAttnProcessor",
        "XLAFlashAttnProcessor2_0",
        "FusedAttnProcessor2_0",
        "IPAdapterAttnProcessor",
        "IPAdapterAttnProcessor2_0",
    }
)
"""diffusers' processors that return the image's tensor alone."""
_EAGER_PROCESSORS: Final = frozenset({"AttnProcessor", "SlicedAttnProcessor", "IPAdapterAttnProcessor"})
"""Those that build the whole attention matrix instead of calling scaled_dot_product_attention."""
_TEXT_STAGE = "text_encoding"
_PICTURES_FACT = "pictures"
_COUNTS: Final = ("pictures", "looked_at", "one_colour", "not_finite", "replaced")
_NO_CONTENT_ADVICE = (
    'NaN shows as black. Run once with output_type="latent". If the latents are finite, the VAE is at fault: run it in '
    "float32 or bfloat16 (SDXL's overflows in float16: pipe.vae.to(torch.float32), or madebyollin/sdxl-vae-fp16-fix). "
    "If not, the fault is earlier: the denoiser, a LoRA or an embedding."
)


@rule("model.edit_model_for_text_to_image", "warning", about="the model")
def edit_model_for_text_to_image(case: Case) -> Iterator[Seen]:
    """An editing model got no image to edit: it still does that work, and makes worse images."""
    if case.pipeline is None or case.call.has_image is not False:
        return
    names = (case.pipeline.class_name, case.pipeline.source or "")
    if not any(word in name for name in names for word in _EDIT_NAMES):
        return
    is_qwen = any("Qwen" in name for name in names)
    instead = "Qwen/Qwen-Image with QwenImagePipeline" if is_qwen else "the family's text-to-image model"
    must = any(word in case.pipeline.class_name for word in _MUST_HAVE_IMAGE)
    yield Seen(
        message=f"{case.pipeline.source or case.pipeline.class_name} edits images, and was called without one.",
        evidence={"pipeline": case.pipeline.class_name, "source": case.pipeline.source, "needs_image": must},
        advice=f"For text-to-image, use {instead}.",
    )


@rule("model.too_many_steps", "warning", about="the model")
def too_many_steps(case: Case) -> Iterator[Seen]:
    """A distilled model ran more steps than it needs."""
    steps = case.call.num_inference_steps
    why = None if case.pipeline is None else few_step_evidence(case.pipeline)
    if steps is None or why is None or steps <= _MOST_DISTILLED_STEPS:
        return
    gain = _seconds_in_steps(case) * (1 - _ENOUGH_DISTILLED_STEPS / steps) or None
    yield Seen(
        message=f"The model is made for 1 to {_ENOUGH_DISTILLED_STEPS} steps ({why}), and ran {steps}.",
        evidence={"steps": steps, "why": why, "gain_seconds": gain},
        advice=f"Set num_inference_steps to {_ENOUGH_DISTILLED_STEPS} or fewer.",
    )


@rule("model.scheduler_for_distilled_models", "warning", about="the model")
def scheduler_for_distilled_models(case: Case) -> Iterator[Seen]:
    """The scheduler is for models distilled to few steps, and this model does not look like one."""
    steps = case.call.num_inference_steps
    if case.pipeline is None or steps is None or few_step_evidence(case.pipeline) is not None:
        return
    scheduler = next((part.class_name for part in case.components("scheduler").values()), None)
    if scheduler in _FEW_STEP_SCHEDULERS:
        yield Seen(
            message=f"{scheduler} is for models distilled to few steps, and nothing shows that this model is one.",
            evidence={"scheduler": scheduler, "steps": steps},
            advice="Load the LCM or TCD weights or LoRA that it needs, or use the scheduler that came with the model.",
        )


@rule("model.guidance_doubles_the_work", "info", "warning", about="the model")
def guidance_doubles_the_work(case: Case) -> Iterator[Seen]:
    """Classifier-free guidance runs the denoiser for the negative prompt as well.

    That is normal. It is a finding if the model is distilled to need no guidance, or a target is missed.
    """
    call = case.call
    if call.guidance_batches is None or call.guidance_batches < 2 or case.pipeline is None:
        return
    why = few_step_evidence(case.pipeline)
    if why is None and not case.misses_target:
        return
    gain = _seconds_in_steps(case) * (1 - 1 / call.guidance_batches) or None
    yield Seen(
        severity="info" if why is None else "warning",
        message=f"Guidance at {call.guidance_scale:g} runs the denoiser {call.guidance_batches} times for each step's sample"
        + (f", though the model is distilled to need none ({why})." if why else ".")
        if call.guidance_scale is not None
        else f"Guidance runs the denoiser {call.guidance_batches} times for each step's sample.",
        evidence={"guidance_scale": call.guidance_scale, "gain_seconds": gain},
        advice="Set guidance_scale=1 (0 for SD-Turbo's pipelines)." if why else "If quality allows, use a "
        "guidance-distilled model, or guidance in some of the steps only (guidance interval).",
    )  # fmt: skip


def _seconds_in_steps(case: Case) -> float:
    """How long the denoiser's calls took, without callbacks between steps and other work of the denoising."""
    return sum(map(seconds_in_steps, case.named("denoising")), 0.0)


@rule("lora.modules_unmatched", "warning", "error", about="what goes in")
def lora_modules_unmatched(case: Case) -> Iterator[Seen]:
    """The model lacks some or all modules of a LoRA that was loaded."""
    for stage in case.named("lora_application"):
        analysis = _mapping(stage.facts.get("lora_application"))
        applied, verdict = _mapping(analysis.get("applied_verdict")), _mapping(analysis.get("verdict"))
        total = applied.get("total_modules", verdict.get("total_modules"))
        matched = applied.get("modules_there", verdict.get("matched_modules"))
        if not isinstance(total, int) or not isinstance(matched, int) or matched >= total:
            continue
        none = matched == 0
        yield Seen(
            severity="error" if none else "warning",
            message=f"The model has {'none' if none else f'only {matched}'} of the LoRA's {units.counted(total, 'module')}.",
            evidence={"modules": total, "matched": matched},
            advice="Run sigmascope lora inspect FILE --model MODEL: it names each module and the likely reason.",
            stage=stage.name,
        )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def few_step_evidence(pipeline: PipelineFacts) -> str | None:
    """The sign that the denoiser was distilled to few steps; None if there is no sign."""
    for name, part in pipeline.of_role("denoiser").items():
        if part.config.get("time_cond_proj_dim") is not None:
            return f"{name}.config.time_cond_proj_dim: it was distilled to take guidance as an input"
        if part.class_name.startswith("Flux") and part.config.get("guidance_embeds") is False:
            return f"{name}.config.guidance_embeds is False: FLUX.1 schnell"
        source = part.config.get("_name_or_path")
        word = _few_step_word_in(source if isinstance(source, str) else "")
        if word is not None:
            return f'"{word}" in {name}\'s source'
    word = _few_step_word_in(pipeline.source or "")
    return None if word is None else f'"{word}" in the pipeline\'s source'


def _few_step_word_in(text: str) -> str | None:
    return next((word for word in _FEW_STEP_NAMES if word in text.lower()), None)


@rule("precision.float32_on_accelerator", "warning", about="precision")
def float32_on_an_accelerator(case: Case) -> Iterator[Seen]:
    """A denoiser or text encoder runs in float32: twice the memory of bfloat16, and slower."""
    for role in ("denoiser", "text_encoder"):
        for name, part in case.components(role).items():
            device = _accelerator_of(part)
            if device is None or part.module is None or _most_common(part.module.dtypes) != _FLOAT32:
                continue
            dtype = "bfloat16" if _multiplies_bfloat16(case, device) else "float16"
            nbytes = part.module.nbytes
            half = None if nbytes is None else nbytes // 2
            yield Seen(
                message=f"{name} ({part.class_name}) is in float32 on {device}: its weights take {units.mib(nbytes)} MB, and "
                f"would take {units.mib(half)} MB in {dtype}, which is also faster.",
                evidence={"component": name, "device": device, "mb": mib(nbytes), "saved_mb": mib(half)},
                advice=f"Load it with torch_dtype=torch.{dtype}.",
            )


def _accelerator_of(part: ComponentFacts) -> str | None:
    """The device that holds most of the weights; None if that is the CPU."""
    device = None if part.module is None else _most_common(part.module.devices)
    return None if device in (None, "cpu", "meta") else device


def _most_common(counts: Mapping[str, int]) -> str | None:
    """The dtype or device of most elements, without the "torch." that records from elsewhere may have."""
    return max(counts, key=lambda name: counts[name]).removeprefix("torch.") if counts else None


def _multiplies_bfloat16(case: Case, device: str) -> bool:
    """Whether the device's tensor cores multiply bfloat16; if unknown, yes."""
    capability = next(
        (
            accelerator.compute_capability
            for accelerator in case.accelerators()
            if accelerator.device == device
        ),
        None,
    )
    if capability is None:
        return True
    parts = capability.split(".")
    return not all(part.isdigit() for part in parts) or tuple(map(int, parts)) >= _LEAST_BF16_CAPABILITY


@rule("precision.float32_vae", "warning", "info", about="precision")
def float32_vae(case: Case) -> Iterator[Seen]:
    """The VAE runs in float32 and the denoiser in half precision: some VAEs need that, others do not."""
    denoisers = [part.module for part in case.components("denoiser").values() if part.module is not None]
    if not any(_most_common(module.dtypes) in _HALF for module in denoisers):
        return
    for name, part in case.components("vae").items():
        device = _accelerator_of(part)
        if part.module is None or device is None or _most_common(part.module.dtypes) != _FLOAT32:
            continue
        is_intended = part.config.get("force_upcast") is True
        yield Seen(
            severity="info" if is_intended else "warning",
            message=f"{name} ({part.class_name}) runs in float32, and the denoiser in half precision"
            + (": its config asks for that, because it overflows in float16." if is_intended else "."),
            evidence={"component": name, "force_upcast": is_intended, "mb": mib(part.module.nbytes)},
            advice="bfloat16 has the range of float32 and takes half the memory. Try vae.to(torch.bfloat16), or for SDXL a "
            "VAE that runs in float16 (madebyollin/sdxl-vae-fp16-fix), and compare the images.",
        )


@rule("precision.not_channels_last", "info", about="precision")
def convolutions_not_channels_last(case: Case) -> Iterator[Seen]:
    """The denoiser's weights are not channels-last, with which half-precision convolutions are faster."""
    for name, part in case.components("denoiser").items():
        module, device = part.module, _accelerator_of(part)
        if part.channels_last is not False or module is None or case.pipeline is None:
            continue
        if case.pipeline.architecture != "UNet" or device is None or not device.startswith("cuda"):
            continue
        if _most_common(module.dtypes) in _HALF:
            yield Seen(
                message=f"{name} ({part.class_name}) runs its convolutions in half precision, and its weights are not "
                "channels-last.",
                evidence={"component": name, "device": device},
                advice=f"Try pipe.{name}.to(memory_format=torch.channels_last) and compare the step times.",
            )


@rule("attention.plain_processor_in_joint_blocks", "error", about="attention")
def plain_processor_in_joint_blocks(case: Case) -> Iterator[Seen]:
    """A joint attention block has AttnProcessor2_0 or the like, which returns one tensor instead of two."""
    if case.pipeline is None:
        return
    wrong = {
        name: count
        for name, count in case.pipeline.attention.joint_processors.items()
        if name in _ONE_TENSOR_PROCESSORS
    }
    if not wrong:
        return
    names = ", ".join(sorted(wrong))
    yield Seen(
        message=f"{units.counted(sum(wrong.values()), 'joint attention block has', 'joint attention blocks have')} {names}, "
        "which returns one tensor instead of two (image and text): the call fails, or the text is lost.",
        evidence={"blocks": sum(wrong.values()), "processors": names},
        advice="Put the model's own processor back: reload the transformer, or call set_attn_processor() with "
        "FluxAttnProcessor(), JointAttnProcessor2_0() or QwenDoubleStreamAttnProcessor2_0(). They already use PyTorch's "
        "fused attention.",
    )


@rule("attention.eager", "warning", about="attention")
def eager_attention(case: Case) -> Iterator[Seen]:
    """Attention builds the whole matrix, which takes more memory and time than fused attention."""
    if case.pipeline is None:
        return
    eager = {
        name: count for name, count in case.pipeline.attention.processors.items() if name in _EAGER_PROCESSORS
    }
    if not eager:
        return
    count, names = sum(eager.values()), ", ".join(sorted(eager))
    yield Seen(
        message=f"{units.counted(count, 'attention module runs', 'attention modules run')} {names}, which builds the whole "
        "attention matrix: memory grows with the square of the number of tokens.",
        evidence={"modules": count, "processors": names},
        advice="Call pipe.unet.set_attn_processor(AttnProcessor2_0()), or pipe.disable_attention_slicing(): PyTorch's "
        "scaled_dot_product_attention gives the same result.",
    )


@rule("text.prompt_is_cut", "warning", about="what goes in")
def prompt_is_cut(case: Case) -> Iterator[Seen]:
    """A prompt is too long: its last tokens reach no text encoder."""
    for stage in case.named(_TEXT_STAGE):
        for side, prompt in _prompts(stage.facts.get(_TEXT_STAGE)):
            cut, total, limit = (
                prompt.get(name) for name in ("truncated_tokens", "token_count", "token_limit")
            )
            if not isinstance(cut, int) or not cut:
                continue
            yield Seen(
                message=f"The {side} prompt is cut: {cut} of its {total} tokens reach no text encoder. The longest "
                f"limit is {limit} tokens.",
                evidence={
                    "prompt": side,
                    "truncated_tokens": cut,
                    "token_count": total,
                    "token_limit": limit,
                },
                advice="Shorten it, move what matters to its beginning, or encode it in parts and pass prompt_embeds.",
                stage=_TEXT_STAGE,
            )


def _prompts(analysis: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    processed = analysis.get("text_processing") if isinstance(analysis, Mapping) else None
    for side in ("positive", "negative"):
        prompt = processed.get(side) if isinstance(processed, Mapping) else None
        if isinstance(prompt, Mapping):
            yield side, prompt


@rule("picture.not_finite", "error", about="pictures")
def pictures_not_finite(case: Case) -> Iterator[Seen]:
    """Pictures hold NaN or infinity."""
    for stage, _, count in _pictures(case):
        if count["not_finite"]:
            yield Seen(
                message=f"{_share(count, 'not_finite')} {'holds' if count['not_finite'] == 1 else 'hold'} NaN or infinity.",
                evidence={**_looked_at(count), "not_finite": count["not_finite"]},
                advice=_NO_CONTENT_ADVICE,
                stage=stage,
            )


@rule("picture.replaced_by_safety_checker", "warning", about="pictures")
def pictures_replaced(case: Case) -> Iterator[Seen]:
    """The pipeline's safety checker replaced pictures with black."""
    for stage, _, count in _pictures(case):
        if count["replaced"]:
            yield Seen(
                message=f"The pipeline's safety checker replaced {count['replaced']} of "
                f"{units.counted(count['pictures'], 'picture')} with black.",
                evidence={**_looked_at(count), "replaced": count["replaced"]},
                advice="Use another seed or prompt. Nothing is wrong with the model or the VAE.",
                stage=stage,
            )


@rule("picture.is_one_colour", "warning", about="pictures")
def pictures_of_one_colour(case: Case) -> Iterator[Seen]:
    """Pictures are a single colour; a video counts if all frames looked at are."""
    for stage, noted, count in _pictures(case):
        flat = count["one_colour"]
        if flat and not count["replaced"] and (flat == count["looked_at"] or not noted.get("is_video")):
            colour = ", ".join(f"{band:g}" for band in noted.get("colour") or ())
            yield Seen(
                message=f"{_share(count, 'one_colour')} {'is' if flat == 1 else 'are'} one colour all over ({colour}).",
                evidence={**_looked_at(count), "one_colour": flat, "colour": colour},
                advice=_NO_CONTENT_ADVICE,
                stage=stage,
            )


def _share(count: Mapping[str, int], name: str) -> str:
    return f"{count[name]} of {units.counted(count['looked_at'], 'picture')}"


def _looked_at(count: Mapping[str, int]) -> dict[str, JsonScalar]:
    return {"pictures": count["pictures"], "looked_at": count["looked_at"]}


def _pictures(case: Case) -> Iterator[tuple[str, Mapping[str, Any], dict[str, int]]]:
    """Of each stage with pictures: its name, the facts about them, and the counts that could be read."""
    for stage in case.stages:
        noted = stage.facts.get(_PICTURES_FACT)
        if isinstance(noted, Mapping):
            yield stage.name, noted, {name: _count_of(noted, name) for name in _COUNTS}


def _count_of(seen: Mapping[str, Any], name: str) -> int:
    value = seen.get(name)
    return value if isinstance(value, int) else 0
