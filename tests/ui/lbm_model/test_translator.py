import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.out_of_memory import OUT_OF_MEMORY

from sigmascope.errors import SigmascopeError
from sigmascope.lbm.infer import translate_image
from sigmascope.lbm.model import LbmModel
from sigmascope.records.serialization import run_from_json
from sigmascope.ui.lbm_model import Made, Picture, Recent, ServedModel, Translator, Wish

Told = list[tuple[str, int, int]]


@pytest.fixture
def kept() -> Recent[Made]:
    return Recent(limit_bytes=10**7)


@pytest.fixture
def translator(served: ServedModel, kept: Recent[Made]) -> Translator:
    return Translator(served, kept)


@pytest.fixture
def picture(photograph: Image.Image) -> Picture:
    return Picture("p", photograph, png=b"")


def wish(**values: Any) -> Wish:
    return Wish(picture="p", client="c", **values)


def pixels(made: Made | None) -> Any:
    assert made is not None
    return np.asarray(Image.open(io.BytesIO(made.png)))


def expected(served: ServedModel, photograph: Image.Image, scale: float, **options: Any) -> Any:
    assert served.lora is not None
    served.lora.scale = scale
    return np.asarray(translate_image(served.model, photograph, **options))


def silent(what: str, done: int, total: int) -> None:
    """A client that listens to nothing."""


def test_base_and_result_are_what_the_library_gives(
    translator: Translator,
    kept: Recent[Made],
    picture: Picture,
    served: ServedModel,
    photograph: Image.Image,
) -> None:
    found = translator.translate(picture, wish(scale=0.5, steps=2, seed=7), silent)
    options = {"num_inference_steps": 2, "seed": 7}
    base, result = kept.get(found["base"]["id"]), kept.get(found["result"]["id"])
    assert np.array_equal(pixels(base), expected(served, photograph, 0.0, **options))
    assert np.array_equal(pixels(result), expected(served, photograph, 0.5, **options))
    assert not np.array_equal(pixels(base), pixels(result))
    assert found["dormant_modules"] == 0


def test_the_base_is_the_model_without_any_lora_to_the_bit(
    translator: Translator,
    kept: Recent[Made],
    picture: Picture,
    tiny_model: LbmModel,
    photograph: Image.Image,
) -> None:
    base = kept.get(translator.translate(picture, wish(scale=2.0, seed=1), silent)["base"]["id"])
    assert np.array_equal(pixels(base), np.asarray(translate_image(tiny_model, photograph, seed=1)))


def test_a_new_scale_makes_the_result_alone_and_an_old_one_nothing(
    translator: Translator, picture: Picture
) -> None:
    told: Told = []

    def report(what: str, done: int, total: int) -> None:
        told.append((what, done, total))

    first = translator.translate(picture, wish(scale=0.5), report)
    assert told == [("base", 0, 1), ("base", 1, 1), ("result", 0, 1), ("result", 1, 1)]
    assert (first["base"]["kept"], first["result"]["kept"]) == (False, False)
    told.clear()
    second = translator.translate(picture, wish(scale=0.75), report)
    assert told == [("result", 0, 1), ("result", 1, 1)]
    assert (second["base"]["kept"], second["result"]["kept"]) == (True, False)
    assert second["base"]["id"] == first["base"]["id"]
    told.clear()
    assert translator.translate(picture, wish(scale=0.5), report)["result"]["id"] == first["result"]["id"]
    assert told == []


def test_another_seed_step_count_or_size_makes_the_base_anew(
    translator: Translator, picture: Picture
) -> None:
    translator.translate(picture, wish(), silent)
    for change in ({"seed": 3}, {"steps": 2}, {"size": "keep"}):
        assert translator.translate(picture, wish(**change), silent)["base"]["kept"] is False


def test_at_scale_zero_the_result_is_the_base_itself(translator: Translator, picture: Picture) -> None:
    found = translator.translate(picture, wish(scale=0.0), silent)
    assert found["result"]["id"] == found["base"]["id"]


def test_a_result_that_was_forgotten_is_made_again(served: ServedModel, picture: Picture) -> None:
    translator = Translator(served, Recent(limit_bytes=1))  # room for the newest alone
    translator.translate(picture, wish(), silent)
    assert translator.translate(picture, wish(), silent)["base"]["kept"] is False


def test_the_record_is_a_run_with_every_stage(
    translator: Translator, kept: Recent[Made], picture: Picture
) -> None:
    found = translator.translate(picture, wish(scale=1.5, steps=3, seed=9), silent)
    made = kept.get(found["result"]["id"])
    assert made is not None
    run = run_from_json(made.run_json)
    stages = {stage.name: stage for stage in run.stages}
    assert list(stages) == ["lora_application", "latent_encoding", "denoising", "latent_decoding"]
    assert stages["lora_application"].facts["scale"] == 1.5
    assert stages["lora_application"].facts["applied_modules"] == 1
    assert stages["denoising"].facts["seed"] == 9
    assert len(stages["denoising"].steps) == 3
    assert run.facts["base_model"] == "tiny.safetensors"
    told = found["result"]["timings"]
    assert told["seconds"] == run.seconds
    assert told["stages"][2]["steps"] == list(stages["denoising"].steps.seconds)
    assert json.loads(made.run_json)["run"]["complete"] is True


def test_without_a_lora_there_is_the_base_alone(served: ServedModel, picture: Picture) -> None:
    bare = ServedModel(served.model, base_name="tiny", resolution=64)
    found = Translator(bare, Recent(limit_bytes=10**7)).translate(picture, wish(), silent)
    assert found["result"] is None
    assert found["base"]["timings"]["stages"][0]["name"] == "latent_encoding"


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_out_of_memory_says_what_to_do(
    error: BaseException, translator: Translator, picture: Picture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("sigmascope.ui.lbm_model.translate_image", fail)
    with pytest.raises(SigmascopeError, match="does not fit") as caught:
        translator.translate(picture, wish(), silent)
    assert (str(error).splitlines() or ["MemoryError"])[0] in caught.value.message
    assert caught.value.hint is not None
    assert "smaller size" in caught.value.hint


def test_out_of_memory_is_told_of_by_a_torch_that_empties_no_accelerators_cache(
    translator: Translator, picture: Picture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.delattr(torch.accelerator, "empty_cache")  # torch has it from 2.9 on
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    emptied: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("cuda"))
    monkeypatch.setattr("sigmascope.ui.lbm_model.translate_image", fail)
    with pytest.raises(SigmascopeError, match="does not fit"):
        translator.translate(picture, wish(), silent)
    assert emptied == ["cuda"]
