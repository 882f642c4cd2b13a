import pytest

from sigmascope.cli.options import MixedDtypes, Unfit, pair_options
from sigmascope.errors import ConfigError
from sigmascope.lora.pairs import PairOptions


def test_the_defaults_of_the_command_line_are_those_of_the_library() -> None:
    assert pair_options() == PairOptions()


def test_every_choice_reaches_the_library() -> None:
    options = pair_options("text_encoder, vae", Unfit.SKIP, Unfit.SKIP, Unfit.SKIP, MixedDtypes.SKIP, "fp16")
    assert options == PairOptions(("vae", "text_encoder"), "skip", "skip", "skip", "skip", "fp16")


@pytest.mark.parametrize("parts", ["", " , ", "unet", "vae,clip"])
def test_parts_that_are_not_known_are_refused_with_those_that_are(parts: str) -> None:
    with pytest.raises(ConfigError, match=r"--parts .*denoiser, denoiser_2, vae"):
        pair_options(parts)
