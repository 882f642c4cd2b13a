from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sigmascope.probes import module_facts


def test_parameters_bytes_and_mode_of_a_plain_module() -> None:
    facts = module_facts(nn.Linear(3, 4).eval())
    assert (facts.class_name, facts.wrapper_class_name) == ("Linear", None)
    assert (facts.parameters, facts.trainable_parameters, facts.nbytes) == (16, 16, 64)
    assert (facts.dtypes, facts.devices, facts.training) == ({"float32": 16}, {"cpu": 16}, False)
    assert facts.unavailable == {}


def test_frozen_parameters_are_not_trainable() -> None:
    layer = nn.Linear(3, 4)
    layer.weight.requires_grad_(False)
    assert module_facts(layer).trainable_parameters == 4


def test_buffers_count_in_bytes_and_dtypes_but_not_as_parameters() -> None:
    facts = module_facts(nn.BatchNorm2d(8))  # weight, bias; running mean, variance, an int64 counter
    assert facts.parameters == 16
    assert facts.nbytes == 4 * 8 * 4 + 8
    assert facts.dtypes == {"float32": 32, "int64": 1}


def test_a_tied_parameter_counts_once() -> None:
    embedding, head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    assert module_facts(nn.ModuleList([embedding, head])).parameters == 40


def test_parameters_that_share_memory_count_once() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = nn.Parameter(first.weight.detach())
    assert module_facts(nn.ModuleList([first, second])).parameters == 16


def test_mixed_dtypes_and_devices_are_counted_in_elements() -> None:
    module = nn.ModuleList([nn.Linear(2, 2).bfloat16(), nn.Linear(3, 3, device="meta")])
    facts = module_facts(module)
    assert facts.dtypes == {"bfloat16": 6, "float32": 12}
    assert facts.devices == {"cpu": 6, "meta": 12}


@pytest.mark.parametrize("attribute", ["model", "cond_stage_model", "first_stage_model"])
def test_a_wrapper_is_described_by_what_it_holds(attribute: str) -> None:
    class ModelPatcher(SimpleNamespace):
        pass

    facts = module_facts(ModelPatcher(**{attribute: nn.Linear(3, 4)}))
    assert (facts.class_name, facts.wrapper_class_name, facts.parameters) == ("Linear", "ModelPatcher", 16)


def test_a_wrapper_in_a_wrapper_is_opened() -> None:
    patcher = SimpleNamespace(model=nn.Linear(3, 4))
    assert module_facts(SimpleNamespace(model="a name, no module", patcher=patcher)).parameters == 16


def test_a_wrapper_that_holds_itself_ends() -> None:
    ring: Any = SimpleNamespace()
    ring.model = ring
    assert module_facts(ring).parameters is None


def test_a_compiled_module_is_described_by_the_original() -> None:
    class OptimizedModule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = nn.Linear(3, 4)

    facts = module_facts(OptimizedModule())
    assert (facts.class_name, facts.wrapper_class_name, facts.parameters) == ("Linear", "OptimizedModule", 16)


def test_a_data_parallel_module_is_described_by_the_original() -> None:
    facts = module_facts(nn.DataParallel(nn.Linear(3, 4)))
    assert (facts.class_name, facts.wrapper_class_name) == ("Linear", "DataParallel")


def test_a_module_attribute_named_module_is_no_wrapper() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(3, 4)

    assert module_facts(Net()).class_name == "Net"


class Pipeline:
    """As diffusers' pipelines: `components` holds modules and other things."""

    def __init__(self) -> None:
        text_encoder = nn.Linear(2, 2)
        self.components = {
            "unet": nn.Linear(3, 4).half(),
            "text_encoder": text_encoder,
            "text_encoder_2": text_encoder,
            "scheduler": object(),
            "safety_checker": None,
        }


def test_a_pipeline_is_the_sum_of_its_components() -> None:
    facts = module_facts(Pipeline())
    assert (facts.class_name, facts.wrapper_class_name) == ("Pipeline", None)
    assert facts.parameters == 16 + 6
    assert facts.dtypes == {"float16": 16, "float32": 6}


def test_a_mapping_of_modules_is_their_sum() -> None:
    assert module_facts({"a": nn.Linear(2, 2), "b": nn.Linear(3, 3)}).parameters == 18


@pytest.mark.parametrize(
    "thing", [object(), None, 3, "unet", {}, {"vae": None}, SimpleNamespace(components={})]
)
def test_anything_else_gives_its_class_and_a_reason(thing: object) -> None:
    facts = module_facts(thing)
    assert facts.class_name == type(thing).__name__
    assert facts.parameters is None
    assert "has no module in a known place" in facts.unavailable["parameters"]


def test_an_attribute_that_raises_is_a_reason() -> None:
    class Broken:
        @property
        def components(self) -> object:
            raise RuntimeError("offloaded")

    assert module_facts(Broken()).unavailable["parameters"] == "RuntimeError: offloaded"


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_parameters_without_a_shape_yet_are_a_reason() -> None:
    facts = module_facts(nn.LazyLinear(3))
    assert facts.parameters is None
    assert facts.unavailable["parameters"]


def test_the_module_stays_as_it_is() -> None:
    module = nn.Linear(3, 4)
    before = dict(module.__dict__)
    module_facts(module)
    assert module.__dict__ == before
    assert torch.is_grad_enabled()
