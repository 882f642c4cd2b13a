import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.comfy_shapes.adapters import LoRAAdapter, lora_adapter, lora_tuple, random
from tests.comfy_shapes.modules import CLIP_Q, CONV, OUT, BaseModel, Q, SDClipModel
from tests.comfy_shapes.patchers import ModelPatcher
from tests.comfy_shapes.versions import CLIP, PATCHERS, load_lora_for_models

from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.comfyui_patcher import is_comfyui, original_weight, read_patches, weights_of


def only(model: object) -> AppliedPatch:
    found = read_patches(model).value
    assert found is not None
    (patch,) = found
    return patch


@pytest.mark.parametrize("version", PATCHERS)
def test_a_lora_is_read_whole_in_every_version(version: type[ModelPatcher]) -> None:
    patcher = version(BaseModel())
    value = lora_tuple(6, 4, 8, alpha=2.0)
    patcher.add_patches({OUT: value}, 0.8)
    patch = only(patcher)
    assert (patch.key, patch.adapter_type, patch.patch_type) == (OUT, "lora", "lora_up")
    assert (patch.strength, patch.strength_model, patch.rank, patch.alpha, patch.scale) == (
        0.8,
        1.0,
        4,
        2.0,
        0.5,
    )
    assert (patch.weight_shape, patch.offset, patch.source, patch.index) == ((6, 8), None, "LoRA 1", 0)
    assert patch.tensors["up"] is value[1][0]
    assert patch.unavailable == {}


@pytest.mark.parametrize(
    "kept",
    [
        {"lora_up.weight": random(6, 4), "lora_down.weight": random(4, 8)},
        {"lora_down.weight": random(4, 8)},
        ({"x.lora_down.weight": random(4, 8)}, "other"),
        {"w.diff_b": random(6)},
        {"anything": random(6)},
        ("whatever", ("else",)),
    ],
)
def test_the_coarse_type_of_what_is_unknown_is_told_by_its_words(kept: Any) -> None:
    """As its text tells: 'lora_up.weight', then 'lora_down.weight', then 'diff' in it."""
    text = str(kept)
    words = {"lora_up": "lora_up.weight", "lora_down": "lora_down.weight", "diff": "diff", "unknown": ""}
    expected = next(name for name, word in words.items() if word in text)
    patcher = ModelPatcher(BaseModel())
    patcher.patches = {OUT: [(0.5, kept, 1.0, None, None)]}
    assert (only(patcher).patch_type, only(patcher).adapter_type) == (expected, "unknown")


def test_the_data_type_is_that_of_what_the_host_keeps() -> None:
    patcher = ModelPatcher(BaseModel())
    patcher.add_patches({Q: lora_adapter()})
    assert only(patcher).data_type == str(LoRAAdapter)


def test_a_clip_is_read_through_its_patcher() -> None:
    clip = CLIP(ModelPatcher(SDClipModel()))
    clip.add_patches({CLIP_Q: lora_adapter()}, 0.7)
    assert only(clip).strength == 0.7


def test_a_loader_gives_each_side_its_own() -> None:
    model, clip = load_lora_for_models(
        ModelPatcher(BaseModel()),
        CLIP(ModelPatcher(SDClipModel())),
        {Q: lora_adapter(), CLIP_Q: lora_adapter()},
        1.0,
        0.5,
    )
    assert (only(model).key, only(clip).key) == (Q, CLIP_Q)


def test_a_patcher_without_patches_has_none() -> None:
    assert read_patches(ModelPatcher(BaseModel())).value == ()


def test_the_part_of_a_weight_is_told() -> None:
    patcher = ModelPatcher(BaseModel())
    patcher.add_patches({(OUT, (0, 2, 4)): lora_adapter(4)})
    assert (only(patcher).offset, only(patcher).state) == ((0, 2, 4), "registered")


