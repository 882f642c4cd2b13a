"""The denoiser's calls: they open the denoising and its steps."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Final

from torch import nn
from torch.compiler import is_compiling, is_dynamo_compiling

from sigmascope.integrations.watching.activity import Activity, current_activity, denoising_here, guides
from sigmascope.integrations.watching.denoising import Denoising
from sigmascope.integrations.watching.instrument import Instrument
from sigmascope.integrations.watching.listeners import After, Arguments, Keywords
from sigmascope.integrations.watching.module_calls import COMPILED, ModuleHook, hook_calls
from sigmascope.integrations.watching.parts import Parts

if TYPE_CHECKING:
    from sigmascope.integrations.watching.session import Session

_NAMES: Final = ("unet", "transformer", "transformer_2", "denoiser", "prior", "decoder")
"""Where pipelines keep denoisers whose architecture is not known."""

_HELPER: Final = "controlnet"
"""Where they keep what is called before the denoiser, for each of its calls or steps."""


class Denoisers(Instrument):
    """A step for all calls of denoisers up to the scheduler's step."""

    name: ClassVar[str] = "denoiser"

    def attach(self, parts: Parts) -> None:
        """Hear every denoiser."""
        schedulers = [part for _, part in parts.of_role("scheduler") if callable(getattr(part, "step", None))]
        for name, denoiser in denoisers_of(parts):
            before = functools.partial(self._before, name, bool(schedulers))
            if schedulers and getattr(denoiser, COMPILED, None) is None:
                hook: Any = StepHook(self.session, name, before, self.failed)
                hook_calls(self, denoiser, hook, after=False)
            else:
                hook_calls(self, denoiser, before, after=not schedulers)
        for name in _NAMES:
            engine = parts.components.get(name)
            call = inspect.getattr_static(type(engine), "__call__", None)
            if inspect.isfunction(call) and not isinstance(engine, nn.Module):
                self._hear_engine(name, bool(schedulers), engine)
        for name, part in parts.components.items():
            if name.startswith(_HELPER):
                hook_calls(self, part, self._before_helper, after=False)

    def _hear_engine(self, name: str, has_scheduler: bool, engine: object) -> None:
        """Hear what stands for a denoiser and is no module, such as the engine of another runtime."""

        def before(_target: object, args: Arguments, kwargs: Keywords) -> After | None:
            return self._before(name, has_scheduler, args, kwargs)

        self.tap_method(engine, "__call__", before)

    def _before_helper(self, *_: object) -> None:
        activity = current_activity(self.session) or self.session.here()
        if activity is not None:
            start_denoising(activity).prepared()

    def _before(self, name: str, has_scheduler: bool, args: Arguments, kwargs: Keywords) -> After | None:
        activity = current_activity(self.session) or self.session.here()
        if activity is None:
            return None
        denoising = start_denoising(activity)
        denoising.called(name, args, kwargs)
        return None if has_scheduler else lambda _result, _error: denoising.returned()


class StepHook(ModuleHook):
    """The denoiser's hook: the hot path.

    Args:
        session: Whose.
        name: The denoiser's.
        act: What to do with a call for which no denoising is open.
        failed: Told of what was raised.
    """

    __slots__ = ("_name", "_session")

    def __init__(
        self,
        session: "Session",
        name: str,
        act: Callable[..., object],
        failed: Callable[[Exception], None],
    ) -> None:
        super().__init__(act, failed)
        self._session = session
        self._name = name

    def __call__(self, _module: object, args: Arguments, kwargs: Keywords) -> None:
        """Take the call, unless it is being traced."""
        if is_dynamo_compiling():
            return
        try:
            denoising = denoising_here(self._session)
            if denoising is not None and denoising.repeating is self._name:
                denoising.repeats += 1  # no export comes between a step's calls
            elif is_compiling():  # dearer: it tells of an export too
                return
            elif denoising is None:
                self.act(args, kwargs)
            else:
                denoising.called(self._name, args, kwargs)
        except Exception as failure:  # noqa: BLE001 - what an instrument raises must not reach the host
            self.failed(failure)


def start_denoising(activity: Activity) -> Denoising:
    """The denoising that is going on in an activity; it begins now if none is."""
    denoising = activity.denoising
    if denoising is None:
        session = activity.session
        session.open_calls.close_broken(activity)
        activity.is_guided, _ = session.guard.read("watch.call", lambda: guides(activity.pipeline))
        denoising = activity.denoising = Denoising(activity.enter("denoising"), session.recorder)
    return denoising


def denoisers_of(parts: Parts) -> Iterator[tuple[str, nn.Module]]:
    """Modules that are denoisers by their architecture, or else by their name, with their names."""
    known = dict(parts.of_role("denoiser"))
    known |= {name: part for name, part in parts.of_role("other") if name in _NAMES}
    for name, part in known.items():
        if isinstance(part, nn.Module):
            yield name, part
