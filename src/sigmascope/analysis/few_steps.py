"""Whether a denoiser was distilled to few steps, by what its pipeline's record tells."""

from typing import Final

from sigmascope.records.pipeline import PipelineFacts

_NAMES: Final = ("turbo", "lightning", "schnell", "lcm", "hyper-sd", "hyper_sd", "distill", "dmd")


def few_step_evidence(pipeline: PipelineFacts) -> str | None:
    """Why the denoiser is taken for one distilled to few steps; None: nothing says so.

    Args:
        pipeline: What was read off the pipeline.
    """
    for name, part in pipeline.of_role("denoiser").items():
        if part.config.get("time_cond_proj_dim") is not None:
            return f"{name}.config.time_cond_proj_dim: it was distilled to take guidance as an input"
        if part.class_name.startswith("Flux") and part.config.get("guidance_embeds") is False:
            return f"{name}.config.guidance_embeds is False: FLUX.1 schnell"
        source = part.config.get("_name_or_path")
        word = _word_in(source if isinstance(source, str) else "")
        if word is not None:
            return f'"{word}" in {name}\'s source'
    word = _word_in(pipeline.source or "")
    return None if word is None else f'"{word}" in the pipeline\'s source'


def _word_in(text: str) -> str | None:
    return next((word for word in _NAMES if word in text.lower()), None)
