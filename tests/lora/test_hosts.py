"""What hosts make of a file, held to what diffusers' own loader makes of it. ComfyUI's is in `test_hosts_comfyui`."""

import copy
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from diffusers.loaders import lora_conversion_utils
from diffusers.loaders.lora_pipeline import MiniMaxH3LoraLoaderMixin
from peft import LoKrConfig, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tests.families import make_pipeline
from tests.families.denoisers import sd15_unet
from tests.families.loras import lora_state, write
from torch import Tensor
from typer.testing import CliRunner

from sigmascope.cli.root import app
from sigmascope.lora.compatibility import judge_lora
from sigmascope.lora.convert import convert_lora
from sigmascope.lora.families.known import FAMILIES
from sigmascope.lora.hosts import HOSTS, HostReading, host_readings
from sigmascope.lora.inspect import inspect_lora
from sigmascope.lora.reader import load_lora

Save = Callable[..., Path]
Pipelines = Callable[[str], Any]
pytestmark = pytest.mark.filterwarnings("ignore:The following alpha_pattern")
METADATA = "lora_adapter_metadata"


def of_host(path: Path, host: str = "diffusers", version: str = "") -> HostReading:
    readings = zip(HOSTS, host_readings(path), strict=True)
    return next(one for known, one in readings if known.name == host and version in known.version)


def test_hosts_that_read_the_same_nan_do_not_differ(tmp_path: Path) -> None:
    names = [f"lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_{p}" for p in "qkv"]
    state = {f"{name}.{end}.weight": torch.ones(4, 4) for name in names for end in ("lora_up", "lora_down")}
    alphas = {f"{name}.alpha": torch.tensor(math.nan) for name in names}
    save_file(state | alphas, tmp_path / "nan.safetensors")
    readings = host_readings(tmp_path / "nan.safetensors")
    told = [{str(factor): count for factor, count in (one.strengths or {}).items()} for one in readings]
    assert told == [{"nan": 3}] * 3
    findings = {one.id: one.message for one in inspect_lora(tmp_path / "nan.safetensors").findings}
    assert "lora_hosts_differ" not in findings
    assert f"{names[0]}.alpha = nan" in findings["lora_not_finite"]


def in_diffusers(pipeline: Any, path: Path) -> tuple[int, dict[float, int]]:
    """How many modules diffusers' loader takes, and the factors on up·down, measured on the weights."""
    pipeline = copy.copy(pipeline)
    part = "unet" if hasattr(pipeline, "unet") else "transformer"
    setattr(pipeline, part, copy.deepcopy(getattr(pipeline, part)))
    model = getattr(pipeline, part)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    pipeline.load_lora_weights(path)
    if not getattr(model, "peft_config", None):
        return 0, {}
    model.fuse_lora()
    model.unload_lora()
    after = model.state_dict()
    lora, factors = load_lora(path), []
    for module in judge_lora(
        path, {f"{part}.{key}": tuple(value.shape) for key, value in before.items()}
    ).matched:
        keys = [layer.removeprefix(f"{part}.") for layer in module.layers]
        change = torch.cat([(after[key] - before[key]).flatten(1) for key in keys])
        product = (lora.modules[module.name].up @ lora.modules[module.name].down).reshape(change.shape)
        factor = float((change * product).sum() / (product * product).sum())
        assert factor == 0.0 or (change - factor * product).norm() < 1e-3 * change.norm(), module.name
        factors += [round(factor, 2)] if factor else []
    return len(factors), dict(Counter(factors))


def rounded(reading: HostReading) -> tuple[int | None, dict[float, int]]:
    return reading.taken, {round(factor, 2): count for factor, count in (reading.strengths or {}).items()}


def rewritten(path: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]], **header: Any) -> Path:
    save_file(
        edit(load_file(path)),
        path,
        metadata={"format": "pt"} | {METADATA: json.dumps(header)} if header else None,
    )
    return path


def with_header(path: Path, **more: Any) -> Path:
    """Alpha 16 in the header alone, as diffusers writes it."""
    targets = [name.removeprefix("transformer.") for name in load_lora(path).modules]
    config = {"r": 2, "lora_alpha": 16, "target_modules": targets, **more}
    return rewritten(path, dict, **{f"transformer.{name}": value for name, value in config.items()})


def with_alphas(*alphas: float) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def edit(state: dict[str, Tensor]) -> dict[str, Tensor]:
        modules = sorted({re.sub(r"\.(lora_\w+(\.weight)?|alpha)$", "", key) for key in state})
        return state | {
            f"{name}.alpha": torch.tensor(alphas[number % len(alphas)]) for number, name in enumerate(modules)
        }

    return edit


