"""Changes that depend on the weight, of fused matrices on the parts and the other way round, against the whole in float64."""

from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import LoraFormatError
from sigmascope.lora.alignment import changed_keys
from sigmascope.lora.apply import attach_lora
from sigmascope.lora.checkpoint_merge import merge_into_checkpoint
from sigmascope.lora.compatibility import judge_lora
from sigmascope.lora.convert import convert_lora
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import ModelLayout
from sigmascope.lora.inspect import relative_strengths
from sigmascope.lora.live_merge import merge_into_model
from sigmascope.lora.merge import CombineOptions, merge_lora_files
from sigmascope.lora.ranks import FixedRank, RankRules
from sigmascope.lora.reader import load_lora, open_lora
from sigmascope.lora.resize import RankPlan

HIDDEN, OUT = 16, 48
PARTS = [f"transformer_blocks.0.attn.to_{name}" for name in "qkv"]
SINGLE = [
    *(f"single_transformer_blocks.0.attn.to_{name}" for name in "qkv"),
    "single_transformer_blocks.0.proj_mlp",
]
QKV, LINEAR1 = "double_blocks.0.img_attn.qkv", "single_blocks.0.linear1"
DOWN, UP = torch.randn(2, HIDDEN), torch.randn(OUT, 2) * 0.3
"""Of plain factors."""

