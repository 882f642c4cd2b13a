"""Options that say how much rank a LoRA gets, shared by the commands that make one."""

from dataclasses import dataclass
from typing import Annotated

import typer

_PANEL = "Ranks"


def _option(name: str, help_text: str, metavar: str, default: str | bool = False) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        name, help=help_text, metavar=metavar, show_default=default, rich_help_panel=_PANEL
    )
    return option


Rank = Annotated[
    int | None, _option("--rank", "Rank of Linear layers. 9999: full rank.", "<rank>", default="32")
]
ConvRank = Annotated[
    int | None, _option("--conv_rank", "Rank of convolutions, 1×1 too. 9999: full.", "<rank>", default="16")
]
MaxSize = Annotated[
    str | None,
    _option("--max_size", "Best ranks for a file of at most this size: 100MB.", "<size>"),
]
MaxError = Annotated[
    str | None,
    _option("--max_error", "Smallest file with at most this overall error: 5%.", "<share>"),
]
WeightFor = Annotated[
    list[str] | None,
    _option(
        "--weight_for",
        "With a size or error: 'mid_block=2' lets the squared error of these layers count twice. Repeatable.",
        "<pattern=n>",
    ),
]
RankMethod = Annotated[
    str | None,
    _option(
        "--rank_method",
        "A rank for each layer by its own singular values: energy:0.95, error:5%, sv_fro:0.9, "
        "sv_ratio:20, sv_cumulative:0.8, threshold:0.01, ratio:0.05, quantile:0.9, adaptive_…:0.9. "
        "For convolutions: energy:0.95,conv=0.9.",
        "<name:value>",
    ),
]
DynamicMethod = Annotated[
    str | None,
    _option(
        "--dynamic_method",
        "As in kohya's tools: sv_ratio, sv_fro, sv_cumulative. --rank limits it.",
        "<name>",
    ),
]
DynamicParam = Annotated[
    float | None, _option("--dynamic_param", "Parameter of --dynamic_method.", "<number>")
]
MaxRank = Annotated[int | None, _option("--max_rank", "No layer gets more.", "<rank>")]
MaxConvRank = Annotated[int | None, _option("--max_conv_rank", "No convolution gets more.", "<rank>")]
MinRank = Annotated[
    int | None,
    _option("--min_rank", "No changed layer gets less. 0 may leave layers out.", "<rank>"),
]
RankFor = Annotated[
    list[str] | None,
    _option(
        "--rank_for",
        "Another rank or method for layers that match: 'up_blocks.*attn1=64'. Repeatable, the last wins.",
        "<pattern=rank>",
    ),
]
Exclude = Annotated[
    list[str] | None,
    _option("--exclude", "Leave out layers that match. Repeatable.", "<pattern>"),
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
