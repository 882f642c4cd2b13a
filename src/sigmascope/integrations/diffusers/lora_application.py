"""LoRAs loaded, weighted, merged and taken off again, each with what it did to the models."""

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from torch import nn

from sigmascope.files import short_path
from sigmascope.integrations.diffusers.denoising import denoisers_of
from sigmascope.integrations.diffusers.hooks import After, Arguments, Keywords
from sigmascope.integrations.diffusers.watch_session import Observer, WatchedParts, take_apart
from sigmascope.monitor.recorder import LiveStage
from sigmascope.monitor.workflow import in_short
from sigmascope.probes.reading import keeping_words
from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline

STAGE: Final = "lora_application"
METHODS: Final = (
    "load_lora_weights",
    "unload_lora_weights",
    "fuse_lora",
    "unfuse_lora",
    "set_adapters",
    "enable_lora",
    "disable_lora",
    "delete_adapters",
)
_MOST_BYTES: Final = 2**30
"""Up to so much, the weights that a LoRA changes are read before and after; reading more would be felt."""


class LoraObserver(Observer):
    """A stage for each of `METHODS`, with the analysis of what it did to the models."""

    name: ClassVar[str] = "lora"

    def attach_class(self, kind: type) -> None:
        """Hear the methods of pipelines."""
        if not hasattr(kind, "_call_impl"):
            for method in METHODS:
                self.hook_class(kind, method, functools.partial(self._before, method))

    def attach(self, parts: WatchedParts) -> None:
        """Hear the same methods, and their own, of denoisers."""
        for _, denoiser in denoisers_of(parts):
            for method in ("load_lora_adapter", *METHODS):
                self.hook_method(denoiser, method, functools.partial(self._before, method))

    def _before(self, method: str, target: object, args: Arguments, kwargs: Keywords) -> After | None:
        is_model = isinstance(target, nn.Module)
        stack = self.session.stack_here(None if is_model else target)
        if stack is None or stack.is_in(STAGE):
            return None
        guard = self.guard
        path = lora_path(args, kwargs) if method.startswith("load_") else None
        before, _ = guard.read("watch.lora", lambda: Models(target))
        baseline = None
        if before is not None:
            keys = before.keys_to_read(path)
            baseline, _ = guard.read(
                "watch.lora", lambda: capture_lora_baseline(before.denoiser, before.encoders, path, keys=keys)
            )
        del before
        stage = stack.enter(STAGE)

        def after(result: object, error: BaseException | None) -> None:
            stack.leave(stage, error)
            stage.fact("method", method)
            if path is not None:
                stage.fact("file", short_path(path))
            with keeping_words(guard.keeps_words):
                self._analyse(stage, target, baseline, error)

        return after

    def _analyse(self, stage: LiveStage, target: object, baseline: Any, error: BaseException | None) -> None:
        models = Models(target)
        record = stage.record()
        analysis = analyze_lora_application_results(
            baseline,
            models.denoiser,
            models.encoders,
            target,
            elapsed_time=record.seconds,
            peak_memory=record.peak,
            error=error,
        )
        stage.fact(STAGE, in_short(analysis))


class Models:
    """The denoiser (or several by name) and text encoders of a pipeline, or a denoiser alone.

    Args:
        target: What a LoRA is put on.
    """

    def __init__(self, target: object) -> None:
        parts = take_apart(target)
        denoisers: dict[str, object] = dict(denoisers_of(parts)) or dict(parts.components)
        self.denoiser: object = next(iter(denoisers.values())) if len(denoisers) == 1 else denoisers
        self.encoders: Mapping[str, object] | None = dict(parts.of_role("text_encoder")) or None
        modules = [part.module for part in parts.facts.components.values()]
        self._nbytes = sum(module.nbytes or 0 for module in modules if module is not None)
        self._devices = {device for module in modules if module is not None for device in module.devices}

    def keys_to_read(self, path: str | None) -> Literal["lora", "none"]:
        """Whose contents to compare: those that the file changes, or none where that would take long."""
        small = self._nbytes <= _MOST_BYTES and self._devices <= {"cpu"}
        return "lora" if small and path is not None else "none"


def lora_path(args: Arguments, kwargs: Keywords) -> str | None:
    """The local file that a loader is given; None for a name on the hub or a state dict."""
    source = next(iter(args), kwargs.get("pretrained_model_name_or_path_or_dict"))
    if not isinstance(source, str | os.PathLike):
        return None
    path = Path(source)
    weight_name = kwargs.get("weight_name")
    if path.is_dir() and isinstance(weight_name, str):
        path /= weight_name
    return str(path) if path.is_file() else None
