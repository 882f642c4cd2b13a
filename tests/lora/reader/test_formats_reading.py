"""LoRA files as other tools write them."""

import json
from math import inf, nan, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sigmascope.checkpoints import Checkpoint
from sigmascope.errors import LoraFormatError, NonFiniteError
from sigmascope.lora.adapters import DoraChange
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.reader import load_lora, open_lora

peft: Any = pytest.importorskip("peft")

ATTENTION = "down_blocks.1.attentions.0.transformer_blocks.0.attn1"
TEXT = "text_encoder.text_model.encoder.layers.0.self_attn"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lora.safetensors"


def pair(up: str, down: str) -> dict[str, Tensor]:
    return {up: torch.randn(6, 2), down: torch.randn(2, 5)}


STYLES = {
    "kohya": ("lora_unet_conv_in.lora_up.weight", "lora_unet_conv_in.lora_down.weight", "lora_unet_conv_in"),
    "LyCORIS of SimpleTuner": ("lycoris_x.lora_up.weight", "lycoris_x.lora_down.weight", "lycoris_x"),
    "ComfyUI with up and down": (
        "diffusion_model.out.2.lora_up.weight",
        "diffusion_model.out.2.lora_down.weight",
        "diffusion_model.out.2",
    ),
    "ComfyUI with A and B": (
        "diffusion_model.out.2.lora_B.weight",
        "diffusion_model.out.2.lora_A.weight",
        "diffusion_model.out.2",
    ),
    "ComfyUI's text encoder": (
        "text_encoders.clip_l.transformer.text_model.encoder.layers.0.mlp.fc1.lora_up.weight",
        "text_encoders.clip_l.transformer.text_model.encoder.layers.0.mlp.fc1.lora_down.weight",
        "text_encoders.clip_l.transformer.text_model.encoder.layers.0.mlp.fc1",
    ),
    "diffusers": ("unet.conv_in.lora_B.weight", "unet.conv_in.lora_A.weight", "unet.conv_in"),
    "diffusers before PEFT": (
        f"unet.{ATTENTION}.to_q.lora.up.weight",
        f"unet.{ATTENTION}.to_q.lora.down.weight",
        f"unet.{ATTENTION}.to_q",
    ),
    "diffusers' attention processors": (
        f"unet.{ATTENTION}.processor.to_q_lora.up.weight",
        f"unet.{ATTENTION}.processor.to_q_lora.down.weight",
        f"unet.{ATTENTION}.to_q",
    ),
    "an attention processor's output": (
        f"unet.{ATTENTION}.processor.to_out_lora.up.weight",
        f"unet.{ATTENTION}.processor.to_out_lora.down.weight",
        f"unet.{ATTENTION}.to_out.0",
    ),
    "an IP-Adapter's own layer": (
        f"unet.{ATTENTION}.processor.to_k_ip.0.lora_B.weight",
        f"unet.{ATTENTION}.processor.to_k_ip.0.lora_A.weight",
        f"unet.{ATTENTION}.processor.to_k_ip.0",
    ),
    "an old text encoder": (f"{TEXT}.to_k_lora.up.weight", f"{TEXT}.to_k_lora.down.weight", f"{TEXT}.k_proj"),
    "a newer text encoder": (
        f"{TEXT}.k_proj.lora_linear_layer.up.weight",
        f"{TEXT}.k_proj.lora_linear_layer.down.weight",
        f"{TEXT}.k_proj",
    ),
    "PEFT's own file": (
        "base_model.model.blocks.0.q.lora_B.weight",
        "base_model.model.blocks.0.q.lora_A.weight",
        "blocks.0.q",
    ),
    "PEFT with the adapter's name": (
        "blocks.0.q.lora_B.default.weight",
        "blocks.0.q.lora_A.default.weight",
        "blocks.0.q",
    ),
    "bare A and B": ("blocks.0.q.lora_B", "blocks.0.q.lora_A", "blocks.0.q"),
}


@pytest.mark.parametrize("style", STYLES)
def test_every_way_of_writing_factors_is_read(style: str, file: Path) -> None:
    up, down, name = STYLES[style]
    tensors = pair(up, down)
    save_file(tensors, file)
    lora = load_lora(file)
    assert list(lora.modules) == [name]
    assert lora.unused_keys == ()
    torch.testing.assert_close(lora.modules[name].delta(), tensors[up] @ tensors[down])


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("kohya", "kohya"),
        ("ComfyUI with A and B", "comfyui"),
        ("diffusers", "peft"),
        ("an old text encoder", "peft"),
        ("PEFT's own file", "peft"),
    ],
)
def test_the_format_is_told_by_the_keys(style: str, expected: str, file: Path) -> None:
    save_file(pair(*STYLES[style][:2]), file)
    assert load_lora(file).format == expected


