"""A model's fingerprint tells a fine-tuning from its base, and nothing else; it is made once."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families.changes import offload_to_disk, with_lora, with_tuned_encoder
from tests.families.pipelines import generate, make_pipeline
from torch import Tensor, nn

from sigmascope.probes import fingerprints, model_fingerprints
from sigmascope.probes.copies import Pending
from sigmascope.probes.model_fingerprints import adapter_fingerprint, model_fingerprint


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 2))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many weights were read, each time that a model was."""
    seen: list[int] = []
    original = fingerprints.begin_samples

    def begin_samples(tensors: dict[str, Tensor], **options: Any) -> Pending[fingerprints.Samples]:
        seen.append(len(tensors))
        return original(tensors, **options)

    monkeypatch.setattr(model_fingerprints, "begin_samples", begin_samples)
    return seen


def test_it_is_sixteen_digits_and_the_same_for_the_same_weights() -> None:
    fingerprint = model_fingerprint(small()).value
    assert fingerprint is not None
    assert len(fingerprint) == 16
    assert int(fingerprint, 16) >= 0
    assert model_fingerprint(small()).value == fingerprint


def test_a_fine_tuning_has_another() -> None:
    pipeline = make_pipeline("sd15")
    base = model_fingerprint(pipeline.text_encoder).value
    with_tuned_encoder(pipeline)
    assert model_fingerprint(pipeline.text_encoder).value not in (None, base)


def test_a_model_is_read_once_until_a_weight_is_written_to(reads: list[int]) -> None:
    model = small()
    first = model_fingerprint(model).value
    assert model_fingerprint(model).value == first
    assert reads == [9]
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    assert model_fingerprint(model).value != first
    assert reads == [9, 9]


def test_another_weight_in_its_place_is_noticed() -> None:
    model = small()
    first = model_fingerprint(model).value
    model[0].bias = nn.Parameter(torch.ones(30))
    assert model_fingerprint(model).value != first


def test_another_weight_that_got_the_id_of_the_one_before_is_noticed() -> None:
    model = nn.Linear(2, 2, bias=False)
    for number in range(100):
        before, gone = model_fingerprint(model), id(model.weight)
        values = torch.tensor([[float(number)] * 2] * 2)
        del model.weight
        model.weight = nn.Parameter(values)
        if number and id(model.weight) == gone:
            break
    else:
        pytest.skip("no weight got the id of the one before")
    assert model_fingerprint(model) != before


def test_a_model_that_is_put_back_has_its_fingerprint_back() -> None:
    model = small()
    first, state = model_fingerprint(model).value, copy.deepcopy(model.state_dict())
    with torch.no_grad():
        next(model.parameters()).zero_()
    assert model_fingerprint(model).value != first
    model.load_state_dict(state)
    assert model_fingerprint(model).value == first


def test_an_adapter_leaves_the_models_fingerprint_and_has_its_own() -> None:
    pipeline = make_pipeline("sd15")
    base = model_fingerprint(pipeline.unet).value
    with_lora(pipeline)
    assert model_fingerprint(pipeline.unet).value == base
    style = adapter_fingerprint(pipeline.unet, "style").value
    other = make_pipeline("sd15")
    with_lora(other, 0.5)
    assert adapter_fingerprint(other.unet, "style").value == style
    with torch.no_grad():
        next(p for name, p in other.unet.named_parameters() if "lora_B" in name)[0, 0] += 1
    assert adapter_fingerprint(other.unet, "style").value not in (None, style)


def test_a_merged_adapter_is_in_the_weights() -> None:
    pipeline = make_pipeline("sd15")
    with_lora(pipeline)
    base = model_fingerprint(pipeline.unet).value
    pipeline.unet.fuse_lora()
    assert model_fingerprint(pipeline.unet).value not in (None, base)


def test_a_compiled_model_has_that_of_what_was_compiled() -> None:
    model = small()
    assert model_fingerprint(torch.compile(model, backend="eager")).value == model_fingerprint(model).value


def test_another_memory_layout_is_the_same_weights() -> None:
    model = nn.Conv2d(8, 8, 3)
    base = model_fingerprint(model).value
    turned = copy.deepcopy(model)
    turned.weight.data = turned.weight.data.contiguous(memory_format=torch.channels_last)
    assert turned.weight.stride() != model.weight.stride()
    assert model_fingerprint(turned).value == base


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool]
)
def test_weights_of_any_type_are_read(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.register_buffer("weight", torch.ones(30, 30).to(dtype))
    base = model_fingerprint(model).value
    assert base is not None
    model.register_buffer("weight", torch.zeros(30, 30).to(dtype))
    assert model_fingerprint(model).value not in (None, base)


def test_weights_that_are_nowhere_have_a_reason() -> None:
    assert "meta tensor" in (model_fingerprint(small().to("meta")).reason or "")


def test_a_model_without_weights_has_a_reason() -> None:
    for thing in (nn.Identity(), object(), None):
        assert model_fingerprint(thing).reason is not None


def test_what_lies_on_a_disk_is_not_read_as_what_is_left_in_memory() -> None:
    pipeline = make_pipeline("sd15")
    offload_to_disk(pipeline)
    generate(pipeline, "sd15", num_inference_steps=1)
    reading = model_fingerprint(pipeline.unet)
    assert (reading.value, "on a disk" in (reading.reason or "")) == (None, True)


def test_the_model_is_not_kept_alive() -> None:
    import gc
    import weakref

    model = small()
    model_fingerprint(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_a_model_of_a_file_is_that_of_its_copy(tmp_path: Path) -> None:
    from safetensors.torch import load_model, save_model

    model = small()
    save_model(model, str(tmp_path / "model.safetensors"))
    loaded = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 2))
    load_model(loaded, str(tmp_path / "model.safetensors"))
    assert model_fingerprint(loaded).value == model_fingerprint(model).value
