"""Choose the layers of an LBM to train, and make them trainable: LoRA factors injected by PEFT, or all weights.

PEFT's layers are injected by exact names, each with its own rank and alpha.

`select_layers` finds the layers that the partial names of `trainable_lora_modules` mean. `plan_rows` tabulates what a
run trains and what stays frozen, by block and kind of layer.
"""

import difflib
import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from sigmascope.errors import ConfigError, LoraFormatError, ModelMismatchError
from sigmascope.installation import install_packages
from sigmascope.lbm.model import LbmModel
from sigmascope.lbm.training.settings import TrainSettings
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.layer_names import block_of_module, block_position
from sigmascope.lora.linalg import matrix_shape
from sigmascope.lora.live_layers import Layer, match_modules
from sigmascope.lora.reader import load_lora
from sigmascope.units import counted

NamedParameters = list[tuple[str, nn.Parameter]]
PeftLayer = Any
"""peft.tuners.lora.LoraLayer, which has no types of its own."""
ADAPTER = "default"
"""PEFT's name for the factors of a layer."""
DENOISER = "denoiser."
_KINDS = (
    ("attn1", "self-attention"),
    ("attn2", "cross-attention"),
    (".ff.", "feed-forward"),
    ("proj_in", "projection"),
    ("proj_out", "projection"),
    ("time_emb", "time embedding"),
)
"""Of Linear layers, by a part of the name."""
KEY = "trainable_lora_modules"
_NAMED = 5
"""How many modules an error names."""


@dataclass(frozen=True)
class PlannedModule:
    """One layer that has a LoRA.

    Attributes:
        name: Name of the layer, in native naming: `denoiser.conv_in`.
        weight_shape: (out, in) or (out, in, kh, kw).
        rank: r.
        alpha: The strength is alpha / rank.
        trained: Whether its factors are trained; otherwise they act but stay as in the file.
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


@dataclass
class PlanRow:
    """One line of the table.

    Attributes:
        block: Such as `down_blocks.1`; `vae` for the whole VAE.
        kind: Such as `self-attention` or `convolution`.
        modules: Number of layers.
        trained_modules: Number of layers with trained values.
        ranks: Ranks of the trained LoRA modules, rising, each once.
        trained_parameters: Number of trained values.
        frozen_parameters: Number of frozen values, of the model and of frozen LoRA modules.
    """

    block: str
    kind: str
    modules: int = 0
    trained_modules: int = 0
    ranks: tuple[int, ...] = ()
    trained_parameters: int = 0
    frozen_parameters: int = 0

    @property
    def rank_text(self) -> str:
        """One rank, or the smallest and the largest; empty where nothing has one."""
        if not self.ranks:
            return ""
        first, last = self.ranks[0], self.ranks[-1]
        return str(first) if first == last else f"{first}-{last}"


@dataclass(frozen=True)
class TrainablePlan:
    """What a run trains and what stays frozen.

    Attributes:
        modules: Every layer with a LoRA, in the model's order; none in full fine-tuning.
        rows: The table, by block and kind of layer; its frozen parameters add up to all frozen values.
        factors: Factors of a continued file, by layer; empty for a fresh LoRA.
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


class TrainableLora:
    """LoRA factors inside a denoiser. Made by `inject_lora`.

    Attributes:
        plan: Which layers have factors, and which of these are trained.
    """

    def __init__(self, plan: TrainablePlan, layers: Mapping[str, PeftLayer]) -> None:
        self.plan = plan
        self._layers = dict(layers)

    def parameters(self) -> NamedParameters:
        """The trained factors, float32: `<layer>.lora_down.weight`, `<layer>.lora_up.weight` for each layer."""
        named: NamedParameters = []
        for name in self.plan.trained:
            down, up = _peft_factors(self._layers[name])
            named += [(f"{name}.lora_down.weight", down), (f"{name}.lora_up.weight", up)]
        return named

    def state(self, weights: Mapping[str, Tensor] | None = None) -> LoraFile:
        """The LoRA by layer: copies of the trained factors, and the frozen ones as their file has them.

        Factors have the ranks and alphas of the plan; the writer multiplies the strength into `up`.

        Args:
            weights: Weights to use instead of the model's current ones, by the names of `parameters`.
        """
        trained = dict(self.parameters()) if weights is None else weights
        modules = {}
        for name, module in self.plan.modules.items():
            if not module.trained:
                modules[name] = self.plan.factors[name]
                continue
            factors = (trained[f"{name}.lora_{kind}.weight"] for kind in ("down", "up"))
            down, up = (factor.detach().flatten(1).cpu().clone() for factor in factors)
            modules[name] = LoraFactors(up, down, module.alpha, module.weight_shape)
        return LoraFile(modules)


