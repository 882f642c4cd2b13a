"""Changes that depend on the weight, against the layers of PEFT and LyCORIS that train them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import BOFTConfig, HRAConfig, IA3Config, OFTConfig, VeraConfig, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import LoraFormatError
from sigmascope.lora.checkpoint_merge import merge_into_checkpoint
from sigmascope.lora.convert import convert_lora
from sigmascope.lora.reader import open_lora

BY_PEFT: dict[str, Any] = {
    "oft": OFTConfig(r=0, oft_block_size=4, target_modules=["first"], use_cayley_neumann=False),
    "oft_neumann": OFTConfig(r=0, oft_block_size=4, target_modules=["first"]),
    "oft_shared": OFTConfig(r=0, oft_block_size=4, target_modules=["first"], block_share=True),
    "boft": BOFTConfig(boft_block_size=4, target_modules=["first"]),
    "ia3": IA3Config(target_modules=["first"], feedforward_modules=[]),
    "ia3_inputs": IA3Config(target_modules=["first"], feedforward_modules=["first"]),
    "hra": HRAConfig(r=4, target_modules=["first"]),
    "hra_orthogonal": HRAConfig(r=4, target_modules=["first"], apply_GS=True),
    "vera": VeraConfig(r=4, target_modules=["first"], save_projection=True),
}


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12, bias=kind == "ia3")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x)
        return out


@pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension")  # PEFT's, of BOFT
@pytest.mark.filterwarnings("ignore:Setting boft_n_butterfly_factor to 1")
@pytest.mark.parametrize("kind", BY_PEFT)
def test_a_file_that_peft_saved_merges_as_peft_merges_it(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    net = Net(kind)
    before = net.first.weight.detach().clone()
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    model: Any = get_peft_model(net, BY_PEFT[kind])
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        parameter.data = torch.randn_like(parameter) * 0.3
    model.save_pretrained(tmp_path / "lora")
    expected = {key: tensor.detach() for key, tensor in model.merge_and_unload().state_dict().items()}
    merge_into_checkpoint(
        [tmp_path / "lora" / "adapter_model.safetensors"],
        tmp_path / "model.safetensors",
        tmp_path / "merged.safetensors",
    )
    with open_checkpoint(tmp_path / "merged.safetensors") as merged:
        for key, tensor in expected.items():
            torch.testing.assert_close(merged.tensor(key), tensor, rtol=1e-5, atol=1e-6)
    assert (expected["first.weight"] - before).norm() > 0.1 * before.norm()


def by_lycoris(kind: str, layer: nn.Module) -> Any:
    from lycoris.modules.boft import ButterflyOFTModule
    from lycoris.modules.diag_oft import DiagOFTModule
    from lycoris.modules.glora import GLoRAModule
    from lycoris.modules.ia3 import IA3Module

    made: dict[str, Any] = {
        "oft": lambda: DiagOFTModule("layer", layer, lora_dim=4),
        "oft_limited": lambda: DiagOFTModule("layer", layer, lora_dim=4, constraint=0.01),
        "oft_rescaled": lambda: DiagOFTModule("layer", layer, lora_dim=4, rescaled=True),
        "boft": lambda: ButterflyOFTModule("layer", layer, lora_dim=4),
        "boft_rescaled": lambda: ButterflyOFTModule("layer", layer, lora_dim=4, rescaled=True),
        "glora": lambda: GLoRAModule("layer", layer, lora_dim=4, alpha=2.0),
        "ia3": lambda: IA3Module("layer", layer),
        "ia3_inputs": lambda: IA3Module("layer", layer, train_on_input=True),
    }
    return made[kind]()


@pytest.mark.parametrize("layer", [nn.Linear(6, 16), nn.Conv2d(6, 16, 3)], ids=["linear", "conv"])
@pytest.mark.parametrize(
    "kind", ["oft", "oft_limited", "oft_rescaled", "boft", "boft_rescaled", "glora", "ia3", "ia3_inputs"]
)
def test_a_module_of_lycoris_changes_its_weight_as_lycoris_does(
    tmp_path: Path, kind: str, layer: nn.Linear | nn.Conv2d
) -> None:
    torch.manual_seed(0)
    module = by_lycoris(kind, layer)
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    expected = module.get_diff_weight(1.0)[0].detach().reshape(layer.weight.shape)
    state = {f"lora_unet_layer.{name}": tensor.float() for name, tensor in module.state_dict().items()}
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, tmp_path / "lora.safetensors")
    with open_lora(tmp_path / "lora.safetensors") as lora:
        change = lora.changes["lora_unet_layer"]
        delta = change.delta(layer.weight)
        assert lora.unused_keys == ()
    torch.testing.assert_close(delta, expected, rtol=1e-4, atol=1e-5)
    assert expected.norm() > 0.0


def test_vera_without_its_projections_is_refused_with_what_to_do(tmp_path: Path) -> None:
    state = {"a.vera_lambda_b": torch.ones(4), "a.vera_lambda_d": torch.ones(2)}
    save_file(state, tmp_path / "lora.safetensors")
    with (
        pytest.raises(LoraFormatError, match="vera_A") as raised,
        open_lora(tmp_path / "lora.safetensors"),
    ):
        pass
    assert "save_projection" in (raised.value.hint or "")


@pytest.mark.parametrize("kind", ["oft_limited", "boft_rescaled", "glora"])
def test_what_kohyas_files_hold_keeps_its_change_in_a_conversion(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 16)
    module = by_lycoris(kind, layer)
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    name = "lora_unet_time_embed_0"
    state = {f"{name}.{key}": tensor.float().contiguous() for key, tensor in module.state_dict().items()}
    save_file(state, tmp_path / "kohya.safetensors")
    convert_lora(tmp_path / "kohya.safetensors", tmp_path / "new.safetensors", "comfyui", family="sdxl")
    with open_lora(tmp_path / "new.safetensors") as lora:
        delta = lora.changes["diffusion_model.time_embed.0"].delta(layer.weight)
    expected = module.get_diff_weight(1.0)[0].detach()
    torch.testing.assert_close(delta, expected, rtol=1e-4, atol=1e-5)


def test_peft_rotations_are_not_written_where_no_host_reads_them(tmp_path: Path) -> None:
    save_file({"unet.time_embedding.linear_1.oft_R.weight": torch.ones(2, 6)}, tmp_path / "lora.safetensors")
    with pytest.raises(LoraFormatError, match="only PEFT's own files"):
        convert_lora(tmp_path / "lora.safetensors", tmp_path / "new.safetensors", "kohya", family="sdxl")
    assert not (tmp_path / "new.safetensors").exists()
