"""Options that `resize` and `merge` share, and what they mean together."""

from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sigmascope.cli.lora.options import Precision
from sigmascope.cli.lora.rank_choice import rank_choice
from sigmascope.cli.lora.rank_options import RankFlags
from sigmascope.errors import ConfigError

if TYPE_CHECKING:
    from sigmascope.lora.merging.reduction import RankPlan


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
    DARE = "dare"


_PANEL = "Ranks"

ReducedRank = Annotated[
    int | None,
    typer.Option(
        "--rank",
        help="Rank of Linear layers. 9999: as it is.",
        metavar="<rank>",
        show_default="as it is",
        rich_help_panel=_PANEL,
    ),
]
ReducedConvRank = Annotated[
    int | None,
    typer.Option(
        "--conv_rank",
        help="Rank of convolutions, 1×1 too. 9999: as it is.",
        metavar="<rank>",
        show_default="that of --rank",
        rich_help_panel=_PANEL,
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
    from sigmascope.lora.merging.reduction import RankPlan
    from sigmascope.lora.ranks import FULL_RANK

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
