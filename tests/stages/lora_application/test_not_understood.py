"""Kinds of adapters that are no plain factors, and what is not understood: open, with the reason, and never "no"."""

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers.models.attention_processor import Attention, AttnProcessor
from peft import LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, inject_adapter_in_model
from tests.comfy_shapes.adapters import lora_adapter
from tests.comfy_shapes.beside import BypassForwardHook, BypassInjectionManager
from tests.comfy_shapes.modules import BaseModel, Q
from tests.comfy_shapes.patchers import ModelPatcher
from tests.stages.lora_targets import delta_norm
from torch import Tensor, nn

from sigmascope.stages import model_snapshot
from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
KEY = "0.weight"
KINDS: dict[str, Callable[..., Any]] = {
    "lora": LoraConfig,
    "dora": functools.partial(LoraConfig, use_dora=True),
    "loha": LoHaConfig,
    "lokr": LoKrConfig,
}


def adapted(config: Callable[..., Any], name: str = "a") -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32, bias=False))
    init = "init_weights" if config in (LoHaConfig, LoKrConfig, OFTConfig) else "init_lora_weights"
    return inject_adapter_in_model(config(target_modules=["0"], r=4, **{init: False}), model, name)


def used(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.eye(24)).mT.double()
    return found


def told(baseline: object, model: object) -> dict[str, Any]:
    return dict(analyze_lora_application_results(baseline, model, None, model))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", ["off", "half", "as it was"])
def test_every_kind_is_told_by_what_the_layer_computes_with(kind: str, state: str) -> None:
    model = adapted(KINDS[kind])
    layer, before = model[0], used(model)
    baseline = capture_lora_baseline(model, None)
    if state == "off":
        layer.enable_adapters(False)
    elif state == "half":
        layer.set_scale("a", 0.5)
    change = float((used(model) - before).norm())
    analysis = told(baseline, model)
    assert analysis["effective"] is (state != "as it was") is (change > 0.0)
    assert analysis["unet_weight_changes"]["delta_norm"] == pytest.approx(change, rel=1e-3)


def test_a_dora_that_is_fused_is_open() -> None:
    model = adapted(KINDS["dora"])
    baseline = capture_lora_baseline(model, None)
    model[0].merge()
    analysis = told(baseline, model)
    assert analysis["effective"] is None
    assert "gone" in analysis["unavailable"]["effective"]


def test_a_kind_without_a_reader_is_open_where_it_was_before() -> None:
    config = OFTConfig(target_modules=["0"], r=0, oft_block_size=4, init_weights=False)
    model = inject_adapter_in_model(config, nn.Sequential(nn.Linear(24, 32, bias=False)), "a")
    analysis = told(capture_lora_baseline(model, None), model)
    assert analysis["effective"] is None
    assert KEY in analysis["unavailable"]["effective"]


class Wrapped(nn.Module):
    """A LoRA layer of somebody's own, as training scripts write them."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.down, self.up = inner, nn.Linear(24, 2, bias=False), nn.Linear(2, 32, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        added: Tensor = self.inner(values) + self.up(self.down(values))
        return added


def _wrap(model: nn.Sequential) -> None:
    inner = model[0]
    assert isinstance(inner, nn.Linear)
    model[0] = Wrapped(inner)


def _replace_forward(model: nn.Sequential) -> None:
    own = model[0].forward
    model[0].forward = lambda values: own(values) + 1.0


def _hook(model: nn.Sequential) -> None:
    model[0].register_forward_hook(lambda _module, _values, result: result + 1.0)


class Doubled(nn.Linear):
    """A layer with the names of another, and another forward pass."""

    def forward(self, values: Tensor) -> Tensor:
        return 2.0 * super().forward(values)


def _another_class(model: nn.Sequential) -> None:
    inner, model[0] = model[0], Doubled(24, 32, bias=False)
    model[0].load_state_dict(inner.state_dict())


class Scaled(nn.Linear):
    """A LoRA as cloneofsimo's library has it: its strength is a number on the layer."""

    def __init__(self) -> None:
        super().__init__(24, 32, bias=False)
        self.lora_up, self.lora_down, self.scale = nn.Linear(2, 32), nn.Linear(24, 2), 1.0

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values) + self.scale * self.lora_up(self.lora_down(values))  # type: ignore[no-any-return]


