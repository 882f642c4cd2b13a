"""Planted no-ops and partial loads: each is found, by the statement of the hosts' rules and by diffusers itself."""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.lora.reported_layouts import Layout
from tests.lora.wild.models import single_file, tiny
from torch import Tensor

import sigmascope
from sigmascope.errors import LoraFormatError
from sigmascope.lora import loadable
from sigmascope.lora.families import ModelLayout
from sigmascope.lora.families.known import FAMILIES
from sigmascope.lora.file import LoraFile
from sigmascope.lora.fit import FittedLora, save_fitted
from sigmascope.lora.loadable import WrittenLoads, stated_loads
from sigmascope.lora.reader import load_lora
from sigmascope.pipeline import lora_loading
from sigmascope.pipeline.lora_loading import (
    held_to_installed,
    is_worth_asking,
    loads_of_written,
    reading_of_installed,
    save_lora,
)

State = dict[str, Tensor]
ONLY = {  # a few layers of each, in blocks
    "flux": r"^transformer_blocks\.0\.(attn\.to_[qk]|ff\.)",
    "flux2": r"^(transformer_blocks\.0\.attn\.to_[qk]|single_transformer_blocks\.0)",
    "chroma": r"^single_transformer_blocks\.0\.(attn\.to_[qk]|proj)",
    "z_image": r"^layers\.0\.(attention\.to_|feed)",
    "lumina2": r"^layers\.0\.(attn\.to_|feed)",
    "qwen_image": r"^transformer_blocks\.0\.(attn\.to_|img_mod)",
    "wan": r"^blocks\.0\.(attn1\.to_|ffn)",
    "hunyuan_video": r"^transformer_blocks\.0\.(attn\.to_|ff\.)",
    "ltx_video": r"^transformer_blocks\.0\.(attn[12]\.to_|ff\.)",
    "sd3": r"^transformer_blocks\.0\.(attn\.to_|ff\.)",
}
START = "transformer."


def sound(family: str) -> State:
    return Layout(family, START, "diffusers", "A", None, ONLY[family]).build()[0]


def renamed(old: str, new: str, *, half: bool = False) -> Callable[[State], State]:
    def change(state: State) -> State:
        names = sorted({key.partition(".lora_")[0] for key in state})
        chosen = set(names[::2] if half else names)
        return {
            key.replace(old, new, 1) if key.partition(".lora_")[0] in chosen else key: tensor
            for key, tensor in state.items()
        }

    return change


def of_text_encoder(state: State) -> State:
    path = "text_encoder.text_model.encoder.layers.{}.self_attn.q_proj.lora_{}.weight"
    return {path.format(number, end): torch.ones(4, 4) for number in (0, 1) for end in "AB"}


def with_one_more(state: State) -> State:
    return state | {f"{START}my_refiner.0.attn.to_q.lora_{end}.weight": torch.ones(4, 4) for end in "AB"}


def without_some_ups(state: State) -> State:
    gone = {key for key in state if "lora_B" in key and ".to_k." in key}
    return {key: tensor for key, tensor in state.items() if key not in gone}


FAULTS: dict[str, Callable[[State], State]] = {
    "wrong prefix": renamed(START, "dit."),
    "no prefix": renamed(START, ""),
    "prefix twice": renamed(START, f"{START}transformer."),
    "prefix of a compiled model": renamed(START, f"{START}_orig_mod."),
    "half under another prefix": renamed(START, "model.", half=True),
    "half of the names renamed": renamed(".to_", ".proj_", half=True),
    "names of another family": renamed("blocks.0.", "my_blocks.0."),
    "text encoder only": of_text_encoder,
    "a module with no place in the model": with_one_more,
    "an up factor is missing": without_some_ups,
}


def written(state: State, folder: Path, family: str, **header: str) -> Path:
    path = folder / "lora.safetensors"
    save_file(state, path, {"modelspec.architecture": FAMILIES[family].architecture} | header)
    return path


def is_accused(path: Path) -> tuple[bool, bool]:
    """Whether the statement, and whether diffusers itself, says that not all acts, each module once and at full strength."""
    stated = stated_loads(path).hosts.get("diffusers")
    try:
        installed = reading_of_installed(path)
    except LoraFormatError:
        return stated is None, True
    assert stated is None or stated.taken is None or stated.taken == installed.taken
    is_whole = stated is not None and stated.strengths == {1.0: stated.modules} and stated.modules > 0
    return not is_whole, installed.taken != installed.modules or not installed.modules


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("family", ONLY)
def test_a_file_that_does_nothing_or_half_is_found(family: str, fault: str, tmp_path: Path) -> None:
    state = sound(family)
    faulty = FAULTS[fault](state)
    if faulty.keys() == state.keys():  # Z-Image and Lumina 2 call no list `blocks`
        faulty = renamed("layers.0.", "my_layers.0.")(state)
    assert is_accused(written(faulty, tmp_path, family)) == (True, True)


