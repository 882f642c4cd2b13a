"""The instrument that hears which models are put on a device for which node, and which had to leave for them."""

import sys
import time
from collections import Counter
from functools import partial
from typing import Any, Final, NamedTuple

from sigmascope.integrations.comfyui.instruments import Instrument
from sigmascope.integrations.comfyui.needs import Need
from sigmascope.integrations.comfyui.wraps import Call, Wrap
from sigmascope.probes.reading import attempt

LOADS: Final = "loads"
"""The fact of a node's stage that lists them."""


class _OnDevice(NamedTuple):
    """A model's class, and how many of its bytes are there."""

    name: str
    loaded_bytes: int


class Loading(Instrument):
    """Wraps `comfy.model_management.load_models_gpu`."""

    name = "loading"
    gives = "models moved to a device, kept there, partly loaded and evicted"
    needs = (Need("comfy.model_management", "load_models_gpu", ("models",), False),)

    def misfit(self) -> str | None:
        """See `Instrument`."""
        loaded = getattr(sys.modules.get("comfy.model_management"), "current_loaded_models", None)
        return super().misfit() or (None if isinstance(loaded, list) else "current_loaded_models is no list")

    def put_on(self) -> None:
        """See `Instrument`."""
        self.wraps.append(Wrap(self.needs[0], self, before=self._before, after=self._after))

    def _before(self, _call: Call) -> tuple[float, dict[int, _OnDevice]]:
        return time.perf_counter(), _on_devices()

    def _after(self, call: Call, known: Any, _result: object, error: BaseException | None) -> None:
        began, before = known
        took = time.perf_counter() - began
        node, prompt = self.node_here(), self.prompt_here()
        if node is None or prompt is None:
            return
        now = _on_devices()
        wanted = [
            {**_known(patcher), "kept": _identity(patcher) in before} for patcher in call.get("models") or ()
        ]
        asked = {_identity(patcher) for patcher in call.get("models") or ()}
        evicted = [was.name for key, was in before.items() if key not in now]
        in_part = [
            {"model": was.name, "bytes": was.loaded_bytes - now[key].loaded_bytes}
            for key, was in before.items()
            if key in now and key not in asked and now[key].loaded_bytes < was.loaded_bytes
        ]
        node.add(
            LOADS,
            {
                "seconds": took,
                "models": wanted,
                "evicted": evicted,
                "evicted_in_part": in_part,
                "error": error and type(error).__name__,
            },
        )
        if node.is_sampler and node.is_between_bars:
            prompt.step_begins(
                node
            )  # what loading took is not the step's: each latent of a list is sampled anew


def _on_devices() -> dict[int, _OnDevice]:
    """Each model that ComfyUI holds on a device, by the model's identity."""
    known = {}
    for loaded in sys.modules["comfy.model_management"].current_loaded_models:
        patcher = loaded.model
        on_device = None if patcher is None else attempt(partial(_on_device, patcher)).value
        if on_device is not None:
            known[_identity(patcher)] = on_device
    return known


def _on_device(patcher: Any) -> _OnDevice:
    return _OnDevice(type(patcher.model).__name__, int(patcher.loaded_size()))


def _identity(patcher: Any) -> int:
    """The identity of a patcher's model; of what says of none, its own."""
    model = attempt(lambda: patcher.model).value
    return id(patcher if model is None else model)


def _known(patcher: Any) -> dict[str, Any]:
    """The figures of a model, or why they cannot be read."""
    figures = attempt(lambda: _figures(patcher))
    return figures.value or {"model": type(patcher).__name__, "unavailable": figures.reason}


def _figures(patcher: Any) -> dict[str, Any]:
    """Of a model: its class, its bytes, how many of them are on its device, which that is, and where the others are."""
    whole, there = patcher.model_size(), patcher.loaded_size()
    on_each = Counter({str(patcher.load_device): int(there)})
    on_each[str(patcher.offload_device)] += int(whole) - int(there)
    return {
        "model": type(patcher.model).__name__,
        "device": str(patcher.load_device),
        "bytes": int(whole),
        "loaded_bytes": int(there),
        "bytes_on_each": {device: size for device, size in on_each.items() if size > 0},
        "whole": bool(there >= whole),
    }


INSTRUMENT = Loading