class TrainableFull:
    """The denoiser's own weights. Made by `prepare_full`."""

    def __init__(self, model: LbmModel) -> None:
        self._model = model

    def parameters(self) -> NamedParameters:
        """Every parameter of the denoiser by its key in the checkpoint."""
        return [
            (f"denoiser.{name}", parameter) for name, parameter in self._model.denoiser.named_parameters()
        ]

    def state(self, weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The whole model by its keys in the checkpoint. The tensors are the model's own, so write them at once.

        Args:
            weights: Weights to use instead of the model's current ones, by the names of `parameters`.
        """
        return {**self._model.state_dict(), **(weights or {})}


Trainable = TrainableLora | TrainableFull
"""What the training loop changes and saves."""


def make_trainable(model: LbmModel, settings: TrainSettings) -> Trainable:
    """Make a LoRA or all weights trainable, as the settings say; see `inject_lora` and `prepare_full`."""
    return prepare_full(model) if settings.full_finetune else inject_lora(model, settings)


def inject_lora(model: LbmModel, settings: TrainSettings) -> TrainableLora:
    """Inject a LoRA into the denoiser, fresh or from `lora_weights_path`; everything else is frozen.

    Factors are float32 over a base of any dtype: in bfloat16, an optimizer step is often too small to change a value. A
    fresh LoRA starts like PEFT's, with a Kaiming-uniform down (a = √5) and a zero up, so that the first step sees the
    base itself. Each layer's down depends only on the seed and the layer's name.

    Args:
        model: Loaded and without adapters. It is changed in place.
        settings: Which layers, ranks and alphas, or the file to continue.

    Raises:
        ConfigError: A partial name means no layer; or PEFT is too old.
        ModelMismatchError: A module of the file fits no layer of the denoiser.
        LoraFormatError: The file is not understood, or holds more than up and down factors.
        CheckpointError: The file is missing or damaged.
    """
    plan = plan_training(model, settings)
    model.requires_grad_(False)
    layers = inject_layers(model.denoiser, list(plan.modules.values()))
    for name, module in plan.modules.items():
        down, up = _peft_factors(layers[name])
        stored = plan.factors.get(name)
        with torch.no_grad():
            if stored is None:
                down.copy_(fresh_down(tuple(down.shape), settings.seed, name))
                up.zero_()
            else:
                down.copy_(stored.down.reshape(down.shape))
                up.copy_(stored.up.reshape(up.shape))
        down.requires_grad_(module.trained)
        up.requires_grad_(module.trained)
    return TrainableLora(plan, layers)


def fresh_down(shape: tuple[int, ...], seed: int, name: str) -> Tensor:
    """A layer's first down factor: uniform in ±1/√(in·kh·kw), from the seed and the layer's name."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=generator)


def _peft_factors(layer: PeftLayer) -> tuple[nn.Parameter, nn.Parameter]:
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight


def prepare_full(model: LbmModel) -> TrainableFull:
    """Make the denoiser's own weights trainable and freeze everything else.

    Args:
        model: Loaded in float32, which the optimizer needs.
    """
    model.requires_grad_(False)
    model.denoiser.requires_grad_(True)
    return TrainableFull(model)


def inject_layers(denoiser: nn.Module, modules: Sequence[PlannedModule]) -> dict[str, PeftLayer]:
    """Replace layers by PEFT's, which hold the layer and two float32 factors with no useful values yet.

    Returns:
        PEFT's layers by the same names.

    Raises:
        ConfigError: The installed PEFT does not give each layer the rank and alpha asked for.
    """
    paths = {module.name: module.name.removeprefix(DENOISER) for module in modules}
    # PEFT tries every pattern on every layer, so layers of one rank share a pattern.
    by_rank: defaultdict[int, list[str]] = defaultdict(list)
    by_alpha: defaultdict[float, list[str]] = defaultdict(list)
    for module in modules:
        by_rank[module.rank].append(paths[module.name])
        by_alpha[module.alpha].append(paths[module.name])
    rank = max(by_rank, key=lambda rank: len(by_rank[rank]))
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=_any_of(paths.values()),
        rank_pattern={_any_of(names): own for own, names in by_rank.items() if own != rank},
        alpha_pattern={_any_of(names): own for own, names in by_alpha.items() if own != rank},
        init_lora_weights=False,
    )
    inject_adapter_in_model(config, denoiser, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    layers: dict[str, PeftLayer] = {name: denoiser.get_submodule(path) for name, path in paths.items()}
    for module in modules:
        layer = layers[module.name]
        # PEFT's factors come without storage, in the base's dtype; ours are float32 beside the base.
        for factor in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
            device = layer.base_layer.weight.device
            empty = torch.empty(factor.weight.shape, dtype=torch.float32, device=device)
            factor.weight = nn.Parameter(empty)
        layer_rank, scaling = layer.r.get(ADAPTER), layer.scaling.get(ADAPTER)
        if layer_rank != module.rank or scaling != module.alpha / module.rank:
            raise ConfigError(
                f"{module.name}: PEFT gave it rank {layer_rank} and strength {scaling}, "
                f"expected {module.rank} and {module.alpha / module.rank}.",
                hint=f"Update PEFT: {install_packages('-U', 'peft')}.",
            )
    return layers


def _any_of(paths: Iterable[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, paths))})"