def test_an_embeddings_factors_are_those_that_peft_makes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["0"], init_lora_weights=False)
    model = peft.get_peft_model(nn.Sequential(nn.Embedding(7, 4)), config)
    model.save_pretrained(tmp_path)
    read = load_lora(tmp_path / "adapter_model.safetensors").modules["0"]
    expected = model.base_model.model[0].get_delta_weight("default").detach()
    torch.testing.assert_close(read.delta(), expected)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 20)
        self.inner = nn.ModuleDict({"second": nn.Conv2d(6, 8, 3)})


NAMES = ["first", "inner.second"]
CONFIGS: dict[str, Any] = {
    "one alpha": lambda: peft.LoraConfig(r=4, lora_alpha=6, target_modules=NAMES, init_lora_weights=False),
    "patterns": lambda: peft.LoraConfig(
        r=4,
        lora_alpha=6,
        rank_pattern={"second": 2},
        alpha_pattern={"^first": 9, "second": 5},
        target_modules=NAMES,
        init_lora_weights=False,
    ),
    "rsLoRA": lambda: peft.LoraConfig(
        r=4, lora_alpha=6, use_rslora=True, target_modules=NAMES, init_lora_weights=False
    ),
    "LoHa": lambda: peft.LoHaConfig(r=3, alpha=5, target_modules=NAMES, init_weights=False),
    "LoKr": lambda: peft.LoKrConfig(r=1, alpha=5, target_modules=NAMES, init_weights=False),
    "whole LoKr": lambda: peft.LoKrConfig(r=9, alpha=5, target_modules=NAMES, init_weights=False),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_scales_of_a_saved_adapter_are_pefts_own(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = peft.get_peft_model(Model(), CONFIGS[kind]())
    model.save_pretrained(tmp_path)
    lora = load_lora(tmp_path)
    layers = dict(model.base_model.model.named_modules())
    assert set(lora.names) == set(NAMES)
    for name in NAMES:
        change = lora.modules[name] if name in lora.modules else lora.changes[name]
        expected = layers[name].get_delta_weight("default").detach()
        torch.testing.assert_close(change.delta().reshape(expected.shape), expected)


def test_the_bias_of_an_up_factor_is_a_change_of_the_layers_bias(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=2, lora_alpha=3, target_modules=["first"], lora_bias=True, init_lora_weights=False
    )
    model = peft.get_peft_model(Model(), config)
    nn.init.normal_(model.base_model.model.first.lora_B["default"].bias)
    with pytest.warns(peft.utils.warning.PeftWarning, match="invalid shape"):
        model.save_pretrained(tmp_path)
    lora = load_lora(tmp_path)
    x, layer = torch.randn(3, 12), model.base_model.model.first
    layer.get_base_layer().requires_grad_(False)
    expected = layer(x)
    base = layer.get_base_layer()
    with torch.no_grad():
        base.weight += lora.modules["first"].delta()
        base.bias += lora.changes["first.bias"].delta()
        torch.testing.assert_close(base(x), expected)


def header(**values: object) -> dict[str, str]:
    return {"lora_adapter_metadata": json.dumps(values)}


def test_scales_in_diffusers_header_are_those_of_the_component(file: Path) -> None:
    unet, text = (
        pair("unet.a.lora_B.weight", "unet.a.lora_A.weight"),
        pair("text_encoder.a.lora_B.weight", "text_encoder.a.lora_A.weight"),
    )
    metadata = header(
        **{"unet.r": 2, "unet.lora_alpha": 8, "text_encoder.r": 2, "text_encoder.lora_alpha": 1.0},
        **{"unet.target_modules": ["a"]},
    )
    save_file(unet | text, file, metadata)
    lora = load_lora(file)
    assert {name: factors.scale for name, factors in lora.modules.items()} == {
        "unet.a": 4.0,
        "text_encoder.a": 0.5,
    }


def test_an_alpha_of_its_own_goes_before_the_configuration(file: Path) -> None:
    tensors = pair("unet.a.lora_B.weight", "unet.a.lora_A.weight") | {"unet.a.alpha": torch.tensor(1.0)}
    save_file(tensors, file, header(**{"unet.r": 2, "unet.lora_alpha": 8}))
    assert load_lora(file).modules["unet.a"].scale == 0.5


def test_without_alpha_and_configuration_the_scale_is_one(file: Path) -> None:
    save_file(pair("unet.a.lora_B.weight", "unet.a.lora_A.weight"), file)
    assert load_lora(file).modules["unet.a"].scale == 1.0


def test_a_configuration_beside_a_file_of_another_name_is_not_its(file: Path) -> None:
    save_file(pair("a.lora_B.weight", "a.lora_A.weight"), file)
    (file.parent / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 8}')
    assert load_lora(file).modules["a"].scale == 1.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ("[" * 100_000, "not valid JSON"),
        ('{"r": 2, "lora_alpha": "eight"}', "alpha is 'eight', not a number"),
        ('{"r": 2, "lora_alpha": true}', "not a number"),
        ('{"r": 2, "lora_alpha": 8, "alpha_pattern": [1]}', "alpha_pattern is not a table"),
        ('{"r": 2, "lora_alpha": 8, "alpha_pattern": {"(a+)+b": 1}}', "too complex"),
        ('{"r": 2, "lora_alpha": 8, "alpha_pattern": {".*.*.*.*x": 1}}', "too complex"),
        ('{"r": 2, "lora_alpha": 8, "alpha_pattern": {"(": 1}}', "is refused"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(text: str, said: str, tmp_path: Path) -> None:
    save_file(pair("a.lora_B.weight", "a.lora_A.weight"), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(LoraFormatError, match=rf"adapter_config\.json.*{said}") as refused:
        load_lora(tmp_path / "adapter_model.safetensors")
    assert refused.value.hint


def test_a_rank_of_nothing_in_the_configuration_is_refused(file: Path) -> None:
    tensors = {"unet.a.lokr_w1": torch.ones(2, 2), "unet.a.lokr_w2": torch.ones(2, 2)}
    save_file(
        tensors | pair("unet.b.lora_B.weight", "unet.b.lora_A.weight"),
        file,
        header(**{"unet.r": 0, "unet.alpha": 1}),
    )
    with pytest.raises(LoraFormatError, match="r is 0"):
        load_lora(file)


def test_two_adapters_in_one_file_are_refused_by_name(file: Path) -> None:
    save_file(
        pair("a.lora_B.one.weight", "a.lora_A.one.weight")
        | pair("a.lora_B.two.weight", "a.lora_A.two.weight"),
        file,
    )
    with pytest.raises(LoraFormatError, match=r"several adapters: one, two"):
        load_lora(file)


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        ("a.lora_B.weight", "lora_A.weight"),
        ("a.lora_A.default.weight", "lora_B.default.weight"),
        ("a.to_q.lora.up.weight", "lora.down.weight"),
        ("lora_unet_a.lora_down.weight", "lora_up.weight"),
        ("a.lora_embedding_A", "lora_embedding_B"),
    ],
)
def test_a_missing_partner_is_named_as_the_file_would(there: str, missing: str, file: Path) -> None:
    save_file({there: torch.ones(2, 2)}, file)
    with pytest.raises(LoraFormatError, match=rf"but no {missing}"):
        load_lora(file)


KINDS: dict[str, tuple[dict[str, tuple[int, ...]], tuple[int, ...]]] = {
    "loha": ({f"hada_w{side}_{end}": (3, 3) for side in (1, 2) for end in "ab"}, (3, 3)),
    "lokr": ({"lokr_w1": (2, 2), "lokr_w2": (3, 3)}, (6, 6)),
    "tucker": (
        {"lora_up.weight": (4, 2, 1, 1), "lora_down.weight": (2, 3, 1, 1), "lora_mid.weight": (2, 2, 3, 3)},
        (4, 3, 3, 3),
    ),
    "diff": ({"diff": (4, 5)}, (4, 5)),
    "set": ({"set_weight": (4, 5)}, (4, 5)),
    "dora": ({"lora_up.weight": (4, 2), "lora_down.weight": (2, 5), "dora_scale": (4, 1)}, (4, 5)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_change_is_read_with_its_kind_and_shape(kind: str, file: Path) -> None:
    parts, shape = KINDS[kind]
    save_file({f"lora_unet_x.{name}": torch.randn(size) for name, size in parts.items()}, file)
    with open_lora(file) as lora:
        assert (lora.kind_of("lora_unet_x"), lora.shape_of("lora_unet_x")) == (kind, shape)
        change = lora.changes["lora_unet_x"]
        assert (change.kind, change.weight_shape) == (kind, shape)
        assert change.parameters == lora.facts_of("lora_unet_x").parameters
        assert change.delta(torch.ones(shape)).shape == shape


@pytest.mark.parametrize("kind", ["loha", "tucker"])
def test_the_alpha_of_a_change_is_divided_by_its_rank(kind: str, file: Path) -> None:
    tensors = {f"lora_unet_x.{name}": torch.randn(size) for name, size in KINDS[kind][0].items()}
    save_file(tensors, file)
    whole = load_lora(file).changes["lora_unet_x"].delta()
    save_file(tensors | {"lora_unet_x.alpha": torch.tensor(1.0)}, file)
    rank = 3 if kind == "loha" else 2
    torch.testing.assert_close(load_lora(file).changes["lora_unet_x"].delta(), whole / rank)


def test_an_alpha_beside_whole_kronecker_factors_means_nothing(file: Path) -> None:
    tensors = {"lora_unet_x.lokr_w1": torch.randn(2, 2), "lora_unet_x.lokr_w2": torch.randn(3, 3)}
    save_file(tensors | {"lora_unet_x.alpha": torch.tensor(1e10)}, file)
    expected = torch.kron(tensors["lora_unet_x.lokr_w1"], tensors["lora_unet_x.lokr_w2"])
    torch.testing.assert_close(load_lora(file).changes["lora_unet_x"].delta(), expected)


@pytest.mark.parametrize(
    ("key", "shape", "per_output"),
    [
        ("dora_scale", (6, 1), True),
        ("dora_scale", (1, 5), False),
        ("lora_magnitude_vector", (6,), True),
        ("lora_magnitude_vector.weight", (6,), True),
        ("lora_magnitude_vector.default.weight", (6,), True),
    ],
)
def test_magnitudes_are_per_output_or_per_input_as_written(
    key: str, shape: tuple[int, ...], per_output: bool, file: Path
) -> None:
    tensors = pair("x.y.lora_B.weight", "x.y.lora_A.weight") | {f"x.y.{key}": torch.ones(shape)}
    save_file(tensors, file)
    change = load_lora(file).changes["x.y"]
    assert isinstance(change, DoraChange)
    assert change.per_output is per_output


def test_changes_of_norms_and_biases_have_names_of_their_own(file: Path) -> None:
    ends = {"a.diff": (4, 4), "a.diff_b": (4,), "n.w_norm": (4,), "n.b_norm": (4,)}
    save_file({f"diffusion_model.{end}": torch.ones(shape) for end, shape in ends.items()}, file)
    lora = load_lora(file)
    assert list(lora.changes) == [f"diffusion_model.{name}" for name in ("a", "a.bias", "n", "n.bias")]
    assert lora.modules == {}


def test_two_differences_of_one_weight_are_refused(file: Path) -> None:
    save_file({"x.y.diff": torch.ones(2), "x.y.w_norm": torch.ones(2)}, file)
    with pytest.raises(LoraFormatError, match=r"x\.y: diff and w_norm change the same weight"):
        load_lora(file)


@pytest.mark.parametrize("other", [{"diff": (6, 5)}, {"lokr_w1": (2, 2), "lokr_w2": (3, 3)}])
def test_a_module_of_two_kinds_is_refused(other: dict[str, tuple[int, ...]], file: Path) -> None:
    extra = {f"x.y.{name}": torch.ones(shape) for name, shape in other.items()}
    save_file(pair("x.y.lora_up.weight", "x.y.lora_down.weight") | extra, file)
    with pytest.raises(LoraFormatError, match=r"x\.y is lora and .* at once"):
        load_lora(file)


def test_one_tensor_in_two_spellings_is_refused(file: Path) -> None:
    save_file(
        pair("x.y.lora_B.weight", "x.y.lora_A.weight") | pair("x.y.lora_up.weight", "x.y.lora_down.weight"),
        file,
    )
    with pytest.raises(LoraFormatError, match=r"are the same tensor of x\.y"):
        load_lora(file)


def test_two_changes_of_one_bias_are_refused(file: Path) -> None:
    save_file({"x.y.diff_b": torch.ones(2), "x.y.b_norm": torch.ones(2)}, file)
    with pytest.raises(LoraFormatError, match=r"two tensors change x\.y\.bias"):
        load_lora(file)


def test_a_lone_magnitude_is_told_as_unused(file: Path) -> None:
    tensors = pair("x.y.lora_up.weight", "x.y.lora_down.weight")
    save_file(
        tensors
        | {"x.z.dora_scale": torch.ones(3, 1), "x.w.diff": torch.ones(3), "x.w.dora_scale": torch.ones(3)},
        file,
    )
    assert set(load_lora(file).unused_keys) == {"x.z.dora_scale", "x.w.dora_scale"}


def test_what_belongs_to_a_flat_name_is_found_under_a_half_flat_one(file: Path) -> None:
    """diffusers' conversion to kohya's names leaves dots in those of magnitudes (Comfy-Org/ComfyUI 3494): DoRA was read as LoRA."""
    start = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1"
    tensors = pair(f"{start}_to_out_0.lora_up.weight", f"{start}_to_out_0.lora_down.weight")
    beside = {
        f"{start}_to_out.0.lora_magnitude_vector": torch.rand(6),
        f"{start}_to_out.0.alpha": torch.tensor(3.0),
    }
    lone = {f"{start}.to_q.lora_magnitude_vector": torch.rand(6)}
    save_file(tensors | beside | lone, file)
    lora = load_lora(file)
    change = lora.changes[f"{start}_to_out_0"]
    assert isinstance(change, DoraChange)
    assert change.per_output
    assert isinstance(change.direction, LoraFactors)
    assert change.direction.scale == 3.0 / 2
    torch.testing.assert_close(change.magnitude, beside[f"{start}_to_out.0.lora_magnitude_vector"])
    assert lora.unused_keys == (*lone,)


def test_an_opened_file_is_read_only_where_it_is_asked(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(
        pair("a.x.lora_B.weight", "a.x.lora_A.weight") | pair("a.y.lora_B.weight", "a.y.lora_A.weight"), file
    )
    read: list[str] = []
    original = Checkpoint.tensor

    def tensor(self: Checkpoint, key: str) -> Tensor:
        read.append(key)
        return original(self, key)

    monkeypatch.setattr(Checkpoint, "tensor", tensor)
    with open_lora(file) as lora:
        assert (len(lora), list(lora.modules), "a.x" in lora.modules) == (2, ["a.x", "a.y"], True)
        assert (lora.shape_of("a.x"), lora.rank_of("a.x"), lora.ranks, lora.parameters) == (
            (6, 5),
            2,
            {2: 2},
            44,
        )
        assert read == []
        assert lora.modules["a.y"].rank == 2
        assert set(read) == {"a.y.lora_A.weight", "a.y.lora_B.weight"}


def test_a_module_that_is_not_there_is_named(file: Path) -> None:
    save_file(pair("a.x.lora_B.weight", "a.x.lora_A.weight"), file)
    with open_lora(file) as lora, pytest.raises(LoraFormatError, match=r"has no module a\.z"):
        lora.shape_of("a.z")


@pytest.mark.parametrize("value", [nan, inf])
def test_values_that_are_no_numbers_can_be_looked_at_when_asked(value: float, file: Path) -> None:
    tensors = pair("a.x.lora_B.weight", "a.x.lora_A.weight") | {"a.y.diff": torch.ones(3)}
    tensors["a.x.lora_B.weight"][0, 0] = value
    tensors["a.y.diff"][0] = value
    save_file(tensors, file)
    with open_lora(file) as lora:
        for read in (lambda: lora.modules["a.x"], lambda: lora.changes["a.y"]):
            with pytest.raises(NonFiniteError):
                read()
    with open_lora(file, check_finite=False) as lora:
        assert not lora.modules["a.x"].up.isfinite().all()
        assert not lora.changes["a.y"].delta().isfinite().all()


def test_rslora_divides_by_the_root_of_the_rank(file: Path) -> None:
    metadata = header(**{"unet.r": 2, "unet.lora_alpha": 4, "unet.use_rslora": True})
    save_file(pair("unet.a.lora_B.weight", "unet.a.lora_A.weight"), file, metadata)
    assert load_lora(file).modules["unet.a"].scale == pytest.approx(4 / sqrt(2))


@pytest.mark.parametrize("shape", [(4,), (4, 5, 6)])
def test_magnitudes_of_another_number_are_refused_by_module(shape: tuple[int, ...], file: Path) -> None:
    tensors = pair("x.y.lora_B.weight", "x.y.lora_A.weight") | {"x.y.dora_scale": torch.ones(shape)}
    save_file(tensors, file)
    with pytest.raises(LoraFormatError, match=r"lora\.safetensors: x\.y: DoRA"):
        load_lora(file)
