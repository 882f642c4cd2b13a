"""Which layers are trained, with which rank, and what stays frozen.

`select_layers` finds the layers that the partial names of `trainable_lora_modules` mean. `plan_rows` gives the table
of what a run trains and what stays frozen, by block and kind of layer.
"""

import difflib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from sigmascope.errors import ConfigError, LoraFormatError, ModelMismatchError
from sigmascope.lbm.model import LbmModel
from sigmascope.lora.apply import Layer, match_modules
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.layers import block_of_module, block_position
from sigmascope.lora.linalg import matrix_shape

DENOISER = "denoiser."
KEY = "trainable_lora_modules"
_NAMED = 5
"""How many modules an error names."""
_KINDS = (
    ("attn1", "self-attention"),
    ("attn2", "cross-attention"),
    (".ff.", "feed-forward"),
    ("proj_in", "projection"),
    ("proj_out", "projection"),
    ("time_emb", "time embedding"),
)
"""Of Linear layers, by a part of the name."""


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


@dataclass(frozen=True)
class TrainablePlan:
    """What a run trains and what it leaves alone.

    Attributes:
        modules: Every layer with a LoRA, in the model's order; none in full fine-tuning.
        rows: The table, by block and kind of layer; its frozen parameters add up to all that stays as it is.
        factors: What a continued file holds, by layer; empty for a fresh LoRA.
        metadata: The continued file's header.
    """

    modules: Mapping[str, PlannedModule]
    rows: tuple[PlanRow, ...]
    factors: Mapping[str, LoraFactors] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the layers whose LoRA is trained."""
        return tuple(name for name, module in self.modules.items() if module.trained)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the layers whose LoRA acts but stays as it is."""
        return tuple(name for name, module in self.modules.items() if not module.trained)

    @property
    def trained_parameters(self) -> int:
        """Values that the optimizer changes."""
        return sum(row.trained_parameters for row in self.rows)

    @property
    def frozen_parameters(self) -> int:
        """Values of the model, and of frozen LoRA factors, that stay as they are."""
        return sum(row.frozen_parameters for row in self.rows)


def plan_new_lora(
    model: LbmModel,
    patterns: Sequence[str] | None,
    *,
    rank: int,
    conv_rank: int | None = None,
    alpha: float | None = None,
) -> TrainablePlan:
    """Plan a fresh LoRA.

    Args:
        model: Without adapters.
        patterns: Partial names of the layers to train; None for all.
        rank: Of Linear layers; capped at min(out, in), beyond which it could say nothing more.
        conv_rank: Of convolutions, 1×1 ones too; capped at min(out, in·kh·kw). None is `rank`.
        alpha: The strength of every module is alpha / `rank`; None is a strength of 1.

    Raises:
        ConfigError: Names each partial name that means no layer, with near ones.
    """
    layers = denoiser_layers(model)
    chosen = select_layers(list(layers), patterns, where="The denoiser")
    strength = 1.0 if alpha is None else alpha / rank
    modules = {}
    for name in chosen:
        shape = tuple(layers[name].weight.shape)
        asked = rank if len(shape) == 2 or conv_rank is None else conv_rank
        own = min(asked, *matrix_shape(shape))
        modules[name] = PlannedModule(name, shape, own, strength * own)
    return TrainablePlan(modules, plan_rows(model, modules.values()))


def plan_continued_lora(model: LbmModel, lora: LoraFile, patterns: Sequence[str] | None) -> TrainablePlan:
    """Plan to go on with a LoRA file: its factors, ranks and alphas are taken over as they are.

    Args:
        model: Without adapters.
        lora: Of any format that `load_lora` reads.
        patterns: Partial names of the file's modules to train; None for all of them. The others act, frozen.

    Raises:
        ModelMismatchError: A module of the file is no layer of the denoiser, or of another shape; each is counted,
            the first few named.
        LoraFormatError: The file holds changes that are more than up and down factors, or keys of no module; or a
            module to train has alpha 0, whose factors get no gradient.
        ConfigError: Names each partial name that means none of the file's modules.
    """
    _require_whole(lora)
    factors = _factors_by_layer(model, lora)
    everything = denoiser_layers(model)
    names = [name for name in everything if name in factors]
    others = [name for name in everything if name not in factors]
    chosen = set(select_layers(names, patterns, others=others, where=str(lora)))
    modules = {
        name: PlannedModule(
            name, lora_factors.weight_shape, lora_factors.rank, _alpha(lora_factors), trained=name in chosen
        )
        for name, lora_factors in ((name, factors[name]) for name in names)
    }
    _require_strength(lora, [module for module in modules.values() if module.trained])
    return TrainablePlan(modules, plan_rows(model, modules.values()), factors, dict(lora.metadata))


def _require_whole(lora: LoraFile) -> None:
    """Refuse keys that would be lost, because the file that is written has to hold all of it."""
    if lora.unused_keys:
        named = ", ".join(lora.unused_keys[:_NAMED])
        raise LoraFormatError(
            f"{lora}: {len(lora.unused_keys)} keys belong to no module: {named}.",
            hint="Make the file again with sigmascope lora convert, which leaves them out.",
        )


def _factors_by_layer(model: LbmModel, lora: LoraFile) -> dict[str, LoraFactors]:
    paths = {
        id(module): name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }
    factors = {}
    for target in match_modules(model, lora):
        shape = tuple(target.layers[0].weight.shape)
        factors[paths[id(target.layers[0])]] = replace(target.factors, weight_shape=shape)
    outside = [name for name in factors if not name.startswith(DENOISER)]
    if outside:
        raise ModelMismatchError(
            f"{lora}: {len(outside)} modules are not of the denoiser: {', '.join(outside[:_NAMED])}.",
            hint="Only the denoiser is trained: take these modules out of the file.",
        )
    return factors


