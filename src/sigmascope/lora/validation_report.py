"""Errors of a LoRA by layer, by block and as a whole, the bands that say what they mean, and their picture.

The picture shows the error of every layer along the model, and of every block. It is an SVG, which needs no
library, which any browser shows, and in which each point names its layer under the mouse.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from math import fsum
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal

from sigmascope import svg
from sigmascope.files import atomic_path
from sigmascope.lora.layers import block_of_module, block_position, layer_order
from sigmascope.lora.linalg import root_sum_square
from sigmascope.records.run import Finding

Band = Literal["excellent", "good", "poor", "noise"]
OTHER_MODEL: Final = "lora.other_model"
_MOST_OF: Final = 0.5
_NEARLY_ALL: Final = 0.9
Status = Literal["applied", "missing", "unmatched", "wrong_shape"]

BANDS: Final[dict[Band, str]] = {
    "excellent": "< 5 %",
    "good": "5-50 %",
    "poor": "50-100 %",
    "noise": "> 100 %",
}
"""The bands of relative error. In `noise` the LoRA is farther from the change than no LoRA at all."""

_VAE: Final = ("vae.", "first_stage_model.")
_WORST = 10  # modules that `ValidationReport.worst` gives

# The picture: its colours, and its places and sizes in pixels.
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


@dataclass(frozen=True, slots=True)
class ModuleError:
    """One layer of the model, or one module of the LoRA that fits no layer.

    Attributes:
        name: Path of the layer.
        shape: Shape of the model's weight; of the LoRA's own where the model has none.
        status: `applied`: the LoRA's factors fit the layer. `missing`: the layer changed and the LoRA has no
            module for it. `unmatched`: the model has no such layer. `wrong_shape`: it has, with other sizes.
        rank: Rank of the LoRA's factors; None where there are none.
        delta_norm: ‖ΔW‖ of the model; 0 for an unmatched module.
        error_norm: ‖ΔW − s·BA‖ of the stored factors. Without fitting factors it is ‖ΔW‖; where the layer
            did not change it is ‖s·BA‖, what the LoRA adds to it.
        relative_error: `error_norm` / `delta_norm`; None where ΔW = 0, which leaves only the absolute error.
        detail: What does not fit, in words.
        kind: What the LoRA holds for it: `lora` for factors, `loha`, `lokr`, `dora`, `diff`, …
    """

    name: str
    shape: tuple[int, ...]
    status: Status
    rank: int | None
    delta_norm: float
    error_norm: float
    detail: str | None = None
    kind: str | None = None

    @property
    def relative_error(self) -> float | None:
        """See the class."""
        return self.error_norm / self.delta_norm if self.delta_norm > 0 else None

    @property
    def band(self) -> Band | None:
        """The band of the relative error; None where there is none."""
        return None if self.relative_error is None else band_of(self.relative_error)

    @property
    def block(self) -> str:
        """The block that the layer is in; the VAE is one."""
        return "vae" if self.name.startswith(_VAE) else block_of_module(self.name)

    @property
    def order(self) -> tuple[object, ...]:
        """Sorting key: by block in the order in which a latent passes them, then by name, 2 before 10."""
        return block_position(self.block), layer_order(self.name)[1]

    def as_dict(self) -> dict[str, Any]:
        """The module as JSON values."""
        return asdict(self) | {"relative_error": self.relative_error, "band": self.band}


@dataclass(frozen=True, slots=True)
class BlockError:
    """The modules of one block together.

    Attributes:
        name: Such as `up_blocks.1`.
        modules: How many should be applied.
        applied: How many are.
        ranks: Lowest and highest rank among them; None where none has factors.
        delta_norm: ‖ΔW‖ of all.
        relative_error: Of all together, None where nothing changed.
        average_error: Mean over the applied ones whose layer changed.
        largest_error: Largest among those.
    """

    name: str
    modules: int
    applied: int
    ranks: tuple[int, int] | None
    delta_norm: float
    relative_error: float | None
    average_error: float | None
    largest_error: float | None

    @property
    def band(self) -> Band | None:
        """The band of the block's relative error."""
        return None if self.relative_error is None else band_of(self.relative_error)


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """The result of one validation.

    Attributes:
        base, tuned, lora: The files, as given.
        modules: Every layer that changed and every module of the LoRA, in the model's order.
        unchanged_layers: Layers with ΔW = 0 and without a module: nothing to do for them.
        findings: What else to know.
        seconds: Time of the validation.
    """

    base: Path
    tuned: Path
    lora: Path
    modules: tuple[ModuleError, ...]
    unchanged_layers: int
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def applied(self) -> int:
        """Number of the LoRA's modules that fit a layer of the model."""
        return sum(module.status == "applied" for module in self.modules)

    @property
    def failures(self) -> tuple[ModuleError, ...]:
        """Changed layers without a module, and modules without a fitting layer."""
        return tuple(module for module in self.modules if module.status != "applied")

    @property
    def success_rate(self) -> float:
        """Applied modules in per cent of all that should be: changed layers and the LoRA's modules together."""
        return 100.0 * self.applied / len(self.modules)

    @property
    def relative_error(self) -> float | None:
        """‖ΔW − s·BA‖ / ‖ΔW‖ of all layers together; None when a LoRA is measured against no change at all."""
        return overall_error(self.modules)

    @property
    def fidelity(self) -> float | None:
        """How much of the change the LoRA reproduces, 0-100: 100·(1 − relative error), and 0 from an error of 100 % on."""
        return None if self.relative_error is None else 100.0 * max(0.0, 1.0 - self.relative_error)

    @property
    def average_error(self) -> float | None:
        """Mean relative error of the applied modules whose layer changed."""
        return mean(applied_errors(self.modules))

    @property
    def band(self) -> Band | None:
        """The band of the overall relative error."""
        return None if self.relative_error is None else band_of(self.relative_error)

    @property
    def bands(self) -> dict[Band, int]:
        """How many applied modules fall into each band."""
        bands = [module.band for module in self.modules if module.status == "applied"]
        return {band: bands.count(band) for band in BANDS}

    @property
    def blocks(self) -> tuple[BlockError, ...]:
        """One summary a block, in the model's order."""
        return summarise_blocks(self.modules)

    @property
    def worst(self) -> tuple[ModuleError, ...]:
        """The ten applied modules with the largest relative errors, largest first."""
        measured = [module for module in self.modules if module.status == "applied" and module.delta_norm > 0]
        return tuple(sorted(measured, key=lambda module: -module.error_norm / module.delta_norm)[:_WORST])

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The layers that the LoRA changes, without biases and norms: what `lora_layer_names.txt` lists."""
        applied = [module for module in self.modules if module.status == "applied"]
        return tuple(module.name for module in applied if len(module.shape) > 1)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values, totals first."""
        return {
            "base": str(self.base),
            "tuned": str(self.tuned),
            "lora": str(self.lora),
            "fidelity": self.fidelity,
            "total_modules": len(self.modules),
            "applied": self.applied,
            "success_rate": self.success_rate,
            "relative_error": self.relative_error,
            "average_error": self.average_error,
            "band": self.band,
            "bands": self.bands,
            "unchanged_layers": self.unchanged_layers,
            "seconds": self.seconds,
            "blocks": [asdict(block) | {"band": block.band} for block in self.blocks],
            "worst": [module.name for module in self.worst],
            "findings": [asdict(finding) for finding in self.findings],
            "modules": [module.as_dict() for module in self.modules],
        }


