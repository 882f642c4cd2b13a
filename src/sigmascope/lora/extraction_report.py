"""The options of an extraction, the report of what it did, and the YAML file beside the LoRA."""

import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import torch

from sigmascope.errors import ConfigError
from sigmascope.files import require_writable, short_path
from sigmascope.lora.budget import Budget
from sigmascope.lora.file import as_text
from sigmascope.lora.formats import FormatName
from sigmascope.lora.layer_extraction import LeftOutReason
from sigmascope.lora.layer_names import Coverage, layer_order
from sigmascope.lora.pairs import PairOptions, require_one_of
from sigmascope.lora.ranks import FixedRank, RankRules, require_rank
from sigmascope.lora.statistics import RIDGE, require_ridge
from sigmascope.lora.validate import (
    BlockError,
    ModuleError,
    applied_errors,
    mean,
    overall_error,
    summarise_blocks,
)
from sigmascope.lora.writer import STORAGE_DTYPES, SavePrecision
from sigmascope.records.run import Finding

_MOST_SIDECAR_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ExtractOptions:
    """The choices of one extraction.

    Attributes:
        rank: Rank of Linear layers; 9999 keeps everything.
        conv_rank: Rank of convolutions; 9999 keeps everything.
        save_precision: Storage of the factors. fp16 and bf16 take the same space; fp16 rounds eight times
            finer and the factors' balanced scaling keeps them far from its limits, so it is the default.
        min_diff: A layer whose largest change is below this is left out. 0 leaves out unchanged ones only.
        target_coverage: `attention`: the projections of attn1 and attn2. `extended`: also the feed-forward
            layers and proj_in/proj_out around them. `full`: every Linear and convolution layer.
        device: Where to decompose: `auto` (CUDA when there is one, else CPU) or a torch device.
        rules: How much rank each layer gets, in place of `rank` and `conv_rank`.
        budget: What all layers share; of `rules`, only overrides and exclusions then count.
        biases_and_norms: Keep the changes of biases, norms and embeddings too, whole, as `diff`.
        format: Of the LoRA: `native`, `kohya`, `peft`, `comfyui`; `auto` is what the model's own tools read.
        pairing: Which parts of the models are compared, and what may be left out of the comparison.
        workers: Threads on the CPU, one core each; as many as cores when left out.
        budget_weights: How much each layer's squared error counts under a budget: `relative`, as its share of the
            layer's own ‖W‖²; `plain`, as it is; or a JSON file of layers and weights. `statistics` replace it.
        statistics: A file of `sigmascope.lora.statistics`: the error of what the layers put out is least, in place
            of that of their weights.
        ridge: Weight of directions that the statistics never met, as a share of the mean.

    Raises:
        ConfigError: A value makes no sense; the message names the flag.
    """

    rank: int = 32
    conv_rank: int = 16
    save_precision: SavePrecision = "fp16"
    min_diff: float = 0.0
    target_coverage: Coverage = "full"
    device: str = "auto"
    rules: RankRules | None = None
    budget: Budget | None = None
    biases_and_norms: bool = False
    format: str = "auto"
    pairing: PairOptions = field(default_factory=PairOptions)
    workers: int | None = None
    budget_weights: str = "relative"
    statistics: Path | None = None
    ridge: float = RIDGE

    def __post_init__(self) -> None:
        require_ridge(self.ridge)
        if self.budget_weights != "relative" and (self.budget is None or self.statistics is not None):
            raise ConfigError(
                f"--budget_weights {self.budget_weights} is for a budget without statistics.",
                hint="Add --max_size or --max_error, and leave --statistics out.",
            )
        if self.statistics is not None:
            self.rank_rules.require_for_statistics()
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"--workers {self.workers} does no work.", hint="Use 1 or more.")
        require_rank("--rank", self.rank)
        require_rank("--conv_rank", self.conv_rank)
        require_one_of("--save_precision", self.save_precision, get_args(SavePrecision))
        require_one_of("--target_coverage", self.target_coverage, get_args(Coverage))
        if not (math.isfinite(self.min_diff) and self.min_diff >= 0):
            raise ConfigError(
                f"--min_diff {self.min_diff} is no threshold.", hint="Use 0 or a positive number."
            )

    @property
    def rank_rules(self) -> RankRules:
        """`rules`, or the fixed ranks as such."""
        return self.rules or RankRules(FixedRank(self.rank, self.conv_rank))

    @property
    def fixed_rank(self) -> FixedRank | None:
        """The one rank of all Linear layers and that of all convolutions; None where layers differ."""
        rules = self.rank_rules
        alike = self.budget is None and not rules.overrides and isinstance(rules.default, FixedRank)
        return rules.default if alike and isinstance(rules.default, FixedRank) else None

    def as_dict(self) -> dict[str, Any]:
        """The options as JSON values; `ranks` says in one text how much rank was asked for."""
        bare = replace(self, rules=None, budget=None, statistics=None, budget_weights="relative")
        fields = asdict(bare) | {"budget_weights": self.budget_weights}
        fields["statistics"] = None if self.statistics is None else short_path(self.statistics)
        fixed = self.fixed_rank
        fields |= {
            "rank": None if fixed is None else fixed.rank,
            "conv_rank": None if fixed is None else fixed.conv_rank,
            "ranks": self.asked_rank,
        }
        return {name: value for name, value in fields.items() if name not in {"rules", "budget"}}

    @property
    def asked_rank(self) -> str:
        """Canonical text of how much rank was asked for."""
        if self.budget is None:
            return self.rank_rules.describe()
        patterns = self.rank_rules.describe_patterns()
        return json.dumps({"budget": json.loads(self.budget.describe()), **patterns}, ensure_ascii=False)

    @property
    def storage_dtype(self) -> torch.dtype:
        """The dtype that `save_precision` names."""
        return STORAGE_DTYPES[self.save_precision]