Made = tuple[dict[str, Tensor], Callable[[Tensor], Tensor]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[diffusers.FluxTransformer2DModel, Path]:
    torch.manual_seed(0)
    made = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=6, pooled_projection_dim=10, guidance_embeds=True, axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("flux")
    made.save_pretrained(folder)
    return made, folder


def rotation(block: Tensor, *, halved: bool = False) -> Tensor:
    skew = (block - block.mT) / (2.0 if halved else 1.0)
    eye = torch.eye(len(block), dtype=torch.float64)
    turned: Tensor = (eye + skew) @ torch.linalg.inv(eye - skew)
    return turned


def on_diagonal(blocks: list[Tensor]) -> Tensor:
    whole: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return whole


def boft(stages: int, alpha: float = 0.0) -> Made:
    """LyCORIS': stage i pairs rows that are 2ⁱ half blocks apart."""
    blocks = torch.randn(stages, OUT // 4, 4, 4) * 0.2
    skew = (blocks - blocks.mT).double()
    limited = blocks.double() * min(1.0, alpha * OUT / float(skew.norm()) if alpha else 1.0)

    def changed(weight: Tensor) -> Tensor:
        for stage in range(stages):
            order = torch.arange(OUT).reshape(-1, 2, 2**stage * 2).transpose(1, 2).flatten()
            regrouped = torch.eye(OUT, dtype=torch.float64)[order]
            weight = (
                regrouped.mT @ on_diagonal([rotation(one) for one in limited[stage]]) @ regrouped @ weight
            )
        return weight

    return {"oft_blocks": blocks} | ({"alpha": torch.tensor(alpha)} if alpha else {}), changed


def boft_of_peft() -> Made:
    blocks, factors = torch.randn(1, 4, 4, 4) * 0.3, torch.rand(OUT, 1) + 0.5
    whole = on_diagonal([rotation(-block.double(), halved=True) for block in blocks[0]])
    return {"boft_R": blocks, "boft_s": factors}, lambda weight: factors.double() * (weight @ whole.mT)


def glora(*, is_old: bool = False) -> Made:
    a1, a2 = torch.randn(HIDDEN, 2) * 0.3, torch.randn(2, HIDDEN) * 0.3
    tensors = (
        {"a1": a2, "a2": a1, "b1": DOWN, "b2": UP} if is_old else {"a1": a1, "a2": a2, "b1": UP, "b2": DOWN}
    )
    product, added = a1.double() @ a2.double(), UP.double() @ DOWN.double()
    named = {f"{name}.weight": tensor for name, tensor in tensors.items()} | {"alpha": torch.tensor(2.0)}
    return named, lambda weight: weight + weight @ product + added


def ia3(*, on_input: bool) -> Made:
    values = torch.randn(HIDDEN) if on_input else torch.randn(OUT)
    along = values.double() if on_input else values.double()[:, None]
    tensors = {"weight": values if on_input else values[:, None], "on_input": torch.tensor(on_input)}
    return tensors, lambda weight: weight * (1.0 + along)


def ia3_of_peft(*, on_input: bool) -> Made:
    values = torch.randn(1, HIDDEN) if on_input else torch.randn(OUT, 1)
    return {"ia3_l": values}, lambda weight: weight * values.double()


def vera() -> Made:
    outputs, rank, down, up = torch.randn(OUT), torch.randn(3), torch.randn(3, 20), torch.randn(64, 3)
    change = (outputs[:, None] * up[:OUT]).double() @ (rank[:, None] * down[:, :HIDDEN]).double()
    return {
        "vera_lambda_b": outputs,
        "vera_lambda_d": rank,
        "A": down,
        "B": up,
    }, lambda weight: weight + change


def dora(*, per_output: bool, end: str = "lora_{}.weight") -> Made:
    magnitudes = torch.rand((OUT, 1) if per_output else (1, HIDDEN)) + 0.5
    added, axis = (UP @ DOWN).double(), 1 if per_output else 0

    def changed(weight: Tensor) -> Tensor:
        direction = weight + added
        lengths: Tensor = direction.norm(dim=axis, keepdim=True)
        return magnitudes.double() * direction / lengths

    return {end.format("down"): DOWN, end.format("up"): UP, "dora_scale": magnitudes}, changed


def whole_tensor() -> Made:
    values = torch.randn(OUT, HIDDEN)
    return {"set_weight": values}, lambda weight: values.double()


CASES: dict[str, Callable[[], Made]] = {
    "boft": lambda: boft(2),
    "boft_limited": lambda: boft(2, 1e-2),
    "boft_across": lambda: boft(3),
    "boft_peft": boft_of_peft,
    "glora": glora,
    "glora_old": lambda: glora(is_old=True),
    "ia3_outputs": lambda: ia3(on_input=False),
    "ia3_inputs": lambda: ia3(on_input=True),
    "ia3_peft_outputs": lambda: ia3_of_peft(on_input=False),
    "ia3_peft_inputs": lambda: ia3_of_peft(on_input=True),
    "vera": vera,
    "dora": lambda: dora(per_output=True),
    "dora_across": lambda: dora(per_output=False),
    "set": whole_tensor,
}


def written(tensors: dict[str, Tensor], module: str, folder: Path) -> Path:
    """A file of one module, under the names of the tool that makes the kind."""
    by_peft = tensors.keys() & {"boft_R", "ia3_l", "A"}
    name = f"base_model.model.{module}" if by_peft else f"lora_unet_{module.replace('.', '_')}"
    state = {f"{name}.{end}": tensor for end, tensor in tensors.items() if end not in "AB"}
    state |= {f"base_model.vera_{end}": tensors[end] for end in "AB" if end in tensors}
    file = folder / "lora.safetensors"
    save_file({key: tensor.contiguous().clone() for key, tensor in state.items()}, file)
    return file


@pytest.mark.parametrize("case", CASES)
def test_a_change_of_a_fused_matrix_is_that_of_the_whole_in_its_parts(
    model: tuple[diffusers.FluxTransformer2DModel, Path], case: str, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    net, folder = model
    tensors, changed = CASES[case]()
    file = written(tensors, QKV, tmp_path)
    weights = [net.get_submodule(layer).weight.detach().clone() for layer in PARTS]
    whole = changed(torch.cat(weights).double())
    expected = dict(zip(PARTS, torch.split(whole.float(), HIDDEN), strict=True))
    assert all((expected[layer] - weight).norm() > 1e-2 for layer, weight in zip(PARTS, weights, strict=True))

    def check(layer: str, found: Tensor) -> None:
        torch.testing.assert_close(found, expected[layer], rtol=1e-4, atol=1e-5)

    merge_into_checkpoint([file], folder, tmp_path / "merged.safetensors")
    after = load_file(tmp_path / "merged.safetensors")
    lora = load_lora(file)
    for layer in PARTS:
        check(layer, after[f"{layer}.weight"])
    with merge_into_model(net, lora):
        for layer in PARTS:
            check(layer, net.get_submodule(layer).weight.detach())
    with attach_lora(net, lora):
        for layer in PARTS:
            module = net.get_submodule(layer)
            check(layer, (module(torch.eye(HIDDEN)) - module(torch.zeros(HIDDEN))).mT.detach())
    for format, rank in (("native", None), ("peft", 9999)):
        made = tmp_path / "made.safetensors"
        holds_it = format == "peft" and case == "dora"
        scales_biases = (
            case == "ia3_peft_outputs" and format == "peft"
        )  # which PEFT's names have no place for
        report = convert_lora(
            file, made, format, model=folder, rank=None if holds_it else rank, drop_unsupported=scales_biases
        )
        assert len(report.left_out) == (3 if scales_biases else 0)
        with open_lora(made) as converted:
            found = {name.removeprefix("transformer."): name for name in converted.names}
            for layer, weight in zip(PARTS, weights, strict=True):
                change = converted.change(found[layer])
                assert not holds_it or converted.kind_of(found[layer]) == "dora"
                delta = change.delta() if isinstance(change, LoraFactors) else change.delta(weight)
                check(layer, weight + delta)
    with open_checkpoint(folder) as base:
        effects = relative_strengths(file, judge_lora(file, base), base)
    (effect,) = (effect for name, effect in effects.items() if not name.endswith(".bias"))
    wanted = float((whole - torch.cat(weights)).norm() / torch.cat(weights).norm())
    assert effect.relative_change == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("case", ["glora", "ia3_outputs", "dora", "set"])
def test_changes_of_parts_are_those_of_the_rows_of_a_fused_matrix(case: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    weight, layouts = torch.randn(OUT, HIDDEN), ModelLayout("flux", "original", {"denoiser": ""})
    state: dict[str, Tensor] = {}
    expected = weight.double()
    tensors, changed = CASES[case]()
    left = {"b1.weight", "weight", "lora_up.weight", "dora_scale", "set_weight"}
    for number, name in enumerate("qv"):
        rows = slice(2 * number * HIDDEN, (2 * number + 1) * HIDDEN)
        part = {end: tensor[rows] if end in left else tensor for end, tensor in tensors.items()}
        state |= {f"lora_unet_transformer_blocks_0_attn_to_{name}.{end}": one for end, one in part.items()}
        expected[rows] = changed(weight.double())[rows]
    file = tmp_path / "lora.safetensors"
    save_file({key: tensor.contiguous().clone() for key, tensor in state.items()}, file)
    with open_lora(file) as lora:
        found = changed_keys(lora, [f"{QKV}.weight"], layouts)
        assert found.unmatched == ()
        change = found.change(f"{QKV}.weight")
        assert not isinstance(change, LoraFactors)
        torch.testing.assert_close(weight.double() + change.delta(weight, torch.float64), expected)


@pytest.mark.parametrize(("there", "back"), [("peft", "kohya"), ("kohya", "comfyui")])
def test_dora_of_a_fused_matrix_goes_to_its_parts_and_back_without_the_model(
    there: str, back: str, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    tensors, changed = dora(per_output=True)
    file = written(tensors, QKV, tmp_path)
    weight = torch.randn(OUT, HIDDEN)
    convert_lora(file, tmp_path / "there.safetensors", there, family="flux")
    convert_lora(tmp_path / "there.safetensors", tmp_path / "back.safetensors", back, family="flux")
    with open_lora(tmp_path / "there.safetensors") as lora:
        assert len(lora.names) == (3 if there == "peft" else 1)
    with open_lora(tmp_path / "back.safetensors") as lora:
        (name,) = lora.names
        change = lora.changes[name]
        assert change.kind == "dora"
        torch.testing.assert_close(weight + change.delta(weight), changed(weight.double()).float())


def test_a_bias_of_a_fused_layer_changes_those_of_its_parts(
    model: tuple[diffusers.FluxTransformer2DModel, Path], tmp_path: Path
) -> None:
    net, folder = model
    changes = {QKV: torch.randn(OUT), LINEAR1: torch.randn(7 * HIDDEN)}
    file = tmp_path / "lora.safetensors"
    save_file({f"diffusion_model.{name}.diff_b": change for name, change in changes.items()}, file)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    merge_into_checkpoint([file], folder, tmp_path / "merged.safetensors")
    after = load_file(tmp_path / "merged.safetensors")
    for layers, name in ((PARTS, QKV), (SINGLE, LINEAR1)):
        sizes = [len(before[f"{layer}.bias"]) for layer in layers]
        for layer, change in zip(layers, torch.split(changes[name], sizes), strict=True):
            torch.testing.assert_close(after[f"{layer}.bias"] - before[f"{layer}.bias"], change)


@pytest.mark.parametrize("kind", ["oft", "ia3", "diff_b"])
def test_halves_that_change_places_are_changed_where_they_are_in_the_model(
    model: tuple[diffusers.FluxTransformer2DModel, Path], kind: str, tmp_path: Path
) -> None:
    """diffusers has (scale, shift) where the original has (shift, scale)."""
    torch.manual_seed(1)
    net, folder = model
    weight, bias = net.norm_out.linear.weight.detach(), net.norm_out.linear.bias.detach()
    original = weight.roll(HIDDEN, 0).double()
    if kind == "oft":
        blocks = torch.randn(8, 4, 4) * 0.3
        tensors = {"oft_blocks": blocks}
        whole = on_diagonal([rotation(block.double()) for block in blocks]).mT @ original
    elif kind == "ia3":
        values = torch.randn(2 * HIDDEN, 1)
        tensors = {"weight": values, "on_input": torch.tensor(False)}
        whole = original * (1.0 + values.double())
    else:
        tensors, whole = {"diff_b": torch.randn(2 * HIDDEN)}, original
    file = written(tensors, "final_layer.adaLN_modulation.1", tmp_path)
    merge_into_checkpoint([file], folder, tmp_path / "merged.safetensors")
    after = load_file(tmp_path / "merged.safetensors")
    torch.testing.assert_close(
        after["norm_out.linear.weight"], whole.roll(HIDDEN, 0).float(), rtol=1e-4, atol=1e-5
    )
    wanted = bias + tensors["diff_b"].roll(HIDDEN, 0) if kind == "diff_b" else bias
    torch.testing.assert_close(after["norm_out.linear.bias"], wanted)


def test_merging_loras_reads_all_parts_of_a_fused_module(
    model: tuple[diffusers.FluxTransformer2DModel, Path], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    net, folder = model
    tensors, changed = dora(per_output=False)
    file = written(tensors, QKV, tmp_path)
    weight = torch.cat([net.get_submodule(layer).weight.detach() for layer in PARTS])
    plan = RankPlan(RankRules(FixedRank(9999, 9999)))
    merge_lora_files([file, file], tmp_path / "both.safetensors", CombineOptions(plan=plan, base=folder))
    with open_lora(tmp_path / "both.safetensors") as lora:
        (name,) = lora.names
        change = 2.0 * (changed(weight.double()) - weight)
        torch.testing.assert_close(lora.modules[name].delta(), change.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("format", ["kohya", "comfyui"])
def test_kronecker_products_of_parts_become_factors_of_the_whole(format: str, tmp_path: Path) -> None:
    """A block of products is none itself."""
    torch.manual_seed(1)
    pairs = {name: (torch.randn(2, 2), torch.randn(8, 8)) for name in "qkv"}
    start = "lycoris_transformer_blocks_0_attn_to_"
    state = {f"{start}{name}.lokr_w{side + 1}": one[side] for name, one in pairs.items() for side in (0, 1)}
    file, made = tmp_path / "lora.safetensors", tmp_path / "made.safetensors"
    save_file(state, file)
    with pytest.raises(LoraFormatError, match="another matrix for it") as refused:
        convert_lora(file, made, format, family="flux")
    assert "--rank 32" in (refused.value.hint or "")
    convert_lora(file, made, format, family="flux", rank=9999)
    with open_lora(made) as lora:
        (name,) = lora.names
        delta = lora.modules[name].delta()
    expected = torch.cat([torch.kron(first, second) for first, second in pairs.values()])
    torch.testing.assert_close(delta, expected, rtol=1e-4, atol=1e-4)


def test_differences_of_parts_and_of_their_biases_are_joined(tmp_path: Path) -> None:
    """One part stays as it is."""
    torch.manual_seed(1)
    weights, biases = torch.randn(2, HIDDEN, HIDDEN), torch.randn(2, HIDDEN)
    start = "lycoris_transformer_blocks_0_attn_to_"
    state = {f"{start}{name}.diff": one for name, one in zip("qv", weights, strict=True)}
    state |= {f"{start}{name}.diff_b": one for name, one in zip("qv", biases, strict=True)}
    file, made = tmp_path / "lora.safetensors", tmp_path / "made.safetensors"
    save_file({key: tensor.clone() for key, tensor in state.items()}, file)
    convert_lora(file, made, "kohya", family="flux")
    after = load_file(made)
    name, nothing = "lora_unet_double_blocks_0_img_attn_qkv", torch.zeros(HIDDEN, HIDDEN)
    assert torch.equal(after[f"{name}.diff"], torch.cat([weights[0], nothing, weights[1]]))
    assert torch.equal(after[f"{name}.diff_b"], torch.cat([biases[0], nothing[0], biases[1]]))
