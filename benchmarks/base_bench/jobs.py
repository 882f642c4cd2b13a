"""What runs in processes of its own: the plain way to make a base, and loading one.

python jobs.py plain BACKBONE CONFIG FOLDER DTYPE    write FOLDER/plain.ckpt and FOLDER/plain.safetensors
python jobs.py wrap CKPT TARGET LAYOUT               the same weights under another of SPEC's layouts
python jobs.py load CHECKPOINT CONFIG DTYPE          load a model and print what it is, as JSON
python jobs.py imports                               load nothing: what the libraries take by themselves
"""

import json
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import save_file
from torch import nn

from sigmascope.lbm.config import load_config
from sigmascope.lbm.model import build_lbm, load_lbm

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}


def plain(backbone: str, config: str, folder: str, dtype: str) -> None:
    """Load both models with diffusers, apply the rule to their state dicts, save them whole."""
    wanted = build_lbm(load_config(config), device="meta").state_dict()
    options = {"torch_dtype": DTYPES[dtype], "local_files_only": True}
    unet = UNet2DConditionModel.from_pretrained(f"{backbone}/unet", **options)
    vae = AutoencoderKL.from_pretrained(f"{backbone}/vae", **options)
    state = {f"denoiser.{key}": weight for key, weight in unet.state_dict().items()}
    for key in [key for key in state if ".add_embedding." in key]:
        del state[key]
    for key, weight in state.items():
        shape = wanted[key].shape
        if weight.shape != shape:
            adapted = torch.zeros(shape, dtype=weight.dtype)
            rows, columns = min(shape[0], weight.shape[0]), min(shape[1], weight.shape[1])
            adapted[:rows, :columns] = weight[:rows, :columns]
            state[key] = adapted
    state |= {f"vae.vae_model.{key}": weight for key, weight in vae.state_dict().items()}
    state["num_iterations"] = torch.tensor(0.0)
    torch.save(state, f"{folder}/plain.ckpt")
    save_file(state, f"{folder}/plain.safetensors")


def wrap(checkpoint: str, target: str, layout: str) -> None:
    """Save a bare checkpoint's weights again under `model_state_dict` or as Lightning does."""
    state = torch.load(checkpoint, weights_only=True, mmap=True)
    if layout == "lightning":
        network = {f"lpips_loss.net.lin{n}.weight": torch.rand(64, 512, 3, 3) for n in range(13)}
        state = {f"model.{key}": weight for key, weight in (state | network).items()}
        torch.save({"state_dict": state, "epoch": 3, "global_step": 20_000}, target)
    else:
        torch.save({"model_state_dict": state, "step": 20_000}, target)


def load(checkpoint: str, config: str, dtype: str) -> None:
    """Load a model; say how long it took and how many layers a LoRA could hold."""
    begin = time.perf_counter()
    model = load_lbm(checkpoint, config, dtype=DTYPES[dtype])
    seconds = time.perf_counter() - begin
    modules = sum(isinstance(module, nn.Linear | nn.Conv2d) for module in model.denoiser.modules())
    tensors = list(model.state_dict().values())
    held = sum(tensor.nbytes for tensor in tensors)
    print(json.dumps({"seconds": seconds, "modules": modules, "bytes": held, "tensors": len(tensors)}))


def whole(checkpoint: str) -> None:
    """Read a checkpoint the plain way, not mapped, and check the archive's sums."""
    state = torch.load(checkpoint, weights_only=True)
    with zipfile.ZipFile(checkpoint) as archive:
        damaged = archive.testzip()
    print(json.dumps({"tensors": len(state), "damaged": damaged, "bytes": Path(checkpoint).stat().st_size}))


def imports() -> None:
    """Do nothing."""


JOBS: dict[str, Callable[..., None]] = {
    "plain": plain,
    "wrap": wrap,
    "load": load,
    "whole": whole,
    "imports": imports,
}

if __name__ == "__main__":
    JOBS[sys.argv[1]](*sys.argv[2:])
