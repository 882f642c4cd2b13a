"""A pipeline's components: loaded, moved, changed by LoRAs, and the text encoders and the VAE at work.

`LoadingObserver` hears models loaded from files and moved by the host, and notes what was read: which files, and which
keys did not fit. `TransferObserver` times what offloading moves while a pipeline runs. `LoraObserver` hears LoRAs loaded,
weighted, merged and taken off again, and analyses what each of these did to the models.

`TextEncodingObserver` hears `encode_prompt` of a pipeline, and text encoders outside of it; tokens are those that the
host's own tokenizers were seen to make. `VaeObserver` hears the VAE's `encode` and `decode`.
"""

import functools
import inspect
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from torch import Tensor, nn

from sigmascope.analysis.lora_facts import (
    MERGED_AT,
    MERGED_BEFORE,
    OF_SETTING,
    TAKE_OFF,
    WEIGHTS_BEFORE,
    WEIGHTS_LEFT,
)
from sigmascope.files import short_path
from sigmascope.integrations.diffusers.embeddings import conditioning, embeddings
from sigmascope.integrations.diffusers.idle_loras import (
    EMBEDDINGS,
    half_of_vae,
    listed_as_fused,
    may_stay_in,
    tower_of,
)
from sigmascope.integrations.diffusers.pipeline_call import (
    denoisers_of,
    end_complete_denoising,
    have_arrived,
    is_final_decode,
)
from sigmascope.integrations.diffusers.recipe import LORA_FILES, Content, adapters_in, models_in, models_of
from sigmascope.integrations.diffusers.tokens import Reading, counts_seen, readings_of
from sigmascope.integrations.diffusers.watch_session import (
    LoraChange,
    Observer,
    Session,
    StageStack,
    WatchedParts,
    current_stack,
)
from sigmascope.monitor.hooks import (
    After,
    Arguments,
    Before,
    ByIdentity,
    Keywords,
    holder_of,
)
from sigmascope.monitor.publishing import publication
from sigmascope.monitor.recorder import LiveStage
from sigmascope.probes.model_fingerprints import forget_fingerprints, told
from sigmascope.probes.models import (
    components_of,
    file_facts,
    key_facts,
    loadable_parts,
    modules_in,
    unwrap,
)
from sigmascope.probes.module_tree import one_look, tree_of
from sigmascope.probes.peft import standings_in
from sigmascope.probes.reading import attempt, keeping_words
from sigmascope.records.latents import Direction
from sigmascope.records.prompts import PromptPrivacy
from sigmascope.records.run import ONLY_ON, Role
from sigmascope.stages.baseline import beside_the_stage
from sigmascope.stages.latent_encoding import (
    analyze_latent_decoding_results,
    analyze_latent_generation_results,
    capture_latent_decoding_baseline,
    capture_latent_generation_baseline,
)
from sigmascope.stages.schema import LoraBaseline
from sigmascope.stages.text_encoding import analyze_text_encoding_results, capture_text_encoding_baseline

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
        put_on = functools.partial(self._put_on, method, before)
        self.when_loaded((name, method), module, name, put_on)

    def _put_on(self, method: str, before: Before, kind: type) -> None:
        if method in vars(kind):
            self.hook_attribute(kind, method, before)

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
        if stack.denoising is None:
            stack.end_loop()
        stage = stack.enter(LOADING_STAGE)
        facts["dtype"] = _text(kwargs.get("dtype", kwargs.get("torch_dtype")))

        def after(result: object, error: BaseException | None) -> None:
            stack.leave(stage, error)
            model = result[0] if isinstance(result, tuple) and result else result
            loaded = kind if model is None else type(model)
            stage.fact("loads", loaded.__name__ if isinstance(loaded, type) else type(loaded).__name__)
            read = self.guard.read("watch.files", lambda: file_facts(file))
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
    """Times how long the host waits for weights to be moved. Copies in the background do not count.

    It hooks nothing before a pipeline is offloaded.
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
        stack.is_moving = True
        return functools.partial(self._after_move, stack, self.session.recorder.clock())

    def _after_move(self, stack: StageStack, started: int, *_: object) -> None:
        stack.is_moving = False
        stack.weights_moved(self.session.recorder.clock() - started)


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
_JOINS: Final = ("fuse_qkv_projections", "unfuse_qkv_projections")
"""With these, attentions begin or cease to run copies of their weights without the adapters on them."""
_MERGES: Final = ("merge_adapter", "unmerge_adapter", "merge_and_unload", "unload")
"""Methods of PEFT's tuners that put adapters into weights, and take wrappers off."""
_SETS: Final = ("set_adapter", "delete_adapter")
"""Methods of PEFT's tuners that `PeftModel` calls for its own: a new one is not known before its pipeline is called.

What is only switched off for a while (`disable_adapter`) is seen in each call.
"""
_PUT_IN: Final = ("fuse_lora", "merge_adapter", "merge_and_unload")
_WRITES: Final = ("fuse_lora", "unfuse_lora", *_MERGES)
"""What PEFT does through `weight.data`; and so does loading with `hotswap`."""
_MODEL_METHODS: Final = (
    "load_lora_adapter",
    "load_attn_procs",
    "unload_lora",
    "add_adapter",
    "load_adapter",
    "set_adapter",
    "enable_adapters",
    "disable_adapters",
    "delete_adapter",
)
"""Those of single models, diffusers' and transformers'."""
_MODEL_CLASSES: Final = (
    ("diffusers.loaders.peft", "PeftAdapterMixin"),
    ("diffusers.loaders.unet", "UNet2DConditionLoadersMixin"),
)
"""The bases from which diffusers' models have them."""
_INJECTS: Final = "inject_adapter"
"""What `get_peft_model` and `inject_adapter_in_model` end in, a method of PEFT's tuners."""
_LOADS_INTO_NEW: Final = "from_pretrained"
_LOADS: Final = "load_adapter"
"""Those of `PeftModel` that inject an adapter and then read its values from a file."""
_FILE_OF_PEFT: Final = "adapter_model.safetensors"
_TAKES_ADAPTERS: Final = "add_adapter"
_MAKES_ADAPTERS: Final = (_TAKES_ADAPTERS, _INJECTS)
_MOST_BYTES_READ: Final = 2**30
"""Up to so much, the weights that a LoRA changes are read before and after; reading more would be felt."""


