import subprocess
import sys
from typing import Any

import pytest
import torch
from tests.families import generate, make_pipeline
from tests.integrations.diffusers.marks import left_behind, marks
from torch import Tensor

import sigmascope

BEFORE_DIFFUSERS = """
import sys, sigmascope
with sigmascope.watch() as run:
    assert "diffusers" not in sys.modules
    from tests.families import generate, make_pipeline
    generate(make_pipeline("flux"), "flux")
print(len(run.stage("denoising").steps), [stage.name for stage in run.stages])
"""


def test_a_pipeline_that_was_made_before_is_watched(pipeline: Any, unwatched: Tensor) -> None:
    before = marks(pipeline)
    with sigmascope.watch() as run:
        image = generate(pipeline, "sd15")
    assert torch.equal(image, unwatched)
    assert len(run.stage("denoising").steps) == 2
    assert marks(pipeline) == before
    assert left_behind() == []


def test_a_pipeline_that_is_made_inside_is_watched() -> None:
    with sigmascope.watch() as run:
        generate(make_pipeline("wan"), "wan")
    assert run.stage("generation").facts["pipeline"]["class_name"] == "WanPipeline"


def test_all_pipelines_of_a_block_are_in_one_run(pipeline: Any) -> None:
    with sigmascope.watch() as run:
        generate(pipeline, "sd15")
        generate(make_pipeline("flux"), "flux")
        generate(pipeline, "sd15")
    classes = [stage.facts["pipeline"]["class_name"] for stage in run.stages]
    assert classes == ["StableDiffusionPipeline", "FluxPipeline", "StableDiffusionPipeline"]


@pytest.mark.slow
def test_diffusers_may_be_imported_inside() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEFORE_DIFFUSERS], capture_output=True, text=True, check=False
    )
    assert done.stdout.split(maxsplit=1) == ["2", "['generation']\n"], done.stderr


def test_a_named_pipeline_is_watched_and_no_other(pipeline: Any) -> None:
    other = make_pipeline("sd15")
    with sigmascope.watch(pipeline) as run:
        generate(other, "sd15")
        generate(pipeline, "sd15")
    assert [stage.name for stage in run.stages] == ["generation"]
