"""Several LoRAs at several scales on the same prompts and seed, as one picture and one page.

`lora_grid` paints each cell once and keeps it; a `LoraGrid` holds them with how far each is from the picture without a
LoRA, so that a LoRA that does nothing is seen. `save_sheet` draws it as a PNG, `save_page` as HTML with all pictures in it.
"""

import base64
import io
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sigmascope.__about__ import __version__
from sigmascope.errors import ConfigError, ModelMismatchError, NonFiniteError
from sigmascope.files import atomic_path, require_writable
from sigmascope.lora.apply import AttachedLora, attach_lora
from sigmascope.lora.file import LoraFile
from sigmascope.lora.reader import load_lora
from sigmascope.pipeline.grid_cells import CellStore, GridSubject, PipelineRows, StoredCell, key_of
from sigmascope.pipeline.measure import ImageChange, compare_images, image_of
from sigmascope.probes.model_fingerprints import combined_fingerprint
from sigmascope.probes.models import components_of
from sigmascope.progress import Progress, no_progress
from sigmascope.records.performance import BenchCase
from sigmascope.records.run import Finding
from sigmascope.reports.html import template

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont, ImageFont

SEEDS: Final = 2**63
_IDLE_LEVELS: Final = 2 / 255
"""No value of a picture farther off than this: what rounding on an accelerator may do."""
_FAINT: Final = 0.005
"""A mean difference below this share of the range is hardly seen."""
NO_LORA: Final = "no LoRA"


@dataclass(frozen=True, slots=True)
class GridLora:
    """A LoRA of a grid.

    Attributes:
        label: Its file's name without the ending, with its folder where two are called the same.
        path: The file.
        content: Hash of its factors.
        modules: How many of its modules act on the model.
        is_zero: Whether each of its modules has a factor of zeros.
    """

    label: str
    path: Path
    content: str
    modules: int
    is_zero: bool


@dataclass(frozen=True, slots=True)
class GridCell:
    """One picture of a grid.

    Attributes:
        row: Index of its row.
        lora: Index of its LoRA; None: it has none.
        scale: The LoRA's strength; None: it has none.
        picture: Where it is kept, as PNG.
        reused: Whether it was there before.
        seconds: What painting it took, then or now.
        layers_run: How many of the LoRA's modules ran.
        change: Against the row's picture without a LoRA; None: it is that.
        mean_difference: Mean of |this − that| over all values, as a share of the range. None: it is that, or of another size.
        one_colour: Whether it is a single colour throughout.
    """

    row: int
    lora: int | None
    scale: float | None
    picture: Path
    reused: bool
    seconds: float
    layers_run: int | None
    change: ImageChange | None
    mean_difference: float | None
    one_colour: bool

    @property
    def is_idle(self) -> bool:
        """Whether it is the picture without a LoRA over again."""
        largest = None if self.change is None else self.change.largest
        return largest is not None and largest <= _IDLE_LEVELS

    @property
    def figures(self) -> str:
        """How far it is from the picture without a LoRA, in words."""
        change = self.change
        if change is None:
            return ""
        if change.identical:
            return "identical"
        if self.mean_difference is None:
            return "not compared"
        psnr = "" if change.psnr_db is None else f"  {change.psnr_db:.1f} dB"
        return f"{_percent(self.mean_difference)}{psnr}"


