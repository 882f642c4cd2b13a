"""A validation as one picture: the error of every layer along the model, and of every block.

An SVG, which needs no library, which any browser shows, and in which each point names its layer under the mouse.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from os import PathLike
from typing import Final

from sigmascope.lora.models.block_names import block_position
from sigmascope.lora.validation import svg
from sigmascope.lora.validation.module_errors import BANDS, Band, BlockError, ModuleError
from sigmascope.lora.validation.validation_report import ValidationReport
from sigmascope.records.atomic import atomic_path

_COLOURS: Final[dict[Band, str]] = {
    "excellent": "#2e7d32",
    "good": "#0277bd",
    "poor": "#e68a00",
    "noise": "#c62828",
}
_NO_BAND: Final = "#757575"
_GRID: Final = "#e0e0e0"
_WIDTH: Final = 960
_LEFT: Final = 190
_RIGHT: Final = 900
_TOP: Final = 110  # of the layers' panel
_FOOT: Final = 400
_BLOCKS_TOP: Final = 500
_ROW: Final = 18
_LABEL_GAP: Final = 13  # between block names, which are as high as that
_LONGEST: Final = 26  # characters of a block's name that fit before its bar
_FLOOR: Final = 1e-4  # relative error at the foot of the axis; smaller ones lie on it


def save_validation_picture(path: str | PathLike[str], report: ValidationReport) -> None:
    """Write the picture whole or not at all.

    Args:
        path: An `.svg` file, replaced if it is there.
        report: What to draw.

    Raises:
        WriteError: The file cannot be written.
    """
    with atomic_path(path) as temporary:
        temporary.write_text(validation_svg(report), encoding="utf-8")


def validation_svg(report: ValidationReport) -> str:
    """Draw a report as an SVG document, 960 pixels in width."""
    blocks = report.blocks
    height = _BLOCKS_TOP + _ROW * len(blocks) + 24
    return svg.document(_WIDTH, height, [*_heading(report), *_layers(report.modules), *_block_bars(blocks)])


def _heading(report: ValidationReport) -> Iterator[str]:
    yield svg.label(16, 30, f"LoRA validation: {report.lora.name}", size=18)
    yield svg.label(
        16,
        54,
        f"Error overall {_percent(report.relative_error)}, average {_percent(report.average_error)}. "
        f"{report.applied} of {len(report.modules)} modules applied ({report.success_rate:.1f} %).",
    )
    for index, (band, count) in enumerate(report.bands.items()):
        x = 16 + 190 * index
        yield svg.dot(x + 5, 74, 5, _COLOURS[band])
        yield svg.label(x + 16, 78, f"{band} ({BANDS[band]}): {count}")
    if report.failures:
        yield svg.cross(781, 74, 4, _COLOURS["noise"])
        yield svg.label(792, 78, f"not applied: {len(report.failures)}")


@dataclass(frozen=True, slots=True)
class _Axis:
    """The logarithmic axis of relative errors."""

    largest: float

    def height(self, error: float) -> float:
        share = math.log(max(error, _FLOOR) / _FLOOR) / math.log(self.largest / _FLOOR)
        return _FOOT - (_FOOT - _TOP) * share

    def lines(self) -> Iterator[str]:
        for power in range(round(math.log10(_FLOOR)), math.floor(math.log10(self.largest)) + 1):
            y = self.height(10.0**power)
            yield svg.line((_LEFT, y), (_RIGHT, y), _GRID)
            yield svg.label(_LEFT - 8, y + 4, f"{100 * 10.0**power:g} %", anchor="end")


def _layers(modules: Sequence[ModuleError]) -> Iterator[str]:
    """One point a layer, in the order in which a latent passes them; what is not applied is a cross."""
    axis = _Axis(2 * max(1.0, *(module.relative_error or 0.0 for module in modules)))
    yield svg.label(16, _TOP + 12, "Error by layer")
    yield from axis.lines()
    step = (_RIGHT - _LEFT) / max(len(modules), 1)
    ordered = sorted(modules, key=lambda module: block_position(module.block))
    x, free = _LEFT + step / 2, 0.0
    for block, members in groupby(ordered, lambda module: module.block):
        group, edge = list(members), x - step / 2
        yield svg.line((edge, _TOP), (edge, _FOOT + 5), _GRID)
        if edge >= free and len(group) * step > _LABEL_GAP / 2:
            yield svg.label(edge + 2, _FOOT + 14, _shortened(block), size=11, turned=35)
            free = edge + _LABEL_GAP
        for module in group:
            yield _mark(x, axis, module)
            x += step


def _mark(x: float, axis: _Axis, module: ModuleError) -> str:
    colour = _NO_BAND if module.band is None else _COLOURS[module.band]
    if module.status != "applied":
        tip = f"{module.name}: {module.status.replace('_', ' ')}"
        return svg.cross(x, axis.height(1.0), 3, _COLOURS["noise"], tip)
    rank = "" if module.rank is None else f", rank {module.rank}"
    tip = f"{module.name}: {_percent(module.relative_error)}{rank}"
    return svg.dot(x, axis.height(module.relative_error or 0.0), 2.2, colour, tip)


def _block_bars(blocks: Sequence[BlockError]) -> Iterator[str]:
    """One bar a block, of the error of its layers together."""
    largest = max((block.relative_error or 0.0 for block in blocks), default=0.0) or 1.0
    yield svg.label(16, _BLOCKS_TOP - 10, "Error by block")
    for index, block in enumerate(blocks):
        y = _BLOCKS_TOP + _ROW * index
        error = block.relative_error or 0.0
        colour = _NO_BAND if block.band is None else _COLOURS[block.band]
        length = (_RIGHT - _LEFT - 60) * error / largest
        tip = f"{block.name}: {block.applied} of {block.modules} modules applied"
        yield svg.label(_LEFT - 8, y + 12, _shortened(block.name), anchor="end")
        yield svg.bar(_LEFT, y + 2, (length, _ROW - 5), colour, tip)
        yield svg.label(_LEFT + length + 6, y + 12, _percent(block.relative_error))


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.3g} %"


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
