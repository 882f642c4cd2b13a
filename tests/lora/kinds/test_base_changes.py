"""Changes that depend on the weight, against the layers of PEFT and LyCORIS that train them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import BOFTConfig, HRAConfig, IA3Config, OFTConfig, VeraConfig, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import ConfigError, LoraFormatError
from sigmascope.lora.checkpoint_merge import merge_into_checkpoint
from sigmascope.lora.compatibility import judge_lora
from sigmascope.lora.convert import convert_lora
from sigmascope.lora.inspect import inspect_lora
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


@pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension")  # PEFT's, of BOFT
@pytest.mark.filterwarnings("ignore:Setting boft_n_butterfly_factor to 1")
@pytest.mark.parametrize("kind", sorted(BY_PEFT.keys() - {"hra_orthogonal"}))
def test_a_file_that_peft_saved_before_training_changes_nothing(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    net = Net(kind)
    shapes = {key: tuple(tensor.shape) for key, tensor in net.state_dict().items()}
    model: Any = get_peft_model(net, BY_PEFT[kind])
    path = tmp_path / "lora" / "adapter_model.safetensors"
    model.save_pretrained(path.parent)
    found = inspect_lora(path)
    assert next(finding.id for finding in found.findings) == "lora_is_zero"
    assert judge_lora(path, shapes).changes_nothing
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        parameter.data = torch.randn_like(parameter) * 0.3
    model.save_pretrained(path.parent)
    assert "lora_is_zero" not in {finding.id for finding in inspect_lora(path).findings}


@pytest.mark.parametrize(
    ("tensors", "is_nothing"),
    [
        ({"oft_blocks": torch.zeros(4, 4, 4)}, True),
        ({"oft_blocks": torch.ones(4, 4, 4)}, True),  # only their skew part turns
        ({"oft_blocks": torch.arange(64.0).reshape(4, 4, 4)}, False),
        ({"oft_blocks": torch.zeros(4, 4, 4), "rescale": torch.full((16, 1), 1.5)}, False),
        ({"oft_diag": torch.eye(4).repeat(4, 1, 1)}, True),
        ({"oft_diag": -torch.eye(4).repeat(4, 1, 1)}, False),
        ({"oft_blocks": torch.zeros(2, 4, 4, 4)}, True),
        ({"oft_blocks": torch.arange(128.0).reshape(2, 4, 4, 4)}, False),
        ({"on_input": torch.tensor(True), "weight": torch.zeros(8)}, True),
        ({"on_input": torch.tensor(True), "weight": torch.ones(8)}, False),
    ],
)
def test_what_lycoris_writes_before_training_changes_nothing(
    tmp_path: Path, tensors: dict[str, Tensor], is_nothing: bool
) -> None:
    path = tmp_path / "lora.safetensors"
    save_file({f"lora_unet_first.{end}": tensor for end, tensor in tensors.items()}, path)
    with open_lora(path) as lora:
        change: Any = lora.change("lora_unet_first")
    delta = change.delta(torch.randn(16, 8))
    assert bool((delta == 0).all()) is is_nothing
    assert ("lora_is_zero" in {finding.id for finding in inspect_lora(path).findings}) is is_nothing


@pytest.mark.parametrize("factors", [("a1", "b1"), ("a2", "b1"), ("a1",)], ids=str)
def test_a_glora_of_which_a_factor_of_each_product_is_zero_changes_nothing(
    tmp_path: Path, factors: tuple[str, ...]
) -> None:
    shapes = {"a1": (2, 8), "a2": (8, 2), "b1": (2, 8), "b2": (12, 2)}
    tensors = {
        f"lora_unet_first.{name}.weight": torch.randn(shape) * (name not in factors)
        for name, shape in shapes.items()
    }
    path = tmp_path / "lora.safetensors"
    save_file(tensors, path)
    with open_lora(path) as lora:
        change: Any = lora.change("lora_unet_first")
    delta = change.delta(torch.randn(12, 8))
    is_nothing = len(factors) == 2
    assert bool((delta == 0).all()) is is_nothing
    assert ("lora_is_zero" in {finding.id for finding in inspect_lora(path).findings}) is is_nothing


@pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension")  # PEFT's, of BOFT
@pytest.mark.filterwarnings("ignore:Setting boft_n_butterfly_factor to 1")
@pytest.mark.parametrize("kind", ["oft", "boft", "ia3", "hra", "vera"])
def test_what_no_host_applies_is_told_by_its_kind_and_biases_that_a_layer_has_not_are_no_fault(
    tmp_path: Path, kind: str
) -> None:
    """diffusers and ComfyUI load LyCORIS' rotations at most."""
    net = Net(kind)
    shapes = {"first.weight": tuple(net.first.weight.shape)}
    get_peft_model(net, BY_PEFT[kind]).save_pretrained(tmp_path / "lora")
    path = tmp_path / "lora" / "adapter_model.safetensors"
    verdict = judge_lora(path, shapes)
    assert verdict.fits
    titles = {"oft": "PEFT's OFT", "boft": "PEFT's BOFT", "ia3": "(IA)³", "hra": "HRA", "vera": "VeRA"}
    says = f"The file holds {titles[kind]}, which neither diffusers nor ComfyUI applies."
    assert [one.message for one in verdict.findings if one.id == "lora_kind_unread"] == [says]


@pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension")  # PEFT's, of BOFT
@pytest.mark.filterwarnings("ignore:Setting boft_n_butterfly_factor to 1")
@pytest.mark.parametrize("kind", ["oft", "boft", "ia3", "hra", "vera"])
def test_with_the_model_what_only_peft_holds_becomes_a_difference_or_factors(
    tmp_path: Path, kind: str
) -> None:
    torch.manual_seed(0)
    net = Net(kind)
    before = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    save_file(before, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"_diffusers_version": "0.42"}')
    model: Any = get_peft_model(net, BY_PEFT[kind])
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        parameter.data = torch.randn_like(parameter) * 0.3
    model.save_pretrained(tmp_path / "lora")
    after = model.merge_and_unload().state_dict()
    changes = {key: (after[key] - tensor).detach() for key, tensor in before.items()}
    given: dict[str, Any] = {"model": tmp_path / "model.safetensors", "drop_unsupported": True}
    source, made = tmp_path / "lora" / "adapter_model.safetensors", tmp_path / "made.safetensors"

    convert_lora(source, made, "kohya", **given)
    with open_lora(made) as lora:
        assert {lora.kind_of(name) for name in lora.names} == {"diff"}
        for key, change in changes.items():
            delta = lora.change(f"lora_unet_{key.removesuffix('.weight').replace('.weight', '')}").delta()
            torch.testing.assert_close(delta, change, rtol=1e-4, atol=1e-5)

    report = convert_lora(source, made, "peft", rank=2, **given)
    least = torch.linalg.svdvals(changes["first.weight"])[2:].square().sum().sqrt()
    norm = changes["first.weight"].norm()
    assert report.relative_error == pytest.approx(float(least / norm), rel=1e-2)
    with open_lora(made) as lora:
        left = changes["first.weight"] - lora.modules["transformer.first"].delta()
    assert float(left.norm()) == pytest.approx(float(least), rel=1e-2)