@pytest.mark.parametrize("family", ONLY)
def test_a_sound_file_is_not_accused(family: str, tmp_path: Path) -> None:
    assert is_accused(written(sound(family), tmp_path, family)) == (False, False)


def test_an_alpha_in_the_header_alone_is_found(tmp_path: Path) -> None:
    """diffusers takes all of them, at another strength than ComfyUI."""
    config = {
        "transformer.r": 4,
        "transformer.lora_alpha": 16,
        "transformer.target_modules": ["to_q", "to_k"],
    }
    path = written(sound("flux"), tmp_path, "flux", lora_adapter_metadata=json.dumps(config))
    strengths = {name: dict(one.strengths or {}) for name, one in stated_loads(path).hosts.items()}
    assert strengths["diffusers"] != strengths["comfyui"]


def test_families_whose_pipelines_load_no_lora_say_so(tmp_path: Path) -> None:
    """PixArt's; a model of it takes no adapter either."""
    state = {f"{START}transformer_blocks.0.attn1.to_q.lora_{end}.weight": torch.ones(4, 4) for end in "AB"}
    reason = "diffusers' pipelines of PixArt have no load_lora_weights"
    path = written(state, tmp_path, "pixart")
    made = reading_of_installed(path)
    assert (made.taken, made.reason) == (0, reason)
    assert f"diffusers 0 of 1 ({reason})" in stated_loads(path).in_words


def test_what_diffusers_itself_refuses_takes_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the statement would let it pass."""
    path = written(renamed(START, "dit.")(sound("flux")), tmp_path, "flux")
    whole = stated_loads(written(sound("flux"), tmp_path, "flux")).hosts
    path = written(renamed(START, "dit.")(sound("flux")), tmp_path, "flux")
    monkeypatch.setattr(loadable, "loads_of", lambda path: whole)
    loadable.require_loadable(path, target=path, format="peft")
    with (
        held_to_installed(),
        pytest.raises(LoraFormatError, match=r"diffusers \S+ takes none of its \d+ modules"),
    ):
        loadable.require_loadable(path, target=path, format="peft")


def test_without_diffusers_it_says_that_it_was_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_loading, "installed_version", lambda: None)
    loads = loads_of_written(written(sound("flux"), tmp_path, "flux"))
    assert loads.installed.taken is None
    assert loads.in_words.endswith(
        "not held to an installed diffusers (diffusers, PEFT and transformers are not all installed)"
    )
    assert loads.as_dict()["installed_diffusers"]["version"] is None


def test_diffusers_is_imported_only_where_its_rules_were_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = stated_loads(written(sound("flux"), tmp_path, "flux")).hosts["diffusers"]
    assert is_worth_asking(reading)  # it is imported here
    monkeypatch.delitem(sys.modules, "diffusers")
    assert not is_worth_asking(reading)
    monkeypatch.setattr(lora_loading, "installed_version", lambda: "0.99.0")
    assert is_worth_asking(reading)


CLIP = "text_model.encoder.layers.{}.self_attn.out_proj"
SDXL = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"


def kohya_sdxl(*encoders: str) -> State:
    """One layer of the U-Net, and those of the text encoders that are named."""
    names = [SDXL, *encoders]
    ends = {"lora_up.weight": (640, 4), "lora_down.weight": (4, 640)}
    return {f"{name}.{end}": torch.ones(shape) for name in names for end, shape in ends.items()}


def te(number: int, layer: int) -> str:
    return f"lora_te{number}_" + CLIP.format(layer).replace(".", "_")


def test_text_encoders_are_held_to_their_own_names(tmp_path: Path) -> None:
    """SDXL's first has 12 layers and its second 32."""
    named = [te(1, 0), te(1, 11), te(1, 12), te(2, 31), "lora_te1_text_model_my_layer"]
    reading = reading_of_installed(written(kohya_sdxl(*named), tmp_path, "sdxl"))
    assert (reading.taken, reading.modules) == (1, 1)
    assert reading.encoders is not None
    assert (reading.encoders.taken, reading.encoders.modules) == (3, 5)
    assert set(reading.encoders.lost) == {te(1, 12), "lora_te1_text_model_my_layer"}
    assert reading.in_words == "1 of 1 and text encoder 3 of 5"


def test_a_file_for_text_encoders_alone_is_no_dead_file(tmp_path: Path) -> None:
    path = written(
        {key: one for key, one in kohya_sdxl(te(2, 0)).items() if SDXL not in key}, tmp_path, "sdxl"
    )
    loads = loadable.require_loadable(path, target=path, format="peft")
    assert "text encoder 1 of 1" in loads.in_words


