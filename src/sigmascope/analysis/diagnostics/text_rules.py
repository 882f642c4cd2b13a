"""Rules on prompts."""

from collections.abc import Iterator, Mapping
from typing import Any

from sigmascope.analysis.diagnostics.case import Case
from sigmascope.records.finding import Finding

_STAGE = "text_encoding"


def prompt_is_cut(case: Case) -> Iterator[Finding]:
    """A prompt of which some tokens reach no text encoder, not even the one that reads most of it."""
    for stage in case.named(_STAGE):
        for side, prompt in _prompts(stage.facts.get(_STAGE)):
            cut, total, limit = (
                prompt.get(name) for name in ("truncated_tokens", "token_count", "token_limit")
            )
            if not isinstance(cut, int) or not cut:
                continue
            yield Finding(
                id="text.prompt_is_cut",
                severity="warning",
                message=f"The {side} prompt is cut: {cut} of its {total} tokens reach no text encoder; the longest "
                f"reads {limit}.",
                evidence={
                    "prompt": side,
                    "truncated_tokens": cut,
                    "token_count": total,
                    "token_limit": limit,
                },
                advice="Shorten it, or move what matters to where it is kept; or encode it in parts and pass "
                "prompt_embeds.",
                stage=_STAGE,
            )


def _prompts(analysis: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    sides = analysis.get("text_processing") if isinstance(analysis, Mapping) else None
    for side in ("positive", "negative"):
        prompt = sides.get(side) if isinstance(sides, Mapping) else None
        if isinstance(prompt, Mapping):
            yield side, prompt


TEXT_RULES = (prompt_is_cut,)
