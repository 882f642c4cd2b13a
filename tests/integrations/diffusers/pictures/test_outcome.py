"""What a pipeline gives that no VAE made is looked at once, when the call is over."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.families import generate
from tests.integrations.diffusers.marks import left_behind
from torch import Tensor

import sigmascope
from sigmascope.integrations.diffusers.pictures import outcome_of
from sigmascope.records.run import Finding

NAN = float("nan")


def spoil(_pipeline: Any, step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    if step == 1:
        tensors["latents"][0, 0, 0, :3] = NAN
    return tensors


def not_finite(run: Any) -> list[Finding]:
    return [finding for finding in run.findings if finding.id == "values.not_finite"]


@pytest.mark.parametrize("as_tuple", [False, True])
def test_latents_that_are_given_out_are_looked_at(pipeline: Any, as_tuple: bool) -> None:
    with sigmascope.watch(pipeline) as run:
        latents = generate(
            pipeline, "sd15", output_type="latent", return_dict=not as_tuple, callback_on_step_end=spoil
        )
    (finding,) = not_finite(run)
    assert finding.stage == "denoising"
    assert finding.evidence["nan"] == int(latents.isnan().sum()) == 3
    seen = run.stage("denoising").tensors["output"]
    assert (seen.shape, seen.max) == (tuple(latents.shape), float(latents.nan_to_num(nan=-99.0).max()))
    assert left_behind() == []


def test_latents_that_are_decoded_have_one_finding_as_ever(pipeline: Any) -> None:
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15", callback_on_step_end=spoil)
    (finding,) = not_finite(run)
    assert finding.stage == "latent_decoding"
    assert "output" not in run.stage("denoising").tensors


def test_a_preview_comes_before_what_the_denoising_gives(pipeline: Any) -> None:
    def preview(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        tensors = spoil(pipeline, step, timestep, tensors)
        pipeline.vae.decode(tensors["latents"])
        return tensors

    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15", output_type="latent", num_inference_steps=3, callback_on_step_end=preview)
    (finding,) = not_finite(run)
    assert finding.stage == "latent_decoding"


def test_latents_without_fault_have_no_finding(pipeline: Any) -> None:
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15", output_type="latent")
    assert not_finite(run) == []
    assert run.stage("denoising").tensors["output"].nan_count == 0


PICTURE = torch.arange(6.0).reshape(1, 2, 3)


@pytest.mark.parametrize(
    "result",
    [
        PICTURE,
        (PICTURE, None),
        [PICTURE, PICTURE],
        ([PICTURE],),
        {"images": PICTURE},
        np.arange(6, dtype=np.float32).reshape(1, 2, 3),
        SimpleNamespace(values={"latents": torch.zeros(1), "images": PICTURE}),
    ],
)
def test_an_outcome_is_found_in_whatever_holds_it(result: object) -> None:
    found = outcome_of(result)
    assert isinstance(found, Tensor)
    assert torch.equal(found, PICTURE)


@pytest.mark.parametrize("result", [None, [], (), {}, "latent", ["picture"], np.array(["a"]), object()])
def test_what_holds_none_gives_none(result: object) -> None:
    assert outcome_of(result) is None