class Added:
    """An attention processor of a script's own, which is no module: PyTorch knows nothing of its factors."""

    def __init__(self) -> None:
        self.up, self.inner = torch.ones(24), AttnProcessor()

    def __call__(self, attention: Attention, hidden_states: Tensor, **given: Any) -> Tensor:
        output: Tensor = self.inner(attention, hidden_states, **given)
        return output + self.up


def _attention() -> nn.Sequential:
    return nn.Sequential(Attention(24, heads=1, dim_head=8))


def _with_processor() -> nn.Sequential:
    model: Any = _attention()
    model[0].set_processor(Added())
    return model  # type: ignore[no-any-return]


def _strength_in_closure() -> Any:
    """As LyCORIS' wrappers have their multiplier."""
    model: Any = nn.Sequential(nn.Linear(24, 32, bias=False))
    strength, own = [1.0], model[0].forward
    model[0].forward = lambda values: own(values) + strength[0]
    model.strength = strength
    return model


OWN_WAYS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "a number on a layer": (lambda: nn.Sequential(Scaled()), lambda model: setattr(model[0], "scale", 0.0)),
    "a processor": (_attention, lambda model: model[0].set_processor(Added())),
    "a processor's factor": (_with_processor, lambda model: model[0].processor.up.mul_(2.0)),
    "another processor of its class": (
        _with_processor,
        lambda model: setattr(model[0].processor, "up", torch.zeros(24)),
    ),
    "the strength of a wrapper": (_strength_in_closure, lambda model: model.strength.__setitem__(0, 0.5)),
}


@pytest.mark.parametrize("way", OWN_WAYS)
def test_what_a_script_s_own_lora_does_is_open(way: str) -> None:
    make, act = OWN_WAYS[way]
    model, inputs = make().requires_grad_(False), torch.ones(1, 3, 24)
    baseline, before = capture_lora_baseline(model, None), model(inputs)
    act(model)
    assert not torch.equal(model(inputs), before)
    analysis = told(baseline, model)
    assert analysis["effective"] is None
    assert [finding["id"] for finding in analysis["findings"]] == ["lora_not_seen"]


def test_a_forward_pass_of_all_layers_that_was_exchanged_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(24, 32, bias=False))
    baseline, before, own = capture_lora_baseline(model, None), used(model), nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda layer, values: own(layer, values) + 1.0)
    assert not torch.equal(used(model), before)
    analysis = told(baseline, model)
    assert analysis["effective"] is None
    assert "the class Linear has another forward pass" in analysis["unavailable"]["effective"]


def test_a_processor_and_layers_of_a_script_s_own_that_stay_as_they_are_are_no_reason_for_doubt() -> None:
    model = nn.Sequential(Scaled(), *_with_processor())
    analysis = told(capture_lora_baseline(model, None), model)
    assert analysis["effective"] is False


@pytest.mark.parametrize("act", [_wrap, _replace_forward, _hook, _another_class])
@pytest.mark.parametrize("keys", [None, "none"])
def test_what_others_put_around_a_layer_is_open(act: Callable[[nn.Sequential], None], keys: Any) -> None:
    model = nn.Sequential(nn.Linear(24, 32, bias=False))
    before, baseline = used(model), capture_lora_baseline(model, None, keys=keys)
    act(model)
    assert not torch.equal(used(model), before)
    analysis = told(baseline, model)
    assert analysis["effective"] is None
    why = analysis["unavailable"]["effective"]
    assert any(words in why for words in ("than before", "forward pass of 0", "0 was a Linear"))
    assert [finding["id"] for finding in analysis["findings"]] == ["lora_not_seen"]


@pytest.mark.parametrize("factor", [0.0, 1.0], ids=["zeros", "numbers"])
def test_a_bypass_is_understood(factor: float) -> None:
    patcher, values = ModelPatcher(BaseModel()), torch.randn(2, 8)
    layer, adapter = patcher.model.get_submodule(Q.removesuffix(".weight")), lora_adapter()
    adapter.weights[0].mul_(factor)
    manager = BypassInjectionManager(BypassForwardHook(layer, adapter, 0.5))
    baseline, before = capture_lora_baseline(patcher, None), layer(values)
    (injection,) = patcher.injections["bypass_lora"] = manager.create_injections()
    injection.inject(patcher)
    analysis = told(baseline, patcher)
    assert analysis["effective"] is (factor > 0.0) is not torch.equal(layer(values), before)
    injection.eject(patcher)
    del patcher.injections["bypass_lora"]
    assert told(baseline, patcher)["effective"] is False


