"""Small sound files of every format, to be damaged: made by safetensors, PyTorch, Pillow, tarfile and our own writers."""

import io
import json
import shutil
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

import sigmascope
from sigmascope.lora.convert import convert_lora
from sigmascope.lora.extract import ExtractOptions, extract_lora
from sigmascope.monitor.recorder import Recorder

State = dict[str, Tensor]

LAYERS = {
    "denoiser.conv_in": (8, 4, 3, 3),
    "denoiser.time_embedding.linear_1": (16, 8),
    "denoiser.down_blocks.1.attentions.0.proj_in": (16, 16),
    "denoiser.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q": (16, 16),
    "denoiser.mid_block.resnets.0.conv_shortcut": (16, 8, 1, 1),
}
"""Of the small model, with the shapes of their weights."""


@dataclass(frozen=True)
class Specimen:
    """A sound file.

    Attributes:
        family: Which functions are for it.
        file: Its name; the file that is damaged.
        folder: Holds it, and what such functions take beside it.
    """

    family: str
    file: str
    folder: Path


def make_specimens(folder: Path) -> list[Specimen]:
    """Make them all, each in a folder of its own."""
    folder.mkdir(exist_ok=True)
    models, loras = _models(folder / "models"), folder / "loras"
    loras.mkdir()
    specimens: list[Specimen] = []

    def add(family: str, name: str, make: Callable[[Path], object], beside: Sequence[Path] = ()) -> None:
        own = folder / f"{len(specimens)}-{family}"
        own.mkdir()
        make(own / name)
        for path in beside:
            shutil.copy(path, own / path.name)
        specimens.append(Specimen(family, name, own))

    beside = [*models, *_other_lora(models, loras)]
    for form in ("native", "kohya", "peft", "comfyui"):
        add("lora", "in.safetensors", partial(_converted, beside[-1], form=form), beside)
    for made in (_loha, _lokr, _tucker, _dora, _whole):
        add("lora", "in.safetensors", partial(_saved, made), beside)
    add(
        "lora", "in.pt", lambda path: torch.save(_kohya(), path, _use_new_zipfile_serialization=False), beside
    )
    state = _state(0)
    add("weights", "in.safetensors", lambda path: save_file(state, path, {"format": "pt"}), beside)
    add("weights", "in.safetensors", lambda path: save_file(_narrow(state), path), beside)
    add("weights", "in.ckpt", lambda path: torch.save(state, path), beside)
    add("weights", "in.ckpt", lambda path: torch.save(_lightning(state), path), beside)
    add(
        "weights",
        "in.pt",
        lambda path: torch.save(state, path, _use_new_zipfile_serialization=False),
        beside,
    )
    add("weights", "in.gguf", _gguf, beside)
    add("index", "in.safetensors.index.json", lambda path: _index(path, models[0]), beside)
    _run(folder / "other.json")
    old = Path(__file__).parents[1] / "records/data/run_schema_2.json"
    for make in (_run, lambda path: shutil.copy(old, path)):
        add("run", "in.json", make, [folder / "other.json"])
    add("dump", "in.safetensors", _dump)
    shutil.copy(specimens[-1].folder / "in.safetensors", specimens[-1].folder / "other.safetensors")
    add("dump folder", "index.jsonl", _dump_folder)
    _pictures(add)
    add("shard", "in.tar", lambda path: _shard(path, "w"))
    add("shard", "in.tar.gz", lambda path: _shard(path, "w:gz"))
    root = Path(sigmascope.__file__).parents[2]
    add(
        "config",
        "in.yaml",
        lambda path: shutil.copy(root / "src/sigmascope/lbm/pocket/weights/config.yaml", path),
    )
    add(
        "config",
        "in.yaml",
        lambda path: shutil.copy(root / "examples/train_pocket_lora/everything.yaml", path),
    )
    return specimens


