"""What to compare of two checkpoints, and what to do where they do not fit each other."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

from sigmascope.errors import ConfigError
from sigmascope.lora.models.layout import Part

Decision = Literal["error", "skip"]
DtypeDecision = Literal["compare", "error", "skip"]

PARTS: Final[tuple[Part, ...]] = get_args(Part)
"""Every part of a model, in the order in which they are written about."""


@dataclass(frozen=True, slots=True)
class PairOptions:
    """The choices of `open_pair`. Whatever is skipped is named in the pair's findings.

    Attributes:
        parts: Which parts of the models are compared.
        on_missing: Keys that one side lacks: `error`, or `skip` to compare the others.
        on_shape_change: Tensors whose shapes differ: `error`, or `skip` to compare the others.
        on_integer: Integer and boolean tensors that differ, and weights that are integers: `error` or `skip`.
            Those that are equal on both sides are no obstacle to anything.
        on_mixed_dtypes: Tensors stored in two dtypes: `compare` in the wider precision, `error` or `skip`.
        variant: Which files of a diffusers folder are read where it has several: `fp16` for `*.fp16.safetensors`.

    Raises:
        ConfigError: A value is not known; the message names the flag.
    """

    parts: tuple[Part, ...] = ("denoiser",)
    on_missing: Decision = "error"
    on_shape_change: Decision = "error"
    on_integer: Decision = "error"
    on_mixed_dtypes: DtypeDecision = "compare"
    variant: str | None = None

    def __post_init__(self) -> None:
        parts_of(",".join(self.parts))
        _require("--on_missing", self.on_missing, get_args(Decision))
        _require("--on_shape_change", self.on_shape_change, get_args(Decision))
        _require("--on_integer", self.on_integer, get_args(Decision))
        _require("--on_mixed_dtypes", self.on_mixed_dtypes, get_args(DtypeDecision))


def parts_of(text: str) -> tuple[Part, ...]:
    """Read names of parts with commas between them, such as `denoiser, vae`.

    Raises:
        ConfigError: There is none, or one that is not known.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("--parts names nothing to compare.", hint=f"Name some of {', '.join(PARTS)}.")
    for name in names:
        _require("--parts", name, PARTS)
    return tuple(part for part in PARTS if part in names)


def _require(flag: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{flag} {value} is not known.", hint=f"Use one of: {', '.join(known)}.")
