"""The hash of each stage's output in a real call: as the values are, with nothing changed, nothing kept, nothing raised."""

import gc
import weakref
from typing import Any

import pytest
import torch
from tests.families import FAMILIES, generate, make_pipeline
from tests.integrations.diffusers.marks import left_behind
from torch import Tensor

import sigmascope
from sigmascope.monitor import output_hashes
from sigmascope.monitor.output_hashes import CHANGED, FAILED, output_hash
from sigmascope.records.run import OUTPUT_HASHES


@pytest.fixture(params=["at once", "after the call"])
def when(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """When outputs are hashed."""
    if request.param == "after the call":
        monkeypatch.setattr(output_hashes, "AT_ONCE_BYTES", 0)
    return str(request.param)


def hashes(run: Any, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = run.stage(stage).facts[OUTPUT_HASHES]
    return found


@pytest.mark.usefixtures("when")
def test_each_stage_has_the_hash_of_what_it_made(pipeline: Any, unwatched: Tensor) -> None:
    seen: dict[str, Tensor] = {}
    decode = type(pipeline.vae).decode

    def spy(vae: Any, latent: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = decode(vae, latent, *args, **kwargs)
        seen.update(latent=latent, picture=result[0])
        return result

    pipeline.vae.decode = spy.__get__(pipeline.vae)
    with sigmascope.watch(pipeline) as run:
        image = generate(pipeline, "sd15")
    assert torch.equal(image, unwatched)
    expected = {name: output_hash(tensor.clone()).value for name, tensor in seen.items()}
    assert hashes(run, "latent_decoding") == expected
    assert set(hashes(run, "text_encoding")) == {"prompt_embeds", "negative_prompt_embeds"}
    assert left_behind() == []


@pytest.mark.slow
@pytest.mark.usefixtures("when")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_same_hashes_twice(family: str) -> None:
    pipeline = make_pipeline(family)
    found = []
    for _ in range(2):
        with sigmascope.watch(pipeline) as run:
            generate(pipeline, family)
        found.append([stage.facts.get(OUTPUT_HASHES) for stage in run.walk()])
    assert found[0] == found[1]
    told = [digest for made in found[0] if made for digest in made.values()]
    assert len(told) >= 3
    assert None not in told


@pytest.mark.usefixtures("when")
def test_nothing_of_a_call_is_alive_when_it_is_over(pipeline: Any) -> None:
    made: list[weakref.ref[Tensor]] = []
    storages: set[int] = set()

    def keep(_module: Any, _args: Any, result: Any) -> None:
        made.append(weakref.ref(result[0]))

    handles = [part.register_forward_hook(keep) for part in (pipeline.vae.decoder, pipeline.text_encoder)]
    with sigmascope.watch(pipeline):
        generate(pipeline, "sd15", output_type="np")
        gc.collect()
        storages = {
            thing.untyped_storage().data_ptr()
            for thing in gc.get_objects()
            if type(thing) is Tensor and tuple(thing.shape[-2:]) == (32, 32) and thing.shape[-3] == 3
        }
    for handle in handles:
        handle.remove()
    assert made
    assert not any(reference() is not None for reference in made)
    assert storages == set()


def test_embeddings_that_a_callback_writes_to_have_a_reason(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_hashes, "AT_ONCE_BYTES", 0)

    def write(_pipe: Any, _step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        tensors["prompt_embeds"].add_(1)
        return tensors

    with sigmascope.watch(pipeline) as run:
        generate(
            pipeline,
            "sd15",
            guidance_scale=1.0,
            callback_on_step_end=write,
            callback_on_step_end_tensor_inputs=["prompt_embeds"],
        )
    assert hashes(run, "text_encoding")["prompt_embeds"] is None
    assert run.stage("text_encoding").unavailable[f"{OUTPUT_HASHES}.prompt_embeds"] == CHANGED


def test_a_call_that_fails_raises_as_ever_and_leaves_reasons(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_hashes, "AT_ONCE_BYTES", 0)

    def fail(*_: Any) -> Any:
        raise ValueError("no more")

    with sigmascope.watch(pipeline) as run, pytest.raises(ValueError, match="no more"):
        generate(pipeline, "sd15", callback_on_step_end=fail)
    assert run.stage("text_encoding").unavailable[f"{OUTPUT_HASHES}.prompt_embeds"] == FAILED
    assert left_behind() == []


def test_latents_that_are_given_out_are_hashed(pipeline: Any) -> None:
    with sigmascope.watch(pipeline) as run:
        latents = generate(pipeline, "sd15", output_type="latent")
    assert hashes(run, "denoising") == {"output": output_hash(latents).value}


def test_under_inference_mode_the_cpu_is_hashed_all_the_same(pipeline: Any) -> None:
    with sigmascope.watch(pipeline) as run, torch.inference_mode():
        generate(pipeline, "sd15")
    assert None not in hashes(run, "latent_decoding").values()
