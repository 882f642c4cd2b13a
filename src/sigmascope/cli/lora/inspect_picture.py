"""A LoRA's strength by block as a picture, and on a model also how much of it matches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sigmascope.cli.drawing import Bar, Label, Line, Shape, save_picture
from sigmascope.errors import ConfigError, WriteError

if TYPE_CHECKING:
    from sigmascope.cli.lora.inspect_model import OnModel
    from sigmascope.lora.inspect import LoraInspection

_PICTURES: Final = (".svg", ".png")
_WIDTH: Final = 960
_LEFT: Final = 230
_RIGHT: Final = 690  # of the longest bar; the figures come behind it
_TOP: Final = 92
_ROW: Final = 20
_LONGEST: Final = 32
_ACTS, _PARTLY, _NOTHING, _GRID = "#0277bd", "#e68a00", "#c62828", "#e0e0e0"


@dataclass(frozen=True)
class BlockRow:
    """One bar.

    Attributes:
        name: Of the block.
        norm: ‖ΔW‖ at strength 1; None where it depends on the model's weights.
        share: Of the LoRA's ‖ΔW‖².
        modules: How many there are.
        matched: How many of them match; None without a model.
        relative: ‖ΔW‖ / ‖W‖; None where it was not measured.
    """

    name: str
    norm: float | None
    share: float | None
    modules: int
    matched: int | None = None
    relative: float | None = None

    @property
    def figures(self) -> str:
        """What stands behind the bar; Pillow's own font has no sign for a norm."""
        parts = ["not measured without the model"]
        if self.norm is not None and self.share is not None:
            parts = [f"{self.norm:.3g}", f"{100 * self.share:.1f} %"]
        if self.relative is not None:
            parts.append(f"{100 * self.relative:.3g} % of the weights")
        lost = self.modules - (self.modules if self.matched is None else self.matched)
        if lost:
            parts.append(f"{lost} of {self.modules} do not match")
        return "  ".join(parts)

    @property
    def colour(self) -> str:
        """Blue for what acts, red for what matches nothing in the model, amber between."""
        if self.matched is None or self.matched == self.modules:
            return _ACTS
        return _PARTLY if self.matched else _NOTHING


def rows_of(report: "LoraInspection", found: "OnModel | None") -> list[BlockRow]:
    """The bars, in the order in which a latent passes the blocks."""
    relative = {} if found is None else {block.name: block.relative_change for block in found.blocks}
    matched = None if found is None else {module.name for module in found.verdict.matched}
    return [
        BlockRow(
            block.name,
            block.norm,
            block.share,
            block.modules,
            None if matched is None else _count(report, block.name, matched),
            relative.get(block.name),
        )
        for block in report.blocks
    ]


def check_picture(path: Path, *inputs: Path | None) -> None:
    """Refuse a place that a picture cannot go to, before the work.

    Raises:
        ConfigError: It is named neither `.svg` nor `.png`, or is an input.
        WriteError: Its folder does not exist.
    """
    from sigmascope.lora.paths import exists

    if path.suffix.lower() not in _PICTURES:
        raise ConfigError(
            f"--picture {path} is no SVG or PNG.", hint="Give a name that ends in .svg or .png."
        )
    if not exists(path.parent):
        raise WriteError(path, "its folder does not exist.", hint=f"Create {path.parent}.")
    given = [other for other in inputs if other is not None and exists(other)]
    if exists(path) and any(path.samefile(other) for other in given):
        raise ConfigError(f"--picture {path} is an input.", hint="Give the name of a new file.")


def save_inspection_picture(path: Path, report: "LoraInspection", found: "OnModel | None") -> None:
    """Draw strength by block as SVG, or PNG where the file is named so.

    Raises:
        WriteError: The file cannot be written.
        ConfigError: A PNG is wanted and Pillow is not installed.
    """
    rows = rows_of(report, found)
    size = (_WIDTH, _TOP + _ROW * len(rows) + 24)
    save_picture(path, size, [*_heading(report, found), *_bars(rows)])


def _heading(report: "LoraInspection", found: "OnModel | None") -> Iterator[Shape]:
    yield Label(16, 30, f"LoRA: {report.path.name}", size=18)
    if found is None:
        yield Label(16, 54, f"{len(report.modules)} modules in {report.format} format.")
    else:
        verdict = found.verdict
        yield Label(
            16,
            54,
            f"{len(verdict.matched)} of {len(verdict.modules)} modules match {found.model.name}.",
        )
    yield Label(16, _TOP - 14, "Strength (norm of the change) by block, and its share of the LoRA's squared")


def _bars(rows: Sequence[BlockRow]) -> Iterator[Shape]:
    largest = max((row.norm or 0.0 for row in rows), default=0.0) or 1.0
    yield Line((_LEFT, _TOP - 4), (_LEFT, _TOP + _ROW * len(rows)), _GRID)
    for index, row in enumerate(rows):
        y = _TOP + _ROW * index
        length = max(1.0, (_RIGHT - _LEFT) * (row.norm or 0.0) / largest)
        yield Label(_LEFT - 8, y + 13, _shortened(row.name), anchor="end")
        yield Bar(_LEFT, y + 2, length, _ROW - 6, row.colour, f"{row.name}: {row.modules} modules")
        yield Label(_LEFT + length + 6, y + 13, row.figures)


def _count(report: "LoraInspection", block: str, matched: set[str]) -> int:
    return sum(module.block == block and module.name in matched for module in report.modules)


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