def resolve_device(name: str) -> torch.device:
    """Turn a `--device` value into a device that can be used now.

    Args:
        name: `auto`, `cpu`, `cuda`, `cuda:1`, … MPS is refused: it has no float64, which the errors need.

    Raises:
        ConfigError: No such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, dtype=torch.float64, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # torch raises any of these by device type
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"--device {name} cannot be used: {reason}", hint="Use --device cpu or auto."
        ) from error
    if device.type == "meta":
        raise ConfigError("--device meta holds no values.", hint="Use --device cpu or auto.")
    return device


@dataclass(frozen=True, slots=True)
class ExtractedModule:
    """One layer of the LoRA.

    Attributes:
        name: Path of the layer, such as `denoiser.mid_block.attentions.0.proj_in`.
        shape: Shape of its weight.
        rank: Rank really stored.
        delta_norm: ‖ΔW‖.
        relative_change: ‖ΔW‖ / ‖W‖ of the base; None when the base's weight is all zero.
        error_norm: ‖ΔW − up·down‖ of the stored, rounded factors.
        relative_error: `error_norm` / `delta_norm`.
        kept_energy: Share of ‖ΔW‖² in the singular values that were kept, 0 to 1.
    """

    name: str
    shape: tuple[int, ...]
    rank: int
    delta_norm: float
    relative_change: float | None
    error_norm: float
    relative_error: float
    kept_energy: float


@dataclass(frozen=True, slots=True)
class LeftOutLayer:
    """One layer that is not in the LoRA, and why. An unchanged one needs no factors."""

    name: str
    shape: tuple[int, ...]
    reason: LeftOutReason
    delta_norm: float
    largest_change: float


@dataclass(frozen=True, slots=True)
class ExtractionReport:
    """The result of one extraction.

    Attributes:
        base, tuned: The models, as given.
        lora: The LoRA file that was written.
        sidecar: The YAML beside it.
        format: Of the LoRA file.
        architecture: Family of the model: `lbm`, `sdxl`, …
        options: What was asked for.
        modules: The LoRA's layers, in the model's order.
        left_out: The compared layers that it does not hold.
        diffs: ‖Δ‖ of changed biases, norms and embeddings that are stored whole, by key.
        uncovered: ‖Δ‖ of those that are not, by key; a LoRA of layers does not hold them.
        findings: What to know before using the LoRA.
        seconds: Time of the whole extraction.
        file_bytes: Size of the LoRA file.
        weighted_error: The overall error as the statistics or the budget weigh it, which is what `max_error`
            limits; None where all errors count the same.
    """

    base: Path
    tuned: Path
    lora: Path
    sidecar: Path
    format: FormatName
    architecture: str
    options: ExtractOptions
    modules: tuple[ExtractedModule, ...]
    left_out: tuple[LeftOutLayer, ...]
    diffs: dict[str, float]
    uncovered: dict[str, float]
    findings: tuple[Finding, ...]
    seconds: float
    file_bytes: int
    weighted_error: float | None = None

    @property
    def total_lora_modules(self) -> int:
        """Number of layers in the LoRA."""
        return len(self.modules)

    @property
    def total_analyzed_layers(self) -> int:
        """Number of Linear and convolution layers compared."""
        return len(self.modules) + len(self.left_out)

    @property
    def coverage_percentage(self) -> float:
        """Share of the compared layers that the LoRA holds, 0 to 100."""
        return 100.0 * self.total_lora_modules / self.total_analyzed_layers

    @property
    def errors(self) -> tuple[ModuleError, ...]:
        """The error of every layer that changed, as a validation of this LoRA would find it."""
        kept = [
            ModuleError(
                module.name, module.shape, "applied", module.rank, module.delta_norm, module.error_norm
            )
            for module in self.modules
        ]
        lost = [
            ModuleError(
                layer.name, layer.shape, "missing", None, layer.delta_norm, layer.delta_norm, layer.reason
            )
            for layer in self.left_out
            if layer.reason != "unchanged"
        ]
        return tuple(sorted(kept + lost, key=lambda error: layer_order(error.name)))

    @property
    def blocks(self) -> tuple[BlockError, ...]:
        """One summary a block, in the model's order."""
        return summarise_blocks(self.errors)

    @property
    def relative_error(self) -> float | None:
        """‖ΔW − up·down‖ / ‖ΔW‖ over all compared layers together; a layer left out counts as lost."""
        return overall_error(self.errors)

    @property
    def average_error(self) -> float | None:
        """Mean of the modules' relative errors."""
        return mean(applied_errors(self.errors))

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values, totals first."""
        totals = {
            "total_analyzed_layers": self.total_analyzed_layers,
            "total_lora_modules": self.total_lora_modules,
            "coverage_percentage": self.coverage_percentage,
            "relative_error": self.relative_error,
            "average_error": self.average_error,
            "weighted_error": self.weighted_error,
        }
        fields = asdict(self) | {"options": self.options.as_dict()}
        fields.pop("weighted_error")
        paths = {name: str(fields.pop(name)) for name in ("base", "tuned", "lora", "sidecar")}
        return paths | totals | fields


def sidecar_path(lora: Path) -> Path:
    """`<name>_config.yaml` beside `<name>.safetensors`."""
    return lora.with_name(f"{lora.stem}_config.yaml")


def sidecar_text(report: ExtractionReport) -> str:
    """The side-car's text. Its keys and their order are always the same."""
    fixed = report.options.fixed_rank
    facts = {
        "base_model": as_text(short_path(report.base)),
        "extraction_method": "svd",
        "rank": report.options.asked_rank if fixed is None else fixed.rank,
        "conv_rank": report.options.asked_rank if fixed is None else fixed.conv_rank,
        "architecture": report.architecture,
        "native_naming": report.format == "native",
        "total_analyzed_layers": report.total_analyzed_layers,
        "total_lora_modules": report.total_lora_modules,
        "change_threshold": report.options.min_diff,
        "coverage_percentage": round(report.coverage_percentage, 2),
    }
    return str(require_yaml().safe_dump(facts, sort_keys=False, allow_unicode=True))


def refuse_other_yaml(sidecar: Path) -> None:
    """Refuse to replace a file of the side-car's name that describes no extraction.

    Raises:
        ConfigError: Some file is there without the key `extraction_method`, or it cannot be read.
        WriteError: What is there is a folder, no regular file or write-protected.
    """
    require_writable(sidecar)
    if not sidecar.is_file():
        return
    try:
        with sidecar.open(encoding="utf-8") as stream:
            is_ours = any(
                line.startswith("extraction_method:") for line in stream.readlines(_MOST_SIDECAR_BYTES)
            )
    except (OSError, ValueError):
        is_ours = False
    if not is_ours:
        raise ConfigError(
            f"{sidecar} is where the LoRA's description goes, and the file there is no such description.",
            hint="Choose another name for --save_to, or move that file.",
        )


def require_yaml() -> ModuleType:
    """Import PyYAML, which is needed to describe an extraction.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ConfigError(
            "PyYAML is not installed, and the LoRA's description is YAML.",
            hint='Install it with: pip install "sigmascope[lbm]"',
        ) from error
    return yaml
