"""What our writer puts into files: names, alphas, headers, and nothing when it fails."""

import json
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from sigmascope.checkpoints import SizeWriter, StreamingWriter
from sigmascope.errors import LoraFormatError, NonFiniteError, WriteError
from sigmascope.lora.adapters import (
    Adapter,
    DiffChange,
    DoraChange,
    LohaChange,
    LokrChange,
    SetChange,
    TuckerChange,
    WeightChange,
)
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import ModelLayout
from sigmascope.lora.file import LoraFile
from sigmascope.lora.module_names import LayerIndex
from sigmascope.lora.reader import load_lora
from sigmascope.lora.writer import LoraWriter, save_lora, stored_factors

MakeFactors = Callable[..., LoraFactors]

LINEAR = "denoiser.mid_block.attentions.0.proj_in"
CONV = "denoiser.mid_block.resnets.0.conv1"
LBM = ModelLayout("lbm", "lbm", {"denoiser": "denoiser.", "vae": "vae.vae_model."})
SDXL = ModelLayout(
    "sdxl",
    "diffusers",
    {
        "denoiser": "unet.",
        "text_encoder": "text_encoder.",
        "text_encoder_2": "text_encoder_2.",
        "vae": "vae.",
    },
)
FLUX = ModelLayout("flux", "diffusers", {"denoiser": "transformer.", "text_encoder_2": "text_encoder_2."})
FORMATS = ["native", "kohya", "peft", "comfyui"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lora.safetensors"


def header_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


@pytest.mark.parametrize("format", FORMATS)
def test_a_lora_comes_back_from_every_format(format: str, make_factors: MakeFactors, file: Path) -> None:
    lora = LoraFile({LINEAR: make_factors((6, 5), 2, 0.5), CONV: make_factors((6, 4, 3, 3), 3, 9.0)})
    save_lora(file, lora, format=format)
    read = load_lora(file)
    assert read.format == format
    matched = LayerIndex.of(list(lora.modules), LBM).match(read).matched
    assert sorted(matched.values()) == sorted(lora.modules)
    for name, layer in matched.items():
        assert read.modules[name].scale == 1.0
        torch.testing.assert_close(read.modules[name].delta(), lora.modules[layer].delta())


@pytest.mark.parametrize(
    ("format", "keys"),
    [
        (
            "kohya",
            ("lora_unet_mid_block_attentions_0_proj_in", "lora_up.weight", "lora_down.weight", "alpha"),
        ),
        ("peft", ("unet.mid_block.attentions.0.proj_in", "lora_B.weight", "lora_A.weight")),
        (
            "comfyui",
            ("diffusion_model.middle_block.1.proj_in", "lora_up.weight", "lora_down.weight", "alpha"),
        ),
    ],
)
def test_keys_are_those_of_the_format(
    format: str, keys: tuple[str, ...], make_factors: MakeFactors, file: Path
) -> None:
    save_lora(file, LoraFile({LINEAR: make_factors((6, 5), 2)}), format=format)
    module, *ends = keys
    assert set(load_file(file)) == {f"{module}.{end}" for end in ends}


@pytest.mark.parametrize(
    ("layer", "layout", "names"),
    [
        (
            "text_encoder.text_model.encoder.layers.0.mlp.fc1",
            SDXL,
            {
                "kohya": "lora_te1_text_model_encoder_layers_0_mlp_fc1",
                "peft": "text_encoder.text_model.encoder.layers.0.mlp.fc1",
                "comfyui": "text_encoders.clip_l.transformer.text_model.encoder.layers.0.mlp.fc1",
            },
        ),
        (
            "text_encoder_2.encoder.layers.0.mlp.fc1",
            SDXL,
            {
                "kohya": "lora_te2_text_model_encoder_layers_0_mlp_fc1",
                "peft": "text_encoder_2.text_model.encoder.layers.0.mlp.fc1",
                "comfyui": "text_encoders.clip_g.transformer.text_model.encoder.layers.0.mlp.fc1",
            },
        ),
        (
            "text_encoder_2.encoder.block.0.layer.0.SelfAttention.q",
            FLUX,
            {
                "kohya": "lora_te3_encoder_block_0_layer_0_SelfAttention_q",
                "peft": "text_encoder_2.encoder.block.0.layer.0.SelfAttention.q",
                "comfyui": "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q",
            },
        ),
        ("transformer.x_embedder", FLUX, {"kohya": "lora_unet_img_in", "peft": "transformer.x_embedder"}),
    ],
)
def test_other_parts_have_the_names_that_tools_expect(
    layer: str, layout: ModelLayout, names: dict[str, str], make_factors: MakeFactors, file: Path
) -> None:
    # Of T5 alone diffusers takes nothing, nor of a CLIP without its attention.
    taken = {"transformer.x_embedder"} if layout is FLUX else {layer.replace("mlp.fc1", "self_attn.out_proj")}
    lora = LoraFile({name: make_factors((6, 5), 2) for name in {layer} | taken})
    for format, name in names.items():
        save_lora(file, lora, format=format, layout=layout)
        written = load_lora(file).modules
        assert name in written
        assert len(written) == len(lora.modules)


@pytest.mark.parametrize(
    ("layer", "layout"),
    [
        ("text_encoder_2.encoder.block.0.layer.0.SelfAttention.q", FLUX),
        ("text_encoder.text_model.encoder.layers.0.mlp.fc1", SDXL),
    ],
    ids=["T5", "CLIP without its attention"],
)
def test_a_file_that_diffusers_refuses_is_not_written_for_it(
    layer: str, layout: ModelLayout, make_factors: MakeFactors, file: Path
) -> None:
    with pytest.raises(LoraFormatError, match="diffusers would take none of its 1 module"):
        save_lora(file, LoraFile({layer: make_factors((6, 5), 2)}), format="peft", layout=layout)
    assert not file.exists()


@pytest.mark.parametrize("format", ["kohya", "comfyui"])
def test_a_vae_has_no_name_in_formats_of_denoisers(
    format: str, make_factors: MakeFactors, file: Path
) -> None:
    lora = LoraFile({"vae.decoder.conv_in": make_factors((6, 5), 2)})
    with pytest.raises(LoraFormatError, match=r"no names for decoder\.conv_in of the part vae"):
        save_lora(file, lora, format=format, layout=SDXL)
    assert not file.exists()


def test_fused_layers_are_written_as_one_in_whatever_order_they_come(
    make_factors: MakeFactors, file: Path
) -> None:
    start = "transformer.transformer_blocks.0.attn."
    parts = {
        name: make_factors((4, 4), 1 + seed, seed=seed) for seed, name in enumerate(["to_v", "to_q", "to_k"])
    }
    with LoraWriter(file, format="kohya", layout=FLUX) as writer:
        for name, factors in parts.items():
            writer.write(start + name, factors)
    (name,) = load_lora(file).modules
    assert name == "lora_unet_double_blocks_0_img_attn_qkv"
    expected = torch.cat([parts[name].delta() for name in ("to_q", "to_k", "to_v")])
    torch.testing.assert_close(load_lora(file).modules[name].delta(), expected)


def test_a_fused_layer_without_all_its_parts_is_written_at_the_end(
    make_factors: MakeFactors, file: Path
) -> None:
    with LoraWriter(file, format="comfyui", layout=FLUX) as writer:
        writer.write("transformer.single_transformer_blocks.2.attn.to_k", make_factors((4, 4), 1))
    factors = load_lora(file).modules["diffusion_model.single_blocks.2.linear1"]
    assert factors.weight_shape == (3 * 4 + 16, 4)
    assert not factors.delta()[:4].any()
    assert not factors.delta()[8:].any()


def test_a_fused_layer_is_divided_for_peft(make_factors: MakeFactors, file: Path) -> None:
    original = ModelLayout("flux", "original", {"denoiser": ""})
    factors = make_factors((12, 4), 2)
    save_lora(file, LoraFile({"double_blocks.0.txt_attn.qkv": factors}), format="peft", layout=original)
    read = load_lora(file).modules
    start = "transformer.transformer_blocks.0.attn."
    assert list(read) == [f"{start}add_{name}_proj" for name in "qkv"]
    torch.testing.assert_close(torch.cat([part.delta() for part in read.values()]), factors.delta())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_scale_of_two_powers_loses_nothing(dtype: torch.dtype) -> None:
    up, down = torch.randn(6, 2).to(dtype), torch.randn(2, 5).to(dtype)
    stored = stored_factors(LoraFactors(up, down, 1.0, (6, 5)))
    assert (stored.alpha, stored.down.dtype) == (2.0, dtype)
    assert torch.equal(stored.up.double(), 0.5 * up.double())


def test_a_scale_that_would_round_widens_the_up_factor() -> None:
    factors = LoraFactors(torch.randn(6, 2).bfloat16(), torch.randn(2, 5).bfloat16(), 1.3, (6, 5))
    stored = stored_factors(factors)
    assert (stored.up.dtype, stored.down.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(stored.up.double(), 0.65 * factors.up.double(), rtol=1e-7, atol=0)


def test_a_scale_that_would_fall_below_float16_widens_the_up_factor() -> None:
    factors = LoraFactors(torch.full((6, 2), 3e-5).half(), torch.ones(2, 5).half(), 2.0**-8, (6, 5))
    assert stored_factors(factors).up.dtype == torch.float32


def test_an_asked_dtype_rounds_the_scaled_factor_once(make_factors: MakeFactors) -> None:
    factors = make_factors((6, 5), 3, 2.0)
    stored = stored_factors(factors, torch.bfloat16)
    assert torch.equal(stored.up, (factors.up.double() * (2 / 3)).bfloat16())


def test_widened_layers_are_told(make_factors: MakeFactors, file: Path) -> None:
    with LoraWriter(file) as writer:
        writer.write(LINEAR, make_factors((6, 5), 3, 2.0, torch.bfloat16))
        writer.write(CONV, make_factors((6, 4, 3, 3), 2, 1.0, torch.bfloat16))
    assert writer.widened == [LINEAR]


@pytest.mark.parametrize(
    ("family", "architecture", "version"),
    [
        ("lbm", "lbm/lora", "lbm"),
        ("sd15", "stable-diffusion-v1/lora", "sd_v1"),
        ("sdxl", "stable-diffusion-xl-v1-base/lora", "sdxl_base_v1-0"),
        ("flux", "flux-1/lora", "flux1"),
    ],
)
def test_the_header_names_the_family_as_tools_do(
    family: str, architecture: str, version: str, make_factors: MakeFactors, file: Path
) -> None:
    start, layer = "transformer.", "transformer_blocks.0.attn.to_q"
    if family != "flux":
        start, layer = "unet.", "time_embedding.linear_1"
    layout = ModelLayout(family, "diffusers", {"denoiser": start})
    save_lora(file, LoraFile({start + layer: make_factors((6, 5), 2)}), format="peft", layout=layout)
    header = header_of(file)
    assert (header["modelspec.architecture"], header["ss_base_model_version"]) == (architecture, version)


def test_a_model_of_no_known_family_gets_no_architecture(make_factors: MakeFactors, file: Path) -> None:
    layout = ModelLayout("unknown", "unknown", {"denoiser": ""})
    save_lora(file, LoraFile({"a.b": make_factors((6, 5), 2)}), format="kohya", layout=layout)
    assert list(load_lora(file).modules) == ["lora_unet_a_b"]
    assert "modelspec.architecture" not in header_of(file)


@pytest.mark.parametrize(
    ("ranks", "dim"),
    [([2, 2, 2], "2"), ([2, 2, 1], "2"), ([2, 3, 2], "Dynamic"), ([5, 5], "5"), ([5, 2], "Dynamic")],
)
def test_the_header_has_the_rank_or_says_that_it_varies(
    ranks: list[int], dim: str, make_factors: MakeFactors, file: Path
) -> None:
    """The third layer cannot have more than rank 1; the others can have 5."""
    shapes = [(6, 5), (6, 5), (1, 5) if 1 in ranks else (6, 5)]
    with LoraWriter(file) as writer:
        for number, (rank, shape) in enumerate(zip(ranks, shapes, strict=False)):
            writer.write(f"denoiser.layer_{number}", make_factors(shape, rank))
    assert header_of(file)["ss_network_dim"] == dim


def test_metadata_given_goes_before_what_is_calculated_and_that_before_inherited(
    make_factors: MakeFactors, file: Path
) -> None:
    inherited = {"ss_network_dim": "64", "ss_tag": "cat", "modelspec.title": "old"}
    with LoraWriter(file, metadata={"ss_network_alpha": "7"}, inherited=inherited) as writer:
        writer.write(LINEAR, make_factors((6, 5), 2))
    header = header_of(file)
    expected = {"ss_network_dim": "2", "ss_network_alpha": "7", "ss_tag": "cat", "modelspec.title": "old"}
    assert expected.items() <= header.items()


def test_only_native_files_say_that_they_are(make_factors: MakeFactors, file: Path) -> None:
    for format in FORMATS:
        save_lora(file, LoraFile({LINEAR: make_factors((6, 5), 2)}), format=format)
        assert ("lbm_native_naming" in header_of(file)) is (format == "native")


LOHA = {f"hada_w{side}_{end}": torch.randn(5, 5) for side in (1, 2) for end in "ab"}
CHANGES: dict[str, tuple[str, Adapter | DoraChange]] = {
    "loha": (LINEAR, LohaChange(LOHA, 0.4)),
    "lokr": (LINEAR, LokrChange({"lokr_w1_a": torch.randn(2, 1), "lokr_w1_b": torch.randn(1, 3), "lokr_w2": torch.randn(3, 2)}, 0.5)),
    "whole lokr": (LINEAR, LokrChange({"lokr_w1": torch.randn(2, 3), "lokr_w2": torch.randn(3, 2)}, 0.5)),
    "tucker": (
        CONV,
        TuckerChange(
            {
                "lora_up.weight": torch.randn(5, 2, 1, 1),
                "lora_down.weight": torch.randn(2, 4, 1, 1),
                "lora_mid.weight": torch.randn(2, 2, 3, 3),
            },
            0.5,
        ),
    ),
    "dora": (LINEAR, DoraChange(LoraFactors(torch.randn(6, 2), torch.randn(2, 5), 1.0, (6, 5)), torch.rand(6))),
    "dora per input": (
        CONV,
        DoraChange(LoraFactors(torch.randn(6, 2), torch.randn(2, 36), 1.0, (6, 4, 3, 3)), torch.rand(4), per_output=False),
    ),
    "dora of loha": (LINEAR, DoraChange(LohaChange(LOHA, 0.4), torch.rand(5))),
    "diff": ("denoiser.mid_block.resnets.0.norm1", DiffChange({"w_norm": torch.randn(6)})),
    "scaled diff": (f"{LINEAR}.bias", DiffChange({"lora_up.bias": torch.randn(6)}, 0.5)),
    "set": (LINEAR, SetChange({"set_weight": torch.randn(6, 5)})),
}  # fmt: skip


@pytest.mark.parametrize("format", ["native", "kohya", "comfyui"])
@pytest.mark.parametrize("kind", CHANGES)
def test_every_kind_of_change_comes_back(kind: str, format: str, file: Path) -> None:
    name, change = CHANGES[kind]
    save_lora(file, LoraFile({}, changes={name: change}), format=format)
    read = load_lora(file)
    assert read.unused_keys == ()
    (found,) = read.changes.values()
    base = torch.randn(change.weight_shape)
    assert found.kind == change.kind
    torch.testing.assert_close(found.delta(base), change.delta(base))
    assert list(LayerIndex.of([name.removesuffix(".bias")], LBM).match(read).matched.values()) == [name]


@pytest.mark.parametrize("kind", ["loha", "lokr", "dora per input", "dora of loha", "diff", "set"])
def test_peft_files_hold_no_such_change(kind: str, make_factors: MakeFactors, file: Path) -> None:
    name, change = CHANGES[kind]
    with pytest.raises(
        LoraFormatError, match=rf"{name}: peft files cannot hold such a change \({change.kind}\)"
    ):
        save_lora(file, LoraFile({}, changes={name: change}), format="peft")
    assert not file.exists()


def test_a_tucker_core_is_multiplied_out_for_peft(file: Path) -> None:
    name, change = CHANGES["tucker"]
    save_lora(file, LoraFile({}, changes={name: change}), format="peft")
    (factors,) = load_lora(file).modules.values()
    torch.testing.assert_close(factors.delta(), change.delta())


def test_a_files_kind_of_network_is_lycoris_where_it_is_one(file: Path) -> None:
    save_lora(file, LoraFile({}, changes={LINEAR: LohaChange(LOHA)}))
    assert header_of(file)["ss_network_module"] == "lycoris.kohya"


def test_differences_are_written_by_the_keys_of_the_checkpoint(file: Path) -> None:
    values = torch.randn(6)
    with LoraWriter(file, format="comfyui") as writer:
        writer.write_diff("denoiser.conv_norm_out.weight", values)
        writer.write_diff("denoiser.conv_norm_out.bias", values + 1)
    tensors = load_file(file)
    assert torch.equal(tensors["diffusion_model.out.0.diff"], values)
    assert torch.equal(tensors["diffusion_model.out.0.diff_b"], values + 1)


def test_changes_are_stored_in_the_asked_dtype_and_their_alpha_is_not(file: Path) -> None:
    save_lora(file, LoraFile({}, changes={LINEAR: LohaChange(LOHA, 0.3)}), dtype=torch.bfloat16)
    dtypes = {key.rsplit(".", 1)[1]: tensor.dtype for key, tensor in load_file(file).items()}
    assert dtypes.pop("alpha") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}


def test_a_change_that_is_no_number_is_refused_by_name(file: Path) -> None:
    with pytest.raises(NonFiniteError, match=LINEAR):
        save_lora(file, LoraFile({}, changes={LINEAR: DiffChange({"diff": torch.full((3,), nan)})}))
    assert not file.exists()


def test_a_change_of_a_kind_from_elsewhere_is_refused(file: Path) -> None:
    class Strange:
        kind, weight_shape, parameters = "strange", (2, 3), 6

        def delta(self, base: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(2, 3, dtype=dtype)

        def frobenius_norm(self, base: Tensor | None = None) -> float:
            return 0.0

    change: WeightChange = Strange()
    with pytest.raises(LoraFormatError, match="strange"):
        save_lora(file, LoraFile({}, changes={LINEAR: change}))


def test_nothing_is_left_of_a_file_that_failed(make_factors: MakeFactors, tmp_path: Path) -> None:
    file = tmp_path / "lora.safetensors"
    file.write_bytes(b"old")

    def write() -> None:
        with LoraWriter(file) as writer:
            writer.write(LINEAR, make_factors((6, 5), 2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    with pytest.raises(LoraFormatError, match="without modules"), LoraWriter(file):
        pass
    assert (file.read_bytes(), list(tmp_path.iterdir())) == (b"old", [file])


def test_a_layer_is_not_written_twice(make_factors: MakeFactors, file: Path) -> None:
    def write() -> None:
        with LoraWriter(file) as writer:
            writer.write(LINEAR, make_factors((6, 5), 2))
            writer.write(LINEAR, make_factors((6, 5), 2))

    with pytest.raises(WriteError, match="written twice"):
        write()


def test_an_unknown_format_is_refused_with_those_that_there_are(file: Path) -> None:
    with pytest.raises(LoraFormatError, match=r"no LoRA format 'gguf'.*native, kohya, peft, comfyui"):
        LoraWriter(file, format="gguf")


def test_the_header_keeps_to_the_room_that_was_left_for_it(make_factors: MakeFactors, file: Path) -> None:
    layers = [f"denoiser.down_blocks.0.resnets.{number}.conv1" for number in range(20)]
    with LoraWriter(file, expected=layers) as writer:
        for layer in layers:
            writer.write(layer, make_factors((64, 64), 16))
    size = sum(tensor.nbytes for tensor in load_file(file).values())
    assert file.stat().st_size < size + 20_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "alphas"), [((2, 2, 3, 2), {2.0, 3.0}), ((4, 4, 2, 3), {2.0})])
def test_a_kohya_file_whose_attention_differs_in_rank_has_one_alpha(
    ranks: tuple[int, ...],
    alphas: set[float],
    dtype: torch.dtype,
    make_factors: MakeFactors,
    file: Path,
) -> None:
    attention = "denoiser.mid_block.attentions.0.transformer_blocks.0.attn1.to_"
    names = (f"{attention}q", f"{attention}k", LINEAR, f"{attention}v")
    # Rows of 5 numbers of 2 bytes wait until the end of the file; rows of 8 do not
    shapes = ((6, 5), (8, 8), (6, 5), (8, 8))
    lora = LoraFile(
        {
            name: make_factors(shape, rank, 0.5 * rank, dtype)
            for name, shape, rank in zip(names, shapes, ranks, strict=True)
        }
    )
    save_lora(file, lora, format="kohya")
    stored = load_file(file)
    assert {float(tensor) for key, tensor in stored.items() if key.endswith(".alpha")} == alphas
    for name, factors in lora.modules.items():
        flat = f"lora_unet_{name.removeprefix('denoiser.').replace('.', '_')}"
        up, down = (stored[f"{flat}.lora_{side}.weight"] for side in ("up", "down"))
        scale = float(stored[f"{flat}.alpha"]) / len(down)
        change = 0.5 * factors.up.double() @ factors.down.double()
        assert up.dtype == dtype
        torch.testing.assert_close(
            scale * up.double() @ down.double(), change, rtol=0, atol=torch.finfo(dtype).eps
        )


FAMILIES: dict[str, tuple[ModelLayout, tuple[str, ...]]] = {
    "lbm": (LBM, (LINEAR, CONV, "denoiser.conv_in")),
    "sdxl": (SDXL, ("unet.conv_in", "unet.up_blocks.0.upsamplers.0.conv", "text_encoder.text_model.encoder.layers.0.self_attn.out_proj")),
    "flux": (FLUX, ("transformer.transformer_blocks.0.attn.to_q", "transformer.norm_out.linear", "transformer.proj_out")),
}  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_lora_survives_any_format(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    layout, layers = FAMILIES[data.draw(st.sampled_from(sorted(FAMILIES)))]
    format = data.draw(st.sampled_from(FORMATS))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    modules = {}
    for layer in layers:
        inner = data.draw(st.integers(1, 4))
        # In these formats a query is a third of a fused matrix, which a model has only with equal widths.
        out = inner if layer.endswith("to_q") else data.draw(st.integers(1, 5))
        rank, scale = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([1.0, 0.5, 2.0, 0.3]))
        # PEFT refuses another kernel than the layer's, and what diffusers would not take is not written.
        kernels = [(3, 3)] if format == "peft" else [(), (1, 1), (3, 3)]
        kernel = data.draw(st.sampled_from(kernels)) if "conv" in layer else ()
        width = inner * int(torch.Size(kernel).numel())
        up, down = torch.randn(out, rank).to(dtype), torch.randn(rank, width).to(dtype)
        modules[layer] = LoraFactors(up, down, scale * rank, (out, inner, *kernel))
    path = tmp_path_factory.mktemp("any") / "lora.safetensors"
    save_lora(path, LoraFile(modules), format=format, layout=layout)
    read = load_lora(path)
    total = sum(float(factors.delta(torch.float64).square().sum()) for factors in modules.values())
    back = sum(float(factors.delta(torch.float64).square().sum()) for factors in read.modules.values())
    assert back == pytest.approx(total, rel=1e-6)
    assert len(read.modules) == len(modules)
    assert json.dumps(dict(read.metadata))


@pytest.mark.parametrize("format", FORMATS)
def test_the_size_is_known_without_writing(format: str, make_factors: MakeFactors, file: Path) -> None:
    ranks = {f"denoiser.down_blocks.0.attentions.{number}.proj_in": 1 + number for number in range(2)}

    def size(writes: type[StreamingWriter]) -> int:
        with LoraWriter(file, format=format, layout=LBM, compact=True, writes=writes) as writer:
            for layer, rank in ranks.items():
                writer.write(layer, make_factors((9, 7), rank=rank))
            writer.write(CONV, make_factors((6, 4, 3, 3), rank=3))
        return writer.file_bytes

    told = size(SizeWriter)
    assert not file.exists()
    assert size(StreamingWriter) == told == file.stat().st_size
