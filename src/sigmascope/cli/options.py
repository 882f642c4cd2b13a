"""Options that several commands share, and what they mean together.

The `lora` commands' own come first: the files, what is compared of two models (`pair_options`), how much rank a LoRA
gets (`rank_choice`), and what `resize` and `merge` share (`rank_plan`). The functions at the end make the options of
the `lbm` commands, since each command shows them in a panel of its own.
"""

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from sigmascope.errors import ConfigError

if TYPE_CHECKING:
    from sigmascope.lora.budget import Budget
    from sigmascope.lora.pairs import PairOptions
    from sigmascope.lora.ranks import RankPolicy, RankRules
    from sigmascope.lora.resize import RankPlan


_PAIR_PANEL = "Models that do not fit each other"
_RANK_PANEL = "Ranks"


class Precision(StrEnum):
    """`--save_precision`."""

    FLOAT = "float"
    FP16 = "fp16"
    BF16 = "bf16"


class ExtractFormat(StrEnum):
    """`--format` of an extraction."""

    AUTO = "auto"
    NATIVE = "native"
    KOHYA = "kohya"
    PEFT = "peft"
    COMFYUI = "comfyui"


class TargetCoverage(StrEnum):
    """`--target_coverage`."""

    FULL = "full"
    ATTENTION = "attention"
    EXTENDED = "extended"


BasePath = Annotated[
    Path,
    typer.Option(
        "--base_model_path",
        help="Checkpoint that the LoRA is put on.",
        show_default=False,
    ),
]
TunedPath = Annotated[
    Path,
    typer.Option("--tuned_model_path", help="Fine-tuned checkpoint.", show_default=False),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show every layer.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")]


class Unfit(StrEnum):
    """What to do with tensors that cannot be compared."""

    ERROR = "error"
    SKIP = "skip"


class MixedDtypes(StrEnum):
    """`--on_mixed_dtypes`."""

    COMPARE = "compare"
    ERROR = "error"
    SKIP = "skip"


Parts = Annotated[
    str,
    typer.Option(
        "--parts",
        metavar="<names>",
        help="Parts to compare, with commas: denoiser, denoiser_2, vae, text_encoder, text_encoder_2, "
        "text_encoder_3, other.",
    ),
]
OnMissing = Annotated[
    Unfit,
    typer.Option(
        "--on_missing",
        help="Tensors that one model lacks: refuse, or leave them out and name them.",
        rich_help_panel=_PAIR_PANEL,
    ),
]
OnShapeChange = Annotated[
    Unfit,
    typer.Option(
        "--on_shape_change",
        help="Tensors whose shapes differ: refuse, or leave out.",
        rich_help_panel=_PAIR_PANEL,
    ),
]
OnInteger = Annotated[
    Unfit,
    typer.Option(
        "--on_integer", help="Integer tensors that differ: refuse, or leave out.", rich_help_panel=_PAIR_PANEL
    ),
]
OnMixedDtypes = Annotated[
    MixedDtypes,
    typer.Option(
        "--on_mixed_dtypes",
        help="Tensors stored in two dtypes: compare, refuse, or leave out.",
        rich_help_panel=_PAIR_PANEL,
    ),
]
Variant = Annotated[
    str | None,
    typer.Option(
        "--variant",
        metavar="<name>",
        help="Files of diffusers folders to read where there are several: fp16, bf16.",
        show_default="the plain files",
        rich_help_panel=_PAIR_PANEL,
    ),
]


def pair_options(
    parts: str = "denoiser",
    on_missing: Unfit = Unfit.ERROR,
    on_shape_change: Unfit = Unfit.ERROR,
    on_integer: Unfit = Unfit.ERROR,
    on_mixed_dtypes: MixedDtypes = MixedDtypes.COMPARE,
    variant: str | None = None,
) -> "PairOptions":
    """The choices of the command line as `open_pair` takes them.

    Raises:
        ConfigError: A part that is not known.
    """
    from sigmascope.lora.pairs import PairOptions, parts_of

    return PairOptions(
        parts=parts_of(parts),
        on_missing=on_missing.value,
        on_shape_change=on_shape_change.value,
        on_integer=on_integer.value,
        on_mixed_dtypes=on_mixed_dtypes.value,
        variant=variant,
    )


def _rank_option(
    name: str, help_text: str, metavar: str, default: str | bool = False
) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        name, help=help_text, metavar=metavar, show_default=default, rich_help_panel=_RANK_PANEL
    )
    return option


