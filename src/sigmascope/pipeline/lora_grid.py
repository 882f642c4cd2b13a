"""Paint the same prompts with several LoRAs at several scales, and show all as one picture and one page.

Each cell is kept as a PNG named by the hash of all that it depends on, so only missing ones are painted.
"""

import io
import json
import pickle
import secrets
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
import xxhash
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor, nn

from sigmascope.__about__ import __version__
from sigmascope.checkpoints.checkpoint import file_sha256
from sigmascope.errors import ConfigError
from sigmascope.files import atomic_path, require_writable
from sigmascope.lora.apply import attach_lora, attached_to
from sigmascope.lora.live_layers import finite_scale
from sigmascope.lora.reader import load_lora
from sigmascope.pipeline.bench import call_arguments, check_call, check_seed
from sigmascope.pipeline.measure import compare_images, image_of
from sigmascope.probes import model_fingerprints
from sigmascope.probes.models import components_of, modules_in
from sigmascope.probes.peft import adapter_states, adapters_of
from sigmascope.probes.reading import attempt
from sigmascope.progress import Progress, no_progress
from sigmascope.records.performance import BenchCase
from sigmascope.records.run import Finding
from sigmascope.reports.html import jpeg_uri, template

_ROUNDING_ON_ACCELERATORS: Final = 2 / 255
_TILE_WIDTH: Final = 320  # pixels of a cell on the sheet; the page shows up to 1,024
_LIBRARIES: Final = ("torch", "diffusers", "transformers")


@runtime_checkable
class GridSubject(Protocol):
    """A model that paints a picture for each row of a grid."""

    name: str
    model: object  # a module, or a pipeline with components
    rows: Sequence[str]  # their titles: prompts, or names of pictures
    kind: str  # of a row: "prompt" or "picture"

    def settings(self, row: int) -> Mapping[str, object]:
        """What a row's picture depends on besides weights, LoRA, scale and seed: JSON, pictures, arrays, tensors."""

    def summary(self) -> str:
        """The settings that a reader wants to see, in a few words."""

    def paint(self, row: int, seed: int) -> Image.Image:
        """The row's picture, in RGB."""


@dataclass(frozen=True, slots=True)
class GridLora:
    """A LoRA of a grid. `modules` counts those that fit the model."""

    label: str
    path: Path
    modules: int


@dataclass(frozen=True, slots=True)
class GridCell:
    """One picture of a grid, and how far it is from its row's picture without a LoRA, whose `lora` is None.

    `mean_difference` is a share of the range of values, `psnr_db` is 10 · log10(1 / mean squared difference). A cell
    `is_idle` if its LoRA changed no more than an accelerator's rounding does.
    """

    row: int
    lora: int | None
    scale: float | None
    picture: Path
    reused: bool
    one_colour: bool
    is_idle: bool = False
    mean_difference: float | None = None
    psnr_db: float | None = None

    @property
    def figures(self) -> str:
        """The distance from the picture without a LoRA, in words."""
        if self.lora is None:
            return ""
        if self.mean_difference is None:
            return "of another size"
        share = f"{100 * self.mean_difference:.3g} %"
        return "identical" if self.psnr_db is None else f"{share}, {self.psnr_db:.1f} dB"