class LoraObserver(Observer):
    """A stage for each of `LORA_METHODS`, for each adapter that PEFT injects, and for each joining of projections that have
    one, with what it did to the models.
    """

    name: ClassVar[str] = "lora"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._models: ByIdentity[tuple[str, Role]] = ByIdentity()

    def start(self) -> None:
        """Hear PEFT, now or when it is imported."""
        self.when_loaded(_INJECTS, "peft.tuners.tuners_utils", "BaseTuner", self._put_on_tuner)
        self.when_loaded(_LOADS, "peft.peft_model", "PeftModel", self._put_on_model)
        for module, kind in _MODEL_CLASSES if self.session.is_everywhere else ():
            self.when_loaded(kind, module, kind, self._put_on_models)

    def _put_on_models(self, kind: type) -> None:
        """Hear any model: where every pipeline is watched, its methods may be called before its pipeline is."""
        for method in (*_MODEL_METHODS, *LORA_METHODS):
            if method in vars(kind):
                self.hook_attribute(kind, method, functools.partial(self._before, method))

    def _put_on_tuner(self, kind: type) -> None:
        if _INJECTS in vars(kind):
            self.hook_attribute(kind, _INJECTS, self._before_injection)
        for method in (*_MERGES, *_SETS):
            if method in vars(kind):
                self.hook_attribute(kind, method, functools.partial(self._before_of_tuner, method))

    def _put_on_model(self, kind: type) -> None:
        for method in (_LOADS_INTO_NEW, _LOADS):
            if method in vars(kind):
                self.hook_attribute(kind, method, functools.partial(self._before_loading, method))

    def attach_class(self, kind: type) -> None:
        """Hear the methods of pipelines."""
        if not hasattr(kind, "_call_impl"):
            for method in (*LORA_METHODS, *_JOINS):
                self.hook_class(kind, method, functools.partial(self._before, method))

    def attach(self, parts: WatchedParts) -> None:
        """Hear the same methods, and their own, of every component that can take adapters."""
        roles = {name: component.role for name, component in parts.facts.components.items()}
        known = ((name, part) for name, part in parts.components.items() if name in roles)
        models = [(model, name) for name, part in known for model in _taking_adapters(part)]
        self.session.merged_before.see(parts.pipeline)
        for model, name in models:
            for itself in (unwrap(model) or model, _inside_peft(model)):
                self._models.put(itself, (name, roles[name]))
            for method in (*_MODEL_METHODS, *LORA_METHODS, *_JOINS):
                self.hook_method(model, method, functools.partial(self._before, method))

    def _before_injection(self, _tuner: object, args: Arguments, kwargs: Keywords) -> After | None:
        model = args[0] if args else kwargs.get("model")
        return None if self._models.get(model) is None else self._before(_INJECTS, model, (), {})

    def _before_of_tuner(
        self, method: str, tuner: object, _args: Arguments, _kwargs: Keywords
    ) -> After | None:
        model = getattr(tuner, "model", None)
        return None if self._models.get(model) is None else self._before(method, model, (), {})

    def _before_loading(self, method: str, target: object, args: Arguments, kwargs: Keywords) -> After | None:
        """Of the model inside a `PeftModel`, or of that which one is made around."""
        if method == _LOADS:
            model = _inside_peft(target)
        else:
            model, args = (args[0], args[1:]) if args else (kwargs.get("model"), args)
        return None if self._models.get(model) is None else self._before(_LOADS, model, args, kwargs)

    def _before(self, method: str, target: object, args: Arguments, kwargs: Keywords) -> After | None:
        is_model = isinstance(target, nn.Module)
        stack = self.session.stack_here(None if is_model else target)
        if stack is None or stack.is_in(LORA_STAGE):
            return None
        if method in _JOINS and not any(
            (self.guard.read("watch.lora", lambda: adapters_in(target)) or {}).values()
        ):
            return None
        was_denoising = stack.denoising is not None
        if stack.pipeline_id is None and was_denoising:
            end_complete_denoising(stack)
            if stack.denoising is None:
                stack.end_loop()
        guard = self.guard
        source = lora_source(args, kwargs) if method.startswith("load_") else None
        with self.session.own_work():
            if self.session.is_everywhere and not is_model:
                self.session.watch(target)  # methods of its models may take off what this puts on
            guard.read("watch.lora", lambda: self.session.merged_before.see(target))
            seen = guard.read("watch.lora", lambda: self._seen_before(target, source, kwargs))
            adapters = guard.read("watch.lora", lambda: adapters_in(target))
            merged = guard.read("watch.lora", lambda: _merged_in(target))
            is_into_bare = method in _PUT_IN and merged == set()
            bare = self._contents(target, adapters or ()) if is_into_bare else {}
            listed = listed_as_fused(target)
        stage = stack.enter(LORA_STAGE)
        after_step = None if stack.denoising is None else stack.denoising.steps_over
        if stack.pipeline_id is not None or stack.leave_loop is not None:
            after_step = stack.steps_over

        def after(result: object, error: BaseException | None) -> None:
            self.session.heard_loras = True
            self.session.heard_fusing |= method in _PUT_IN
            self.session.fused_here |= {(id(target), name) for name in listed_as_fused(target) - listed}
            stack.leave(stage, error)
            stage.fact("method", method)
            if after_step is not None:
                stage.fact("after_step", after_step)
                stack.lora_changes.append(LoraChange(method, after_step))
            given = lora_source(args, kwargs) if source is None and method.startswith("load_") else source
            path = given if isinstance(given, str) else None
            if path is not None:
                stage.fact("file", short_path(path))
            if (component := self._component(target)) is not None:
                stage.fact("component", component)
            only_on = self._models.get(target) if is_model else self._models.get(_second(target, kwargs))
            if only_on is not None:
                stage.fact(ONLY_ON, only_on[0])
            with self.session.own_work(), keeping_words(guard.keeps_words):
                if method.startswith("load_") and error is None:
                    asked = kwargs.get("adapter_name")
                    guard.read("watch.lora", lambda: LORA_FILES.loaded(path, adapters or {}, target, asked))
                if method in _WRITES or _swaps(args, kwargs):
                    guard.read("watch.lora", lambda: [*map(forget_fingerprints, models_in(target).values())])
                self._tell_weights(stage, method, target, merged or (), bare)
                models, baseline = seen or (self._models_of(target, kwargs), None)
                prefix = _prefix_of(args, kwargs) if method == _LOADS_INTO_MODEL else None
                self._analyse(stage, method, target, models, baseline, error, path, prefix)

        return after

    def _contents(self, target: object, names: Collection[str]) -> dict[str, Content]:
        """The fingerprints of these components."""
        begun = self.guard.read("watch.lora", lambda: models_of(target)) if names else None
        return {name: content for name, content in (begun or {}).items() if name in names}

    def _tell_weights(
        self,
        stage: LiveStage,
        method: str,
        target: object,
        merged: Collection[str],
        bare: Mapping[str, Content],
    ) -> None:
        """Note the weights before something was merged into them, and those that are left when its layers are taken off.

        Args:
            stage: Of the change.
            method: Which one.
            target: The pipeline, or a model.
            merged: The components that something was merged into before.
            bare: The fingerprints of all that something may have been merged into now.
        """
        if method in TAKE_OFF:
            self._tell_contents(stage, WEIGHTS_LEFT, target, self._contents(target, merged or bare))
        elif bare:
            now = self.guard.read("watch.lora", lambda: _merged_in(target)) or set()
            bare = {name: bare[name] for name in bare.keys() & now}
        self._tell_contents(stage, WEIGHTS_BEFORE, target, bare)

    def _tell_contents(
        self, stage: LiveStage, fact: str, target: object, contents: Mapping[str, Content]
    ) -> None:
        """Put them on a stage under the names that a call's recipe has, once they are there: nothing waits for an accelerator."""
        model, _ = self._models.get(target) or (None, None)

        def tell() -> None:
            known = {model or name: told(content).value for name, content in contents.items()}
            stage.fact(fact, {name: content for name, content in known.items() if content is not None})

        if contents:
            self.session.arrivals.expect(functools.partial(have_arrived, [*contents.values()]), tell)

    def _component(self, target: object) -> str | None:
        """The name of a component that is neither a denoiser nor a text encoder, such as `controlnet`."""
        name, role = self._models.get(target) or (None, "denoiser")
        return None if role in ("denoiser", "text_encoder") else name

    def _models_of(self, target: object, kwargs: Keywords) -> "LoraModels":
        _, role = self._models.get(target) or (None, None)
        if role == "text_encoder":
            return LoraModels(None, {"text_encoder": target})
        if (second := _second(target, kwargs)) is not None:
            return LoraModels(second, None)
        return LoraModels.of(target, self.session)

    def _seen_before(
        self, target: object, source: str | dict[str, Tensor] | None, kwargs: Keywords
    ) -> tuple["LoraModels", Any]:
        models = self._models_of(target, kwargs)
        return models, models.baseline(source)

    def _analyse(
        self,
        stage: LiveStage,
        method: str,
        target: object,
        models: "LoraModels",
        baseline: Any,
        error: BaseException | None,
        path: str | None,
        prefix: str | None,
    ) -> None:
        # Only where a LoRA is put on is the code loaded that reads LoRAs.
        from sigmascope.stages.lora_application import analyze_lora_application_results, in_short

        record = stage.record()
        analysis = analyze_lora_application_results(
            baseline,
            models.denoiser,
            models.encoders,
            target,
            elapsed_time=record.seconds,
            peak_memory=record.peak,
            error=error,
            puts_on=method.startswith("load_") or method in _MAKES_ADAPTERS,
            is_untrained=method in _MAKES_ADAPTERS,
            component=self._component(target),
            lora_path=path,
            fused=listed_as_fused(target),
            merges=method == "merge_and_unload",
            by_peft=method == _LOADS,
            prefix=prefix,
        )
        model, _ = self._models.get(target) or (None, None)
        if merged_at := self.session.merged_before.strengths_in(target):
            told_at = {
                f"{model or name.partition('.')[0]}.{name.partition('.')[2]}": one
                for name, one in merged_at.items()
            }
            stage.fact(MERGED_AT, told_at)
        if open_in := self.session.merged_before.open_in(target):
            may_stay = may_stay_in([model or name for name in open_in])
            stage.fact(MERGED_BEFORE, may_stay["message"])
            if analysis["effective"] is False:
                analysis["findings"] = [
                    may_stay,
                    *(f for f in analysis["findings"] if f["id"] not in OF_SETTING),
                ]
        stage.fact(LORA_STAGE, in_short(analysis))
        publication(self.session.recorder, stage)()


