"""The modules that are kept of a model are those that it has, whatever was done to it since."""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from sigmascope.probes.models import named_modules_in
from sigmascope.probes.module_tree import one_look, tree_of


class Twin(nn.ReLU):
    """Another class with the same attributes."""


def model() -> Any:
    blocks = [
        nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"a": nn.ReLU(), "b": nn.ReLU()})) for _ in range(100)
    ]
    return nn.Sequential(*blocks)


def rename(made: Any) -> None:
    held = made[3][1]._modules
    held["c"] = held.pop("b")


def swap_names(made: Any) -> None:
    held = made[3][1]._modules
    held["a"], held["b"] = held["b"], held["a"]


def move(made: Any) -> None:
    """The children of all modules in their order are the same then."""
    made[4][1].other = nn.Sequential()
    tree_of(made)
    made[4][1].other.inner = made[4][1]._modules.pop("b")
    made[4][1]._modules["b"] = made[4][1]._modules.pop("other")


def change_class(made: Any) -> None:
    made[5][1]["a"].__class__ = Twin


def replace_by_a_new_one(made: Any) -> None:
    for _ in range(50):  # one of them may be given the id of the old one
        del made[6][1]["b"]
        made[6][1]["b"] = nn.Tanh()


@pytest.mark.parametrize(
    "change",
    [
        rename,
        swap_names,
        move,
        change_class,
        replace_by_a_new_one,
        lambda made: made[7][1].update({"late": nn.Linear(1, 1)}),
        lambda made: made[8][1].pop("a"),
        lambda made: setattr(made, "9", made[2]),
        lambda made: made[9][1]._modules.update(a=None),
    ],
)
def test_the_modules_are_those_of_now(change: Callable[[Any], object]) -> None:
    made = model()
    known = tree_of(made)
    assert tree_of(made).derived is known.derived  # kept until something changes
    change(made)
    assert list(named_modules_in(made)) == list(made.named_modules())
    assert tree_of(made).derived is not known.derived


def test_nothing_is_kept_alive() -> None:
    made = model()
    tree_of(made)
    adapter, whole = weakref.ref(made[0][1]["a"]), weakref.ref(made)
    del made[0][1]["a"]
    gc.collect()
    assert adapter() is None
    del made
    gc.collect()
    assert whole() is None


def test_a_block_in_which_nothing_runs_compares_each_model_once() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(100)))
    with one_look():
        seen = tree_of(model)
        assert tree_of(model) is seen
    model.append(nn.Linear(1, 1))
    assert len(tree_of(model).modules) == len(seen.modules) + 1


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_look_leaves_the_collector_as_it_was(collects: bool, error: type[BaseException] | None) -> None:
    was = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(error) if error else nullcontext(), one_look(), one_look():
            assert not gc.isenabled()
            if error:
                raise error
        assert gc.isenabled() == collects
    finally:
        (gc.enable if was else gc.disable)()


class Answering(nn.Module):
    """It gives its modules what none of them holds."""

    def __getattr__(self, name: str) -> Any:
        return "answered" if name == "processor" else super().__getattr__(name)


class Classwide(nn.Module):
    processor = "of the class"


def test_modules_that_have_something_are_those_that_getattr_finds_it_on() -> None:
    made = model()
    made[1].processor = "plain"
    made[2][1].add_module("processor", nn.ReLU())
    made[3].processor = None
    made[4].add_module("processor", made[2][1])  # registered twice
    made.append(Answering())
    made.append(Classwide())
    tree = tree_of(made)
    asked = [(place, getattr(module, "processor", None)) for place, module in enumerate(tree.modules)]
    expected = [(place, held) for place, held in asked if held is not None]
    assert len(expected) == 5
    assert tree.having("processor") == expected
    made[1].processor = None
    del made[2][1]._modules["processor"]
    assert [held for _, held in tree_of(made).having("processor")] == [made[2][1], "answered", "of the class"]


def test_where_a_name_is_held_is_told_of_all_modules_or_of_some() -> None:
    made = model()
    made[1].mark, made[3].mark = 1, None
    tree = tree_of(made)
    first, second = (tree.indices()[id(module)] for module in (made[1], made[3]))
    assert tree.holding("mark") == [first, second]
    assert tree.holding("mark", [0, second]) == [second]
    assert [own["mark"] for own in tree.own_at([second, first])] == [None, 1]


@pytest.fixture
def adapted() -> Any:
    """Forty layers, with a LoRA of PEFT on each."""
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40)))
    config = LoraConfig(r=2, target_modules=[str(place) for place in range(40)], init_lora_weights=False)
    inject_adapter_in_model(config, layers, "a")
    return layers


def named(model: nn.Module) -> dict[str, nn.Module]:
    return dict(named_modules_in(model))


