"""What ComfyUI makes of a file, held to its own loader."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.comfy_shapes.checkout import Checkout
from torch import Tensor, nn

from sigmascope.lora.families.family import Family
from sigmascope.lora.families.known import FAMILIES
from sigmascope.lora.hosts import HOSTS, HostReading, host_readings
from sigmascope.lora.inspect import inspect_lora

pytestmark = pytest.mark.comfyui
WIDTH = 12
# ComfyUI's class, and what its tables of names ask of the configuration.
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "flux": ("Flux", {"depth": 1, "depth_single_blocks": 1, "hidden_size": WIDTH}),
    "chroma": ("Chroma", {"depth": 1, "depth_single_blocks": 1, "hidden_size": WIDTH}),
    "flux2": ("Flux2", {"depth": 1, "depth_single_blocks": 1, "hidden_size": WIDTH}),
    "z_image": ("Lumina2", {"n_layers": 1, "dim": WIDTH, "n_refiner_layers": 1}),
    "qwen_image": ("QwenImage", {}),
    "wan": ("WAN21", {}),
    "hunyuan_video": ("HunyuanVideo", {}),
    "hidream": ("HiDream", {}),
    "ltx_video": ("LTXV", {}),
    "sd3": ("SD3", {"depth": 1}),
    "auraflow": ("AuraFlow", {"n_layers": 2, "n_double_layers": 1}),
    "cogvideox": ("CogVideoX", {}),
    "cosmos": ("CosmosPredict2", {}),
    "hunyuan_video15": ("HunyuanVideo15", {}),
    "ideogram4": ("Ideogram4", {}),
    "krea2": ("Krea2", {"layers": 1}),
    "kandinsky5": ("Kandinsky5", {}),
    "ltx2": ("LTXAV", {}),
    "mochi": ("GenmoMochi", {}),
    "pixart": ("PixArt", {"depth": 1, "hidden_size": WIDTH}),
}
STARTS = (
    "lora_unet_",
    "lora_transformer_",
    "lycoris_",
    "diffusion_model.",
    "transformer.",
    "base_model.model.",
    "unet.",
)
IN_BLOCKS = re.compile(
    r"(?:(?:double|single|joint|(?:text_|visual_)?transformer|double_stream|single_stream)_blocks|(?:double_|single_)?layers|blocks)\.0\."
)


def rows(family: Family) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The matrices of the first blocks: the original's name, and those of diffusers."""
    for row in family.rows:
        one = row.numbered("0")
        if (
            IN_BLOCKS.match(one.original)
            and not re.search("_attn_[qkv]$", one.original)  # of HunyuanVideo 1.5's own files
            and not row.swapped
            and not re.search("norm|modulation$|embed|scale", one.original)
        ):
            yield one.original, one.parts


def names_known_to(comfy: Checkout, family: str) -> dict[str, Any]:
    """What ComfyUI's own function finds in a model of its own class with the family's names."""
    class_name, config = MODELS[family]
    base = comfy.module("comfy.model_base")
    if not hasattr(base, class_name):
        pytest.skip(f"this ComfyUI has no {class_name}")
    model = getattr(base, class_name).__new__(getattr(base, class_name))
    nn.Module.__init__(model)
    weights = {f"diffusion_model.{name}.weight": torch.zeros(1) for name, _ in rows(FAMILIES[family])}
    model.state_dict = lambda: weights
    model.model_config = SimpleNamespace(unet_config=config)
    found: dict[str, Any] = comfy.lora.model_lora_keys_unet(model, {})
    return {
        name: key for name, key in found.items() if (key[0] if isinstance(key, tuple) else key) in weights
    }