def _merged_in(target: object) -> set[str]:
    """The models of a pipeline, or the one alone, that adapters are merged into and still on."""
    return {name for name, model in models_in(target).items() if any(standings_in(tree_of(model)).merged)}


def _second(pipeline: object, kwargs: Keywords) -> object:
    """The one of WAN's two denoisers that a loader is told to load into in place of the first."""
    return components_of(pipeline).get(_SECOND) if kwargs.get(f"load_into_{_SECOND}") else None


_SECOND: Final = "transformer_2"


_LOADS_INTO_MODEL: Final = "load_lora_adapter"
"""By which a model of diffusers loads a file itself."""


def _prefix_of(args: Arguments, kwargs: Keywords) -> str | None:
    """With which names have to begin that a model's own loader takes; None: any."""
    prefix = args[1] if len(args) > 1 else kwargs.get("prefix", "transformer")
    return prefix if isinstance(prefix, str) else None


def _swaps(args: Arguments, kwargs: Keywords) -> bool:
    """Whether a LoRA is loaded into the factors of another one: `hotswap` is the one flag that may follow the file."""
    return any(flag is True for flag in (kwargs.get("hotswap"), *args[1:]))


def _inside_peft(model: object) -> object:
    """The model inside a `PeftModel`, whose tuner puts adapters on it; any other itself."""
    peft: Any = sys.modules.get("peft")
    return model.base_model.model if peft is not None and isinstance(model, peft.PeftModel) else model


