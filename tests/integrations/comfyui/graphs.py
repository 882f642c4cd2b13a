"""Graphs that tests post to ComfyUI: the same way from a model to a picture, with the models of `tiny_models.py`."""

from typing import Any

Graph = dict[str, dict[str, Any]]
SLEEP = 0.3


def graph(planted: str = "", *, seed: int = 1, lora: str = "good", strength: float = 0.8) -> Graph:
    """Checkpoint, LoRA, prompts, sampling and decoding; a planted node between the last two."""
    nodes: Graph = {
        "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "tiny.safetensors"}},
        "2": {
            "class_type": "LoraLoader",
            "inputs": {
                "model": ["1", 0],
                "clip": ["1", 1],
                "lora_name": f"{lora}.safetensors",
                "strength_model": strength,
                "strength_clip": strength,
            },
        },
        "3": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["2", 1], "text": "a cat"}},
        "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "6": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["2", 0],
                "positive": ["3", 0],
                "negative": ["3", 0],
                "latent_image": ["5", 0],
                "seed": seed,
                "steps": 2,
                "cfg": 5.0,
                "sampler_name": "euler",
                "scheduler": "normal",
                "denoise": 1.0,
            },
        },
        "7": {"class_type": "VAEDecode", "inputs": {"samples": ["6", 0], "vae": ["1", 2]}},
        "8": {"class_type": "SaveImage", "inputs": {"images": ["7", 0], "filename_prefix": "x"}},
    }
    if planted == "PlantedOutOfMemory":
        nodes["9"] = {"class_type": planted, "inputs": {"vae": ["1", 2]}}
        nodes["7"]["inputs"]["vae"] = ["9", 0]
    elif planted:
        nodes["9"] = {"class_type": planted, "inputs": {"x": ["6", 0], "seconds": SLEEP}}
        nodes["7"]["inputs"]["samples"] = ["9", 0]
    return nodes


def sampled(model: Graph, seed: int, steps: int, cfg: float, latent: dict[str, Any], name: str) -> Graph:
    """What follows the model of `model` (nodes "1" to "5"): sampling, decoding and saving."""
    return {
        **model,
        "5": latent,
        "6": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["2", 0],
                "positive": ["3", 0],
                "negative": ["3", 0],
                "latent_image": ["5", 0],
                "seed": seed,
                "steps": steps,
                "cfg": cfg,
                "sampler_name": "euler",
                "scheduler": "simple",
                "denoise": 1.0,
            },
        },
        "7": {"class_type": "VAEDecode", "inputs": {"samples": ["6", 0], "vae": ["4", 0]}},
        "8": {"class_type": "SaveImage", "inputs": {"images": ["7", 0], "filename_prefix": name}},
    }


def family(
    name: str, *, seed: int = 1, steps: int = 2, dtype: str = "default", strength: float = 1.0
) -> Graph:
    """The way of a family whose denoiser is a file of its own: "sdxl", "sd3", "flux", "wan", or "wan gguf"."""
    is_gguf = name.endswith("gguf")
    family = name.removesuffix(" gguf")
    loader: dict[str, Any] = {
        "class_type": "UNETLoader",
        "inputs": {"unet_name": f"{family}.safetensors", "weight_dtype": dtype},
    }
    if is_gguf:
        loader = {"class_type": "UnetLoaderGGUF", "inputs": {"unet_name": f"{family}.gguf"}}
    vae = {"sdxl": "tiny4", "wan": "wan"}.get(family, "tiny16")
    size = {"width": 64, "height": 64, "batch_size": 1}
    latent: dict[str, Any] = {
        "sdxl": {"class_type": "EmptyLatentImage", "inputs": size},
        "wan": {"class_type": "EmptyHunyuanLatentVideo", "inputs": {**size, "length": 5}},
    }.get(family, {"class_type": "EmptySD3LatentImage", "inputs": size})
    width, pooled = {"sdxl": (2048, 1280), "flux": (4096, 768)}.get(family, (4096, 0))
    text: Graph = {
        "3": {"class_type": "PlantedConditioning", "inputs": {"width": width, "pooled": pooled, "tokens": 16}}
    }
    if family == "sd3":  # takes CLIP-L alone
        text = {
            "9": {"class_type": "CLIPLoader", "inputs": {"clip_name": "clip_l.safetensors", "type": "sd3"}},
            "3": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["9", 0], "text": "a cat"}},
        }
    lora = "flux_tiny" if family == "flux" else family
    model: Graph = {
        "1": loader,
        "2": {
            "class_type": "LoraLoaderModelOnly",
            "inputs": {"model": ["1", 0], "lora_name": f"{lora}.safetensors", "strength_model": strength},
        },
        **text,
        "4": {"class_type": "VAELoader", "inputs": {"vae_name": f"{vae}.safetensors"}},
    }
    return sampled(model, seed, steps, 1.0, latent, name.replace(" ", "_"))