@dataclass(frozen=True, slots=True)
class LoraGrid:
    """Every cell of a grid, row by row: first without a LoRA, then each LoRA at each scale.

    Attributes:
        name: Of the model.
        kind: What a row is: "prompt" or "picture".
        rows: What each is called.
        loras: In the order of the columns.
        scales: Of each LoRA.
        seed: The same in every cell.
        settings: Size, steps and the like, in words.
        cells: All of them.
        folder: Where the pictures are kept.
    """

    name: str
    kind: str
    rows: tuple[str, ...]
    loras: tuple[GridLora, ...]
    scales: tuple[float, ...]
    seed: int
    settings: str
    cells: tuple[GridCell, ...]
    folder: Path

    @property
    def idle(self) -> tuple[GridLora, ...]:
        """LoRAs that change no picture at any scale."""
        return tuple(
            lora
            for index, lora in enumerate(self.loras)
            if all(cell.is_idle for cell in self.cells if cell.lora == index)
        )

    def cell(self, row: int, lora: int | None = None, scale: float | None = None) -> GridCell:
        """The cell of a row, a LoRA and a scale.

        Raises:
            KeyError: There is none.
        """
        for cell in self.cells:
            if (cell.row, cell.lora, cell.scale) == (row, lora, scale):
                return cell
        raise KeyError((row, lora, scale))

    def findings(self) -> tuple[Finding, ...]:
        """What is wrong: LoRAs that do nothing or little, and pictures that show nothing."""
        return (*_blank_rows(self), *_idle_loras(self), *_faint_loras(self), *_blank_cells(self))

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "model": self.name,
            "seed": self.seed,
            "settings": self.settings,
            "rows": list(self.rows),
            "scales": list(self.scales),
            "loras": [
                {
                    "label": lora.label,
                    "path": str(lora.path),
                    "modules": lora.modules,
                    "does_nothing": lora in self.idle,
                }
                for lora in self.loras
            ],
            "cells": [_cell_values(cell, self.loras) for cell in self.cells],
            "findings": [
                {"id": found.id, "message": found.message, "advice": found.advice}
                for found in self.findings()
            ],
            "folder": str(self.folder),
        }


def lora_grid(
    subject: Any,
    loras: str | Path | Sequence[str | Path],
    prompts: str | Sequence[str] = (),
    *,
    output: str | Path,
    scales: float | Sequence[float] = (0.5, 1.0),
    seed: int = 0,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
    size: tuple[int, int] | None = None,
    call: Mapping[str, Any] | None = None,
    hide_prompts: bool = False,
    progress: Progress = no_progress,
) -> LoraGrid:
    """Paint each prompt without a LoRA and with each LoRA at each scale, from one seed, and show all as a picture and a page.

    Each cell is kept as soon as it is painted, in a folder beside the output. A later call reuses those that depend on
    the same: weights, LoRA, scale, prompt, seed, settings and versions of libraries. The LoRAs are attached, one at a
    time; afterwards the model is as it was.

    Args:
        subject: A diffusers pipeline, or a `GridSubject` such as `sigmascope.lbm.infer.PictureRows`.
        loras: Files, each once.
        prompts: A row each; of a pipeline at least one, of a `GridSubject` none: it has rows of its own.
        output: A `.png` or `.html` file; the other is written beside it, and the folder `<name>.cells`.
        scales: Strengths, finite. 0 is left out: that is the picture without a LoRA.
        seed: Of every cell.
        num_inference_steps: Of the pipeline's call, as are the next; None is its own.
        guidance_scale: The same.
        size: (width, height) in pixels.
        call: Other arguments of the call, such as `negative_prompt`.
        hide_prompts: Write "prompt 1" on what is shown, in place of its words.
        progress: Told after each cell.

    Raises:
        ConfigError: No LoRA, prompt or scale, the same one twice, or an argument that the pipeline does not take.
        FileError: A LoRA that is not there or cannot be read.
        ModelMismatchError: A LoRA that does not fit the model.
        WriteError: The output or a cell cannot be written.
    """
    sheet, page, folder = output_paths(output)
    paths, strengths = _checked_loras(loras), _checked_scales(scales)
    if not 0 <= seed < SEEDS:
        raise ConfigError(f"--seed is {seed}.", hint="Give a number from 0 to 2**63 - 1.")
    rows = _subject(subject, prompts, num_inference_steps, guidance_scale, size, call)
    known = tuple(_examined(rows.model, path, label) for path, label in _labelled(paths))
    painted = list(_painted(rows, known, strengths, seed, CellStore(folder), progress))
    shown = (
        [f"{rows.kind} {number}" for number in range(1, len(rows.rows) + 1)] if hide_prompts else rows.rows
    )
    grid = LoraGrid(
        rows.name,
        rows.kind,
        tuple(shown),
        known,
        strengths,
        seed,
        rows.summary(),
        tuple(_compared(painted)),
        folder,
    )
    save_sheet(grid, sheet)
    save_page(grid, page)
    return grid


def output_paths(output: str | Path) -> tuple[Path, Path, Path]:
    """The PNG, the HTML file and the folder of cells that belong to an output.

    Raises:
        ConfigError: It ends in neither `.png` nor `.html`.
        WriteError: One of the files cannot be written.
    """
    path = Path(output)
    if path.suffix.lower() not in (".png", ".html"):
        raise ConfigError(f"--output {path} is no PNG or HTML file.", hint="Give a name such as grid.png.")
    sheet, page = path.with_suffix(".png"), path.with_suffix(".html")
    for file in (sheet, page):
        require_writable(file)
    return sheet, page, path.with_suffix(".cells")


