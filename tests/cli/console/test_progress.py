from sigmascope.cli.console import _shortened


def test_a_long_path_loses_its_beginning_and_what_stands_before_it_stays() -> None:
    path = "denoiser.up_blocks.0.attentions.2.transformer_blocks.8.ff.net.0.proj"
    shown = _shortened(f"error 60.9 % {path}")
    assert shown.startswith("error 60.9 % ")
    assert path.endswith(shown.removeprefix("error 60.9 % "))
    assert len(shown) <= 45


def test_a_short_text_stays_as_it_is() -> None:
    assert _shortened("vae.encoder") == "vae.encoder"
