"""Weights that offloading moves in and out while a pipeline runs: how long that took."""

import functools
from typing import ClassVar, Final

from sigmascope.integrations.watching.activity import current_activity
from sigmascope.integrations.watching.imports import when_loaded
from sigmascope.integrations.watching.instrument import Instrument
from sigmascope.integrations.watching.listeners import After, Arguments, Keywords
from sigmascope.integrations.watching.parts import Parts

_MOVERS: Final = (
    ("accelerate.hooks", "CpuOffload", ("pre_forward",)),
    ("accelerate.hooks", "UserCpuOffloadHook", ("offload",)),
    ("accelerate.hooks", "AlignDevicesHook", ("pre_forward", "post_forward")),
    ("diffusers.hooks.group_offloading", "ModuleGroup", ("onload_", "offload_")),
)
"""What moves weights, for whole models, for single modules, and for groups of them."""


class Transfers(Instrument):
    """The time for which the host waits for weights to be moved. A copy that goes on meanwhile is not in it.

    Nothing is put on before a pipeline is offloaded.
    """

    name: ClassVar[str] = "transfers"

    def attach(self, parts: Parts) -> None:
        """Hear the movers, if any component is offloaded."""
        if self.has("CpuOffload") or not any(one.offload for one in parts.facts.components.values()):
            return
        for module, kind, methods in _MOVERS:
            self.keep_undo(kind, when_loaded(module, kind, functools.partial(self._put_on, methods)))

    def _put_on(self, methods: tuple[str, ...], kind: type) -> None:
        try:
            for method in methods:
                if method in vars(kind):
                    self.tap(kind, method, self._before_move)
        except Exception as failure:  # noqa: BLE001 - this may run in the host's import
            self.failed(failure)

    def _before_move(self, mover: object, args: Arguments, kwargs: Keywords) -> After | None:
        activity = current_activity(self.session)
        if activity is None or activity.is_moving or getattr(mover, "offload", True) is False:
            return None  # a mover calls others, and some move inputs alone
        clock = self.session.recorder.clock
        activity.is_moving = True
        started = clock()

        def after(result: object, error: BaseException | None) -> None:
            activity.is_moving = False
            activity.weights_moved(clock() - started)

        return after
