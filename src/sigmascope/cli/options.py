"""Options that several commands share, and what they mean together.

A command takes options one by one, or as a dataclass (`option_groups`). The `lora` commands share `PairFlags` (how to
compare two models) and `RankFlags` (how much rank a LoRA gets). `flag` and the functions after it make the options of
the `lbm` commands, each of which shows them in panels of its own.
"""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args, get_type_hints

import typer

from sigmascope.errors import ConfigError
from sigmascope.files import reason_of
from sigmascope.lora.format_names import FormatName

if TYPE_CHECKING:
    from sigmascope.lora.budget import Budget
    from sigmascope.lora.pairs import PairOptions
    from sigmascope.lora.ranks import RankPolicy, RankRules
    from sigmascope.lora.resize import RankPlan


_PAIR_PANEL = "Models that do not fit each other"
_RANK_PANEL = "Ranks"


def option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take dataclasses: each of their fields becomes an option or argument on the command line.

    A field is annotated like a parameter: `Annotated[int, typer.Option(...)]`.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += _field_parameters(parameter.annotation)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            given = {field.name: values.pop(field.name) for field in fields(group) if field.name in values}
            values[name] = group(**given)
        command(**values)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # as inspect reads it
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _field_parameters(group: Any) -> list[inspect.Parameter]:
    annotations = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=annotations[field.name],
        )
        for field in fields(group)
    ]


def found_model(model: Path | None) -> Path | None:
    """The callback of what takes a model: a name on the hub becomes its folder in the local cache.

    Raises:
        CheckpointError: It is not there; says how to download it.
    """
    if model is None:
        return None
    from sigmascope.checkpoints.hub import local_model

    return local_model(model)


Full = Annotated[
    bool, typer.Option("--full", help="Print every stage, device, tensor and finding, not the verdict alone.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")]
NoKeep = Annotated[
    bool, typer.Option("--no_keep", help="Put the run into no store; else it is kept: sigmascope runs.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show every layer.")]
BasePath = Annotated[
    Path,
    typer.Option(
        "--base_model_path",
        help="The base model: the checkpoint that the LoRA is for, or its hub name.",
        show_default=False,
        callback=found_model,
    ),
]
TunedPath = Annotated[
    Path,
    typer.Option(
        "--tuned_model_path",
        help="The fine-tuned checkpoint, or its hub name.",
        show_default=False,
        callback=found_model,
    ),
]
SaveTo = Annotated[
    Path,
    typer.Option(
        "--save_to", help="The .safetensors file to write. An existing file is replaced.", show_default=False
    ),
]


Statistics = Annotated[
    Path | None,
    typer.Option(
        "--statistics",
        help="A file from lora statistics. The LoRA then minimises the error of the model's output, not that of its weights.",
        show_default=False,
    ),
]
Ridge = Annotated[
    float,
    typer.Option(
        "--ridge",
        help="With statistics: weight of input directions that never occurred, as a share of the mean.",
    ),
]


class Precision(StrEnum):
    """`--save_precision`."""

    FLOAT = "float"
    FP16 = "fp16"
    BF16 = "bf16"


*_FIRST, _LAST = get_args(FormatName)
ONE_OF_FORMATS = f"{', '.join(_FIRST)} or {_LAST}"
"""For the help of `--format`."""
SavePrecision = Annotated[
    Precision | None,
    typer.Option("--save_precision", help="Storage of the factors.", show_default="as in the input"),
]
Format = Annotated[
    FormatName | None,
    typer.Option("--format", metavar="<name>", help=f"{ONE_OF_FORMATS}.", show_default="the input's"),
]


class Unfit(StrEnum):
    """What to do with tensors that cannot be compared."""

    ERROR = "error"
    SKIP = "skip"


class MixedDtypes(StrEnum):
    """`--on_mixed_dtypes`."""

    COMPARE = "compare"
    ERROR = "error"
    SKIP = "skip"


def _pair_option(name: str, help_text: str) -> Any:
    return typer.Option(name, help=help_text, rich_help_panel=_PAIR_PANEL)