def image_to_image(*, seed: int = 1) -> Graph:
    """SD 1.5 from a picture in ComfyUI's input folder."""
    nodes = graph(seed=seed)
    nodes["5"] = {"class_type": "VAEEncode", "inputs": {"pixels": ["10", 0], "vae": ["1", 2]}}
    nodes["10"] = {"class_type": "LoadImage", "inputs": {"image": "in.png"}}
    nodes["6"]["inputs"]["denoise"] = 0.5
    nodes["8"]["inputs"]["filename_prefix"] = "from_a_picture"
    return nodes


def hooked(
    lora: str,
    *,
    strength: float = 1.0,
    in_use: bool = True,
    until: float | None = None,
    reaches: str = "both",
    seed: int = 1,
) -> Graph:
    """SD 1.5 with a LoRA as a hook, set on the CLIP that the positive prompt is encoded with.

    Args:
        lora: Its name.
        strength: On both.
        in_use: Whether it is set on anything.
        until: The share of the steps after which its schedule has strength 0; None: it has no schedule.
        reaches: "both", "text encoder" or "denoiser".
        seed: The sampler's.
    """
    nodes = graph(seed=seed)
    nodes["2"] = {
        "class_type": "CreateHookLora",
        "inputs": {"lora_name": f"{lora}.safetensors", "strength_model": strength, "strength_clip": strength},
    }
    nodes["4"] = {
        "class_type": "SetClipHooks",
        "inputs": {
            "clip": ["1", 1],
            "hooks": ["2", 0],
            "apply_to_conds": reaches == "both",
            "schedule_clip": False,
        },
    }
    nodes["3"]["inputs"]["clip"] = ["1", 1]
    nodes["10"] = {"class_type": "CLIPTextEncode", "inputs": {"clip": ["4", 0], "text": "a dog"}}
    nodes["6"]["inputs"] |= {"model": ["1", 0], "positive": ["10" if in_use else "3", 0]}
    if reaches == "denoiser":
        inputs = {"cond_NEW": ["3", 0], "strength": 1.0, "set_cond_area": "default", "hooks": ["2", 0]}
        nodes["10"] = {"class_type": "ConditioningSetProperties", "inputs": inputs}
    if not in_use:
        del nodes["4"], nodes["10"]
        nodes["11"] = {"class_type": "PlantedKeep", "inputs": {"hooks": ["2", 0]}}
    if until is not None:
        for number, times, start, before in (
            ("12", 1.0, 0.0, {}),
            ("13", 0.0, until, {"prev_hook_kf": ["12", 0]}),
        ):
            inputs = {"strength_mult": times, "start_percent": start, **before}
            nodes[number] = {"class_type": "CreateHookKeyframe", "inputs": inputs}
        nodes["14"] = {"class_type": "SetHookKeyframes", "inputs": {"hooks": ["2", 0], "hook_kf": ["13", 0]}}
        nodes["4"]["inputs"]["hooks"] = ["14", 0]
    nodes["8"]["inputs"]["filename_prefix"] = f"hook_{lora}"
    return nodes
