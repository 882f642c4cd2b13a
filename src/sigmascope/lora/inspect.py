"""What is in a LoRA file: ranks, strength, spectra, damage, and its header.

`inspect_lora` measures how strong each module is and in how many directions (`ModuleStrength`), and sums it up by block
(`BlockStrength`). Plain factors are measured from r×r matrices; other kinds of change are formed.

`relative_strengths` measures ‖ΔW‖ / ‖W‖ for each weight of a model file, with one weight in memory at a time.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from math import prod, sqrt
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.checkpoints import Checkpoint
from sigmascope.errors import LoraFormatError, NonFiniteError, SigmascopeError
from sigmascope.lora.effect import Effect, finite, weight_norm
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile, TrainingFacts, read_training_facts
from sigmascope.lora.hosts import HostReading, host_findings, host_readings
from sigmascope.lora.layer_names import block_of_module, block_position
from sigmascope.lora.linalg import as_float64, effective_rank, max_rank, root_sum_square, stable_rank
from sigmascope.lora.parallel import run_layers
from sigmascope.lora.reader import open_any_kind
from sigmascope.lora.verdict import LoraVerdict, ModuleVerdict, verdict_finding
from sigmascope.progress import Progress, no_progress
from sigmascope.records.run import Finding
from sigmascope.units import counted

__all__ = ["BlockStrength", "LoraInspection", "ModuleStrength", "inspect_lora"]

_NEAR_ZERO_RATIO: Final = 1e-3
"""A module whose values are this small relative to the median module's has no visible effect."""
_MAX_SPECTRUM_RANK: Final = 512
Problem = Literal["not_finite", "needs_base"]


