r"""Emphasis in prompts: `(red)`, `(red:1.3)`, nested, with `\(` for a literal parenthesis.

The rule is ComfyUI's: parentheses multiply the weight by 1.1, and a number after the last colon replaces
the weight altogether. Square brackets mean nothing. Parentheses without a partner are text.
"""

import math
import re
from typing import NamedTuple

EMPHASIS = 1.1
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)\s*\Z", re.ASCII)
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
        if opening is None or partners[opening] >= end:
            _add(pieces, prompt[start:end], weight)
            continue
        closing = partners[opening]
        _add(pieces, prompt[start:opening], weight)
        inner_end, inner_weight = _emphasis(prompt, opening, closing, weight)
        todo += [(closing + 1, end, weight), (opening + 1, inner_end, inner_weight)]
    return pieces


def emphasised(prompt: str) -> list[Weighted]:
    """The pieces of the prompt whose weight is not 1.0."""
    return [piece for piece in weighted_pieces(prompt) if piece.weight != 1.0]


def _partners(prompt: str) -> dict[int, int]:
    """The index of the closing parenthesis for each opening one that has a partner."""
    partners: dict[int, int] = {}
    waiting: list[int] = []
    for index, character in enumerate(prompt):
        if index and prompt[index - 1] == "\\":
            continue
        if character == "(":
            waiting.append(index)
        elif character == ")" and waiting:
            partners[waiting.pop()] = index
    return partners


def _emphasis(prompt: str, opening: int, closing: int, weight: float) -> tuple[int, float]:
    """Where the text inside a pair of parentheses ends, and the weight it has."""
    colon = prompt.rfind(":", opening + 1, closing)
    if colon > opening + 1 and _NUMBER.match(prompt[colon + 1 : closing]):
        return colon, float(prompt[colon + 1 : closing])
    product = weight * EMPHASIS
    return closing, product if math.isfinite(product) else weight


def _add(pieces: list[Weighted], text: str, weight: float) -> None:
    text = _ESCAPED.sub(r"\1", text)
    if not text:
        return
    if pieces and pieces[-1].weight == weight:
        text, weight = pieces.pop().text + text, weight
    pieces.append(Weighted(text, weight))
