"""The blocks that repeat, compiled once and used for all of them."""

from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import nn

from sigmascope.pipeline.optimizing.circumstances import Circumstances
from sigmascope.pipeline.optimizing.kind import Considered, Kind
from sigmascope.pipeline.optimizing.plan import Choice, NotTaken
from sigmascope.pipeline.optimizing.subject import models_of
from sigmascope.probes.set_up import is_compiled, layerwise_casting

COMPILE: Final = "compile"
_FEWEST_GENERATIONS: Final = 5
"""Compiling blocks takes some ten to sixty seconds; what a generation gains is seconds."""


def consider_compile(found: Circumstances) -> Considered:
    """On an accelerator, where enough is generated for it to pay."""
    for name, model in found.subject.of_role("denoiser").items():
        yield _compile_model(found, name, model)


def apply_compile(pipeline: Any, choice: Choice) -> None:
    """Set each block to be compiled at its first call. Undone, blocks run as written; Dynamo keeps its cache."""
    model: Any = models_of(pipeline)[choice.component]
    model.compile_repeated_blocks(backend=choice.options["backend"])


def _compile_model(found: Circumstances, name: str, model: nn.Module) -> Choice | NotTaken:
    asked, backend = found.config.compile, found.config.compile_backend
    if asked is False:
        return NotTaken(COMPILE, name, "switched off")
    blocks = _blocks(model)
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


def _blocks(model: nn.Module) -> list[nn.Module]:
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


COMPILE_KIND: Final = Kind(COMPILE, consider_compile, apply_compile)
