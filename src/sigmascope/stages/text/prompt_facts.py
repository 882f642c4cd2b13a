"""What a prompt is, before any model sees it."""

import unicodedata
from collections.abc import Sequence

from sigmascope.records.prompts import PromptPrivacy, prompt_sha256
from sigmascope.stages.text.prompt_weights import emphasised
from sigmascope.stages.text.tokens import TokenCount
from sigmascope.stages.text.typed import PromptFacts, TokenFacts
from sigmascope.stages.text.words import is_attached, word_spans

PRIVATE = "prompts are kept as {!r}"
_HARMLESS_FORMAT = frozenset("\u200c\u200d\ufe0e\ufe0f")


def prompt_facts(
    prompt: object, tokens: Sequence[TokenCount], reason: str | None, privacy: PromptPrivacy
) -> PromptFacts:
    """Characters, words, weights and tokens of one prompt.

    Args:
        prompt: A text, or several that were encoded together (their facts are those of all of them).
        tokens: What each tokenizer makes of it.
        reason: Why there are none, when there are none.
        privacy: Whether the text, its SHA-256 or nothing is kept. Whatever quotes the prompt follows it.
    """
    text, texts = as_text(prompt), texts_of(prompt)
    if text is None:
        return _no_text(prompt)
    full = privacy == "full"
    main = _main(tokens)
    unavailable = {} if full else dict.fromkeys(("text_content", "truncated_words"), PRIVATE.format(privacy))
    if privacy == "none":
        unavailable["text_sha256"] = PRIVATE.format(privacy)
    if main is None:
        names = ("token_count", "truncated_tokens", "truncated_words", "token_limit")
        unavailable |= dict.fromkeys(names, reason or "no tokenizer was found")
    else:
        unavailable |= main.unavailable
    weights = [weighted for one in texts for weighted in emphasised(one)]
    return {
        "text_content": text if full else None,
        "text_sha256": None if privacy == "none" else prompt_sha256(text),
        "character_length": sum(map(len, texts)),
        "word_count": sum(len(word_spans(one)) for one in texts),
        "special_characters": sum(map(special_characters, texts)),
        "whitespace_characters": sum(character.isspace() for one in texts for character in one),
        "control_characters": sum(map(control_characters, texts)),
        "prompt_weights": [{"text": w.text if full else None, "weight": w.weight} for w in weights],
        "token_count": None if main is None else main.tokens,
        "truncated_tokens": None if main is None else main.truncated,
        "truncated_words": list(main.truncated_words) if main and full and main.words_known else None,
        "token_limit": None if main is None else main.limit,
        "tokenizers": {count.name: _token_facts(count, full) for count in tokens},
        "unavailable": unavailable,
    }


def as_text(prompt: object) -> str | None:
    """The prompt as one text; several become its lines. None if it is no text."""
    texts = texts_of(prompt)
    return "\n".join(texts) if texts else None


def texts_of(prompt: object) -> list[str]:
    """The prompts of a batch; one is a batch of itself. None at all if something is no text."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list | tuple) and all(isinstance(line, str) for line in prompt):
        return list(prompt)
    return []


def special_characters(text: str) -> int:
    """Characters that are neither letter nor digit nor white space. Marks belong to what they stand on."""
    return sum(
        not (character.isalnum() or character.isspace() or is_attached(character)) for character in text
    )


def control_characters(text: str) -> int:
    """Invisible characters that rarely mean well: controls, direction marks, lone surrogates."""
    return sum(
        unicodedata.category(character) in ("Cc", "Cf", "Cs")
        and not (character in "\t\r\n" or character in _HARMLESS_FORMAT)
        for character in text
    )


def _main(tokens: Sequence[TokenCount]) -> TokenCount | None:
    """The tokenizer that reads most of the prompt: what it cuts off, no encoder has seen."""
    return max(tokens, key=lambda count: count.limit if count.limit is not None else 1 << 62, default=None)


def _token_facts(count: TokenCount, full: bool) -> TokenFacts:
    return {
        "token_count": count.tokens,
        "truncated_tokens": count.truncated,
        "truncated_words": list(count.truncated_words) if full and count.words_known else None,
        "token_limit": count.limit,
        "chunks": count.chunks,
    }


def _no_text(prompt: object) -> PromptFacts:
    found = "no prompt was given" if prompt is None else f"the prompt is of type {type(prompt).__name__}"
    names = (name for name in PromptFacts.__annotations__ if name not in ("unavailable", "tokenizers"))
    return {
        "text_content": None,
        "text_sha256": None,
        "character_length": None,
        "word_count": None,
        "special_characters": None,
        "whitespace_characters": None,
        "control_characters": None,
        "prompt_weights": None,
        "token_count": None,
        "truncated_tokens": None,
        "truncated_words": None,
        "token_limit": None,
        "tokenizers": {},
        "unavailable": dict.fromkeys(names, found),
    }