def _taking_adapters(part: object) -> Iterator[object]:
    """A component, or of one that only holds models, such as several ControlNets, these."""
    module = unwrap(part)
    if module is None or hasattr(type(module), _TAKES_ADAPTERS):
        yield part
        return
    inner: list[object] = [model for model in modules_in(module) if hasattr(type(model), _TAKES_ADAPTERS)]
    yield from inner or [part]


@dataclass(frozen=True, slots=True)
class LoraModels:
    """The text encoders of a pipeline and its other models that take LoRAs, one or several by name; or a model alone."""

    denoiser: object
    encoders: Mapping[str, object] | None

    @classmethod
    def of(cls, target: object, session: Session) -> "LoraModels":
        """Those of a pipeline, or a model alone."""
        if isinstance(target, nn.Module):
            return cls(target, None)
        parts = session.parts_of(target)
        encoders = dict(parts.of_role("text_encoder"))
        loadable = {name: part for name, part in loadable_parts(target).items() if name not in encoders}
        denoisers: dict[str, object] = {**dict(denoisers_of(parts)), **loadable} or dict(parts.components)
        denoiser = next(iter(denoisers.values())) if len(denoisers) == 1 else denoisers
        return cls(denoiser, encoders or None)

    def keys_to_read(self, source: object) -> Literal["lora", "none"]:
        """The weights to compare by content: those that the file changes, or none if that would take long."""
        if not isinstance(source, str):
            return "none"
        named = self.denoiser if isinstance(self.denoiser, Mapping) else {"": self.denoiser}
        parts = (*named.values(), *(self.encoders or {}).values())
        are_few = attempt(lambda: _are_quickly_read([part for part in parts if isinstance(part, nn.Module)]))
        return "none" if are_few.value is False else "lora"

    def baseline(self, source: str | dict[str, Tensor] | None) -> LoraBaseline:
        """The models before a LoRA is put on.

        Args:
            source: The LoRA's file or tensors, if they are known.
        """
        from sigmascope.stages.lora_application import capture_lora_baseline

        return capture_lora_baseline(self.denoiser, self.encoders, source, keys=self.keys_to_read(source))


