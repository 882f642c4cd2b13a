"""Text encoding (SPEC sections 1, 2 and 4): what the prompt became, and what it cost.

    baseline = capture_text_encoding_baseline(unet, clip)
    positive, negative = encode(...)
    analysis = analyze_text_encoding_results(baseline, positive, negative, prompt, negative_prompt, seconds)
    print_text_encoding_analysis_summary(analysis)

The functions change nothing, move nothing, and keep no model and no tensor alive. What cannot be read is
None, with the reason in the `unavailable` beside it.
"""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from sigmascope.probes import Accelerator
from sigmascope.records.peak import PeakMemory
from sigmascope.records.prompts import PromptPrivacy
from sigmascope.records.typed import PeakMemoryDict
from sigmascope.stages.summary import print_summary
from sigmascope.stages.text.analysis import Choices, Outcome, Side, TokensSeen, analyze
from sigmascope.stages.text.baseline import capture
from sigmascope.stages.text.dumping import DumpFolder
from sigmascope.stages.text.report import TITLE, sections
from sigmascope.stages.text.thresholds import TextEncodingThresholds
from sigmascope.stages.text.typed import TextEncodingAnalysis, TextEncodingBaseline

__all__ = [
    "TextEncodingAnalysis",
    "TextEncodingBaseline",
    "TextEncodingThresholds",
    "analyze_text_encoding_results",
    "capture_text_encoding_baseline",
    "print_text_encoding_analysis_summary",
]


def capture_text_encoding_baseline(
    unet_model: object,
    clip_model: object,
    *,
    tokenizer: object = None,
    accelerator: Accelerator | None = None,
) -> TextEncodingBaseline:
    """Memory and models as they are before the encoding. Never raises.

    Args:
        unet_model: The denoiser, of any architecture; None if it is not loaded yet.
        clip_model: What encodes the text: a transformers model, a mapping of several, a diffusers pipeline or
            a ComfyUI CLIP.
        tokenizer: Where `clip_model` holds none: one, a list, a mapping, or a pipeline that has some.
        accelerator: What to ask about devices; None finds out.
    """
    return capture(unet_model, clip_model, tokenizer, accelerator)


def analyze_text_encoding_results(
    baseline: Mapping[str, Any] | None,
    positive_cond: object,
    negative_cond: object,
    positive_prompt: object,
    negative_prompt: object,
    elapsed_time: object,
    *,
    positive_seconds: float | None = None,
    negative_seconds: float | None = None,
    peak_memory: PeakMemory | PeakMemoryDict | None = None,
    error: BaseException | str | None = None,
    thresholds: TextEncodingThresholds | None = None,
    token_limit: int | None = None,
    statistics: bool | None = None,
    prompt_privacy: PromptPrivacy = "full",
    dumps: DumpFolder | None = None,
    tokens_seen: TokensSeen | None = None,
) -> TextEncodingAnalysis:
    """Everything that SPEC section 4 names, from the baseline and what was encoded.

    Args:
        baseline: What `capture_text_encoding_baseline` gave; None: no comparison with before.
        positive_cond: The conditioning, in any nesting of ComfyUI, diffusers or transformers.
        negative_cond: That of the negative prompt; None without guidance.
        positive_prompt: The text, or a list of texts that were encoded together.
        negative_prompt: The negative text; None if there is none.
        elapsed_time: Seconds that the step took.
        positive_seconds: Of them, those for the positive prompt, if measured apart.
        negative_seconds: The same for the negative prompt.
        peak_memory: The peak of the stage that watched the encoding.
        error: What the encoder raised, if it did.
        thresholds: Limits for the validation.
        token_limit: The pipeline's own limit (`max_sequence_length`), special tokens included; None: each
            tokenizer's.
        statistics: True reads the values of an accelerator's tensors too, which waits for it; None those of
            CPU tensors; False none.
        prompt_privacy: Whether the analysis holds the prompts, their SHA-256 or neither.
        dumps: Where to save the conditionings: a `sigmascope.TensorDumps`, whose own privacy holds for them.
        tokens_seen: Gives what the tokenizers made of the texts when they were watched; None: they are asked now.

    Raises:
        ConfigError: `prompt_privacy` does not exist. Nothing that is looked at can raise.
    """
    return analyze(
        baseline,
        Side("positive", positive_prompt, positive_cond, positive_seconds),
        Side("negative", negative_prompt, negative_cond, negative_seconds),
        Outcome(elapsed_time, peak_memory, error),
        Choices(
            thresholds or TextEncodingThresholds(),
            token_limit,
            statistics,
            prompt_privacy,
            dumps,
            tokens_seen,
        ),
    )


def print_text_encoding_analysis_summary(analysis: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the analysis, section by section, at most 80 columns wide.

    Args:
        analysis: What `analyze_text_encoding_results` gave, or the same read from a file.
        console: Where to; standard output by default, plain when that is no terminal.
    """
    print_summary(TITLE, sections(analysis), console)