@dataclass(frozen=True, slots=True)
class ModuleStrength:
    """How strong one module of a LoRA is, and in how many directions.

    Attributes:
        name: Its name in the file.
        kind: `lora` for plain factors, else `loha`, `lokr`, `tucker`, `dora`, `diff` or `set`.
        shape: Of the changed weight.
        rank: Of its factors; None if it has none.
        parameters: Number of stored values.
        alpha: As stored; None unless the factors are plain.
        scale: The factor on up·down, alpha / rank; None unless the factors are plain.
        dtype: Of plain factors, such as `float16`.
        norm: ‖ΔW‖ at strength 1; None if there is a problem.
        singular_values: All min(rank, out, in) of ΔW, falling; empty unless the factors are plain and the spectrum
            was calculated.
        dead_columns: How many columns of up change nothing, because they or their rows of down are zero.
        problem: `not_finite`: it holds NaN or Inf. `needs_base`: what it changes depends on the base weight.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    rank: int | None
    parameters: int
    alpha: float | None = None
    scale: float | None = None
    dtype: str | None = None
    norm: float | None = None
    singular_values: tuple[float, ...] = ()
    dead_columns: int = 0
    problem: Problem | None = None

    @property
    def block(self) -> str:
        """The module's block, named the same in every format."""
        return block_of_module(self.name)

    @property
    def size(self) -> float | None:
        """The root mean square of ΔW's values, ‖ΔW‖ / √(out·in), comparable between layers of any shape."""
        return None if self.norm is None else self.norm / sqrt(max(prod(self.shape), 1))

    @property
    def largest(self) -> float | None:
        """σ₁, the most that the change can add to an input of length 1."""
        return self.singular_values[0] if self.singular_values else None

    @property
    def stable_rank(self) -> float | None:
        """See `sigmascope.lora.linalg.stable_rank`."""
        return stable_rank(self._values) if self.singular_values else None

    @property
    def effective_rank(self) -> float | None:
        """See `sigmascope.lora.linalg.effective_rank`."""
        return effective_rank(self._values) if self.singular_values else None

    def as_dict(self, *, spectrum: bool = False) -> dict[str, Any]:
        """The module as JSON values.

        Args:
            spectrum: Also all singular values.
        """
        fields = asdict(self)
        values = fields.pop("singular_values")
        derived = ("block", "size", "largest", "stable_rank", "effective_rank")
        fields |= {name: getattr(self, name) for name in derived}
        return fields | {"singular_values": list(values)} if spectrum else fields

    @property
    def _values(self) -> Float[Tensor, " k"]:
        return torch.tensor(self.singular_values, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class BlockStrength:
    """The modules of one block together.

    Attributes:
        name: Such as `up_blocks.1`.
        modules: How many there are.
        norm: ‖ΔW‖ of all modules that could be measured; None if none could.
        share: Its share of the whole LoRA's ‖ΔW‖², 0 to 1; None if the norm is None.
        ranks: Lowest and highest rank; None if no module has one.
        effective_rank: Mean over the modules whose spectrum is known; None if there are none.
    """

    name: str
    modules: int
    norm: float | None
    share: float | None
    ranks: tuple[int, int] | None
    effective_rank: float | None


@dataclass(frozen=True, slots=True)
class LoraInspection:
    """What one LoRA file holds.

    Attributes:
        path: The file.
        format: `native`, `kohya`, `peft` or `comfyui`.
        file_bytes: Its size.
        modules: Every module and change, in the file's order.
        unused_keys: Keys that belong to none.
        metadata: The header.
        hosts: What diffusers and ComfyUI make of it.
        findings: `lora_is_zero` or `lora_alpha_zero` if no module changes anything, `lora_hosts_differ` if hosts differ.
    """

    path: Path
    format: str
    file_bytes: int
    modules: tuple[ModuleStrength, ...]
    unused_keys: tuple[str, ...]
    metadata: dict[str, str]
    hosts: tuple[HostReading, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def training(self) -> TrainingFacts:
        """The header, sorted by meaning."""
        return read_training_facts(self.metadata)

    @property
    def parameters(self) -> int:
        """Number of stored values."""
        return sum(module.parameters for module in self.modules)

    @property
    def kinds(self) -> dict[str, int]:
        """How many modules each kind has, plain factors (`lora`) first."""
        counts = Counter(module.kind for module in self.modules)
        return dict(sorted(counts.items(), key=lambda item: (item[0] != "lora", item[0])))

    @property
    def ranks(self) -> dict[int, int]:
        """How many modules have each rank, by rising rank."""
        return dict(sorted(Counter(m.rank for m in self.modules if m.rank is not None).items()))

    @property
    def scales(self) -> dict[float, int]:
        """How many plain modules have each scale alpha / rank, the most frequent first."""
        return dict(Counter(m.scale for m in self.modules if m.scale is not None).most_common())

    @property
    def dtypes(self) -> dict[str, int]:
        """How many plain modules have each dtype, the most frequent first."""
        return dict(Counter(m.dtype for m in self.modules if m.dtype is not None).most_common())

    @property
    def norm(self) -> float | None:
        """‖ΔW‖ of all modules that could be measured; None if none could."""
        return norm_of(self.modules)

    @property
    def not_finite(self) -> tuple[str, ...]:
        """Modules that hold NaN or Inf."""
        return tuple(module.name for module in self.modules if module.problem == "not_finite")

    @property
    def near_zero(self) -> tuple[str, ...]:
        """Modules whose values are zero, or a thousand times smaller than the median module's."""
        sizes = {module.name: module.size for module in self.modules if module.size is not None}
        middle = median(size for size in sizes.values() if size > 0.0) if any(sizes.values()) else 0.0
        return tuple(name for name, size in sizes.items() if size <= _NEAR_ZERO_RATIO * middle)

    @property
    def dead_columns(self) -> dict[str, int]:
        """How many columns change nothing, for each module that has such columns."""
        return {module.name: module.dead_columns for module in self.modules if module.dead_columns}

    @property
    def strongest(self) -> tuple[ModuleStrength, ...]:
        """The ten modules with the largest ‖ΔW‖, largest first."""
        measured = [module for module in self.modules if module.norm is not None]
        return tuple(sorted(measured, key=lambda module: -(module.norm or 0.0))[:10])

    @property
    def blocks(self) -> tuple[BlockStrength, ...]:
        """One summary a block, in the order in which a latent passes them."""
        ordered = sorted(self.modules, key=lambda module: block_position(module.block))
        total = self.norm
        return tuple(
            _block_strength(name, list(group), total) for name, group in groupby(ordered, lambda m: m.block)
        )

    def as_dict(self, *, spectra: bool = False) -> dict[str, Any]:
        """The inspection as JSON values, totals first.

        Args:
            spectra: Also all singular values of every module.
        """
        totals = ("parameters", "norm", "kinds", "ranks", "dtypes", "near_zero", "not_finite", "dead_columns")
        return {
            "path": str(self.path),
            "format": self.format,
            "file_bytes": self.file_bytes,
            "total_modules": len(self.modules),
            **{name: getattr(self, name) for name in totals},
            "unused_keys": list(self.unused_keys),
            "training": asdict(self.training),
            "metadata": self.metadata,
            "hosts": [host.as_dict() for host in self.hosts],
            "findings": [asdict(finding) for finding in self.findings],
            "blocks": [asdict(block) for block in self.blocks],
            "modules": [module.as_dict(spectrum=spectra) for module in self.modules],
        }


def inspect_lora(
    path: str | PathLike[str], *, full_spectrum: bool = False, progress: Progress = no_progress
) -> LoraInspection:
    """Measure every module of a LoRA file, without its model and without forming plain changes.

    Args:
        path: A LoRA in any known format. Of OFT, BOFT and GLoRA, whose change depends on the model's weights, names,
            shapes and ranks are told.
        full_spectrum: Also the singular values of modules of a rank above 512, a second or more each.
        progress: Told after each module.

    Raises:
        CheckpointError: The file is missing, damaged, or no file of tensors.
        LoraFormatError: Its keys follow no known format, or its factors do not fit together.
    """
    with open_any_kind(Path(path)) as lora:
        sizes = {name: sum(lora.shape_of(name)) for name in lora.names}
        strengths: dict[str, ModuleStrength] = {}
        for name, module in run_layers(sizes, lambda name: _measured(lora, name, full_spectrum)):
            strengths[name] = module
            progress(len(strengths), len(sizes), name)
        hosts = host_readings(path)
        return LoraInspection(
            path=Path(path),
            format=lora.format,
            file_bytes=(lora.path or Path(path)).stat().st_size,
            modules=tuple(strengths[name] for name in lora.names),
            unused_keys=lora.unused_keys,
            metadata=dict(lora.metadata),
            hosts=hosts,
            findings=(*_zero_findings(lora, strengths), *host_findings(hosts, Path(path))),
        )


def _zero_findings(lora: LoraFile, strengths: Mapping[str, ModuleStrength]) -> Iterator[Finding]:
    """That the whole file changes nothing, whatever model it is for."""
    if strengths and all(module.norm == 0.0 for module in strengths.values()):
        by_alpha = all(getattr(lora.change(name), "scale", None) == 0.0 for name in strengths)
        yield verdict_finding(
            "lora_alpha_zero" if by_alpha else "lora_is_zero",
            {"modules": len(strengths), "norm": 0.0},
            modules=counted(len(strengths), "module"),
        )


def _measured(lora: LoraFile, name: str, full_spectrum: bool) -> ModuleStrength:
    facts = lora.facts[name]
    module = ModuleStrength(name, facts.kind, facts.weight_shape, facts.rank, facts.parameters)
    try:
        change = lora.change(name)
        if isinstance(change, LoraFactors):
            return _with_spectrum(module, change, full_spectrum)
        if getattr(change, "needs_base", False):
            return replace(module, problem="needs_base")
        return replace(module, norm=change.frobenius_norm())
    except NonFiniteError:
        return replace(module, problem="not_finite")


def _with_spectrum(module: ModuleStrength, factors: LoraFactors, full: bool) -> ModuleStrength:
    """Measure plain factors from r×r matrices. Above rank 512 the spectrum is slow, and left out unless `full`."""
    full = full or min(factors.rank, max_rank(factors.weight_shape)) <= _MAX_SPECTRUM_RANK
    values = factors.singular_values().tolist() if full else []
    return replace(
        module,
        alpha=factors.alpha,
        scale=factors.scale,
        dtype=str(factors.up.dtype).removeprefix("torch."),
        norm=root_sum_square(values) if full else factors.frobenius_norm(),
        singular_values=tuple(values),
        dead_columns=_dead_columns(factors),
    )


def _dead_columns(factors: LoraFactors) -> int:
    columns = as_float64(factors.up).abs().amax(dim=0)
    rows = as_float64(factors.down).abs().amax(dim=1)
    return int(((columns == 0.0) | (rows == 0.0)).sum())


def _block_strength(name: str, modules: list[ModuleStrength], total: float | None) -> BlockStrength:
    """Sum up the modules of one block; `total` is the whole LoRA's norm."""
    norm = norm_of(modules)
    ranks = [module.rank for module in modules if module.rank is not None]
    effective = [rank for module in modules if (rank := module.effective_rank) is not None]
    return BlockStrength(
        name=name,
        modules=len(modules),
        norm=norm,
        share=None if norm is None else (norm / total) ** 2 if total else 0.0,
        ranks=(min(ranks), max(ranks)) if ranks else None,
        effective_rank=sum(effective) / len(effective) if effective else None,
    )


def norm_of(modules: Sequence[ModuleStrength]) -> float | None:
    """‖ΔW‖ of all modules that could be measured; None if none could, 0 if there are no modules."""
    measured = [module.norm for module in modules if module.norm is not None]
    return root_sum_square(measured) if measured or not modules else None


def relative_strengths(
    lora: str | PathLike[str], verdict: LoraVerdict, model: Checkpoint, *, progress: Progress = no_progress
) -> Mapping[str, Effect]:
    """Measure ‖ΔW‖ / ‖W‖ for every matching module, at LoRA strength 1.

    Args:
        lora: The file.
        verdict: The verdict on this file and model, with values.
        model: The open checkpoint; only the weights that the LoRA changes are read.
        progress: Called after each module.

    Returns:
        The effects by the file's module names. For a fused module, ‖W‖ is that of all its weights together.
    """
    effects: dict[str, Effect] = {}
    with open_any_kind(Path(lora)) as file:
        for module in verdict.matched:
            effects[module.name] = _effect(file, module, model)
            progress(len(effects), len(verdict.matched), module.name)
    return effects


def _effect(lora: LoraFile, module: ModuleVerdict, model: Checkpoint) -> Effect:
    try:
        whole = root_sum_square([weight_norm(model.tensor(key)) for key in module.layers])
        delta = module.norm if module.norm is not None else _norm_beside_base(lora, module, model)
    except SigmascopeError as error:
        missing = "delta_norm" if module.norm is None else "weight_norm"
        unavailable = dict.fromkeys((missing, "relative_change"), error.message)
        return Effect(module.norm, None, None, True, 1, unavailable=unavailable)
    if whole == 0.0:
        return Effect(delta, None, whole, True, 1, unavailable={"relative_change": "the weight is all zeros"})
    return Effect(delta, delta / whole, whole, True, 1)


def _norm_beside_base(lora: LoraFile, module: ModuleVerdict, model: Checkpoint) -> float:
    """‖ΔW‖ of a change that depends on the base weight."""
    if module.finite is False:
        raise LoraFormatError("the module holds NaN or Inf.")
    if len(module.layers) != 1:
        raise LoraFormatError(f"a {module.kind} change of several weights cannot be measured.")
    base = model.tensor(module.layers[0]).to(torch.float64)
    return finite(lora.changes[module.name].frobenius_norm(base))