def _are_quickly_read(models: list[nn.Module]) -> bool:
    """Whether the weights of models are all on the CPU, and not much."""
    tensors = {id(tensor): tensor for model in models for tensor in tree_of(model).tensors}.values()
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return nbytes <= _MOST_BYTES_READ and all(tensor.device.type == "cpu" for tensor in tensors)


_PIPELINE_FILE: Final = "pytorch_lora_weights"
"""What diffusers calls a LoRA's file, without its ending."""
_NO_LORA: Final = ("scheduler", "optimizer", "checkpoint")
"""In names of files of a folder that diffusers takes for no LoRA."""
_BESIDE_TENSORS: Final = ("network_alphas", "metadata")
"""Arguments of a loader that are needed to read the tensors that it is given."""


def lora_source(args: Arguments, kwargs: Keywords) -> str | dict[str, Tensor] | None:
    """What a loader is given: a LoRA's file, or its tensors. None: it is not known, or not here yet.

    Of a folder, and of a name on the hub in its cache, it is the file that diffusers takes. Never raises.
    """
    return attempt(lambda: _lora_source(args, kwargs)).value


def _lora_source(args: Arguments, kwargs: Keywords) -> str | dict[str, Tensor] | None:
    source = next(iter(args), kwargs.get("pretrained_model_name_or_path_or_dict", kwargs.get("model_id")))
    if isinstance(source, Mapping):
        named = all(isinstance(key, str) and isinstance(value, Tensor) for key, value in source.items())
        needs_more = any(kwargs.get(name) for name in _BESIDE_TENSORS)
        return dict(source) if named and not needs_more else None
    if not isinstance(source, str | os.PathLike):
        return None
    path = Path(source)
    if path.is_file():
        return str(path)
    weight_name, subfolder = kwargs.get("weight_name"), kwargs.get("subfolder")
    if _is_local(str(source)) and not path.exists():
        return str(path)  # that it is missing is what there is to say of it
    if not path.is_dir():
        return _in_cache(str(source), weight_name or f"{_PIPELINE_FILE}.safetensors", kwargs)
    name = weight_name or _file_of_lora(file.name for file in path.iterdir())
    file = None if name is None else path / (subfolder or "") / name
    return str(file) if file is not None and (weight_name or file.is_file()) else None


