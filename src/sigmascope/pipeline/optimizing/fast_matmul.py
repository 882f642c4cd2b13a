"""Faster products of float32, and convolution algorithms that are tried out: flags of the whole process."""

from collections.abc import Mapping
from typing import Any, Final

import torch

from sigmascope.pipeline.optimizing.circumstances import Circumstances
from sigmascope.pipeline.optimizing.kind import Considered, Kind, Undo
from sigmascope.pipeline.optimizing.plan import PIPELINE, Choice, NotTaken
from sigmascope.pipeline.optimizing.process_setting import ProcessSetting
from sigmascope.probes.reading import attempt

FAST_MATMUL: Final = "fast_matmul"
_TF32: Final = (8, 0)


def consider_fast_matmul(found: Circumstances) -> Considered:
    """TensorFloat-32 where weights stay in float32; cuDNN's trying where there are convolutions."""
    asked = found.config.fast_matmul
    if asked is False:
        yield NotTaken(FAST_MATMUL, PIPELINE, "switched off")
        return
    is_unet = found.subject.facts.architecture == "UNet"
    wide = torch.float32 in found.dtypes.values()
    if asked == "auto":
        refusal = found.why_not(
            FAST_MATMUL, PIPELINE, "precision" if wide else "rounding"
        ) or _tf32_gains_nothing(found, wide, is_unet)
        if refusal is not None:
            yield refusal
            return
    yield Choice(
        FAST_MATMUL,
        PIPELINE,
        'torch.set_float32_matmul_precision("high")' * wide
        + "; " * (wide and is_unet)
        + "torch.backends.cudnn.benchmark = True" * is_unet,
        "Some weights are in float32."
        if wide
        else "Its convolutions are of the same few sizes in every step.",
        "faster products where inputs of ten bits are enough; it holds for the whole process",
        "speed",
        "precision" if wide else "rounding",
        {"matmul": wide or not is_unet, "benchmark": is_unet},
    )


def apply_fast_matmul(pipeline: Any, choice: Choice) -> Undo:
    """Set the flags."""
    undo = _FLAGS.hold()
    if choice.options["matmul"]:
        torch.set_float32_matmul_precision("high")
    if choice.options["benchmark"]:
        torch.backends.cudnn.benchmark = True
    return undo


def _read() -> Mapping[str, Any]:
    """The flags. The precision has an old name for all and newer ones by backend, which may say what the old cannot."""
    return {
        "precision": attempt(torch.get_float32_matmul_precision).value or "highest",
        "by_backend": [getattr(backend, "fp32_precision", None) for backend in _BACKENDS],
        "benchmark": torch.backends.cudnn.benchmark,
    }


def _write(before: Mapping[str, Any]) -> None:
    torch.set_float32_matmul_precision(before["precision"])
    for backend, precision in zip(_BACKENDS, before["by_backend"], strict=True):
        if precision is not None:
            backend.fp32_precision = precision
    torch.backends.cudnn.benchmark = before["benchmark"]


def _tf32_gains_nothing(found: Circumstances, wide: bool, is_unet: bool) -> NotTaken | None:
    capability = found.hardware.capability
    if found.hardware.kind != "cuda" or (capability is not None and capability < _TF32):
        return NotTaken(FAST_MATMUL, PIPELINE, "this device has no TensorFloat-32")
    if not wide and not is_unet:
        return NotTaken(
            FAST_MATMUL, PIPELINE, "nothing in it computes in float32, and it has few convolutions"
        )
    return None


_BACKENDS: Final[tuple[Any, ...]] = (
    torch.backends.cuda.matmul,
    getattr(torch.backends.mkldnn, "matmul", None),
)
_FLAGS: Final = ProcessSetting(_read, _write)
FAST_MATMUL_KIND: Final = Kind(FAST_MATMUL, consider_fast_matmul, apply_fast_matmul)
