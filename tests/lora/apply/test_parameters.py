"""Whole differences of norms and of WAN's modulation: attached, merged into the live model, and taken off."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.families import make_pipeline
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from sigmascope.errors import ModelMismatchError
from sigmascope.lora.adapters import DiffChange
from sigmascope.lora.apply import attach_lora
from sigmascope.lora.file import LoraFile
from sigmascope.lora.live_merge import merge_into_model
from sigmascope.lora.reader import load_lora


class Scale(nn.Module):
    """A norm of the host's own make, whose weight no hook of ours knows how to use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.tanh()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.scale = Scale()
        self.modulation = nn.Parameter(torch.randn(1, 2, 6))

    def forward(self, x: Tensor) -> Tensor:
        gate, shift = self.modulation.unbind(1)
        out: Tensor = self.scale(self.norm(x)) * gate + shift
        return out


TENSORS = ("norm.weight", "norm.bias", "scale.weight", "modulation")


@pytest.fixture
def model() -> Block:
    torch.manual_seed(0)
    return Block()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(1))


def difference(seed: int, *tensors: str) -> LoraFile:
    generator = torch.Generator().manual_seed(seed)
    state = Block().state_dict()
    return LoraFile(
        {},
        changes={
            tensor.removesuffix(".weight"): DiffChange(
                {"diff": torch.randn(state[tensor].shape, generator=generator)}
            )
            for tensor in tensors or TENSORS
        },
    )


def changed(model: Block, lora: LoraFile, scale: float) -> Block:
    """A copy whose parameters are W + scale · ΔW."""
    after = copy.deepcopy(model)
    for key, parameter in after.named_parameters():
        if key.removesuffix(".weight") in lora.changes:
            parameter.data.add_(lora.changes[key.removesuffix(".weight")].delta(), alpha=scale)
    return after


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("apply", [attach_lora, merge_into_model])
def test_a_whole_difference_of_any_parameter_applies(
    apply: Callable[..., Any], tensor: str, model: Block, x: Tensor
) -> None:
    lora, plain = difference(3, tensor), model(x)
    expected = changed(model, lora, 0.5)(x)
    with apply(model, lora, 0.5) as applied:
        torch.testing.assert_close(model(x), expected)
        assert applied.applied == (tensor.removesuffix(".weight"),)
    assert not torch.allclose(plain, expected)
    assert torch.equal(model(x), plain)


def test_the_host_sees_the_parameters_as_they_are(model: Block, x: Tensor) -> None:
    kept = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    own = dict(model.named_parameters())
    attributes = [set(vars(module)) for module in model.modules()]
    with attach_lora(model, difference(3)) as attached:
        dormant = [attached.dormant, model(x), attached.dormant]
        assert dormant[::2] == [("norm", "norm.bias", "scale", "modulation"), ()]
        assert isinstance(model.norm, nn.LayerNorm)
        assert repr(model.norm).startswith("LayerNorm((6,)")
        assert all(torch.equal(tensor, kept[key]) for key, tensor in model.state_dict().items())
        assert all(own[key] is parameter for key, parameter in model.named_parameters())
    assert (type(model), type(model.norm), type(model.scale)) == (Block, nn.LayerNorm, Scale)
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert not any(module._forward_hooks for module in model.modules())


def test_it_changes_while_attached_and_at_0_is_bare(model: Block, x: Tensor) -> None:
    first, second, plain, bare = difference(3), difference(4), model(x), copy.deepcopy(model)
    with attach_lora(model, first) as attached:
        attached.scale = 0.0
        assert torch.equal(model(x), plain)
        attached.scale = -2.0
        torch.testing.assert_close(model(x), changed(bare, first, -2.0)(x))
        attached.swap(second)
        torch.testing.assert_close(model(x), changed(bare, second, -2.0)(x))
        attached.blocks = {"norm": 0.0}
        without = second.only({"scale", "modulation"})
        torch.testing.assert_close(model(x), changed(bare, without, -2.0)(x))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_add_up_and_detach_in_any_order(order: tuple[int, int], model: Block, x: Tensor) -> None:
    loras, plain = (difference(3), difference(4, "norm.weight", "modulation")), model(x)
    bare = copy.deepcopy(model)
    attached = [attach_lora(model, lora) for lora in loras]
    torch.testing.assert_close(model(x), changed(changed(bare, loras[0], 1.0), loras[1], 1.0)(x))
    attached[order[0]].detach()
    torch.testing.assert_close(model(x), changed(bare, loras[order[1]], 1.0)(x))
    attached[order[1]].detach()
    assert torch.equal(model(x), plain)
    assert type(model.norm) is nn.LayerNorm