@pytest.mark.parametrize(("stabilised", "factor"), [(False, 16 / 2), (True, 16 / math.sqrt(2))])
def test_an_alpha_in_the_header_counts_in_diffusers_alone(
    pipelines: Pipelines, save: Save, stabilised: bool, factor: float
) -> None:
    path = with_header(save(pipelines("flux"), "transformer"), use_rslora=stabilised)
    reading = of_host(path)
    assert rounded(reading) == in_diffusers(pipelines("flux"), path)
    assert rounded(reading) == (50, {round(factor, 2): 50})
    assert rounded(of_host(path, "comfyui")) == (50, {1.0: 50})


@pytest.mark.slow
@pytest.mark.parametrize("alphas", [(1.0,), (1.0, 2.0), (1.0, 1.0, 4.0)])
def test_alphas_of_a_unet_in_diffusers(pipelines: Pipelines, save: Save, alphas: tuple[float, ...]) -> None:
    path = rewritten(save(pipelines("sd15"), "unet", format="kohya"), with_alphas(*alphas))
    reading = of_host(path)
    assert rounded(reading) == in_diffusers(pipelines("sd15"), path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["flux", "qwen_image", "wan", "sd15", "sd3"])
@pytest.mark.parametrize("format", ["peft", "kohya", "comfyui"])
def test_what_diffusers_makes_of_each_format(
    pipelines: Pipelines, save: Save, family: str, format: str
) -> None:
    part = "unet" if family == "sd15" else "transformer"
    path = save(pipelines(family), part, format=format)
    reading = of_host(path)
    if reading.taken is None:
        assert reading.unavailable["taken"]
        return
    try:
        measured = in_diffusers(pipelines(family), path)
    except Exception:  # noqa: BLE001 - whatever the loader raises, it takes nothing
        measured = (0, {})
    assert rounded(reading) == measured


@pytest.mark.slow
def test_the_advice_mends_a_file_that_hosts_apply_differently(pipelines: Pipelines, save: Save) -> None:
    path = with_header(save(pipelines("flux"), "transformer"))
    path = path.rename(path.with_name("my style.safetensors"))
    (finding,) = inspect_lora(path).findings
    assert finding.id == "lora_hosts_differ"
    assert finding.message == (
        "Hosts apply the file differently: diffusers 0.42 with PEFT takes 50 of 50 modules with strength 8; "
        "ComfyUI 0.33 takes 50 of 50 modules with strength 1."
    )
    command = re.search(r"sigmascope (lora convert .*)\.", finding.advice or "")
    assert command is not None
    words = [
        str(path.with_name(word)) if word.endswith(".safetensors") else word
        for word in shlex.split(command[1])
    ]
    assert CliRunner().invoke(app, words).exit_code == 0
    mended = path.with_name("NEW.safetensors")
    assert inspect_lora(mended).findings == ()
    assert [(one.taken, dict(one.strengths or {})) for one in host_readings(mended)] == [(50, {1.0: 50})] * 3
    assert in_diffusers(pipelines("flux"), mended) == (50, {1.0: 50})
    own, new = load_lora(path).modules, load_lora(mended).modules
    for name, factors in own.items():
        assert torch.allclose(new[name].delta(), factors.delta(), atol=1e-5), name


def flux_block(
    ending: Mapping[str, Callable[[int, int], Tensor]], prefix: str = "lora_unet_"
) -> dict[str, Tensor]:
    """Four layers of one of FLUX' blocks, of their real widths."""
    shapes = {
        "double_blocks_0_img_attn_qkv": (9216, 3072),
        "double_blocks_0_txt_attn_qkv": (9216, 3072),
        "double_blocks_0_img_attn_proj": (3072, 3072),
        "single_blocks_0_linear1": (21504, 3072),
    }
    return {
        f"{prefix}{name}.{end}": make(*shape)
        for name, shape in shapes.items()
        for end, make in ending.items()
    }


def test_a_tripled_rank_with_the_alpha_kept_is_a_third_of_the_strength(tmp_path: Path) -> None:
    state = flux_block(
        {
            "lora_down.weight": lambda _, width: torch.ones(2, width),
            "lora_up.weight": lambda out, _: torch.ones(out, 2),
            "alpha": lambda *_: torch.tensor(2.0),
        }
    )
    for name in [name for name in state if "qkv" in name]:  # as sd-scripts writes it with split_qkv
        state[name] = (
            torch.ones(6, 3072) if "down" in name else torch.ones(9216, 6) if "up" in name else state[name]
        )
    save_file(state, tmp_path / "split.safetensors")
    third = pytest.approx(1 / 3)
    for reading in host_readings(tmp_path / "split.safetensors"):
        assert reading.taken == 4
        assert sorted(reading.strengths or {}) == [third, 1.0]
    mine = FluxPipeline.lora_state_dict(tmp_path / "split.safetensors")
    product = (
        mine["transformer.transformer_blocks.0.attn.to_q.lora_B.weight"]
        @ (mine["transformer.transformer_blocks.0.attn.to_q.lora_A.weight"])
    )
    assert float(product[0, 0]) == pytest.approx(6 / 3)