def other_model(modules: Sequence[ModuleError]) -> list[Finding]:
    """One finding where the LoRA is for another model: most of it fits no layer, or makes nearly every layer worse.

    No rank is so low that a LoRA makes a layer worse than no LoRA would.
    """
    own = [module for module in modules if module.status != "missing"]
    fitting = [module for module in own if module.status == "applied"]
    worse = [module for module in fitting if module.band == "noise"]
    if len(fitting) < _MOST_OF * len(own):
        message = f"{len(own) - len(fitting)} of its {len(own)} modules fit no layer of this one."
    elif fitting and len(worse) > _NEARLY_ALL * len(fitting):
        message = (
            f"it takes {len(worse)} of {len(fitting)} layers farther from the tuned model than they were."
        )
    else:
        return []
    return [
        Finding(
            id=OTHER_MODEL,
            severity="error",
            message=f"The LoRA is for another model: {message}",
            evidence={"modules": len(own), "fitting": len(fitting), "worse": len(worse)},
            advice="Check that base, tuned model and LoRA belong together, and the LoRA's alpha.",
        )
    ]


def summarise_blocks(modules: Sequence[ModuleError]) -> tuple[BlockError, ...]:
    """One summary a block, in the order in which a latent passes them."""
    ordered = sorted(modules, key=lambda module: block_position(module.block))
    return tuple(_summarise(name, list(group)) for name, group in groupby(ordered, lambda m: m.block))


def _summarise(name: str, modules: Sequence[ModuleError]) -> BlockError:
    errors = applied_errors(modules)
    ranks = [module.rank for module in modules if module.rank is not None]
    return BlockError(
        name=name,
        modules=len(modules),
        applied=sum(module.status == "applied" for module in modules),
        ranks=(min(ranks), max(ranks)) if ranks else None,
        delta_norm=root_sum_square([module.delta_norm for module in modules]),
        relative_error=overall_error(modules),
        average_error=mean(errors),
        largest_error=max(errors, default=None),
    )


def overall_error(modules: Sequence[ModuleError]) -> float | None:
    """‖error‖ / ‖ΔW‖ of several layers together; None when none of them changed."""
    change = root_sum_square([module.delta_norm for module in modules])
    return root_sum_square([module.error_norm for module in modules]) / change if change > 0 else None


def applied_errors(modules: Sequence[ModuleError]) -> list[float]:
    """Relative errors of the applied modules whose layer changed."""
    applied = [module.relative_error for module in modules if module.status == "applied"]
    return [error for error in applied if error is not None]


def mean(values: Sequence[float]) -> float | None:
    """The mean, None of nothing."""
    return fsum(values) / len(values) if values else None


def band_of(relative_error: float) -> Band:
    """The band of a relative error given as a fraction (0.05 is 5 %)."""
    if relative_error < 0.05:
        return "excellent"
    if relative_error < 0.5:
        return "good"
    return "poor" if relative_error <= 1.0 else "noise"


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


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.3g} %"


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


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"


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
