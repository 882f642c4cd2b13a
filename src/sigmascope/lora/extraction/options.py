"""What a user may choose when a LoRA is extracted, checked before any file is read."""

import json
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, get_args

import torch

from sigmascope.errors import ConfigError
from sigmascope.lora.models.layer_names import Coverage
from sigmascope.lora.models.pair_options import PairOptions
from sigmascope.lora.names.lora_dtype import STORAGE_DTYPES, SavePrecision
from sigmascope.lora.ranking.budget import Budget
from sigmascope.lora.ranking.rank_rules import RankRules
from sigmascope.lora.ranks import FixedRank, require_rank


@dataclass(frozen=True, slots=True)
class ExtractOptions:
    """The choices of one extraction (SPEC section 7).

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

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"--workers {self.workers} does no work.", hint="Use 1 or more.")
        require_rank("--rank", self.rank)
        require_rank("--conv_rank", self.conv_rank)
        _require_one_of("--save_precision", self.save_precision, get_args(SavePrecision))
        _require_one_of("--target_coverage", self.target_coverage, get_args(Coverage))
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
        fields = asdict(replace(self, rules=None, budget=None))
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


def _require_one_of(flag: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{flag} {value} is not known.", hint=f"Use one of: {', '.join(known)}.")


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