def test_what_was_taken_off_a_layer_leaves_nothing_around_it() -> None:
    model = nn.Sequential(nn.Linear(24, 32, bias=False))
    baseline = capture_lora_baseline(model, None)
    add_hook_to_module(model[0], ModelHook())
    remove_hook_from_module(model[0])
    assert "forward" in vars(model[0])
    assert told(baseline, model)["effective"] is False


def test_a_weight_that_changed_in_no_element_that_is_compared_is_open() -> None:
    model: Any = nn.Sequential(nn.Embedding(4000, 8))
    row, baseline = torch.tensor([1234]), capture_lora_baseline(model, None)
    before = model(row)
    with torch.no_grad():
        model[0].weight[row] += 1.0
    assert not torch.equal(model(row), before)
    analysis = told(baseline, model)
    assert analysis["effective"] is None
    assert "thousand elements" in analysis["unavailable"]["effective"]


@pytest.mark.parametrize("keys", [None, "none"])
def test_a_loader_that_did_nothing_is_told_by_the_elements_alone(keys: Any) -> None:
    model = nn.Sequential(nn.Linear(24, 32))
    analysis = told(capture_lora_baseline(model, None, keys=keys), model)
    assert analysis["effective"] is False
    assert [finding["id"] for finding in analysis["findings"]] == ["lora_not_applied"]


@pytest.mark.parametrize("infinite", [float("inf"), -float("inf"), float("nan")])
def test_a_strength_that_is_not_finite_acts(infinite: float) -> None:
    model = adapted(LoraConfig)
    finite = capture_lora_baseline(model, None)
    model[0].set_scale("a", infinite)
    assert not used(model).isfinite().all()
    analysis = told(finite, model)
    assert analysis["effective"] is True
    assert [finding["id"] for finding in analysis["findings"]] == ["lora_not_finite"]
    broken = capture_lora_baseline(model, None)
    assert told(broken, model)["effective"] is False
    model[0].set_scale("a", 1.0)
    assert told(broken, model)["effective"] is True


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_untrained_dora_changes_nothing(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(24, 32, bias=False)).to(dtype)
    values = torch.randn(5, 24, dtype=dtype)
    before, baseline = model(values), capture_lora_baseline(model, None)
    model = inject_adapter_in_model(LoraConfig(use_dora=True, target_modules=["0"]), model, "a")
    assert torch.equal(model(values), before)
    analysis = told(baseline, model)
    assert analysis["effective"] is False
    assert [finding["id"] for finding in analysis["findings"]] == ["lora_is_zero"]
    with torch.no_grad():
        model[0].lora_magnitude_vector["a"].weight.mul_(1.02)
    assert not torch.equal(model(values), before)
    assert told(baseline, model)["effective"] is True


@pytest.mark.parametrize("strength", [1.0, 0.25])
def test_factors_that_accelerate_offloads_are_read_from_its_hooks(strength: float) -> None:
    from accelerate import cpu_offload

    model = adapted(LoraConfig)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model[0].lora_A["a"].weight.is_meta
    before, baseline = used(model), capture_lora_baseline(model, None)
    model[0].set_scale("a", strength)
    change = float((used(model) - before).norm())
    analysis = told(baseline, model)
    assert analysis["effective"] is (True if change else None)  # the weight itself is not looked at
    assert analysis["unet_weight_changes"]["delta_norm"] == pytest.approx(change, rel=1e-5)
    assert "lora_changes_failed" not in {finding["id"] for finding in analysis["findings"]}


@pytest.mark.parametrize("kind", ["embedding", "loha"])
def test_factors_in_a_dictionary_are_read_from_its_hook(kind: str) -> None:
    from accelerate import cpu_offload

    config = {
        "embedding": LoraConfig(r=2, target_modules=["0"], init_lora_weights=False),
        "loha": LoHaConfig(r=2, target_modules=["1"], init_weights=False),
    }[kind]
    model: Any = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 6))
    model = inject_adapter_in_model(config, model, "a")
    layer = model[0 if kind == "embedding" else 1]
    whole = float(layer.get_delta_weight("a").detach().double().norm())
    cpu_offload(model, execution_device=torch.device("cpu"))
    baseline = capture_lora_baseline(model, None)
    layer.set_scale("a", 0.25)
    analysis = told(baseline, model)
    assert analysis["effective"] is True
    assert analysis["unet_weight_changes"]["delta_norm"] == pytest.approx(0.75 * whole, rel=1e-5)


