"""Nodes as other packs have them, which do what ComfyUI's own do not. For the tests of the watch on a real server."""

import asyncio
import importlib
import inspect
import mmap
import threading
from pathlib import Path
from typing import Any

import torch

EXECUTION: Any = importlib.import_module("execution")
MANAGEMENT: Any = importlib.import_module("comfy.model_management")
UTILS: Any = importlib.import_module("comfy.utils")
NODES: Any = importlib.import_module("nodes")
SERVER: Any = importlib.import_module("server")
FOLDERS: Any = importlib.import_module("folder_paths")
GRAPHS: Any = importlib.import_module("comfy_execution.graph_utils")
IO: Any = importlib.import_module("comfy_api.latest").io


class OddBase:
    """What all of them have."""

    RETURN_TYPES: Any = ("LATENT",)
    FUNCTION = "run"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"x": ("LATENT",)}}


class Odd(OddBase):
    """Hands its latent on."""

    def run(self, x: Any) -> Any:
        return (x,)


class OddLazy(OddBase):
    """Takes one of two inputs, and asks for that alone."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        lazy = ("LATENT", {"lazy": True})
        return {"required": {"first": ("BOOLEAN",), "a": lazy, "b": lazy}}

    def check_lazy_status(self, first: bool, a: Any = None, b: Any = None) -> list[str]:
        return [name for name, value in (("a", a), ("b", b)) if value is None and (name == "a") is first]

    def run(self, first: bool, a: Any = None, b: Any = None) -> Any:
        return (a if first else b,)


class OddSwitch(OddBase):
    """Takes one of two models, and is given both."""

    RETURN_TYPES = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"first": ("BOOLEAN",), "a": ("MODEL",), "b": ("MODEL",)}}

    def run(self, first: bool, a: Any, b: Any) -> Any:
        return (a if first else b,)


class OddList(Odd):
    """Gives a list of three, for each of which what follows runs."""

    OUTPUT_IS_LIST = (True,)

    def run(self, x: Any) -> Any:
        return ([x, x, x],)


class OddBlock(Odd):
    """Keeps what follows from running, and says why or not."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"x": ("LATENT",), "says": ("STRING",)}}

    def run(self, x: Any, says: str = "") -> Any:
        return (GRAPHS.ExecutionBlocker(says or None),)


class OddSpoil(Odd):
    """Changes what it is given, which ComfyUI keeps."""

    def run(self, x: Any) -> Any:
        x["samples"].fill_(float("nan"))
        return (x,)


class OddTakesList(Odd):
    INPUT_IS_LIST = True

    def run(self, x: list[Any]) -> Any:
        return (x[0],)


class OddChanged(Odd):
    @classmethod
    def IS_CHANGED(cls, x: Any) -> Any:
        raise RuntimeError("planted")


class OddEnd(Odd):
    """Has no output, but is one."""

    RETURN_TYPES = ()
    OUTPUT_NODE = True

    def run(self, x: Any) -> Any:
        return {}


class OddHold(OddBase):
    """Makes a latent that is so many MiB larger, of memory that no other node has freed."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"x": ("LATENT",), "mib": ("INT", {"default": 0, "max": 10**6})}}

    def run(self, x: Any, mib: int) -> Any:
        fresh = mmap.mmap(-1, max(4, mib * 2**20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return ({**x, "held": torch.frombuffer(fresh, dtype=torch.float32).fill_(1)},)


class OddLoop(OddBase):
    """Expands into a node that holds memory and into itself, as loops do."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        numbers = {name: ("INT", {"default": 0, "max": 10**6}) for name in ("turns", "mib")}
        return {"required": {"x": ("LATENT", {"rawLink": True}), **numbers}}

    def run(self, x: Any, turns: int, mib: int) -> Any:
        graph = GRAPHS.GraphBuilder()
        node = graph.node("OddHold", x=x, mib=mib)
        if turns > 1:
            node = graph.node("OddLoop", x=node.out(0), turns=turns - 1, mib=mib)
        return {"result": (node.out(0),), "expand": graph.finalize()}