def of_checkout(comfy: Checkout, path: Path) -> HostReading:
    version = re.search(r'"([\d.]+)"', (comfy.folder / "comfyui_version.py").read_text())
    assert version is not None
    readings = zip(HOSTS, host_readings(path), strict=True)
    return next(
        one for host, one in readings if host.name == "comfyui" and version[1].startswith(host.version)
    )


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("original", [True, False], ids=["original", "diffusers"])
@pytest.mark.parametrize("family", MODELS)
def test_what_comfyui_takes(comfy: Checkout, tmp_path: Path, family: str, start: str, original: bool) -> None:
    known = names_known_to(comfy, family)
    names = [name for whole, parts in rows(FAMILIES[family]) for name in ([whole] if original else parts)]
    shown = [start + (name.replace(".", "_") if start.endswith("_") else name) for name in names]
    state: dict[str, Tensor] = {}
    for name in shown:
        state |= {
            f"{name}.lora_down.weight": torch.ones(2, WIDTH),
            f"{name}.lora_up.weight": torch.ones(WIDTH, 2),
        }
    family_of = {"modelspec.architecture": FAMILIES[family].architecture}
    save_file(state, tmp_path / "lora.safetensors", metadata=family_of)
    reading = of_checkout(comfy, tmp_path / "lora.safetensors")
    if reading.taken is None:
        assert reading.unavailable["taken"]
    else:
        assert (
            reading.taken
            == len(comfy.lora.load_lora(state, known, log_missing=False))
            == sum(name in known for name in shown)
        )


@pytest.mark.parametrize("alpha", [None, 16.0])
def test_the_strength_is_alpha_by_rank(comfy: Checkout, tmp_path: Path, alpha: float | None) -> None:
    name = "diffusion_model.double_blocks.0.img_attn.proj"
    state = {f"{name}.lora_A.weight": torch.ones(4, WIDTH), f"{name}.lora_B.weight": torch.ones(WIDTH, 4)}
    header = {"lora_adapter_metadata": '{"transformer.r": 4, "transformer.lora_alpha": 16}'}
    if alpha is not None:
        state[f"{name}.alpha"] = torch.tensor(alpha)
    save_file(state, tmp_path / "lora.safetensors", metadata=header)
    patches = comfy.lora.load_lora(state, {name: f"{name}.weight"}, log_missing=False)
    patch = (1.0, patches[f"{name}.weight"], 1.0, None, None)
    weight = comfy.lora.calculate_weight([patch], torch.zeros(WIDTH, WIDTH), f"{name}.weight")
    assert of_checkout(comfy, tmp_path / "lora.safetensors").strengths == {float(weight[0, 0]) / 4: 1}


def test_a_whole_difference_is_not_scaled(comfy: Checkout, tmp_path: Path) -> None:
    name = "diffusion_model.double_blocks.0.img_attn.proj"
    state = {f"{name}.diff": torch.ones(WIDTH, WIDTH), f"{name}.alpha": torch.tensor(16.0)}
    save_file(state, tmp_path / "lora.safetensors")
    patches = comfy.lora.load_lora(state, {name: f"{name}.weight"}, log_missing=False)
    patch = (1.0, patches[f"{name}.weight"], 1.0, None, None)
    weight = comfy.lora.calculate_weight([patch], torch.zeros(WIDTH, WIDTH), f"{name}.weight")
    assert of_checkout(comfy, tmp_path / "lora.safetensors").strengths == {float(weight[0, 0]): 1}


@pytest.mark.parametrize("alpha", [1.0, 32.0])
def test_the_alpha_beside_two_whole_factors_of_lokr_is_not_read(
    comfy: Checkout, tmp_path: Path, alpha: float
) -> None:
    """Comfy-Org/ComfyUI issue 15114: "LoKr alpha scaling is ignored when both lokr_w1 and lokr_w2 are stored directly"."""
    name = "diffusion_model.double_blocks.0.img_attn.proj"
    first, second = torch.rand(3, 3), torch.rand(4, 4)
    state = {f"{name}.lokr_w1": first, f"{name}.lokr_w2": second, f"{name}.alpha": torch.tensor(alpha)}
    save_file(state, tmp_path / "lora.safetensors", metadata={"ss_network_dim": "32"})
    (adapter,) = comfy.lora.load_lora(state, {name: "key"}, log_missing=False).values()
    weight = torch.zeros(WIDTH, WIDTH)
    change = adapter.calculate_weight(weight, "key", 1.0, 1.0, None, lambda change: change)
    torch.testing.assert_close(change, torch.kron(first, second))
    told = {one.id for one in inspect_lora(tmp_path / "lora.safetensors").findings}
    assert ("lora_lokr_alpha_unread" in told) is (alpha != 32.0)
