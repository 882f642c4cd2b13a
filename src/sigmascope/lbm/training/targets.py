"""Which layers are trained, with which rank, and what stays frozen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from sigmascope.errors import LoraFormatError, ModelMismatchError
from sigmascope.lbm.model import LbmModel
from sigmascope.lbm.training.layer_selection import select_layers
from sigmascope.lbm.training.plan_table import PlannedModule, PlanRow, plan_rows
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.matching import match_modules
from sigmascope.lora.model_layers import Layer
from sigmascope.lora.shapes import matrix_shape

DENOISER = "denoiser."
_NAMED = 5


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


def denoiser_layers(model: LbmModel) -> dict[str, Layer]:
    """Every Linear and Conv2d of the denoiser by its native name, in the model's order."""
    return {
        f"{DENOISER}{path}": module
        for path, module in model.denoiser.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }


def choose_modules(
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


def continue_modules(model: LbmModel, lora: LoraFile, patterns: Sequence[str] | None) -> TrainablePlan:
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
        name: PlannedModule(name, one.weight_shape, one.rank, _alpha(one), trained=name in chosen)
        for name, one in ((name, factors[name]) for name in names)
    }
    _require_strength(lora, [module for module in modules.values() if module.trained])
    return TrainablePlan(modules, plan_rows(model, modules.values()), factors, dict(lora.metadata))


def plan_full(model: LbmModel) -> TrainablePlan:
    """Plan to train the denoiser's own weights; the VAE stays as it is."""
    return TrainablePlan({}, plan_rows(model, (), full=True))


def _require_whole(lora: LoraFile) -> None:
    """Refuse keys that would be lost, because the file that is written has to hold all of it."""
    if lora.unused_keys:
        named = ", ".join(lora.unused_keys[:_NAMED])
        raise LoraFormatError(
            f"{lora}: {len(lora.unused_keys)} keys belong to no module: {named}.",
            hint="Make the file again with sigmascope lora convert, which leaves them out.",
        )


def _require_strength(lora: LoraFile, trained: Sequence[PlannedModule]) -> None:
    """Refuse to train what could not change, without a word and for as long as it runs."""
    still = [module.name for module in trained if module.alpha == 0]
    if still:
        raise LoraFormatError(
            f"{lora}: {len(still)} modules have alpha 0, so they could not learn: {', '.join(still[:_NAMED])}.",
            hint="Name the others in trainable_lora_modules, or start a fresh LoRA with rank.",
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
