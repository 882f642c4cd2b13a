"""What the hosts' own loaders make of a file: the modules that they take, and the factor on each one's change."""

import inspect
import logging
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from safetensors.torch import load_file
from tests.comfy_shapes.checkout import Checkout
from tests.lora.reported_layouts import Target, model_with_lora, targets, widths
from torch import Tensor, nn

Made = tuple[int, dict[float, int]]
PIPELINES = {
    "flux": "FluxPipeline",
    "flux2": "Flux2Pipeline",
    "chroma": "ChromaPipeline",
    "z_image": "ZImagePipeline",
    "lumina2": "Lumina2Pipeline",
    "qwen_image": "QwenImagePipeline",
    "wan": "WanPipeline",
    "wan i2v": "WanImageToVideoPipeline",
    "hunyuan_video": "HunyuanVideoPipeline",
    "ltx_video": "LTXPipeline",
    "hidream": "HiDreamImagePipeline",
    "sd3": "StableDiffusion3Pipeline",
    "sdxl": "StableDiffusionXLPipeline",
    "sd15": "StableDiffusionPipeline",
}


def by_diffusers(
    family: str, path: Path, named: Mapping[str, Target], part: str = "", **encoders: Any
) -> Made:
    """What a diffusers pipeline's `load_lora_weights` takes of a file.

    Args:
        family: A key of `MAKE`.
        path: The file.
        named: What its modules change.
        part: The encoder whose modules `named` has; the denoiser's by default.
        encoders: The pipeline's text encoders.
    """
    model = model_with_lora(family)
    denoiser = "unet" if isinstance(model, diffusers.UNet2DConditionModel) else "transformer"
    kind = getattr(diffusers, PIPELINES[family])
    missing = {
        name: None
        for name, one in inspect.signature(kind.__init__).parameters.items()
        if name != "self" and one.default is one.empty
    }
    pipeline = kind(**missing | {denoiser: model} | encoders)
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipeline.load_lora_weights(str(path))
    except Exception:  # noqa: BLE001 - whatever the loader raises, it takes nothing
        return 0, {}
    finally:
        logging.disable(logging.NOTSET)
    state = load_file(path)
    changed = getattr(pipeline, part or denoiser)
    return counted(factor_in_diffusers(changed, name, target, state) for name, target in named.items())


def factor_in_diffusers(model: Any, name: str, target: Target, state: Mapping[str, Tensor]) -> float | None:
    layers = [model.get_submodule(part) for part in target.parts]
    if not any(getattr(layer, "scaling", {}) for layer in layers):
        return None
    probe = probe_for(target.shape)
    got = torch.cat([_applied(layer, probe) for layer in layers])
    wanted = own_change(state, name, probe)
    if target.swapped:
        wanted = torch.cat(wanted.chunk(2)[::-1])
    return factor_of(got, wanted, name)


def _applied(layer: Any, probe: Tensor) -> Tensor:
    """What the adapters of a layer give for an input."""
    sum_ = torch.zeros(layer.weight.shape[0])
    for adapter, scale in getattr(layer, "scaling", {}).items():
        if adapter in getattr(layer, "lora_A", {}):
            down, up = (getattr(layer, f"lora_{end}")[adapter].weight.flatten(1).float() for end in "AB")
            if not down.is_meta:  # diffusers found no values, and says so in its log only
                sum_ += scale * (up @ (down @ probe))
        else:
            first, second = (getattr(layer, f"lokr_{end}")[adapter].float() for end in ("w1", "w2"))
            sum_ += scale * kronecker(first, second, probe)
    return sum_


def probe_for(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(torch.Size(shape[1:]).numel(), generator=torch.Generator().manual_seed(1))


def own_change(state: Mapping[str, Tensor], name: str, probe: Tensor) -> Tensor:
    """What up·down, or the whole difference, gives for an input."""
    own = {
        key.removeprefix(f"{name}."): value.float()
        for key, value in state.items()
        if key.startswith(f"{name}.")
    }
    if "diff" in own:
        return own["diff"].flatten(1) @ probe
    if "lokr_w1" in own:
        return kronecker(own["lokr_w1"], own["lokr_w2"], probe)
    down = next(value for key, value in own.items() if "down" in key or "lora_A" in key)
    up = next(value for key, value in own.items() if "up" in key or "lora_B" in key)
    return up.flatten(1) @ (down.flatten(1) @ probe)


def kronecker(first: Tensor, second: Tensor, probe: Tensor) -> Tensor:
    return (first @ probe.reshape(first.shape[1], -1) @ second.flatten(1).T).flatten()


def factor_of(got: Tensor, wanted: Tensor, name: str) -> float | None:
    """The factor between two changes that differ in nothing else; None if there is no change."""
    got = got.detach()
    factor = float((got * wanted).sum() / (wanted * wanted).sum())
    assert float((got - factor * wanted).norm()) <= 1e-2 * float(got.norm()), f"{name} is changed otherwise"
    return round(factor, 3) if abs(factor) > 1e-6 else None


def counted(factors: Any) -> Made:
    taken = [factor for factor in factors if factor is not None]
    return len(taken), dict(Counter(taken))


# ComfyUI's class of each family, and what its tables of names ask of the model's configuration.
COMFYUI_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": ("Flux", {"depth": 2, "depth_single_blocks": 2, "hidden_size": 3072}),
    "chroma": ("Chroma", {"depth": 2, "depth_single_blocks": 2, "hidden_size": 3072}),
    "flux2": ("Flux2", {"depth": 2, "depth_single_blocks": 2, "hidden_size": 6144}),
    "z_image": ("Lumina2", {"n_layers": 2, "dim": 3840, "n_refiner_layers": 1}),
    "lumina2": ("Lumina2", {"n_layers": 2, "dim": 2304, "n_refiner_layers": 1}),
    "qwen_image": ("QwenImage", {}),
    "wan": ("WAN21", {}),
    "wan i2v": ("WAN21", {}),
    "hunyuan_video": ("HunyuanVideo", {}),
    "hidream": ("HiDream", {}),
    "ltx_video": ("LTXV", {}),
    "sd3": ("SD3", {"depth": 3}),
    "sd15": (
        "BaseModel",
        {
            "num_res_blocks": [2] * 4,
            "channel_mult": [1, 2, 4, 4],
            "transformer_depth": [1] * 6 + [0] * 2,
            "transformer_depth_output": [1] * 9 + [0] * 3,
            "transformer_depth_middle": 1,
        },
    ),
    "sdxl": (
        "SDXL",
        {
            "num_res_blocks": [2] * 3,
            "channel_mult": [1, 2, 4],
            "transformer_depth": [0, 0, 2, 2, 10, 10],
            "transformer_depth_output": [0] * 3 + [2] * 3 + [10] * 3,
            "transformer_depth_middle": 10,
        },
    ),
}


