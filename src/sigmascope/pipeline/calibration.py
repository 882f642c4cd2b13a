"""Statistics of the layers of a diffusers pipeline's denoiser: it makes a few pictures by its own call."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import ConfigError
from sigmascope.lora.calibration import collect_statistics, frozen
from sigmascope.lora.families import denoiser_fingerprint
from sigmascope.lora.statistics import FULL_UP_TO, RANK, ModelStatistics
from sigmascope.probes.models import components_of
from sigmascope.progress import Progress, no_progress

__all__ = ["pipeline_statistics", "saved_pipeline_statistics"]

Through = Literal["sampling", "calls"]
_DENOISERS = ("unet", "transformer", "prior")


def pipeline_statistics(
    pipeline: Any,
    prompts: Sequence[str],
    *,
    call: Mapping[str, Any] | None = None,
    through: Through = "sampling",
    probes: int = 1,
    full_up_to: int = FULL_UP_TO,
    rank: int = RANK,
    seed: int = 0,
    fingerprint: str = "",
    progress: Progress = no_progress,
) -> ModelStatistics:
    """Make a picture of each prompt, and sum up what the denoiser's layers do at all timesteps that it visits.

    Args:
        pipeline: Of diffusers, with a `unet` or `transformer`.
        prompts: A picture each.
        call: Further arguments of the pipeline's call: steps, guidance, size.
        through: `sampling`: how an error of each step arrives in the last latents, by gradients through all steps.
            `calls`: how it shows in the step's own output; for pipelines and schedulers that let no gradient through.
        probes: Random projections of each output.
        full_up_to: Width up to which a layer's moments are kept whole.
        rank: Directions that are kept of wider ones.
        seed: Of noise and projections.
        fingerprint: Of the denoiser's weights, for the file.
        progress: Told after each call of the denoiser.

    Raises:
        ConfigError: There is no prompt, or no denoiser, or no gradient comes through the sampling.
        NonFiniteError: NaN or Inf went through a layer.
        Exception: Whatever the pipeline raises.
    """
    if not prompts:
        raise ConfigError("there is no prompt.", hint="Put one on each line of --prompts FILE.")
    denoiser = denoiser_of(pipeline)
    arguments = dict(call or {})
    steps = arguments.get("num_inference_steps")

    def make(number: int) -> Any:
        generator = torch.Generator().manual_seed(seed + number)
        asked = {"generator": generator, "output_type": "latent"} | arguments
        if through == "calls":
            return pipeline(prompts[number], **asked)
        return inspect.unwrap(type(pipeline).__call__)(
            pipeline, prompts[number], **asked
        )  # without its no_grad

    def run_calls() -> None:
        for number in range(len(prompts)):
            make(number)

    def run_samplings() -> Iterator[object]:
        with ExitStack() as stack:
            for part in components_of(pipeline).values():
                if isinstance(part, nn.Module):
                    stack.enter_context(frozen(part))
            for number in range(len(prompts)):
                yield make(number)

    return collect_statistics(
        denoiser,
        run_calls if through == "calls" else run_samplings,
        probes=probes,
        calls=None if steps is None else int(steps) * len(prompts),
        full_up_to=full_up_to,
        rank=rank,
        seed=seed,
        fingerprint=fingerprint,
        progress=progress,
    )


def saved_pipeline_statistics(
    folder: str | Path,
    prompts: Sequence[str],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    **options: Any,
) -> ModelStatistics:
    """`pipeline_statistics` of a folder that `save_pretrained` wrote.

    Args:
        folder: With a `model_index.json`: the base or the tuned model of a later extraction.
        prompts: A picture each.
        dtype: In which it computes.
        device: Where it does.
        options: As of `pipeline_statistics`.

    Raises:
        CheckpointError: It cannot be loaded.
        SigmascopeError: As of `pipeline_statistics`.
    """
    from sigmascope.pipeline.bench import load_pipeline

    with open_checkpoint(folder) as checkpoint:
        fingerprint = denoiser_fingerprint(checkpoint)
    pipeline = load_pipeline(str(folder), dtype=dtype, device=device or torch.device("cpu"))
    return pipeline_statistics(pipeline, prompts, fingerprint=fingerprint, **options)


def denoiser_of(pipeline: Any) -> nn.Module:
    """The module that a pipeline calls at each step.

    Raises:
        ConfigError: There is none, or there are several.
    """
    known = components_of(pipeline)
    there = [module for name in _DENOISERS if isinstance(module := known.get(name), nn.Module)]
    if len(there) != 1:
        raise ConfigError(
            f"{type(pipeline).__name__} has {len(there)} denoisers.",
            hint="Pass the module itself to sigmascope.collect_statistics.",
        )
    return there[0]
