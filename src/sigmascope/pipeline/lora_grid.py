"""Several LoRAs at several scales on the same prompts and seed, as one picture and one page.

`lora_grid` keeps each cell as a PNG named by the hash of all that it depends on: a grid that was stopped, or that has
grown, paints only what is missing.
"""

import base64
import io
import json
import math
import secrets
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
import xxhash
from PIL import Image, ImageDraw, ImageFont, ImageOps
from PIL.PngImagePlugin import PngInfo
from torch import Tensor, nn

from sigmascope.__about__ import __version__
from sigmascope.checkpoints.checkpoint import file_sha256
from sigmascope.errors import ConfigError, NonFiniteError
from sigmascope.files import atomic_path, require_writable
from sigmascope.lora.apply import AttachedLora, attach_lora, attached_to
from sigmascope.lora.reader import load_lora
from sigmascope.pipeline.bench import call_arguments, check_call
from sigmascope.pipeline.measure import image_of
from sigmascope.probes import model_fingerprints
from sigmascope.probes.models import components_of, modules_in
from sigmascope.probes.peft import adapters_of, standing_of
from sigmascope.progress import Progress, no_progress
from sigmascope.records.performance import BenchCase
from sigmascope.records.run import Finding
from sigmascope.reports.html import template

_ROUNDING_ON_ACCELERATORS: Final = 2 / 255
_LARGEST_PNG_IN_PAGE: Final = 150_000  # bytes; a JPEG stands for a larger one
_SIDE_IN_PAGE: Final = 1024
_LIBRARIES: Final = ("torch", "diffusers", "transformers")


@runtime_checkable
class GridSubject(Protocol):
    """A model that paints a picture for each row of a grid.

    Attributes:
        name: The model's, for the heading.
        model: What LoRAs are attached to: a module, or a pipeline with components.
        rows: The title of each row: its prompt, or the name of its picture.
        kind: What a row is: "prompt" or "picture".
    """

    name: str
    model: object
    rows: Sequence[str]
    kind: str

    def settings(self, row: int) -> Mapping[str, object]:
        """What a row's picture depends on besides weights, LoRA, scale and seed: JSON, pictures, arrays, tensors."""

    def summary(self) -> str:
        """The settings that a reader wants to see, in a few words."""

    def paint(self, row: int, seed: int) -> Image.Image:
        """The row's picture, in RGB."""


@dataclass(frozen=True, slots=True)
class GridLora:
    """A LoRA of a grid.

    `modules` says how many of its modules act on the model, `is_zero` whether each has a factor of zeros.
    """

    label: str
    path: Path
    sha256: str
    modules: int
    is_zero: bool


@dataclass(frozen=True, slots=True)
class GridCell:
    """One picture of a grid, painted in `seconds`, now or, if `reused`, before. None: its row's picture without a LoRA.

    Attributes:
        layers_run: How many of the LoRA's modules ran.
        one_colour: Whether it is a single colour throughout.
        is_idle: Whether nothing changed but for an accelerator's rounding.
        mean_difference: Mean of |this - that| over all values, as a share of the range; None too where sizes differ.
        psnr_db: 10 · log10(1 / mean squared difference); None too where they differ in size or in nothing.
    """

    row: int
    lora: int | None
    scale: float | None
    picture: Path
    reused: bool
    seconds: float
    layers_run: int | None
    one_colour: bool
    identical: bool | None = None
    is_idle: bool = False
    mean_difference: float | None = None
    psnr_db: float | None = None

    @property
    def figures(self) -> str:
        """The distance from the picture without a LoRA, in words."""
        if self.lora is None or self.identical:
            return "identical" if self.identical else ""
        if self.mean_difference is None or self.psnr_db is None:
            return "not compared"
        digits = ".1f" if self.mean_difference >= 0.01 else ".2g"
        return f"{100 * self.mean_difference:{digits}} %  {self.psnr_db:.1f} dB"