def test_whole_differences_with_alphas_are_comfyuis_alone(tmp_path: Path) -> None:
    state = {
        f"diffusion_model.double_blocks.0.img_attn.proj.{end}": value
        for end, value in (("diff", torch.eye(32)), ("alpha", torch.tensor(4.0)))
    }
    save_file(state, tmp_path / "full.safetensors")
    assert of_host(tmp_path / "full.safetensors").taken == 0
    assert rounded(of_host(tmp_path / "full.safetensors", "comfyui")) == (1, {1.0: 1})
    (finding,) = inspect_lora(tmp_path / "full.safetensors").findings
    assert (finding.advice or "").endswith("full.safetensors NEW.safetensors --format peft --rank 9999.")
    convert_lora(tmp_path / "full.safetensors", tmp_path / "NEW.safetensors", "peft", rank=9999)
    assert inspect_lora(tmp_path / "NEW.safetensors").findings == ()
    assert [rounded(reading) for reading in host_readings(tmp_path / "NEW.safetensors")] == [
        (1, {1.0: 1})
    ] * 3


def test_names_of_no_known_family_are_unknown_and_not_0(tmp_path: Path) -> None:
    factors = {"lora_A.weight": torch.ones(2, 8), "lora_B.weight": torch.ones(8, 2)}
    save_file(
        {f"encoder.stack.3.wide.{end}": value for end, value in factors.items()}, tmp_path / "odd.safetensors"
    )
    for reading in host_readings(tmp_path / "odd.safetensors"):
        assert reading.taken is None
        assert reading.unavailable == {"taken": "the file does not tell its model family"}


def test_a_header_that_cannot_be_read_makes_diffusers_refuse_the_file(tmp_path: Path) -> None:
    kohya = tmp_path / "kohya.safetensors"
    state = flux_block(
        {
            "lora_down.weight": lambda _, width: torch.ones(1, width),
            "lora_up.weight": lambda out, _: torch.ones(out, 1),
        }
    )
    save_file(state, kohya, metadata={METADATA: "no JSON"})
    reading = of_host(kohya)
    assert rounded(reading) == (0, {})
    assert "not valid JSON" in reading.unavailable["refused"]
    assert rounded(of_host(kohya, "comfyui")) == (4, {1.0: 4})


@pytest.mark.filterwarnings("ignore:While injecting the PEFT adapters")
@pytest.mark.parametrize(
    "changed",
    [
        {"r": 4},  # as before a resize that keeps the header
        {"target_modules": None},
        {"target_modules": ["to_q", "to_k"]},
        {"target_modules": "attn", "rank_pattern": {"^transformer_blocks.0.attn.to_q": 3}},
    ],
    ids=str,
)
def test_a_header_that_contradicts_the_file_is_read_as_diffusers_does(
    pipelines: Pipelines, save: Save, changed: dict[str, Any]
) -> None:
    """diffusers refuses ranks that are not the file's, and a configuration without layers; the file was said to be taken."""
    path = with_header(save(pipelines("flux"), "transformer"), **changed)
    try:
        taken = in_diffusers(pipelines("flux"), path)
    except (RuntimeError, KeyError):
        taken = 0, {}
    assert rounded(of_host(path)) == taken


@pytest.mark.slow
@pytest.mark.parametrize("family", ["flux", "qwen_image", "wan", "sd15"])
def test_factors_with_kernels_for_linear_layers_load_in_diffusers_only_once_converted(
    pipelines: Pipelines, save: Save, tmp_path: Path, family: str
) -> None:
    """Up (out, r, 1, 1) and down (r, in, 1, 1): the family is told as without, and ComfyUI takes all."""
    part = "unet" if family == "sd15" else "transformer"
    path = save(pipelines(family), part)
    plain = host_readings(path)
    state = {
        key: value[..., None, None].contiguous() if value.ndim == 2 else value
        for key, value in load_file(path).items()
    }
    with_kernels, converted = tmp_path / "with_kernels.safetensors", tmp_path / "converted.safetensors"
    save_file(state, with_kernels)
    with pytest.raises(RuntimeError, match="size mismatch"):
        in_diffusers(pipelines(family), with_kernels)
    reading = of_host(with_kernels)
    assert rounded(reading) == (0, {})
    assert "1×1 kernels for a linear layer" in reading.unavailable["refused"]
    assert host_readings(with_kernels)[1:] == plain[1:]
    convert_lora(with_kernels, converted, "peft")
    assert rounded(of_host(converted)) == in_diffusers(pipelines(family), converted) == rounded(plain[0])


