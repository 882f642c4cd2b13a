import logging
from collections.abc import Callable
from math import inf

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from sigmascope.errors import ConfigError, ModelMismatchError, NonFiniteError
from sigmascope.lora import factors as factors_module
from sigmascope.lora.apply import attach_lora
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.live_merge import merge_into_model

MakeFactors = Callable[..., LoraFactors]
MakeLora = Callable[..., LoraFile]


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(6, 4))


@pytest.fixture(scope="module")
def unet() -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=8,
        use_linear_projection=True,
    ).eval()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def weight(model: nn.Module, name: str) -> Tensor:
    """A layer's weight itself, without a copy."""
    return model.get_parameter(f"{name}.weight").detach()


def same_bits(model: nn.Module, kept: dict[str, Tensor]) -> bool:
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
    return all(
        value.dtype == kept[name].dtype
        and torch.equal(value.view(bits[value.dtype]), kept[name].view(bits[value.dtype]))
        for name, value in model.state_dict().items()
    )


@pytest.mark.parametrize("scale", [1.0, -0.5, 2.0])
def test_weights_become_base_plus_scaled_change(
    model: nn.Sequential, make_lora: MakeLora, scale: float
) -> None:
    lora = make_lora(model, rank=2, alpha=3.0)
    base = weights(model)
    merged = merge_into_model(model, lora, scale)
    assert merged.applied == ("0", "2")
    for name, factors in lora.modules.items():
        expected = base[f"{name}.weight"].double() + scale * factors.delta(torch.float64)
        torch.testing.assert_close(weights(model)[f"{name}.weight"].double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unmerging_restores_every_bit(
    unet: UNet2DConditionModel, make_lora: MakeLora, dtype: torch.dtype
) -> None:
    unet.to(dtype)
    base = weights(unet)
    merged = merge_into_model(unet, make_lora(unet, rank=3), 0.9)
    assert not same_bits(unet, base)
    merged.unmerge()
    assert same_bits(unet, base)
    assert not merged.merged
    merged.unmerge()
    assert same_bits(unet, base)
    unet.float()


def test_a_unet_gives_the_same_hot_and_merged(unet: UNet2DConditionModel, make_lora: MakeLora) -> None:
    unet.float()
    lora = make_lora(unet, rank=3, prefix="denoiser.")
    generator = torch.Generator().manual_seed(2)
    latent = torch.randn(1, 4, 8, 8, generator=generator)
    conditioning = torch.randn(1, 5, 16, generator=generator)

    def run() -> Tensor:
        with torch.no_grad():
            sample: Tensor = unet(latent, 3, conditioning).sample
        return sample

    plain = run()
    with attach_lora(unet, lora, 0.8) as attached:
        hot = run()
        assert attached.dormant == ()
    with merge_into_model(unet, lora, 0.8):
        cold = run()
    assert float((hot - plain).abs().max()) > 0.05
    torch.testing.assert_close(hot, cold, rtol=1e-4, atol=1e-5)
    assert torch.equal(run(), plain)


def test_rounding_happens_once_to_the_weights_dtype(model: nn.Sequential, make_lora: MakeLora) -> None:
    model.bfloat16()
    lora = make_lora(model)
    base = weights(model)
    merge_into_model(model, lora)
    expected = (base["2.weight"].float() + lora.modules["2"].delta()).bfloat16()
    assert torch.equal(weight(model, "2"), expected)


@pytest.mark.parametrize("scale", [1.0, -0.7])
def test_a_weight_of_many_pieces_is_merged_and_restored(
    make_lora: MakeLora, monkeypatch: pytest.MonkeyPatch, scale: float
) -> None:
    monkeypatch.setattr(factors_module, "_PIECE", 32 * 48)
    model = nn.Sequential(nn.Linear(48, 70))
    lora = make_lora(model, rank=2)
    base = weights(model)
    exact = base["0.weight"].double() + scale * lora.modules["0"].delta(torch.float64)
    with merge_into_model(model, lora, scale):
        torch.testing.assert_close(weight(model, "0").double(), exact, rtol=1e-6, atol=1e-7)
    assert same_bits(model, base)


def test_an_overflow_in_the_last_piece_leaves_the_weight_as_it_was(
    make_lora: MakeLora, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factors_module, "_PIECE", 32 * 48)
    model = nn.Sequential(nn.Linear(48, 70))
    lora = make_lora(model, rank=2)
    lora.modules["0"].up[-1] = inf
    base = weights(model)
    with pytest.raises(NonFiniteError, match="0: the merged weight would hold NaN or Inf"):
        merge_into_model(model, lora)
    assert same_bits(model, base)


def test_float64_arithmetic_where_asked(model: nn.Sequential, make_lora: MakeLora) -> None:
    model.double()
    lora = make_lora(model, dtype=torch.float64)
    base = weights(model)
    merge_into_model(model, lora, compute_dtype=torch.float64)
    expected = base["2.weight"] + lora.modules["2"].delta(torch.float64)
    torch.testing.assert_close(weight(model, "2"), expected, rtol=1e-15, atol=1e-15)


def test_parameters_stay_the_same_objects(model: nn.Sequential, make_lora: MakeLora) -> None:
    before = [(id(parameter), parameter.data_ptr()) for parameter in model.parameters()]
    with merge_into_model(model, make_lora(model)):
        assert [(id(parameter), parameter.data_ptr()) for parameter in model.parameters()] == before
    assert [(id(parameter), parameter.data_ptr()) for parameter in model.parameters()] == before
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_scale_zero_touches_nothing(model: nn.Sequential, make_lora: MakeLora) -> None:
    with torch.no_grad():
        weight(model, "2").fill_(-0.0)
    base = weights(model)
    merged = merge_into_model(model, make_lora(model), scale=0.0)
    assert same_bits(model, base)
    assert (merged.merged, merged.applied) == (False, ("0", "2"))


def test_nested_merges_are_undone_in_order(model: nn.Sequential, make_lora: MakeLora) -> None:
    base = weights(model)
    with merge_into_model(model, make_lora(model, seed=1)):
        between = weights(model)
        with merge_into_model(model, make_lora(model, seed=2)):
            pass
        assert same_bits(model, between)
    assert same_bits(model, base)


def test_undoing_the_outer_merge_first_is_refused(model: nn.Sequential, make_lora: MakeLora) -> None:
    base = weights(model)
    outer = merge_into_model(model, make_lora(model, seed=1))
    inner = merge_into_model(model, make_lora(model, seed=2))
    both = weights(model)
    with pytest.raises(
        ModelMismatchError, match="2 of 2 merged weights were changed since the merge, first 0"
    ):
        outer.unmerge()
    assert same_bits(model, both)
    inner.unmerge()
    outer.unmerge()
    assert same_bits(model, base)


def test_a_training_step_in_between_is_not_silently_lost(model: nn.Sequential, make_lora: MakeLora) -> None:
    base = weights(model)
    merged = merge_into_model(model, make_lora(model))
    with torch.no_grad():
        weight(model, "2")[0, 0] += 0.5
    with pytest.raises(ModelMismatchError, match=r"1 of 2 .* first 2.*force=True"):
        merged.unmerge()
    merged.unmerge(force=True)
    assert same_bits(model, base)


@pytest.mark.parametrize(
    "accident",
    [
        lambda weight: weight.neg_(),
        lambda weight: weight.copy_(weight.flip(0)),
        lambda weight: weight.copy_(weight.flip(1)),
        lambda weight: weight.view(-1)[:1].mul_(1 + 2**-20),
    ],
)
def test_any_accident_to_a_merged_weight_is_noticed(
    make_lora: MakeLora, accident: Callable[[Tensor], object]
) -> None:
    model = nn.Sequential(nn.Linear(37, 64))
    merged = merge_into_model(model, make_lora(model))
    with torch.no_grad():
        accident(weight(model, "0"))
    with pytest.raises(ModelMismatchError, match="changed since"):
        merged.unmerge()


def test_a_model_cast_while_merged_is_restored_only_by_force(
    model: nn.Sequential, make_lora: MakeLora
) -> None:
    base = weights(model)
    merged = merge_into_model(model, make_lora(model))
    model.bfloat16()
    with pytest.raises(ModelMismatchError):
        merged.unmerge()
    merged.unmerge(force=True)
    assert torch.equal(weight(model, "2"), base["2.weight"].bfloat16())


def test_a_weight_that_layers_share_changes_once(make_lora: MakeLora) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    one = make_lora(model[:1])
    both = LoraFile({"0": one.modules["0"], "1": one.modules["0"]})
    base = weight(model, "0").clone()
    with merge_into_model(model, both) as merged:
        assert merged.applied == ("0", "1")
        torch.testing.assert_close(weight(model, "1"), base + one.modules["0"].delta())
        assert model.get_parameter("1.weight") is model.get_parameter("0.weight")
    assert torch.equal(weight(model, "0"), base)


def test_a_weight_that_is_not_contiguous_is_merged_and_restored(make_lora: MakeLora) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    kernel = model.get_parameter("0.weight")
    kernel.data = kernel.data.to(memory_format=torch.channels_last)
    base = weights(model)
    lora = make_lora(model)
    with merge_into_model(model, lora):
        torch.testing.assert_close(weight(model, "0"), base["0.weight"] + lora.modules["0"].delta())
        assert not weight(model, "0").is_contiguous()
    assert torch.equal(weight(model, "0"), base["0.weight"])


def test_an_overflow_is_refused_and_leaves_the_model_as_it_was(
    model: nn.Sequential, make_lora: MakeLora
) -> None:
    model.half()
    base = weights(model)
    lora = make_lora(model)
    huge = LoraFactors(lora.modules["2"].up * 1e9, lora.modules["2"].down, 2.0, (4, 6))
    with pytest.raises(NonFiniteError, match=r"2: the merged weight would hold NaN or Inf in torch\.float16"):
        merge_into_model(model, LoraFile({"0": lora.modules["0"], "2": huge}))
    assert same_bits(model, base)


def test_an_interrupt_leaves_the_model_as_it_was(
    model: nn.Sequential, make_lora: MakeLora, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = weights(model)
    lora = make_lora(model)
    real = torch.mm

    def interrupted(up: Tensor, down: Tensor, **options: Tensor) -> Tensor:
        if (len(up), down.shape[1]) == (4, 6):  # the second layer, after the first has changed
            raise KeyboardInterrupt
        return real(up, down, **options)

    monkeypatch.setattr(torch, "mm", interrupted)
    with pytest.raises(KeyboardInterrupt):
        merge_into_model(model, lora)
    assert same_bits(model, base)


def test_a_misfit_is_refused_before_anything_changes(
    model: nn.Sequential, make_lora: MakeLora, make_factors: MakeFactors
) -> None:
    base = weights(model)
    modules = {**make_lora(model).modules, "2": make_factors((5, 6), 2)}
    with pytest.raises(ModelMismatchError, match=r"2 is \(5, 6\) in the LoRA and \(4, 6\) in the model"):
        merge_into_model(model, LoraFile(modules))
    assert same_bits(model, base)


def test_a_model_without_values_is_refused(make_lora: MakeLora) -> None:
    model = nn.Sequential(nn.Linear(4, 4, device="meta"))
    with pytest.raises(ModelMismatchError, match="0 is on the meta device"):
        merge_into_model(model, make_lora(model))


def test_a_packed_weight_is_refused_with_the_way_that_works(make_lora: MakeLora) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    lora = make_lora(model)
    model[0].weight = nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ModelMismatchError, match=r"is quantised.*attach_lora"):
        merge_into_model(model, lora)


def test_a_computed_weight_is_refused_with_the_way_that_works(make_lora: MakeLora) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    lora = make_lora(model)
    parametrizations.weight_norm(model[0])
    with pytest.raises(ModelMismatchError, match=r"computes its weight.*attach_lora"):
        merge_into_model(model, lora)
    x = torch.randn(2, 4)
    expected = model(x) + x @ lora.modules["0"].delta().T
    with attach_lora(model, lora):
        torch.testing.assert_close(model(x), expected)


def test_a_compiled_model_is_merged(model: nn.Sequential, make_lora: MakeLora) -> None:
    lora = make_lora(model)
    base = weights(model)
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    with merge_into_model(compiled, lora):
        assert not same_bits(model, base)
    assert same_bits(model, base)


def test_an_infinite_scale_is_refused(model: nn.Sequential, make_lora: MakeLora) -> None:
    with pytest.raises(ConfigError, match="scale inf"):
        merge_into_model(model, make_lora(model), inf)


def test_keys_that_are_not_merged_are_logged(
    model: nn.Sequential, make_lora: MakeLora, caplog: pytest.LogCaptureFixture
) -> None:
    lora = LoraFile(make_lora(model).modules, unused_keys=("0.diff_b",))
    with caplog.at_level(logging.WARNING):
        merge_into_model(model, lora)
    assert "1 key is not applied: ('0.diff_b',)" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_merging_on_the_gpu_keeps_the_originals_on_the_cpu(model: nn.Sequential, make_lora: MakeLora) -> None:
    base = weights(model)
    model.cuda()
    merged = merge_into_model(model, make_lora(model))
    model.cpu()
    merged.unmerge()
    assert same_bits(model, base)


def test_a_float64_model_is_merged_in_float64(make_lora: MakeLora) -> None:
    model = nn.Sequential(nn.Linear(6, 4)).double()
    lora = make_lora(model, dtype=torch.float64)
    expected = weight(model, "0") + lora.modules["0"].delta(torch.float64)
    merge_into_model(model, lora)
    torch.testing.assert_close(weight(model, "0"), expected, rtol=1e-15, atol=0)


def test_an_interrupted_unmerge_can_be_finished(
    model: nn.Sequential, make_lora: MakeLora, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = weights(model)
    merged = merge_into_model(model, make_lora(model))

    def interrupted(target: Tensor, values: Tensor) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("sigmascope.lora.live_merge.write_values", interrupted)
        with pytest.raises(KeyboardInterrupt):
            merged.unmerge()
    merged.unmerge()
    assert same_bits(model, base)


@pytest.mark.parametrize("lost", [torch.zeros(3, 6), torch.zeros(4, 6, device="meta")])
def test_an_original_that_fits_no_more_is_kept(
    model: nn.Sequential, make_lora: MakeLora, lost: Tensor
) -> None:
    base = weights(model)
    merged = merge_into_model(model, make_lora(model))
    linear = model[2]
    held = linear.weight
    linear.weight = nn.Parameter(lost)
    with pytest.raises(ModelMismatchError, match=r"cannot be restored.*first 2"):
        merged.unmerge(force=True)
    linear.weight = held
    merged.unmerge()
    assert same_bits(model, base)


def test_an_inference_tensor_is_refused_with_the_way_that_works(make_lora: MakeLora) -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ModelMismatchError, match=r"inference_mode.*attach_lora"):
        merge_into_model(model, make_lora(model))


def test_the_originals_lie_in_one_aligned_block(model: nn.Sequential, make_lora: MakeLora) -> None:
    merged = merge_into_model(model.bfloat16(), make_lora(model))
    originals = [changed.original for changed in merged._changed]
    assert len({original.untyped_storage().data_ptr() for original in originals}) == 1
    offsets = [original.storage_offset() * original.element_size() for original in originals]
    assert offsets == [0, 384]  # 324 bytes, up to the next multiple of 64
