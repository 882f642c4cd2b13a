r"""What a prompt is, before any model sees it: its characters, words, emphasis and tokens.

Emphasis is `(red)`, `(red:1.3)`, nested, with `\(` for a literal parenthesis. The rule is ComfyUI's:
parentheses multiply the weight by 1.1, and a number after the last colon replaces the weight altogether.
Square brackets mean nothing. So it is for parentheses without a partner: one that closes nothing makes the
next that opens text, and one that stays open takes in all that follows, as emphasis if that ends in a
parenthesis and as text if not. Numbers that are not finite are no weights.
"""

import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from sigmascope.records.prompts import PromptPrivacy, prompt_sha256
from sigmascope.stages.schema import PromptFacts, TokenFacts
from sigmascope.stages.tokens import TokenCount, is_attached, word_spans

PRIVATE = "prompts are kept as {!r}"
_HARMLESS_FORMAT = frozenset("\u200c\u200d\ufe0e\ufe0f")
EMPHASIS = 1.1
_ESCAPED = re.compile(r"\\([()])")


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
    main = _main_tokenizer(tokens)
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


def _main_tokenizer(tokens: Sequence[TokenCount]) -> TokenCount | None:
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


class Weighted(NamedTuple):
    """A piece of a prompt and how strongly it is meant to act."""

    text: str
    weight: float


def emphasised(prompt: str) -> list[Weighted]:
    """The pieces of the prompt whose weight is not 1.0."""
    return [piece for piece in weighted_pieces(prompt) if piece.weight != 1.0]


def weighted_pieces(prompt: str) -> list[Weighted]:
    """The prompt cut where its weight changes, without the syntax. Unweighted text has weight 1.0."""
    partners = _partners(prompt)
    pieces: list[Weighted] = []
    todo = [(0, len(prompt), 1.0)]  # a stack: nesting may be deeper than Python recurses
    while todo:
        start, end, weight = todo.pop()
        opening = next((index for index in range(start, end) if index in partners), None)
        if opening is None:
            _add_piece(pieces, prompt[start:end], weight)
            continue
        _add_piece(pieces, prompt[start:opening], weight)
        closing = partners[opening]
        if closing >= end:  # it stays open
            closing = end - 1
            if closing == opening or not _is_parenthesis(prompt, closing, ")"):
                _add_piece(pieces, prompt[opening:end], weight)
                continue
        inner_end, inner_weight = _emphasis(prompt, opening, closing, weight)
        todo += [(closing + 1, end, weight), (opening + 1, inner_end, inner_weight)]
    return pieces


def _partners(prompt: str) -> dict[int, int]:
    """For each parenthesis that opens the index of the one that closes it; the prompt's length if none does."""
    partners: dict[int, int] = {}
    waiting: list[int] = []
    surplus = 0
    for index, character in _parentheses(prompt):
        if character == ")":
            if waiting:
                partners[waiting.pop()] = index
            else:
                surplus += 1
        elif surplus:
            surplus -= 1
        else:
            partners[index] = len(prompt)
            waiting.append(index)
    return partners


def _parentheses(prompt: str) -> Iterator[tuple[int, str]]:
    for index, character in enumerate(prompt):
        if character in "()" and _is_parenthesis(prompt, index, character):
            yield index, character


def _is_parenthesis(prompt: str, index: int, character: str) -> bool:
    """Whether this one is there, and not escaped."""
    return prompt[index] == character and (index == 0 or prompt[index - 1] != "\\")


def _add_piece(pieces: list[Weighted], text: str, weight: float) -> None:
    text = _ESCAPED.sub(r"\1", text)
    if not text:
        return
    if pieces and pieces[-1].weight == weight:
        text, weight = pieces.pop().text + text, weight
    pieces.append(Weighted(text, weight))


def _emphasis(prompt: str, opening: int, closing: int, weight: float) -> tuple[int, float]:
    """Where the text inside a pair of parentheses ends, and the weight it has."""
    colon = prompt.rfind(":", opening + 1, closing)
    if colon > opening + 1:
        with suppress(ValueError):
            number = float(prompt[colon + 1 : closing])
            if math.isfinite(number):
                return colon, number
    product = weight * EMPHASIS
    return closing, product if math.isfinite(product) else weight