class UnknownPatcher:
    """A host's object around a model that nothing is known of."""

    def __init__(self, diffusion_model: nn.Module) -> None:
        self.diffusion_model = diffusion_model


def test_an_unknown_patcher_is_open() -> None:
    patcher = UnknownPatcher(nn.Linear(2, 2))
    analysis = told(capture_lora_baseline(patcher, None), patcher)
    assert analysis["effective"] is None
    assert "UnknownPatcher" in analysis["unavailable"]["effective"] or "module" in str(
        analysis["unavailable"]
    )


@pytest.mark.parametrize("again", [False, True])
def test_factors_beyond_the_room_are_told_apart_by_content(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_snapshot, "MOST_KEPT_BYTES", 0)
    model = adapted(LoraConfig)
    baseline = capture_lora_baseline(model, None)
    if not again:
        model[0].enable_adapters(False)
    analysis = told(baseline, model)
    assert analysis["effective"] is not again
    norm = analysis["unet_weight_changes"]["delta_norm"]
    assert norm == (0.0 if again else None)
    assert again or "MiB" in analysis["unet_weight_changes"]["unavailable"]["delta_norm"]


def test_a_baseline_keeps_no_factor_alive() -> None:
    model = adapted(LoraConfig)
    references = [weakref.ref(parameter) for parameter in model.parameters()]
    baseline = capture_lora_baseline(model, None)
    del model
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]
    assert baseline["unet"]["captured"].kept.result().patches[0].tensors["up"].shape == (32, 4)


@pytest.mark.parametrize("load", [False, True])
@pytest.mark.parametrize(
    ("strengths", "left"), [((0.25,), 0.75), ((), 1.0), ((0.5, 0.5), 0.0), ((1.8, -0.8), 0)]
)
def test_comfyuis_patches_are_after_minus_before(
    strengths: tuple[float, ...], left: float, load: bool
) -> None:
    unet = ModelPatcher(BaseModel())
    one, other = unet.clone(), unet.clone()
    one.add_patches({Q: lora_adapter()}, 1.0)
    baseline = capture_lora_baseline(one, None)
    for strength in strengths:
        other.add_patches({Q: lora_adapter()}, strength)
    if load:
        other.load()
    analysis = analyze_lora_application_results(baseline, other, None, (other, None))
    assert analysis["effective"] is (left > 0)
    assert analysis["unet_weight_changes"]["delta_norm"] == pytest.approx(
        left * delta_norm(), rel=1e-5, abs=0.0
    )


@pytest.mark.parametrize("keys", ["none", ["0.weight"]])
@pytest.mark.parametrize("came_and_went", [False, True])
def test_a_lora_that_was_fused_and_deleted_between_is_seen_in_weights_that_were_not_read(
    keys: Any, came_and_went: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24, bias=False), nn.Linear(24, 32, bias=False))
    model = inject_adapter_in_model(LoraConfig(target_modules=["0"], init_lora_weights=False), model, "a")
    before, baseline = used(model), capture_lora_baseline(model, None, keys=keys)
    if came_and_went:
        config = LoraConfig(target_modules=["1"], init_lora_weights=False)
        model = inject_adapter_in_model(config, model, "b")
        model[1].merge(adapter_names=["b"])
        model[1] = model[1].base_layer
        model[0].set_adapter("a")  # "b" alone was active
    analysis = told(baseline, model)
    assert analysis["effective"] is came_and_went is not torch.equal(used(model), before)
    assert list(analysis["unet_weight_changes"]["keys_value_changed"]) == ["1.weight"] * came_and_went


def test_weights_that_cannot_be_read_are_open() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24, bias=False), nn.Linear(24, 32, bias=False, device="meta"))
    model = inject_adapter_in_model(LoraConfig(target_modules=["0"], init_lora_weights=False), model, "a")
    analysis = told(capture_lora_baseline(model, None, keys="none"), model)
    assert analysis["effective"] is None
    assert "1 weight could not be read at both moments" in analysis["unavailable"]["effective"]