def _checked_loras(loras: str | Path | Sequence[str | Path]) -> list[Path]:
    paths = [Path(path) for path in ([loras] if isinstance(loras, str | Path) else loras)]
    if not paths:
        raise ConfigError("--lora is missing.", hint="Give at least one LoRA file.")
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"--lora {path} is given twice.", hint="Give each LoRA once.")
    return paths


def _checked_scales(scales: float | Sequence[float]) -> tuple[float, ...]:
    given = [float(scale) for scale in ([scales] if isinstance(scales, int | float) else scales)]
    for scale in given:
        if not math.isfinite(scale):
            raise ConfigError(f"--scales: {scale} is no strength.", hint="Give numbers such as 0.5,1.")
        if given.count(scale) > 1:
            raise ConfigError(f"--scales: {scale:g} is given twice.", hint="Give each scale once.")
    strengths = tuple(scale for scale in given if scale)
    if not strengths:
        hint = "Give at least one that is not 0: the picture without a LoRA is there anyway."
        raise ConfigError("--scales names no strength.", hint=hint)
    return strengths


def _subject(
    subject: Any,
    prompts: str | Sequence[str],
    steps: int | None,
    guidance: float | None,
    size: tuple[int, int] | None,
    call: Mapping[str, Any] | None,
) -> GridSubject:
    texts = (prompts,) if isinstance(prompts, str) else tuple(prompts)
    arguments = dict(call or {}) | ({} if guidance is None else {"guidance_scale": guidance})
    if isinstance(subject, GridSubject):
        if texts or arguments or steps is not None or size is not None:
            raise ConfigError(
                f"A {type(subject).__name__} has rows and settings of its own.",
                hint="Give prompts, steps, guidance, size and call with a diffusers pipeline alone.",
            )
        return subject
    if not components_of(subject):
        raise ConfigError(
            f"A {type(subject).__name__} is neither a diffusers pipeline nor a GridSubject.",
            hint="Give the whole pipeline; of an LBM sigmascope.lbm.infer.PictureRows(model, pictures).",
        )
    for prompt in texts:
        if texts.count(prompt) > 1:
            raise ConfigError(f"--prompt {prompt!r} is given twice.", hint="Give each prompt once.")
    width, height = size or (None, None)
    case = BenchCase(width, height, steps=steps)
    loaded_from = getattr(getattr(subject, "config", None), "_name_or_path", None)
    name = Path(loaded_from).name if isinstance(loaded_from, str) and loaded_from else type(subject).__name__
    return PipelineRows(subject, texts, case, arguments, name)


