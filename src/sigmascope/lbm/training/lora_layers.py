"""Which layers of an LBM are trained, and how they are made trainable: LoRA factors put in by PEFT, or all weights.

PEFT's layers are put in by exact names, with a rank and alpha each, and taken out again.

`select_layers` finds the layers that the partial names of `trainable_lora_modules` mean. `plan_rows` gives the table
of what a run trains and what stays frozen, by block and kind of layer.
"""

import difflib
import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from sigmascope.errors import ConfigError, LoraFormatError, ModelMismatchError
from sigmascope.lbm.model import LbmModel
from sigmascope.lbm.training.settings import TrainSettings
from sigmascope.lora.apply import Layer, match_modules
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.layers import block_of_module, block_position
from sigmascope.lora.linalg import matrix_shape
from sigmascope.lora.reader import load_lora

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


class TrainableLora:
    """LoRA factors inside a denoiser. Made by `inject_lora`.

    Attributes:
        plan: Which layers have factors, and which of these are trained.
    """

    def __init__(self, model: LbmModel, plan: TrainablePlan, layers: Mapping[str, PeftLayer]) -> None:
        self.plan = plan
        self._model = model
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

        Factors have the ranks and alphas of the plan; whoever writes them moves the strength into `up`.

        Args:
            weights: By the names of `parameters`, in place of what the model holds now.
        """
        trained = dict(self.parameters()) if weights is None else weights
        return LoraFile({name: self._state_of(name, trained) for name in self.plan.modules})

    def remove(self) -> None:
        """Take the factors out: the model has its own layers and keys again. A second call does nothing."""
        eject_layers(self._model.denoiser, self._layers)
        self._layers = {}

    def _state_of(self, name: str, trained: Mapping[str, Tensor]) -> LoraFactors:
        module = self.plan.modules[name]
        if not module.trained:
            return self.plan.factors[name]
        factors = (trained[f"{name}.lora_{kind}.weight"] for kind in ("down", "up"))
        down, up = (factor.detach().flatten(1).cpu().clone() for factor in factors)
        return LoraFactors(up, down, module.alpha, module.weight_shape)


class TrainableFull:
    """The denoiser's own weights. Made by `prepare_full`.

    Attributes:
        plan: Its table says what is trained.
    """

    def __init__(self, model: LbmModel) -> None:
        self.plan = plan_full(model)
        self._model = model

    def parameters(self) -> NamedParameters:
        """Every parameter of the denoiser by its key in the checkpoint."""
        return [
            (f"denoiser.{name}", parameter) for name, parameter in self._model.denoiser.named_parameters()
        ]

    def state(self, weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The whole model by its keys in the checkpoint. The tensors are the model's own: write them at once.

        Args:
            weights: By the names of `parameters`, in place of what the model holds now.
        """
        return {**self._model.state_dict(), **(weights or {})}

    def remove(self) -> None:
        """Freeze the denoiser again; its weights stay as they are now."""
        self._model.denoiser.requires_grad_(False)


Trainable = TrainableLora | TrainableFull
"""What the training loop changes, saves and takes away again."""


def make_trainable(model: LbmModel, settings: TrainSettings) -> Trainable:
    """Make trainable what the settings ask for; see `inject_lora` and `prepare_full`."""
    return prepare_full(model) if settings.full_finetune else inject_lora(model, settings)


def inject_lora(model: LbmModel, settings: TrainSettings) -> TrainableLora:
    """Put a LoRA into the denoiser, fresh or from `lora_weights_path`; everything else is frozen.

    Factors are float32 over a base of any dtype: in bfloat16 a step of the optimizer is often below what the
    value can hold. A fresh LoRA starts as PEFT's does, down Kaiming-uniform (a = √5) and up zero, so that the first
    step sees the base itself; each layer's down follows from the seed and the layer's name alone.

    Args:
        model: Loaded and without adapters. It is changed in place.
        settings: Which layers, ranks and alphas, or the file to go on with.

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
        if stored is None:
            _fill(down, fresh_down(tuple(down.shape), settings.seed, name))
            _fill(up, torch.zeros(up.shape))
        else:
            _fill(down, stored.down.reshape(down.shape))
            _fill(up, stored.up.reshape(up.shape))
        down.requires_grad_(module.trained)
        up.requires_grad_(module.trained)
    return TrainableLora(model, plan, layers)


def _fill(parameter: nn.Parameter, values: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(values.to(parameter))


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

    Args:
        denoiser: Changed in place.
        modules: The layers by their native names.

    Returns:
        PEFT's layers by the same names.

    Raises:
        ConfigError: The installed PEFT does not give each layer the rank and alpha asked for.
    """
    paths = {module.name: module.name.removeprefix(DENOISER) for module in modules}
    config = _peft_config(modules, paths)
    inject_adapter_in_model(config, denoiser, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    layers = {name: denoiser.get_submodule(path) for name, path in paths.items()}
    for module in modules:
        _materialise(layers[module.name])
        _require_as_planned(layers[module.name], module)
    return layers


def _peft_config(modules: Iterable[PlannedModule], paths: Mapping[str, str]) -> Any:
    """PEFT tries every pattern on every layer, so layers of one rank share a pattern."""
    by_rank: defaultdict[int, list[str]] = defaultdict(list)
    by_alpha: defaultdict[float, list[str]] = defaultdict(list)
    for module in modules:
        by_rank[module.rank].append(paths[module.name])
        by_alpha[module.alpha].append(paths[module.name])
    rank = Counter({key: len(names) for key, names in by_rank.items()}).most_common(1)[0][0]
    return LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=_any_of(list(paths.values())),
        rank_pattern={_any_of(names): own for own, names in by_rank.items() if own != rank},
        alpha_pattern={_any_of(names): own for own, names in by_alpha.items() if own != rank},
        init_lora_weights=False,
    )


def _any_of(paths: Sequence[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, paths))})"


def _materialise(layer: PeftLayer) -> None:
    """PEFT's factors come without storage, in the base's dtype; ours are float32 beside the base."""
    device = layer.base_layer.weight.device
    for factor in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
        empty = torch.empty(factor.weight.shape, dtype=torch.float32, device=device)
        factor.weight = nn.Parameter(empty)


def _require_as_planned(layer: PeftLayer, module: PlannedModule) -> None:
    rank, scaling = layer.r.get(ADAPTER), layer.scaling.get(ADAPTER)
    if rank != module.rank or scaling != module.alpha / module.rank:
        raise ConfigError(
            f"{module.name}: PEFT gave it rank {rank} and strength {scaling}, "
            f"expected {module.rank} and {module.alpha / module.rank}.",
            hint="Update PEFT: pip install -U peft.",
        )


def eject_layers(denoiser: nn.Module, layers: Mapping[str, PeftLayer]) -> None:
    """Put the model's own layers back where PEFT's are; everything is frozen then.

    Args:
        denoiser: As `inject_layers` left it.
        layers: As `inject_layers` gave them.
    """
    for name, layer in layers.items():
        path = name.removeprefix(DENOISER)
        owner, _, child = path.rpartition(".")
        setattr(denoiser.get_submodule(owner), child, layer.base_layer)
    if hasattr(denoiser, "peft_config"):
        del denoiser.peft_config
    denoiser.requires_grad_(False)


def plan_training(model: LbmModel, settings: TrainSettings) -> TrainablePlan:
    """What the settings train in a model, which is not changed; raises what `inject_lora` does."""
    if settings.full_finetune:
        return plan_full(model)
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
