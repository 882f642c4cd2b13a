"""Options that say what is compared of two models, shared by the commands that compare them."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sigmascope.lora.models.pair_options import PairOptions

_PAIR_PANEL = "Models that do not fit each other"


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
    from sigmascope.lora.models.pair_options import PairOptions, parts_of

    return PairOptions(
        parts=parts_of(parts),
        on_missing=on_missing.value,
        on_shape_change=on_shape_change.value,
        on_integer=on_integer.value,
        on_mixed_dtypes=on_mixed_dtypes.value,
        variant=variant,
    )