def _labelled(paths: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    stems = [path.stem for path in paths]
    for path, stem in zip(paths, stems, strict=True):
        yield path, stem if stems.count(stem) == 1 else f"{path.resolve().parent.name}/{stem}"


def _examined(model: object, path: Path, label: str) -> GridLora:
    """A LoRA that fits, before anything is painted.

    Raises:
        FileError: It is not there or cannot be read.
        ModelMismatchError: It does not fit the model.
    """
    lora = load_lora(path)
    with _attached(model, lora, path) as attached:
        modules = len(attached.applied)
    is_zero = not any(bool(module.up.any()) and bool(module.down.any()) for module in lora.modules.values())
    return GridLora(label, path, _content(lora), modules, is_zero)


def _attached(model: object, lora: LoraFile, path: Path) -> AttachedLora:
    try:
        return attach_lora(model, lora, 0.0)
    except (ModelMismatchError, NonFiniteError) as error:
        if str(path) in error.message:
            raise
        raise type(error)(f"--lora {path}: {error.message}", hint=error.hint) from error


def _content(lora: LoraFile) -> str:
    tensors = {
        f"{name}.{part}": tensor
        for name, factors in lora.modules.items()
        for part, tensor in (("up", factors.up), ("down", factors.down))
    }
    return combined_fingerprint(tensors, [(name, lora.modules[name].scale) for name in sorted(lora.modules)])


@dataclass(frozen=True, slots=True)
class _Painted:
    row: int
    lora: int | None
    scale: float | None
    cell: StoredCell
    reused: bool


def _painted(
    subject: GridSubject,
    loras: Sequence[GridLora],
    scales: Sequence[float],
    seed: int,
    store: CellStore,
    progress: Progress,
) -> Iterator[_Painted]:
    """Every cell, those without a LoRA first; a LoRA is attached only where a picture with it is missing."""
    settings = [subject.settings(row) for row in range(len(subject.rows))]
    total, done = len(settings) * (1 + len(loras) * len(scales)), 0
    for index, lora in [(None, None), *enumerate(loras)]:
        with ExitStack() as stack:
            attached: AttachedLora | None = None
            for scale in scales if lora else (None,):
                for row, own in enumerate(settings):
                    key = key_of(own, seed, None if lora is None else lora.content, scale)
                    cell = store.find(key)
                    reused = cell is not None
                    if cell is None:
                        if lora is not None and attached is None:
                            attached = stack.enter_context(_same_lora(subject.model, lora))
                        cell = _paint(subject, row, seed, attached, scale, partial(store.keep, key))
                    done += 1
                    what = NO_LORA if lora is None else f"{lora.label} at {scale:g}"
                    progress(done, total, f"{what}, {subject.kind} {row + 1}")
                    yield _Painted(row, index, scale, cell, reused)


def _same_lora(model: object, lora: GridLora) -> AttachedLora:
    read = load_lora(lora.path)
    if _content(read) != lora.content:
        raise ConfigError(f"--lora {lora.path} changed while the grid was painted.", hint="Start again.")
    return _attached(model, read, lora.path)


def _paint(
    subject: GridSubject, row: int, seed: int, attached: AttachedLora | None, scale: float | None, keep: Any
) -> StoredCell:
    if attached is not None:
        attached.scale = scale or 0.0
    started = time.perf_counter()
    image = subject.paint(row, seed)
    seconds = time.perf_counter() - started
    ran = None if attached is None else len(attached.applied) - len(attached.dormant)
    kept: StoredCell = keep(image, seconds, ran)
    return kept


def _compared(painted: Sequence[_Painted]) -> Iterator[GridCell]:
    """The cells in the order of the grid, each beside its row's picture without a LoRA."""
    for row in range(1 + max(one.row for one in painted)):
        bare = None
        for one in (one for one in painted if one.row == row):
            tensor = image_of(_opened(one.cell.path))
            if tensor is None:
                raise AssertionError("a picture of Pillow is one")
            bare = tensor if one.lora is None else bare
            same_shape = bare is not None and bare.shape == tensor.shape
            yield GridCell(
                row,
                one.lora,
                one.scale,
                one.cell.path,
                one.reused,
                one.cell.seconds,
                one.cell.layers_run,
                change=None if one.lora is None else compare_images(tensor, bare),
                mean_difference=float((tensor - bare).abs().mean())
                if bare is not None and same_shape and one.lora is not None
                else None,
                one_colour=bool((tensor == tensor[0, 0]).all()),
            )


def _opened(path: Path) -> "Image":
    from PIL import Image

    with Image.open(path, formats=("PNG",)) as image:
        return image.convert("RGB")


def _cell_values(cell: GridCell, loras: Sequence[GridLora]) -> dict[str, Any]:
    change = cell.change
    return {
        "row": cell.row,
        "lora": None if cell.lora is None else loras[cell.lora].label,
        "scale": cell.scale,
        "mean_difference": cell.mean_difference,
        "psnr_db": None if change is None else change.psnr_db,
        "identical": None if change is None else change.identical,
        "one_colour": cell.one_colour,
        "layers_run": cell.layers_run,
        "seconds": cell.seconds,
        "reused": cell.reused,
        "picture": str(cell.picture),
    }


def _blank_rows(grid: LoraGrid) -> Iterator[Finding]:
    for cell in grid.cells:
        if cell.lora is None and cell.one_colour:
            yield Finding(
                "lora_grid.blank_without_lora",
                "error",
                f"Without a LoRA, {grid.kind} {cell.row + 1} gives a picture of one colour: nothing can be compared.",
                {"row": cell.row},
                "Look for NaN or a safety checker: run the model in bfloat16 or float32.",
            )


def _idle_loras(grid: LoraGrid) -> Iterator[Finding]:
    blank = {cell.row for cell in grid.cells if cell.lora is None and cell.one_colour}
    for lora in grid.idle if len(blank) < len(grid.rows) else ():
        own = [cell for cell in grid.cells if cell.lora is not None and grid.loras[cell.lora] is lora]
        ran = max((cell.layers_run or 0 for cell in own), default=0)
        why = "no picture changes"
        if lora.is_zero:
            why = "its factors are zero"
        elif ran == 0:
            why = f"none of its {lora.modules} modules ran"
        yield Finding(
            "lora_grid.does_nothing",
            "error",
            f"{lora.label} does nothing: {why}.",
            {"modules": lora.modules, "ran": ran},
            "See what is in it with sigmascope lora inspect.",
        )


def _faint_loras(grid: LoraGrid) -> Iterator[Finding]:
    for index, lora in enumerate(grid.loras):
        known = [cell.mean_difference for cell in grid.cells if cell.lora == index]
        most = max((value for value in known if value is not None), default=1.0)
        if most < _FAINT and lora not in grid.idle:
            yield Finding(
                "lora_grid.faint",
                "warning",
                f"{lora.label} hardly changes a picture: by {_percent(most)} at most.",
                {"mean_difference": most},
                "Try larger scales, or a prompt with its trigger words.",
            )


def _blank_cells(grid: LoraGrid) -> Iterator[Finding]:
    for index, lora in enumerate(grid.loras):
        scales = sorted({cell.scale for cell in grid.cells if cell.lora == index and _became_blank(cell)})  # type: ignore[type-var]  # a LoRA's cell has a scale
        if scales:
            yield Finding(
                "lora_grid.blank",
                "warning",
                f"{lora.label} at {', '.join(f'{scale:g}' for scale in scales)} leaves a picture of one colour.",
                {"scales": len(scales)},
                "Lower the scale.",
            )


def _became_blank(cell: GridCell) -> bool:
    return cell.change is not None and bool(cell.change.blank) and cell.one_colour


def _percent(share: float) -> str:
    value = 100 * share
    return f"{value:.1f} %" if value >= 1 else f"{value:.2g} %"


def columns_of(grid: LoraGrid) -> tuple[tuple[str, ...], bool]:
    """What stands above the columns, and whether each LoRA has a line of its own in every row.

    With one scale the LoRAs are columns; with several the scales are, and the LoRAs stand below each other.
    """
    if len(grid.scales) == 1:
        return tuple(lora.label for lora in grid.loras), False
    return tuple(f"at {scale:g}" for scale in grid.scales), True


def lines_of(grid: LoraGrid, row: int) -> list[tuple[str, list[GridCell]]]:
    """The lines of a row: a LoRA's name and its cells, or all cells of the only scale."""
    if len(grid.scales) == 1:
        return [("", [grid.cell(row, index, grid.scales[0]) for index in range(len(grid.loras))])]
    return [
        (lora.label, [grid.cell(row, index, scale) for scale in grid.scales])
        for index, lora in enumerate(grid.loras)
    ]


# The sheet: pixels and colours.
_MARGIN: Final = 16
_GAP: Final = 8
_SMALLEST, _LARGEST = 192, 320
_MOST_PIXELS: Final = 60_000_000
_LEAST_SIDE: Final = 96
_LABEL, _TITLE, _FIGURES = 16, 22, 14
_LINE: Final = 21
_PAPER, _INK, _FAINT_INK, _BAD, _RULE = "#fafaf8", "#1e1e22", "#5b6470", "#b3261e", "#d6dbe1"
_MOST_PROMPT_LINES: Final = 3
_MOST_FINDINGS: Final = 6


def save_sheet(grid: LoraGrid, path: str | Path) -> None:
    """Draw all cells into one PNG, whole or not at all.

    Raises:
        WriteError: It cannot be written.
    """
    image = grid_sheet(grid)
    with atomic_path(path) as temporary:
        image.save(temporary, format="PNG")


def grid_sheet(grid: LoraGrid) -> "Image":
    """All cells of a grid as one picture: each with its LoRA and scale above, and its difference below."""
    from PIL import Image

    layout = _Layout.of(grid)
    sheet = Image.new("RGB", (layout.width, layout.height(grid)), _PAPER)
    _Pen(sheet, layout).draw(grid)
    return sheet


@dataclass(frozen=True, slots=True)
class _Layout:
    """Sizes in pixels: of a cell's picture, and of the sheet's width."""

    cell_width: int
    cell_height: int
    columns: int

    @classmethod
    def of(cls, grid: LoraGrid) -> "_Layout":
        sizes = [_opened(cell.picture).size for cell in grid.cells if cell.lora is None]
        widest, tallest = max(width for width, _ in sizes), max(height for _, height in sizes)
        columns = 1 + len(columns_of(grid)[0])
        cells = columns * sum(len(lines_of(grid, row)) for row in range(len(grid.rows)))
        most = max(_LEAST_SIDE, min(_LARGEST, math.isqrt(_MOST_PIXELS // cells)))
        longer = max(widest, tallest)
        scale = min(max(longer, min(_SMALLEST, most)), most) / longer
        return cls(max(1, round(widest * scale)), max(1, round(tallest * scale)), columns)

    @property
    def width(self) -> int:
        """Of the sheet."""
        return max(2 * _MARGIN + self.columns * (self.cell_width + _GAP) - _GAP, 640)

    @property
    def line_height(self) -> int:
        """Of a line of cells, with what stands above and below its pictures."""
        return self.cell_height + 2 * _LINE + _GAP

    def height(self, grid: LoraGrid) -> int:
        heading = _MARGIN + 6 + _LINE * (1 + len(self.heading(grid)))
        rows = range(len(grid.rows))
        prompts = sum(_LINE * len(self.prompt(grid, row)) + 2 * _GAP + 4 for row in rows)
        return heading + prompts + self.line_height * sum(len(lines_of(grid, row)) for row in rows) + _MARGIN

    def heading(self, grid: LoraGrid) -> list[tuple[str, str]]:
        """The lines below the title, with their colours."""
        room, font = self.width - 2 * _MARGIN, _font(_FIGURES)
        said = [
            (_caption(grid), _FAINT_INK),
            *((found.message, _BAD) for found in grid.findings()[:_MOST_FINDINGS]),
        ]
        return [(line, colour) for text, colour in said for line in wrapped(text, font, room)]

    def prompt(self, grid: LoraGrid, row: int) -> list[str]:
        """What a row is called, in lines that the sheet has room for."""
        return wrapped(f"{row + 1}. {grid.rows[row]}", _font(_LABEL), self.width - 2 * _MARGIN)


def _caption(grid: LoraGrid) -> str:
    settings = f", {grid.settings}" if grid.settings else ""
    scale = f", LoRAs at {grid.scales[0]:g}" if len(grid.scales) == 1 else ""
    return (
        f"Seed {grid.seed}{settings}{scale}. Below each picture: "
        "how far its values are from those without a LoRA on average, and PSNR."
    )


def _font(size: int) -> "FreeTypeFont | ImageFont":
    from PIL import ImageFont

    return ImageFont.load_default(size)


def wrapped(text: str, font: "FreeTypeFont | ImageFont", width: int) -> list[str]:
    """A text in at most three lines, cut where that is too little."""
    lines, line = list[str](), ""
    for word in " ".join(text.split()).split(" "):
        longer = f"{line} {word}".strip()
        if line and font.getlength(longer) > width:
            lines.append(line)
            line = word
        else:
            line = longer
    lines.append(line)
    if len(lines) > _MOST_PROMPT_LINES:
        lines = [*lines[: _MOST_PROMPT_LINES - 1], f"{lines[_MOST_PROMPT_LINES - 1]}…"]
    return [fitted(line, font, width) for line in lines]


def fitted(text: str, font: "FreeTypeFont | ImageFont", width: int) -> str:
    """A text that fits a width: of a longer one the beginning and the end, which tell names apart."""
    if font.getlength(text) <= width:
        return text
    for kept in range(len(text) - 1, 0, -1):
        head = (kept + 1) // 2
        shorter = f"{text[:head]}…{text[len(text) - (kept - head) :]}"
        if font.getlength(shorter) <= width:
            return shorter
    return "…"


class _Pen:
    """Draws a grid from top to bottom."""

    def __init__(self, sheet: "Image", layout: _Layout) -> None:
        from PIL import ImageDraw

        self._sheet, self._layout = sheet, layout
        self._draw = ImageDraw.Draw(sheet)
        self._y = _MARGIN

    def draw(self, grid: LoraGrid) -> None:
        room = self._layout.width - 2 * _MARGIN
        self._text(_MARGIN, f"LoRA grid: {grid.name}", _TITLE, room)
        self._y += _LINE + 6
        for line, colour in self._layout.heading(grid):
            self._text(_MARGIN, line, _FIGURES, room, colour)
            self._y += _LINE
        for row in range(len(grid.rows)):
            self._row(grid, row)

    def _row(self, grid: LoraGrid, row: int) -> None:
        self._y += _GAP
        self._draw.line((_MARGIN, self._y, self._layout.width - _MARGIN, self._y), fill=_RULE)
        self._y += _GAP
        for line in self._layout.prompt(grid, row):
            self._text(_MARGIN, line, _LABEL, self._layout.width)
            self._y += _LINE
        self._y += 4
        headings, _ = columns_of(grid)
        for label, cells in lines_of(grid, row):
            self._cell(0, NO_LORA, grid.cell(row))
            for column, (heading, cell) in enumerate(zip(headings, cells, strict=True), start=1):
                if label:
                    room = self._layout.cell_width - _font(_LABEL).getlength(f" {heading}")
                    heading = f"{fitted(label, _font(_LABEL), int(room))} {heading}"
                self._cell(column, heading, cell)
            self._y += self._layout.line_height

    def _cell(self, column: int, heading: str, cell: GridCell) -> None:
        width, height = self._layout.cell_width, self._layout.cell_height
        left, top = _MARGIN + column * (width + _GAP), self._y
        self._text(left, heading, _LABEL, width)
        picture = _shown(_opened(cell.picture), (width, height))
        self._sheet.paste(picture, (left, top + _LINE))
        if cell.is_idle or _became_blank(cell):
            self._draw.rectangle(
                (left, top + _LINE, left + width - 1, top + _LINE + height - 1), outline=_BAD, width=2
            )
        self._y += _LINE + height + 4
        self._text(left, cell.figures, _FIGURES, width, _BAD if cell.is_idle else _FAINT_INK)
        self._y = top

    def _text(self, x: int, text: str, size: int, room: int, colour: str = _INK) -> None:
        font = _font(size)
        # Pillow's own font has no sign for "times".
        self._draw.text((x, self._y), fitted(text.replace("×", "x"), font, room), fill=colour, font=font)


def _shown(image: "Image", box: tuple[int, int]) -> "Image":
    from PIL.Image import Resampling

    scale = min(box[0] / image.width, box[1] / image.height)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(size, Resampling.LANCZOS)


_PAGE_SIDE: Final = 1024
_PAGE_QUALITY: Final = 90
_LARGEST_AS_IT_IS: Final = 150_000
"""Bytes of a PNG that goes into the page as it is; of a larger one a JPEG does."""


def save_page(grid: LoraGrid, path: str | Path) -> None:
    """Write a page that any browser opens, with all pictures in it, whole or not at all.

    Raises:
        WriteError: It cannot be written.
    """
    text = grid_html(grid)
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def grid_html(grid: LoraGrid) -> str:
    """All cells of a grid as one HTML page that asks nobody for anything."""
    headings, _ = columns_of(grid)
    most = max((cell.mean_difference or 0.0 for cell in grid.cells), default=0.0) or 1.0
    rows = [
        {
            "number": row + 1,
            "title": grid.rows[row],
            "bare": _cell_view(grid, grid.cell(row), most),
            "lines": [
                (label, [_cell_view(grid, cell, most) for cell in cells])
                for label, cells in lines_of(grid, row)
            ],
        }
        for row in range(len(grid.rows))
    ]
    return template("lora_grid.html.jinja").render(
        grid=grid,
        caption=_caption(grid),
        headings=headings,
        rows=rows,
        findings=grid.findings(),
        no_lora=NO_LORA,
        version=__version__,
    )


def _cell_view(grid: LoraGrid, cell: GridCell, most: float) -> dict[str, Any]:
    name = NO_LORA if cell.lora is None else f"{grid.loras[cell.lora].label} at {cell.scale:g}"
    return {
        "name": name,
        "id": f"cell{cell.row}-{cell.lora}-{cell.scale}".replace(".", "_"),
        "uri": _data_uri(cell.picture),
        "figures": cell.figures,
        "bad": cell.is_idle or _became_blank(cell),
        "width": None if cell.mean_difference is None else 100 * cell.mean_difference / most,
    }


def _data_uri(path: Path) -> str:
    if path.stat().st_size <= _LARGEST_AS_IT_IS:
        return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    image = _opened(path)
    image.thumbnail((_PAGE_SIDE, _PAGE_SIDE))
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=_PAGE_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"