def plan_training(model: LbmModel, settings: TrainSettings) -> TrainablePlan:
    """Plan what the settings train in a model, without changing it; raises what `inject_lora` does."""
    if settings.full_finetune:
        return TrainablePlan({}, plan_rows(model, (), full=True))
    patterns = settings.trainable_lora_modules
    if settings.lora_weights_path is not None:
        return plan_continued_lora(model, load_lora(Path(settings.lora_weights_path)), patterns)
    assert settings.rank is not None  # the settings refuse a LoRA without a file or a rank
    return plan_new_lora(
        model, patterns, rank=settings.rank, conv_rank=settings.conv_rank, alpha=settings.alpha
    )


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
        rank: Rank of Linear layers, capped at min(out, in), the highest useful rank.
        conv_rank: Rank of convolutions, including 1×1, capped at min(out, in·kh·kw). None for `rank`.
        alpha: The strength of every module is alpha / `rank`; None for a strength of 1.

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
    """Plan to continue a LoRA file with its own factors, ranks and alphas.

    Args:
        model: Without adapters.
        lora: A LoRA of any format that `load_lora` reads.
        patterns: Partial names of the file's modules to train; None for all of them. The others act but are frozen.

    Raises:
        ModelMismatchError: Modules of the file fit no layer of the denoiser; all are counted and the first few named.
        LoraFormatError: The file holds changes that are more than up and down factors, or keys that belong to no
            module; or a module to train has alpha 0, so that its factors get no gradient.
        ConfigError: Names each partial name that means none of the file's modules.
    """
    if lora.unused_keys:  # the file that is written has to hold all of it
        raise LoraFormatError(
            f"{lora}: {counted(len(lora.unused_keys), 'key belongs', 'keys belong')} to no module: {', '.join(lora.unused_keys[:_NAMED])}.",
            hint="Make the file again with sigmascope lora convert, which leaves them out.",
        )
    factors = _factors_by_layer(model, lora)
    everything = denoiser_layers(model)
    names = [name for name in everything if name in factors]
    others = [name for name in everything if name not in factors]
    chosen = set(select_layers(names, patterns, others=others, where=str(lora)))
    modules = {}
    for name in names:
        layer = factors[name]
        # "Rank 9999" files have a strength of 1, whatever alpha they say.
        alpha = float(layer.rank) if layer.scale == 1.0 else layer.alpha
        modules[name] = PlannedModule(name, layer.weight_shape, layer.rank, alpha, trained=name in chosen)
    still = [module.name for module in modules.values() if module.trained and module.alpha == 0]
    if still:
        raise LoraFormatError(
            f"{lora}: {counted(len(still), 'module has', 'modules have')} alpha 0, and would not learn: {', '.join(still[:_NAMED])}.",
            hint="Name the others in trainable_lora_modules, or start a fresh LoRA with rank.",
        )
    return TrainablePlan(modules, plan_rows(model, modules.values()), factors, dict(lora.metadata))


