"""Changes that are more than up and down factors, on live models, against the layers of PEFT and LyCORIS."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, get_peft_model
from safetensors.torch import save_file
from tests.lora.kinds.test_base_changes import BY_PEFT, Net, by_lycoris
from torch import Tensor, nn

from sigmascope.errors import ModelMismatchError
from sigmascope.lora.apply import attach_lora
from sigmascope.lora.live_merge import merge_into_model
from sigmascope.lora.reader import load_lora

KINDS: dict[str, Any] = {
    **{kind: config for kind, config in BY_PEFT.items() if kind != "ia3"},  # its bias is no Linear's weight
    "dora": LoraConfig(r=4, target_modules=["first"], use_dora=True),
    "loha": LoHaConfig(r=2, target_modules=["first"]),
    "lokr": LoKrConfig(r=2, target_modules=["first"]),
}


@pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension")  # PEFT's, of BOFT
@pytest.mark.filterwarnings("ignore:Setting boft_n_butterfly_factor to 1")
@pytest.mark.parametrize("kind", KINDS)
def test_a_live_model_answers_as_pefts_own_forward(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    net, x = Net(kind), torch.randn(5, 8)
    kept, plain = net.first.weight.detach().clone(), net(x).detach()
    model: Any = get_peft_model(net, KINDS[kind])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "magnitude" not in name:
            parameter.data = torch.randn_like(parameter) * 0.3
    expected = model(x).detach()
    model.save_pretrained(tmp_path)
    bare, lora = model.unload(), load_lora(tmp_path / "adapter_model.safetensors")
    with attach_lora(bare, lora) as attached:
        torch.testing.assert_close(bare(x), expected, rtol=1e-4, atol=1e-5)
        assert attached.applied == lora.names
        attached.scale = 0.0
        assert torch.equal(bare(x), plain)
    assert torch.equal(bare(x), plain)
    assert not bare.first._forward_hooks
    with merge_into_model(bare, lora):
        torch.testing.assert_close(bare(x), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(bare.first.weight, kept)
    assert (expected - plain).norm() > 0.01 * plain.norm()


@pytest.mark.parametrize("kind", ["oft", "boft_rescaled", "glora", "ia3_inputs"])
def test_a_live_convolution_answers_as_lycoris_changes_it(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(6, 16, 3, stride=2, padding=1)), torch.randn(2, 6, 7, 7)
    layer: Any = net[0]
    module = by_lycoris(kind, layer)
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    delta: Tensor = module.get_diff_weight(1.0)[0].detach().reshape(layer.weight.shape)
    state = {f"0.{name}": tensor.float().contiguous() for name, tensor in module.state_dict().items()}
    save_file(state, tmp_path / "lora.safetensors")
    lora = load_lora(tmp_path / "lora.safetensors")
    expected = net(x) + 0.5 * nn.functional.conv2d(x, delta, None, 2, 1)
    for apply in (attach_lora, merge_into_model):
        with apply(net, lora, 0.5):
            torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("apply", [attach_lora, merge_into_model])
def test_a_change_that_does_not_fit_names_its_layer(tmp_path: Path, apply: Any) -> None:
    save_file({"0.oft_R.weight": torch.ones(2, 6)}, tmp_path / "lora.safetensors")
    net = nn.Sequential(nn.Linear(6, 4))
    with pytest.raises(ModelMismatchError, match="0: OFT of 8 inputs does not fit"):
        apply(net, load_lora(tmp_path / "lora.safetensors"))
    assert not net[0]._forward_hooks
