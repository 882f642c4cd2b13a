"""Faster kernels: torch.compile, TensorFloat-32 and cuDNN's benchmark, convolutions with channels last.

Blocks that repeat are compiled once for all of them. TensorFloat-32 makes products of float32 faster, and cuDNN's
benchmark tries out algorithms of convolution: these are flags of the whole process. Convolutions with channels last
lie as tensor cores read them.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import nn

from sigmascope.pipeline.optimizations.interface import Circumstances, Considered, Kind, ProcessSetting, Undo
from sigmascope.pipeline.pipeline_parts import models_of
from sigmascope.pipeline.plan import PIPELINE, Choice, NotTaken
from sigmascope.probes.pipelines import channels_last, is_compiled, layerwise_casting
from sigmascope.probes.reading import attempt

COMPILE: Final = "compile"
_FEWEST_GENERATIONS: Final = 5
"""Compiling blocks takes some ten to sixty seconds; what a generation gains is seconds."""
FAST_MATMUL: Final = "fast_matmul"
_TF32: Final = (8, 0)
"""The compute capability from which NVIDIA's devices have TensorFloat-32."""
_MATMUL_BACKENDS: Final[tuple[Any, ...]] = (
    torch.backends.cuda.matmul,
    getattr(torch.backends.mkldnn, "matmul", None),
)
CHANNELS_LAST: Final = "channels_last"


def consider_compile(found: Circumstances) -> Considered:
    """On an accelerator, where enough is generated for it to pay."""
    for name, model in found.subject.of_role("denoiser").items():
        yield _compile_model(found, name, model)


def _compile_model(found: Circumstances, name: str, model: nn.Module) -> Choice | NotTaken:
    asked, backend = found.config.compile, found.config.compile_backend
    if asked is False:
        return NotTaken(COMPILE, name, "switched off")
    blocks = _repeated_blocks(model)
    reason = None
    if not blocks:
        reason = f"{type(model).__name__} does not tell which of its blocks repeat"
    elif is_compiled(model):
        reason = "it is compiled already"
    elif asked == "auto":
        refusal = found.why_not(COMPILE, name, "rounding")
        if refusal is not None:
            return refusal
        reason = _compiling_gains_nothing(found, name, model, backend)
    if reason is not None:
        return NotTaken(COMPILE, name, reason)
    classes = ", ".join(sorted({type(block).__name__ for block in blocks}))
    return Choice(
        COMPILE,
        name,
        f'pipe.{name}.compile_repeated_blocks(backend="{backend}")',
        f"{len(blocks)} blocks of {classes} are compiled once for each class.",
        f"faster steps after a first one that compiles; {found.config.generations} generations are planned",
        "speed",
        "rounding",
        {"backend": backend},
        {"blocks": len(blocks), "generations": found.config.generations},
    )


def _repeated_blocks(model: nn.Module) -> list[nn.Module]:
    repeated = getattr(model, "_repeated_blocks", None) or ()
    return [part for part in model.modules() if type(part).__name__ in repeated]


def _compiling_gains_nothing(found: Circumstances, name: str, model: nn.Module, backend: str) -> str | None:
    if found.config.generations < _FEWEST_GENERATIONS:
        return f"compiling takes longer than {found.config.generations} generations gain"
    part = found.subject.facts.components.get(name)
    is_moved = part is not None and part.offload in ("group", "sequential")
    if is_moved or any(one.options.get("how") == "group" for one in found.chosen):
        return "layers move in and out, and waiting for them is what takes the time"
    if found.has("layerwise_casting") or layerwise_casting(model):
        return "the hooks that widen each layer make torch.compile compile again and again, up to its limit"
    if backend == "inductor" and torch.version.cuda is not None and find_spec("triton") is None:
        return "Inductor needs Triton, which is not installed"
    return None


def apply_compile(pipeline: Any, choice: Choice) -> None:
    """Set each block to be compiled at its first call. Undone, blocks run as written; Dynamo keeps its cache."""
    model: Any = models_of(pipeline)[choice.component]
    model.compile_repeated_blocks(backend=choice.options["backend"])


