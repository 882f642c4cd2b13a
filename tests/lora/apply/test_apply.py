import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from tests.lora.small_net import SmallNet
from torch import Tensor, nn

from sigmascope.errors import ConfigError, ModelMismatchError, NonFiniteError
from sigmascope.lora.apply import attach_lora
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile

MakeFactors = Callable[..., LoraFactors]
MakeLora = Callable[..., LoraFile]


@pytest.fixture
def model() -> SmallNet:
    torch.manual_seed(0)
    return SmallNet()


@pytest.fixture
def image() -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def changed(model: SmallNet, lora: LoraFile, scale: float = 1.0) -> SmallNet:
    """What the LoRA means: the same model with W + scale·ΔW as weights."""
    copy = deepcopy(model)
    with torch.no_grad():
        for name, factors in lora.modules.items():
            copy.get_submodule(name).get_parameter("weight").add_(factors.delta(), alpha=scale)
    return copy


def hooks(model: nn.Module) -> Iterator[dict[str, object]]:
    for module in model.modules():
        yield {name: dict(held) for name, held in vars(module).items() if "_hooks" in name and held}


@pytest.mark.parametrize("scale", [1.0, 0.5, -1.0, 2.0])
def test_the_output_is_that_of_the_changed_weights(
    model: SmallNet, make_lora: MakeLora, image: Tensor, scale: float
) -> None:
    lora = make_lora(model, rank=3, alpha=1.5)
    expected = changed(model, lora, scale)(image)
    assert not torch.allclose(expected, model(image))
    with attach_lora(model, lora, scale):
        torch.testing.assert_close(model(image), expected)


def test_scale_zero_gives_the_same_bits(model: SmallNet, make_lora: MakeLora, image: Tensor) -> None:
    plain = model(image)
    with attach_lora(model, make_lora(model), scale=0.0):
        assert torch.equal(model(image), plain)


def test_the_scale_can_be_set_while_attached(model: SmallNet, make_lora: MakeLora, image: Tensor) -> None:
    lora = make_lora(model)
    plain, expected = model(image), changed(model, lora, 0.7)(image)
    with attach_lora(model, lora, scale=0.0) as attached:
        attached.scale = 0.7
        torch.testing.assert_close(model(image), expected)
        attached.scale = 0.0
        assert torch.equal(model(image), plain)


def test_weights_are_not_touched(model: SmallNet, make_lora: MakeLora, image: Tensor) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with attach_lora(model, make_lora(model)):
        model(image)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_detaching_removes_its_own_hooks_and_no_others(
    model: SmallNet, make_lora: MakeLora, image: Tensor
) -> None:
    model.stem.register_forward_hook(lambda module, args, output: None)
    model.out.register_forward_pre_hook(lambda module, args: None)
    before, attributes = list(hooks(model)), [sorted(vars(module)) for module in model.modules()]
    attached = attach_lora(model, make_lora(model))
    model(image)
    assert list(hooks(model)) != before
    attached.detach()
    assert list(hooks(model)) == before
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert not attached.attached
    attached.detach()


def test_leaving_the_block_by_an_error_detaches(model: SmallNet, make_lora: MakeLora) -> None:
    with pytest.raises(ZeroDivisionError), attach_lora(model, make_lora(model)):
        _ = 1 / 0
    assert not any(hooks(model))


def test_several_loras_add_up_and_leave_in_any_order(
    model: SmallNet, make_lora: MakeLora, image: Tensor
) -> None:
    one, two = make_lora(model, seed=1), make_lora(model, rank=4, seed=50)
    with_both, with_two = changed(changed(model, one, 0.5), two, 2.0)(image), changed(model, two, 2.0)(image)
    first, second = attach_lora(model, one, 0.5), attach_lora(model, two, 2.0)
    torch.testing.assert_close(model(image), with_both)
    first.detach()
    torch.testing.assert_close(model(image), with_two)
    second.detach()
    assert not any(hooks(model))


def test_every_module_is_listed_as_applied(model: SmallNet, make_lora: MakeLora) -> None:
    with attach_lora(model, make_lora(model)) as attached:
        assert attached.applied == ("stem", "strided", "dilated", "pointwise", "out")


def test_modules_that_never_ran_are_named(model: SmallNet, make_lora: MakeLora, image: Tensor) -> None:
    with attach_lora(model, make_lora(model)) as attached:
        assert attached.dormant == attached.applied
        model.stem(image)
        assert attached.dormant == ("strided", "dilated", "pointwise", "out")


def test_gradients_reach_the_input_and_the_weights(
    model: SmallNet, make_lora: MakeLora, image: Tensor
) -> None:
    lora = make_lora(model)
    other = changed(model, lora)

    def gradients(net: SmallNet) -> tuple[Tensor, ...]:
        x = image.clone().requires_grad_()
        return torch.autograd.grad(net(x).square().sum(), (x, net.strided.weight))

    expected = gradients(other)
    with attach_lora(model, lora):
        torch.testing.assert_close(gradients(model), expected)