def _alpha(factors: LoraFactors) -> float:
    """The file's alpha; for "rank 9999" files, which have a strength of 1 whatever they say, the rank."""
    return float(factors.rank) if factors.scale == 1.0 else factors.alpha


def _require_strength(lora: LoraFile, trained: Sequence[PlannedModule]) -> None:
    """Refuse to train what could not change, without a word and for as long as it runs."""
    still = [module.name for module in trained if module.alpha == 0]
    if still:
        raise LoraFormatError(
            f"{lora}: {len(still)} modules have alpha 0, so they could not learn: {', '.join(still[:_NAMED])}.",
            hint="Name the others in trainable_lora_modules, or start a fresh LoRA with rank.",
        )


def plan_full(model: LbmModel) -> TrainablePlan:
    """Plan to train the denoiser's own weights; the VAE stays as it is."""
    return TrainablePlan({}, plan_rows(model, (), full=True))


def denoiser_layers(model: LbmModel) -> dict[str, Layer]:
    """Every Linear and Conv2d of the denoiser by its native name, in the model's order."""
    return {
        f"{DENOISER}{path}": module
        for path, module in model.denoiser.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }


def select_layers(
    layers: Sequence[str], patterns: Sequence[str] | None, *, others: Collection[str] = (), where: str
) -> tuple[str, ...]:
    """Give the layers that any of the partial names is a part of, in the layers' order.

    A partial name may be any run of characters of a full name (`attn1`, `ff.net`, `up_blocks.1`, or a whole line
    of `lora_layer_names.txt`). A number at its end or start is a whole number: `transformer_blocks.1` is not
    `transformer_blocks.10`.

    Args:
        layers: Full names that can be chosen, such as `denoiser.conv_in`.
        patterns: Partial names; None chooses all.
        others: Full names that are known but cannot be chosen, to say so.
        where: What has the layers, for messages.

    Raises:
        ConfigError: Names each partial name that means no layer, with names that are near.
    """
    if patterns is None:
        return tuple(layers)
    chosen: set[str] = set()
    wrong = []
    for pattern in patterns:
        matching = [layer for layer in layers if matches(pattern, layer)]
        chosen.update(matching)
        if not matching:
            wrong.append(_not_found(pattern, layers, others))
    if wrong:
        raise ConfigError(
            f"{KEY}: {'; '.join(wrong)}.",
            hint=f"{where} has {len(layers)} modules, such as {', '.join(list(layers)[:2])}.",
        )
    return tuple(layer for layer in layers if layer in chosen)


def _not_found(pattern: str, layers: Sequence[str], others: Collection[str]) -> str:
    elsewhere = sum(matches(pattern, layer) for layer in others)
    if elsewhere:
        return f"{pattern!r} means {elsewhere} layers of the model, none of which the LoRA file has"
    near = difflib.get_close_matches(pattern, sorted(_runs(layers, pattern.count(".") + 1)), n=2, cutoff=0.5)
    guess = f" (near: {', '.join(near)})" if near else ""
    return f"{pattern!r} is part of no layer's name{guess}"


def _runs(layers: Iterable[str], length: int) -> set[str]:
    """Every run of so many parts between dots."""
    parts = [layer.split(".") for layer in layers]
    return {".".join(words[i : i + length]) for words in parts for i in range(len(words) - length + 1)}


def matches(pattern: str, layer: str) -> bool:
    """Whether a partial name is a part of a full one."""
    if not pattern.strip():
        return False
    before = r"(?<!\d)" if pattern[0].isdigit() else ""
    after = r"(?!\d)" if pattern[-1].isdigit() else ""
    return re.search(f"{before}{re.escape(pattern)}{after}", layer) is not None


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
            row = sums[_block_and_kind(path, module)]
            trained = full and path.startswith("denoiser.")
            row.modules += 1
            row.trained_modules += trained
            row.trained += own if trained else 0
            row.frozen += 0 if trained else own
    for planned_module in planned:
        row = sums[_block_and_kind(planned_module.name, model.get_submodule(planned_module.name))]
        if planned_module.trained:
            row.trained_modules += 1
            row.trained += planned_module.parameters
            row.ranks.add(planned_module.rank)
        else:
            row.frozen += planned_module.parameters
    return tuple(_plan_row(block, kind, sums[block, kind]) for block, kind in sorted(sums, key=_row_order))


@dataclass
class _Sums:
    modules: int = 0
    trained_modules: int = 0
    ranks: set[int] = field(default_factory=set)
    trained: int = 0
    frozen: int = 0


def _block_and_kind(path: str, module: nn.Module) -> tuple[str, str]:
    if path.startswith("vae"):
        return "vae", "all"
    return block_of_module(path), _kind_of_layer(path, module)


def _kind_of_layer(path: str, module: nn.Module) -> str:
    if isinstance(module, nn.Conv2d):
        return "convolution"
    if not isinstance(module, nn.Linear):
        return "norm"
    return next((kind for part, kind in _KINDS if part in path), "linear")


def _plan_row(block: str, kind: str, sums: _Sums) -> PlanRow:
    ranks = tuple(sorted(sums.ranks))
    return PlanRow(block, kind, sums.modules, sums.trained_modules, ranks, sums.trained, sums.frozen)


def _row_order(place: tuple[str, str]) -> tuple[bool, tuple[int, str, int], str]:
    block, kind = place
    return block == "vae", block_position(block), kind
