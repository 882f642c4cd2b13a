"""Prompts are private: what is kept of one is its text, its hash or nothing, as configured."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sigmascope.errors import ConfigError

PromptPrivacy = Literal["full", "hash", "none"]
"""What is kept of a prompt: its text, its SHA-256, or nothing."""

Prompts = str | Sequence[str] | Mapping[str, str] | None
"""One prompt, one for each item of a batch, or some by name (`positive`, `negative`)."""

_WHOLE_WORDS_BELOW = 8  # characters; "cat" must not be found in "category"


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """What is kept of one prompt: its text, or only the hash of it."""

    sha256: str
    text: str | None = None


def prompt_sha256(text: str) -> str:
    """SHA-256 of a prompt in UTF-8, as 64 hexadecimal digits; lone surrogates are hashed as such.

    A hash tells whether two prompts are the same. Whoever guesses a prompt can confirm the guess with it.
    """
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def named_prompts(prompts: Prompts) -> dict[str, str]:
    """Prompts by name: one is `prompt`, those of a batch are `prompt.0`, `prompt.1`, ….

    Raises:
        ConfigError: Something else than text is among them.
    """
    if prompts is None:
        return {}
    if isinstance(prompts, str):
        named: dict[str, Any] = {"prompt": prompts}
    elif isinstance(prompts, Mapping):
        named = {str(name): text for name, text in prompts.items()}
    else:
        named = {f"prompt.{index}": text for index, text in enumerate(prompts)}
    for name, text in named.items():
        if not isinstance(text, str):
            raise ConfigError(
                f"The prompt {name!r} is a {type(text).__name__} and not text.", hint="Give prompts as str."
            )
    return named


def stored_prompts(prompts: Prompts, privacy: PromptPrivacy) -> dict[str, StoredPrompt]:
    """What `privacy` lets a file keep of the prompts, by name; nothing for `none`.

    Raises:
        ConfigError: `privacy` is none of the three, or a prompt is no text.
    """
    check_privacy(privacy)
    named = named_prompts(prompts)
    if privacy == "none":
        return {}
    full = privacy == "full"
    return {name: StoredPrompt(prompt_sha256(text), text if full else None) for name, text in named.items()}


def check_privacy(privacy: str) -> None:
    """Refuse a privacy that does not exist, rather than keep what nobody meant to keep.

    Raises:
        ConfigError: It is none of `full`, `hash`, `none`.
    """
    if privacy not in get_args(PromptPrivacy):
        raise ConfigError(
            f"prompt_privacy={privacy!r} does not exist.", hint="Choose 'full', 'hash' or 'none'."
        )


def redactor(prompts: Prompts, privacy: PromptPrivacy) -> Callable[[str], str]:
    """A function that takes the prompts out of other texts, in which hosts like to repeat them.

    Each occurrence becomes `<prompt sha256:…>`, or `<prompt>` where not even the hash may be kept; so do those with the
    escapes of Python or JSON. Prompts below 8 characters are found as whole words only.

    Raises:
        ConfigError: As of `stored_prompts`.
    """
    check_privacy(privacy)
    if privacy == "full":
        return lambda text: text
    longest_first = sorted({text for text in named_prompts(prompts).values() if text}, key=len, reverse=True)
    replacements = [_replacement(text, _placeholder(text, privacy)) for text in longest_first]

    def redact(text: str) -> str:
        for replacement in replacements:
            text = replacement(text)
        return text

    return redact


def _replacement(prompt: str, placeholder: str) -> Callable[[str], str]:
    spellings = dict.fromkeys((prompt, repr(prompt)[1:-1], json.dumps(prompt)[1:-1], ascii(prompt)[1:-1]))
    if len(prompt) < _WHOLE_WORDS_BELOW:
        words = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, spellings))})(?!\w)")
        return lambda text: words.sub(placeholder, text)

    def replace(text: str) -> str:
        for spelling in spellings:
            text = text.replace(spelling, placeholder)
        return text

    return replace


def _placeholder(prompt: str, privacy: PromptPrivacy) -> str:
    return f"<prompt sha256:{prompt_sha256(prompt)}>" if privacy == "hash" else "<prompt>"
