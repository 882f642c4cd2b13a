"""Prompts stay private in what leaves for other tools (SPEC section 8)."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sigmascope.records.prompts import PromptPrivacy, prompt_sha256, redactor
from sigmascope.records.run import Run

_PROMPT_KEY = re.compile(r"(?:positive_|negative_)?prompts?(?:_?\d+)?|text_content")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PRIVACY = "privacy"


def without_prompts(run: Run, privacy: PromptPrivacy) -> Callable[[Any], Any]:
    """A function that takes the prompts of a run out of plain values, wherever they are repeated.

    Args:
        run: Its facts say what the prompts were.
        privacy: What stays in their place.

    Raises:
        ConfigError: There is no such privacy.
    """
    told = {text for facts in _all_facts(run) for text in _prompts(facts)}
    hashes = {text for text in told if _SHA256.fullmatch(text)}
    prompts = told - hashes
    if privacy == "none":
        prompts |= hashes | {prompt_sha256(text) for text in prompts}
    redact = redactor(sorted(prompts), privacy)

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return redact(value)
        if isinstance(value, Mapping):
            return {key: clean(item) for key, item in value.items()}
        return [clean(item) for item in value] if isinstance(value, list) else value

    return clean


def _all_facts(run: Run) -> Iterator[Mapping[str, Any]]:
    yield run.facts
    for stage in run.walk():
        yield stage.facts


def _prompts(value: Any) -> Iterator[str]:
    """What lies under the name of a prompt, at any depth."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item) if _PROMPT_KEY.fullmatch(str(key)) else _prompts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _prompts(item)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key != _PRIVACY:
                yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