@pytest.mark.parametrize("layer", [0, 40])
def test_the_functions_say_what_their_file_loads_into(layer: int, tmp_path: Path) -> None:
    """The public functions, by the installed diffusers; a layer that SDXL's text encoder lacks is lost."""
    path = written(kohya_sdxl(te(1, layer)), tmp_path, "sdxl")
    plan = sigmascope.RankPlan(sigmascope.RankRules(sigmascope.FixedRank(2, 2)))
    made = [
        sigmascope.convert_lora(path, tmp_path / "peft.safetensors", "peft").loads,
        sigmascope.resize_lora(path, tmp_path / "small.safetensors", plan).loads,
        sigmascope.merge_lora_files([path, path], tmp_path / "both.safetensors").loads,
    ]
    for loads in made:
        assert loads is not None
        assert loads.installed.in_words == f"1 of 1 and text encoder {int(layer == 0)} of 1"


def test_a_text_encoder_that_diffusers_cannot_read_is_told(tmp_path: Path) -> None:
    """Its loader tells kohya's text encoders by their output projection, and refuses a file without any."""
    only_queries = te(1, 0).replace("out_proj", "q_proj")
    reading = reading_of_installed(written(kohya_sdxl(only_queries), tmp_path, "sdxl"))
    assert "ValueError" in (reading.reason or "")
    assert reading.in_words == "0 of 1 and text encoder 0 of 1"


def by_saving(folder: Path, state: State) -> WrittenLoads | None:
    lora = load_lora(written(state, folder, "flux"))
    layout = ModelLayout("flux", "diffusers", {"denoiser": START})
    return save_lora(folder / "made.safetensors", lora, format="peft", layout=layout)


def by_fitting(folder: Path, state: State) -> WrittenLoads | None:
    def fit(lora: LoraFile) -> FittedLora:
        return FittedLora(lora, before=1.0, after=0.5, held_out=1, calls=1, steps=1, seconds=0.0)

    with held_to_installed():
        return save_fitted(written(state, folder, "flux"), folder / "made.safetensors", fit).loads


@pytest.mark.parametrize("write", [by_saving, by_fitting])
def test_what_is_written_says_what_takes_it(
    write: Callable[[Path, State], WrittenLoads | None], tmp_path: Path
) -> None:
    """The modules are counted in the file by its own keys."""
    torch.manual_seed(0)
    state = sound("flux")
    names = sorted({key.removeprefix(START).partition(".lora_")[0] for key in state})
    loads = write(tmp_path, state)
    count = sum("lora_A" in key for key in load_file(tmp_path / "made.safetensors"))
    assert loads is not None
    assert count == len(names)
    assert loads.stated.family == "flux"
    assert {name: (one.taken, one.modules) for name, one in loads.stated.hosts.items()} == {
        "diffusers": (count, count),
        "comfyui": (count, count),
    }
    assert (loads.installed.taken, loads.installed.modules) == (count, count)
    assert loads.installed.version == diffusers.__version__


@pytest.mark.parametrize("form", ["folder", "single file"])
def test_an_extraction_says_what_takes_its_file(form: str, tmp_path: Path) -> None:
    """Three layers were tuned, which one fused matrix of a single file is. It is read by either host, under its own names."""
    torch.manual_seed(0)
    tuned = [f"transformer_blocks.0.attn.to_{name}.weight" for name in "qkv"]
    fused = "double_blocks.0.img_attn.qkv.weight"
    for name in ("base", "tuned"):
        model = copy.deepcopy(tiny("flux"))
        state = dict(model.state_dict() if form == "folder" else single_file("flux"))
        for key in () if name == "base" else tuned if form == "folder" else [fused]:
            state = state | {key: state[key] + torch.randn(state[key].shape)}
        if form == "folder":
            model.load_state_dict(state)
            model.save_pretrained(tmp_path / name)  # type: ignore[operator]
        else:
            save_file(state, tmp_path / name)
    made = tmp_path / "lora.safetensors"
    loads = sigmascope.extract_lora(tmp_path / "base", tmp_path / "tuned", made).loads
    assert loads is not None
    count = 3 if form == "folder" else 1
    ends = ("lora_A.weight", "lora_up.weight")
    assert sum(key.endswith(ends) for key in load_file(made)) == count
    assert loads.stated.family == "flux"
    readings = {name: (one.taken, one.modules) for name, one in loads.stated.hosts.items()}
    stated = count if form == "folder" else None  # of fused layers it is for FLUX' own width alone
    assert readings == {"diffusers": (stated, count), "comfyui": (count, count)}
    assert (loads.installed.taken, loads.installed.modules) == (count, count)
    assert loads.installed.version == diffusers.__version__
