"""Faults in our instruments, planted at random, and what `status` has to say of each instrument then."""

import functools
import inspect
import random
from collections.abc import Callable
from typing import Any

from sigmascope.integrations.comfyui.instruments import Instrument
from sigmascope.integrations.comfyui.needs import Need
from sigmascope.integrations.comfyui.session import Session

PLANTED = "RuntimeError: planted"
MAY_BE_MISSING = {
    "tiles": Need("comfy.sd", "VAE.encode_tiled_"),
    "hook_lora": Need("comfy.model_patcher", "ModelPatcher.patch_hook_weight_to_device", ("key",)),
}
"""By instrument, a function that no graph of these tests calls, so that ComfyUI does without it."""
Undo = Callable[[], None]


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("planted")


def changed(function: Any) -> Any:
    """The same function with a parameter of another name."""

    async def asynchronous(*arguments: Any, **named: Any) -> Any:
        return await function(*arguments, **named)

    def synchronous(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    made: Any = asynchronous if inspect.iscoroutinefunction(function) else synchronous
    made.__signature__ = inspect.Signature([inspect.Parameter("other", inspect.Parameter.KEYWORD_ONLY)])
    return made


class Faults:
    """Faults for some of a session's instruments, which has not begun.

    Attributes:
        by_name: "signature", "missing", "put on", "call" or "end", by instrument.
        host_faults: The functions of the host that are changed.
    """

    def __init__(self, session: Session, seed: int) -> None:
        dice = random.Random(seed)
        self.session = session
        self.by_name: dict[str, str] = {}
        self.host_faults: list[Need] = []
        self._undo: list[Undo] = []
        for one in session.instruments:
            kinds = ["put on", "call", "end"]
            kinds += ["signature"] if any(need.parameters for need in one.needs) else []
            kinds += ["missing"] if one.name in MAY_BE_MISSING else []
            if dice.random() < 0.4:
                self.by_name[one.name] = dice.choice(kinds)

    def plant_before(self) -> None:
        """What stands before the session begins: the host is another one, or an instrument cannot be put on."""
        for one in self.session.instruments:
            kind = self.by_name.get(one.name)
            if kind == "put on":
                one.put_on = fail  # type: ignore[method-assign]
            elif kind == "missing":
                self._change(MAY_BE_MISSING[one.name], None)
            elif kind == "signature":
                need = next(need for need in one.needs if need.parameters)
                self._change(need, changed(vars(need.owner())[need.own_name]))

    def _change(self, need: Need, instead: Any) -> None:
        owner = need.owner()
        was = vars(owner)[need.own_name]
        if was is not None:  # else another fault took it away already
            setattr(owner, need.own_name, instead)
            self.host_faults.append(need)
            self._undo.append(functools.partial(setattr, owner, need.own_name, was))

    def plant_after(self) -> None:
        """What breaks in instruments that are on."""
        for one in self.session.instruments:
            kind = self.by_name.get(one.name)
            if kind == "end":
                one.at_the_end = fail  # type: ignore[method-assign]
            for wrap in one.wraps if kind == "call" else ():
                wrap._before = fail

    def undo(self) -> None:
        """Make the host what it was."""
        while self._undo:
            self._undo.pop()()

    def expected(self) -> dict[str, str | None]:
        """By instrument, how the reason for which it is off begins once a prompt has run; None: it is on."""
        prompts = self.session.instruments[0]
        changed = {need.where: need for need in self.host_faults}
        ends = self.by_name.get(prompts.name) in (None, "end") and changed.keys().isdisjoint(
            need.where for need in prompts.needs
        )
        return {one.name: self._expected(one, changed, ends=ends) for one in self.session.instruments}

    def _expected(self, one: Instrument, changed: dict[str, Need], *, ends: bool) -> str | None:
        for need in one.needs:
            if need.where in changed:
                gone = vars(need.owner()).get(need.own_name) is None
                if gone:
                    return f"there is no {need.where}"
                if need.parameters:
                    return f"{need.where} has no parameter"
        kind = self.by_name.get(one.name)
        if kind in ("put on", "call") or (kind == "end" and ends):
            return PLANTED
        return None