def test_a_parameter_that_is_replaced_or_cast_keeps_the_change(model: Block) -> None:
    lora = difference(3, "norm.weight")
    with attach_lora(model, lora):
        model.norm.weight = nn.Parameter(torch.full((6,), 2.0))
        model.to(torch.float64)
        read, held = model.norm.weight, model.norm.state_dict()["weight"]
    assert torch.equal(held, torch.full((6,), 2.0, dtype=torch.float64))
    torch.testing.assert_close(read, held + lora.changes["norm"].delta())


def test_wan_takes_its_modulation_and_norms(tmp_path: Path) -> None:
    transformer = make_pipeline("wan").transformer.eval()
    start, generator = "diffusion_model.blocks.0.", torch.Generator().manual_seed(5)
    table = transformer.blocks[0].scale_shift_table
    file = {
        f"{start}diff_m": torch.randn(table.shape, generator=generator),
        f"{start}norm3.diff": torch.randn(transformer.blocks[0].norm2.weight.shape, generator=generator),
    }
    save_file(file, tmp_path / "full.safetensors")
    inputs = {
        "hidden_states": torch.randn(1, transformer.config.in_channels, 1, 4, 4, generator=generator),
        "timestep": torch.tensor([5]),
        "encoder_hidden_states": torch.randn(1, 3, transformer.config.text_dim, generator=generator),
    }
    expected = copy.deepcopy(transformer)
    expected.blocks[0].scale_shift_table.data += file[f"{start}diff_m"]
    expected.blocks[0].norm2.weight.data += file[f"{start}norm3.diff"]
    with torch.no_grad():
        wanted, plain = expected(**inputs).sample, transformer(**inputs).sample
        for apply in (attach_lora, merge_into_model):
            with apply(transformer, load_lora(tmp_path / "full.safetensors")):
                torch.testing.assert_close(transformer(**inputs).sample, wanted)
            assert torch.equal(transformer(**inputs).sample, plain)
    assert not torch.allclose(wanted, plain)


def test_what_no_parameter_has_is_refused(model: Block) -> None:
    lora = difference(3)
    odd = LoraFile({}, changes={**lora.changes, "norm.gain": lora.changes["norm"]})
    wide = LoraFile({}, changes={"norm": DiffChange({"diff": torch.ones(5)})})
    for apply in (attach_lora, merge_into_model):
        with pytest.raises(ModelMismatchError, match=r"norm\.gain"):
            apply(model, odd)
        with pytest.raises(ModelMismatchError, match=r"norm is \(5,\) in the LoRA and \(6,\)"):
            apply(model, wide)
    assert type(model.norm) is nn.LayerNorm


@pytest.mark.slow
def test_compiled_code_takes_scales_and_files_without_compiling_anew(model: Block, x: Tensor) -> None:
    first, second, plain, bare = difference(3), difference(4), model(x), copy.deepcopy(model)
    attached, counter = attach_lora(model, first), CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    torch.testing.assert_close(compiled(x), changed(bare, first, 1.0)(x))
    attached.scale = 0.5
    torch.testing.assert_close(compiled(x), changed(bare, first, 0.5)(x))
    attached.swap(second)
    torch.testing.assert_close(compiled(x), changed(bare, second, 0.5)(x))
    attached.scale = 0.0
    assert torch.equal(compiled(x), plain)
    assert counter.frame_count == 1
    attached.detach()
    assert torch.equal(compiled(x), plain)