def known_to_comfyui(comfy: Checkout, family: str) -> dict[str, Any] | None:
    """The names that ComfyUI's own function finds in a model of its own class; None if this version has no such class."""
    class_name, config = COMFYUI_MODELS[family]
    kind = getattr(comfy.module("comfy.model_base"), class_name, None)
    if kind is None:
        return None
    model = kind.__new__(kind)
    nn.Module.__init__(model)
    weights = {
        f"diffusion_model.{target.original}.weight": torch.zeros(1)
        for target in targets(family, "original").values()
    }
    model.state_dict = lambda: weights
    model.model_config = SimpleNamespace(unet_config=config)
    found: dict[str, Any] = comfy.lora.model_lora_keys_unet(model, {})
    return {
        name: key for name, key in found.items() if (key[0] if isinstance(key, tuple) else key) in weights
    }


def by_comfyui(comfy: Checkout, known: Mapping[str, Any], path: Path, named: Mapping[str, Target]) -> Made:
    """What ComfyUI's `load_lora` takes of a file, given the names that it knows, and by which factor it merges it."""
    state = comfy.module("comfy.lora_convert").convert_lora(load_file(path))
    patches = comfy.lora.load_lora(state, known, log_missing=False)
    taken = [name for name in named if name in known and known[name] in patches]
    factors: dict[float | None, float | None] = {}
    for name in sorted(taken, key=lambda name: torch.Size(named[name].shape).numel()):
        alpha = float(state[f"{name}.alpha"]) if f"{name}.alpha" in state else None
        if alpha not in factors:  # all have one rank; the smallest weight tells
            shape, probe = named[name].shape, probe_for(named[name].shape)
            weight = comfy.lora.calculate_weight(
                [(1.0, patches[known[name]], 1.0, None, None)], torch.zeros(shape), f"{name}.weight"
            )
            factors[alpha] = factor_of(weight.flatten(1) @ probe, own_change(state, name, probe), name)
    return counted(
        factors[float(state[f"{name}.alpha"]) if f"{name}.alpha" in state else None] for name in taken
    )


# Text encoders, of the published widths and one layer.
CLIP_L, CLIP_G = {"hidden_size": 768}, {"hidden_size": 1280, "projection_dim": 1280}
ENCODERS: dict[str, dict[str, tuple[str, str, dict[str, int]]]] = {
    "sd15": {"text_encoder": ("clip_l", "CLIPTextModel", CLIP_L)},
    "sdxl": {
        "text_encoder": ("clip_l", "CLIPTextModel", CLIP_L),
        "text_encoder_2": ("clip_g", "CLIPTextModelWithProjection", CLIP_G),
    },
    "sd3": {
        "text_encoder": ("clip_l", "CLIPTextModelWithProjection", CLIP_L),
        "text_encoder_2": ("clip_g", "CLIPTextModelWithProjection", CLIP_G),
        "text_encoder_3": ("t5xxl", "T5EncoderModel", {}),
    },
    "flux": {
        "text_encoder": ("clip_l", "CLIPTextModel", CLIP_L),
        "text_encoder_2": ("t5xxl", "T5EncoderModel", {}),
    },
}


def encoder(family: str, part: str) -> Any:
    import transformers

    _, kind, sizes = ENCODERS[family][part]
    cls = getattr(transformers, kind)
    one = {"num_layers": 1} if kind.startswith("T5") else {"num_hidden_layers": 1}
    with torch.device("meta"):
        return cls(cls.config_class(**one | sizes)).to_empty(device="cpu")


def encoder_targets(family: str, part: str) -> dict[str, Target]:
    """The linear layers of an encoder, by the names that CLIP had until transformers 5 and T5 has."""
    found = {}
    for path, shape in widths(encoder(family, part)).items():
        start = "text_model." if path.startswith("encoder.layers") else ""
        found[start + path] = Target((path,), start + path, False, shape)
    return found


def known_to_comfyui_clip(comfy: Checkout, family: str) -> dict[str, Any]:
    """The names that ComfyUI's own function finds in the family's text encoders."""
    names = (
        f"{name}.transformer.{path}.weight"
        for part, (name, _, _) in ENCODERS[family].items()
        for path in encoder_targets(family, part)
    )
    weights = dict.fromkeys(names, torch.zeros(1))
    found: dict[str, Any] = comfy.lora.model_lora_keys_clip(SimpleNamespace(state_dict=lambda: weights), {})
    return {name: key for name, key in found.items() if key in weights}
