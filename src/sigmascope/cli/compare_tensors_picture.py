"""The errors of two tensors by token, as a picture: a panel for each pair of tensors that has tokens."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sigmascope.cli.compare_tensors_tables import named_comparisons
from sigmascope.cli.drawing import Bar, Label, Line, Shape, save_picture

if TYPE_CHECKING:
    from sigmascope.analysis.dump_results import DumpComparison, RunComparison
    from sigmascope.analysis.tensor_errors import TokenErrors
    from sigmascope.analysis.tensor_results import TensorComparison

_WIDTH: Final = 960
_LEFT: Final = 90
_RIGHT: Final = 930
_TOP: Final = 60  # of the first panel
_PANEL: Final = 230
_BARS: Final = 150.0  # height of the bars' field in a panel
_MOST_PANELS: Final = 12
_LONGEST: Final = 150  # characters of a line of text
_GRID: Final = "#e0e0e0"
_WITHIN: Final = "#0277bd"
_BEYOND: Final = "#c62828"
_LIMIT: Final = "#e68a00"
_DECADES: Final = 8  # shown below the largest error


def save_token_picture(path: Path, comparison: "DumpComparison | RunComparison", heading: str) -> None:
    """Draw the relative error of each token, on a logarithmic axis, for the first 12 tensors that
    have tokens and differ.

    Args:
        path: An `.svg` or `.png` file, replaced if it is there.
        comparison: What to draw.
        heading: The first line.

    Raises:
        WriteError: The file cannot be written.
        ConfigError: A PNG is wanted and Pillow is not installed.
    """
    panels = [
        (name, each, each.errors.tokens)
        for name, each in named_comparisons(comparison)
        if each.errors is not None and each.errors.tokens is not None and each.errors.unequal
    ]
    shapes: list[Shape] = [Label(16, 30, _cut(f"Error by token: {heading}")[:100], size=18)]
    if not panels:
        shapes.append(Label(16, _TOP, "No tensor with tokens differs."))
    for index, (name, each, tokens) in enumerate(panels[:_MOST_PANELS]):
        shapes += _panel(_TOP + _PANEL * index, name, each, tokens)
    height = _TOP + _PANEL * max(1, min(len(panels), _MOST_PANELS))
    if len(panels) > _MOST_PANELS:
        shapes.append(Label(16, height + 10, f"and {len(panels) - _MOST_PANELS} tensors more"))
        height += 24
    save_picture(path, (_WIDTH, height), shapes)


@dataclass(frozen=True, slots=True)
class _Axis:
    """The logarithmic axis of relative errors, from 10^lowest to 10^highest."""

    foot: float
    lowest: int
    highest: int

    @classmethod
    def of(cls, foot: float, errors: Iterable[float], limit: float) -> "_Axis":
        shown = [error for error in (*errors, limit) if 0 < error < math.inf] or [1.0]
        highest = math.ceil(math.log10(max(shown)))
        lowest = max(math.floor(math.log10(min(shown))), highest - _DECADES)
        return cls(foot, min(lowest, highest - 1), highest)

    def height(self, error: float) -> float:
        """Pixels above the foot."""
        if not math.isfinite(error):
            return _BARS
        share = (math.log10(error) - self.lowest) / (self.highest - self.lowest) if error > 0 else 0.0
        return _BARS * min(1.0, max(0.0, share))

    def lines(self) -> Iterator[Shape]:
        for power in range(self.lowest, self.highest + 1):
            y = self.foot - self.height(10.0**power)
            yield Line((_LEFT, y), (_RIGHT, y), _GRID)
            yield Label(_LEFT - 8, y + 4, f"{100 * 10.0**power:g} %", size=10, anchor="end")


def _panel(top: int, name: str, each: "TensorComparison", tokens: "TokenErrors") -> Iterator[Shape]:
    limit = each.tolerance.computed
    axis = _Axis.of(top + 42 + _BARS, tokens.relative_l2, limit)
    yield Label(16, top + 14, _cut(f"{name}: {each.verdict}"), size=14)
    yield Label(16, top + 32, _cut(each.reason), size=11)
    yield from axis.lines()
    step = (_RIGHT - _LEFT) / len(tokens)
    for token, error in enumerate(tokens.relative_l2):
        if not tokens.unequal[token]:
            continue
        beyond = error > limit or each.first_token == token
        tall = max(axis.height(error), 2.0)
        tip = f"token {token}: {100 * error:.3g} %, largest difference {tokens.max_abs[token]:.3g}"
        width = step * 0.8 if step > 3 else step
        colour = _BEYOND if beyond else _WITHIN
        yield Bar(_LEFT + step * token, axis.foot - tall, width, tall, colour, tip)
    if limit:
        y = axis.foot - axis.height(limit)
        yield Line((_LEFT, y), (_RIGHT, y), _LIMIT)
        yield Label(_RIGHT, y - 4, "rounding explains up to here", size=10, anchor="end")
    yield from _ticks(axis.foot, len(tokens), step)


def _ticks(foot: float, tokens: int, step: float) -> Iterator[Shape]:
    """Numbers of some tokens under the bars."""
    apart = next((each for each in _round_steps() if each * step >= 36), tokens)
    for token in range(0, tokens, max(1, apart)):
        yield Label(_LEFT + step * (token + 0.5), foot + 14, str(token), size=10, anchor="middle")


def _round_steps() -> Iterator[int]:
    yield from islice((factor * 10**power for power in range(8) for factor in (1, 2, 5)), 24)


def _cut(text: str) -> str:
    clean = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return clean if len(clean) <= _LONGEST else f"{clean[: _LONGEST - 1]}…"