def _is_local(source: str) -> bool:
    """Whether it can only be a path, and no name on the hub."""
    return source.startswith((".", "~")) or Path(source).is_absolute() or Path(source).suffix in _OF_WEIGHTS


_OF_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".ckpt", ".pt", ".pth"})


def _file_of_lora(names: Iterable[str]) -> str | None:
    """Of a folder's files, the one that diffusers takes."""
    weights = [name for name in names if not any(word in name for word in _NO_LORA)]
    for ending in (".safetensors", ".bin"):
        found = [name for name in weights if name.endswith(ending)]
        usual = [
            name for name in found if name.endswith(f"{_PIPELINE_FILE}{ending}") or name == _FILE_OF_PEFT
        ]
        if found:
            return (usual or found)[0]
    return None


def _in_cache(name: str, file: str, kwargs: Keywords) -> str | None:
    """A file of a name on the hub, if it was downloaded."""
    hub: Any = sys.modules.get("huggingface_hub")
    if hub is None:
        return None
    subfolder = kwargs.get("subfolder")
    kept = {key: kwargs[key] for key in ("cache_dir", "revision") if kwargs.get(key)}
    found = hub.try_to_load_from_cache(name, f"{subfolder}/{file}" if subfolder else file, **kept)
    return found if isinstance(found, str) else None


MOST_RUNS: Final = 32
"""An encoder that writes a text token by token is called hundreds of times; so many of its calls have a stage."""
ENCODING_STAGE: Final = "text_encoding"


@dataclass(slots=True)
class Encoding:
    """One call of `encode_prompt` while it goes on."""

    prompt: object
    negative_prompt: object
    baseline: Mapping[str, Any] | None
    readings: list[Reading] = field(default_factory=list)


