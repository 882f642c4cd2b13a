import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft.utils import merge_utils
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.families import make_pipeline
from torch import nn

from sigmascope.errors import CheckpointError, ConfigError, ModelMismatchError, NonFiniteError
from sigmascope.lora import factors as factors_module
from sigmascope.lora.checkpoint_merge import merge_into_checkpoint
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import ModelLayout
from sigmascope.lora.file import LoraFile
from sigmascope.lora.live_merge import merge_into_model
from sigmascope.lora.merge import MergeMethod
from sigmascope.lora.ranks import FixedRank, RankRules
from sigmascope.lora.resize import RankPlan, resize_lora
from sigmascope.lora.writer import save_lora

MakeLora = Callable[..., LoraFile]
Tensors = dict[str, torch.Tensor]
UNKNOWN = ModelLayout("unknown", "unknown", {"denoiser": ""})


class Block(nn.Module):
    """Names as in an LBM, at toy size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, 8, 3)
        self.mid_block = nn.ModuleDict({"proj_in": nn.Linear(8, 6), "norm": nn.LayerNorm(6)})
        self.conv_out = nn.Conv2d(8, 4, 1)


@pytest.fixture
def model() -> Block:
    torch.manual_seed(0)
    return Block()


def saved(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> Path:
    save_file(tensors, path, metadata)
    return path


def checkpoint(model: nn.Module, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    state = {f"denoiser.{name}": value.to(dtype) for name, value in model.state_dict().items()}
    return saved(path, state | {"num_iterations": torch.tensor(7.0)}, {"made": "here"})


def lora_of(
    model: nn.Module, make_lora: MakeLora, path: Path, *, seed: int = 0, alpha: float | None = None
) -> LoraFile:
    lora = make_lora(model, rank=2, alpha=alpha, prefix="denoiser.", seed=seed)
    save_lora(path, lora)
    return lora


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("weight", [1.0, -0.7])
def test_the_file_equals_the_live_model_merged_bit_for_bit(
    model: Block, make_lora: MakeLora, tmp_path: Path, dtype: torch.dtype, weight: float
) -> None:
    model.to(dtype)
    base = checkpoint(model, tmp_path / "base.safetensors", dtype)
    lora = lora_of(model, make_lora, tmp_path / "lora.safetensors", alpha=3.0)
    stored = load_file(tmp_path / "lora.safetensors")
    merge_into_checkpoint(
        [tmp_path / "lora.safetensors"], base, tmp_path / "merged.safetensors", weights=[weight]
    )
    after = load_file(tmp_path / "merged.safetensors")
    as_stored = LoraFile(
        {
            name: LoraFactors(
                stored[f"{name}.lora_up.weight"].flatten(1),
                stored[f"{name}.lora_down.weight"].flatten(1),
                float(stored[f"{name}.alpha"]),
                pair.weight_shape,
            )
            for name, pair in lora.modules.items()
        }
    )
    with merge_into_model(model, as_stored, weight):
        for name, value in model.state_dict().items():
            assert torch.equal(after[f"denoiser.{name}"], value), name


@pytest.mark.parametrize("weight", [0.5, -0.7])
def test_a_tensor_of_many_pieces_equals_the_live_model_merged(
    make_lora: MakeLora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weight: float
) -> None:
    monkeypatch.setattr(factors_module, "_PIECE", 32 * 49)
    model = nn.ModuleDict({"conv_in": nn.Linear(49, 70)})
    base = checkpoint(model, tmp_path / "base.safetensors")
    lora = lora_of(model, make_lora, tmp_path / "lora.safetensors")
    merge_into_checkpoint(
        [tmp_path / "lora.safetensors"], base, tmp_path / "merged.safetensors", weights=[weight]
    )
    with merge_into_model(model, lora, weight):
        after = load_file(tmp_path / "merged.safetensors")["denoiser.conv_in.weight"]
        assert torch.equal(after, model.get_parameter("conv_in.weight"))


def test_everything_else_is_copied_bit_for_bit_and_the_header_stays(
    model: Block, make_lora: MakeLora, tmp_path: Path
) -> None:
    base = checkpoint(model, tmp_path / "base.safetensors", torch.bfloat16)
    lora_of(model, make_lora, tmp_path / "lora.safetensors")
    report = merge_into_checkpoint(
        [tmp_path / "lora.safetensors"], base, tmp_path / "merged.safetensors", weights=[0.5]
    )
    before, after = load_file(base), load_file(tmp_path / "merged.safetensors")
    assert before.keys() == after.keys()
    changed = {tensor.name for tensor in report.tensors}
    assert changed == {f"denoiser.{name}.weight" for name in ("conv_in", "mid_block.proj_in", "conv_out")}
    for key in before.keys() - changed:
        assert torch.equal(before[key], after[key])
    assert report.copied == len(before) - 3
    with safe_open(tmp_path / "merged.safetensors", "pt") as file:
        header = file.metadata()
    assert header["made"] == "here"
    (merged,) = json.loads(header["sigmascope_merged_loras"])
    assert (merged["file"], merged["weight"]) == ("lora.safetensors", 0.5)


def test_several_loras_add_up_and_are_rounded_once(model: Block, make_lora: MakeLora, tmp_path: Path) -> None:
    base = checkpoint(model, tmp_path / "base.safetensors", torch.bfloat16)
    loras = [lora_of(model, make_lora, tmp_path / f"{seed}.safetensors", seed=seed) for seed in range(3)]
    weights = [0.6, 0.0, -0.3]
    report = merge_into_checkpoint(
        [tmp_path / f"{seed}.safetensors" for seed in range(3)],
        base,
        tmp_path / "m.safetensors",
        weights=weights,
    )
    before, after = load_file(base), load_file(tmp_path / "m.safetensors")
    for name in loras[0].modules:
        exact = before[f"{name}.weight"].double()
        for lora, weight in zip(loras, weights, strict=True):
            exact = exact + weight * lora.modules[name].delta(torch.float64)
        half_a_step = 2.0**-8 * exact.abs() + 1e-7
        assert bool(((after[f"{name}.weight"].double() - exact).abs() <= half_a_step).all())
    assert {tensor.loras for tensor in report.tensors} == {(0, 2)}


def test_what_rounding_takes_away_is_reported(model: Block, make_lora: MakeLora, tmp_path: Path) -> None:
    base = checkpoint(model, tmp_path / "base.safetensors", torch.bfloat16)
    lora = lora_of(model, make_lora, tmp_path / "lora.safetensors")
    report = merge_into_checkpoint(
        [tmp_path / "lora.safetensors"], base, tmp_path / "m.safetensors", weights=[0.01]
    )
    before, after = load_file(base), load_file(tmp_path / "m.safetensors")
    for tensor in report.tensors:
        change = 0.01 * lora.modules[tensor.name.removesuffix(".weight")].delta(torch.float64)
        lost = after[tensor.name].double() - before[tensor.name].double() - change
        assert tensor.change_norm == pytest.approx(float(change.norm()), rel=1e-3)
        assert tensor.lost_norm == pytest.approx(float(lost.norm()), rel=1e-3)
        assert tensor.weight_norm == pytest.approx(float(before[tensor.name].double().norm()), rel=1e-5)
    assert report.lost_share is not None
    assert 0.05 < report.lost_share < 2.0
    json.dumps(report.as_dict(), allow_nan=False)


def test_weight_zero_touches_no_bit(model: Block, make_lora: MakeLora, tmp_path: Path) -> None:
    base = checkpoint(model, tmp_path / "base.safetensors")
    lora_of(model, make_lora, tmp_path / "lora.safetensors")
    report = merge_into_checkpoint(
        [tmp_path / "lora.safetensors"], base, tmp_path / "m.safetensors", weights=[0.0]
    )
    before, after = load_file(base), load_file(tmp_path / "m.safetensors")
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert report.tensors == ()


@pytest.mark.parametrize("method", [MergeMethod("ties_mergekit", 0.5), MergeMethod("dare", 0.5, 3)])
def test_sparse_methods_need_no_rank_here(
    model: Block, make_lora: MakeLora, tmp_path: Path, method: MergeMethod
) -> None:
    base = checkpoint(model, tmp_path / "base.safetensors")
    loras = [lora_of(model, make_lora, tmp_path / f"{seed}.safetensors", seed=seed) for seed in range(2)]
    paths = [tmp_path / f"{seed}.safetensors" for seed in range(2)]
    merge_into_checkpoint(paths, base, tmp_path / "m.safetensors", weights=[0.5, 0.25], method=method)
    key = "denoiser.mid_block.proj_in.weight"
    deltas = {
        position: lora.modules[key.removesuffix(".weight")].delta().mul(weight)
        for position, (lora, weight) in enumerate(zip(loras, (0.5, 0.25), strict=True))
    }
    expected = load_file(base)[key] + method.combine(key, deltas)
    torch.testing.assert_close(load_file(tmp_path / "m.safetensors")[key], expected)


def test_ties_into_a_checkpoint_is_that_of_peft(model: Block, make_lora: MakeLora, tmp_path: Path) -> None:
    base = checkpoint(model, tmp_path / "base.safetensors")
    loras = [lora_of(model, make_lora, tmp_path / f"{seed}.safetensors", seed=seed) for seed in range(2)]
    paths = [tmp_path / f"{seed}.safetensors" for seed in range(2)]
    method = MergeMethod("ties", 0.5)
    merge_into_checkpoint(paths, base, tmp_path / "m.safetensors", weights=[0.7, 0.5], method=method)
    key = "denoiser.mid_block.proj_in.weight"
    changes = [lora.modules[key.removesuffix(".weight")].delta() for lora in loras]
    expected = load_file(base)[key] + merge_utils.ties(changes, torch.tensor([0.7, 0.5]), 0.5)
    torch.testing.assert_close(load_file(tmp_path / "m.safetensors")[key], expected)


def test_a_pickled_and_a_sharded_checkpoint_are_merged_into(
    model: Block, make_lora: MakeLora, tmp_path: Path
) -> None:
    base = checkpoint(model, tmp_path / "base.safetensors")
    lora_of(model, make_lora, tmp_path / "lora.safetensors")
    merge_into_checkpoint([tmp_path / "lora.safetensors"], base, tmp_path / "expected.safetensors")
    state = load_file(base)
    torch.save(
        {"state_dict": {f"model.{key}": value for key, value in state.items()}}, tmp_path / "base.ckpt"
    )
    keys = list(state)
    shards = {"one.safetensors": keys[:3], "two.safetensors": keys[3:]}
    for name, names in shards.items():
        save_file({key: state[key] for key in names}, tmp_path / name)
    index = {"weight_map": {key: name for name, names in shards.items() for key in names}}
    (tmp_path / "base.safetensors.index.json").write_text(json.dumps(index))
    expected = load_file(tmp_path / "expected.safetensors")
    for into in ("base.ckpt", "base.safetensors.index.json"):
        merge_into_checkpoint([tmp_path / "lora.safetensors"], tmp_path / into, tmp_path / "m.safetensors")
        after = load_file(tmp_path / "m.safetensors")
        assert after.keys() == expected.keys()
        assert all(torch.equal(after[key], expected[key]) for key in expected)


def test_modules_without_a_tensor_are_refused_by_name(
    model: Block, make_lora: MakeLora, tmp_path: Path
) -> None:
    base = checkpoint(model, tmp_path / "base.safetensors")
    lora = lora_of(model, make_lora, tmp_path / "lora.safetensors")
    odd = LoraFile({**lora.modules, "denoiser.up_blocks.9.conv": lora.modules["denoiser.conv_in"]})
    save_lora(tmp_path / "lora.safetensors", odd)
    with pytest.raises(ModelMismatchError, match=r"denoiser\.up_blocks\.9\.conv") as refusal:
        merge_into_checkpoint([tmp_path / "lora.safetensors"], base, tmp_path / "m.safetensors")
    assert "--allow_unmatched" in str(refusal.value)
    assert not (tmp_path / "m.safetensors").exists()
    report = merge_into_checkpoint(
        [tmp_path / "lora.safetensors"], base, tmp_path / "m.safetensors", allow_unmatched=True
    )
    assert report.unmatched == {0: ("denoiser.up_blocks.9.conv",)}
    assert len(report.tensors) == 3


def test_a_lora_of_another_model_is_refused_even_if_unmatched_modules_are_allowed(
    model: Block, make_lora: MakeLora, make_factors: Callable[..., LoraFactors], tmp_path: Path
) -> None:
    base = checkpoint(model, tmp_path / "base.safetensors")
    save_lora(tmp_path / "lora.safetensors", LoraFile({"denoiser.other": make_factors((4, 4), 2)}))
    with pytest.raises(ModelMismatchError, match=r"denoiser\.other"):
        merge_into_checkpoint(
            [tmp_path / "lora.safetensors"], base, tmp_path / "m.safetensors", allow_unmatched=True
        )


def test_modules_of_another_shape_are_refused_before_anything_is_written(
    model: Block, make_factors: Callable[..., LoraFactors], tmp_path: Path
) -> None:
    base = checkpoint(model, tmp_path / "base.safetensors")
    save_lora(tmp_path / "lora.safetensors", LoraFile({"denoiser.conv_in": make_factors((8, 4, 3, 3), 2)}))
    with pytest.raises(ModelMismatchError, match=r"\(8, 3, 3, 3\) in the checkpoint and \(8, 4, 3, 3\)"):
        merge_into_checkpoint([tmp_path / "lora.safetensors"], base, tmp_path / "m.safetensors")


def test_a_linear_change_lands_on_a_pointwise_convolution(
    model: Block, make_factors: Callable[..., LoraFactors], tmp_path: Path
) -> None:
    base = checkpoint(model, tmp_path / "base.safetensors")
    factors = make_factors((4, 8), 2)
    save_lora(tmp_path / "lora.safetensors", LoraFile({"denoiser.conv_out": factors}))
    merge_into_checkpoint([tmp_path / "lora.safetensors"], base, tmp_path / "m.safetensors")
    key = "denoiser.conv_out.weight"
    expected = load_file(base)[key] + factors.delta()[:, :, None, None]
    torch.testing.assert_close(load_file(tmp_path / "m.safetensors")[key], expected)


def test_differences_of_biases_and_dora_land_too(model: Block, tmp_path: Path) -> None:
    base = checkpoint(model, tmp_path / "base.safetensors")
    up, down = torch.randn(6, 2), torch.randn(2, 8)
    magnitude = torch.rand(6, 1) + 0.5
    tensors = {
        "lora_unet_mid_block_proj_in.lora_up.weight": up,
        "lora_unet_mid_block_proj_in.lora_down.weight": down,
        "lora_unet_mid_block_proj_in.dora_scale": magnitude,
        "lora_unet_conv_in.diff_b": torch.randn(8),
        "lora_unet_mid_block_norm.w_norm": torch.randn(6),
    }
    saved(tmp_path / "lora.safetensors", tensors)
    merge_into_checkpoint([tmp_path / "lora.safetensors"], base, tmp_path / "m.safetensors")
    before, after = load_file(base), load_file(tmp_path / "m.safetensors")
    changed = before["denoiser.mid_block.proj_in.weight"] + up @ down
    expected = magnitude * changed / changed.norm(dim=1, keepdim=True)
    torch.testing.assert_close(after["denoiser.mid_block.proj_in.weight"], expected)
    for key, change in (
        ("conv_in.bias", "conv_in.diff_b"),
        ("mid_block.norm.weight", "mid_block_norm.w_norm"),
    ):
        torch.testing.assert_close(
            after[f"denoiser.{key}"], before[f"denoiser.{key}"] + tensors[f"lora_unet_{change}"]
        )


def test_a_lora_in_diffusers_names_lands_on_a_single_file_in_sgm_names(
    make_factors: Callable[..., LoraFactors], tmp_path: Path
) -> None:
    start = "model.diffusion_model."
    names = ["input_blocks.0.0", "input_blocks.4.1.proj_in", "input_blocks.3.0.op", "out.2", "time_embed.0"]
    state = {f"{start}{name}.weight": torch.randn(6, 5) for name in names}
    saved(tmp_path / "model.safetensors", state)
    factors = make_factors((6, 5), 2)
    tensors = {
        "lora_unet_down_blocks_1_attentions_0_proj_in.lora_up.weight": factors.up,
        "lora_unet_down_blocks_1_attentions_0_proj_in.lora_down.weight": factors.down,
    }
    saved(tmp_path / "lora.safetensors", tensors)
    report = merge_into_checkpoint(
        [tmp_path / "lora.safetensors"], tmp_path / "model.safetensors", tmp_path / "m.safetensors"
    )
    key = f"{start}input_blocks.4.1.proj_in.weight"
    assert [tensor.name for tensor in report.tensors] == [key]
    torch.testing.assert_close(load_file(tmp_path / "m.safetensors")[key], state[key] + factors.delta())


def test_separate_query_key_and_value_land_on_a_fused_matrix(tmp_path: Path) -> None:
    keys = ["img_in", "vector_in.in_layer", "double_blocks.0.img_attn.qkv", "single_blocks.0.linear1"]
    state = {f"{key}.weight": torch.randn(42 if "linear1" in key else 18, 6) for key in keys}
    saved(tmp_path / "flux.safetensors", state)
    parts = {name: (torch.randn(6, 2), torch.randn(2, 6)) for name in ("q", "v")}
    tensors: Tensors = {}
    for name, (up, down) in parts.items():
        module = f"transformer.transformer_blocks.0.attn.to_{name}"
        tensors |= {f"{module}.lora_B.weight": up, f"{module}.lora_A.weight": down}
    saved(tmp_path / "lora.safetensors", tensors)
    merge_into_checkpoint(
        [tmp_path / "lora.safetensors"], tmp_path / "flux.safetensors", tmp_path / "m.safetensors"
    )
    expected = state["double_blocks.0.img_attn.qkv.weight"].clone()
    expected[:6] += parts["q"][0] @ parts["q"][1]
    expected[12:] += parts["v"][0] @ parts["v"][1]
    after = load_file(tmp_path / "m.safetensors")["double_blocks.0.img_attn.qkv.weight"]
    torch.testing.assert_close(after, expected)


def test_a_merged_weight_that_overflows_is_refused_by_name(
    model: Block, make_factors: Callable[..., LoraFactors], tmp_path: Path
) -> None:
    base = checkpoint(model, tmp_path / "base.safetensors", torch.float16)
    save_lora(tmp_path / "lora.safetensors", LoraFile({"denoiser.conv_in": make_factors((8, 3, 3, 3), 2)}))
    with pytest.raises(NonFiniteError, match=r"denoiser\.conv_in\.weight.*float16"):
        merge_into_checkpoint(
            [tmp_path / "lora.safetensors"], base, tmp_path / "m.safetensors", weights=[1e7]
        )
    assert not (tmp_path / "m.safetensors").exists()


def test_pipeline_folders_are_refused(model: Block, make_lora: MakeLora, tmp_path: Path) -> None:
    lora_of(model, make_lora, tmp_path / "lora.safetensors")
    folder = tmp_path / "pipeline"
    (folder / "unet").mkdir(parents=True)
    (folder / "model_index.json").write_text('{"unet": ["diffusers", "UNet2DConditionModel"]}')
    saved(folder / "unet" / "diffusion_pytorch_model.safetensors", {"conv_in.weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match="several components"):
        merge_into_checkpoint([tmp_path / "lora.safetensors"], folder, tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (("unet",), r"the one that the LoRA is for.*--into \S*sd15/unet \(\d+ modules\)\.$"),
        (
            ("unet", "text_encoder"),
            r"with --allow_unmatched.*sd15/unet \(\d+ modules\), --into \S*sd15/text_encoder \(\d+ modules\)",
        ),
    ],
)
def test_of_a_pipeline_s_folder_the_components_that_the_lora_is_for_are_named(
    parts: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    pipeline = make_pipeline("sd15")
    folder = tmp_path / "sd15"
    pipeline.save_pretrained(folder)
    modules = {
        f"{part}.{path}": LoraFactors(
            torch.ones(layer.out_features, 1),
            torch.ones(1, layer.in_features),
            1.0,
            tuple(layer.weight.shape),
        )
        for part in parts
        for path, layer in getattr(pipeline, part).named_modules()
        if isinstance(layer, torch.nn.Linear)
    }
    path = tmp_path / "lora.safetensors"
    save_lora(path, LoraFile(modules), format="peft")
    with pytest.raises(CheckpointError) as caught:
        merge_into_checkpoint([path], folder, tmp_path / "m.safetensors")
    assert "several components (" in caught.value.message
    assert re.search(said, caught.value.hint or "")
    assert ("text_encoder" in (caught.value.hint or "")) is ("text_encoder" in parts)
    for part in parts:  # the advice works
        merge_into_checkpoint(
            [path], folder / part, tmp_path / f"{part}.safetensors", allow_unmatched=len(parts) > 1
        )


def test_inputs_are_never_the_target(model: Block, make_lora: MakeLora, tmp_path: Path) -> None:
    base = checkpoint(model, tmp_path / "base.safetensors")
    lora_of(model, make_lora, tmp_path / "lora.safetensors")
    for target in (base, tmp_path / "lora.safetensors"):
        with pytest.raises(ConfigError, match="input"):
            merge_into_checkpoint([tmp_path / "lora.safetensors"], base, target)


def test_the_target_is_a_safetensors_file(model: Block, make_lora: MakeLora, tmp_path: Path) -> None:
    base = checkpoint(model, tmp_path / "base.safetensors")
    lora_of(model, make_lora, tmp_path / "lora.safetensors")
    with pytest.raises(ConfigError, match="a checkpoint is written as safetensors"):
        merge_into_checkpoint([tmp_path / "lora.safetensors"], base, tmp_path / "merged.ckpt")


def test_an_error_in_the_middle_leaves_the_target_as_it_was(
    model: Block, make_lora: MakeLora, tmp_path: Path
) -> None:
    base = checkpoint(model, tmp_path / "base.safetensors")
    lora_of(model, make_lora, tmp_path / "lora.safetensors")
    target = tmp_path / "m.safetensors"
    target.write_bytes(b"before")

    def stop(done: int, total: int, what: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_into_checkpoint([tmp_path / "lora.safetensors"], base, target, progress=stop)
    assert target.read_bytes() == b"before"
    assert len(list(tmp_path.iterdir())) == 3


def test_keys_of_no_module_are_reported(model: Block, make_lora: MakeLora, tmp_path: Path) -> None:
    base, path = checkpoint(model, tmp_path / "base.safetensors"), tmp_path / "lora.safetensors"
    lora_of(model, make_lora, path)
    save_file(load_file(path) | {"optimizer.step": torch.ones(1)}, path)
    report = merge_into_checkpoint([path], base, tmp_path / "out.safetensors")
    assert report.unused_keys == {0: ("optimizer.step",)}
    assert report.as_dict()["unused_keys"] == {"0": ["optimizer.step"]}


def test_a_resized_loha_of_a_convolution_lands_on_it(model: Block, tmp_path: Path) -> None:
    base = checkpoint(model, tmp_path / "base.safetensors")
    shapes = {"w1_a": (8, 2), "w1_b": (2, 27), "w2_a": (8, 2), "w2_b": (2, 27)}
    parts = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_file(
        {f"lora_unet_conv_in.hada_{name}": part for name, part in parts.items()},
        tmp_path / "loha.safetensors",
    )
    everything = RankPlan(RankRules(FixedRank(9999, 9999)))
    resize_lora(tmp_path / "loha.safetensors", tmp_path / "plain.safetensors", everything)
    merge_into_checkpoint([tmp_path / "plain.safetensors"], base, tmp_path / "out.safetensors")
    delta = (parts["w1_a"] @ parts["w1_b"]) * (parts["w2_a"] @ parts["w2_b"])
    expected = load_file(base)["denoiser.conv_in.weight"] + delta.reshape(8, 3, 3, 3)
    torch.testing.assert_close(load_file(tmp_path / "out.safetensors")["denoiser.conv_in.weight"], expected)
