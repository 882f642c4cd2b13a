"""Copies, pickles and saved files that are made of watched things are what they are without a watch."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.families import generate
from tests.integrations.diffusers.marks import left_behind
from torch import Tensor

import sigmascope


def pickled(thing: Any) -> Any:
    data = pickle.dumps(thing)
    assert b"sigmascope" not in data
    return pickle.loads(data)


def saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    assert b"sigmascope" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


def same_parts(pipeline: Any) -> Any:
    return type(pipeline)(**pipeline.components, requires_safety_checker=False)


def from_pipe(pipeline: Any) -> Any:
    return type(pipeline).from_pipe(pipeline)


def there_and_back(pipeline: Any) -> Any:
    return pipeline.to(torch.float64).to(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, pickled, saved, same_parts, from_pipe, there_and_back]
)
def test_a_pipeline_that_is_copied_while_it_is_watched_makes_the_same(
    copied: Callable[[Any], Any], pipeline: Any, unwatched: Tensor
) -> None:
    with sigmascope.watch(pipeline) as run:
        twin = copied(pipeline)
        twin.set_progress_bar_config(disable=True)
        assert torch.equal(generate(twin, "sd15"), unwatched)
        assert torch.equal(generate(pipeline, "sd15"), unwatched)
    assert torch.equal(generate(twin, "sd15"), unwatched)
    assert dict(run.unavailable) == {}
    assert left_behind() == []


def test_a_pipeline_that_copies_itself_in_a_callback_goes_on(pipeline: Any, unwatched: Tensor) -> None:
    def keep(pipeline: Any, _step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pickled(pipeline)
        copy.deepcopy(pipeline.scheduler)
        return tensors

    with sigmascope.watch(pipeline) as run:
        assert torch.equal(generate(pipeline, "sd15", callback_on_step_end=keep), unwatched)
    assert len(run.stage("denoising").steps) == 2


@pytest.mark.parametrize("name", ["unet", "vae", "text_encoder", "scheduler", "tokenizer"])
def test_a_part_that_is_saved_needs_nothing_of_ours_and_can_be_watched_anew(name: str, pipeline: Any) -> None:
    with sigmascope.watch(pipeline):
        part = pickled(getattr(pipeline, name))
    setattr(pipeline, name, part)
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15")
    assert len(run.stage("denoising").steps) == 2
    assert len(run.stage("text_encoding").children) == 2
    assert "latent_decoding" in [stage.name for stage in run.walk()]


def test_methods_of_watched_classes_can_be_pickled(pipeline: Any) -> None:
    with sigmascope.watch(pipeline):
        assert pickled(pipeline.scheduler.step).__func__ is type(pipeline.scheduler).step
        assert pickled(type(pipeline).__call__) is type(pipeline).__call__


def test_what_was_recorded_can_be_copied_and_pickled(pipeline: Any) -> None:
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15")
    record = run.record()
    assert pickle.loads(pickle.dumps(record)) == copy.deepcopy(record) == record
    assert len(pickle.loads(pickle.dumps(run)).stage("denoising").steps) == 2
