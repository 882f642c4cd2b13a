"""Nineteen LoRA files that are not for the pipeline that loads them, and what diffusers makes of each."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.families.loras import State, as_kohya, modules_of

Edit = Callable[[State], State]
Load = Callable[[Any, Path], None]


def into_pipeline(pipeline: Any, path: Path) -> None:
    pipeline.load_lora_weights(str(path), adapter_name="style")


def into_adapter_loader(pipeline: Any, path: Path) -> None:
    pipeline.unet.load_lora_adapter(load_file(path), prefix=None)


def into_adapter_loader_by_default(pipeline: Any, path: Path) -> None:
    pipeline.unet.load_lora_adapter(load_file(path))


def renamed(old: str, new: str) -> Edit:
    return lambda state: {key.replace(old, new): value for key, value in state.items()}


def wider(state: State) -> State:
    return {key: torch.cat([value, value], 1) if "lora_A" in key else value for key, value in state.items()}


def flat_in_diffusers(state: State) -> State:
    """Kohya's form with the names that layers have in diffusers, which kohya's own files of DiTs never have."""
    ends = {"lora_A": "lora_down", "lora_B": "lora_up"}
    found: State = {}
    for key, value in state.items():
        name, end = key.removeprefix("transformer.").removesuffix(".weight").rsplit(".", 1)
        found[f"lora_unet_{name.replace('.', '_')}.{ends[end]}.weight"] = value
    return found


def with_alphas(state: State) -> State:
    return state | {f"{name}.alpha": torch.tensor(1.0) for name in modules_of(state)}


def with_deeper_blocks(state: State) -> State:
    old, new = "single_transformer_blocks.1.", "single_transformer_blocks.9."
    return state | {key.replace(old, new): value for key, value in state.items() if old in key}


def with_nan(state: State) -> State:
    first = next(iter(state))
    return state | {first: torch.full_like(state[first], torch.nan)}


@dataclass(frozen=True)
class Mismatch:
    """A file and how it is loaded.

    Attributes:
        made_for: The family whose modules are in the file.
        into: The family of the pipeline.
        finding: What the verdict on file and pipeline must find.
        says: Words of it.
        parts: Of the family that it is made for, that the file has modules of; its denoiser if there is none.
        edit: What is done to the tensors.
        load: How it is loaded.
        raises: What diffusers raises.
        loaded: On how many weights diffusers puts it.
        applied: What the verdict on what is loaded must find; None: all of the file is there.
        cut: How much of the file is left.
    """

    made_for: str
    into: str
    finding: str
    says: str = ""
    parts: tuple[str, ...] = ()
    edit: Edit = dict
    load: Load = into_pipeline
    raises: type[Exception] | None = None
    loaded: int = 0
    applied: str | None = "lora_not_loaded"
    cut: float = 1.0


MISMATCHES: dict[str, Mismatch] = {
    "another family, whose denoiser has another name": Mismatch(
        "flux", "sd15", "lora_matches_nothing", "None of the 50 modules"
    ),
    "another family, whose denoiser has the same name": Mismatch(
        "wan", "flux", "lora_matches_nothing", "another architecture", loaded=1, applied="lora_partly_loaded"
    ),
    "another family with many of the same names": Mismatch(
        "qwen_image", "flux", "lora_other_architecture", "Qwen-Image", loaded=20, applied="lora_partly_loaded"
    ),
    "SDXL for SD1.5": Mismatch("sdxl", "sd15", "lora_other_architecture", "SDXL", raises=RuntimeError),
    "kohya's names straight into the adapter loader": Mismatch(
        "sd15", "sd15", "lora_kohya_names", edit=as_kohya, load=into_adapter_loader, raises=IndexError
    ),
    "kohya's start before a DiT's names in diffusers": Mismatch(
        "flux",
        "flux",
        "lora_names_unread",
        "such as lora_unet_context_embedder.lora_down in a file for FLUX",
        edit=flat_in_diffusers,
        raises=ValueError,
    ),
    "kohya's start before PEFT's ends": Mismatch(
        "sd15",
        "sd15",
        "lora_names_unread",
        "such as lora_unet_conv_in.lora_A in a file",
        edit=renamed("unet.", "lora_unet_"),
        raises=ValueError,
    ),
    "the adapter loader's default prefix": Mismatch(
        "sd15", "sd15", "lora_adapter_prefix", 'prefix="unet"', load=into_adapter_loader_by_default
    ),
    "no prefix": Mismatch(
        "flux", "flux", "lora_part_unnamed", "begins with the part", edit=renamed("transformer.", "")
    ),
    "ComfyUI's prefix": Mismatch(
        "sd15", "sd15", "lora_comfyui_names", "diffusion_model.", edit=renamed("unet.", "diffusion_model.")
    ),
    "a text encoder that the pipeline has not": Mismatch(
        "sd15", "wan", "lora_matches_nothing", "None of the 12", parts=("text_encoder",)
    ),
    "wider layers": Mismatch(
        "flux", "flux", "lora_matches_nothing", "another shape", edit=wider, loaded=50, applied=None
    ),
    "transposed factors": Mismatch(
        "flux",
        "flux",
        "lora_matches_nothing",
        "some cannot be read, such as transformer.context_embedder (up is (2, 16) and down is (24, 2), of ranks 16 and 24: they "
        "look transposed)",
        edit=lambda state: {key: value.mT for key, value in state.items()},
        raises=RuntimeError,
        applied="lora_not_loaded",
    ),
    "a file that is cut off": Mismatch(
        "flux", "flux", "lora_unreadable", "truncated", cut=0.7, raises=OSError, applied="lora_unreadable"
    ),
    "alphas beside lora_A": Mismatch(
        "sd15", "sd15", "lora_alpha_refused", ".alpha tensors", edit=with_alphas, raises=ValueError
    ),
    "a whole difference beside factors": Mismatch(
        "flux",
        "flux",
        "lora_whole_differences",
        "drops it",
        edit=lambda state: state | {"transformer.transformer_blocks.0.attn.norm_q.diff": torch.zeros(8)},
        loaded=50,
        applied="lora_partly_loaded",
    ),
    "renamed blocks": Mismatch(
        "flux",
        "flux",
        "lora_unknown",
        "40 of 50",
        edit=renamed("transformer_blocks", "layers"),
        loaded=10,
        applied="lora_partly_loaded",
    ),
    "blocks that the model has not": Mismatch(
        "flux",
        "flux",
        "lora_block_missing",
        "single_transformer_blocks.9",
        edit=with_deeper_blocks,
        loaded=50,
        applied="lora_partly_loaded",
    ),
    "NaN": Mismatch("flux", "flux", "lora_not_finite", edit=with_nan, loaded=50, applied=None),
}