Rank = Annotated[
    int | None, _rank_option("--rank", "Rank of Linear layers. 9999: full rank.", "<rank>", default="32")
]
ConvRank = Annotated[
    int | None,
    _rank_option("--conv_rank", "Rank of convolutions, 1×1 too. 9999: full.", "<rank>", default="16"),
]
MaxSize = Annotated[
    str | None,
    _rank_option(
        "--max_size",
        "Best ranks for a file of at most this size: 100MB. 1 MB is 1 MiB, 1024² bytes.",
        "<size>",
    ),
]
MaxError = Annotated[
    str | None,
    _rank_option("--max_error", "Smallest file with at most this overall error: 5%.", "<share>"),
]
WeightFor = Annotated[
    list[str] | None,
    _rank_option(
        "--weight_for",
        "With a size or error: 'mid_block=2' lets the squared error of these layers count twice. Repeatable.",
        "<pattern=n>",
    ),
]
RankMethod = Annotated[
    str | None,
    _rank_option(
        "--rank_method",
        "A rank for each layer by its own singular values: energy:0.95, error:5%, sv_fro:0.9, "
        "sv_ratio:20, sv_cumulative:0.8, threshold:0.01, ratio:0.05, quantile:0.9, adaptive_…:0.9. "
        "For convolutions: energy:0.95,conv=0.9.",
        "<name:value>",
    ),
]
DynamicMethod = Annotated[
    str | None,
    _rank_option(
        "--dynamic_method",
        "As in kohya's tools: sv_ratio, sv_fro, sv_cumulative. --rank limits it.",
        "<name>",
    ),
]
DynamicParam = Annotated[
    float | None, _rank_option("--dynamic_param", "Parameter of --dynamic_method.", "<number>")
]
MaxRank = Annotated[int | None, _rank_option("--max_rank", "No layer gets more.", "<rank>")]
MaxConvRank = Annotated[int | None, _rank_option("--max_conv_rank", "No convolution gets more.", "<rank>")]
MinRank = Annotated[
    int | None,
    _rank_option("--min_rank", "No changed layer gets less. 0 may leave layers out.", "<rank>"),
]
RankFor = Annotated[
    list[str] | None,
    _rank_option(
        "--rank_for",
        "Another rank or method for layers that match: 'up_blocks.*attn1=64'. Repeatable, the last wins.",
        "<pattern=rank>",
    ),
]
Exclude = Annotated[
    list[str] | None,
    _rank_option("--exclude", "Leave out layers that match. Repeatable.", "<pattern>"),
]


@dataclass(frozen=True, kw_only=True)
class RankFlags:
    """What was typed, None where nothing was."""

    rank: int | None = None
    conv_rank: int | None = None
    max_size: str | None = None
    max_error: str | None = None
    weight_for: list[str] | None = None
    rank_method: str | None = None
    dynamic_method: str | None = None
    dynamic_param: float | None = None
    max_rank: int | None = None
    max_conv_rank: int | None = None
    min_rank: int | None = None
    rank_for: list[str] | None = None
    exclude: list[str] | None = None


class RankChoice(NamedTuple):
    """What the flags mean.

    Attributes:
        rules: The policy of every layer. With a budget, only its overrides and exclusions count.
        budget: What all layers share, if asked for.
    """

    rules: "RankRules"
    budget: "Budget | None"