WHOLE = {"r": 2, "lora_alpha": 16, "target_modules": ["to_q", "to_k", "to_v"]}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:While injecting the PEFT adapters")
@pytest.mark.parametrize("alphas", [False, True])
@pytest.mark.parametrize(("family", "format"), [("sd15", "kohya"), ("flux", "peft")])
@pytest.mark.parametrize(
    "header",
    [
        "null",
        "{}",
        *({f"{part}{key}": value for key, value in WHOLE.items()} for part in ("", "text_encoder.", "PART.")),
    ],
    ids=["null", "empty", "of no part", "of another part", "whole"],
)
def test_diffusers_takes_a_file_only_if_its_header_has_the_part_and_no_alphas_stand_beside(
    pipelines: Pipelines, save: Save, header: Any, family: str, format: Any, alphas: bool
) -> None:
    part = "unet" if family == "sd15" else "transformer"
    path = save(pipelines(family), part, format=format)
    state = {key: value for key, value in load_file(path).items() if not key.endswith(".alpha")}
    text = json.dumps(header).replace("PART", part) if isinstance(header, dict) else header
    save_file(with_alphas(1.0)(state) if alphas else state, path, metadata={METADATA: text})
    try:
        taken = in_diffusers(pipelines(family), path)
    except (ValueError, KeyError):
        taken = 0, {}
    assert rounded(of_host(path)) == taken


def test_an_alpha_in_the_header_alone_is_told(tmp_path: Path) -> None:
    """MiniMax H3 Turbo says alpha 8 at rank 128 (sgl-project/sglang 35952), which diffusers reads for that model alone."""
    path = tmp_path / "turbo.safetensors"
    factors = {"lora_A.weight": torch.ones(128, 16), "lora_B.weight": torch.ones(16, 128)}
    state = {f"transformer.transformer_blocks.0.attn.to_q.{end}": value for end, value in factors.items()}
    save_file(state, path, metadata={"alpha": "8", "rank": "128"})
    _, config = MiniMaxH3LoraLoaderMixin.lora_state_dict(path, return_lora_metadata=True)
    finding = next(one for one in inspect_lora(path).findings if one.id == "lora_alpha_unread")
    assert finding.evidence["strength"] == config["transformer.lora_alpha"] / config["transformer.r"]
    assert "alpha 8 for rank 128, which is strength 0.0625" in finding.message


@pytest.mark.parametrize("stabilised", [False, True])
def test_an_alpha_in_peft_s_configuration_beside_the_file_is_told(
    pipelines: Pipelines, tmp_path: Path, stabilised: bool
) -> None:
    """As a trainer of ACE-Step saves them (below Comfy-Org/ComfyUI 8094): only PEFT itself reads that file."""
    model = copy.deepcopy(pipelines("flux").transformer)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["to_q"], use_rslora=stabilised, init_lora_weights=False
    )
    get_peft_model(copy.deepcopy(model), config).save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    (finding,) = (one for one in inspect_lora(path).findings if one.id == "lora_alpha_unread")
    assert finding.evidence["strength"] == (4.0 if stabilised else 2.0)
    assert ("alpha 8 for rank 4 with rsLoRA" if stabilised else "alpha 8 for rank 4,") in finding.message
    with pytest.raises(KeyError):
        pipelines("flux").load_lora_weights(path)
    (told,) = (one for one in judge_lora(path, model).findings if one.id == "lora_part_unnamed")
    prefix = re.search(r'load_lora_adapter\(FILE, prefix="(.*?)"\)', told.advice or "")
    assert prefix is not None
    model.load_lora_adapter(load_file(path), prefix=prefix[1])
    scalings = [layer.scaling["default_0"] for layer in model.modules() if hasattr(layer, "scaling")]
    assert scalings == [1.0] * len(load_lora(path).modules)


@pytest.mark.parametrize(
    ("header", "strength"),
    [
        ({"lora_alpha": "64", "lora_rank": "16"}, 4.0),
        ({"ss_network_alpha": "1.0"}, 0.25),
        ({"network_alpha": "8", "network_dim": "8"}, None),  # of the file before it was resized
        ({"alpha": "4"}, None),
        ({"alpha": "0.5", "network_alpha": "Dynamic"}, 0.125),
        ({"alpha": "nan", "lora_alpha": "none", "ss_network_alpha": "-1"}, None),
        ({"alpha": "16", METADATA: json.dumps({"transformer.r": 4, "transformer.lora_alpha": 4})}, None),
    ],
)
def test_an_alpha_that_says_nothing_else_is_not_told(
    header: dict[str, str], strength: float | None, tmp_path: Path
) -> None:
    factors = {"lora_A.weight": torch.ones(4, 16), "lora_B.weight": torch.ones(16, 4)}
    state = {f"transformer.transformer_blocks.0.attn.to_q.{end}": value for end, value in factors.items()}
    save_file(state, tmp_path / "lora.safetensors", metadata=header)
    told = [
        one for one in inspect_lora(tmp_path / "lora.safetensors").findings if one.id == "lora_alpha_unread"
    ]
    assert [one.evidence["strength"] for one in told] == ([] if strength is None else [strength])