def test_what_does_nothing_beside_an_adapter_is_left_out(adapted: Any) -> None:
    parts = {name.removeprefix("7.") for name in named(adapted) if name.startswith("7.")}
    assert parts == {"base_layer", "lora_A", "lora_A.a", "lora_B", "lora_B.a"}
    assert {*named(adapted)} < {name for name, _ in adapted.named_modules()}


SECOND_ADAPTER = pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")


@SECOND_ADAPTER
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"use_dora": True}, {"lora_magnitude_vector", "lora_magnitude_vector.b"}),
        ({"lora_dropout": 0.1}, {"lora_dropout", "lora_dropout.a", "lora_dropout.b"}),
    ],
)
def test_what_another_adapter_fills_is_there_with_it(
    adapted: Any, options: dict[str, Any], expected: set[str]
) -> None:
    before = {*named(adapted)}
    config = LoraConfig(r=2, target_modules=["7"], init_lora_weights=False, **options)
    inject_adapter_in_model(config, adapted, "b")
    added = {name.removeprefix("7.") for name in {*named(adapted)} - before}
    assert added == {"lora_A.b", "lora_B.b", *expected}


@SECOND_ADAPTER
def test_of_a_layer_whose_adapters_have_no_modules_nothing_is_left_out() -> None:
    words = nn.ModuleDict({str(place): nn.Embedding(4, 4) for place in range(40)})
    config = LoraConfig(r=2, target_modules=["7", "8"], init_lora_weights=False)
    inject_adapter_in_model(config, words, "a")
    assert [*named_modules_in(words)] == [*words.named_modules()]
    before = len(tree_of(words).tensors)
    inject_adapter_in_model(config, words, "b")
    assert len(tree_of(words).tensors) == before + 4


def take_out(layer: Any) -> object:
    return layer.lora_A._modules.pop("a")


def exchange(layer: Any) -> object:
    kept = layer.lora_B["a"]
    layer.lora_B["a"] = nn.Linear(2, 4, bias=False)
    return kept


@pytest.mark.parametrize("change", [take_out, exchange])
def test_a_factor_that_somebody_keeps_and_took_out_is_there_no_more(
    adapted: Any, change: Callable[[Any], object]
) -> None:
    known, before = tree_of(adapted), named(adapted)
    kept = change(adapted[7])
    after = named(adapted)
    assert tree_of(adapted).derived is not known.derived
    assert kept in before.values()
    assert kept not in after.values()


def hold(model: Any, name: str) -> bool:
    """Whether a module's `__dict__` is among those that have hooks, first."""
    return any(own is vars(model.get_submodule(name)) for own in tree_of(model).hooked)


def test_hooks_are_those_of_now(adapted: Any) -> None:
    assert not tree_of(adapted).hooked
    first = adapted[3].lora_A["a"].register_forward_hook(lambda *_: None)
    assert hold(adapted, "3.lora_A.a")
    second = adapted[5].register_forward_pre_hook(lambda *_: None)
    assert hold(adapted, "3.lora_A.a")
    assert hold(adapted, "5")
    first.remove()
    assert not hold(adapted, "3.lora_A.a")
    assert hold(adapted, "5")
    second.remove()
    assert not tree_of(adapted).hooked
    adapted[9].register_forward_hook(lambda *_: None)
    assert hold(adapted, "9")


def test_passes_of_a_module_s_own_are_those_of_now(adapted: Any) -> None:
    assert not tree_of(adapted).rerouted
    adapted[3].forward = adapted[4].forward
    assert [own is vars(adapted[3]) for own in tree_of(adapted).rerouted] == [True]
    del adapted[3].forward
    assert not tree_of(adapted).rerouted


def test_tensors_are_those_that_a_state_dict_has(adapted: Any) -> None:
    adapted.append(nn.BatchNorm1d(4))
    adapted.append(nn.Linear(1, 1))
    adapted[-1].register_buffer("kept", torch.zeros(1))
    adapted[-1].register_buffer("passing", torch.zeros(1), persistent=False)
    for _ in range(2):  # walked, and known again
        assert {*map(id, tree_of(adapted).tensors)} == {*map(id, adapted.state_dict(keep_vars=True).values())}
    adapted[0].base_layer.bias = None
    adapted[40].running_mean = torch.ones(4)
    assert {*map(id, tree_of(adapted).tensors)} == {*map(id, adapted.state_dict(keep_vars=True).values())}


def test_what_somebody_registers_on_a_plain_layer_is_there_from_then_on(adapted: Any) -> None:
    layer = adapted[7].base_layer
    before = tree_of(adapted).names
    layer.register_buffer("scale_weight", torch.ones(1))  # as those do who store weights in 8 bits
    assert any(tensor is layer.scale_weight for tensor in tree_of(adapted).tensors)
    layer.lora_down = nn.Linear(4, 2)
    assert {*tree_of(adapted).names} - {*before} == {"7.base_layer.lora_down"}
    assert any(tensor is layer.lora_down.weight for tensor in tree_of(adapted).tensors)
    del layer.scale_weight, layer.lora_down
    assert tree_of(adapted).names == before
