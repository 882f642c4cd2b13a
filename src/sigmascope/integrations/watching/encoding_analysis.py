"""The analysis of a watched text encoding (SPEC section 4), from what the host itself did."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from sigmascope.integrations.watching.token_counts import Reading, counts_seen
from sigmascope.monitor.live import LiveStage
from sigmascope.records.prompts import PromptPrivacy
from sigmascope.stages.text_encoding import analyze_text_encoding_results, capture_text_encoding_baseline

ENCODING_STAGE: Final = "text_encoding"
_ON_THE_STAGE: Final = frozenset({"baseline", "current_memory", "memory_impact", "peak_memory"})


@dataclass(slots=True)
class Encoding:
    """One call of `encode_prompt` while it goes on.

    Attributes:
        prompt: What it was called with.
        negative_prompt: Likewise.
        baseline: The text encoders and memory before it.
        readings: What tokenizers were seen to read.
    """

    prompt: object
    negative_prompt: object
    baseline: Mapping[str, Any] | None
    readings: list[Reading] = field(default_factory=list)


def begun(arguments: Mapping[str, Any], encoders: Mapping[str, object]) -> Encoding:
    """Take what is known before the encoding.

    Args:
        arguments: The call's, by name.
        encoders: The pipeline's text encoders, by name. Their weights are not read.
    """
    baseline = capture_text_encoding_baseline(None, dict(encoders) or None)
    return Encoding(arguments.get("prompt"), arguments.get("negative_prompt"), baseline)


def tell(
    stage: LiveStage,
    encoding: Encoding,
    named: Mapping[str, object],
    privacy: PromptPrivacy,
    error: BaseException | None,
) -> None:
    """Put the analysis on the stage, which is over. Nothing waits for an accelerator.

    Args:
        stage: The encoding's.
        encoding: What was seen of it.
        named: The embeddings that it gave, by name.
        privacy: What is kept of prompts.
        error: What it raised.
    """
    record = stage.record()
    analysis = analyze_text_encoding_results(
        encoding.baseline,
        _conditioning(named, ""),
        _conditioning(named, "negative_"),
        encoding.prompt,
        encoding.negative_prompt,
        record.seconds,
        peak_memory=record.peak,
        error=error,
        prompt_privacy=privacy,
        tokens_seen=partial(counts_seen, encoding.readings),
    )
    stage.fact(ENCODING_STAGE, {name: value for name, value in analysis.items() if name not in _ON_THE_STAGE})


def _conditioning(named: Mapping[str, object], which: str) -> object:
    """The embeddings and the pooled ones of one prompt; None without any."""
    found = [named.get(f"{which}{name}") for name in ("prompt_embeds", "pooled_prompt_embeds")]
    given = tuple(one for one in found if one is not None)
    return given or None
