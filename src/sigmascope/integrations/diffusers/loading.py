"""Weights: loaded from files, moved by the host and by offloading, and changed by LoRAs.

`LoadingObserver` also notes what was read: a model's files, and which keys did not fit. `TransferObserver` times what
offloading moves while a pipeline runs. `LoraObserver` hears LoRAs loaded, weighted, merged and taken off again, and
analyses what each of these did to the models.
"""

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from torch import nn

from sigmascope.files import short_path
from sigmascope.integrations.diffusers.denoising import denoisers_of
from sigmascope.integrations.diffusers.hooks import After, Arguments, Before, Keywords
from sigmascope.integrations.diffusers.watch_session import (
    Observer,
    StageStack,
    WatchedParts,
    current_stack,
    take_apart,
)
from sigmascope.monitor.recorder import LiveStage
from sigmascope.probes.models import file_facts, key_facts
from sigmascope.probes.reading import keeping_words
from sigmascope.stages.schema import LoraBaseline

LOADING_STAGE: Final = "model_loading"
_LOADERS: Final = (
    ("diffusers.pipelines.pipeline_utils", "DiffusionPipeline", "from_pretrained"),
    ("diffusers.models.modeling_utils", "ModelMixin", "from_pretrained"),
    ("diffusers.loaders.single_file", "FromSingleFileMixin", "from_single_file"),
    ("diffusers.loaders.single_file_model", "FromOriginalModelMixin", "from_single_file"),
    ("diffusers.modular_pipelines.modular_pipeline", "ModularPipeline", "load_components"),
    ("transformers.modeling_utils", "PreTrainedModel", "from_pretrained"),
)
"""What loads a model or pipeline: module, class, method."""
_WEIGHT_LOADERS: Final = (
    ("diffusers.models.modeling_utils", "ModelMixin"),
    ("transformers.modeling_utils", "PreTrainedModel"),
)
_SOURCES: Final = (
    "pretrained_model_name_or_path",
    "pretrained_model_link_or_path",
    "pretrained_model_link_or_path_or_dict",
)
"""What the loaders call their first argument."""
_READS_FILES, _FINISHES = "_load_pretrained_model", "_finalize_model_loading"
"""What both libraries read weights with, and transformers decides with which keys are missing."""
_MOVERS: Final = (
    ("accelerate.hooks", "CpuOffload", ("pre_forward",)),
    ("accelerate.hooks", "UserCpuOffloadHook", ("offload",)),
    ("accelerate.hooks", "AlignDevicesHook", ("pre_forward", "post_forward")),
    ("diffusers.hooks.group_offloading", "ModuleGroup", ("onload_", "offload_")),
)
"""What moves weights, for whole models, for single modules, and for groups of them."""


class LoadingObserver(Observer):
    """A stage for each loading, with those of a pipeline's models inside its own, and for each move."""

    name: ClassVar[str] = "loading"

    def start(self) -> None:
        """Hear the loaders of diffusers and transformers, now or when they are imported."""
        for module, kind, method in _LOADERS:
            before = self._before_components if method == "load_components" else self._before_load
            self._hook_when_loaded(module, kind, method, before)
        for module, kind in _WEIGHT_LOADERS:
            self._hook_when_loaded(module, kind, _READS_FILES, self._before_files)
            self._hook_when_loaded(module, kind, _FINISHES, self._before_keys)

    def attach_class(self, kind: type) -> None:
        """Hear pipelines being moved."""
        if not hasattr(kind, "_call_impl"):
            self.hook_class(kind, "to", self._before_move)

    def _hook_when_loaded(self, module: str, name: str, method: str, before: Before) -> None:
        def put_on(kind: type) -> None:
            if method in vars(kind):
                self.hook_attribute(kind, method, before)

        self.when_loaded((name, method), module, name, put_on)

    def _before_load(self, kind: object, args: Arguments, kwargs: Keywords) -> After | None:
        source = next(iter((*args, *(kwargs[key] for key in _SOURCES if key in kwargs))), None)
        file = source if isinstance(source, str | os.PathLike) else None
        facts = {
            "source": _text(source if file is None else short_path(file)),
            "subfolder": kwargs.get("subfolder"),
        }
        return self._stage(kind, facts, kwargs, file)

    def _before_components(self, pipeline: object, args: Arguments, kwargs: Keywords) -> After | None:
        return self._stage(pipeline, {"components": args[0] if args else kwargs.get("names")}, kwargs)

    def _stage(
        self,
        kind: object,
        facts: dict[str, Any],
        kwargs: Keywords,
        file: str | os.PathLike[str] | None = None,
    ) -> After | None:
        stack = self.session.stack_here()
        if stack is None:
            return None
        stage = stack.enter(LOADING_STAGE)
        facts["dtype"] = _text(kwargs.get("dtype", kwargs.get("torch_dtype")))

        def after(result: object, error: BaseException | None) -> None:
            stack.leave(stage, error)
            model = result[0] if isinstance(result, tuple) and result else result
            loaded = kind if model is None else type(model)
            stage.fact("loads", loaded.__name__ if isinstance(loaded, type) else type(loaded).__name__)
            read, _ = self.guard.read("watch.files", lambda: file_facts(file))
            for key, fact in {**facts, **(read or {})}.items():
                if fact is not None:
                    stage.fact(key, fact)
            if model is not None:
                stage.module("model", model)

        return after

    def _before_move(self, pipeline: object, args: Arguments, kwargs: Keywords) -> After | None:
        stack = self.session.stack_here(pipeline)
        if stack is None or stack.is_in(LOADING_STAGE):
            return None
        stage = stack.enter(LOADING_STAGE)

        def after(result: object, error: BaseException | None) -> None:
            stack.leave(stage, error)
            stage.fact("moves", type(pipeline).__name__)
            stage.fact("to", [_text(argument) for argument in (*args, *kwargs.values())])
            stage.module("model", pipeline)

        return after

    def _before_files(self, _: object, args: Arguments, kwargs: Keywords) -> After | None:
        stack = self._loading_here()
        if stack is None:
            return None
        files = (
            args[2] if len(args) > 2 else kwargs.get("resolved_model_file", kwargs.get("checkpoint_files"))
        )
        self._tell(stack, file_facts(files))
        return functools.partial(self._tell_keys, stack)

    def _before_keys(self, _: object, args: Arguments, kwargs: Keywords) -> After | None:
        stack = self._loading_here()
        return None if stack is None else functools.partial(self._tell_keys, stack)

    def _loading_here(self) -> StageStack | None:
        stack = self.session.stack_here()
        return stack if stack is not None and stack.is_in(LOADING_STAGE) else None

    def _tell_keys(self, stack: StageStack, result: object, _error: BaseException | None) -> None:
        self._tell(stack, key_facts(result))

    def _tell(self, stack: StageStack, facts: dict[str, Any]) -> None:
        for name, fact in facts.items():
            stack.open[-1][1].fact(name, fact)


