"""Errors of a LoRA by layer and by block, and the bands that say what they mean."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from math import fsum
from typing import Any, Final, Literal

from sigmascope.lora.models.block_names import block_of_module, block_position
from sigmascope.lora.models.layer_names import layer_order
from sigmascope.lora.norms import root_sum_square

Band = Literal["excellent", "good", "poor", "noise"]
Status = Literal["applied", "missing", "unmatched", "wrong_shape"]

BANDS: Final[dict[Band, str]] = {
    "excellent": "< 5 %",
    "good": "5-50 %",
    "poor": "50-100 %",
    "noise": "> 100 %",
}
"""The bands of relative error. In `noise` the LoRA is farther from the change than no LoRA at all."""

_VAE: Final = ("vae.", "first_stage_model.")


def band_of(relative_error: float) -> Band:
    """The band of a relative error given as a fraction (0.05 is 5 %)."""
    if relative_error < 0.05:
        return "excellent"
    if relative_error < 0.5:
        return "good"
    return "poor" if relative_error <= 1.0 else "noise"


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