COMPILE_KIND: Final = Kind(COMPILE, consider_compile, apply_compile)


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


def _tf32_gains_nothing(found: Circumstances, wide: bool, is_unet: bool) -> NotTaken | None:
    capability = found.hardware.capability
    if found.hardware.kind != "cuda" or (capability is not None and capability < _TF32):
        return NotTaken(FAST_MATMUL, PIPELINE, "this device has no TensorFloat-32")
    if not wide and not is_unet:
        return NotTaken(
            FAST_MATMUL, PIPELINE, "nothing in it computes in float32, and it has few convolutions"
        )
    return None


def apply_fast_matmul(pipeline: Any, choice: Choice) -> Undo:
    """Set the flags."""
    undo = _PROCESS_FLAGS.hold()
    if choice.options["matmul"]:
        torch.set_float32_matmul_precision("high")
    if choice.options["benchmark"]:
        torch.backends.cudnn.benchmark = True
    return undo


def _read_flags() -> Mapping[str, Any]:
    """The flags. The precision has an old name for all and newer ones by backend, which may say what the old cannot."""
    return {
        "precision": attempt(torch.get_float32_matmul_precision).value or "highest",
        "by_backend": [getattr(backend, "fp32_precision", None) for backend in _MATMUL_BACKENDS],
        "benchmark": torch.backends.cudnn.benchmark,
    }


def _write_flags(before: Mapping[str, Any]) -> None:
    torch.set_float32_matmul_precision(before["precision"])
    for backend, precision in zip(_MATMUL_BACKENDS, before["by_backend"], strict=True):
        if precision is not None:
            backend.fp32_precision = precision
    torch.backends.cudnn.benchmark = before["benchmark"]


_PROCESS_FLAGS: Final = ProcessSetting(_read_flags, _write_flags)
FAST_MATMUL_KIND: Final = Kind(FAST_MATMUL, consider_fast_matmul, apply_fast_matmul)


def consider_channels_last(found: Circumstances) -> Considered:
    """For UNets, and VAEs of images, in half precision on NVIDIA's devices."""
    parts = found.subject.of_role("denoiser") | found.subject.of_role("vae")
    for name, model in parts.items():
        if channels_last(model) is not None:
            yield _channels_last_of(found, name, model)


def _channels_last_of(found: Circumstances, name: str, model: nn.Module) -> Choice | NotTaken:
    asked = found.config.channels_last
    if asked is False:
        return NotTaken(CHANNELS_LAST, name, "switched off")
    if channels_last(model):
        return NotTaken(CHANNELS_LAST, name, "they lie so already")
    if any(parameter.dim() == 5 for parameter in model.parameters()):
        return NotTaken(
            CHANNELS_LAST, name, "it has convolutions over time as well, for which this is no format"
        )
    if asked == "auto":
        refusal = found.why_not(CHANNELS_LAST, name, "rounding") or _channels_last_gains_nothing(found, name)
        if refusal is not None:
            return refusal
    return Choice(
        CHANNELS_LAST,
        name,
        f"pipe.{name}.to(memory_format=torch.channels_last)",
        "Its convolutions run in half precision." if asked == "auto" else "Asked for.",
        "time in convolutions, which need not be laid out anew",
        "speed",
        "rounding",
    )


def _channels_last_gains_nothing(found: Circumstances, name: str) -> NotTaken | None:
    if found.hardware.kind != "cuda":
        return NotTaken(CHANNELS_LAST, name, "what it gains on this device is not known")
    if found.dtypes.get(name) not in (torch.float16, torch.bfloat16):
        return NotTaken(CHANNELS_LAST, name, "it gains in half precision, and this is not")
    return None


def apply_channels_last(pipeline: Any, choice: Choice) -> None:
    """Lay the kernels out anew; what flows through takes their format."""
    models_of(pipeline)[choice.component].to(memory_format=torch.channels_last)  # type: ignore[call-overload]


CHANNELS_LAST_KIND: Final = Kind(
    CHANNELS_LAST, consider_channels_last, apply_channels_last, frozenset({"layout"})
)