def whole_lokr(path: Path, alpha: float, **header: str) -> Path:
    """A LoKr of kohya's names with two whole factors."""
    name = "lora_unet_double_blocks_0_img_attn_proj"
    factors = {"lokr_w1": torch.ones(8, 8), "lokr_w2": torch.ones(384, 384), "alpha": torch.tensor(alpha)}
    save_file({f"{name}.{part}": value for part, value in factors.items()}, path, metadata=header)
    return path


def test_an_alpha_beside_two_whole_factors_of_lokr_is_told_as_no_host_reads_it(tmp_path: Path) -> None:
    """Comfy-Org/ComfyUI issue 15114. PEFT trains with alpha / rank there, and diffusers drops alpha."""
    path = whole_lokr(tmp_path / "lokr.safetensors", 1.0, ss_network_dim="32")
    finding = next(one for one in inspect_lora(path).findings if one.id == "lora_lokr_alpha_unread")
    config = LoKrConfig(r=32, alpha=1, target_modules=["0"], decompose_factor=8)
    layer: Any = get_peft_model(torch.nn.Sequential(torch.nn.Linear(64, 32)), config).base_model.model[0]
    assert set(layer.lokr_w1) == set(layer.lokr_w2) == {"default"}  # both are whole
    assert finding.evidence["strength"] == layer.scaling["default"]
    state = load_file(path)
    bare = {name: value.clone() for name, value in state.items() if not name.endswith("alpha")}
    lora_conversion_utils._bake_lokr_alpha_(state)
    assert all(torch.equal(state[name], value) for name, value in bare.items())


@pytest.mark.parametrize("header", [{"ss_network_dim": "32"}, {}], ids=["as LyCORIS writes it", "no rank"])
def test_an_alpha_beside_whole_factors_is_not_told_where_nothing_speaks_against_it(
    tmp_path: Path, header: dict[str, str]
) -> None:
    path = whole_lokr(tmp_path / "lokr.safetensors", 32.0, **header)
    assert "lora_lokr_alpha_unread" not in [finding.id for finding in inspect_lora(path).findings]


def test_an_alpha_beside_the_factors_is_read_and_not_told(tmp_path: Path) -> None:
    name = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
    state = {f"{name}.lora_up.weight": torch.ones(16, 4), f"{name}.lora_down.weight": torch.ones(4, 16)}
    path = tmp_path / "lora.safetensors"
    save_file(state | {f"{name}.alpha": torch.tensor(1.0)}, path, metadata={"ss_network_alpha": "1.0"})
    assert "lora_alpha_unread" not in [finding.id for finding in inspect_lora(path).findings]


def test_what_hosts_make_of_quantised_factors_is_unknown(tmp_path: Path) -> None:
    """They are read here times their scales, which no loader of LoRAs is known to do."""
    name = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k"
    factors = {"lora_up": torch.ones(1280, 2), "lora_down": torch.ones(2, 768)}
    state = {f"{name}.{end}.weight": value.to(torch.float8_e4m3fn) for end, value in factors.items()}
    save_file(state, tmp_path / "plain.safetensors")
    save_file(
        state | {f"{name}.{end}.weight_scale": torch.tensor(0.5) for end in factors},
        tmp_path / "scaled.safetensors",
    )
    assert [reading.taken for reading in host_readings(tmp_path / "plain.safetensors")] == [1, 1, 1]
    for reading in host_readings(tmp_path / "scaled.safetensors"):
        assert reading.taken is None
        assert "quantised" in reading.unavailable["taken"]


def test_a_name_that_no_u_net_has_is_unknown_to_hosts(tmp_path: Path) -> None:
    """It was counted among those that they take."""
    state = {
        f"lora_unet_{block}_attentions_0_transformer_blocks_0_attn2_to_k.{end}": value
        for block in ("mid_block", "mid_blocks")
        for end, value in (("lora_up.weight", torch.ones(1280, 2)), ("lora_down.weight", torch.ones(2, 768)))
    }
    save_file(state, tmp_path / "odd.safetensors")
    for reading in host_readings(tmp_path / "odd.safetensors"):
        assert reading.taken is None
        assert "lora_unet_mid_blocks_attentions_0" in reading.unavailable["taken"]


def test_a_family_without_a_loader_is_said_only_of_its_own_names(tmp_path: Path) -> None:
    """Of MiniMax H3's layers PixArt has the feed-forward ones, and its pipelines load no LoRA; those of MiniMax H3 do."""
    state = {
        f"diffusion_model.blocks.0.{layer}.{end}": value
        for layer, out, inner in (
            ("attn.qkv_proj", 48, 16),
            ("attn.out_proj", 16, 16),
            ("mlp.fc1", 64, 16),
            ("mlp.fc2", 16, 64),
        )
        for end, value in (("lora_A.weight", torch.ones(2, inner)), ("lora_B.weight", torch.ones(out, 2)))
    }
    save_file(state, tmp_path / "h3.safetensors")
    reading = of_host(tmp_path / "h3.safetensors")
    assert (reading.taken, reading.unavailable.get("loader")) == (None, None)


