r"""Emphasis in prompts: `(red)`, `(red:1.3)`, nested, with `\(` for a literal parenthesis.

The rule is ComfyUI's: parentheses multiply the weight by 1.1, and a number after the last colon replaces
the weight altogether. Square brackets mean nothing. So it is for parentheses without a partner: one that closes
nothing makes the next that opens text, and one that stays open takes in all that follows, as emphasis if that
ends in a parenthesis and as text if not. Numbers that are not finite are no weights.
"""

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

EMPHASIS = 1.1
_ESCAPED = re.compile(r"\\([()])")


class Weighted(NamedTuple):
    """A piece of a prompt and how strongly it is meant to act."""

    text: str
    weight: float


def weighted_pieces(prompt: str) -> list[Weighted]:
    """The prompt cut where its weight changes, without the syntax. Unweighted text has weight 1.0."""
    partners = _partners(prompt)
    pieces: list[Weighted] = []
    todo = [(0, len(prompt), 1.0)]  # a stack: nesting may be deeper than Python recurses
    while todo:
        start, end, weight = todo.pop()
        opening = next((index for index in range(start, end) if index in partners), None)
        if opening is None:
            _add(pieces, prompt[start:end], weight)
            continue
        _add(pieces, prompt[start:opening], weight)
        closing = partners[opening]
        if closing >= end:  # it stays open
            closing = end - 1
            if closing == opening or not _is_parenthesis(prompt, closing, ")"):
                _add(pieces, prompt[opening:end], weight)
                continue
        inner_end, inner_weight = _emphasis(prompt, opening, closing, weight)
        todo += [(closing + 1, end, weight), (opening + 1, inner_end, inner_weight)]
    return pieces


def emphasised(prompt: str) -> list[Weighted]:
    """The pieces of the prompt whose weight is not 1.0."""
    return [piece for piece in weighted_pieces(prompt) if piece.weight != 1.0]


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


def _add(pieces: list[Weighted], text: str, weight: float) -> None:
    text = _ESCAPED.sub(r"\1", text)
    if not text:
        return
    if pieces and pieces[-1].weight == weight:
        text, weight = pieces.pop().text + text, weight
    pieces.append(Weighted(text, weight))
