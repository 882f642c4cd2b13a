"""The stages and steps of a diffusers pipeline that is being benchmarked.

text_encoding is `encode_prompt`, latent_encoding and latent_decoding are the VAE's `encode` and `decode`, denoising lasts from
the first call of the denoiser to the decoding. A step lasts from the denoiser's first call in it until the
pipeline's callback, or is each call of the denoiser where the pipeline has no callback.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import TracebackType
from typing import Any, Final

from torch import nn

from sigmascope.monitor.context import stage
from sigmascope.monitor.performance import PerformanceMonitor
from sigmascope.probes.architecture import denoisers_of
from sigmascope.probes.modules import components_of

_OF_VAE: Final = (("encode", "latent_encoding"), ("decode", "latent_decoding"))
_COMPILED_CALL: Final = "_compiled_call_impl"
_MISSING: Final = object()


class PipelineStages:
    """While entered, a pipeline's parts are stages of the current recorder; afterwards it is as it was.

    Args:
        pipeline: Of diffusers, or of its shape.
        monitor: Times the steps.
        wait: Waits for the device, at the edges of stages.
        calls_are_steps: Whether each call of the denoiser is a step: the pipeline has no callback.
    """

    def __init__(
        self,
        pipeline: object,
        monitor: PerformanceMonitor,
        wait: Callable[[], None],
        *,
        calls_are_steps: bool = False,
    ) -> None:
        self._pipeline = pipeline
        self._monitor = monitor
        self._wait = wait
        self._calls_are_steps = calls_are_steps
        self._undo = ExitStack()
        self._denoising = ExitStack()
        self._is_denoising = False
        self._in_step = False
        self._open: set[str] = set()

    def __enter__(self) -> "PipelineStages":
        with ExitStack() as undo:
            self._put_on(undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end_denoising(error)
        finally:
            self._undo.close()

    def on_step_end(
        self, pipeline: object, index: int, timestep: object, values: dict[str, Any]
    ) -> dict[str, Any]:
        """End a step: the pipeline's `callback_on_step_end`. Gives `values` back as they are."""
        self._end_step()
        return values

    # --- what is put on, and taken off

    def _put_on(self, undo: ExitStack) -> None:
        self._wrap(undo, self._pipeline, "encode_prompt", "text_encoding")
        vae = components_of(self._pipeline).get("vae")
        for method, name in _OF_VAE:
            self._wrap(undo, vae, method, name)
        denoisers = [one for one in denoisers_of(self._pipeline) if isinstance(one, nn.Module)]
        for module in denoisers:
            self._watch_calls(undo, module, ends_step=self._calls_are_steps)
        for module in _controlnets(self._pipeline):
            self._watch_calls(undo, module, ends_step=False)

    def _watch_calls(self, undo: ExitStack, module: nn.Module, *, ends_step: bool) -> None:
        """Tell of a module's calls from outside of what is compiled."""
        if vars(module).get(_COMPILED_CALL) is not None:
            self._wrap_compiled(undo, module, ends_step=ends_step)
            return
        undo.callback(module.register_forward_pre_hook(self._before_call, prepend=True).remove)
        if ends_step:
            undo.callback(module.register_forward_hook(self._after_call, always_call=True).remove)

    def _wrap_compiled(self, undo: ExitStack, module: Any, *, ends_step: bool) -> None:
        """A module compiled in place never runs hooks; what it keeps to be called instead can be wrapped."""
        original = vars(module)[_COMPILED_CALL]

        def watched(*args: object, **kwargs: object) -> object:
            self._before_call()
            try:
                return original(*args, **kwargs)
            finally:
                if ends_step:
                    self._after_call()

        setattr(module, _COMPILED_CALL, watched)
        undo.callback(setattr, module, _COMPILED_CALL, original)

    def _wrap(self, undo: ExitStack, owner: Any, method: str, name: str) -> None:
        """Let a method be a stage, through an attribute of the object that hides the class's."""
        original = getattr(owner, method, None)
        if owner is None or not callable(original):
            return

        @wraps(original)
        def watched(*args: object, **kwargs: object) -> object:
            with self._stage(name):
                return original(*args, **kwargs)

        before = vars(owner).get(method, _MISSING)
        setattr(owner, method, watched)
        undo.callback(_restore, owner, method, before)

    # --- stages

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """A stage of that name, unless one is open: some methods call themselves."""
        if name in self._open:
            yield
            return
        if name == "latent_decoding":
            self._end_denoising()
        self._open.add(name)
        try:
            self._wait()
            with stage(name):
                yield
                self._wait()
        finally:
            self._open.discard(name)

    def _before_call(self, *_: object) -> None:
        if not self._is_denoising:
            self._wait()
            self._denoising.enter_context(stage("denoising"))
            self._is_denoising = True
        if not self._in_step:
            self._monitor.start_step_timing()
            self._in_step = True

    def _after_call(self, *_: object) -> None:
        self._end_step()

    def _end_step(self) -> None:
        if self._in_step:
            self._monitor.end_step_timing()
            self._in_step = False

    def _end_denoising(self, error: BaseException | None = None) -> None:
        if not self._is_denoising:
            return
        self._is_denoising = self._in_step = False
        trace = None if error is None else error.__traceback__
        try:
            if error is None:
                self._wait()
        finally:
            self._denoising.__exit__(None if error is None else type(error), error, trace)


def _controlnets(pipeline: object) -> list[nn.Module]:
    """They run before the denoiser, in each step."""
    parts = components_of(pipeline).items()
    return [part for name, part in parts if name.startswith("controlnet") and isinstance(part, nn.Module)]


def _restore(owner: object, method: str, before: object) -> None:
    if before is _MISSING:
        delattr(owner, method)
    else:
        setattr(owner, method, before)