class TextEncodingObserver(Observer):
    """A stage for each encoding of prompts."""

    name: ClassVar[str] = "text_encoding"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._encoders: ByIdentity[tuple[str, ...]] = ByIdentity()
        self._tokenizers: ByIdentity[str] = ByIdentity()
        self._open: weakref.WeakKeyDictionary[StageStack, Encoding] = weakref.WeakKeyDictionary()

    def attach_class(self, kind: type) -> None:
        """Hear `encode_prompt`."""
        self.hook_class(kind, "encode_prompt", self._before_prompt)

    def attach(self, parts: WatchedParts) -> None:
        """Hear every text encoder, tokenizer and image encoder."""
        for name, tokenizer in parts.of_role("tokenizer"):
            self._tokenizers.put(tokenizer, name)
            self.hook_method(tokenizer, "__call__", self._before_tokenizer)
        encoders = list(parts.of_role("text_encoder"))
        self._encoders.put(parts.pipeline, tuple(name for name, _ in encoders))
        for name, encoder in encoders:
            self._hook(ENCODING_STAGE, name, encoder)
        for name, encoder in parts.of_role("image_encoder"):
            self._hook("image_encoding", name, encoder)

    def _hook(self, stage: str, name: str, encoder: object) -> None:
        if isinstance(encoder, nn.Module):
            self.hook_calls(encoder, functools.partial(self._before_encoder, stage, name))

    def _before_prompt(self, pipeline: object, args: Arguments, kwargs: Keywords) -> After | None:
        stack = self.session.stack_here(pipeline)
        if stack is None or stack.is_in(ENCODING_STAGE):
            return None
        end_complete_denoising(stack)
        signature = inspect.signature(type(pipeline).encode_prompt)  # type: ignore[attr-defined]
        accepts_negative = "negative_prompt" in signature.parameters
        guard, privacy = self.guard, self.session.options.prompts
        encoding = guard.read("watch.text", lambda: self._seen_before(pipeline, signature, args, kwargs))
        stage = stack.enter(ENCODING_STAGE)
        ran_before = stack.ran.copy()
        if encoding is not None:
            self._open[stack] = encoding

        def after(result: object, error: BaseException | None) -> None:
            self._open.pop(stack, None)
            stack.leave(stage, error)
            named = embeddings(result, accepts_negative)
            for name, tensor in named.items():
                stack.made(stage, name, tensor)
            if encoding is not None:
                guard.read("watch.text", lambda: record_text_analysis(stage, encoding, named, privacy, error))
            if stack.pipeline_id is None and error is None:  # what is made in a call is used in it
                guard.read("watch.lora", lambda: note(result, stack.ran - ran_before))

        def note(result: object, ran: Counter[str]) -> None:
            with one_look():
                arguments = signature.bind_partial(pipeline, *args, **kwargs).arguments
                EMBEDDINGS.note(pipeline, arguments, ran.keys(), result)

        return after

    def _seen_before(
        self, pipeline: object, signature: inspect.Signature, args: Arguments, kwargs: Keywords
    ) -> Encoding:
        arguments = signature.bind_partial(pipeline, *args, **kwargs).arguments
        return capture_text_baseline(arguments, self._encoders_of(pipeline))

    def _encoders_of(self, pipeline: object) -> dict[str, object]:
        components = components_of(pipeline)
        names = self._encoders.get(pipeline) or ()
        return {name: components[name] for name in names if name in components}

    def _before_tokenizer(self, tokenizer: object, args: Arguments, kwargs: Keywords) -> After | None:
        stack = current_stack(self.session)
        encoding = None if stack is None else self._open.get(stack)
        if encoding is None:
            return None
        name = self._tokenizers.get(tokenizer) or "tokenizer"

        def after(result: object, error: BaseException | None) -> None:
            if error is None:
                read = lambda: readings_of(name, tokenizer, args, kwargs, result)  # noqa: E731
                encoding.readings.extend(self.guard.read("watch.tokens", read) or ())

        return after

    def _before_encoder(
        self, stage: str, name: str, _: object, args: Arguments, kwargs: Keywords
    ) -> After | None:
        stack = self.session.stack_here()
        if stack is None:
            return None
        if _may_hold_pictures(args, kwargs):
            stack.ran[tower_of(name)] += 1
        return _within(stack, stage, name)


def _may_hold_pictures(args: Arguments, kwargs: Keywords) -> bool:
    """Whether an encoder is given more than tokens, which are integers, and their mask."""
    given = (*args, *(value for name, value in kwargs.items() if name != "attention_mask"))
    return any(isinstance(value, Tensor) and value.is_floating_point() for value in given)


def _within(stack: StageStack, name: str, encoder: str) -> After | None:
    """A stage for an encoder's call: of this name, or of the encoder's inside such a stage."""
    stack.ran[encoder] += 1
    if stack.is_in(encoder):
        return None
    is_inside = stack.is_in(name)
    if is_inside and stack.runs[encoder] >= MOST_RUNS:
        return None
    stack.runs[encoder] += 1
    if not is_inside:
        end_complete_denoising(stack)
    stage = stack.enter(encoder if is_inside else name)

    def after(result: object, error: BaseException | None) -> None:
        stack.leave(stage, error)
        stage.fact("component", encoder)

    return after


def capture_text_baseline(arguments: Mapping[str, Any], encoders: Mapping[str, object]) -> Encoding:
    """Take what is known before the encoding."""
    baseline = capture_text_encoding_baseline(None, dict(encoders) or None)
    return Encoding(arguments.get("prompt"), arguments.get("negative_prompt"), baseline)


def record_text_analysis(
    stage: LiveStage,
    encoding: Encoding,
    named: Mapping[str, object],
    privacy: PromptPrivacy,
    error: BaseException | None,
) -> None:
    """Put the analysis on the stage, which is over. Nothing waits for an accelerator."""
    record = stage.record()
    analysis = analyze_text_encoding_results(
        encoding.baseline,
        conditioning(named, ""),
        conditioning(named, "negative_"),
        encoding.prompt,
        encoding.negative_prompt,
        record.seconds,
        peak_memory=record.peak,
        error=error,
        prompt_privacy=privacy,
        tokens_seen=functools.partial(counts_seen, encoding.readings),
    )
    stage.fact(ENCODING_STAGE, beside_the_stage(analysis))