@dataclass(frozen=True, slots=True)
class LoraGrid:
    """Every cell of a grid, row by row: first without a LoRA, then each LoRA at each scale.

    `name` is the model's, `kind` what a row is ("prompt" or "picture"), `rows` are their titles, `settings` size, steps
    and the like in words, and `folder` is where the pictures are kept.
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
        acting = {cell.lora for cell in self.cells if not cell.is_idle}
        return tuple(lora for index, lora in enumerate(self.loras) if index not in acting)

    def cell(self, row: int, lora: int | None = None, scale: float | None = None) -> GridCell:
        """The cell of a row, a LoRA and a scale.

        Raises:
            KeyError: There is none.
        """
        return {(cell.row, cell.lora, cell.scale): cell for cell in self.cells}[row, lora, scale]

    def lines(self, row: int) -> list[list[GridCell]]:
        """A row's cells with a LoRA: a line for each LoRA, or one for all where there is one scale."""
        cells = [cell for cell in self.cells if cell.row == row and cell.lora is not None]
        one_line = len(self.scales) == 1
        return [list(line) for _, line in groupby(cells, key=lambda cell: None if one_line else cell.lora)]

    def heading(self, cell: GridCell) -> str:
        """What stands above a cell: its LoRA, and its scale where there are several."""
        if cell.lora is None:
            return "no LoRA"
        return self.loras[cell.lora].label + ("" if len(self.scales) == 1 else f" at {cell.scale:g}")

    def caption(self) -> str:
        """What all cells have in common, and what the figures mean."""
        scale = f"LoRAs at {self.scales[0]:g}" if len(self.scales) == 1 else ""
        same = ", ".join(part for part in (f"Seed {self.seed}", self.settings, scale) if part)
        return f"{same}. Below each picture: its mean difference from the one without a LoRA, and PSNR."

    def findings(self) -> tuple[Finding, ...]:
        """What is wrong: LoRAs that do nothing, and rows of which nothing is seen."""
        blank = [cell.row for cell in self.cells if cell.lora is None and cell.one_colour]
        found = []
        for row in blank:
            what = f"Without a LoRA, {self.kind} {row + 1} gives a picture of one colour: nothing can be compared."
            advice = "Look for NaN or a safety checker: run the model in bfloat16 or float32."
            found.append(Finding("lora_grid.blank_without_lora", "error", what, {"row": row}, advice))
        for lora in self.idle if len(blank) < len(self.rows) else ():
            ran = max(cell.layers_run or 0 for cell in self.cells if cell.lora == self.loras.index(lora))
            why = "no picture changes" if ran else f"none of its {lora.modules} modules ran"
            what = f"{lora.label} does nothing: {'its factors are zero' if lora.is_zero else why}."
            values = {"modules": lora.modules, "ran": ran}
            advice = "See what is in it with sigmascope lora inspect."
            found.append(Finding("lora_grid.does_nothing", "error", what, values, advice))
        return tuple(found)

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        labels = {None: None} | {index: lora.label for index, lora in enumerate(self.loras)}
        cells = [
            asdict(cell) | {"lora": labels[cell.lora], "picture": str(cell.picture)} for cell in self.cells
        ]
        return {
            "model": self.name,
            "seed": self.seed,
            "settings": self.settings,
            "rows": list(self.rows),
            "scales": list(self.scales),
            "loras": [
                {"label": a.label, "path": str(a.path), "modules": a.modules, "does_nothing": a in self.idle}
                for a in self.loras
            ],
            "cells": [{name: cell[name] for name in cell if name != "is_idle"} for cell in cells],
            "findings": [{"id": f.id, "message": f.message, "advice": f.advice} for f in self.findings()],
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
    paths = [Path(path) for path in ([loras] if isinstance(loras, str | Path) else loras)]
    strengths = [float(scale) for scale in ([scales] if isinstance(scales, int | float) else scales)]
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not paths:
        raise ConfigError("--lora is missing.", hint="Give at least one LoRA file.")
    for scale in strengths:
        if not math.isfinite(scale):
            raise ConfigError(f"--scales: {scale} is no strength.", hint="Give numbers such as 0.5,1.")
    if not any(strengths):
        hint = "Give at least one that is not 0: the picture without a LoRA is there anyway."
        raise ConfigError("--scales names no strength.", hint=hint)
    twice: tuple[tuple[str, Sequence[Any]], ...] = (
        ("--lora {}", paths),
        ("--scales: {:g}", strengths),
        ("--prompt {!r}", texts),
    )
    for flag, given in twice:
        for value in given:
            if given.count(value) > 1:
                raise ConfigError(f"{flag.format(value)} is given twice.", hint="Give it once.")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"--seed is {seed}.", hint="Give a number from 0 to 2**63 - 1.")
    arguments = dict(call or {}) | ({} if guidance_scale is None else {"guidance_scale": guidance_scale})
    if not isinstance(subject, GridSubject):
        subject = _PipelineRows(subject, tuple(texts), num_inference_steps, size, arguments)
    elif texts or arguments or num_inference_steps is not None or size is not None:
        hint = "Give prompts, steps, guidance, size and call with a diffusers pipeline alone."
        raise ConfigError(f"A {type(subject).__name__} has rows and settings of its own.", hint=hint)
    known = tuple(_examined(subject.model, path, paths) for path in paths)
    used = tuple(scale for scale in strengths if scale)
    titles = [
        f"{subject.kind} {1 + row}" if hide_prompts else title for row, title in enumerate(subject.rows)
    ]
    painted = _painted(subject, known, used, seed, folder, progress)
    cells = tuple(sorted(painted, key=lambda cell: cell.row))
    about = (subject.name, subject.kind, tuple(titles), known, used, seed, subject.summary())
    grid = LoraGrid(*about, cells, folder)
    with atomic_path(sheet) as temporary:
        grid_sheet(grid).save(temporary, format="PNG")
    with atomic_path(page) as temporary:
        temporary.write_text(grid_html(grid), encoding="utf-8")
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