@dataclass(frozen=True, slots=True)
class LoraGrid:
    """Every cell of a grid, row by row: first without a LoRA, then each LoRA at each scale."""

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
        return tuple(self.loras[index] for index in range(len(self.loras)) if index not in acting)

    def cell(self, row: int, lora: int | None = None, scale: float | None = None) -> GridCell:
        """The cell of a row, a LoRA and a scale. Raises KeyError where there is none."""
        return {(cell.row, cell.lora, cell.scale): cell for cell in self.cells}[row, lora, scale]

    def lines(self, row: int) -> list[list[GridCell]]:
        """A row's cells as they are shown: a line for each LoRA, or one for all LoRAs at a single scale."""
        bare, *changed = [cell for cell in self.cells if cell.row == row]
        length = len(self.scales) if len(self.scales) > 1 else len(self.loras)
        return [[bare, *changed[start : start + length]] for start in range(0, len(changed), length)]

    def heading(self, cell: GridCell) -> str:
        """What stands above a cell."""
        if cell.lora is None:
            return "no LoRA"
        return self.loras[cell.lora].label + ("" if len(self.scales) == 1 else f" at {cell.scale:g}")

    def caption(self) -> str:
        """What all cells have in common, and what the figures mean."""
        scale = f"LoRAs at {self.scales[0]:g}" if len(self.scales) == 1 else ""
        same = ", ".join(filter(None, (f"Seed {self.seed}", self.settings, scale)))
        return f"{same}. Below each picture: its mean difference from the one without a LoRA, and PSNR."

    def findings(self) -> tuple[Finding, ...]:
        """Rows that show nothing, and LoRAs that do nothing."""
        found = []
        blank = [cell.row for cell in self.cells if cell.lora is None and cell.one_colour]
        for row in blank:
            what = f"Without a LoRA, {self.kind} {row + 1} is of one colour: no difference can be seen."
            advice = "Look for NaN or a safety checker: run the model in bfloat16 or float32."
            found.append(Finding("lora_grid.blank_without_lora", "error", what, {"row": row}, advice))
        for lora in self.idle if len(blank) < len(self.rows) else ():
            what = (
                f"{lora.label} changes no picture: it does nothing, or less than one step of their colours."
            )
            advice = (
                f"See why: sigmascope lora inspect {shlex.quote(lora.path.name)} --model MODEL. "
                "If it only is weak, larger --scales show it."
            )
            found.append(Finding("lora_grid.does_nothing", "error", what, {"modules": lora.modules}, advice))
        return tuple(found)

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        for cell in values["cells"]:
            cell["lora"] = None if cell["lora"] is None else self.loras[cell["lora"]].label
        for shown, lora in zip(values["loras"], self.loras, strict=True):
            shown["does_nothing"] = lora in self.idle
        found = [{"id": f.id, "message": f.message, "advice": f.advice} for f in self.findings()]
        return {"model": values.pop("name"), **values, "findings": found}


def lora_grid(
    subject: Any,
    loras: str | Path | Sequence[str | Path],
    prompts: str | Sequence[str] = (),
    *,
    output: str | Path,
    scales: float | Sequence[float] = (0.5, 1.0),
    seed: int = 0,
    call: Mapping[str, Any] | None = None,
    hide_prompts: bool = False,
    progress: Progress = no_progress,
) -> LoraGrid:
    """Paint each prompt without a LoRA and with each LoRA at each scale, from one seed, as a picture and a page.

    Each cell is kept as soon as it is painted. A later call reuses the cells for which weights, LoRA, scale, prompt,
    seed, settings and library versions are the same. The model is left as it was.

    Args:
        subject: A diffusers pipeline, or a `GridSubject` such as `sigmascope.lbm.infer.PictureRows`.
        loras: Files.
        prompts: The rows of a pipeline's grid; a `GridSubject` has its own.
        output: A `.png` or `.html` file; the other is written beside it, and the folder `<name>.cells`.
        scales: Strengths. 0 is left out: that is the picture without a LoRA.
        seed: The same in every cell.
        call: Arguments of the pipeline's call, such as `num_inference_steps`, `width` and `negative_prompt`.
        hide_prompts: Show "prompt 1" in place of the words.
        progress: Told after each cell.

    Raises:
        ConfigError: LoRA, prompt or scale is missing, or the pipeline does not take an argument.
        FileError: A LoRA is missing or cannot be read.
        ModelMismatchError: A LoRA does not fit the model.
        WriteError: The output or a cell cannot be written.
    """
    sheet, page, folder = output_paths(output)
    paths = [Path(path) for path in ([loras] if isinstance(loras, str | Path) else loras)]
    strengths = [finite_scale(scale) for scale in ([scales] if isinstance(scales, int | float) else scales)]
    used = tuple(float(scale) for scale in dict.fromkeys(strengths) if scale)
    if not paths:
        raise ConfigError("--lora is missing.", hint="Give at least one LoRA file.")
    if not used:
        raise ConfigError("--scales names no strength but 0.", hint="Give numbers such as 0.5,1.")
    check_seed(seed)
    texts = (prompts,) if isinstance(prompts, str) else tuple(prompts)
    if not isinstance(subject, GridSubject):
        subject = _PipelineRows(subject, texts, dict(call or {}))
    elif texts or call:
        hint = "Give prompts and call with a diffusers pipeline alone."
        raise ConfigError(f"A {type(subject).__name__} has rows and settings of its own.", hint=hint)
    known = tuple(_examined(subject.model, path, paths) for path in dict.fromkeys(paths))
    titles = [
        f"{subject.kind} {1 + row}" if hide_prompts else title for row, title in enumerate(subject.rows)
    ]
    cells = sorted(_painted(subject, known, used, seed, folder, progress), key=lambda cell: cell.row)
    about = (subject.name, subject.kind, tuple(titles), known, used, seed, subject.summary())
    grid = LoraGrid(*about, tuple(cells), folder)
    with atomic_path(sheet) as temporary:
        grid_sheet(grid).save(temporary, format="PNG")
    shown = {"grid": grid, "title": f"LoRA grid of {grid.name}", "uri": _data_uri, "version": __version__}
    with atomic_path(page) as temporary:
        temporary.write_text(template("lora_grid.html.jinja").render(shown), encoding="utf-8")
    return grid


