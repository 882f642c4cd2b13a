"""Nodes with planted behaviour, for the tests of the watch: a sleep, a task of its own, a failure, NaN, a subgraph, lack of memory."""

import asyncio
import copy
import importlib
import time
from typing import Any

OUT_OF_MEMORY: Any = importlib.import_module("comfy.model_management").OOM_EXCEPTION
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
    )
}
