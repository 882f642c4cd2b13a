"""What is in a LoRA file: ranks, strength, spectra, damage, and its header.

`inspect_lora` measures how strong each module is and in how many directions (`ModuleStrength`), and sums it up by block
(`BlockStrength`). Plain factors are measured from r×r matrices; other kinds of change are formed.

`relative_strengths` measures ‖ΔW‖ / ‖W‖ for each weight of a model file, with one weight in memory at a time.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch

from sigmascope.checkpoints import Checkpoint, open_checkpoint
from sigmascope.errors import LoraFormatError, SigmascopeError
from sigmascope.lora.effect import Effect, finite, weight_norm
from sigmascope.lora.file import LoraFile, TrainingFacts, read_training_facts
from sigmascope.lora.file_verdict import LoraVerdict, ModuleVerdict
from sigmascope.lora.health import broken_findings, dead_modules, health_findings
from sigmascope.lora.host_findings import readings_and_findings
from sigmascope.lora.hosts import HostReading
from sigmascope.lora.layer_names import block_position
from sigmascope.lora.linalg import root_sum_square
from sigmascope.lora.module_strength import ModuleStrength, measured_modules
from sigmascope.lora.parallel import run_layers
from sigmascope.lora.reader import lora_in, open_lora
from sigmascope.lora.verdict import verdict_finding
from sigmascope.progress import Progress, no_progress
from sigmascope.records.run import Finding
from sigmascope.units import counted

_RUN: Final = 32
_MOST_IN_RUN: Final = 2**21  # elements

__all__ = ["BlockStrength", "LoraInspection", "ModuleStrength", "inspect_lora"]


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
        broken: The modules that cannot be read, and why; they are not among `modules`.
        hosts: What diffusers and ComfyUI make of it.
        findings: `lora_broken` and `lora_config_unread` where a part of the file cannot be read, `lora_is_zero` or `lora_alpha_zero` if no module changes anything, `lora_hosts_differ` if hosts differ, `lora_alpha_unread` if
            the header alone has the alpha, `lora_lokr_alpha_unread` if it stands where no host reads it.
    """

    path: Path
    format: str
    file_bytes: int
    modules: tuple[ModuleStrength, ...]
    unused_keys: tuple[str, ...]
    metadata: dict[str, str]
    broken: Mapping[str, str] = field(default_factory=dict)
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
        return dead_modules(self.modules)

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
            "broken": dict(self.broken),
            "training": asdict(self.training),
            "metadata": self.metadata,
            "hosts": [host.as_dict() for host in self.hosts],
            "findings": [asdict(finding) for finding in self.findings],
            "blocks": [asdict(block) for block in self.blocks],
            "modules": [module.as_dict(spectrum=spectra) for module in self.modules],
        }


def inspect_lora(
    path: str | PathLike[str],
    *,
    full_spectrum: bool = False,
    family: str | None = None,
    progress: Progress = no_progress,
) -> LoraInspection:
    """Measure every module of a LoRA file, without its model and without forming plain changes.

    Args:
        path: A LoRA in any known format. Of OFT, BOFT and GLoRA, whose change depends on the model's weights, names,
            shapes and ranks are told.
        full_spectrum: Also the singular values of modules of a rank above 512, a second or more each.
        family: Of the model that it is for, such as "sd15": what hosts take depends on it, and a file for text encoders alone
            does not tell it. Not heeded where the file does.
        progress: Told after each module.

    Raises:
        CheckpointError: The file is missing, damaged, or no file of tensors.
        LoraFormatError: Its keys follow no known format, or its factors do not fit together.
    """
    with open_checkpoint(path) as checkpoint:
        # `measured_modules` looks at each number's range too
        lora = lora_in(checkpoint, check_finite=False, allow_broken=True)
        strengths: dict[str, ModuleStrength] = {}
        several = _several(lora)

        def measured(first: str) -> list[ModuleStrength]:
            return measured_modules(lora, several[first], full_spectrum=full_spectrum)

        sizes = {first: max(lora.facts_of(name).parameters for name in several[first]) for first in several}
        for _, found in run_layers(sizes, measured):
            for module in found:
                strengths[module.name] = module
                progress(len(strengths), len(lora.names), module.name)
        modules = tuple(strengths[name] for name in lora.names)
        hosts, hosts_differ = readings_and_findings(lora, checkpoint, family)
        return LoraInspection(
            path=Path(path),
            format=lora.format,
            file_bytes=checkpoint.path.stat().st_size,
            modules=modules,
            unused_keys=lora.unused_keys,
            broken={name: part.why for name, part in lora.broken.items()},
            metadata=dict(lora.metadata),
            hosts=hosts,
            findings=(
                *broken_findings(lora),
                *_zero_findings(lora, strengths),
                *health_findings(modules, lora, checkpoint),
                *hosts_differ,
            ),
        )


def _several(lora: LoraFile) -> dict[str, list[str]]:
    """A file's modules in runs that a thread measures one by one, by the first: a small one alone would wait more than compute.

    A run of large ones is short, since Ctrl-C waits for the runs in work.
    """
    runs: dict[str, list[str]] = {}
    first, elements = "", 0
    for name in lora.names:
        parameters = lora.facts_of(name).parameters
        if not first or len(runs[first]) == _RUN or elements + parameters > _MOST_IN_RUN:
            first, elements = name, 0
            runs[first] = []
        runs[first].append(name)
        elements += parameters
    return runs


def _zero_findings(lora: LoraFile, strengths: Mapping[str, ModuleStrength]) -> Iterator[Finding]:
    """That the whole file changes nothing, whatever model it is for."""
    if strengths and all(module.norm == 0.0 for module in strengths.values()):
        by_alpha = all(getattr(lora.change(name), "scale", None) == 0.0 for name in strengths)
        yield verdict_finding(
            "lora_alpha_zero" if by_alpha else "lora_is_zero",
            {"modules": len(strengths), "norm": 0.0},
            modules=counted(len(strengths), "module"),
        )


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
    with open_lora(Path(lora), allow_broken=True) as file:
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
        unavailable = dict.fromkeys((missing, "relative_change"), str(error).rstrip("."))
        return Effect(module.norm, None, None, True, 1, unavailable=unavailable)
    if whole == 0.0:
        return Effect(delta, None, whole, True, 1, unavailable={"relative_change": "the weight is all zeros"})
    return Effect(delta, delta / whole, whole, True, 1)


def _norm_beside_base(lora: LoraFile, module: ModuleVerdict, model: Checkpoint) -> float:
    """‖ΔW‖ of a change that depends on the base weight."""
    if module.finite is False:
        raise LoraFormatError("the module holds NaN or Inf.")
    parts = [model.tensor(key).to(torch.float64) for key in module.layers]
    return finite(lora.changes[module.name].frobenius_norm(torch.cat(parts)))