def test_with_the_model_a_rank_makes_factors_of_what_kohyas_files_cannot_hold(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight, rows = torch.randn(12, 8), torch.randn(12, 1)
    save_file({"first.weight": weight}, tmp_path / "model.safetensors")
    save_file({"base_model.model.first.ia3_l": rows}, tmp_path / "lora.safetensors")
    made = tmp_path / "made.safetensors"
    convert_lora(
        tmp_path / "lora.safetensors", made, "kohya", model=tmp_path / "model.safetensors", rank=9999
    )
    with open_lora(made) as lora:
        assert set(lora.names) == {"lora_unet_first"}
        delta = lora.modules["lora_unet_first"].delta()
    torch.testing.assert_close(delta, weight * (rows - 1.0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key", ["q_proj.default_lora_latent_mapping", "q_proj_lora_latent_mapping"])
def test_lora_xs_changes_a_weight_by_all_three_of_its_matrices(tmp_path: Path, key: str) -> None:
    """As the authors' `get_delta_weight` multiplies them, under the names of PEFT 0.21 and of 0.10."""
    torch.manual_seed(0)
    down, latent, up = torch.randn(3, 8), torch.randn(3, 3), torch.randn(12, 3)
    start = "base_model.model.layers.0.self_attn."
    tensors = {"q_proj.lora_A": down, key: latent, "q_proj.lora_B": up}
    path = tmp_path / "adapter_model.safetensors"
    save_file({f"{start}{name}.weight": tensor for name, tensor in tensors.items()}, path)
    (tmp_path / "adapter_config.json").write_text('{"r": 3, "lora_alpha": 6}')
    with open_lora(path) as lora:
        (name,) = lora.names
        delta, kind = lora.modules[name].delta(), lora.kind_of(name)
        assert (name, kind, lora.unused_keys) == ("layers.0.self_attn.q_proj", "lora_xs", ())
    torch.testing.assert_close(delta, 2.0 * up @ latent @ down)


def test_an_ia3_factor_without_axes_is_refused(tmp_path: Path) -> None:
    save_file({"q.ia3_l": torch.tensor(1.0)}, tmp_path / "lora.safetensors")
    with pytest.raises(LoraFormatError, match="ia3_l"), open_lora(tmp_path / "lora.safetensors"):
        pass


@pytest.mark.parametrize("missing", ["lora_A", "lora_B"])
def test_lora_xs_without_its_projections_is_refused(tmp_path: Path, missing: str) -> None:
    shapes = {"lora_A": (3, 8), "lora_B": (12, 3), "default_lora_latent_mapping": (3, 3)}
    state = {f"q.{name}.weight": torch.ones(shape) for name, shape in shapes.items() if name != missing}
    save_file(state, tmp_path / "lora.safetensors")
    with pytest.raises(LoraFormatError, match=missing), open_lora(tmp_path / "lora.safetensors"):
        pass


@pytest.mark.parametrize(
    ("ends", "named"),
    [
        (["default_lora_latent_mapping.weight"], "default_lora_latent_mapping"),
        (["boft_s"], "boft_R"),
        (["rescale"], "oft_blocks"),
        (["oft_blocks.1"], "oft_blocks.0"),
    ],
)
def test_a_part_without_what_it_belongs_to_is_refused_by_name(
    tmp_path: Path, ends: list[str], named: str
) -> None:
    save_file({f"q.{end}": torch.ones(2, 4, 4) for end in ends}, tmp_path / "lora.safetensors")
    with pytest.raises(LoraFormatError, match=named), open_lora(tmp_path / "lora.safetensors"):
        pass


@pytest.mark.parametrize("alpha", [1e-3, 10.0])
def test_kohyas_oft_of_flux_turns_each_part_of_a_fused_matrix(tmp_path: Path, alpha: float) -> None:
    """As `networks/oft_flux.py` of sd-scripts has it, with a limit for each part."""
    torch.manual_seed(0)
    weight, blocks = torch.randn(16, 6), [torch.randn(2, size, size) for size in (2, 2, 4)]
    name = "oft_unet_single_blocks_1_linear1"
    state = {f"{name}.oft_blocks.{part}": tensor for part, tensor in enumerate(blocks)}
    save_file(state | {f"{name}.alpha": torch.tensor(alpha)}, tmp_path / "lora.safetensors")
    expected = []
    for rows, part in zip(torch.split(weight, [4, 4, 8]), blocks, strict=True):
        skew = part - part.transpose(1, 2)
        norm = torch.norm(skew.flatten())
        skew = skew * ((torch.clamp(norm, max=alpha * len(rows)) + 1e-8) / (norm + 1e-8))
        identity = torch.eye(part.shape[-1]).expand_as(part)
        rotation = torch.matmul(identity + skew, (identity - skew).inverse())
        grouped = rows.reshape(2, part.shape[-1], 6)
        expected.append(torch.einsum("knm,knp->kmp", rotation, grouped).reshape(rows.shape))
    with open_lora(tmp_path / "lora.safetensors") as lora:
        assert (lora.format, lora.names, lora.unused_keys) == ("kohya", (name,), ())
        delta = lora.changes[name].delta(weight)
    torch.testing.assert_close(weight + delta, torch.cat(expected), rtol=1e-4, atol=1e-5)


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
    state = {f"lora_unet_layer.{name}": tensor for name, tensor in module.state_dict().items()}
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, tmp_path / "lora.safetensors")
    with open_lora(tmp_path / "lora.safetensors") as lora:
        change = lora.changes["lora_unet_layer"]
        delta = change.delta(layer.weight)
        assert lora.unused_keys == ()
    torch.testing.assert_close(delta, expected, rtol=1e-4, atol=1e-5)
    assert expected.norm() > 0.0


@pytest.mark.parametrize("name", ["vera_A", "vera_B", "a.vera_lambda_b", "a.vera_lambda_d"])
@pytest.mark.parametrize("shape", [(), (4, 2, 3)])
def test_vera_of_tensors_with_other_axes_is_refused(
    name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    state = {"a.vera_lambda_b": torch.ones(4), "a.vera_lambda_d": torch.ones(2)}
    state |= {"vera_A": torch.ones(2, 3), "vera_B": torch.ones(4, 2), name: torch.ones(shape)}
    save_file(state, tmp_path / "vera.safetensors")
    with (
        pytest.raises(LoraFormatError, match="do not fit together"),
        open_lora(tmp_path / "vera.safetensors"),
    ):
        pass


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


def test_without_the_model_peft_rotations_are_not_written_where_no_host_reads_them(tmp_path: Path) -> None:
    save_file({"unet.time_embedding.linear_1.oft_R.weight": torch.ones(2, 6)}, tmp_path / "lora.safetensors")
    with pytest.raises(LoraFormatError, match="kohya files cannot hold") as raised:
        convert_lora(tmp_path / "lora.safetensors", tmp_path / "new.safetensors", "kohya", family="sdxl")
    assert "--model" in (raised.value.hint or "")
    assert not (tmp_path / "new.safetensors").exists()


def test_a_rank_without_the_model_that_a_rotation_needs_says_so(tmp_path: Path) -> None:
    save_file({"unet.time_embedding.linear_1.oft_R.weight": torch.ones(2, 6)}, tmp_path / "lora.safetensors")
    with pytest.raises(ConfigError, match="depends on the model's weights") as raised:
        convert_lora(
            tmp_path / "lora.safetensors", tmp_path / "new.safetensors", "peft", family="sdxl", rank=4
        )
    assert raised.value.hint == "Give the model too: --model MODEL."
    with pytest.raises(LoraFormatError, match="peft files cannot hold") as without:
        convert_lora(tmp_path / "lora.safetensors", tmp_path / "new.safetensors", "peft", family="sdxl")
    assert "--rank 32 --model MODEL" in (without.value.hint or "")


def test_the_advice_for_a_kind_that_scales_biases_converts_it(tmp_path: Path) -> None:
    net = Net("ia3")
    save_file(
        {key: tensor.clone() for key, tensor in net.state_dict().items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text('{"_diffusers_version": "0.42"}')
    model: Any = get_peft_model(net, BY_PEFT["ia3"])
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        parameter.data = torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "lora")
    source = tmp_path / "lora" / "adapter_model.safetensors"
    found = judge_lora(
        source, {key: tuple(tensor.shape) for key, tensor in net.state_dict().items()}
    ).findings
    advice = next(one.advice for one in found if one.id == "lora_kind_unread") or ""
    given: dict[str, Any] = {"model": tmp_path / "model.safetensors", "rank": 32}
    with pytest.raises(LoraFormatError, match="a bias's change") as raised:
        convert_lora(source, tmp_path / "new.safetensors", "peft", **given)
    assert "--drop_unsupported" in (raised.value.hint or "")
    assert "--drop_unsupported" in advice
    convert_lora(source, tmp_path / "new.safetensors", "peft", **given, drop_unsupported=True)
