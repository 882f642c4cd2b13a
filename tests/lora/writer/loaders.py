"""What the loaders that people use make of our files: which layers they change, and by how much otherwise than meant.

Run as a program (`python -m tests.lora.writer.loaders diffusers PEFT LyCORIS`), it prints the table of
docs/lora-files.md for these loaders; ComfyUI and kohya need a checkout each.
"""

import atexit
import importlib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from tests.comfy_shapes import checkout
from tests.families import FAMILIES, make_pipeline
from tests.families.loras import KINDS, adaptable, parts_of
from torch import Tensor, nn

from sigmascope.lora.alignment import align
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import ModelLayout, layout_of
from sigmascope.lora.families.family import Row, UnetBlocks
from sigmascope.lora.file import LoraFile
from sigmascope.lora.layer_names import blocks_of, renamed
from sigmascope.lora.writer import save_lora

Deltas = Mapping[str, Tensor]
FORMATS = ("native", "kohya", "peft", "comfyui")
MODELS = ("sd15", "sdxl", "sd3", "flux", "wan", "qwen_image")
KOHYA_VARIABLE = "SIGMASCOPE_SD_SCRIPTS"
_UNETS = ("sd15", "sdxl")


@dataclass(frozen=True)
class Taken:
    """What a loader took of a file.

    Attributes:
        right: Layers that change as meant.
        wrong: Layers that change otherwise.
        layers: How many layers the LoRA is for, as the loader's model counts them.
        difference: The largest ‖ΔW − meant‖ / ‖meant‖ of the right ones.
    """

    right: int
    wrong: int
    layers: int
    difference: float

    def __str__(self) -> str:
        taken = (
            "all" if self.right == self.layers else f"{self.right} of {self.layers}" if self.right else "none"
        )
        return f"{taken}, {self.wrong} wrong" if self.wrong else taken


