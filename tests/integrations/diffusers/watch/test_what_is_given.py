"""What is not a pipeline is refused with what to write; a watch that nobody enters says so, once."""

import gc
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from tests.pipeline.bench.pipelines import TinyPipeline
from torch import nn

import sigmascope
from sigmascope.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([TinyPipeline()], "one by one"),
        ((TinyPipeline(), TinyPipeline()), "one by one"),
        ("a name", "name="),
        (TinyPipeline, "is a class"),
        (lambda: None, "with parentheses"),
        ({"unet": nn.Linear(1, 1)}, "is not a pipeline"),
        (torch.ones(1), "is not a pipeline"),
        (7, "is not a pipeline"),
    ],
)
def test_what_is_no_pipeline_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sigmascope.watch(given)
    assert words in str(caught.value)


def test_the_model_to_profile_comes_second() -> None:
    pipeline = TinyPipeline()
    with pytest.raises(ConfigError, match=r"profile_steps\(None, pipe\)"):
        sigmascope.profile_steps(pipeline)
    sigmascope.profile_steps(None, pipeline)


def dropped(*, enter: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch = sigmascope.watch(TinyPipeline(), sample_hz=None)
        if enter:
            with watch:
                pass
        del watch
        gc.collect()
    return [str(warning.message) for warning in caught if "sigmascope" in str(warning.message)]


def test_a_watch_that_nobody_enters_says_how_it_is_written() -> None:
    (told,) = dropped(enter=False)
    assert "with sigmascope.watch(pipe) as run" in told


def test_a_prompt_or_notebook_shows_how_it_is_written() -> None:
    watch = sigmascope.watch(TinyPipeline(), sample_hz=None)
    assert "with sigmascope.watch(pipe) as run" in repr(watch)
    assert not hasattr(watch, "_repr_html_")
    with watch:
        pass
    assert "records nothing" not in repr(watch)


def test_a_watch_that_was_entered_or_decorates_says_nothing() -> None:
    assert dropped(enter=True) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sigmascope.watch()(lambda: None)()
        gc.collect()


SCRIPT = """
import sigmascope
class Pipe: pass
for _ in range(3):
    sigmascope.watch(Pipe())
"""


@pytest.mark.slow
def test_a_script_is_told_once_and_where() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stderr.count("alone records nothing") == 1
    assert "<string>:5: UserWarning" in done.stderr