@pytest.mark.slow
def test_the_first_sentence_says_who_loads_nothing_of_a_file_that_matches(
    pipelines: Pipelines, save: Save, tmp_path: Path
) -> None:
    """What diffusers and ComfyUI make of Sigmascope's own names is in the docs' table of loaders."""
    pipelines("sd15").unet.save_pretrained(tmp_path / "unet")
    path = save(pipelines("sd15"), "unet", format="native")
    command = ["lora", "inspect", str(path), "--model", str(tmp_path / "unet")]
    said = " ".join(CliRunner().invoke(app, command).output.split())
    some = "181 modules of the LoRA match unet, but diffusers 0.42 with PEFT loads none of this file."
    assert said.startswith(f"All {some}")
    alone = CliRunner().invoke(app, command[:3]).output
    assert alone.startswith("diffusers 0.42 with PEFT loads none of this file.\n")


@pytest.mark.slow
def test_an_unknown_prefix_is_told_first_with_the_call_that_loads_it(
    pipelines: Pipelines, save: Save, tmp_path: Path
) -> None:
    state = load_file(save(pipelines("sd15"), "unet"))
    path = tmp_path / "model.safetensors"
    save_file({f"model.{key}": value for key, value in state.items()}, path)
    pipelines("sd15").unet.save_pretrained(tmp_path / "unet")
    command = ["lora", "inspect", str(path), "--model", str(tmp_path / "unet")]
    said = " ".join(CliRunner().invoke(app, command).output.split())
    assert said.startswith(
        "All 181 modules of the LoRA match unet, but diffusers 0.42 with PEFT loads none of this file."
    )
    assert 'Load it with pipe.unet.load_lora_adapter(FILE, prefix="model.unet"), or convert it' in said
    for prefix, layers in (("unet", 0), ("model.unet", 181)):
        unet = copy.deepcopy(pipelines("sd15").unet)
        unet.load_lora_adapter(load_file(path), prefix=prefix)
        assert sum(".lora_A." in name for name, _ in unet.named_parameters()) == layers


@pytest.mark.slow
def test_a_file_that_no_host_loads_has_its_next_step_and_loads_after_it(
    pipelines: Pipelines, save: Save, tmp_path: Path
) -> None:
    """`unet.` before original names, as in OneTrainer's issue 885."""
    state = load_file(save(pipelines("sdxl"), "unet", format="comfyui"))
    path, mended = tmp_path / "one_trainer.safetensors", tmp_path / "NEW.safetensors"
    save_file({key.replace("diffusion_model.", "unet."): value for key, value in state.items()}, path)
    assert [of_host(path, host).taken for host in ("diffusers", "comfyui")] == [0, 0]
    (finding,) = inspect_lora(path).findings
    assert (finding.id, finding.severity) == ("lora_no_host", "warning")
    assert finding.message.startswith("diffusers 0.42 with PEFT and ComfyUI 0.33 load nothing of the file")
    assert "sigmascope lora convert" in (finding.advice or "")
    for format, host in (("peft", "diffusers"), ("comfyui", "comfyui")):
        convert_lora(path, mended, format)
        assert of_host(mended, host).taken == of_host(mended, host).modules


def test_embeddings_beside_a_lora_are_called_so(pipelines: Pipelines, save: Save, tmp_path: Path) -> None:
    """As in OneTrainer's issue 485."""
    state = load_file(save(pipelines("sd15"), "unet", format="kohya"))
    save_file(state | {"bundle_emb.a name.clip_l": torch.ones(2, 16)}, tmp_path / "bundle.safetensors")
    findings = judge_lora(tmp_path / "bundle.safetensors", pipelines("sd15")).findings
    (unused,) = (finding for finding in findings if finding.id == "lora_unused_keys")
    assert "embeddings of words" in (unused.advice or "")


@pytest.mark.parametrize(("family", "format"), [("sd15", "kohya"), ("qwen_image", "peft"), ("flux", "peft")])
def test_a_file_that_diffusers_refuses_for_what_is_beside_the_lora(
    pipelines: Pipelines, save: Save, tmp_path: Path, family: str, format: str
) -> None:
    pipeline, part = pipelines(family), "unet" if family == "sd15" else "transformer"
    alone = save(
        pipeline, part, format=format, only="attn1.to_q" if family == "sd15" else "transformer_blocks.0"
    )
    path = tmp_path / "bundle.safetensors"
    save_file(load_file(alone) | {"bundle_emb.a name.clip_l": torch.ones(2, 16)}, path)
    try:
        measured = in_diffusers(pipeline, path)
    except ValueError:
        measured = (0, {})
    assert rounded(of_host(path)) == measured
    told = {finding.id: finding for finding in inspect_lora(path).findings}
    if family == "flux":
        assert measured[0]
        assert not told
        return
    assert "keys such as bundle_emb.a name.clip_l" in of_host(path).unavailable["refused"]
    finding = told["lora_hosts_differ"]
    assert "refuses files with keys such as bundle_emb.a name.clip_l" in finding.message
    format = (finding.advice or "").rpartition("--format ")[2].rstrip(".")
    convert_lora(path, tmp_path / "NEW.safetensors", format)
    mended = in_diffusers(pipeline, tmp_path / "NEW.safetensors")
    assert mended[0] == len(load_lora(path).modules)
    assert rounded(of_host(tmp_path / "NEW.safetensors")) == mended