class _PipelineRows:
    """A diffusers pipeline that paints a picture for each prompt."""

    kind = "prompt"

    def __init__(
        self,
        pipeline: Any,
        prompts: tuple[str, ...],
        steps: int | None,
        size: tuple[int, int] | None,
        arguments: Mapping[str, Any],
    ) -> None:
        if not components_of(pipeline):
            raise ConfigError(
                f"A {type(pipeline).__name__} is neither a diffusers pipeline nor a GridSubject.",
                hint="Give the whole pipeline; of an LBM sigmascope.lbm.infer.PictureRows(model, pictures).",
            )
        if not prompts or not all(prompt.strip() for prompt in prompts):
            what = "is empty" if prompts else "is missing"
            raise ConfigError(f"--prompt {what}.", hint='Give at least one, such as --prompt "a red fox".')
        self.model, self.rows, self._arguments = pipeline, prompts, arguments
        width, height = size or (None, None)
        self._case = BenchCase(width, height, steps=steps)
        check_call(pipeline, self._case, arguments)
        loaded_from = getattr(getattr(pipeline, "config", None), "_name_or_path", None)
        self.name = Path(loaded_from or type(pipeline).__name__).name

    def settings(self, row: int) -> dict[str, object]:
        scheduler = getattr(self.model, "scheduler", None)
        return {
            "pipeline": type(self.model).__name__,
            "runs_on": getattr(getattr(self.model, "_execution_device", None), "type", None),
            "scheduler": [type(scheduler).__name__, dict(getattr(scheduler, "config", {}))],
            "call": [self._case.as_dict(), self._arguments, self.rows[row]],
        }

    def summary(self) -> str:
        size = "" if self._case.width is None else f"{self._case.width}×{self._case.height}"
        steps = "" if self._case.steps is None else f"{self._case.steps} steps"
        plain = [
            f"{name} {value}" for name, value in self._arguments.items() if isinstance(value, int | float)
        ]
        return ", ".join(part for part in (size, steps, *plain) if part)

    def paint(self, row: int, seed: int) -> Image.Image:
        arguments = call_arguments(self.model, self._case, self.rows[row], seed, self._arguments)
        return picture_of(self.model(**arguments))