@dataclass(frozen=True, kw_only=True)
class PairFlags:
    """Which parts of two models are compared, and what to do where the models do not fit each other."""

    parts: Annotated[
        str,
        typer.Option(
            "--parts",
            metavar="<names>",
            help="Parts to compare, separated by commas: denoiser, denoiser_2, vae, text_encoder, text_encoder_2, "
            "text_encoder_3, other.",
        ),
    ] = "denoiser"
    on_missing: Annotated[
        Unfit,
        _pair_option(
            "--on_missing", "Tensors that one model lacks: refuse them, or leave them out and list them."
        ),
    ] = Unfit.ERROR
    on_shape_change: Annotated[
        Unfit,
        _pair_option("--on_shape_change", "Tensors whose shapes differ: refuse them, or leave them out."),
    ] = Unfit.ERROR
    on_integer: Annotated[
        Unfit, _pair_option("--on_integer", "Integer tensors that differ: refuse them, or leave them out.")
    ] = Unfit.ERROR
    on_mixed_dtypes: Annotated[
        MixedDtypes,
        _pair_option(
            "--on_mixed_dtypes", "Tensors stored in two dtypes: compare them, refuse them, or leave them out."
        ),
    ] = MixedDtypes.COMPARE
    variant: Annotated[
        str | None,
        typer.Option(
            "--variant",
            metavar="<name>",
            help="Which files to read if a diffusers folder has several variants: fp16, bf16.",
            show_default="the plain files",
            rich_help_panel=_PAIR_PANEL,
        ),
    ] = None

    def options(self) -> "PairOptions":
        """The flags as `open_pair` takes them.

        Raises:
            ConfigError: A part that is not known.
        """
        from sigmascope.lora.pairs import PairOptions, parts_of

        return PairOptions(
            parts=parts_of(self.parts),
            on_missing=self.on_missing.value,
            on_shape_change=self.on_shape_change.value,
            on_integer=self.on_integer.value,
            on_mixed_dtypes=self.on_mixed_dtypes.value,
            variant=self.variant,
        )


def _rank_option(name: str, help_text: str, metavar: str, default: str | bool = False) -> Any:
    return typer.Option(
        name, help=help_text, metavar=metavar, show_default=default, rich_help_panel=_RANK_PANEL
    )


