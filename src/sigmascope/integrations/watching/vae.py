"""The VAE's encoding and decoding."""

import functools
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from sigmascope.integrations.watching.activity import current_activity
from sigmascope.integrations.watching.endings import end_finished, is_final
from sigmascope.integrations.watching.instrument import Instrument, holder_of
from sigmascope.integrations.watching.latent_analysis import STAGES, known_before, tell
from sigmascope.integrations.watching.listeners import After, Arguments, Keywords
from sigmascope.integrations.watching.parts import Parts
from sigmascope.probes.modules import unwrap
from sigmascope.records.latents import Direction

if TYPE_CHECKING:
    from sigmascope.integrations.watching.session import Session


class VaeCalls(Instrument):
    """A stage for each `encode` and `decode`; one that is called by another is part of it."""

    name: ClassVar[str] = "vae"

    def __init__(self, session: "Session") -> None:
        super().__init__(session)
        self._names: dict[int, str] = {}

    def attach(self, parts: Parts) -> None:
        """Hear both of every VAE, also of one that is wrapped."""
        for name, vae in parts.of_role("vae"):
            holders = (holder_of(vae, way) for way in ("encode", "decode"))
            for thing in {id(one): one for one in (vae, unwrap(vae), *holders) if one is not None}.values():
                self.tap_method(thing, "encode", functools.partial(self._before, "encoding"))
                self.tap_method(thing, "decode", functools.partial(self._before, "decoding"))
                for method in ("tiled_encode", "tiled_decode"):
                    self.tap_method(thing, method, self._before_tiles)
                self._names[id(unwrap(thing) or thing)] = name

    def _before(self, way: Direction, vae: object, args: Arguments, kwargs: Keywords) -> After | None:
        activity = self.session.here()
        if activity is None or activity.is_in(*STAGES.values()):
            return None
        if way == "decoding" and is_final(activity):
            activity.end_denoising()
        elif way == "encoding":
            end_finished(activity)
        given = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)), None)
        guard = self.session.guard
        baseline, _ = guard.read("watch.latents", lambda: known_before(way, vae, given))
        component = self._names.get(id(unwrap(vae) or vae))
        activity.is_tiled = False
        stage = activity.enter(STAGES[way])

        def after(result: object, error: BaseException | None) -> None:
            strategy = "Tiled" if activity.is_tiled else "Direct"
            activity.leave(stage, error)
            stage.fact("component", component)
            made = first_tensor(result)
            guard.read("watch.latents", lambda: tell(stage, way, baseline, made, strategy, error))
            latent, picture = (made, given) if way == "encoding" else (given, made)
            for name, tensor in (("latent", latent), ("picture", picture)):
                if tensor is not None:
                    stage.tensor(name, tensor)
            if way == "decoding" and picture is not None and picture.dim() >= 4:
                activity.size = (int(picture.shape[-2]), int(picture.shape[-1]))

        return after

    def _before_tiles(self, _vae: object, _args: Arguments, _kwargs: Keywords) -> After | None:
        activity = current_activity(self.session)
        if activity is not None:
            activity.is_tiled = True
        return None


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
