"""A stand-in of what ComfyUI's server runs prompts with: the modules, names and calls that the instruments rely on.

It runs a graph in the order of its nodes, keeps outputs between prompts as ComfyUI's cache does, expands nodes, awaits
those that are tasks, and reports failures in its result. It is written from the contract, and shares no line with ComfyUI.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch

Graph = Mapping[str, Mapping[str, Any]]


class Context(NamedTuple):
    prompt_id: str
    node_id: str
    list_index: int | None


class Interrupted(Exception):
    """What ComfyUI raises where the user interrupts; the instrument knows it by this name."""


Interrupted.__name__ = "InterruptProcessingException"


class Area(NamedTuple):
    """What ComfyUI makes of a conditioning for a step, in part."""

    mult: torch.Tensor
    hooks: Any


class Outcome(NamedTuple):
    name: str


SUCCESS, FAILURE, PENDING = Outcome("SUCCESS"), Outcome("FAILURE"), Outcome("PENDING")


class Blocker:
    """What a node gives that keeps those behind it from running."""


class Handler:
    def __init__(self, name: str) -> None:
        self.name, self.enabled = name, True

    def start_handler(self, node_id: str, state: Any, prompt_id: str) -> None: ...

    def update_handler(
        self,
        node_id: str,
        value: int | float,
        max_value: int | float,
        state: Any,
        prompt_id: str,
        image: Any = None,
    ) -> None: ...

    def finish_handler(self, node_id: str, state: Any, prompt_id: str) -> None: ...


class Registry:
    def __init__(self, prompt_id: str, dynprompt: Any) -> None:
        self.prompt_id, self.dynprompt = prompt_id, dynprompt
        self.handlers: dict[str, Handler] = {}

    def register_handler(self, handler: Handler) -> None:
        self.handlers[handler.name] = handler

    def tell(self, event: str, node_id: str, *values: int | float) -> None:
        for handler in self.handlers.values():
            getattr(handler, event)(node_id, *values, {}, self.prompt_id)


class DynPrompt:
    def __init__(self, graph: Graph) -> None:
        self.graph = dict(graph)
        self.parents: dict[str, str] = {}

    def has_node(self, node_id: str) -> bool:
        return node_id in self.graph

    def get_node(self, node_id: str) -> Any:
        return self.graph[node_id]

    def get_parent_node_id(self, node_id: str) -> str | None:
        return self.parents.get(node_id)


class Vae:
    def decode(self, runs_out: bool) -> str:
        return self.decode_tiled_() if runs_out else "whole"

    def decode_tiled(self) -> str:
        return self.decode_tiled_()

    def decode_tiled_(self) -> str:
        return "tiles"

    def encode_tiled(self) -> str:
        return self.encode_tiled_()

    def encode_tiled_(self) -> str:
        return "tiles"


class Patcher:
    def register_all_hook_patches(self, hooks: Any, target_dict: Any) -> None: ...

    def patch_hook_weight_to_device(self, hooks: Any, combined_patches: Any, key: str) -> None: ...


class Host:
    """The modules, by name, and the nodes that a graph may have: functions of their inputs.

    Attributes:
        here: The node that runs, as `get_executing_context` has it.
        told: Called once whoever waits for a prompt knows of its end.
    """

    def __init__(self) -> None:
        self.here: Context | None = None
        self.told: Callable[[], object] = lambda: None
        self.nodes: dict[str, Any] = {}
        self.registry = Registry("none", None)
        self.cache: dict[tuple[str, str], Any] = {}
        self.modules = {
            name: ModuleType(name)
            for name in (
                "execution",
                "comfy_execution",
                "comfy_execution.progress",
                "comfy_execution.graph_utils",
                "comfy_execution.utils",
                "comfy.utils",
                "comfy.lora",
                "comfy.model_management",
                "comfy.model_patcher",
                "comfy.samplers",
                "comfy.sd",
            )
        }
        self._fill()

    def module(self, name: str) -> Any:
        return self.modules[name]

    def _fill(self) -> None:
        host = self

        class ProgressHandler(Handler): ...

        for name in ("start_handler", "update_handler", "finish_handler"):
            setattr(ProgressHandler, name, vars(Handler)[name])
        ProgressRegistry = type("ProgressRegistry", (), dict(vars(Registry)))
        VAE = type("VAE", (), dict(vars(Vae)))
        ModelPatcher = type("ModelPatcher", (), dict(vars(Patcher)))

        def load_torch_file(ckpt: str, safe_load: bool = False, **_: Any) -> dict[str, Any]:
            return {"read": ckpt}

        class ProgressBar:
            def __init__(self, total: int, node_id: str | None = None) -> None:
                self.total, self.node_id = total, node_id

            def update_absolute(self, value: int, total: int | None = None, preview: Any = None) -> None:
                """As since ComfyUI 0.33: of fast steps, handlers hear the first and the last."""
                if value in (1, self.total) and host.here is not None:
                    host.registry.tell("update_handler", host.here.node_id, value, self.total)

        def load_lora(
            lora: Mapping[str, Any], to_load: Mapping[str, Any], log_missing: bool = True
        ) -> dict[str, Any]:
            return {key: value for key, value in lora.items() if key in to_load}

        def get_area_and_mult(conds: Any, x_in: Any, timestep_in: Any) -> Any:
            """What of a latent a conditioning is for, and its weight there; None: it is not for this step."""
            if conds.get("is_over") or timestep_in >= conds.get("timestep_end", 1000):
                return None
            mult = conds.get("mask", 1.0) * conds.get("strength", 1.0) * torch.ones_like(x_in)
            return Area(mult, conds.get("hooks"))

        def sampling_function(
            model: Any, x: Any, timestep: Any, uncond: Any, cond: Any, cond_scale: float,
            model_options: Any = None, seed: Any = None,
        ) -> None:  # fmt: skip
            for conds in (cond, uncond):
                for one in conds:
                    self.module("comfy.samplers").get_area_and_mult(one, x, timestep)

        class CFGGuider:
            """Samples by a model's conditionings, a step after another."""

            def __init__(self, model: Any, conds: Any, cfg: float, model_options: Any = None) -> None:
                self.model, self.conds, self.cfg = model, conds, cfg
                self.model_options = model_options or {}

            def inner_sample(self, steps: int, sampler: Any = None, denoise_mask: Any = None) -> None:
                for step in range(steps):
                    self.outer_predict_noise(torch.zeros(4), step)

            def outer_predict_noise(self, x: Any, timestep: Any) -> None:
                self.predict_noise(x, timestep)

            def predict_noise(self, x: Any, timestep: Any) -> None:
                conds, options = self.conds, self.model_options
                samplers = host.module("comfy.samplers")
                negative = [] if self.cfg == 1 else conds["negative"]
                samplers.sampling_function(
                    self.model, x, timestep, negative, conds["positive"], self.cfg, model_options=options
                )

        def load_models_gpu(models: Any, memory_required: int = 0) -> None: ...

        async def get_output_data(
            prompt_id: str, unique_id: str, obj: Any, input_data_all: Mapping[str, Any], *_: Any, **__: Any
        ) -> Any:
            host.here = Context(prompt_id, unique_id, None)
            try:
                given = {name: values[0] for name, values in input_data_all.items()}
                if any(isinstance(value, Blocker) for value in given.values()):
                    return [[Blocker()] for _ in obj.RETURN_TYPES], {}, False, False
                made = obj.run(**given)
                if inspect.isawaitable(made):
                    task = asyncio.ensure_future(made)
                    return [task], {}, False, True
            finally:
                host.here = None
            if isinstance(made, dict) and "expand" in made:
                return made, {}, True, False
            return [[value] for value in made], {}, False, False

        async def execute(
            server: Any,
            dynprompt: DynPrompt,
            caches: Any,
            current_item: str,
            extra_data: Any,
            executed: Any,
            prompt_id: str,
        ) -> Any:
            return await host.execute(dynprompt, current_item, prompt_id)

        class PromptExecutor:
            def __init__(self) -> None:
                self.status_messages: list[Any] = []

            async def execute_async(
                self, prompt: Graph, prompt_id: str, extra_data: Any = None, execute_outputs: Any = ()
            ) -> None:
                await host.run_prompt(self, prompt, prompt_id)

        class PromptQueue:
            def __init__(self) -> None:
                self.items: list[Any] = []

            def put(self, item: Any) -> None:
                self.items.append(item)

            def get_flags(self, reset: bool = True) -> dict[str, bool]:
                return {}

        async def validate_prompt(prompt_id: str, prompt: Graph, partial_execution_list: Any) -> bool:
            return True

        self._set("execution", PromptQueue=PromptQueue, validate_prompt=validate_prompt)
        self._set(
            "comfy_execution.progress", ProgressHandler=ProgressHandler, ProgressRegistry=ProgressRegistry
        )
        self._set("comfy_execution.graph_utils", ExecutionBlocker=Blocker)
        self._set("comfy_execution.utils", get_executing_context=lambda: host.here)
        self._set("comfy.utils", load_torch_file=load_torch_file, ProgressBar=ProgressBar)
        self._set("comfy.lora", load_lora=load_lora)
        self._set("comfy.model_management", load_models_gpu=load_models_gpu, current_loaded_models=[])
        self._set("comfy.model_patcher", ModelPatcher=ModelPatcher)
        functions = {"get_area_and_mult": get_area_and_mult, "sampling_function": sampling_function}
        self._set("comfy.samplers", CFGGuider=CFGGuider, **functions)
        self._set("comfy.sd", VAE=VAE)
        self._set(
            "execution", PromptExecutor=PromptExecutor, execute=execute, get_output_data=get_output_data
        )

    def step_through(self, steps: int) -> None:
        """What a sampler tells of its steps."""
        bar = self.module("comfy.utils").ProgressBar(steps)
        for step in range(steps):
            bar.update_absolute(step + 1, steps)

    def _set(self, module: str, **names: Any) -> None:
        vars(self.modules[module]).update(names)

    def prompt(self, graph: Graph, prompt_id: str = "prompt-1", extra_data: Any = None) -> Any:
        """Validate, queue and run a graph to its end, and give the executor."""
        execution = self.module("execution")
        executor, queue = execution.PromptExecutor(), execution.PromptQueue()
        asyncio.run(execution.validate_prompt(prompt_id, graph, None))
        queue.put((1.0, prompt_id, graph, {}, []))
        asyncio.run(executor.execute_async(graph, prompt_id, extra_data or {}, []))
        self.told()
        queue.get_flags()
        return executor

    async def run_prompt(self, executor: Any, graph: Graph, prompt_id: str) -> None:
        dynprompt = DynPrompt(graph)
        self.registry = self.module("comfy_execution.progress").ProgressRegistry(prompt_id, dynprompt)
        cached = [node_id for node_id, node in graph.items() if (node_id, repr(node)) in self.cache]
        executor.status_messages = [("execution_cached", {"nodes": cached})]
        outputs: dict[str, Any] = {node_id: self.cache[node_id, repr(graph[node_id])] for node_id in cached}
        dynprompt.outputs = outputs  # type: ignore[attr-defined]
        waiting = [node_id for node_id in graph if node_id not in outputs]
        while waiting:
            node_id = waiting.pop(0)
            result, children, error = await self.module("execution").execute(
                None, dynprompt, None, node_id, {}, set(), prompt_id
            )
            if result is FAILURE:
                how = "execution_interrupted" if isinstance(error, Interrupted) else "execution_error"
                told = {"exception_type": type(error).__name__, "exception_message": str(error)}
                executor.status_messages.append(
                    (how, {"node_id": node_id, **(told if how == "execution_error" else {})})
                )
                return
            if result is PENDING:
                waiting = [*children, node_id, *waiting]

    async def execute(self, dynprompt: Any, node_id: str, prompt_id: str) -> Any:
        node, outputs = dynprompt.get_node(node_id), dynprompt.outputs
        kind = self.nodes[node["class_type"]]
        pending = outputs.pop(("pending", node_id), None)
        if pending is None:
            self.registry.tell("start_handler", node_id)
            inputs = {
                name: [outputs[value[0]][value[1]] if isinstance(value, list) and len(value) == 2 else value]
                for name, value in node["inputs"].items()
            }
            try:
                made, _, expands, waits = await self.module("execution").get_output_data(
                    prompt_id, node_id, kind, inputs
                )
            except Exception as error:  # noqa: BLE001 - as ComfyUI does
                return FAILURE, (), error
            if expands:
                children = {f"{node_id}.0.0.{name}": child for name, child in made["expand"].items()}
                dynprompt.graph.update(children)
                dynprompt.parents.update(dict.fromkeys(children, node_id))
                outputs["pending", node_id] = f"{node_id}.0.0.{made['last']}"
                return PENDING, tuple(children), None
            if waits:
                outputs["pending", node_id] = made[0]
                return PENDING, (), None
            outputs[node_id] = [values[0] for values in made]
        elif isinstance(pending, asyncio.Future):
            outputs[node_id] = list(await pending)
        else:
            outputs[node_id] = outputs[pending]
        self.cache[node_id, repr(node)] = outputs[node_id]
        self.registry.tell("finish_handler", node_id)
        return SUCCESS, (), None


class Node:
    """A node of the stand-in: what it gives, by kind, and the function that makes it."""

    def __init__(self, kinds: tuple[str, ...], run: Any) -> None:
        self.RETURN_TYPES, self.run = kinds, run


def latent(value: float | None = None) -> dict[str, torch.Tensor]:
    """A latent of random numbers, or of one number."""
    samples = torch.randn(1, 4, 8, 8) if value is None else torch.full((1, 4, 8, 8), value)
    return {"samples": samples}
