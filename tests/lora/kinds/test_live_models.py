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
from sigmascope.lora.apply import attach_lora, attached_to
from sigmascope.lora.live_merge import merge_into_model
from sigmascope.lora.reader import load_lora

KINDS: dict[str, Any] = {
    **BY_PEFT,
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


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.linear = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.conv(x).flatten(2).mT)
        return out


def test_changes_of_biases_are_live(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = Biased(), torch.randn(2, 3, 6, 6)
    kept = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    changes = {key: torch.randn_like(tensor) for key, tensor in kept.items() if key != "linear.weight"}
    ends = {"weight": "diff", "bias": "diff_b"}
    state = {f"{key.split('.')[0]}.{ends[key.split('.')[1]]}": tensor for key, tensor in changes.items()}
    save_file(state, tmp_path / "lora.safetensors")
    lora, other = load_lora(tmp_path / "lora.safetensors"), Biased()

    def changed(scale: float, only: str = "") -> Tensor:
        other.load_state_dict(
            {
                key: t + scale * changes[key] * (only in key) if key in changes else t
                for key, t in kept.items()
            }
        )
        out: Tensor = other(x)
        return out

    with attach_lora(net, lora) as attached:
        assert set(attached.applied) == {"conv", "conv.bias", "linear.bias"}
        torch.testing.assert_close(net(x), changed(1.0))
        attached.scale = 0.25
        torch.testing.assert_close(net(x), changed(0.25))
        attached.blocks = {"conv": 0.0}
        torch.testing.assert_close(net(x), changed(0.25, "linear"))
        attached.scale, attached.blocks = 1.0, {}
        attached.swap(lora.only({"conv.bias"}))
        torch.testing.assert_close(net(x), changed(1.0, "conv.bias"))
        (facts,) = attached_to(net)
        assert facts.layers == ("conv", "linear")
    with merge_into_model(net, lora, 0.5):
        torch.testing.assert_close(net(x), changed(0.5))
    assert all(torch.equal(tensor, kept[key]) for key, tensor in net.state_dict().items())


def test_a_change_of_a_bias_that_the_layer_lacks_is_refused(tmp_path: Path) -> None:
    save_file({"0.diff": torch.ones(4, 6), "0.diff_b": torch.ones(4)}, tmp_path / "lora.safetensors")
    with pytest.raises(ModelMismatchError, match=r"0\.bias"):
        attach_lora(nn.Sequential(nn.Linear(6, 4, bias=False)), load_lora(tmp_path / "lora.safetensors"))


@pytest.mark.parametrize("apply", [attach_lora, merge_into_model])
def test_a_change_that_does_not_fit_names_its_layer(tmp_path: Path, apply: Any) -> None:
    save_file({"0.oft_R.weight": torch.ones(2, 6)}, tmp_path / "lora.safetensors")
    net = nn.Sequential(nn.Linear(6, 4))
    with pytest.raises(ModelMismatchError, match="0: OFT of 8 inputs does not fit"):
        apply(net, load_lora(tmp_path / "lora.safetensors"))
    assert not net[0]._forward_hooks