def test_a_first_run_in_inference_mode_does_not_spoil_a_later_training_step(
    model: SmallNet, make_lora: MakeLora, image: Tensor
) -> None:
    lora = make_lora(model)
    with attach_lora(model, lora):
        model.double()
        with torch.inference_mode():
            model(image.double())
        model(image.double().requires_grad_()).sum().backward()
    assert model.stem.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_models_dtype_is_kept(
    model: SmallNet, make_lora: MakeLora, image: Tensor, dtype: torch.dtype
) -> None:
    lora = make_lora(model)
    expected = changed(model, lora)(image)
    model.to(dtype)
    with torch.no_grad(), attach_lora(model, lora):
        output = model(image.to(dtype))
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), expected.detach(), rtol=0.05, atol=0.05)


def test_a_model_that_changes_dtype_while_attached_still_runs(
    model: SmallNet, make_lora: MakeLora, image: Tensor
) -> None:
    lora = make_lora(model)
    expected = changed(model, lora).double()(image.double())
    with attach_lora(model, lora):
        model(image)
        model.double()
        torch.testing.assert_close(model(image.double()), expected, rtol=1e-5, atol=1e-6)


def test_autocast_is_respected(model: SmallNet, make_lora: MakeLora, image: Tensor) -> None:
    lora = make_lora(model)
    expected = changed(model, lora)(image)
    with torch.autocast("cpu", torch.bfloat16), attach_lora(model, lora):
        output = model(image)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.05)


def test_the_input_may_be_passed_by_name(make_lora: MakeLora) -> None:
    layer = nn.Sequential(nn.Linear(3, 2))
    lora = make_lora(layer)
    x = torch.randn(4, 3)
    expected = layer[0](x) + x @ lora.modules["0"].delta().T
    with attach_lora(layer, lora):
        torch.testing.assert_close(layer[0](input=x), expected)


def test_pefts_own_layers_give_the_same_output(model: SmallNet, image: Tensor) -> None:
    torch.manual_seed(3)
    # PEFT computes its low-rank branch with zero padding only, so the reflecting layer stays out.
    names = ["stem", "pointwise", "out"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=names, init_lora_weights=False)
    wrapped = get_peft_model(deepcopy(model), config).eval()
    modules = {}
    for name in names:
        layer = wrapped.base_model.model.get_submodule(name)
        up, down = layer.lora_B["default"].weight.detach(), layer.lora_A["default"].weight.detach()
        weight_shape = tuple(model.get_submodule(name).get_parameter("weight").shape)
        modules[name] = LoraFactors(up.flatten(1), down.flatten(1), 8.0, weight_shape)
    with torch.no_grad(), attach_lora(model, LoraFile(modules)):
        torch.testing.assert_close(model(image), wrapped(image))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_in_bfloat16_the_output_is_pefts_to_the_bit(is_compiled: bool) -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 16)).bfloat16()
    x = torch.randn(7, 24, dtype=torch.bfloat16)
    config = LoraConfig(r=4, lora_alpha=5, target_modules=["0", "2"], init_lora_weights=False)
    wrapped = get_peft_model(deepcopy(net), config, autocast_adapter_dtype=False).eval()
    modules = {}
    for name in ("0", "2"):
        layer = wrapped.base_model.model.get_submodule(name)
        up, down = layer.lora_B["default"].weight.detach(), layer.lora_A["default"].weight.detach()
        assert up.dtype == torch.bfloat16
        modules[name] = LoraFactors(up, down, 5.0, (len(up), down.shape[1]))
    with torch.no_grad(), attach_lora(net, LoraFile(modules)):
        run: Any = torch.compile(net, backend="eager", fullgraph=True) if is_compiled else net
        theirs: Any = torch.compile(wrapped, backend="eager") if is_compiled else wrapped
        assert torch.equal(run(x), theirs(x))


def test_a_part_of_the_model_takes_keys_with_the_whole_models_prefix(
    model: SmallNet, make_lora: MakeLora, image: Tensor
) -> None:
    expected = changed(model, make_lora(model))(image)
    with attach_lora(model, make_lora(model, prefix="denoiser.")) as attached:
        assert attached.applied[0] == "denoiser.stem"
        torch.testing.assert_close(model(image), expected)


def test_the_whole_model_takes_them_as_they_are(model: SmallNet, make_lora: MakeLora) -> None:
    whole = nn.ModuleDict({"denoiser": model, "vae": deepcopy(model)})
    with attach_lora(whole, make_lora(model, prefix="denoiser.")):
        assert any(hooks(model))
        assert not any(hooks(whole["vae"]))