def rank_choice(flags: RankFlags, *, rank: int = 32, conv_rank: int = 16) -> RankChoice:
    """Turn the flags into rank rules and a budget.

    Args:
        flags: As typed.
        rank: Rank of Linear layers when nothing is asked for.
        conv_rank: The same for convolutions.

    Raises:
        ConfigError: Flags that contradict each other, have no effect, or make no sense.
    """
    from sigmascope.lora.ranks import FULL_RANK, FixedRank, RankRules, parse_overrides

    _require_one_way(flags)
    budget = _budget(flags)
    policy: RankPolicy
    if budget is not None:
        policy = FixedRank(FULL_RANK, FULL_RANK)
    elif flags.rank_method is not None or flags.dynamic_method is not None:
        policy = _rank_policy(flags)
    else:
        _refuse_limits(flags, "a fixed rank")
        policy = FixedRank(
            rank if flags.rank is None else flags.rank,
            conv_rank if flags.conv_rank is None else flags.conv_rank,
        )
    rules = RankRules(policy, parse_overrides(flags.rank_for or []), tuple(flags.exclude or []))
    return RankChoice(rules, budget)


def _require_one_way(flags: RankFlags) -> None:
    """Refuse two answers to how much rank there is, and settings of an answer that was not given."""
    ways = ("max_size", "max_error", "rank_method", "dynamic_method")
    given = [f"--{name}" for name in ways if getattr(flags, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other.", hint="Give one of them.")
    fixed = [f"--{name}" for name in ("rank", "conv_rank") if getattr(flags, name) is not None]
    if given and fixed and flags.dynamic_method is None:
        raise ConfigError(
            f"{fixed[0]} and {given[0]} exclude each other.",
            hint="Limit it with --max_rank and --max_conv_rank, or set single layers with --rank_for.",
        )
    if (flags.dynamic_method is None) != (flags.dynamic_param is None):
        missing = "--dynamic_param" if flags.dynamic_param is None else "--dynamic_method"
        raise ConfigError(
            f"{missing} is missing.", hint="Give --dynamic_method and --dynamic_param together."
        )
    for name in ("rank", "conv_rank"):
        limited = getattr(flags, name) is not None and getattr(flags, f"max_{name}") is not None
        if limited and flags.dynamic_method is not None:
            raise ConfigError(
                f"--{name} and --max_{name} are one limit of --dynamic_method.", hint="Give one of them."
            )
    if flags.weight_for and flags.max_size is None and flags.max_error is None:
        raise ConfigError(
            "--weight_for is for --max_size and --max_error only.", hint="Add one, or leave it out."
        )


def _budget(flags: RankFlags) -> "Budget | None":
    if flags.max_size is None and flags.max_error is None:
        return None
    from sigmascope.lora.budget import Budget, parse_weights
    from sigmascope.units import parse_share, parse_size

    return Budget(
        max_bytes=None if flags.max_size is None else parse_size(flags.max_size, "--max_size"),
        max_error=None if flags.max_error is None else parse_share(flags.max_error, "--max_error"),
        weights=parse_weights(flags.weight_for or []),
        max_rank=flags.max_rank,
        max_conv_rank=flags.max_conv_rank,
        min_rank=flags.min_rank or 0,
    )


def _rank_policy(flags: RankFlags) -> "RankPolicy":
    from sigmascope.lora.ranks import MethodRank, parse_policy

    if flags.dynamic_method is not None:
        text = f"{flags.dynamic_method}:{flags.dynamic_param!r}"
        policy = parse_policy(text, "--dynamic_method")
        # kohya's tools take the rank as the limit of a dynamic method.
        max_rank = flags.rank if flags.max_rank is None else flags.max_rank
        max_conv_rank = flags.conv_rank if flags.max_conv_rank is None else flags.max_conv_rank
    else:
        policy = parse_policy(flags.rank_method or "", "--rank_method")
        max_rank, max_conv_rank = flags.max_rank, flags.max_conv_rank
    if not isinstance(policy, MethodRank):
        _refuse_limits(flags, "a fixed rank")
        return policy
    return replace(
        policy,
        max_rank=policy.max_rank if max_rank is None else max_rank,
        max_conv_rank=policy.max_conv_rank if max_conv_rank is None else max_conv_rank,
        min_rank=policy.min_rank if flags.min_rank is None else flags.min_rank,
    )


def _refuse_limits(flags: RankFlags, what: str) -> None:
    for name in ("max_rank", "max_conv_rank", "min_rank"):
        if getattr(flags, name) is not None:
            raise ConfigError(
                f"--{name} has no effect on {what}.",
                hint="Use it with --rank_method, --max_size or --max_error.",
            )


class LoraFormatName(StrEnum):
    """`--format` of a LoRA that is made from others."""

    NATIVE = "native"
    KOHYA = "kohya"
    PEFT = "peft"
    COMFYUI = "comfyui"


class Method(StrEnum):
    """`--method` of a merge."""

    LINEAR = "linear"
    TIES = "ties"
    TIES_MERGEKIT = "ties_mergekit"
    DARE = "dare"


ReducedRank = Annotated[
    int | None,
    typer.Option(
        "--rank",
        help="Rank of Linear layers. 9999: as it is.",
        metavar="<rank>",
        show_default="as it is",
        rich_help_panel=_RANK_PANEL,
    ),
]
ReducedConvRank = Annotated[
    int | None,
    typer.Option(
        "--conv_rank",
        help="Rank of convolutions, 1×1 too. 9999: as it is.",
        metavar="<rank>",
        show_default="that of --rank",
        rich_help_panel=_RANK_PANEL,
    ),
]
SavePrecision = Annotated[
    Precision | None,
    typer.Option("--save_precision", help="Storage of the factors.", show_default="as in the input"),
]
Format = Annotated[
    LoraFormatName | None,
    typer.Option(
        "--format", metavar="<name>", help="native, kohya, peft or comfyui.", show_default="the input's"
    ),
]
SaveTo = Annotated[
    Path,
    typer.Option("--save_to", help="File to write, .safetensors. Replaced when there.", show_default=False),
]


def rank_plan(flags: RankFlags) -> "RankPlan | None":
    """What the rank flags mean for a LoRA that has ranks already; None where none is given.

    What is not named stays as it is, but a rank for Linear layers holds for convolutions too.

    Raises:
        ConfigError: Flags that contradict each other, have no effect, or make no sense.
    """
    if all(getattr(flags, field.name) in (None, []) for field in fields(flags)):
        return None
    from sigmascope.lora.ranks import FULL_RANK
    from sigmascope.lora.resize import RankPlan

    rules, budget = rank_choice(flags, rank=FULL_RANK, conv_rank=flags.rank or FULL_RANK)
    return RankPlan(rules, budget)


def parse_weights(text: str | None) -> tuple[float, ...] | None:
    """Read `0.7,0.3`.

    Raises:
        ConfigError: A part is no number.
    """
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--weights {text} are no numbers.", hint="Write one for each LoRA: --weights 0.7,0.3."
        ) from error


def base_model_path(panel: str) -> Any:
    """`--base_model_path`: the LBM."""
    return typer.Option(
        "--base_model_path",
        help="LBM checkpoint: .safetensors, .ckpt, or a folder.",
        show_default=False,
        rich_help_panel=panel,
    )


def config_path(panel: str) -> Any:
    """`--config_path`: what the checkpoint is."""
    return typer.Option(
        "--config_path",
        help="The model's YAML; by default the one beside the checkpoint, else the full-size model.",
        rich_help_panel=panel,
    )


def torch_dtype(panel: str) -> Any:
    """`--torch_dtype`: what the model computes in."""
    return typer.Option("--torch_dtype", help="float32, bf16 or fp16.", rich_help_panel=panel)


def device(panel: str, help_text: str = "auto, cpu, cuda, cuda:1, mps or xpu.") -> Any:
    """`--device`: where the model computes."""
    return typer.Option("--device", help=help_text, rich_help_panel=panel)


def tile_size(panel: str) -> Any:
    """`--tile_size`: of the VAE's tiles."""
    return typer.Option(
        "--tile_size",
        help="Run the VAE in tiles of this many pixels: large pictures in little memory.",
        rich_help_panel=panel,
    )


def as_json(panel: str) -> Any:
    """`--json`: for programs."""
    return typer.Option("--json", help="Print the outcome as JSON on stdout.", rich_help_panel=panel)
