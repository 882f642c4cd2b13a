"""Statistics of a diffusers pipeline's denoiser, from a few pictures that its own call makes.

`pipeline_statistics` sums up what the picture feels of each layer's weight, and `fit_pipeline_lora` brings a LoRA
nearer to the pipeline that it was made from.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import ConfigError
from sigmascope.lora.file import LoraFile
from sigmascope.lora.fingerprint import denoiser_fingerprint
from sigmascope.lora.fit import (
    FitOptions,
    FittedLora,
    RecordedCall,
    fit_lora,
    record_calls,
    require_fittable,
    save_fitted,
)
from sigmascope.lora.statistics import FULL_UP_TO, RANK, ModelStatistics
from sigmascope.lora.statistics_collection import (
    UnfinishedSums,
    checkpoint_gradients,
    collect_statistics,
    frozen,
)
from sigmascope.pipeline.model_state import free_memory
from sigmascope.probes.models import components_of
from sigmascope.progress import Progress, no_progress

__all__ = [
    "fit_pipeline_lora",
    "fit_saved_pipeline_lora",
    "noise_prompts",
    "pipeline_statistics",
    "saved_pipeline_statistics",
]

Through = Literal["sampling", "calls"]
_DENOISERS = ("unet", "transformer", "prior")
_FEW_STEPS = 3  # of a sampling that gradients pass through; more tell less, even of pictures that take 20
_LETTERS = 3  # a random word has at least
_WORDS_OF_A_PROMPT = 8
_END_OF_WORD = "</w>"  # which some of CLIP's tokenizers leave in the text


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
    unfinished: UnfinishedSums | None = None,
    progress: Progress = no_progress,
) -> ModelStatistics:
    """Make a picture of each prompt, and sum up what the denoiser's layers do at all timesteps that it visits.

    Args:
        pipeline: Of diffusers, with a `unet` or `transformer`.
        prompts: A picture each.
        call: Further arguments of the pipeline's call: steps, guidance, size. Steps are 3 when left out, and the
            pipeline's own with `calls`.
        through: `sampling`: how an error of each step arrives in the last latents, by gradients through all steps; each
            picture counts alike. `calls`: how it shows in the step's own output; for pipelines and schedulers that let
            no gradient through.
        probes: Random projections of each output.
        full_up_to: Width up to which a layer's moments are kept whole.
        rank: Directions that are kept of wider ones.
        seed: Of noise and projections.
        fingerprint: Of the denoiser's weights, for the file.
        unfinished: Sums of a run that was killed, to go on from.
        progress: Called after each call of the denoiser.

    Raises:
        ConfigError: There is no prompt, or no denoiser, or no gradient comes through the sampling.
        NonFiniteError: NaN or Inf went through a layer.
        Exception: Whatever the pipeline raises.
    """
    _require_prompts(prompts)
    denoiser = denoiser_of(pipeline)
    arguments = dict(call or {})
    takes_steps = "num_inference_steps" in inspect.signature(type(pipeline).__call__).parameters
    if through == "sampling" and takes_steps and "strength" not in arguments:  # a share of few may be none
        arguments.setdefault("num_inference_steps", _FEW_STEPS)
    steps = arguments.get("num_inference_steps")

    def make(number: int) -> Any:
        generator = torch.Generator().manual_seed(seed + number)
        asked = {"generator": generator, "output_type": "latent"} | arguments
        if through == "calls":
            return pipeline(prompts[number], **asked)
        return inspect.unwrap(type(pipeline).__call__)(
            pipeline, prompts[number], **asked
        )  # without its no_grad

    def left() -> Iterator[int]:
        for number in range(0 if unfinished is None else unfinished.inputs, len(prompts)):
            yield number
            if unfinished is not None:
                unfinished.input_done()

    def run_calls() -> None:
        for number in left():
            make(number)

    def run_samplings() -> Iterator[object]:
        with ExitStack() as stack:
            for part in components_of(pipeline).values():
                if isinstance(part, nn.Module):
                    stack.enter_context(frozen(part))
            for number in left():
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
        unfinished=unfinished,
        progress=progress,
    )


def saved_pipeline_statistics(
    folder: str | Path,
    prompts: Sequence[str] | int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    gradient_checkpointing: bool = False,
    save_to: str | Path | None = None,
    **options: Any,
) -> ModelStatistics:
    """`pipeline_statistics` of a folder that `save_pretrained` wrote.

    Args:
        folder: With a `model_index.json`: the base or the tuned model of a later extraction.
        prompts: A picture each; or how many prompts of random words to make.
        seed: Of noise, projections and random words.
        dtype: In which it computes.
        device: Where it does.
        gradient_checkpointing: Spend a second forward pass of each block to keep less of it.
        save_to: Write the file of statistics here. A run that was killed then goes on where it was.
        options: As for `pipeline_statistics`.

    Raises:
        CheckpointError: It cannot be loaded.
        SigmascopeError: As for `pipeline_statistics`.
    """
    from sigmascope.pipeline.bench import load_pipeline

    with open_checkpoint(folder) as checkpoint:
        fingerprint = denoiser_fingerprint(checkpoint)
    pipeline = load_pipeline(str(folder), dtype=dtype, device=device or torch.device("cpu"))
    texts = noise_prompts(pipeline, prompts, seed=seed) if isinstance(prompts, int) else prompts
    if gradient_checkpointing:
        checkpoint_gradients(denoiser_of(pipeline))
    if save_to is None:
        return pipeline_statistics(pipeline, texts, seed=seed, fingerprint=fingerprint, **options)
    settings = {"prompts": texts, "seed": seed, "dtype": dtype, "fingerprint": fingerprint}
    settings |= {name: value for name, value in options.items() if name != "progress"}
    with UnfinishedSums(Path(save_to), settings) as unfinished:
        found = pipeline_statistics(
            pipeline, texts, seed=seed, fingerprint=fingerprint, unfinished=unfinished, **options
        )
        found.save(save_to)
    return found


def fit_pipeline_lora(
    base: nn.Module,
    tuned: Any,
    lora: LoraFile,
    prompts: Sequence[str],
    options: FitOptions | None = None,
    *,
    call: Mapping[str, Any] | None = None,
    batch_size: int = 1,
    progress: Progress = no_progress,
) -> FittedLora:
    """Fit a LoRA to the calls of the denoiser with which a pipeline paints prompts.

    Args:
        base: The denoiser that the LoRA is for, without it.
        tuned: The pipeline of diffusers that the LoRA is to give back.
        lora: As for `fit_lora`.
        prompts: A picture each.
        options: As for `fit_lora`; the seed is that of the first picture's noise too.
        call: Further arguments of the pipeline's call: steps, guidance, size.
        batch_size: Prompts a call, in recording and in the fit.
        progress: Called after each call of the tuned denoiser and each step of the fit.

    Raises:
        ConfigError: There is no prompt, or no denoiser.
        SigmascopeError: As for `fit_lora`.
        Exception: Whatever the pipeline raises.
    """
    _require_prompts(prompts)
    how = options or FitOptions()
    require_fittable(base, lora)
    recorded = _recorded(tuned, prompts, call, batch_size, how.seed, progress)
    return fit_lora(base, lora, recorded, how, progress=progress)


def fit_saved_pipeline_lora(
    base: str | Path,
    tuned: str | Path,
    lora: str | Path,
    save_to: str | Path,
    prompts: Sequence[str] | int,
    options: FitOptions | None = None,
    *,
    call: Mapping[str, Any] | None = None,
    batch_size: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    gradient_checkpointing: bool = False,
    progress: Progress = no_progress,
) -> FittedLora:
    """`fit_pipeline_lora` of folders that `save_pretrained` wrote and a LoRA file; one denoiser is loaded at a time.

    Args:
        base: The pipeline that the LoRA is for.
        tuned: The one that it was made from.
        lora: The file.
        save_to: The file to write.
        prompts: A picture each; or how many prompts of random words to make.
        options: As for `fit_pipeline_lora`; the seed is that of random words too.
        call: Further arguments of the pipeline's call.
        batch_size: As for `fit_pipeline_lora`.
        dtype: In which it computes.
        device: Where it does.
        gradient_checkpointing: Spend a second forward pass of each block to keep less of it.
        progress: As for `fit_pipeline_lora`.

    Raises:
        CheckpointError: A pipeline cannot be loaded.
        SigmascopeError: As for `fit_pipeline_lora` and `save_fitted`.
    """
    from sigmascope.pipeline.bench import load_pipeline

    how, where = options or FitOptions(), device or torch.device("cpu")

    def fit(original: LoraFile) -> FittedLora:
        pipeline = load_pipeline(str(tuned), dtype=dtype, device=where)
        require_fittable(denoiser_of(pipeline), original)
        texts = noise_prompts(pipeline, prompts, seed=how.seed) if isinstance(prompts, int) else prompts
        recorded = _recorded(pipeline, texts, call, batch_size, how.seed, progress)
        del pipeline
        free_memory(where)
        model = denoiser_of(load_pipeline(str(base), dtype=dtype, device=where))
        if gradient_checkpointing:
            checkpoint_gradients(model)
        return fit_lora(model, original, recorded, how, progress=progress)

    return save_fitted(lora, save_to, fit)


def _recorded(
    pipeline: Any,
    prompts: Sequence[str],
    call: Mapping[str, Any] | None,
    batch_size: int,
    seed: int,
    progress: Progress,
) -> list[list[RecordedCall]]:
    _require_prompts(prompts)
    if batch_size < 1:
        raise ConfigError(f"--batch_size {batch_size} paints nothing.", hint="Use 1 or more.")
    arguments = dict(call or {})
    starts = range(0, len(prompts), batch_size)
    steps = arguments.get("num_inference_steps")
    expected = 0 if steps is None else int(steps) * len(starts)
    calls = 0

    def paint() -> Iterator[object]:
        nonlocal expected
        for start in starts:
            texts = list(prompts[start : start + batch_size])
            generators = [torch.Generator().manual_seed(seed + start + index) for index in range(len(texts))]
            yield pipeline(texts, **{"generator": generators, "output_type": "latent"} | arguments)
            expected = expected or calls * len(starts)

    def told(done: int, _total: int, what: str) -> None:
        nonlocal calls
        calls = done
        progress(done, max(done, expected) if expected else 0, what)

    return record_calls(denoiser_of(pipeline), paint, progress=told)


def noise_prompts(pipeline: Any, count: int, *, seed: int = 0) -> list[str]:
    """Prompts of random words of the pipeline's tokenizer, where there are none of the kind that will be used.

    Raises:
        ConfigError: `count` is below 1, or the pipeline has no tokenizer that knows words.
    """
    if count < 1:
        raise ConfigError(f"--noise {count} makes no prompt.", hint="Use 1 or more, such as 16.")
    tokenizer: Any = components_of(pipeline).get("tokenizer")
    if tokenizer is None:
        raise ConfigError(f"{type(pipeline).__name__} has no tokenizer.", hint="Use --prompts FILE.")
    generator = torch.Generator().manual_seed(seed)
    drawn: list[str] = []
    for index in torch.randperm(len(tokenizer), generator=generator).tolist():
        word = tokenizer.decode([index]).removesuffix(_END_OF_WORD).strip()
        # A word, and not a piece of one: it is read back as the token alone.
        if len(word) >= _LETTERS and word.isalpha() and _ids_of(tokenizer, word) == [index]:
            drawn.append(word)
        if len(drawn) == count * _WORDS_OF_A_PROMPT:
            break
    if not drawn:
        raise ConfigError(f"{type(tokenizer).__name__} knows no words.", hint="Use --prompts FILE.")
    while len(drawn) < count * _WORDS_OF_A_PROMPT:  # a small vocabulary
        drawn += drawn[: count * _WORDS_OF_A_PROMPT - len(drawn)]
    order = torch.randperm(len(drawn), generator=generator).tolist()
    return [" ".join(drawn[index] for index in order[first::count]) for first in range(count)]


def _ids_of(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return found


def _require_prompts(prompts: Sequence[str]) -> None:
    if not prompts:
        raise ConfigError("there is no prompt.", hint="Put one on each line of --prompts FILE.")


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