def test_modules_the_model_lacks_are_named_with_the_nearest(
    model: SmallNet, make_factors: MakeFactors
) -> None:
    lora = LoraFile(
        {"stem": make_factors((8, 3, 3, 3), 2), "dilatd": make_factors((6, 8, 1, 3), 2)},
    )
    with pytest.raises(ModelMismatchError, match=r"1 of 2 modules .*dilatd \(nearest: dilated\)"):
        attach_lora(model, lora)
    assert not any(hooks(model))


def test_a_module_of_another_kind_is_named_as_such(make_factors: MakeFactors) -> None:
    model = nn.ModuleDict({"up": nn.ConvTranspose2d(4, 4, 3), "in": nn.Linear(2, 2)})
    with pytest.raises(ModelMismatchError, match=r"up \(a ConvTranspose2d has that name\)"):
        attach_lora(model, LoraFile({"up": make_factors((4, 4, 3, 3), 2)}))


def test_a_wrong_shape_is_named_with_both(model: SmallNet, make_factors: MakeFactors) -> None:
    with pytest.raises(ModelMismatchError, match=r"out is \(4, 6\) in the LoRA and \(4, 5\) in the model"):
        attach_lora(model, LoraFile({"out": make_factors((4, 6), 2)}))


def test_only_the_first_of_many_misfits_are_named(model: SmallNet, make_factors: MakeFactors) -> None:
    lora = LoraFile({f"block.{index}": make_factors((4, 5), 1) for index in range(12)})
    with pytest.raises(ModelMismatchError, match=r"12 of 12 .*block\.4; and 7 more"):
        attach_lora(model, lora)


def test_a_grouped_convolution_is_refused(make_lora: MakeLora) -> None:
    model = nn.ModuleDict({"depthwise": nn.Conv2d(4, 4, 3, groups=4)})
    with pytest.raises(ModelMismatchError, match=r"depthwise is a grouped convolution \(4 groups\)"):
        attach_lora(model, make_lora(model))


def test_an_empty_lora_is_refused(model: SmallNet) -> None:
    with pytest.raises(ModelMismatchError, match="changes no module"):
        attach_lora(model, LoraFile({}))


def test_a_scale_of_nan_is_refused(model: SmallNet, make_lora: MakeLora) -> None:
    with pytest.raises(ConfigError, match="scale nan"):
        attach_lora(model, make_lora(model), nan)
    with attach_lora(model, make_lora(model)) as attached, pytest.raises(ConfigError):
        attached.scale = nan


def test_layers_that_share_a_weight_all_change(make_lora: MakeLora) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    lora = make_lora(model[:1])
    x = torch.randn(2, 4)
    changed_weight = model.get_parameter("0.weight") + lora.modules["0"].delta()
    with attach_lora(model, lora):
        torch.testing.assert_close(model(x), x @ changed_weight.T @ changed_weight.T)


def test_two_different_changes_of_one_shared_weight_are_refused(make_lora: MakeLora) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    lora = make_lora(model)
    model[1].weight = model[0].weight
    with pytest.raises(ModelMismatchError, match="0, 1 share one weight"):
        attach_lora(model, lora)


def test_an_already_compiled_model_is_refused(model: SmallNet, make_lora: MakeLora) -> None:
    lora = make_lora(model)
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    with pytest.raises(ModelMismatchError, match=r"already compiled.*merge_into_model"):
        attach_lora(compiled, lora)
    model.compile(backend="eager")
    with pytest.raises(ModelMismatchError, match="already compiled"):
        attach_lora(model, lora)


@pytest.mark.slow
def test_a_model_compiled_afterwards_follows_the_scale_and_the_detaching(
    model: SmallNet, make_lora: MakeLora, image: Tensor
) -> None:
    lora = make_lora(model)
    plain, whole, half = model(image), changed(model, lora)(image), changed(model, lora, 0.5)(image)
    attached = attach_lora(model, lora)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(image), whole)
    attached.scale = 0.5
    torch.testing.assert_close(compiled(image), half)
    attached.detach()
    torch.testing.assert_close(compiled(image), plain)


def test_an_offloaded_model_runs_with_its_lora(model: SmallNet, make_lora: MakeLora, image: Tensor) -> None:
    lora = make_lora(model)
    expected = changed(model, lora)(image)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.stem.weight.is_meta
    with torch.no_grad(), attach_lora(model, lora):
        torch.testing.assert_close(model(image), expected)


def test_layers_that_peft_has_wrapped_are_found_under_their_own_names(
    model: SmallNet, make_lora: MakeLora, image: Tensor
) -> None:
    lora = make_lora(model)
    expected = changed(model, lora)(image)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["stem", "out"]), model)  # begins as no change
    assert not isinstance(model.get_submodule("stem"), nn.Conv2d)
    with torch.no_grad(), attach_lora(model, lora):
        torch.testing.assert_close(model(image), expected)