def _state(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    state = {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in LAYERS.items()}
    state["denoiser.conv_norm_out.weight"] = torch.randn(8, generator=generator)
    state["vae.vae_model.encoder.conv_in.weight"] = torch.ones(8, 3, 3, 3)
    return state


def _models(folder: Path) -> list[Path]:
    """A base, and a tuned model that differs by a matrix of rank 2 in each layer."""
    folder.mkdir()
    base, tuned = _state(0), _state(0)
    generator = torch.Generator().manual_seed(1)
    for name, shape in LAYERS.items():
        inner = int(np.prod(shape[1:]))
        left, right = (
            torch.randn(shape[0], 2, generator=generator),
            torch.randn(2, inner, generator=generator),
        )
        tuned[f"{name}.weight"] += 0.05 * (left @ right).reshape(shape)
    save_file(base, folder / "base.safetensors")
    save_file(tuned, folder / "tuned.safetensors")
    return [folder / "base.safetensors", folder / "tuned.safetensors"]


def _other_lora(models: Sequence[Path], folder: Path) -> list[Path]:
    options = ExtractOptions(rank=2, conv_rank=2, save_precision="float", format="native")
    base, tuned = models
    extract_lora(base, tuned, folder / "other.safetensors", options)
    return [folder / "other.safetensors"]


def _converted(lora: Path, target: Path, *, form: str) -> None:
    if form != "comfyui":
        convert_lora(lora, target, form)
        return
    name = "diffusion_model.input_blocks.4.1.proj_in"  # such files are named as the original models are
    save_file({f"{name}.{end}": tensor for end, tensor in _pair(16, 16).items()}, target)


def _saved(make: Callable[[], State], target: Path) -> None:
    save_file(make(), target)


def _pair(rows: int, columns: int, rank: int = 2) -> State:
    return {
        "lora_up.weight": torch.randn(rows, rank),
        "lora_down.weight": torch.randn(rank, columns),
        "alpha": torch.tensor(1.0),
    }


def _kohya() -> State:
    module = "lora_unet_down_blocks_1_attentions_0_proj_in"
    return {f"{module}.{end}": tensor for end, tensor in _pair(16, 16).items()}


def _named(parts: State) -> State:
    return {f"denoiser.down_blocks.1.attentions.0.proj_in.{end}": tensor for end, tensor in parts.items()}


def _loha() -> State:
    return _named(
        {
            **{f"hada_w{side}_a": torch.randn(16, 2) for side in (1, 2)},
            **{f"hada_w{side}_b": torch.randn(2, 16) for side in (1, 2)},
            "alpha": torch.tensor(1.0),
        }
    )


def _lokr() -> State:
    parts = {"lokr_w1": torch.randn(4, 4), "lokr_w2_a": torch.randn(4, 2), "lokr_w2_b": torch.randn(2, 4)}
    return _named({**parts, "alpha": torch.tensor(1.0)})


def _tucker() -> State:
    parts = {
        "lora_up.weight": torch.randn(8, 2, 1, 1),
        "lora_mid.weight": torch.randn(2, 2, 3, 3),
        "lora_down.weight": torch.randn(2, 4, 1, 1),
        "alpha": torch.tensor(2.0),
    }
    return {f"denoiser.conv_in.{end}": tensor for end, tensor in parts.items()}


def _dora() -> State:
    return _named({**_pair(16, 16), "dora_scale": torch.rand(16, 1) + 1})


def _whole() -> State:
    return _named({"diff": torch.randn(16, 16), "diff_b": torch.randn(16)}) | {
        f"denoiser.time_embedding.linear_1.{end}": tensor for end, tensor in _pair(16, 8).items()
    }


def _narrow(state: State) -> State:
    """In half precision, in bfloat16 and in float8 with a scale."""
    kinds = (torch.float16, torch.bfloat16, torch.float64)
    made = {name: tensor.to(kinds[number % 3]) for number, (name, tensor) in enumerate(state.items())}
    name = "denoiser.down_blocks.1.attentions.0.proj_in"
    made[f"{name}.weight"] = state[f"{name}.weight"].to(torch.float8_e4m3fn)
    made[f"{name}.scale_weight"] = torch.tensor(0.5)
    made["scaled_fp8"] = torch.zeros(2).to(torch.float8_e4m3fn)
    return made


def _lightning(state: State) -> dict[str, Any]:
    return {"state_dict": {f"model.{name}": tensor for name, tensor in state.items()}, "epoch": 3}


def _gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "flux")
    writer.add_array("comfy.gguf.orig_shape.blocks.0.weight", (4, 16, 2, 2))
    values = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("blocks.0.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("blocks.1.weight", values)
    writer.add_tensor("blocks.1.bias", values[0].astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _index(path: Path, model: Path) -> None:
    names = list(_state(0))
    text = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, model.name)}
    path.write_text(json.dumps(text))


def _run(path: Path) -> None:
    recorder = Recorder(name="chaos", sample_hz=None)
    with recorder.stage("denoising") as stage:
        stage.fact("prompt", "a cat")
        stage.fact("nan", float("nan"))
        for _ in range(3):
            with recorder.step():
                torch.ones(100)
    with recorder.stage("decoding"), recorder.stage("tile"):
        torch.ones(1000)
    recorder.run().save(path)


def _conditioning(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    embeds = torch.randn(1, 7, 8, generator=generator)
    return [[embeds, {"pooled_output": embeds[:, 0].half(), "scale": 2.0}]], {"latent": embeds.bfloat16()}


def _dump(path: Path) -> None:
    sigmascope.save_tensors(path, _conditioning(0), prompt="a cat", encoder="clip", guidance=3.5)


def _dump_folder(path: Path) -> None:
    dumps = sigmascope.TensorDumps(path.parent, run_id="r")
    for number in range(3):
        dumps.save(f"step {number}", _conditioning(number))


def _pixels(width: int = 24, height: int = 16) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def _pictures(add: Callable[..., None]) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    modes = {
        "in.png": ("RGB", "RGBA", "P", "L", "I;16"),
        "in.jpg": ("RGB", "CMYK"),
        "in.webp": ("RGB", "RGBA"),
    }
    for name, wanted in modes.items():
        for mode in wanted:
            image = _pixels().convert("I").convert("I;16") if mode == "I;16" else _pixels().convert(mode)
            add("picture", name, lambda path, image=image: image.save(path, exif=turned))
    add("picture", "in.tif", lambda path: _pixels().save(path))
    add("picture", "in.bmp", lambda path: _pixels().save(path))


def _shard(path: Path, mode: Literal["w", "w:gz"]) -> None:
    with tarfile.open(path, mode) as tar:
        for number in range(3):
            for role in ("source", "target"):
                picture = io.BytesIO()
                _pixels(64, 64).save(picture, format="PNG")
                info = tarfile.TarInfo(f"{number:04d}.{role}.png")
                info.size = picture.tell()
                picture.seek(0)
                tar.addfile(info, picture)
