import pytest

from sigmascope.cli.options import MixedDtypes, PairFlags, Unfit
from sigmascope.errors import ConfigError
from sigmascope.lora.pairs import PairOptions


def test_the_defaults_of_the_command_line_are_those_of_the_library() -> None:
    assert PairFlags().options() == PairOptions()


def test_every_choice_reaches_the_library() -> None:
    flags = PairFlags(
        parts="text_encoder, vae",
        on_missing=Unfit.SKIP,
        on_shape_change=Unfit.SKIP,
        on_integer=Unfit.SKIP,
        on_mixed_dtypes=MixedDtypes.SKIP,
        variant="fp16",
    )
    assert flags.options() == PairOptions(("vae", "text_encoder"), "skip", "skip", "skip", "skip", "fp16")


@pytest.mark.parametrize("parts", ["", " , ", "unet", "vae,clip"])
def test_parts_that_are_not_known_are_refused_with_those_that_are(parts: str) -> None:
    with pytest.raises(ConfigError, match=r"--parts .*denoiser, denoiser_2, vae"):
        PairFlags(parts=parts).options()
