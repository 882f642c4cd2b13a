"""Changes to plant in a Stable Diffusion pipeline or its call, and the words by which a comparison names each."""

import copy
import ctypes
import functools
import gc
import mmap
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tests.families.group_offload import needs_group_offload
from tests.families.pipelines import PROMPT
from torch import Tensor, nn


@dataclass(frozen=True)
class Change:
    """Something that is done to the pipeline, or arguments for `generate`; some show in the first call after it alone."""

    words: str
    act: Callable[[Any], object] = lambda pipe: None
    call: Mapping[str, Any] = field(default_factory=dict)
    in_first_call: bool = False


def to_bfloat16(pipe: Any) -> None:
    for part in (pipe.unet, pipe.vae, pipe.text_encoder):
        part.to(torch.bfloat16)


def with_euler(pipe: Any) -> None:
    from diffusers import EulerDiscreteScheduler

    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)


def with_lora(pipe: Any, strength: float = 1.0) -> None:
    from peft import LoraConfig

    torch.manual_seed(0)
    pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False), "style")
    pipe.unet.set_adapters("style", strength)


def lora_file(folder: Path, seed: int, name: str = "style.safetensors") -> Path:
    """A LoRA for the denoiser's self-attention, of this content."""
    from safetensors.torch import save_file
    from tests.families.pipelines import make_pipeline

    generator = torch.Generator().manual_seed(seed)
    factors: dict[str, Tensor] = {}
    for path, layer in make_pipeline("sd15").unet.named_modules():
        if path.endswith("attn1.to_q"):
            rows, columns = layer.weight.shape
            factors[f"unet.{path}.lora_A.weight"] = torch.randn(2, columns, generator=generator)
            factors[f"unet.{path}.lora_B.weight"] = torch.randn(rows, 2, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(factors, folder / name)
    return folder / name


def with_tuned_encoder(pipe: Any) -> None:
    """Another text encoder of the same class, size and type: fine-tuned, all but its embeddings."""
    tuned = copy.deepcopy(pipe.text_encoder)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in tuned.named_parameters():
            if "embedding" not in name:
                weight.mul_(1 + 1e-3 * torch.randn(weight.shape, generator=generator))
    pipe.register_modules(text_encoder=tuned)


def offload_to_disk(pipe: Any) -> None:
    """Keep the denoiser in files, from which each layer is read when it is called."""
    needs_group_offload()
    folder = tempfile.mkdtemp()
    weakref.finalize(pipe, shutil.rmtree, folder, ignore_errors=True)
    cpu = torch.device("cpu")
    pipe.unet.enable_group_offload(
        onload_device=cpu, offload_device=cpu, offload_type="leaf_level", offload_to_disk_path=folder
    )


def compile_anew(pipe: Any) -> None:
    """Let the next call of the denoiser compile it."""
    torch.compiler.reset()
    pipe.unet.compile(backend="aot_eager")


def collect_inside(pipe: Any) -> None:
    """Let a part of the denoiser have all garbage looked for, beside a heap of many objects."""
    pipe.heap = [[] for _ in range(50_000)]

    def collect(*_call: object) -> None:
        for _ in range(4):
            gc.collect()

    pipe.unet.mid_block.register_forward_hook(collect)


_MADV_RANDOM, _MADV_DONTNEED = 1, 4
_APART = 1 << 17  # bytes: pages next to one that is read are mapped with it


class DroppedPages:
    """Puts a model's weights into a file, far from each other, maps that, and lets each call read them from the disk.

    Attributes:
        works: Whether the system can be made to forget pages here: not of files that are in memory alone.
    """

    def __init__(self, model: nn.Module) -> None:
        from safetensors.torch import load_file, save_file

        folder = tempfile.mkdtemp()
        weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
        self._file = Path(folder, "weights.safetensors")
        weights = list(model.parameters())
        places = [0]
        for weight in weights:
            places.append(places[-1] + -(-weight.nbytes // _APART) * _APART // weight.itemsize)
        content = torch.zeros(places[-1])
        for place, weight in zip(places, weights, strict=False):
            content[place : place + weight.numel()] = weight.detach().flatten()
        save_file({"content": content}, self._file)
        with self._file.open("rb+") as written:
            os.fsync(written.fileno())
        self._mapped = load_file(self._file)["content"]
        for place, weight in zip(places, weights, strict=False):
            weight.data = self._mapped[place : place + weight.numel()].view(weight.shape)
        self.works = self._are_read_anew()
        model.register_forward_pre_hook(lambda *_: self.drop())

    def drop(self) -> None:
        """Forget the pages, and let each be read by itself when it is asked for."""
        start = self._mapped.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        length = self._mapped.data_ptr() + self._mapped.nbytes - start
        for advice in (_MADV_DONTNEED, _MADV_RANDOM):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)
        with self._file.open("rb") as mapped:
            os.posix_fadvise(mapped.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _are_read_anew(self) -> bool:
        import resource

        self.drop()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        self._mapped.sum()
        return resource.getrusage(resource.RUSAGE_SELF).ru_majflt > before + 10


@contextmanager
def slowed(owner: type, name: str, seconds: float) -> Iterator[None]:
    """A method of a class that takes longer."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return original(*args, **kwargs)

    setattr(owner, name, slow)
    try:
        yield
    finally:
        setattr(owner, name, original)


CHANGES: dict[str, Change] = {
    "prompt": Change(f"prompt {PROMPT} → a dog", call={"prompt": "a dog"}),
    "negative prompt": Change(
        "negative_prompt blurry, low quality → blurred", call={"negative_prompt": "blurred"}
    ),
    "seed": Change("seed 0 → 4", call={"seed": 4}),
    "guidance": Change("guidance_scale 7.5 → 3.0", call={"guidance_scale": 3.0}),
    "batch": Change("batch_size 1 → 2", call={"num_images_per_prompt": 2}),
    "eta": Change("eta 0.0 → 0.5", call={"eta": 0.5}),
    "dtype": Change("text_encoder dtype float32 → bfloat16", to_bfloat16),
    "attention slicing": Change(
        "attention processors AttnProcessor2_0 → SlicedAttnProcessor",
        lambda pipe: pipe.enable_attention_slicing(),
    ),
    "VAE tiles": Change("vae tiling False → True", lambda pipe: pipe.vae.enable_tiling()),
    "scheduler": Change("scheduler DDIMScheduler → EulerDiscreteScheduler", with_euler),
    "LoRA": Change("LoRAs none → unet.style", with_lora),
    "text encoder replaced": Change("text_encoder weights", with_tuned_encoder),
    "offloading to disk": Change("unet offload none → group", offload_to_disk),
    "first run compiles": Change("unet compiled False → True", compile_anew, in_first_call=True),
    "garbage collection": Change("full garbage collections", collect_inside),
}
"""Those that show in any call; the number of steps and the size of the picture depend on what the call had before."""