def _factors_by_layer(model: LbmModel, lora: LoraFile) -> dict[str, LoraFactors]:
    paths = {
        id(module): name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }
    factors = {}
    for target in match_modules(model, lora).targets:
        shape = tuple(target.layer.weight.shape)
        factors[paths[id(target.layer)]] = replace(target.factors, weight_shape=shape)
    outside = [name for name in factors if not name.startswith(DENOISER)]
    if outside:
        raise ModelMismatchError(
            f"{lora}: {counted(len(outside), 'module is', 'modules are')} outside the denoiser: {', '.join(outside[:_NAMED])}.",
            hint="Only the denoiser is trained: take these modules out of the file.",
        )
    return factors


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
    """Return the layers whose names contain any of the partial names, in the layers' order.

    A partial name may be any run of characters of a full name (`attn1`, `ff.net`, `up_blocks.1`, or a whole line
    of `lora_layer_names.txt`). A number at its end or start is a whole number: `transformer_blocks.1` is not
    `transformer_blocks.10`.

    Args:
        layers: Full names that can be chosen, such as `denoiser.conv_in`.
        patterns: Partial names; None chooses all.
        others: Full names that exist but cannot be chosen, for messages.
        where: What the layers belong to, for messages.

    Raises:
        ConfigError: Names each partial name that means no layer, with names that are near.
    """
    if patterns is None:
        return tuple(layers)
    chosen: set[str] = set()
    wrong = []
    for pattern in patterns:
        matching = [layer for layer in layers if is_part_of_name(pattern, layer)]
        chosen.update(matching)
        if matching:
            continue
        if elsewhere := sum(is_part_of_name(pattern, layer) for layer in others):
            wrong.append(
                f"{pattern!r} matches {counted(elsewhere, 'layer')} of the model, but none in the LoRA file"
            )
            continue
        # Every run of as many parts between dots as the pattern has.
        parts, length = [layer.split(".") for layer in layers], pattern.count(".") + 1
        runs = {".".join(words[i : i + length]) for words in parts for i in range(len(words) - length + 1)}
        near = difflib.get_close_matches(pattern, sorted(runs), n=2, cutoff=0.5)
        guess = f" (near: {', '.join(near)})" if near else ""
        wrong.append(f"{pattern!r} matches no layer's name{guess}")
    if wrong:
        raise ConfigError(
            f"{KEY}: {'; '.join(wrong)}.",
            hint=f"{where} has {counted(len(layers), 'module')}, such as {', '.join(list(layers)[:2])}.",
        )
    return tuple(layer for layer in layers if layer in chosen)


def is_part_of_name(pattern: str, layer: str) -> bool:
    """Whether a partial name is a part of a full one."""
    if not pattern.strip():
        return False
    before = r"(?<!\d)" if pattern[0].isdigit() else ""
    after = r"(?!\d)" if pattern[-1].isdigit() else ""
    return re.search(f"{before}{re.escape(pattern)}{after}", layer) is not None


def plan_rows(
    model: nn.Module, planned: Iterable[PlannedModule], *, full: bool = False
) -> tuple[PlanRow, ...]:
    """Count the parameters of a model and of its planned LoRA, in the order in which a latent passes the blocks."""
    rows: dict[tuple[str, str], PlanRow] = {}

    def row_of(path: str, module: nn.Module) -> PlanRow:
        in_vae = path.startswith("vae")
        place = ("vae", "all") if in_vae else (block_of_module(path), _kind_of_layer(path, module))
        return rows.setdefault(place, PlanRow(*place))

    for path, module in model.named_modules():
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if own:
            row = row_of(path, module)
            row.modules += 1
            if full and path.startswith(DENOISER):
                row.trained_modules += 1
                row.trained_parameters += own
            else:
                row.frozen_parameters += own
    for planned_module in planned:
        row = row_of(planned_module.name, model.get_submodule(planned_module.name))
        if planned_module.trained:
            row.trained_modules += 1
            row.trained_parameters += planned_module.parameters
            row.ranks = tuple(sorted({*row.ranks, planned_module.rank}))
        else:
            row.frozen_parameters += planned_module.parameters
    return tuple(
        sorted(rows.values(), key=lambda row: (row.block == "vae", block_position(row.block), row.kind))
    )


def _kind_of_layer(path: str, module: nn.Module) -> str:
    if isinstance(module, nn.Conv2d):
        return "convolution"
    if not isinstance(module, nn.Linear):
        return "norm"
    return next((kind for part, kind in _KINDS if part in path), "linear")