def _text(value: object) -> str | None:
    return None if value is None or isinstance(value, dict) else str(value)


class TransferObserver(Observer):
    """The time for which the host waits for weights to be moved. A copy that goes on meanwhile is not in it.

    Nothing is put on before a pipeline is offloaded.
    """

    name: ClassVar[str] = "transfers"

    def attach(self, parts: WatchedParts) -> None:
        """Hear the movers, if any component is offloaded."""
        if self.has("CpuOffload") or not any(
            component.offload for component in parts.facts.components.values()
        ):
            return
        for module, kind, methods in _MOVERS:
            self.when_loaded(kind, module, kind, functools.partial(self._put_on, methods))

    def _put_on(self, methods: tuple[str, ...], kind: type) -> None:
        for method in methods:
            if method in vars(kind):
                self.hook_attribute(kind, method, self._before_move)

    def _before_move(self, mover: object, args: Arguments, kwargs: Keywords) -> After | None:
        stack = current_stack(self.session)
        if stack is None or stack.is_moving or getattr(mover, "offload", True) is False:
            return None  # a mover calls others, and some move inputs alone
        clock = self.session.recorder.clock
        stack.is_moving = True
        started = clock()

        def after(result: object, error: BaseException | None) -> None:
            stack.is_moving = False
            stack.weights_moved(clock() - started)

        return after


LORA_STAGE: Final = "lora_application"
LORA_METHODS: Final = (
    "load_lora_weights",
    "unload_lora_weights",
    "fuse_lora",
    "unfuse_lora",
    "set_adapters",
    "enable_lora",
    "disable_lora",
    "delete_adapters",
)
_MOST_BYTES_READ: Final = 2**30
"""Up to so much, the weights that a LoRA changes are read before and after; reading more would be felt."""


class LoraObserver(Observer):
    """A stage for each of `LORA_METHODS`, with the analysis of what it did to the models."""

    name: ClassVar[str] = "lora"

    def attach_class(self, kind: type) -> None:
        """Hear the methods of pipelines."""
        if not hasattr(kind, "_call_impl"):
            for method in LORA_METHODS:
                self.hook_class(kind, method, functools.partial(self._before, method))

    def attach(self, parts: WatchedParts) -> None:
        """Hear the same methods, and their own, of denoisers."""
        for _, denoiser in denoisers_of(parts):
            for method in ("load_lora_adapter", *LORA_METHODS):
                self.hook_method(denoiser, method, functools.partial(self._before, method))

    def _before(self, method: str, target: object, args: Arguments, kwargs: Keywords) -> After | None:
        is_model = isinstance(target, nn.Module)
        stack = self.session.stack_here(None if is_model else target)
        if stack is None or stack.is_in(LORA_STAGE):
            return None
        guard = self.guard
        path = lora_path(args, kwargs) if method.startswith("load_") else None
        baseline, _ = guard.read("watch.lora", lambda: LoraModels(target).baseline(path))
        stage = stack.enter(LORA_STAGE)

        def after(result: object, error: BaseException | None) -> None:
            stack.leave(stage, error)
            stage.fact("method", method)
            if path is not None:
                stage.fact("file", short_path(path))
            with keeping_words(guard.keeps_words):
                self._analyse(stage, target, baseline, error)

        return after

    def _analyse(self, stage: LiveStage, target: object, baseline: Any, error: BaseException | None) -> None:
        # Only where a LoRA is put on is the code loaded that reads LoRAs.
        from sigmascope.stages.lora_application import analyze_lora_application_results, in_short

        models = LoraModels(target)
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
        stage.fact(LORA_STAGE, in_short(analysis))


class LoraModels:
    """The denoiser (or several by name) and text encoders of a pipeline, or a denoiser alone."""

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
        small = self._nbytes <= _MOST_BYTES_READ and self._devices <= {"cpu"}
        return "lora" if small and path is not None else "none"

    def baseline(self, path: str | None) -> LoraBaseline:
        """The models before a LoRA is put on.

        Args:
            path: The LoRA's file, if it is known.
        """
        from sigmascope.stages.lora_application import capture_lora_baseline

        return capture_lora_baseline(self.denoiser, self.encoders, path, keys=self.keys_to_read(path))


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