VAE_STAGES: Final[Mapping[Direction, str]] = {"encoding": "latent_encoding", "decoding": "latent_decoding"}


class VaeObserver(Observer):
    """A stage for each `encode` and `decode`; a call inside another is part of that one."""

    name: ClassVar[str] = "vae"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._names: ByIdentity[str] = ByIdentity()

    def attach(self, parts: WatchedParts) -> None:
        """Hear both of every VAE, also of one that is wrapped."""
        for name, vae in parts.of_role("vae"):
            holders = (holder_of(vae, way) for way in ("encode", "decode"))
            for thing in {
                id(holder): holder for holder in (vae, unwrap(vae), *holders) if holder is not None
            }.values():
                self.hook_method(thing, "encode", functools.partial(self._before, "encoding"))
                self.hook_method(thing, "decode", functools.partial(self._before, "decoding"))
                for method in ("tiled_encode", "tiled_decode"):
                    self.hook_method(thing, method, self._before_tiles)
                self._names.put(unwrap(thing) or thing, name)

    def _before(self, way: Direction, vae: object, args: Arguments, kwargs: Keywords) -> After | None:
        stack = self.session.stack_here()
        if stack is None or stack.is_in(*VAE_STAGES.values()):
            return None
        if way == "decoding" and is_final_decode(stack):
            stack.end_denoising()
        elif way == "encoding":
            end_complete_denoising(stack)
        input_tensor = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        guard = self.guard
        baseline = guard.read("watch.latents", lambda: capture_vae_baseline(way, vae, input_tensor))
        component = self._names.get(unwrap(vae) or vae)
        if component is not None:
            stack.ran[half_of_vae(component, "decoder" if way == "decoding" else "encoder")] += 1
        stack.is_tiled = False
        stage = stack.enter(VAE_STAGES[way])

        def after(result: object, error: BaseException | None) -> None:
            strategy = "Tiled" if stack.is_tiled else "Direct"
            stack.leave(stage, error)
            stage.fact("component", component)
            output = first_tensor(result)
            guard.read(
                "watch.latents", lambda: record_vae_analysis(stage, way, baseline, output, strategy, error)
            )
            latent, picture = (output, input_tensor) if way == "encoding" else (input_tensor, output)
            for name, tensor in (("latent", latent), ("picture", picture)):
                if tensor is not None:
                    stack.made(stage, name, tensor)
            if way == "decoding" and picture is not None and picture.dim() >= 4:
                stack.size = (int(picture.shape[-2]), int(picture.shape[-1]))

        return after

    def _before_tiles(self, _vae: object, _args: Arguments, _kwargs: Keywords) -> After | None:
        stack = current_stack(self.session)
        if stack is not None:
            stack.is_tiled = True
        return None


def capture_vae_baseline(direction: Direction, vae: object, input_tensor: Tensor | None) -> Mapping[str, Any]:
    """The VAE, memory and shapes before it works. Values of tensors are not read here: the stage has those."""
    capture = (
        capture_latent_generation_baseline if direction == "encoding" else capture_latent_decoding_baseline
    )
    return capture(vae, input_tensor, statistics=False)


def record_vae_analysis(
    stage: LiveStage,
    direction: Direction,
    baseline: Mapping[str, Any] | None,
    output: Tensor | None,
    strategy: str,
    error: BaseException | None,
) -> None:
    """Put the analysis on the stage, which is over."""
    record = stage.record()
    seen: dict[str, Any] = {"peak_memory": record.peak, "error": error, "statistics": False}
    analyze: Callable[..., Mapping[str, Any]] = analyze_latent_decoding_results
    if direction == "encoding":
        analyze, seen["may_wait"] = analyze_latent_generation_results, False
    analysis = analyze(
        baseline, output, record.seconds, f"{strategy} VAE {direction.title()}", record.memory, **seen
    )
    stage.fact(VAE_STAGES[direction], beside_the_stage(analysis))


def first_tensor(result: object) -> Tensor | None:
    """The tensor in what a VAE gives: bare, in a tuple, an output's `sample`, or the mean of its distribution."""
    if isinstance(result, Tensor):
        return result
    for name in ("sample", "latent_dist", "latents", "latent", "mean"):
        held = getattr(result, name, None)
        if isinstance(held, Tensor):
            return held
        if name == "latent_dist" and held is not None:
            return first_tensor(getattr(held, "mean", None))
    if isinstance(result, tuple | list) and result:
        return first_tensor(result[0])
    return None
