"""Make a part of an LBM model trainable: LoRA factors put in by PEFT, or the denoiser's own weights.

PEFT's layers are put in by exact names, with a rank and alpha each, and taken out again.
"""

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from sigmascope.errors import ConfigError
from sigmascope.lbm.model import LbmModel
from sigmascope.lbm.training.settings import TrainSettings
from sigmascope.lbm.training.target_modules import (
    DENOISER,
    PlannedModule,
    TrainablePlan,
    plan_continued_lora,
    plan_full,
    plan_new_lora,
)
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.reader import load_lora

NamedParameters = list[tuple[str, nn.Parameter]]
PeftLayer = Any
"""peft.tuners.lora.LoraLayer, which has no types of its own."""

ADAPTER = "default"
"""PEFT's name for the factors of a layer."""


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


def _peft_factors(layer: PeftLayer) -> tuple[nn.Parameter, nn.Parameter]:
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight


def _fill(parameter: nn.Parameter, values: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(values.to(parameter))


def fresh_down(shape: tuple[int, ...], seed: int, name: str) -> Tensor:
    """A layer's first down factor: uniform in ±1/√(in·kh·kw), from the seed and the layer's name."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=generator)


def prepare_full(model: LbmModel) -> TrainableFull:
    """Make the denoiser's own weights trainable and freeze everything else.

    Args:
        model: Loaded in float32, which the optimizer needs.
    """
    model.requires_grad_(False)
    model.denoiser.requires_grad_(True)
    return TrainableFull(model)


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
