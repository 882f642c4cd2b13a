"""A pipeline that fails and quotes its prompt, in whatever spelling, leaves no word of it in a private record."""

from pathlib import Path
from typing import Any

import pytest
from tests.families import generate, make_pipeline
from tests.monitor.fragments import FRAGMENTS, QuotingError, host_calling, told

import sigmascope

PRIVACIES = pytest.mark.parametrize("privacy", ["hash", "none"])


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return make_pipeline("sd15")


def failing(pipeline: Any, fragment: str, part: str, privacy: Any) -> Any:
    """The run of a call that breaks in a part of the pipeline, with an error that quotes the fragment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(getattr(pipeline, part), "forward", host_calling(fragment))
        with (
            pytest.raises(QuotingError) as caught,
            sigmascope.watch(pipeline, prompts=privacy, sample_hz=None) as run,
        ):
            generate(pipeline, "sd15", num_inference_steps=1)
    assert fragment in str(caught.value)  # the host's own error is whole
    return run.record()


@PRIVACIES
@pytest.mark.parametrize("kind", FRAGMENTS)
def test_no_fragment_of_a_prompt_stays(pipeline: Any, kind: str, privacy: Any, tmp_path: Path) -> None:
    run = failing(pipeline, FRAGMENTS[kind], "text_encoder", privacy)
    assert FRAGMENTS[kind] not in told(run, tmp_path)


def test_the_denoiser_s_and_the_vae_s_errors_are_as_private(pipeline: Any, tmp_path: Path) -> None:
    for part in ("unet", "text_encoder"):
        run = failing(pipeline, FRAGMENTS["one word"], part, "hash")
        assert FRAGMENTS["one word"] not in told(run, tmp_path)


def test_type_place_and_causes_stay(pipeline: Any) -> None:
    stage = failing(pipeline, "a red fox", "text_encoder", "hash").stage("text_encoding")
    assert stage.error is not None
    assert stage.error.startswith("QuotingError (")
    assert stage.error.endswith(" in raise_quoting)")
    assert stage.exception_details.type.endswith("fragments.QuotingError")
    trace = stage.exception_details.traceback
    assert ', in encode\n  File "tests/monitor/fragments.py", line ' in trace
    assert "\nKeyError\n\nThe above exception was the direct cause of" in trace
    assert "\nValueError\n\nDuring handling of the above exception" in trace
    assert 'File "diffusers/pipelines/stable_diffusion/' in trace


def test_the_full_record_keeps_message_and_source(pipeline: Any) -> None:
    details = failing(pipeline, "a red fox", "text_encoder", "full").stage("text_encoding").exception_details
    assert "a red fox" in details.message
    assert "raise_quoting('a red fox')" in details.traceback
    assert "The prompt was a red fox." in details.traceback
