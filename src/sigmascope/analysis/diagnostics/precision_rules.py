"""Rules on number formats and memory layout."""

from collections.abc import Iterator, Mapping
from typing import Final

from sigmascope import units
from sigmascope.analysis.diagnostics.case import Case
from sigmascope.records.arithmetic import mib
from sigmascope.records.finding import Finding
from sigmascope.records.pipeline import ComponentFacts

_BF16_CAPABILITY: Final = (8, 0)
"""NVIDIA's devices from here on multiply bfloat16 on their tensor cores (CUDA C++ Programming Guide, table of features)."""

_FLOAT32, _HALF = "float32", frozenset({"float16", "bfloat16"})


def float32_on_an_accelerator(case: Case) -> Iterator[Finding]:
    """Denoisers and text encoders in float32 take twice the memory of bfloat16, and more time."""
    for role in ("denoiser", "text_encoder"):
        for name, part in case.components(role).items():
            device = _accelerator_of(part)
            if device is None or part.module is None or _main(part.module.dtypes) != _FLOAT32:
                continue
            dtype = "bfloat16" if _multiplies_bfloat16(case, device) else "float16"
            nbytes = part.module.nbytes
            half = None if nbytes is None else nbytes // 2
            yield Finding(
                id="precision.float32_on_accelerator",
                severity="warning",
                message=f"{name} ({part.class_name}) is in float32 on {device}: {units.mib(nbytes)} MB of weights that would "
                f"be {units.mib(half)} MB in {dtype}, which the device also multiplies faster.",
                evidence={"component": name, "device": device, "mb": mib(nbytes), "saved_mb": mib(half)},
                advice=f"Load it with torch_dtype=torch.{dtype}.",
            )


def float32_vae(case: Case) -> Iterator[Finding]:
    """A VAE in float32 beside a denoiser in half precision: on purpose for some, a slip for others."""
    denoisers = [part.module for part in case.components("denoiser").values() if part.module is not None]
    if not any(_main(module.dtypes) in _HALF for module in denoisers):
        return
    for name, part in case.components("vae").items():
        device = _accelerator_of(part)
        if part.module is None or device is None or _main(part.module.dtypes) != _FLOAT32:
            continue
        meant = part.config.get("force_upcast") is True
        yield Finding(
            id="precision.float32_vae",
            severity="info" if meant else "warning",
            message=f"{name} ({part.class_name}) runs in float32 beside a denoiser in half precision"
            + (": its configuration asks for that, since it overflows in float16." if meant else "."),
            evidence={"component": name, "force_upcast": meant, "mb": mib(part.module.nbytes)},
            advice="bfloat16 has float32's range and takes half of its memory: try vae.to(torch.bfloat16), or a VAE that "
            "was mended for float16 (madebyollin/sdxl-vae-fp16-fix for SDXL), and compare the images.",
        )


def convolutions_not_channels_last(case: Case) -> Iterator[Finding]:
    """Half-precision convolutions on tensor cores are faster with channels last."""
    for name, part in case.components("denoiser").items():
        module, device = part.module, _accelerator_of(part)
        if part.channels_last is not False or module is None or case.pipeline is None:
            continue
        if case.pipeline.architecture != "UNet" or device is None or not device.startswith("cuda"):
            continue
        if _main(module.dtypes) in _HALF:
            yield Finding(
                id="precision.not_channels_last",
                severity="info",
                message=f"{name} ({part.class_name}) computes its convolutions in half precision, and its weights do not "
                "lie channels-last.",
                evidence={"component": name, "device": device},
                advice=f"Try pipe.{name}.to(memory_format=torch.channels_last) and compare the step times.",
            )


def _accelerator_of(part: ComponentFacts) -> str | None:
    """The device of most of its weights, unless that is the CPU."""
    device = None if part.module is None else _main(part.module.devices)
    return None if device in (None, "cpu", "meta") else device


def _main(counts: Mapping[str, int]) -> str | None:
    """What most elements are of; a dtype without "torch.", which records from elsewhere may have."""
    return max(counts, key=lambda name: counts[name]).removeprefix("torch.") if counts else None


def _multiplies_bfloat16(case: Case, device: str) -> bool:
    """Whether its tensor cores know bfloat16; unknown counts as yes."""
    capability = next((one.compute_capability for one in case.accelerators() if one.device == device), None)
    if capability is None:
        return True
    parts = capability.split(".")
    return not all(part.isdigit() for part in parts) or tuple(map(int, parts)) >= _BF16_CAPABILITY


PRECISION_RULES = (float32_on_an_accelerator, float32_vae, convolutions_not_channels_last)
