"""What reports say of a generation that failed: why, the whole way there, and nothing beside the point."""

import contextlib
import html
import re
import time
from typing import Any, get_args

import pytest
from tests.families import generate, make_pipeline

import sigmascope
from sigmascope.records.prompts import PromptPrivacy
from sigmascope.records.run import Run, Stage

SECRET = "Kestrel Vorpal gliding marshes"
WHY = "the input is float32, the weights are float64"
WAY = (
    "test_failed_run.py:{} in run",
    "stable_diffusion/pipeline_stable_diffusion.py:{} in __call__",
    "autoencoders/autoencoder_kl.py:{} in _decode",
    "torch/nn/modules/conv.py:{} in _conv_forward",
)


@pytest.fixture(scope="module", params=get_args(PromptPrivacy))
def run(request: pytest.FixtureRequest) -> Run:
    """Recorded at each privacy: a VAE whose weights are of another dtype."""
    pipeline = make_pipeline("sd15")
    pipeline.vae.double()
    watch = sigmascope.watch(pipeline, prompts=request.param)
    with pytest.raises(RuntimeError), watch:
        generate(pipeline, "sd15", prompt=SECRET)
    recorded: Run = watch.record()
    return recorded


def assert_whole(text: str) -> None:
    flat = re.sub(r"\\(.)", r"\1", " ".join(html.unescape(text).split()))
    for place in WAY:
        assert re.search(re.escape(place).replace(r"\{\}", "[0-9]+"), flat), place
    assert "There are no pictures" not in flat
    assert "What to do" not in flat


def test_markdown_lists_the_types_of_the_models(run: Run) -> None:
    (row,) = (line for line in sigmascope.to_markdown(run).splitlines() if line.startswith("| dtypes |"))
    assert "unet float32" in row
    assert "vae float64" in row


def test_the_page_and_markdown_at_every_privacy(run: Run) -> None:
    for prompts in ("hash", "none"):
        for text in (sigmascope.to_html(run, prompts=prompts), sigmascope.to_markdown(run, prompts=prompts)):
            assert_whole(text)
            assert f"RuntimeError: {WHY} (" in text
            assert not [word for word in SECRET.split() if word in text]


def test_print(run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for full in (False, True):
        run.print(full=full)
        assert_whole(capsys.readouterr().out)


def test_full_repeats_the_message(run: Run) -> None:
    told = html.unescape(sigmascope.to_html(run, prompts="full"))
    assert_whole(told)
    assert ("Input type (float) and bias type (double)" in told) != (WHY in told)


def test_markdown_stays_within_60_lines(run: Run) -> None:
    assert len(sigmascope.to_markdown(run).splitlines()) <= 60


def findings(fail: bool, error: type[BaseException] = RuntimeError) -> set[str]:
    """Of a call in which text encoding takes nearly all of the time, and which may end in an error then."""
    pipeline = make_pipeline("flux")
    pipeline.text_encoder.register_forward_pre_hook(lambda *_: time.sleep(0.5))

    def stop(*_: Any) -> Any:
        raise error(SECRET)

    call: dict[str, Any] = {"callback_on_step_end": stop} if fail else {}
    with sigmascope.watch(pipeline) as watch, contextlib.suppress(error):
        generate(pipeline, "flux", **call)
    return {finding.id for finding in watch.findings}


@pytest.mark.slow
def test_how_fast_it_was_is_beside_the_point_of_a_failure() -> None:
    assert "time.text_encoding_share" in findings(fail=False)
    assert "time.text_encoding_share" not in findings(fail=True)
    assert "time.text_encoding_share" in findings(fail=True, error=KeyboardInterrupt)


def test_an_error_is_told_of_the_innermost_stage_that_it_passed_through() -> None:
    inner = Stage("latent_decoding", 0.0, 1.0, False, "RuntimeError: no")
    outer = Stage("generation", 0.0, 1.0, False, "RuntimeError: no", children=(inner,))
    text = sigmascope.to_html(
        Run("id", "run", "2026-01-01T00:00:00+00:00", 2.0, stages=(outer, outer)), prompts="full"
    )
    assert text.count("latent_decoding failed: RuntimeError: no") == 2
    assert "generation failed: RuntimeError" not in text