@dataclass(frozen=True, kw_only=True)
class RankFlags:
    """How much rank a LoRA gets, as typed; None for a flag that was not given."""

    rank: Annotated[
        int | None, _rank_option("--rank", "Rank of Linear layers. 9999: full rank.", "<rank>", default="32")
    ] = None
    conv_rank: Annotated[
        int | None,
        _rank_option(
            "--conv_rank", "Rank of convolutions, including 1×1. 9999: full rank.", "<rank>", default="16"
        ),
    ] = None
    max_size: Annotated[
        str | None,
        _rank_option(
            "--max_size",
            "Choose the best ranks for a file of at most this size, such as 100MB (1 MB is 1024² bytes).",
            "<size>",
        ),
    ] = None
    max_error: Annotated[
        str | None,
        _rank_option(
            "--max_error", "Choose the smallest file with at most this overall error, such as 5%.", "<share>"
        ),
    ] = None
    weight_for: Annotated[
        list[str] | None,
        _rank_option(
            "--weight_for",
            "With --max_size or --max_error: 'mid_block=2' counts the squared error of matching layers twice. Repeatable.",
            "<pattern=n>",
        ),
    ] = None
    rank_method: Annotated[
        str | None,
        _rank_option(
            "--rank_method",
            "Choose each layer's rank from its singular values: energy:0.95, error:5%, sv_fro:0.9, "
            "sv_ratio:20, sv_cumulative:0.8, threshold:0.01, ratio:0.05, quantile:0.9, adaptive_…:0.9. "
            "For convolutions: energy:0.95,conv=0.9.",
            "<name:value>",
        ),
    ] = None
    dynamic_method: Annotated[
        str | None,
        _rank_option(
            "--dynamic_method",
            "Choose ranks as kohya's tools do: sv_ratio, sv_fro, sv_cumulative. --rank is the limit.",
            "<name>",
        ),
    ] = None
    dynamic_param: Annotated[
        float | None, _rank_option("--dynamic_param", "Parameter of --dynamic_method.", "<number>")
    ] = None
    max_rank: Annotated[
        int | None, _rank_option("--max_rank", "The highest rank that a layer may get.", "<rank>")
    ] = None
    max_conv_rank: Annotated[
        int | None, _rank_option("--max_conv_rank", "The highest rank that a convolution may get.", "<rank>")
    ] = None
    min_rank: Annotated[
        int | None,
        _rank_option(
            "--min_rank",
            "The lowest rank that a changed layer may get; 0 may leave layers out. By default, the layers of a model that "
            "samples in many steps get nearly the same rank, unless --statistics or --budget_weights is given.",
            "<rank>",
        ),
    ] = None
    rank_for: Annotated[
        list[str] | None,
        _rank_option(
            "--rank_for",
            "A different rank or method for matching layers: 'up_blocks.*attn1=64'. Repeatable; the last match counts.",
            "<pattern=rank>",
        ),
    ] = None
    exclude: Annotated[
        list[str] | None, _rank_option("--exclude", "Leave out matching layers. Repeatable.", "<pattern>")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ResizeFlags(RankFlags):
    """The same for a LoRA that already has ranks: a flag that is not given leaves them unchanged."""

    rank: Annotated[
        int | None,
        _rank_option(
            "--rank", "Rank of Linear layers. 9999 leaves it as it is.", "<rank>", default="as it is"
        ),
    ] = None
    conv_rank: Annotated[
        int | None,
        _rank_option(
            "--conv_rank",
            "Rank of convolutions, including 1×1. 9999 leaves it as it is.",
            "<rank>",
            default="that of --rank",
        ),
    ] = None
    budget_weights: Annotated[
        str | None,
        _rank_option(
            "--budget_weights",
            "With --max_size or --max_error, how errors count. relative: compared with the size of the layer's change. "
            "plain: as they are. Or a JSON file with a weight for each layer.",
            "<name>",
            default="relative",
        ),
    ] = None

    def plan(self) -> "RankPlan | None":
        """What the flags mean; None if none was given. A rank for Linear layers applies to convolutions too.

        Raises:
            ConfigError: Flags that contradict each other, have no effect, or make no sense.
        """
        from sigmascope.lora.budget import RELATIVE

        default = {"budget_weights": RELATIVE}
        if all(getattr(self, field.name) in (None, [], default.get(field.name)) for field in fields(self)):
            return None
        from sigmascope.lora.ranks import FULL_RANK
        from sigmascope.lora.resize import RankPlan

        rules, budget = rank_choice(self, rank=FULL_RANK, conv_rank=self.rank or FULL_RANK)
        return RankPlan(rules, budget, self.budget_weights or RELATIVE)


class RankChoice(NamedTuple):
    """What the flags mean.

    Attributes:
        rules: The policy of every layer. With a budget, only its overrides and exclusions count.
        budget: The size or error that all layers share, if one was asked for.
    """

    rules: "RankRules"
    budget: "Budget | None"


def rank_choice(flags: RankFlags, *, rank: int = 32, conv_rank: int = 16) -> RankChoice:
    """Turn the flags into rank rules and a budget.

    Args:
        flags: As typed.
        rank: Rank of Linear layers if no flag gives one.
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
    """Refuse two ways to choose ranks at once, and settings of a way that was not chosen."""
    ways = ("max_size", "max_error", "rank_method", "dynamic_method")
    given = [f"--{name}" for name in ways if getattr(flags, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} cannot be used together.", hint="Give one of them.")
    fixed = [f"--{name}" for name in ("rank", "conv_rank") if getattr(flags, name) is not None]
    if given and fixed and flags.dynamic_method is None:
        raise ConfigError(
            f"{fixed[0]} and {given[0]} cannot be used together.",
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
                f"--{name} and --max_{name} set the same limit of --dynamic_method.", hint="Give one of them."
            )
    if flags.weight_for and flags.max_size is None and flags.max_error is None:
        raise ConfigError(
            "--weight_for is for --max_size and --max_error only.",
            hint="Add one of them, or leave --weight_for out.",
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
        min_rank=flags.min_rank,
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


def flag(name: str, help_text: str, panel: str | None = None, **settings: Any) -> Any:
    """An option of one command, in a panel of its help."""
    return typer.Option(name, help=help_text, rich_help_panel=panel, **settings)


def _in_panel(name: str, help_text: str, **settings: Any) -> Callable[..., Any]:
    """An option that each command shows in a panel of its own, and may describe in its own words."""

    def option(panel: str | None = None, help_text: str = help_text) -> Any:
        return typer.Option(name, help=help_text, rich_help_panel=panel, **settings)

    return option


base_model_path = _in_panel(
    "--base_model_path",
    "LBM checkpoint: a .safetensors or .ckpt file, a folder, or a hub name.",
    show_default=False,
    callback=found_model,
)
config_path = _in_panel(
    "--config_path",
    "The model's YAML. By default the one beside the checkpoint, or else LBM's full-size model.",
)
torch_dtype = _in_panel("--torch_dtype", "float32, bf16 or fp16.")
device = _in_panel("--device", "auto, cpu, cuda, cuda:1, mps or xpu.")
tile_size = _in_panel(
    "--tile_size", "Run the VAE in tiles of this many pixels, so that large pictures need little memory."
)
as_json = _in_panel("--json", "Print the outcome as JSON on stdout.")
start_image = _in_panel("--image", "Picture to start from, for pipelines that take one.")
call = _in_panel("--call", "Another argument of the call, such as negative_prompt=blurry. Repeatable.")
offload = _in_panel("--offload", "Keep weights in RAM until needed: none, model, sequential.")
dtype = _in_panel("--dtype", "auto (bf16 on an accelerator, else float32), float32, bf16, fp16.")


def numbers_in(flag: str, text: str) -> tuple[float, ...]:
    """Read `0.7,0.3`.

    Raises:
        ConfigError: A part is not a number.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        hint = f"Separate them by commas: {flag} 0.7,0.3."
        raise ConfigError(f"{flag} {text}: these are not numbers.", hint=hint) from error


def prompts_in(path: Path) -> list[str]:
    """The lines of a text file that are not empty.

    Raises:
        ConfigError: It cannot be read as UTF-8.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--prompts {path} cannot be read ({reason_of(error)}).", hint="Give a UTF-8 file."
        ) from error
    return [line.strip() for line in lines if line.strip()]
