import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import generate
from tests.families.pipelines import PROMPT
from tests.integrations.diffusers.marks import left_behind
from torch import Tensor

import sigmascope
from sigmascope.errors import ConfigError
from sigmascope.records.performance import memory_over_time
from sigmascope.records.prompts import prompt_sha256
from sigmascope.records.run import Run


def fail(_pipeline: Any, _step: int, _timestep: Any, _tensors: Any) -> Any:
    raise ValueError(f"cannot draw {PROMPT!r}")


@pytest.mark.parametrize("privacy", ["hash", "none"])
def test_a_private_prompt_is_nowhere_in_the_record(pipeline: Any, privacy: Any, tmp_path: Path) -> None:
    with sigmascope.watch(pipeline, prompts=privacy) as run:
        generate(pipeline, "sd15")
        with pytest.raises(ValueError, match=PROMPT):
            generate(pipeline, "sd15", callback_on_step_end=fail)
    run.save(tmp_path / "run.json")
    text = (tmp_path / "run.json").read_text()
    assert PROMPT not in text
    assert (prompt_sha256(PROMPT) in text) == (privacy == "hash")


def test_prompts_of_a_batch_are_kept_one_by_one(pipeline: Any) -> None:
    with sigmascope.watch(pipeline) as run:
        pipeline(["a fox", "a dog"], num_inference_steps=1, height=32, width=32, output_type="pt")
    generation = run.stage("generation")
    assert generation.facts["prompts"]["prompt.1"]["text"] == "a dog"
    assert generation.facts["call"]["batch_size"] == 2


def test_a_decorated_function_has_a_run_for_each_call(pipeline: Any, unwatched: Tensor) -> None:
    runs: list[Run] = []

    @sigmascope.watch(pipeline, on_run=runs.append)
    def draw(steps: int) -> Tensor:
        """Draw."""
        return generate(pipeline, "sd15", num_inference_steps=steps)

    assert torch.equal(draw(2), unwatched)
    draw(3)
    assert [len(run.stage("denoising").steps) for run in runs] == [2, 3]
    assert (draw.__name__, draw.__doc__) == ("draw", "Draw.")
    assert left_behind() == []


def test_the_decorator_works_on_coroutines(pipeline: Any) -> None:
    runs: list[Run] = []

    @sigmascope.watch(pipeline, on_run=runs.append)
    async def draw() -> None:
        generate(pipeline, "sd15")

    asyncio.run(draw())
    assert [stage.name for stage in runs[0].stages] == ["generation"]


def test_a_decorator_without_parentheses_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="draw is a function") as refused:

        @sigmascope.watch
        def draw() -> None: ...

    assert refused.value.hint == "Write @sigmascope.watch() with parentheses."


def test_named_stages_of_ones_own_lie_in_the_run(pipeline: Any) -> None:
    with sigmascope.watch(pipeline) as run, sigmascope.stage("portrait"):
        generate(pipeline, "sd15")
    (portrait,) = run.stages
    assert [stage.name for stage in portrait.children] == ["generation"]


def test_the_run_can_be_read_inside_the_block(pipeline: Any) -> None:
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15")
        assert [stage.name for stage in run.stages] == ["generation"]
        assert not run.complete
    assert run.complete


def test_a_watch_that_was_never_entered_says_so(pipeline: Any) -> None:
    with pytest.raises(AttributeError, match="enter the watch"):
        _ = sigmascope.watch(pipeline).stages


def test_a_watch_may_be_entered_again(pipeline: Any) -> None:
    watch = sigmascope.watch(pipeline)
    for steps in (1, 3):
        with watch as run:
            generate(pipeline, "sd15", num_inference_steps=steps)
        assert len(run.stage("denoising").steps) == steps


def test_parts_of_a_pipeline_called_by_hand_are_stages(pipeline: Any) -> None:
    with sigmascope.watch(pipeline) as run, torch.no_grad():
        pipeline.encode_prompt("a fox", "cpu", 1, False)
        latent = pipeline.vae.encode(torch.zeros(1, 3, 32, 32)).latent_dist.mean
        pipeline.vae.decode(latent)
    names = [stage.name for stage in run.stages]
    assert names == ["text_encoding", "latent_encoding", "latent_decoding"]
    assert run.stages[1].tensors["latent"].shape == tuple(latent.shape)


def test_findings_of_the_run_are_there_when_it_is_over(pipeline: Any) -> None:
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15", num_inference_steps=1, prompt="a fox " * 100)
    assert "text.prompt_is_cut" in {finding.id for finding in run.findings}


def test_a_copy_made_while_watched_has_nothing_of_the_watch(pipeline: Any) -> None:
    import copy

    with sigmascope.watch(pipeline) as run:
        twin = copy.deepcopy(pipeline.unet)
        for _ in range(2):
            twin(torch.zeros(1, 4, 16, 16), 1, torch.zeros(1, 77, 16))
    assert run.stages == ()


def test_the_record_of_a_call_is_plain_json(pipeline: Any) -> None:
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15")
    assert json.loads(json.dumps(dict(run.stage("generation").facts)))


def test_the_process_s_memory_at_the_ends_of_steps_is_there(pipeline: Any) -> None:
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15", num_inference_steps=4)
    steps = run.stage("denoising").steps
    assert len(steps.rss_bytes) == 4
    assert all(nbytes is not None and 2**20 < nbytes <= run.peak().rss_bytes for nbytes in steps.rss_bytes)


def linger(*_: Any) -> dict[str, Any]:
    time.sleep(0.15)
    return {}


def test_without_it_the_steps_say_so_and_the_thread_gives_memory_over_time(pipeline: Any) -> None:
    with sigmascope.watch(pipeline, step_memory=False) as run:
        generate(pipeline, "sd15", num_inference_steps=2, callback_on_step_end=linger)
    steps = run.stage("denoising").steps
    assert (len(steps), steps.rss_bytes) == (2, ())
    assert "step_memory" in steps.unavailable["rss_bytes"]
    (generation,) = run.stages
    curve = memory_over_time(generation)["process"]
    assert len(curve.nbytes) > 0
    assert max(curve.nbytes) <= run.peak().rss_bytes