def output_paths(output: str | Path) -> tuple[Path, Path, Path]:
    """The PNG, the HTML file and the folder of cells of an output, which ends in `.png` or `.html`."""
    path = Path(output)
    if path.suffix.lower() not in (".png", ".html"):
        raise ConfigError(f"--output {path} is not a PNG or HTML file.", hint="Give a name such as grid.png.")
    sheet, page = path.with_suffix(".png"), path.with_suffix(".html")
    require_writable(sheet)
    require_writable(page)
    return sheet, page, path.with_suffix(".cells")


@dataclass
class _PipelineRows:
    """A diffusers pipeline that paints a picture for each prompt."""

    model: Any
    rows: tuple[str, ...]
    arguments: Mapping[str, Any]
    kind: str = "prompt"

    def __post_init__(self) -> None:
        if not components_of(self.model):
            what = f"A {type(self.model).__name__} is neither a diffusers pipeline nor a GridSubject."
            hint = "Give the whole pipeline; of an LBM sigmascope.lbm.infer.PictureRows(model, pictures)."
            raise ConfigError(what, hint=hint)
        if not self.rows or not all(prompt.strip() for prompt in self.rows):
            what = f"--prompt is {'empty' if self.rows else 'missing'}."
            raise ConfigError(what, hint='Give at least one, such as --prompt "a red fox".')
        check_call(self.model, BenchCase(), self.arguments)
        loaded_from = getattr(getattr(self.model, "config", None), "_name_or_path", None)
        self.name = Path(loaded_from or type(self.model).__name__).name

    def settings(self, row: int) -> dict[str, object]:
        scheduler = getattr(self.model, "scheduler", None)
        return {
            "pipeline": type(self.model).__name__,
            "runs_on": getattr(getattr(self.model, "_execution_device", None), "type", None),
            "scheduler": [type(scheduler).__name__, dict(getattr(scheduler, "config", {}))],
            "call": [self.arguments, self.rows[row]],
        }

    def summary(self) -> str:
        numbers = {name: value for name, value in self.arguments.items() if isinstance(value, int | float)}
        return ", ".join(f"{name} {value}" for name, value in numbers.items())

    def paint(self, row: int, seed: int) -> Image.Image:
        arguments = call_arguments(self.model, BenchCase(), self.rows[row], seed, self.arguments)
        return picture_of(self.model(**arguments))