class OddExecutor(Odd):
    """Runs a prompt of its own, on a thread."""

    def run(self, x: Any) -> Any:
        graph = {
            "1": {
                "class_type": "EmptyLatentImage",
                "inputs": {"width": 64, "height": 64, "batch_size": 1},
            },
            "2": {"class_type": "OddEnd", "inputs": {"x": ["1", 0]}},
        }
        words: dict[str, Any] = {}
        if "cache_args" in inspect.signature(EXECUTION.PromptExecutor.__init__).parameters:
            words["cache_args"] = {"lru": 0, "ram": 0, "ram_inactive": 0}
        executor = EXECUTION.PromptExecutor(SERVER.PromptServer.instance, **words)
        client = executor.server.client_id

        def execute() -> None:
            asyncio.run(executor.execute_async(graph, "inner", {}, ["2"]))

        thread = threading.Thread(target=execute)
        thread.start()
        thread.join()
        executor.server.client_id = client
        return (x,)


class OddThreads(Odd):
    """Moves bars and reads a file on threads of its own."""

    def run(self, x: Any) -> Any:
        bar, path = UTILS.ProgressBar(100), FOLDERS.get_full_path("loras", "good.safetensors")

        def work() -> None:
            for _ in range(25):
                bar.update(1)
            UTILS.load_torch_file(path)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return (x,)


class OddInterrupt(Odd):
    def run(self, x: Any) -> Any:
        raise MANAGEMENT.InterruptProcessingException


class OddExit(Odd):
    """Ends the thread that ComfyUI runs prompts on."""

    def run(self, x: Any) -> Any:
        raise KeyboardInterrupt


class OddText(OddBase):
    """Takes words in inputs of any name."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        words = {"one_line": ("STRING",), "lines": ("STRING", {"multiline": True})}
        return {"required": {"x": ("LATENT",), **words, "choice": (["this", "that"],)}}

    def run(self, x: Any, one_line: str, lines: str, choice: str) -> Any:
        return (x,)


class OddLoras(OddBase):
    """Puts on all LoRAs of a dict that it is given, as loaders of many do."""

    RETURN_TYPES = ("MODEL", "CLIP")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "clip": ("CLIP",)}, "optional": _Any()}

    def run(self, model: Any, clip: Any, **loras: Any) -> Any:
        for lora in loras.values():
            if lora["on"]:
                loader = NODES.LoraLoader()
                model, clip = loader.load_lora(model, clip, lora["lora"], lora["strength"], lora["strength"])
        return (model, clip)


class OddLorasBackwards(OddLoras):
    """The same, the last one first."""

    def run(self, model: Any, clip: Any, **loras: Any) -> Any:
        return super().run(model, clip, **dict(reversed(loras.items())))


class _Any(dict[str, Any]):
    """Inputs of any name."""

    def __contains__(self, name: object) -> bool:
        return True

    def __getitem__(self, name: str) -> Any:
        return ("*",)


class OddNew(IO.ComfyNode):  # type: ignore[misc]
    """A node of the newer kind, whose method is asynchronous."""

    @classmethod
    def define_schema(cls) -> Any:
        return IO.Schema(
            node_id="OddNew",
            category="tests",
            inputs=[IO.Latent.Input("x"), IO.Combo.Input("choice", options=["this", "that"])],
            outputs=[IO.Latent.Output()],
        )

    @classmethod
    async def execute(cls, x: Any, choice: str) -> Any:
        await asyncio.sleep(0.1)
        return IO.NodeOutput(x)


def wrap_as_others_do() -> None:
    """Put functions of its own around ComfyUI's, which tell nothing of what they take."""
    async_was, data_was = EXECUTION.PromptExecutor.execute_async, EXECUTION.get_output_data

    async def around(self: Any, *arguments: Any, **named: Any) -> Any:
        return await async_was(self, *arguments, **named)

    def data(*arguments: Any, **named: Any) -> Any:
        return data_was(*arguments, **named)

    EXECUTION.PromptExecutor.execute_async, EXECUTION.get_output_data = around, data


if "wraps" in Path(__file__).parent.name:
    wrap_as_others_do()

NODE_CLASS_MAPPINGS = {
    kind.__name__: kind
    for kind in (
        Odd,
        OddLazy,
        OddSwitch,
        OddList,
        OddBlock,
        OddSpoil,
        OddTakesList,
        OddChanged,
        OddEnd,
        OddHold,
        OddLoop,
        OddExecutor,
        OddThreads,
        OddInterrupt,
        OddExit,
        OddText,
        OddLoras,
        OddLorasBackwards,
        OddNew,
    )
}
