"""Nodes with planted behaviour, for the tests of the watch: a sleep, a task of its own, a failure, NaN, a subgraph, lack of memory."""

import asyncio
import copy
import gc
import importlib
import json
import threading
import time
from typing import Any

import torch

from sigmascope.integrations.comfyui import session as sessions

from .faults import Faults  # ComfyUI has a package `tests` itself

MANAGEMENT: Any = importlib.import_module("comfy.model_management")
FLOAT: Any = importlib.import_module("comfy.float")
RANDOM_ROUNDING = FLOAT.stochastic_rounding
OUT_OF_MEMORY: Any = MANAGEMENT.OOM_EXCEPTION
GraphBuilder: Any = importlib.import_module("comfy_execution.graph_utils").GraphBuilder


class PlantedSleep:
    """Sleeps, and hands its latent on."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "run"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"x": ("LATENT",), "seconds": ("FLOAT", {"default": 0.2})}}

    def run(self, x: Any, seconds: float) -> Any:
        time.sleep(seconds)
        return (x,)


class PlantedAsync(PlantedSleep):
    async def run(self, x: Any, seconds: float) -> Any:
        await asyncio.sleep(seconds)
        return (x,)


class PlantedFailure(PlantedSleep):
    def run(self, x: Any, seconds: float) -> Any:
        time.sleep(seconds)
        raise ValueError("planted")


class PlantedNan(PlantedSleep):
    def run(self, x: Any, seconds: float) -> Any:
        return ({"samples": x["samples"] * float("nan")},)


class PlantedSubgraph(PlantedSleep):
    def run(self, x: Any, seconds: float) -> Any:
        graph = GraphBuilder()
        first = graph.node("PlantedSleep", x=x, seconds=seconds)
        second = graph.node("PlantedSleep", x=first.out(0), seconds=seconds)
        return {"result": (second.out(0),), "expand": graph.finalize()}


class PlantedAllocation(PlantedSleep):
    """Holds 200 MiB for a moment."""

    def run(self, x: Any, seconds: float) -> Any:
        held = bytearray(200 * 2**20)
        held[::4096] = b"x" * len(held[::4096])
        time.sleep(seconds)
        return (x,)


class PlantedOutOfMemory:
    """A VAE whose next decoding in one piece finds no memory."""

    RETURN_TYPES = ("VAE",)
    FUNCTION = "run"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"vae": ("VAE",)}}

    def run(self, vae: Any) -> Any:
        model = vae.first_stage_model

        class Once:
            failed = False

            def __getattr__(self, name: str) -> Any:
                return getattr(model, name)

            def decode(self, *arguments: Any, **named: Any) -> Any:
                if not Once.failed:
                    Once.failed = True
                    raise OUT_OF_MEMORY("planted: out of memory")
                return model.decode(*arguments, **named)

        planted = copy.copy(vae)
        planted.first_stage_model = Once()
        return (planted,)


class PlantedConditioning:
    """The conditioning of a text encoder that is too large for a test: random numbers."""

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "run"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        numbers = {name: ("INT", {"default": 0, "max": 8192}) for name in ("width", "pooled", "tokens")}
        return {"required": numbers}

    def run(self, width: int, pooled: int, tokens: int) -> Any:
        generator = torch.Generator().manual_seed(1)
        tensor = torch.randn(1, tokens, width, generator=generator)
        options = {"pooled_output": torch.randn(1, pooled, generator=generator)} if pooled else {}
        return ([[tensor, options]],)


def _nearest(value: torch.Tensor, dtype: torch.dtype, *_: Any, **__: Any) -> torch.Tensor:
    return value.to(dtype)


class PlantedRounding:
    """From now on ComfyUI rounds what it merges into float8 to the nearest number, as plain casts do; or at random, as it does."""

    RETURN_TYPES = ()
    FUNCTION = "run"
    CATEGORY = "tests"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"nearest": ("BOOLEAN",)}}

    def run(self, nearest: bool) -> Any:
        FLOAT.stochastic_rounding = _nearest if nearest else RANDOM_ROUNDING
        return {}


class PlantedKeep:
    """Takes hooks, and does nothing with them."""

    RETURN_TYPES = ()
    FUNCTION = "run"
    CATEGORY = "tests"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"hooks": ("HOOKS",)}}

    def run(self, hooks: Any) -> Any:
        return {}


_MEMORY = ("get_free_memory", "is_device_cpu", "get_torch_device", "vram_state")
_AS_IT_WAS = {name: getattr(MANAGEMENT, name) for name in _MEMORY}


class PlantedMemory:
    """From now on ComfyUI takes the processor for a card with so many MiB free; 0: as it was."""

    RETURN_TYPES = ()
    FUNCTION = "run"
    CATEGORY = "tests"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"mib": ("INT", {"default": 0, "max": 10**6})}}

    @classmethod
    def IS_CHANGED(cls, mib: int) -> float:
        return float("nan")

    def run(self, mib: int) -> Any:
        MANAGEMENT.unload_all_models()
        vars(MANAGEMENT).update(_AS_IT_WAS)
        if mib:
            free = mib * 2**20
            MANAGEMENT.get_free_memory = lambda dev=None, torch_free_too=False: (
                (free, free) if torch_free_too else free
            )
            MANAGEMENT.is_device_cpu = lambda device: False
            MANAGEMENT.get_torch_device = lambda: torch.device("cpu", 0)
            MANAGEMENT.vram_state = MANAGEMENT.VRAMState.NORMAL_VRAM
        return {}


class PlantedWatch:
    """Ends the watch of this process, or begins it anew, with faults of this number in it (0: none).

    Gives what the watch says of itself, and what there is of ours in the process, as a text.
    """

    RETURN_TYPES = ()
    FUNCTION = "run"
    CATEGORY = "tests"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"act": (["look", "begin", "end"],), "faults": ("INT", {"default": 0, "max": 10**6})}
        }

    @classmethod
    def IS_CHANGED(cls, act: str, faults: int) -> float:
        return float("nan")

    def run(self, act: str, faults: int) -> Any:
        if sessions._session is not None:
            LISTENERS[:] = sessions._session.listeners
        if act != "look":
            sessions.stop()
            while PLANTED:
                PLANTED.pop().undo()
        if act == "begin":
            session = sessions.Session(sessions.records_folder())
            planted = Faults(session, faults) if faults else None
            if planted is not None:
                PLANTED.append(planted)
                planted.plant_before()
            session.start()
            session.listeners += LISTENERS
            sessions._session = session
            if planted is not None:
                planted.plant_after()
        return {"ui": {"text": [json.dumps(self._known())]}}

    def _known(self) -> dict[str, Any]:
        session = sessions._session
        registry = importlib.import_module("comfy_execution.progress").get_progress_state()
        depth, found = 0, importlib.import_module("execution").execute
        while (found := getattr(found, "__wrapped__", None)) is not None:
            depth += 1
        return {
            "status": None if session is None else session.status(),
            "expected": PLANTED[-1].expected() if PLANTED else None,
            "handlers": len(registry.handlers),
            "wraps": depth,
            "threads": threading.active_count(),
            "ours": sum(str(type(thing).__module__).startswith("sigmascope.") for thing in gc.get_objects()),
        }


PLANTED: list[Faults] = []
LISTENERS: list[Any] = []
"""What the loader let hear of the session's records, which the next session's are for, too."""

NODE_CLASS_MAPPINGS = {
    kind.__name__: kind
    for kind in (
        PlantedSleep,
        PlantedAsync,
        PlantedFailure,
        PlantedNan,
        PlantedSubgraph,
        PlantedAllocation,
        PlantedOutOfMemory,
        PlantedConditioning,
        PlantedRounding,
        PlantedKeep,
        PlantedMemory,
        PlantedWatch,
    )
}
