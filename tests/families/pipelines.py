"""Real pipelines of diffusers for seven families, built offline from small configurations."""

from typing import Any

import torch
from tests.families.family import FAMILIES, Family
from torch import Tensor

PROMPT = "a red fox over the lazy dog"


def make_pipeline(family: str | Family) -> Any:
    """A pipeline of its own, tokenizers included: a test may do what it likes to it, in threads too.

    Args:
        family: One of `FAMILIES`, or its name: `sd15`, `sdxl`, `flux`, `sd3`, `qwen_image`, `wan`, `wan_vace`.

    Returns:
        A diffusers pipeline in float32 on the CPU. The same weights each time.
    """
    import diffusers

    made = FAMILIES[family] if isinstance(family, str) else family
    pipeline = getattr(diffusers, made.pipeline_class)(**made.components())
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generate(
    pipeline: Any, family: str | Family, *, seed: int = 0, prompt: str = PROMPT, **overrides: Any
) -> Tensor:
    """What the pipeline makes of the prompt: an image or a video, two steps, as a tensor."""
    made = FAMILIES[family] if isinstance(family, str) else family
    arguments = {"output_type": "pt", **made.call, **overrides}
    with torch.no_grad():
        output = pipeline(prompt, generator=torch.Generator().manual_seed(seed), **arguments)
    result: Tensor = output[0]
    return result