def picture_of(output: object) -> Image.Image:
    """The first picture of a pipeline's output as RGB; of a video the frame in the middle. NaN is black.

    Raises:
        ConfigError: It holds none, such as latents.
    """
    values = image_of(output)
    if values is not None and values.ndim in (4, 5):
        picture = values[0] if values.ndim == 4 else values[0, values.shape[1] // 2]
        picture = picture.movedim(0, -1) if picture.shape[0] in (1, 3) else picture
        if picture.shape[-1] in (1, 3, 4):
            levels = picture[..., :3].nan_to_num(0.0).clamp(0, 1) * 255 + 0.5
            return Image.fromarray(levels.to(torch.uint8).expand(-1, -1, 3).numpy())
    what = type(output).__name__ if values is None else f"values of shape {tuple(values.shape)}"
    raise ConfigError(f"The pipeline gave no picture but {what}.", hint="Leave --call output_type out.")


def _examined(model: object, path: Path, paths: Sequence[Path]) -> GridLora:
    """A LoRA that fits, before anything is painted."""
    lora = load_lora(path)
    try:
        with attach_lora(model, lora, 0.0) as attached:
            modules = len(attached.applied)
    except NonFiniteError as error:
        raise NonFiniteError(f"--lora {path}: {error.message}", hint=error.hint) from error
    is_zero = not any(bool(module.up.any()) and bool(module.down.any()) for module in lora.modules.values())
    namesakes = [other for other in paths if other.stem == path.stem]
    label = path.stem if len(namesakes) == 1 else f"{path.resolve().parent.name}/{path.stem}"
    return GridLora(label, path, file_sha256(path), modules, is_zero)


def _painted(
    subject: GridSubject,
    loras: Sequence[GridLora],
    scales: Sequence[float],
    seed: int,
    folder: Path,
    progress: Progress,
) -> Iterator[GridCell]:
    """Every cell, those without a LoRA first; a LoRA is attached only where a picture with it is missing."""
    parts = components_of(subject.model) or {"": subject.model}
    models = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    versions = [getattr(sys.modules.get(name), "__version__", None) for name in _LIBRARIES]
    common = _as_json([versions, models, seed])
    settings = [common + _as_json(subject.settings(row)) for row in range(len(subject.rows))]
    total, done = len(settings) * (1 + len(loras) * len(scales)), 0
    bare: list[Path] = []
    for index, lora in [(None, None), *enumerate(loras)]:
        with ExitStack() as stack:
            attached: AttachedLora | None = None
            for scale in scales if lora else (None,):
                for row, depends_on in enumerate(settings):
                    key = f"{depends_on} {lora and lora.sha256} {scale}"
                    path = folder / f"{xxhash.xxh3_128_hexdigest(key.encode())}.png"
                    kept = _kept(path)
                    if kept is None and lora is not None and attached is None:
                        attached = stack.enter_context(attach_lora(subject.model, load_lora(lora.path)))
                        if file_sha256(lora.path) != lora.sha256:
                            changed = f"--lora {lora.path} changed while the grid was painted."
                            raise ConfigError(changed, hint="Start again.")
                    if attached is not None and scale is not None:
                        attached.scale = scale
                    seconds, layers_run = kept or _paint(subject, row, seed, attached, path)
                    bare += [path] if lora is None else []
                    done += 1
                    what = f"{lora.label} at {scale:g}" if lora else "no LoRA"
                    progress(done, total, f"{what}, {subject.kind} {row + 1}")
                    facts = (path, kept is not None, seconds, layers_run)
                    yield GridCell(row, index, scale, *facts, **_compared(path, bare[row]))


def _paint(
    subject: GridSubject, row: int, seed: int, attached: AttachedLora | None, path: Path
) -> tuple[float, int | None]:
    """Write a picture with a note of the seconds that it took, and how many of the LoRA's modules ran."""
    started = time.perf_counter()
    image = subject.paint(row, seed)
    seconds = time.perf_counter() - started
    layers_run = None if attached is None else len(attached.applied) - len(attached.dormant)
    note = PngInfo()
    note.add_text("sigmascope", json.dumps({"seconds": seconds, "layers_run": layers_run}))
    with atomic_path(path) as temporary:
        image.save(temporary, format="PNG", pnginfo=note)
    return seconds, layers_run


def _kept(path: Path) -> tuple[float, int | None] | None:
    """The note of a picture that was painted before; None where there is none, or its file is damaged."""
    try:
        with Image.open(path, formats=("PNG",)) as image:
            image.load()
            note = json.loads(str(image.info.get("sigmascope")))
        return float(note["seconds"]), note["layers_run"]
    except (OSError, ValueError, TypeError, KeyError, SyntaxError, Image.DecompressionBombError):
        return None


def _compared(path: Path, bare: Path) -> dict[str, Any]:
    """What a picture shows, and how far it is from the one without a LoRA."""
    this, that = (np.asarray(_opened(file), np.float64) / 255 for file in (path, bare))
    one_colour = bool((this == this[0, 0]).all())
    if path == bare:
        return {"one_colour": one_colour}
    if this.shape != that.shape:
        return {"one_colour": one_colour, "identical": False}
    apart = np.abs(this - that)
    return {
        "one_colour": one_colour,
        "identical": not apart.any(),
        "is_idle": bool(apart.max() <= _ROUNDING_ON_ACCELERATORS),
        "mean_difference": float(apart.mean()),
        "psnr_db": -10 * math.log10(np.square(apart).mean()) if apart.any() else None,
    }


def _opened(path: Path) -> Image.Image:
    with Image.open(path, formats=("PNG",)) as image:
        return image.convert("RGB")


def _as_json(value: object) -> str:
    """A text that is equal only for values of equal content; of a pipeline or model it has weights and adapters.

    Raises:
        ConfigError: A value is of a type that has no content to compare.
    """
    return json.dumps(value, sort_keys=True, default=_content_of)


def _content_of(value: object) -> object:
    if isinstance(value, nn.Module):
        weight = next(value.parameters(), None)
        readings = [model_fingerprints.model_fingerprint(value)]
        for adapter in sorted(map(str, getattr(value, "peft_config", None) or ())):
            readings += [model_fingerprints.adapter_fingerprint(value, adapter)]
        layers = [layer for layer in modules_in(value) if adapters_of(layer)]
        return [
            None if weight is None else [weight.dtype, weight.device.type],
            # A random word for weights that cannot be read, as under offloading: others may take their place.
            [read.value or (read.reason if weight is None else secrets.token_hex()) for read in readings],
            [repr((standing_of(layer), getattr(layer, "scaling", None))) for layer in layers],
            [[lora.scale, lora.factors] for lora in attached_to(value)],
        ]
    if isinstance(value, Tensor):
        return [str(value.dtype), value.shape, model_fingerprints.combined_fingerprint({"": value})]
    if isinstance(value, np.ndarray | Image.Image):
        array = np.asarray(value)
        content = xxhash.xxh3_128_hexdigest(array.tobytes())
        return [str(array.dtype), array.shape, getattr(value, "mode", None), content]
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    raise ConfigError(
        f"A {type(value).__name__} in the call's arguments cannot be told from another one.",
        hint="Give numbers, text, pictures, arrays or tensors.",
    )


# The sheet, in pixels.
_MARGIN, _GAP, _SMALLEST_SIDE, _LARGEST_SIDE, _NARROWEST_TEXT = 16, 8, 192, 320, 608
_MOST_PIXELS: Final = 60_000_000
_TITLE, _LABEL, _SMALL = 22, 16, 14
_PAPER, _INK, _FAINT_INK, _BAD_INK = "#fafaf8", "#1e1e22", "#5b6470", "#b3261e"


def grid_sheet(grid: LoraGrid) -> Image.Image:
    """All cells of a grid as one picture: each with its LoRA and scale above, and its difference below."""
    lines = [[[grid.cell(row), *line] for line in grid.lines(row)] for row in range(len(grid.rows))]
    columns = len(lines[0][0])
    sizes = [_opened(cell.picture).size for cell in grid.cells if cell.lora is None]
    longest = max(max(size) for size in sizes)
    most = math.isqrt(_MOST_PIXELS // (columns * sum(map(len, lines))))
    side = min(max(longest, _SMALLEST_SIDE), _LARGEST_SIDE, most)
    width, height = (max(1, round(max(lengths) * side / longest)) for lengths in zip(*sizes, strict=True))
    room = max(_NARROWEST_TEXT, columns * (width + _GAP) - _GAP)
    bands = [
        _text(f"LoRA grid: {grid.name}", _TITLE, _INK, room),
        _text(grid.caption(), _SMALL, _FAINT_INK, room, lines=3),
        *(_text(found.message, _SMALL, _BAD_INK, room, lines=3) for found in grid.findings()[:6]),
    ]
    for number, (title, row) in enumerate(zip(grid.rows, lines, strict=True), start=1):
        rule = ImageOps.expand(Image.new("RGB", (room, 1), _FAINT_INK), (0, _GAP), _PAPER)
        bands += [rule, _text(f"{number}. {title}", _LABEL, _INK, room, lines=3)]
        for line in row:
            band = Image.new(
                "RGB", (room, height + 2 * _GAP + _line_height(_LABEL) + _line_height(_SMALL)), _PAPER
            )
            for column, cell in enumerate(line):
                band.paste(_tile(grid, cell, (width, height)), (column * (width + _GAP), 0))
            bands.append(band)
    return ImageOps.expand(Image.fromarray(np.vstack([np.asarray(band) for band in bands])), _MARGIN, _PAPER)


def _tile(grid: LoraGrid, cell: GridCell, size: tuple[int, int]) -> Image.Image:
    picture = ImageOps.pad(_opened(cell.picture), size, Image.Resampling.LANCZOS, _PAPER, (0, 0))
    if cell.is_idle:
        ImageDraw.Draw(picture).rectangle((0, 0, size[0] - 1, size[1] - 1), outline=_BAD_INK, width=2)
    heading = _text(grid.heading(cell), _LABEL, _INK, size[0])
    figures = _text(cell.figures, _SMALL, _BAD_INK if cell.is_idle else _FAINT_INK, size[0])
    return Image.fromarray(np.vstack([np.asarray(part) for part in (heading, picture, figures)]))


def _text(text: str, size: int, ink: str, width: int, *, lines: int = 1) -> Image.Image:
    """A text in at most so many lines; of one that is too long for one line the middle is left out."""
    font, text = ImageFont.load_default(size), text.replace("×", "x")  # which that font has no sign for
    letters = max(3, int(0.95 * len(text) * width / max(1.0, font.getlength(text))))
    if lines == 1 and len(text) > letters:
        text = f"{text[: letters // 2]}…{text[-(letters // 2) :]}"
    text = text if lines == 1 else textwrap.fill(text, letters, max_lines=lines, placeholder=" …")
    image = Image.new("RGB", (width, _line_height(size) * (1 + text.count("\n"))), _PAPER)
    for number, line in enumerate(text.split("\n")):
        ImageDraw.Draw(image).text((0, number * _line_height(size)), line, ink, font)
    return image


def _line_height(size: int) -> int:
    return round(1.4 * size)


def grid_html(grid: LoraGrid) -> str:
    """All cells of a grid as one HTML page that asks nobody for anything."""
    most = max((cell.mean_difference or 0.0 for cell in grid.cells), default=0.0) or 1.0
    return template("lora_grid.html.jinja").render(grid=grid, most=most, uri=_data_uri, version=__version__)


def _data_uri(path: Path) -> str:
    content, kind = path.read_bytes(), "png"
    if len(content) > _LARGEST_PNG_IN_PAGE:
        image, stream, kind = _opened(path), io.BytesIO(), "jpeg"
        image.thumbnail((_SIDE_IN_PAGE, _SIDE_IN_PAGE))
        image.save(stream, "JPEG", quality=90)
        content = stream.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