@pytest.mark.parametrize("start", ["lora_te2_", "lora_te3_"])
def test_what_diffusers_makes_of_encoders_that_the_family_has_not(
    pipelines: Pipelines, save: Save, start: str
) -> None:
    path = save(pipelines("sd15"), "unet", "text_encoder", format="kohya", only="attn")
    pipeline = copy.copy(pipelines("sd15"))
    pipeline.text_encoder = copy.deepcopy(pipeline.text_encoder)
    more = {re.sub("^lora_te1?_", start, key): one.clone() for key, one in load_file(path).items()}
    header = {"modelspec.architecture": FAMILIES["sd15"].architecture}
    save_file(load_file(path) | more, path, metadata=header)
    reading = of_host(path)
    assert rounded(reading) == in_diffusers(pipeline, path)
    loaded = [name for name, _ in pipeline.text_encoder.named_modules() if name.endswith("lora_A.default_0")]
    assert reading.encoders is not None
    assert reading.encoders.taken == len(loaded)
    assert bool(reading.taken) is bool(loaded) is (start == "lora_te2_")


def test_a_long_reason_leaves_room_for_the_host_s_name(tmp_path: Path) -> None:
    layer = "unet.foo_of_a_trainer.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    state = {f"{layer}.lora_{end}.weight": torch.ones(8, 8) for end in "AB"}
    save_file(state, tmp_path / "odd.safetensors")
    said = CliRunner().invoke(app, ["lora", "inspect", str(tmp_path / "odd.safetensors")]).output
    assert all(host.title in said for host in HOSTS)


def test_inspect_ends_with_what_hosts_make_of_the_file(pipelines: Pipelines, save: Save) -> None:
    path = with_header(save(pipelines("flux"), "transformer"))
    said = CliRunner().invoke(app, ["lora", "inspect", str(path)]).output
    table = said[said.index("Host ") :].splitlines()
    assert table[2].split() == ["diffusers", "0.42", "with", "PEFT", "50", "of", "50", "8"]
    assert table[3].split() == ["ComfyUI", "0.33", "50", "of", "50", "1"]
    stated = json.loads(CliRunner().invoke(app, ["lora", "inspect", "--json", str(path)]).output)
    assert [host["taken"] for host in stated["hosts"]] == [50, 50, 50]
    assert [finding["id"] for finding in stated["findings"]] == ["lora_hosts_differ"]


@pytest.mark.parametrize(
    ("unet", "encoder", "known"),
    [
        ("lora_unet_{}.lora_down", "lora_te_{}.lora_down", True),
        ("unet.{}.lora_A", "text_encoder.{}.lora_A", True),
        ("lora_unet_{}.lora_down", "text_encoders.clip_l.transformer.{}.lora_down", True),
        ("unet.{}.lora_A", "lora_te_{}.lora_down", False),
        ("lora_unet_{}.lora_down", "text_encoder.{}.lora_A", False),
        ("unet.{}.lora_down", "lora_te_{}.lora_down", False),
    ],
)
def test_what_diffusers_makes_of_parts_with_other_kinds_of_names_is_left_open(
    tmp_path: Path, unet: str, encoder: str, known: bool
) -> None:
    """It lost either part of most such mixtures: of the fourth the encoder, of the fifth the U-Net, which were told as taken."""
    paths = {
        unet: "mid_block.attentions.0.transformer_blocks.0.attn1.to_q",
        encoder: "text_model.encoder.layers.0.self_attn.out_proj",
    }
    state: dict[str, Tensor] = {}
    for name, path in paths.items():
        down = name.format(path.replace(".", "_") if "_{}" in name else path)
        up = down.replace("lora_down", "lora_up").replace("lora_A", "lora_B")
        state |= {f"{down}.weight": torch.ones(4, 768), f"{up}.weight": torch.ones(768, 4)}
    save_file(state, tmp_path / "lora.safetensors", {"modelspec.architecture": "stable-diffusion-v1"})
    reading = of_host(tmp_path / "lora.safetensors")
    assert reading.encoders is not None
    for part in (reading, reading.encoders):
        assert (part.taken is not None) == known
        assert known or "not measured together" in part.unavailable["taken"]