@dataclass(frozen=True)
class Meant:
    """A pipeline's LoRA: for every layer of its denoiser and CLIP encoders, ranks 1 to 3, scale 1/2.

    `text_projection` has rank 4, which no other layer has.
    """

    family: str
    pipeline: Any
    layout: ModelLayout
    lora: LoraFile
    keys: tuple[str, ...]

    @property
    def blocks(self) -> UnetBlocks | None:
        """Of the U-Net."""
        return blocks_of(key.removeprefix("unet.") for key in self.keys) if self.family in _UNETS else None

    def parts(self) -> dict[str, nn.Module]:
        """The components by name."""
        return {part: getattr(self.pipeline, part) for part in parts_of(self.family)}

    def original(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """ΔW of each of the denoiser's layers under its original name, and the layers by that name.

        Our tables of names are used for it, which tests of their own hold to diffusers' converters.
        """
        layers: dict[str, str] = {}
        for name in self.lora.modules:
            part, path = self.layout.split(name)
            if part == "denoiser":
                placed = renamed(path, part, self.layout, "original", self.blocks)
                layers[placed.original if isinstance(placed, Row) else placed] = name
        naming = "sgm" if self.family in _UNETS else "original"
        denoiser = LoraFile(
            {name: one for name, one in self.lora.modules.items() if name in self._denoiser()}
        )
        aligned = align(denoiser, list(layers), ModelLayout(self.family, naming, {"denoiser": ""})).lora
        return {name: one.delta() for name, one in aligned.modules.items()}, layers

    def _denoiser(self) -> set[str]:
        return {name for name in self.lora.modules if self.layout.split(name)[0] == "denoiser"}


@cache
def meant(family: str) -> Meant:
    """The LoRA of a family's small pipeline."""
    pipeline = make_pipeline(family)
    modules = {}
    for part in parts_of(family):
        for index, (name, layer) in enumerate(adaptable(getattr(pipeline, part)).items()):
            weight: Any = layer.weight
            rank = 4 if name == "text_projection" else 1 + index % 3
            modules[f"{part}.{name}"] = _factors(tuple(weight.shape), rank, index)
    shapes = {
        f"{part}.{key}": tuple(tensor.shape)
        for part, component in pipeline.components.items()
        if isinstance(component, nn.Module)
        for key, tensor in component.state_dict().items()
    }
    keys = tuple(key.removesuffix(".weight") for key in shapes)
    return Meant(family, pipeline, layout_of(shapes), LoraFile(modules), keys)


def _factors(shape: tuple[int, ...], rank: int, seed: int) -> LoraFactors:
    generator = torch.Generator().manual_seed(seed)
    up = torch.randn(shape[0], rank, generator=generator)
    down = torch.randn(rank, int(torch.Size(shape[1:]).numel()), generator=generator)
    return LoraFactors(up, down, 0.5 * rank, shape)


@cache
def file_of(family: str, format: str) -> Path:
    """That LoRA in a format."""
    lora = meant(family)
    folder = tempfile.mkdtemp(prefix="sigmascope-loaders-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # it is read until the process ends
    path = Path(folder) / f"{family}-{format}.safetensors"
    save_lora(path, lora.lora, format=format, layout=lora.layout, model_layers=lora.keys)
    return path


@cache
def taken(loader: str, format: str, family: str) -> Taken | None:
    """What a loader takes of a family's LoRA in a format; None where the loader does not know the family."""
    lora = meant(family)
    expected, found = LOADERS[loader](lora, file_of(family, format))
    if not expected:
        return None
    errors = {
        name: float((found[name].reshape(delta.shape) - delta).norm() / delta.norm())
        for name, delta in expected.items()
        if name in found and bool(found[name].any())
    }
    right = [error for error in errors.values() if error < 1e-4]
    return Taken(len(right), len(errors) - len(right), len(expected), max(right, default=0.0))


def _whole(lora: Meant) -> dict[str, Tensor]:
    return {name: factors.delta() for name, factors in lora.lora.modules.items()}


def in_diffusers(lora: Meant, file: Path) -> tuple[Deltas, Deltas]:
    """`load_lora_weights` of the family's pipeline. What it has loaded before it raises counts as not loaded."""
    pipeline = make_pipeline(lora.family)
    try:
        pipeline.load_lora_weights(str(file))
    except (ValueError, RuntimeError, IndexError, AssertionError):
        return _whole(lora), {}
    return _whole(lora), _of_peft({part: getattr(pipeline, part) for part in lora.parts()})


def _of_peft(parts: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    layer_class = importlib.import_module("peft.tuners.lora").LoraLayer
    return {
        f"{part}.{name}": layer.get_delta_weight(adapter).detach()
        for part, component in parts.items()
        for name, layer in component.named_modules()
        if isinstance(layer, layer_class)
        for adapter in layer.active_adapters
        if adapter in layer.lora_A
    }


def in_peft(lora: Meant, file: Path) -> tuple[Deltas, Deltas]:
    """PEFT's own injection, which is given the ranks and takes names without the component before them."""
    peft: Any = importlib.import_module("peft")
    pipeline, tensors = make_pipeline(lora.family), load_file(file)
    parts = {part: getattr(pipeline, part) for part in lora.parts()}
    for part, component in parts.items():
        state = {
            key.removeprefix(f"{part}."): one for key, one in tensors.items() if key.startswith(f"{part}.")
        }
        if part.startswith("text_encoder") and not hasattr(component, "text_model"):
            state = {key.removeprefix("text_model."): tensor for key, tensor in state.items()}
        end = ".lora_A.weight"
        ranks = {key.removesuffix(end): len(one) for key, one in state.items() if key.endswith(end)}
        if not ranks:
            continue
        pattern = {f"^{name}": rank for name, rank in ranks.items()}
        config = peft.LoraConfig(target_modules=list(ranks), rank_pattern=pattern, alpha_pattern=pattern)
        peft.inject_adapter_in_model(config, component)
        peft.set_peft_model_state_dict(component, state)
    return _whole(lora), _of_peft(parts)


class Skeleton(nn.Module):
    """Layers of given names and shapes, in modules whose classes are named as a tool looks for them."""


def skeleton(shapes: Mapping[str, tuple[int, ...]], classes: Mapping[str, str] | None = None) -> nn.Module:
    """Make one.

    Args:
        shapes: Of the weights, by layer.
        classes: Names of classes by a pattern of their paths.
    """
    root = Skeleton()
    for path, shape in shapes.items():
        *above, last = path.split(".")
        module: nn.Module = root
        for depth, name in enumerate(above, start=1):
            if name not in dict(module.named_children()):
                here = ".".join(above[:depth])
                kinds = (kind for pattern, kind in (classes or {}).items() if re.fullmatch(pattern, here))
                kind = next(kinds, "Skeleton")
                module.add_module(name, type(kind, (Skeleton,), {})())
            module = getattr(module, name)
        module.add_module(last, _layer(shape))
    return root


def _layer(shape: tuple[int, ...]) -> nn.Module:
    out, inner, *kernel = shape
    if not kernel:
        return nn.Linear(inner, out, bias=False)
    convolution = {2: nn.Conv2d, 3: nn.Conv3d}[len(kernel)]
    return convolution(inner, out, tuple(kernel), bias=False)  # type: ignore[arg-type]


def _under_kohyas_names(
    lora: Meant, classes: Mapping[str, str] | None = None
) -> tuple[dict[str, nn.Module], dict[str, Tensor]]:
    """Copies of the models as kohya's tools and LyCORIS meet them, and ΔW by part and name there."""
    models: dict[str, nn.Module] = dict(make_pipeline(lora.family).components)
    parts = {part: models[part] for part in lora.parts()}
    expected = _whole(lora)
    denoiser = next(part for part in parts if not part.startswith("text_encoder"))
    if lora.family not in {"sd15", "qwen_image"}:  # those two go by diffusers' names
        deltas, _ = lora.original()
        parts[denoiser] = skeleton({name: tuple(delta.shape) for name, delta in deltas.items()}, classes)
        expected = {name: one for name, one in expected.items() if name.startswith("text_encoder")}
        expected |= {f"{denoiser}.{name}": delta for name, delta in deltas.items()}
    for part in parts:
        if part.startswith("text_encoder"):
            parts[part] = _with_text_model(parts[part])
    named = {
        _in_text_model(name) if name.startswith("text_encoder") else name: delta
        for name, delta in expected.items()
    }
    return parts, named


def _in_text_model(name: str) -> str:
    part, _, path = name.partition(".")
    inside = path.startswith(("text_model.", "text_projection"))
    return name if inside else f"{part}.text_model.{path}"


def _with_text_model(encoder: nn.Module) -> nn.Module:
    """CLIP as transformers had it before version 5, which those tools pin: its layers lie one module deeper."""
    if hasattr(encoder, "text_model"):
        return encoder
    holder = Skeleton()
    holder.add_module("text_model", encoder)
    return holder


def _merged(parts: Mapping[str, nn.Module], merge: Callable[[], object]) -> dict[str, Tensor]:
    before = {
        f"{part}.{name}": layer.weight.detach().clone()
        for part, model in parts.items()
        for name, layer in model.named_modules()
        if isinstance(layer, KINDS)
    }
    merge()
    after = {
        f"{part}.{name}": layer.weight.detach()
        for part, model in parts.items()
        for name, layer in model.named_modules()
        if isinstance(layer, KINDS)
    }
    return {name: after[name] - before[name] for name in before}


def in_lycoris(lora: Meant, file: Path) -> tuple[Deltas, Deltas]:
    """LyCORIS' loader for kohya's tools, merged into the weights."""
    kohya: Any = importlib.import_module("lycoris.kohya")
    parts, expected = _under_kohyas_names(lora)
    denoiser = next(model for part, model in parts.items() if not part.startswith("text_encoder"))
    encoders = [model for part, model in parts.items() if part.startswith("text_encoder")]
    given = encoders[0] if lora.family == "sd15" else encoders or None
    kohya.LycorisNetworkKohya.apply_preset({"unet_target_name": []})  # of diffusers' U-Net it names two twice
    network, _ = kohya.create_network_from_weights(1.0, str(file), None, given, denoiser)

    def merge() -> None:
        for module in (*network.unet_loras, *network.text_encoder_loras):
            module.merge_to(1.0)

    return expected, _merged(parts, merge)


_KOHYA_CLASSES = {
    "sdxl": {
        r"(?:in|out)put_blocks\.\d+\.0|middle_block\.[02]": "ResnetBlock2D",
        r"(?:in|out)put_blocks\.\d+\.1|middle_block\.1": "Transformer2DModel",
        r"output_blocks\.\d+\.2": "Upsample2D",
    },
    "sd3": {r"joint_blocks\.\d+\.(?:x|context)_block": "SingleDiTBlock"},
    "flux": {r"double_blocks\.\d+": "DoubleStreamBlock", r"single_blocks\.\d+": "SingleStreamBlock"},
}
_KOHYA_MODULES = {"sd15": "lora", "sdxl": "lora", "sd3": "lora_sd3", "flux": "lora_flux"}


def in_kohya(lora: Meant, file: Path) -> tuple[Deltas, Deltas]:
    """The networks of sd-scripts, merged; it has none for WAN and Qwen-Image."""
    if lora.family not in _KOHYA_MODULES:
        return {}, {}
    networks = _sd_scripts(_KOHYA_MODULES[lora.family])
    parts, expected = _under_kohyas_names(lora, _KOHYA_CLASSES.get(lora.family))
    denoiser = next(model for part, model in parts.items() if not part.startswith("text_encoder"))
    encoders: list[Any] = [model for part, model in parts.items() if part.startswith("text_encoder")]
    encoders += [None] * ({"sd3": 3, "flux": 2}.get(lora.family, len(encoders)) - len(encoders))
    network, weights = networks.create_network_from_weights(1.0, str(file), None, encoders, denoiser)

    def merge() -> None:
        for module in (*network.unet_loras, *network.text_encoder_loras):
            start = f"{module.lora_name}."
            own = {key.removeprefix(start): one for key, one in weights.items() if key.startswith(start)}
            inside = networks.LoRAInfModule(
                module.lora_name, module.org_module, 1.0, module.lora_dim, module.scale * module.lora_dim
            )
            inside.merge_to(own, torch.float32, "cpu")

    return expected, _merged(parts, merge)


@cache
def _sd_scripts(name: str) -> Any:
    importlib.import_module("transformers")  # before there is a torchvision of ours
    for missing in ("torchvision", "torchvision.transforms", "cv2", "imagesize"):
        if missing.partition(".")[0] not in sys.modules and importlib.util.find_spec(
            missing.partition(".")[0]
        ):
            continue
        sys.modules.setdefault(missing, checkout.Anything(missing))
    sys.path.insert(0, os.environ[KOHYA_VARIABLE])
    return importlib.import_module(f"networks.{name}")


_COMFYUI_CLASSES = {"sd3": "SD3", "flux": "Flux", "wan": "WAN21", "qwen_image": "QwenImage"}


def in_comfyui(lora: Meant, file: Path) -> tuple[Deltas, Deltas]:
    """ComfyUI's `load_lora` and its own arithmetic, on layers under the names of its models."""
    comfy = comfyui()
    deltas, _ = lora.original()
    model = _comfyui_model(comfy, lora, deltas)
    clip = nn.Module()
    for part, name in (("text_encoder", "clip_l"), ("text_encoder_2", "clip_g")):
        if part in lora.parts():
            holder = nn.Module()
            encoder = _with_text_model(lora.parts()[part])
            holder.add_module("transformer", encoder)
            clip.add_module(name, holder)
    expected = {f"diffusion_model.{name}.weight": delta for name, delta in deltas.items()}
    for name, delta in _whole(lora).items():
        part, _, path = _in_text_model(name).partition(".")
        if part.startswith("text_encoder"):
            start = "clip_l" if part == "text_encoder" else "clip_g"
            expected[f"{start}.transformer.{path}.weight"] = delta
    keys = comfy.lora.model_lora_keys_clip(clip, comfy.lora.model_lora_keys_unet(model, {}))
    convert = comfy.module("comfy.lora_convert").convert_lora
    patches = comfy.lora.load_lora(convert(load_file(file)), keys)
    found: dict[str, Tensor] = {}
    for key, patch in patches.items():
        name, offset, function = (key, None, None) if isinstance(key, str) else (*key, None, None)[:3]
        if name in expected:
            weight = torch.zeros_like(expected[name])
            change = comfy.lora.calculate_weight([(1.0, patch, 1.0, offset, function)], weight, name)
            found[name] = found.get(name, torch.zeros_like(weight)) + change
    return expected, found


@cache
def comfyui() -> Any:
    """The checkout."""
    return checkout.Checkout(Path(os.environ[checkout.VARIABLE]))


def _comfyui_model(comfy: Any, lora: Meant, deltas: Deltas) -> Any:
    base = comfy.module("comfy.model_base")
    kind = getattr(base, _COMFYUI_CLASSES.get(lora.family, "BaseModel"))
    model = kind.__new__(kind)
    nn.Module.__init__(model)
    model.diffusion_model = skeleton({name: tuple(delta.shape) for name, delta in deltas.items()})
    config = dict(lora.pipeline.components[FAMILIES[lora.family].denoiser].config)
    model.model_config = SimpleNamespace(unet_config=_comfyui_config(lora.family, config))
    return model


def _comfyui_config(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What ComfyUI reads off a checkpoint of such a model."""
    if family in _UNETS:
        widths, layers = config["block_out_channels"], config["layers_per_block"]
        depths = config["transformer_layers_per_block"]
        depths = [depths] * len(widths) if isinstance(depths, int) else list(depths)
        lower = [
            d if "Cross" in kind else 0 for d, kind in zip(depths, config["down_block_types"], strict=True)
        ]
        return {
            "num_res_blocks": [layers] * len(widths),
            "channel_mult": [width // widths[0] for width in widths],
            "transformer_depth": [depth for depth in lower for _ in range(layers)],
            "transformer_depth_output": [depth for depth in lower for _ in range(layers + 1)],
            "transformer_depth_middle": depths[-1],
        }
    width = config.get("num_attention_heads", 0) * config.get("attention_head_dim", 0)
    if family == "sd3":
        depth = type(
            "Depth", (int,), {"__mul__": lambda self, other: width}
        )  # its width is 64 x its depth there
        return {"depth": depth(config["num_layers"]), "num_blocks": config["num_layers"]}
    if family == "flux":
        return {
            "depth": config["num_layers"],
            "depth_single_blocks": config["num_single_layers"],
            "hidden_size": width,
        }
    return {}


LOADERS: dict[str, Callable[[Meant, Path], tuple[Deltas, Deltas]]] = {
    "diffusers": in_diffusers,
    "PEFT": in_peft,
    "ComfyUI": in_comfyui,
    "kohya": in_kohya,
    "LyCORIS": in_lycoris,
}


def why_not(loader: str) -> str | None:
    """Why a loader cannot be run here; None where it can."""
    if loader == "ComfyUI":
        return checkout.why_not()
    if loader == "kohya":
        folder = os.environ.get(KOHYA_VARIABLE)
        there = folder and (Path(folder) / "networks" / "lora_flux.py").is_file()
        return None if there else f"{KOHYA_VARIABLE} names no checkout of sd-scripts"
    package = loader.lower()
    return None if importlib.util.find_spec(package) else f"{package} is not installed"


def row(loader: str, format: str) -> str | None:
    """The line of the table in docs/lora-files.md; None where the loader takes nothing of the format."""
    found = [taken(loader, format, family) for family in MODELS]
    if not any(one is not None and one.right for one in found):
        return None
    largest = max((one.difference for one in found if one is not None), default=0.0)
    cells = ["–" if one is None else str(one) for one in found]
    size = "0" if largest == 0 else f"{largest:.0e}".replace("e-0", "e-")
    return f"| {loader} | {format} | {' | '.join(cells)} | {size} |"


def main() -> None:
    """Print the table."""
    for loader in sys.argv[1:] or LOADERS:
        for format in FORMATS:
            if (line := row(loader, format)) is not None:
                print(line, flush=True)  # noqa: T201 - a program


if __name__ == "__main__":
    main()
