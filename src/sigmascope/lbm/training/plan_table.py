"""The table of what a run trains and what stays frozen, by block and kind of layer."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from sigmascope.lora.models.block_names import block_of_module, block_position
from sigmascope.lora.shapes import matrix_shape

_KINDS = (
    ("attn1", "self-attention"),
    ("attn2", "cross-attention"),
    (".ff.", "feed-forward"),
    ("proj_in", "projection"),
    ("proj_out", "projection"),
    ("time_emb", "time embedding"),
)


@dataclass(frozen=True)
class PlannedModule:
    """One layer that has a LoRA.

    Attributes:
        name: Of the layer, in native naming: `denoiser.conv_in`.
        weight_shape: (out, in) or (out, in, kh, kw).
        rank: r.
        alpha: The strength is alpha / rank.
        trained: Whether its factors change; otherwise they act as the file has them.
    """

    name: str
    weight_shape: tuple[int, ...]
    rank: int
    alpha: float
    trained: bool = True

    @property
    def parameters(self) -> int:
        """Values of both factors: r·(out + in·kh·kw)."""
        return self.rank * sum(matrix_shape(self.weight_shape))


@dataclass(frozen=True)
class PlanRow:
    """One line of the table.

    Attributes:
        block: Such as `down_blocks.1`; `vae` for the whole VAE.
        kind: Such as `self-attention` or `convolution`.
        modules: Layers there.
        trained_modules: Of these, layers of which something is trained.
        ranks: Of the trained LoRA modules, rising, each once.
        trained_parameters: Values that are trained.
        frozen_parameters: Values that stay: of the model, and of frozen LoRA modules.
    """

    block: str
    kind: str
    modules: int
    trained_modules: int
    ranks: tuple[int, ...]
    trained_parameters: int
    frozen_parameters: int

    @property
    def rank_text(self) -> str:
        """One rank, or the smallest and the largest; empty where nothing has one."""
        if not self.ranks:
            return ""
        first, last = self.ranks[0], self.ranks[-1]
        return str(first) if first == last else f"{first}-{last}"


@dataclass
class _Sums:
    modules: int = 0
    trained_modules: int = 0
    ranks: set[int] = field(default_factory=set)
    trained: int = 0
    frozen: int = 0


def plan_rows(
    model: nn.Module, planned: Iterable[PlannedModule], *, full: bool = False
) -> tuple[PlanRow, ...]:
    """Count the parameters of a model and of its planned LoRA, in the order in which a latent passes the blocks.

    Args:
        model: With `denoiser` and `vae`, before anything is injected.
        planned: Its layers with a LoRA.
        full: Whether the denoiser's own parameters are trained.
    """
    sums: defaultdict[tuple[str, str], _Sums] = defaultdict(_Sums)
    for path, module in model.named_modules():
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if own:
            row = sums[_place(path, module)]
            trained = full and path.startswith("denoiser.")
            row.modules += 1
            row.trained_modules += trained
            row.trained += own if trained else 0
            row.frozen += 0 if trained else own
    for one in planned:
        row = sums[_place(one.name, model.get_submodule(one.name))]
        if one.trained:
            row.trained_modules += 1
            row.trained += one.parameters
            row.ranks.add(one.rank)
        else:
            row.frozen += one.parameters
    return tuple(_row(block, kind, sums[block, kind]) for block, kind in sorted(sums, key=_order))


def _row(block: str, kind: str, sums: _Sums) -> PlanRow:
    ranks = tuple(sorted(sums.ranks))
    return PlanRow(block, kind, sums.modules, sums.trained_modules, ranks, sums.trained, sums.frozen)


def _place(path: str, module: nn.Module) -> tuple[str, str]:
    if path.startswith("vae"):
        return "vae", "all"
    return block_of_module(path), _kind(path, module)


def _kind(path: str, module: nn.Module) -> str:
    if isinstance(module, nn.Conv2d):
        return "convolution"
    if not isinstance(module, nn.Linear):
        return "norm"
    return next((kind for part, kind in _KINDS if part in path), "linear")


def _order(place: tuple[str, str]) -> tuple[bool, tuple[int, str, int], str]:
    block, kind = place
    return block == "vae", block_position(block), kind