def picture_of(output: object) -> Image.Image:
    """The first picture of a pipeline's output as RGB; of a video the frame in the middle. NaN is black."""
    values = image_of(output)
    if values is not None and values.ndim == 5:
        values = values[:, values.shape[1] // 2]
    if values is not None and values.ndim == 4:
        picture = values[0].movedim(0, -1) if values.shape[1] in (1, 3) else values[0]
        if picture.shape[-1] in (1, 3, 4):
            levels = picture[..., :3].nan_to_num(0.0).clamp(0, 1) * 255 + 0.5
            return Image.fromarray(levels.to(torch.uint8).expand(-1, -1, 3).numpy())
    what = type(output).__name__ if values is None else f"values of shape {tuple(values.shape)}"
    raise ConfigError(f"The pipeline gave no picture but {what}.", hint="Leave --call output_type out.")


def _examined(model: object, path: Path, paths: Sequence[Path]) -> GridLora:
    """A LoRA that fits, before anything is painted."""
    with attach_lora(model, load_lora(path), 0.0) as attached:
        modules = len(attached.applied)
    has_namesake = any(other.stem == path.stem and other != path for other in paths)
    return GridLora(f"{path.resolve().parent.name}/{path.stem}" if has_namesake else path.stem, path, modules)


def _painted(
    subject: GridSubject,
    loras: Sequence[GridLora],
    scales: Sequence[float],
    seed: int,
    folder: Path,
    progress: Progress,
) -> Iterator[GridCell]:
    """Every cell, those without a LoRA first. Only those that are missing or damaged are painted."""
    parts = components_of(subject.model) or {"": subject.model}
    models = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    versions = [getattr(sys.modules.get(name), "__version__", None) for name in _LIBRARIES]
    common = _as_json([versions, models, seed])
    settings = [common + _as_json(subject.settings(row)) for row in range(len(subject.rows))]
    total, done = len(settings) * (1 + len(loras) * len(scales)), 0
    bare: list[Path] = []
    for index, lora in [(None, None), *enumerate(loras)]:
        digest = lora and file_sha256(lora.path)
        with attach_lora(subject.model, load_lora(lora.path)) if lora else nullcontext() as attached:
            for scale, (row, depends_on) in product(scales if lora else (None,), enumerate(settings)):
                key = f"{depends_on} {digest} {scale}"
                path = folder / f"{xxhash.xxh3_128_hexdigest(key.encode())}.png"
                is_kept = attempt(partial(_opened, path)).value is not None  # whole, not only there
                if attached is not None and scale is not None:
                    attached.scale = scale
                if not is_kept:
                    with atomic_path(path) as temporary:
                        subject.paint(row, seed).save(temporary, format="PNG")
                if lora is None:
                    bare.append(path)
                done += 1
                what = f"{lora.label} at {scale:g}" if lora else "no LoRA"
                progress(done, total, f"{what}, {subject.kind} {row + 1}")
                yield GridCell(row, index, scale, path, is_kept, **_compared(path, bare[row]))


def _compared(path: Path, bare: Path) -> dict[str, Any]:
    """What a picture shows, and how far it is from the one without a LoRA."""
    this, that = (torch.from_numpy(np.array(_opened(file), np.float64)) / 255 for file in (path, bare))
    seen: dict[str, Any] = {"one_colour": bool((this == this[0, 0]).all())}
    if path == bare or this.shape != that.shape:
        return seen
    apart = (this - that).abs()
    return seen | {
        "is_idle": bool(apart.max() <= _ROUNDING_ON_ACCELERATORS),
        "mean_difference": float(apart.mean()),
        "psnr_db": compare_images(this, that).psnr_db,
    }


def _opened(path: Path) -> Image.Image:
    with Image.open(path, formats=("PNG",)) as image:
        return image.convert("RGB")


def _as_json(value: object) -> str:
    """A text that is equal only for values of equal content; of a pipeline or model it has weights and adapters."""
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
            [repr((adapter_states(layer), getattr(layer, "scaling", None))) for layer in layers],
            [[lora.scale, lora.factors] for lora in attached_to(value)],
        ]
    if isinstance(value, Tensor):
        return [str(value.dtype), value.shape, model_fingerprints.combined_fingerprint({"": value})]
    try:
        return xxhash.xxh3_128_hexdigest(pickle.dumps(value))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        what = f"A {type(value).__name__} in the call's arguments cannot be told from another one ({error})."
        raise ConfigError(what, hint="Give numbers, text, pictures, arrays or tensors.") from error


def grid_sheet(grid: LoraGrid) -> Image.Image:
    """All cells as one picture: a line of them for each LoRA of each row, with what each is drawn in its corner."""
    lines = [line for row in range(len(grid.rows)) for line in grid.lines(row)]
    sizes = [_opened(cell.picture).size for cell in grid.cells if cell.lora is None]
    height = max(round(_TILE_WIDTH * height / width) for width, height in sizes)
    sheet = Image.new("RGB", (_TILE_WIDTH * len(lines[0]), height * len(lines)))
    for (y, line), x in product(enumerate(lines), range(len(lines[0]))):
        words = f"{line[x].row + 1}. {grid.heading(line[x])}\n{line[x].figures}"
        tile = ImageOps.pad(_opened(line[x].picture), (_TILE_WIDTH, height), Image.Resampling.LANCZOS)
        ink = "orangered" if line[x].is_idle else "white"
        font = ImageFont.load_default(16)
        ImageDraw.Draw(tile).text((6, 4), words, ink, font, stroke_width=2, stroke_fill="black")
        sheet.paste(tile, (x * _TILE_WIDTH, y * height))
    return sheet


def _data_uri(path: Path) -> str:
    image, stream = _opened(path), io.BytesIO()
    image.thumbnail((1024, 1024))
    image.save(stream, "JPEG", quality=90)
    return jpeg_uri(stream.getvalue())
