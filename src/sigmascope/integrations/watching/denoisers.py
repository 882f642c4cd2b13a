"""The denoiser's calls: they open the denoising and its steps."""

import functools
from collections.abc import Iterator
from typing import ClassVar, Final

from torch import nn

from sigmascope.integrations.watching.activity import current
from sigmascope.integrations.watching.instrument import Instrument
from sigmascope.integrations.watching.module_calls import hook_calls
from sigmascope.integrations.watching.parts import Parts
from sigmascope.integrations.watching.taps import After, Arguments, Keywords

_NAMES: Final = ("unet", "transformer", "transformer_2", "denoiser", "prior", "decoder")
"""Where pipelines keep denoisers whose architecture is not known."""


class Denoisers(Instrument):
    """A step for all calls of denoisers up to the scheduler's step."""

    name: ClassVar[str] = "denoiser"

    def attach(self, parts: Parts) -> None:
        """Hear every denoiser."""
        schedulers = [part for _, part in parts.of_role("scheduler") if callable(getattr(part, "step", None))]
        for name, denoiser in denoisers_of(parts):
            before = functools.partial(self._before, name, bool(schedulers))
            hook_calls(self, denoiser, before, after=not schedulers)

    def _before(self, name: str, has_scheduler: bool, args: Arguments, kwargs: Keywords) -> After | None:
        activity = current(self.session) or self.session.here()
        if activity is None:
            return None
        denoising = activity.denoising or activity.start_denoising()
        denoising.called(name, args, kwargs)
        return None if has_scheduler else lambda _result, _error: denoising.returned()


def denoisers_of(parts: Parts) -> Iterator[tuple[str, nn.Module]]:
    """Modules that are denoisers by their architecture, or else by their name, with their names."""
    known = dict(parts.of_role("denoiser"))
    known |= {name: part for name, part in parts.of_role("other") if name in _NAMES}
    for name, part in known.items():
        if isinstance(part, nn.Module):
            yield name, part