def of_lycoris(kind: str, generator: torch.Generator) -> dict[str, Tensor]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    if kind == "oft":
        return {"oft_blocks": 0.01 * randn(2, 4, 4), "alpha": torch.tensor(1e-3)}
    if kind == "glora":
        names = ("a1", "a2", "b1", "b2")
        return {f"{name}.weight": randn(*((8, 2), (2, 8))[index % 2]) for index, name in enumerate(names)}
    return {f"hada_w{side}_{end}": randn(*((8, 2), (2, 8))[end == "b"]) for side in "12" for end in "ab"}


@pytest.mark.parametrize("kind", ["loha", "oft", "glora"])
def test_the_advice_for_each_host_works_for_what_is_no_plain_factors(kind: str, tmp_path: Path) -> None:
    layer = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    parts = of_lycoris(kind, torch.Generator().manual_seed(0))
    path, model = tmp_path / "style.safetensors", tmp_path / "model"
    save_file({f"lora_unet_{layer.replace('.', '_')}.{end}": one for end, one in parts.items()}, path)
    sd15_unet().save_pretrained(model)  # type: ignore[operator]
    advice = {one.id: one.advice or "" for one in inspect_lora(path).findings}["lora_hosts_differ"]
    told = re.search(r"to peft for diffusers(?:, with (.*))?, to comfyui for ComfyUI", advice)
    assert told is not None, advice
    options = (told[1] or "").replace(" and ", " ").replace("MODEL", str(model)).split()
    for host, format, more in (("diffusers", "peft", options), ("comfyui", "comfyui", [])):
        made = tmp_path / f"{format}.safetensors"
        outcome = CliRunner().invoke(
            app, ["lora", "convert", str(path), str(made), "--format", format, *more]
        )
        assert outcome.exit_code == 0, outcome.output
        assert of_host(made, host, "0.33" if host == "comfyui" else "").taken == 1


def test_of_a_file_for_text_encoders_alone_the_model_tells_what_hosts_take(tmp_path: Path) -> None:
    pipeline = make_pipeline("sd15")
    file = write(lora_state(pipeline, ("text_encoder",), rank=2), tmp_path / "words.safetensors")
    pipeline.save_pretrained(tmp_path / "sd15")
    pipeline.load_lora_weights(file)
    names = [name for name, layer in pipeline.text_encoder.named_modules() if hasattr(layer, "lora_A")]
    assert len(names) == 12
    diffusers = inspect_lora(file, family="sd15").hosts[0]
    assert diffusers.encoders is not None
    assert (diffusers.encoders.taken, diffusers.encoders.strengths) == (12, {1.0: 12})
    assert (diffusers.modules, diffusers.taken, diffusers.unavailable) == (0, 0, {})
    said = CliRunner().invoke(app, ["lora", "inspect", str(file), "--model", str(tmp_path / "sd15")]).output
    (row,) = [line for line in said.splitlines() if line.startswith(" diffusers 0.42")]
    assert row.split() == ["diffusers", "0.42", "-", "-", "12", "of", "12", "1"]
    assert "an unknown number" not in said
    (encoders,) = {reading.encoders.taken for reading in host_readings(file) if reading.encoders}
    assert encoders is None  # without a model nothing tells it


def test_a_model_that_a_file_does_not_match_tells_nothing_of_it(tmp_path: Path) -> None:
    pipeline = make_pipeline("sd15")
    state = lora_state(pipeline, ("text_encoder",), rank=2)
    odd = {key.replace("self_attn", "other_attn"): factor for key, factor in state.items()}
    file = write(odd, tmp_path / "words.safetensors")
    pipeline.save_pretrained(tmp_path / "sd15")
    outcome = CliRunner().invoke(
        app, ["lora", "inspect", str(file), "--model", str(tmp_path / "sd15"), "--json"]
    )
    encoders = [host["encoders"] for host in json.loads(outcome.stdout)["hosts"]]
    assert [one["taken"] for one in encoders if one] in ([], [None] * 3)


def test_comfyui_loads_no_lora_in_gguf_and_both_hosts_do_after_the_command(tmp_path: Path) -> None:
    """city96/ComfyUI-GGUF issue 396: ComfyUI's lists of LoRAs have no such files, and its loader cannot open one."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "lora.gguf", "flux")
    for end, shape in (("A", (16, 3072)), ("B", (3072, 16))):
        name = f"diffusion_model.double_blocks.0.img_attn.proj.lora_{end}.weight"
        writer.add_tensor(name, torch.ones(shape).half().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reading = of_host(tmp_path / "lora.gguf", "comfyui")
    assert (reading.taken, reading.modules) == (0, 1)
    found = {finding.id: finding for finding in inspect_lora(tmp_path / "lora.gguf").findings}
    finding = found["lora_no_host"]
    assert finding.message == "ComfyUI 0.33 (its LoRA loaders read no GGUF) loads nothing of the file."
    assert "--format peft" in (finding.advice or "")
    convert_lora(tmp_path / "lora.gguf", tmp_path / "NEW.safetensors", "peft")
    assert [of_host(tmp_path / "NEW.safetensors", host).taken for host in ("diffusers", "comfyui")] == [1, 1]