def test_a_convolution_is_read() -> None:
    patcher = ModelPatcher(BaseModel())
    patcher.add_patches({CONV: ("lora", (random(8, 2, 1, 1), random(2, 4, 3, 3), 2.0, None, None))})
    assert (only(patcher).weight_shape, only(patcher).rank) == ((8, 4, 3, 3), 2)


def test_a_key_that_the_model_lacks_has_failed() -> None:
    patcher = ModelPatcher(BaseModel())
    patcher.patches["nowhere.weight"] = [(1.0, lora_tuple(), 1.0, None, None)]
    assert (only(patcher).state, only(patcher).weight_shape) == ("failed", None)


def test_an_entry_that_is_none_is_there_with_the_reason() -> None:
    patcher = ModelPatcher(BaseModel())
    patcher.patches[Q] = [None, (1.0, lora_tuple(), 1.0, None, None)]
    found = read_patches(patcher).value
    assert found is not None
    assert found[0].unavailable["patch"].startswith("TypeError")
    assert found[1].adapter_type == "lora"


def test_an_adapter_that_raises_is_there_with_the_reason() -> None:
    class Hostile:
        @property
        def name(self) -> str:
            raise OSError("gone")

    patcher = ModelPatcher(BaseModel())
    patcher.add_patches({Q: Hostile()})
    assert only(patcher).adapter_type == "unknown"


def test_what_is_no_patcher_says_so() -> None:
    assert read_patches(object()).reason == "object is not a patcher and has no patches"


def test_a_patcher_whose_patches_raise_gives_the_reason() -> None:
    class Vanishing(dict[str, Any]):
        def items(self) -> Any:
            raise RuntimeError("dictionary changed size during iteration")

    patcher = ModelPatcher(BaseModel())
    patcher.patches = Vanishing()
    assert read_patches(patcher).reason == "RuntimeError: dictionary changed size during iteration"


@pytest.mark.parametrize("version", PATCHERS)
def test_no_attribute_that_raises_reaches_the_caller(version: type[ModelPatcher]) -> None:
    patcher = version(BaseModel())
    patcher.add_patches({Q: lora_adapter()})
    patcher.load(lowvram=True)
    for name in [*vars(patcher), "is_dynamic", "patcher"]:
        raising = type("Raising", (version,), {name: property(_raise)})
        thing: Any = object.__new__(raising)
        vars(thing).update({key: value for key, value in vars(patcher).items() if key != name})
        read_patches(thing)
        is_comfyui(thing)
        weights_of(thing)
        original_weight(thing, Q)


def _raise(_self: object) -> None:
    raise BufferError("not now")


def test_reading_leaves_no_mark() -> None:
    patcher = ModelPatcher(BaseModel())
    patcher.add_patches({Q: lora_adapter()})
    patcher.load()
    before = [dict(vars(thing)) for thing in (patcher, patcher.model)]
    read_patches(patcher)
    assert [dict(vars(thing)) for thing in (patcher, patcher.model)] == before


def test_reading_keeps_nothing_alive() -> None:
    patcher = ModelPatcher(BaseModel())
    patcher.add_patches({Q: lora_adapter()})
    read_patches(patcher)
    model, value = weakref.ref(patcher.model), weakref.ref(patcher.patches[Q][0][1].weights[0])
    del patcher
    gc.collect()
    assert (model(), value()) == (None, None)


def test_the_weights_are_bit_identical_after_reading() -> None:
    patcher = ModelPatcher(BaseModel())
    patcher.add_patches({Q: lora_adapter()})
    patcher.load()
    before = {name: tensor.clone() for name, tensor in patcher.model.state_dict().items()}
    read_patches(patcher)
    assert all(torch.equal(tensor, before[name]) for name, tensor in patcher.model.state_dict().items())


def test_a_patcher_of_another_thing_than_a_module_is_read() -> None:
    patcher = ModelPatcher(BaseModel())
    patcher.model = SimpleNamespace(weight=random(8, 8))
    patcher.patches["weight"] = [(1.0, lora_tuple(), 1.0, None, None)]
    assert only(patcher).weight_shape == (8, 8)