def test_a_data_parallel_model_is_looked_through(model: SmallNet, make_lora: MakeLora, image: Tensor) -> None:
    lora = make_lora(model)
    expected = changed(model, lora)(image)
    wrapped = nn.DataParallel(model)
    with attach_lora(wrapped, lora):
        torch.testing.assert_close(model(image), expected)


def test_a_compiled_neighbour_does_not_matter(model: SmallNet, make_lora: MakeLora) -> None:
    whole = nn.ModuleDict({"denoiser": model, "vae": deepcopy(model)})
    whole["vae"].compile(backend="eager")
    lora = make_lora(model, prefix="denoiser.")
    with attach_lora(whole, lora) as attached:
        assert set(attached.applied) == set(lora.modules)


def test_attention_that_bypasses_its_projections_hooks_is_refused(make_factors: MakeFactors) -> None:
    model = nn.MultiheadAttention(8, 2)
    with pytest.raises(ModelMismatchError, match=r"out_proj: nn\.MultiheadAttention"):
        attach_lora(model, LoraFile({"out_proj": make_factors((8, 8), 2)}))


def test_keys_that_are_not_applied_are_logged(
    model: SmallNet, make_lora: MakeLora, caplog: pytest.LogCaptureFixture
) -> None:
    lora = LoraFile(make_lora(model).modules, unused_keys=("stem.diff_b",))
    with caplog.at_level(logging.WARNING), attach_lora(model, lora):
        assert "1 key is not applied: ('stem.diff_b',)" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_model_that_moves_to_the_gpu_while_attached_still_runs(
    model: SmallNet, make_lora: MakeLora, image: Tensor
) -> None:
    lora = make_lora(model)
    expected = changed(model, lora)(image)
    with torch.no_grad(), attach_lora(model, lora):
        model.cuda()
        torch.testing.assert_close(model(image.cuda()).cpu(), expected, rtol=1e-3, atol=1e-3)


def half_model_and_lora(up: float, down: float) -> tuple[nn.Module, LoraFile]:
    model = nn.Sequential(nn.Linear(4, 4, bias=False)).half()
    factors = LoraFactors(torch.full((4, 1), up), torch.full((1, 4), down), 1.0, (4, 4))
    return model, LoraFile({"0": factors})


@pytest.mark.parametrize(("up", "down"), [(1e6, 1e-6), (1e-6, 1e6), (0.0, 1e6)])
def test_factors_beyond_float16_share_the_change_so_that_both_fit(up: float, down: float) -> None:
    model, lora = half_model_and_lora(up, down)
    x = torch.ones(1, 4, dtype=torch.float16)
    plain = model(x)
    with attach_lora(model, lora):
        torch.testing.assert_close(model(x), plain + 4 * up * down, rtol=2e-3, atol=2e-3)


def test_a_change_beyond_float16_is_refused_with_the_file_and_the_layer() -> None:
    model, lora = half_model_and_lora(1e6, 1e6)
    with pytest.raises(NonFiniteError, match=r"^0: the LoRA's factors hold NaN or Inf in torch\.float16"):
        attach_lora(model, lora)
    with pytest.raises(NonFiniteError, match=r"^wide\.safetensors: 0: the LoRA's factors"):
        attach_lora(model, replace(lora, path=Path("wide.safetensors")))


def test_threads_that_run_one_layer_in_two_dtypes_do_not_mix_them() -> None:
    model = nn.Linear(4, 4, bias=False)
    lora = LoraFile({"0": LoraFactors(torch.ones(4, 1), torch.ones(1, 4), 1.0, (4, 4))})
    with attach_lora(nn.Sequential(model), lora):
        hook = next(iter(model._forward_hooks.values()))
        outputs = {torch.float32: torch.zeros(1, 4), torch.float64: torch.zeros(1, 4, dtype=torch.float64)}

        def run(dtype: torch.dtype) -> bool:
            x = torch.ones(1, 4, dtype=dtype)
            return all(hook(model, (x,), {}, outputs[dtype]).dtype == dtype for _ in range(200))

        with ThreadPoolExecutor(2) as pool:
            assert all(pool.map(run, [torch.float32, torch.float64]))


def test_factors_whose_kernel_does_not_show_fit_a_convolution(make_factors: MakeFactors) -> None:
    layer = nn.Conv2d(3, 8, 3)
    flattened = make_factors((8, 27), 2)
    image = torch.randn(1, 3, 6, 6)
    delta = flattened.delta().reshape(8, 3, 3, 3)
    with torch.no_grad():
        expected = nn.functional.conv2d(image, layer.weight + delta, layer.bias)
        with attach_lora(nn.ModuleDict({"conv": layer}), LoraFile({"conv": flattened})):
            torch.testing.assert_close(layer(image), expected, rtol=1e-4, atol=1e-5)
